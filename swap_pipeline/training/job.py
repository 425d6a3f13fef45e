"""A run of the SGD loop as a job: from prepared data to a result in its scratch folder."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.instances import worker as instance_of_worker
from swap_pipeline.config.params import Compute, IntByEpoch, Leaving, Optimizer, Phase2, Precision, Schedule
from swap_pipeline.config.schedules import by_epoch, learning_rate_of
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.evaluation import final_scores
from swap_pipeline.engine.opening import PreparedData, open_data, view_of_checkpoint
from swap_pipeline.engine.results import describe_model, write_result
from swap_pipeline.errors import SwapError
from swap_pipeline.models.networks import describe_network, load_pretrained, new_network
from swap_pipeline.models.starting import load_start
from swap_pipeline.runtime.environment import num_kept_epochs
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.runtime.rank import UNEXPECTED
from swap_pipeline.storage.tensor_files import TensorFile, UnreadableFileError, read_tensors, write_tensors
from swap_pipeline.storage.weights import load_weights
from swap_pipeline.training.checks import check_view
from swap_pipeline.training.keeping import Keeping
from swap_pipeline.training.loop import train
from swap_pipeline.training.run import Record, Run, TrainingData, as_prepared
from swap_pipeline.training.snapshots import drop_snapshots, epoch_of_newest_snapshot, spacing


def make_run(
    given: Schedule,
    *,
    name: str,
    section: str,
    seed: int,
    epochs: int,
    cycles: int = 1,
    first_epoch: int = 0,
    sync_steps: IntByEpoch = 1,
    leaving: Leaving = Leaving(),  # noqa: B008
    chance: str = "",
) -> Run:
    """A section of `params.yaml` as a run of the loop."""
    return Run(
        name=name,
        section=section,
        seed=seed,
        batch_size=by_epoch(given.batch_size, first_epoch=first_epoch),
        epochs=epochs,
        learning_rate=learning_rate_of(given, epochs=epochs, cycles=cycles, first_epoch=first_epoch),
        shards=given.shards,
        sync_steps=by_epoch(sync_steps),
        ema_decay=given.ema_decay,
        view=_view_of(given, first_epoch),
        leaving=leaving,
        chance=chance,
    )


def run_of_worker(phase: Phase2, *, worker: int, seed: int) -> Run:
    """Phase 2 of the worker with this seed of `workers.seeds`."""
    return make_run(
        phase,
        name=instance_of_worker(worker).name,
        section="phase2",
        seed=derive_seed("phase2", seed, worker),
        epochs=phase.epochs,
        cycles=phase.cycles,
        first_epoch=phase.first_epoch,
    )


def _view_of(given: Schedule, first_epoch: int) -> Callable[[float], View | None]:
    if given.image_size is None:
        return as_prepared
    size = by_epoch(given.image_size, first_epoch=first_epoch)
    scale = None if given.min_scale is None else by_epoch(given.min_scale, first_epoch=first_epoch)
    return lambda epoch: View(size=size(epoch), min_scale=None if scale is None else scale(epoch))


@contextlib.contextmanager
def _explained(compute: Compute) -> Iterator[None]:
    """Add advice to torch's error for an operation that is not deterministic on a GPU."""
    try:
        yield
    except RuntimeError as error:
        if not compute.deterministic or "deterministic" not in str(error):
            raise
        what = " ".join(str(error).split()).partition(". ")[0]
        raise SwapError(f"{what}: set compute.deterministic: false, or use another network") from None


def run_training_job(
    run: Run,
    *,
    start: int | Path,
    weights: Path | None = None,
    header: Mapping[str, Any],
    setting: Setting,
    optimizer: Optimizer,
    group: Group,
    folder: JobFolder,
    keep: Mapping[int, str] = MappingProxyType({}),
    averaged: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Run one rank of a training job that starts from a seed's weights or a checkpoint's.

    `weights` is a file of the user's that replaces a seed's, but for a last layer for other classes.
    `keep` names the models to keep on the way, by epoch; of these, `averaged` go into the average beside the last.
    """
    with folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        began = time.time()
        data = open_data(setting, group)
        check_view(run, data.meta)
        description = describe_network(setting.model, channels=data.meta.channels, num_classes=data.num_classes)
        network = _network_at(start, description, pretrained=setting.model.pretrained, weights=weights)
        run = _as_it_came(run, start)
        folder.check_inputs()
        if group.is_main:
            _repeat_what_was_lost(folder, keep, header)
        group.wait()

        info_after = functools.partial(_info_after, run, data, setting, description, header)

        def keep_model(epoch: int, network: nn.Module) -> None:
            if epoch in keep:
                write_tensors(folder.kept / keep[epoch], network.state_dict(), {**info_after(epoch), "epoch": epoch})

        keeping = Keeping(
            snapshots=folder.path,
            reporter=Reporter(name=run.name, total=run.epochs, folder=folder.path, is_main=group.is_main),
            stays=_epochs_that_stay(run, folder),
            held_out=data.held_out_name,
            at_epoch_end=keep_model,
        )
        with _explained(setting.compute):
            learned = _training_data(data, setting)
            record = train(
                run, network, learned, optimizer=optimizer, compute=setting.compute, group=group, keeping=keeping
            )
        past = {epoch: folder.kept / name for epoch, name in averaged.items()}
        models = _scores_of_models(network, record, past, run, data, precision=setting.compute.precision, group=group)
        if group.is_main:
            kept = _all_kept(folder, keep, header, epochs=len(record.curve))
            measured = {"split": data.held_out_name, "models": models}
            about = {**record.as_json(), **models[-1], **measured, **group.as_json(), "ran": [began, time.time()]}
            write_result(folder, network, info_after(len(record.curve)), about, kept=kept)
            if not folder.has_course:
                drop_snapshots(folder.path)


def _info_after(
    run: Run,
    data: PreparedData,
    setting: Setting,
    description: Mapping[str, Any],
    header: Mapping[str, Any],
    epoch: int,
) -> dict[str, Any]:
    """The header of the run's model after `epoch` epochs."""
    view = run.view(max(0, epoch - 1))
    shape, test_crop = data.train.image_shape(view), setting.augment.test_crop
    about = describe_model(description, data.meta, image_shape=shape, view=view, test_crop=test_crop)
    return {**about, **header, **({"ema_decay": run.ema_decay} if run.ema_decay else {})}


def _training_data(data: PreparedData, setting: Setting) -> TrainingData:
    return TrainingData(train=data.train, held_out=data.held_out, augment=setting.augment, num_classes=data.num_classes)


def _epochs_that_stay(run: Run, folder: JobFolder) -> Callable[[int], bool] | None:
    """Evenly spaced epochs of phase 1, whose snapshots are kept for other exits."""
    if not folder.has_course:
        return None
    every = spacing(epochs=run.epochs, at_most=num_kept_epochs())
    return lambda epoch: epoch % every == 0


def _scores_of_models(
    network: nn.Module,
    record: Record,
    past: Mapping[int, Path],
    run: Run,
    data: PreparedData,
    *,
    precision: Precision,
    group: Group,
) -> list[dict[str, float]]:
    """Scores of each model to average: those of `past` cycles by epoch, then `network`, the result."""

    def scores(model: nn.Module, epoch: int) -> dict[str, float]:
        held_out, view = record.curve[epoch - 1].score if epoch else record.score, run.view(max(0, epoch - 1))
        return final_scores(model, data, held_out, group=group, precision=precision, view=view)

    found = []
    if past:
        model = copy.deepcopy(network)
        for epoch, path in sorted(past.items()):
            load_weights(model, path)
            found.append(scores(model, epoch))
    return [*found, scores(network, len(record.curve))]


def _network_at(
    start: int | Path, description: Mapping[str, Any], *, pretrained: bool, weights: Path | None
) -> nn.Module:
    network = new_network(description, seed=start if isinstance(start, int) else 0)
    if isinstance(start, Path):
        load_weights(network, start)
    elif weights is not None:
        load_start(network, description, weights)
    elif pretrained:
        load_pretrained(network, description)
    return network


def _as_it_came(run: Run, start: int | Path) -> Run:
    """For a run without epochs, whose result is the checkpoint it starts from, take over its view and decay."""
    if isinstance(start, int) or run.epochs:
        return run
    view = view_of_checkpoint(start)
    return replace(run, ema_decay=TensorFile(start).info.get("ema_decay"), view=lambda epoch: view)


def _repeat_what_was_lost(folder: JobFolder, keep: Mapping[int, str], header: Mapping[str, Any]) -> None:
    """If a resumed run lacks models that it should have kept, let it resume from before the first of them."""
    done = epoch_of_newest_snapshot(folder.path)
    due = {epoch: name for epoch, name in keep.items() if epoch <= done}
    if lost := _first_lost(folder.kept, due, header):
        epoch, what = lost
        print(f"warning: {what}: training is repeated from before epoch {epoch}", flush=True)
        drop_snapshots(folder.path, from_epoch=epoch)


def _all_kept(folder: JobFolder, keep: Mapping[int, str], header: Mapping[str, Any], *, epochs: int) -> list[str]:
    """The kept models, which must all be there."""
    kept = {epoch: name for epoch, name in keep.items() if epoch <= epochs}
    if lost := _first_lost(folder.kept, kept, header):
        epoch, what = lost
        raise SwapError(f"{UNEXPECTED} loss: {what}: run `dvc repro`, which repeats it from before epoch {epoch}")
    return list(kept.values())


def _first_lost(kept: Path, names: Mapping[int, str], header: Mapping[str, Any]) -> tuple[int, str] | None:
    """The first epoch whose model is missing, damaged or another run's, and which of these."""
    for epoch, name in sorted(names.items()):
        path = kept / name
        if not path.exists():
            return epoch, f"{path} is missing"
        try:
            is_the_one = read_tensors(path)[1].items() >= {**header, "epoch": epoch}.items()
        except UnreadableFileError:
            raise  # the user has to fix the disk
        except SwapError:
            is_the_one = False
        if not is_the_one:
            return epoch, f"{path} is damaged or of another run"
    return None
