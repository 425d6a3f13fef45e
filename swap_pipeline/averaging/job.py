"""Averaging models as a job: the mean of their weights, new batch-norm statistics, and an evaluation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from swap_pipeline.averaging.mean import average_on_ranks, check_origin
from swap_pipeline.averaging.selection import select_greedily
from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.params import Phase3
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.batchnorm import batches_of_rank, recompute_statistics
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.evaluation import Score, evaluate, final_scores
from swap_pipeline.engine.opening import PreparedData, open_data, view_of_checkpoint
from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.engine.placement import set_up
from swap_pipeline.engine.precision import autocast
from swap_pipeline.engine.results import describe_model, read_point, write_point, write_result
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.progress import Reporter, time_left
from swap_pipeline.storage.tensor_files import TensorFile
from swap_pipeline.storage.weights import check_fits


@dataclass(frozen=True, kw_only=True)
class Averager:
    """Averages models and evaluates the mean, any number of times; holds the data and a network on this device."""

    setting: Setting
    statistics: Phase3
    group: Group
    data: PreparedData
    description: Mapping[str, Any]
    network: nn.Module

    @classmethod
    def open(cls, setting: Setting, statistics: Phase3, group: Group) -> Averager:
        data = open_data(setting, group)
        meta = data.meta
        description = describe_network(setting.model, channels=meta.channels, num_classes=len(meta.classes))
        return cls(
            setting=setting,
            statistics=statistics,
            group=group,
            data=data,
            description=description,
            network=new_network(description, seed=0),
        )

    def average(self, models: Sequence[Path], reporter: Reporter | None = None, *, done: int = 0) -> float:
        """Set `network` to the mean of `models`, with new statistics; returns the seconds.

        A single model keeps its statistics, unless it is a mean of weights itself (`ema_decay`).
        """
        if self.group.is_main:
            for path in models:
                check_origin(path, {"model": self.description, "classes": list(self.data.meta.classes)})
        check_fits(self.network, TensorFile(models[0]))
        self.group.wait()
        began = time.perf_counter()
        self.network.load_state_dict(average_on_ranks(models, self.group))
        set_up(self.network, self.setting.compute, self.group)
        if len(models) == 1 and "ema_decay" not in TensorFile(models[0]).info:
            words = ["a single model, kept as it is"]
        else:
            layers = self.recompute_statistics(view_of_checkpoint(models[-1]))
            statistics = f"statistics of {layers} batch-norm layers"
            words = [f"averaged {len(models)} models", statistics if layers else "no batch norm, so no statistics"]
        self.group.finish_queued_work()
        seconds = time.perf_counter() - began
        if reporter is not None:
            reporter.done(done + 2, ", ".join(words))
        return seconds

    def recompute_statistics(self, view: View | None) -> int:
        """From the training images, for the network's current weights; returns the number of batch-norm layers."""
        batches = batches_of_rank(
            self.data.train,
            batch_size=self.statistics.batch_size,
            seed=self.setting.seed_of_statistics,
            augment=self.setting.augment if self.statistics.augment else None,
            view=view,
            group=self.group,
        )
        too_much = must_fit(f"a batch of {self.statistics.batch_size} images", remedy="lower phase3.batch_size")
        with too_much, autocast(self.setting.compute.precision, self.group.device):
            return recompute_statistics(self.network, batches, group=self.group)

    def score(self, view: View | None) -> Score:
        """On the validation images, or on the test images if there are none."""
        precision = self.setting.compute.precision
        return evaluate(self.network, self.data.held_out, group=self.group, precision=precision, view=view)

    def final_scores(self, held_out: Score, view: View | None) -> dict[str, float]:
        precision = self.setting.compute.precision
        return final_scores(self.network, self.data, held_out, group=self.group, precision=precision, view=view)

    def about(self, view: View | None) -> dict[str, Any]:
        """The header of the average's file."""
        return describe_model(
            self.description,
            self.data.meta,
            image_shape=self.data.train.image_shape(view),
            view=view,
            test_crop=self.setting.augment.test_crop,
        )


def run_averaging_job(
    course: Mapping[str, Mapping[int, Sequence[Path]]],
    *,
    name: str,
    header: Mapping[str, Any],
    setting: Setting,
    statistics: Phase3,
    group: Group,
    folder: JobFolder,
) -> None:
    """Run one rank of a job that averages sets of models, given by label and worker; the last set's mean is the result.

    Workers are selected by their models in the last set. The record has each set's scores as `points`.
    """
    with folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        started = time.time()
        *_, (label, workers) = course.items()
        select = statistics.select == "greedy" and len(workers) > 1
        tries = 2 * len(workers) - 1 if select else 0
        reporter = Reporter(name=name, total=tries + len(course) + 2, folder=folder.path, is_main=group.is_main)
        averager = Averager.open(setting, statistics, group)
        folder.check_inputs()
        done = 0

        def measure(models: Mapping[str, Sequence[Path]]) -> list[dict[str, Any]]:
            nonlocal done
            points = measured_averages(models, averager, folder=folder, reporter=reporter, done=done)
            done += len(models)
            return points

        taken, tried = select_greedily(workers, measure, group) if select else (list(workers), [])
        seeds = sorted(taken)
        sets = {key: [path for seed in seeds for path in of[seed]] for key, of in course.items()}
        models = sets.pop(label)
        points = measure(sets)
        seconds = averager.average(models, reporter, done=done)
        seconds += sum(point["seconds"] for point in tried)
        view = view_of_checkpoint(models[-1])
        score = averager.score(view)
        scores = averager.final_scores(score, view)
        reporter.done(
            done + 3, f"test {scores['test_accuracy']:.2f} %  loss {scores['test_loss']:.4f}  {seconds:.1f} s"
        )
        if group.is_main:
            record = {
                "models": len(models),
                **({"taken": taken, "tried": tried} if select else {}),
                **scores,
                "split": averager.data.held_out_name,
                "points": [*points, {"label": label, "models": len(models), **score.as_json()}],
                "data": averager.data.as_json(),
                "seconds": seconds,
                **group.as_json(),
                "ran": [started, time.time()],
            }
            write_result(folder, averager.network, {**averager.about(view), **header, "seeds": seeds}, record)
            for number, point in enumerate(record["points"], start=1):
                reporter.log(number, point)


def measured_averages(
    models: Mapping[str, Sequence[Path]],
    averager: Averager,
    *,
    folder: JobFolder,
    reporter: Reporter,
    done: int = 0,
    final: bool = False,
) -> list[dict[str, Any]]:
    """Scores of the mean of each set of models, with its label; complete only on the main rank.

    Finished sets are saved, so that a killed job resumes with the next one. `done` is the progress so far. With
    `final`, means are final models and also evaluated on test images.
    """
    group = averager.group
    points: list[dict[str, Any]] = []
    began = time.monotonic()
    for number, (label, files) in enumerate(models.items(), start=1):
        kept = folder.kept / f"{label}.json"
        point = read_point(kept) if group.is_main else None
        if not group.main_says(point is not None):
            seconds, view = averager.average(files), view_of_checkpoint(files[-1])
            score = averager.score(view)
            point = {"label": label, "models": len(files), **score.as_json(), "seconds": seconds}
            if final:
                point |= averager.final_scores(score, view)
            if group.is_main:
                write_point(kept, point)
        if group.is_main and point is not None:
            points.append(point)
            split, accuracy, loss = averager.data.held_out_name, point["accuracy"], point["loss"]
            left = time_left(began, number, len(models))
            line = f"{number}/{len(models)}  {label}  {split} {accuracy:.2f} %  loss {loss:.4f}{left}"
            reporter.done(done + number, line)
    return points
