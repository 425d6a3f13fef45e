"""Train and test error over planes in weight space, as a job.

At each point: batch-norm statistics from a pass over training images, then the errors. Each point is computed by one
rank, so its errors do not depend on the number of ranks. Finished points are saved, so that a killed job resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from swap_pipeline.analysis.landscape import LB, SWAP, Errors, Point, as_json, charts_of, points_of, worker
from swap_pipeline.analysis.planes import parameter_names, read_vector, set_parameters
from swap_pipeline.analysis.sample import SamePass, has_room, open_sample
from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.params import Phase3, Precision
from swap_pipeline.data.images import Split
from swap_pipeline.data.prepared import View, read_meta
from swap_pipeline.engine.batchnorm import batches_of_rank, recompute_statistics
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.loss import num_hits
from swap_pipeline.engine.opening import PREPARED, view_of_checkpoint
from swap_pipeline.engine.placement import set_up
from swap_pipeline.engine.precision import autocast
from swap_pipeline.engine.results import read_point, write_point
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.runtime.environment import eval_batch_size
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.progress import Reporter, time_left
from swap_pipeline.storage.files import write_json
from swap_pipeline.storage.weights import load_weights

# Interval at which points are saved, which limits what a kill can cost.
_SECONDS_A_PIECE = 1.0


class Prober:
    """Evaluates a network with any weights, on one device."""

    def __init__(
        self,
        network: nn.Module,
        *,
        statistics: Phase3,
        setting: Setting,
        view: View | None,
        train_images: int | Literal["all"],
        test_images: int | Literal["all"],
        group: Group,
        scratch: Path,
    ) -> None:
        self._network = network
        self._precision: Precision = setting.compute.precision
        self._alone = Group(rank=0, world_size=1, device=group.device)
        train, test = (
            open_sample(split, count, seed=setting.seed_of_statistics, setting=setting, group=group, scratch=scratch)
            for split, count in (("train", train_images), ("test", test_images))
        )
        self.num_train, self.num_test = len(train), len(test)
        keep = has_room([train, train, test], view=view, device=group.device)

        def plain(images: Split) -> SamePass[tuple[torch.Tensor, torch.Tensor]]:
            return SamePass(
                lambda: images.test_batches(batch_size=eval_batch_size(), rank=0, world_size=1, view=view), keep=keep
            )

        self._for_statistics = SamePass(
            lambda: batches_of_rank(
                train,
                batch_size=statistics.batch_size,
                seed=setting.seed_of_statistics,
                augment=setting.augment if statistics.augment else None,
                view=view,
                group=self._alone,
            ),
            keep=keep,
        )
        self._train, self._test = plain(train), plain(test)

    def errors(self, weights: torch.Tensor) -> Errors:
        began = time.perf_counter()
        set_parameters(self._network, weights)
        with autocast(self._precision, self._alone.device):
            recompute_statistics(self._network, self._for_statistics, group=self._alone)
        train = self._error(self._train, self.num_train)
        test = self._error(self._test, self.num_test)
        return Errors(train=train, test=test, seconds=time.perf_counter() - began)

    @torch.inference_mode()
    def _error(self, batches: SamePass[tuple[torch.Tensor, torch.Tensor]], num_images: int) -> float:
        self._network.eval()
        hits = torch.zeros((), dtype=torch.int64, device=self._alone.device)
        with autocast(self._precision, self._alone.device):
            for images, labels in batches:
                hits += num_hits(self._network(images), labels)
        return 100 * (num_images - int(hits)) / num_images


def run_landscape_job(
    *,
    lb: Path,
    workers: Mapping[int, Path],
    swap: Path,
    grid: int,
    margin: float,
    train_images: int | Literal["all"],
    test_images: int | Literal["all"],
    name: str,
    setting: Setting,
    statistics: Phase3,
    group: Group,
    folder: JobFolder,
) -> None:
    """Run one rank of a job that computes both landscapes; `workers` are phase 2's models by seed."""
    with folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        meta = read_meta(PREPARED)
        network = new_network(
            describe_network(setting.model, channels=meta.channels, num_classes=len(meta.classes)), seed=0
        )
        load_weights(network, swap)  # for buffers other than statistics
        set_up(network, setting.compute, group)
        folder.check_inputs()
        files = {LB: lb, **{worker(seed): path for seed, path in list(workers.items())[:3]}, SWAP: swap}
        names = parameter_names(network)
        models = {model: read_vector(path, names).to(group.device) for model, path in files.items()}
        charts, left_out = charts_of(models, seeds=list(workers), grid=grid, margin=margin)
        points = points_of(charts, models)
        prober = Prober(
            network,
            statistics=statistics,
            setting=setting,
            view=view_of_checkpoint(swap),
            train_images=train_images,
            test_images=test_images,
            group=group,
            scratch=folder.path,
        )
        reporter = Reporter(name=name, total=len(points), folder=folder.path, is_main=group.is_main)
        for entry in left_out:
            reporter.done(0, f"no landscape {entry['name']}: {entry['why']}")
        reporter.done(0, cost(len(points), prober.num_train, prober.num_test, group.world_size))
        found = probe_all(points, prober.errors, group=group, folder=folder, reporter=reporter)
        if group.is_main:
            with folder.complete() as result:
                record = {
                    "planes": [as_json(chart, found) for chart in charts],
                    "left_out": left_out,
                    "grid": grid,
                    "margin": margin,
                    "train_images": prober.num_train,
                    "test_images": prober.num_test,
                    "seconds": sum(errors.seconds for errors in found.values()) / group.world_size,
                    **group.as_json(),
                }
                write_json(result / "record.json", record)


def cost(num_points: int, num_train: int, num_test: int, world_size: int) -> str:
    """The amount of work, for the user."""
    images = num_points * (2 * num_train + num_test)
    ranks = "" if world_size == 1 else f", shared by {world_size} ranks"
    return (
        f"{num_points} points × 3 passes ({num_train:,} images for statistics, {num_train:,} for the training error, "
        f"{num_test:,} for the test error): {images:,} images forward{ranks}"
    )


def probe_all(
    points: Sequence[Point],
    errors_at: Callable[[torch.Tensor], Errors],
    *,
    group: Group,
    folder: JobFolder,
    reporter: Reporter,
) -> dict[str, Errors]:
    """The errors at all points; each rank computes its share, and saved points are reused."""
    numbers = {point.key: number for number, point in enumerate(points)}
    table = torch.zeros(len(points), 3, dtype=torch.float64)
    before = dict(_kept(folder.kept))
    group.wait()  # all ranks have read the saved points before one of them adds to them
    if group.is_main:
        for key, row in before.items():
            table[numbers[key]] = torch.tensor(row, dtype=torch.float64)
    pending = [point for point in points if point.key not in before]
    if before and pending:
        reporter.done(len(before), f"resuming after {len(before)} of {len(points)} points")
    clock = _Clock(len(before), len(points), reporter)
    piece: dict[str, list[float]] = {}
    last_piece = time.monotonic()
    for number, point in enumerate(pending[group.rank :: group.world_size], start=1):
        errors = errors_at(point.weights())
        piece[point.key] = [errors.train, errors.test, errors.seconds]
        table[numbers[point.key]] = torch.tensor(piece[point.key], dtype=torch.float64)
        if time.monotonic() >= last_piece + _SECONDS_A_PIECE:
            _keep(folder.kept, piece, numbers)
            piece, last_piece = {}, time.monotonic()
        clock.tick(min(number * group.world_size, len(pending)))
    if piece:
        _keep(folder.kept, piece, numbers)
    rows = group.sum(table.to(group.device)).tolist()
    reporter.done(len(points), f"{len(points)} points")
    return {
        point.key: Errors(train=train, test=test, seconds=seconds)
        for point, (train, test, seconds) in zip(points, rows, strict=True)
    }


def _keep(kept: Path, piece: Mapping[str, list[float]], numbers: Mapping[str, int]) -> None:
    # Named after its first point, which no other piece has.
    write_point(kept / f"points_{numbers[next(iter(piece))]:06d}.json", piece)


def _kept(kept: Path) -> Iterator[tuple[str, list[float]]]:
    for path in sorted(kept.glob("points_*.json")):
        yield from (read_point(path) or {}).items()


class _Clock:
    """Reports progress and the time left; less often when the work takes longer."""

    def __init__(self, before: int, total: int, reporter: Reporter) -> None:
        self._before, self._total, self._reporter = before, total, reporter
        self._began = self._last = time.monotonic()
        self._warm: tuple[int, float] | None = None

    def tick(self, done: int) -> None:
        """Called after each point; `done` are this run's points over all ranks."""
        now = time.monotonic()
        count = self._before + done
        if self._warm is None:
            self._warm = done, now  # the first point takes longer: allocations, choice of kernels
            return
        points, began = self._warm
        first = self._last == self._began and done > 2 * points
        if count < self._total and (first or now - self._last >= max(10.0, (now - self._began) / 10)):
            self._last = now
            since = done - points
            left = time_left(began, since, since + self._total - count)
            self._reporter.done(count, f"{count}/{self._total} points{left}")
        else:
            self._reporter.step(count - 1, 0, 1)
