"""What a params file will do: steps, samples, FLOPs and bytes, by arithmetic alone.

Facts of data, network and devices come as plain objects, so a machine without GPUs can plan for 16 of them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from swap_pipeline.averaging.selection import num_passes
from swap_pipeline.cli.plan.exchanges import LocalEpochs, copies_on_a_rank, local_epochs, notes_on
from swap_pipeline.cli.plan.forks import ForksPlan, plan_forks
from swap_pipeline.config.copies import expected_bytes
from swap_pipeline.config.kept_models import models_of_cycles, models_to_keep
from swap_pipeline.config.params import Leaving, Params, Schedule
from swap_pipeline.config.schedules import PiecewiseLinear, Steps, by_epoch, learning_rate_of
from swap_pipeline.data.epochs import steps_per_epoch
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import Share
from swap_pipeline.runtime.environment import num_kept_epochs

Size = tuple[int, int]
"""height and width of an image in pixels"""

# With fewer images than this in a shard, batch norm's mean and variance are noisy.
_FEW_IMAGES = 16


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts of a data set, which need not be there yet."""

    name: str
    num_train: int
    """without those held back for validation"""
    num_validation: int = 0
    num_test: int
    num_classes: int
    channels: int
    size: Size | None
    """None: images are read from files and may have any size"""
    source: str | None
    """for people: where this was found; None: known by name"""
    copies: tuple[int, ...] = ()
    """shorter sides of the copies that are made of images in files"""

    @property
    def counts(self) -> dict[str, int]:
        """Images in each split."""
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}

    @property
    def copies_bytes(self) -> int:
        """About, on disk."""
        return expected_bytes(sum(self.counts.values()), self.copies)


PASSES = 3
"""cost of a training step in forward passes: backward costs two, for weights and for activations"""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """Facts of a network."""

    name: str
    num_parameters: int
    gradient_bytes: int
    """of the trainable parameters"""
    state_bytes: int
    """of parameters and buffers: the size of a checkpoint"""
    num_batch_norms: int
    flops: Mapping[Size, int]
    """of one image's forward pass: convolutions, matrix products and attention"""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices for the pipeline."""

    kind: str
    """`GPU` or `CPU core`"""
    count: int
    phase1: Share
    """of phases 1 and 3"""
    worker: Share
    max_workers: int | None
    """limit on workers of phase 2 that train at the same time, if any"""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of a run in which the learning rate is linear and everything else constant."""

    first_epoch: float
    last_epoch: float
    first_rate: float
    last_rate: float
    batch_size: int
    batch_per_shard: int
    image_size: Size
    steps: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run of the SGD loop, to its last epoch."""

    section: str
    processes: int
    devices: int
    epochs: int
    steps: int
    samples: int
    flops: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, kw_only=True)
class StatisticsPlan:
    """Phase 3: the mean of all models, then a forward pass over the training images for every mean that is tried.

    A single model is kept as it is, unless it is a mean of weights itself (`ema_decay`).
    """

    processes: int
    devices: int
    num_models: int
    """models to average"""
    passes: int
    """an upper limit if workers are selected"""
    batches: int
    samples: int
    samples_of_busiest: int
    """of the process with most batches (a batch is not split); over all passes, like the others"""
    flops: int
    image_size: Size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a params file will do on some devices."""

    data: DataFacts
    network: NetworkFacts
    devices: Devices
    phase1: RunPlan
    forks: ForksPlan
    worker: RunPlan
    """one of phase 2"""
    num_workers: int
    slots: int
    """workers that train at the same time"""
    rounds: int
    may_end_early: bool
    """whether phase 1, planned for all of its epochs, may end before"""
    phase3: StatisticsPlan
    memory_bytes: int
    """a device's weights, with their mean if there is one, gradients and the optimizer's state, without activations; in
    local SGD also weights and momentum of its shards, if it has several"""
    checkpoint_bytes: int
    num_checkpoints: int
    num_kept: int
    """models kept during training, for the analysis"""
    snapshot_bytes: int
    num_snapshots: int
    """of phase 1's course, which stay for other ways of leaving it"""
    local_epochs: tuple[LocalEpochs, ...]
    notes: tuple[str, ...]

    @property
    def flops(self) -> int:
        """Of all three phases."""
        tests = self.forks.tests * self.forks.flops
        return self.phase1.flops + tests + self.num_workers * self.worker.flops + self.phase3.flops


def image_sizes(params: Params, data: DataFacts) -> tuple[Size, ...]:
    """All image sizes, beginning with phase 1's first."""
    sides = (*_sides_of("phase1", params.phase1, data).values, *_sides_of("phase2", params.phase2, data).values)
    return tuple(dict.fromkeys(_square(side, data) for side in sides))


def make_plan(
    params: Params, *, data: DataFacts, network: NetworkFacts, devices: Devices, optimizer_bytes: int
) -> Plan:
    """Plan all phases; what cannot work is a `SwapError`."""
    phase1 = _plan_run(
        "phase1", params.phase1, epochs=params.phase1.max_epochs, share=devices.phase1, data=data, network=network
    )
    worker = _plan_run(
        "phase2",
        params.phase2,
        epochs=params.phase2.epochs,
        cycles=params.phase2.cycles,
        first_epoch=params.phase2.first_epoch,
        share=devices.worker,
        data=data,
        network=network,
    )
    forward, num_workers = network.flops[phase1.stretches[-1].image_size], len(params.workers.seeds)
    slots = min(devices.count // worker.devices, devices.max_workers or devices.count, num_workers)
    phase3 = _plan_statistics(
        batch_size=params.phase3.batch_size,
        num_models=num_workers * params.phase2.cycles,
        passes=num_passes(params) if network.num_batch_norms else 0,
        image_size=(worker.stretches or phase1.stretches)[-1].image_size,
        data=data,
        network=network,
        devices=devices,
    )
    mean_bytes = network.state_bytes if params.phase1.ema_decay or params.phase2.ema_decay else 0
    local = tuple(local_epochs(params.phase1, data.num_train, network.gradient_bytes, optimizer_bytes))
    num_copies = copies_on_a_rank(params.phase1, processes=phase1.processes) if local else 0
    return Plan(
        data=data,
        network=network,
        devices=devices,
        phase1=phase1,
        forks=plan_forks(params.phase1, data.counts, forward=forward, passes=PASSES, processes=phase1.processes),
        worker=worker,
        num_workers=num_workers,
        slots=slots,
        rounds=math.ceil(num_workers / slots),
        may_end_early=params.phase1.may_end_early,
        phase3=phase3,
        memory_bytes=network.state_bytes + (1 + num_copies) * (network.gradient_bytes + optimizer_bytes) + mean_bytes,
        checkpoint_bytes=network.state_bytes,
        num_checkpoints=1 + phase3.num_models + 1,
        num_kept=_num_kept(params),
        snapshot_bytes=network.state_bytes + optimizer_bytes + mean_bytes,
        num_snapshots=min(params.phase1.max_epochs, num_kept_epochs()),
        local_epochs=local,
        notes=(
            *_notes((phase1, worker), network, devices, num_workers=num_workers, slots=slots, leaving=params.phase1),
            *notes_on(local, processes=phase1.processes),
        ),
    )


def _num_kept(params: Params) -> int:
    phase1, phase2 = params.phase1, params.phase2
    of_phase1 = models_to_keep(phase1.keep_epochs, epochs=phase1.max_epochs)
    of_worker = models_to_keep(phase2.keep_epochs, epochs=phase2.epochs).keys()
    ends = models_of_cycles(epochs=phase2.epochs, cycles=phase2.cycles).keys()
    return len(of_phase1) + len(params.workers.seeds) * len(of_worker - ends)


def _plan_run(
    section: str,
    given: Schedule,
    *,
    epochs: int,
    cycles: int = 1,
    first_epoch: int = 0,
    share: Share,
    data: DataFacts,
    network: NetworkFacts,
) -> RunPlan:
    rate = learning_rate_of(given, epochs=epochs, cycles=cycles, first_epoch=first_epoch)
    batch_sizes = by_epoch(given.batch_size, first_epoch=first_epoch)
    sides = _sides_of(section, given, data, first_epoch=first_epoch)
    breaks = {0.0, float(epochs), *rate.epochs, *batch_sizes.epochs, *sides.epochs}
    inside = sorted(epoch for epoch in breaks if 0 <= epoch <= epochs)
    stretches = []
    for first, last in itertools.pairwise(inside):
        batch_size = batch_sizes(first)
        per_epoch = steps_per_epoch(data.num_train, batch_size)
        if per_epoch == 0:
            raise SwapError(
                f"{section}.batch_size is {batch_size}, more than the {data.num_train:,} training images: lower it"
            )
        steps = _steps_before(last, per_epoch) - _steps_before(first, per_epoch)
        stretches.append(
            Stretch(
                first_epoch=first,
                last_epoch=last,
                first_rate=rate(first),
                last_rate=_rate_towards(rate, last),
                batch_size=batch_size,
                batch_per_shard=batch_size // given.shards,
                image_size=_square(sides(first), data),
                steps=steps,
                samples=steps * batch_size,
            )
        )
    return RunPlan(
        section=section,
        processes=share.processes,
        devices=share.num_devices,
        epochs=epochs,
        steps=sum(stretch.steps for stretch in stretches),
        samples=sum(stretch.samples for stretch in stretches),
        flops=sum(PASSES * stretch.samples * network.flops[stretch.image_size] for stretch in stretches),
        stretches=tuple(stretches),
    )


def _sides_of(section: str, given: Schedule, data: DataFacts, *, first_epoch: int = 0) -> Steps[int]:
    """Image size in pixels by epoch, for images read from files; images in memory are not resized."""
    if data.size is None and given.image_size is None:
        raise SwapError(
            f"{section}.image_size is missing: images of {data.name} are read from files of any size, so set the size "
            f"to resize them to"
        )
    if data.size is not None and given.image_size is not None:
        raise SwapError(
            f"{section}.image_size has no effect on images in memory, {data.size[0]}×{data.size[1]} pixels: remove it "
            f"(and min_scale), or set data.max_gb_in_memory: 0 to read them from files"
        )
    return by_epoch(given.image_size or 0, first_epoch=first_epoch)


def _square(side: int, data: DataFacts) -> Size:
    return data.size or (side, side)


def _steps_before(epoch: float, per_epoch: int) -> int:
    """Steps that begin before this fractional epoch: step i of epoch e begins at e + i / per_epoch."""
    whole = math.floor(epoch)
    # Rounded, since 0.3 × 10 is a little more than 3.
    return whole * per_epoch + math.ceil(round((epoch - whole) * per_epoch, 6))


def _rate_towards(rate: PiecewiseLinear, epoch: float) -> float:
    """The learning rate just before `epoch`, where it may jump."""
    knot = bisect_left(rate.epochs, epoch)
    return rate.values[knot] if knot < len(rate.epochs) and rate.epochs[knot] == epoch else rate(epoch)


def _plan_statistics(
    *,
    batch_size: int,
    num_models: int,
    passes: int,
    image_size: Size,
    data: DataFacts,
    network: NetworkFacts,
    devices: Devices,
) -> StatisticsPlan:
    samples = data.num_train
    batches = math.ceil(samples / batch_size)
    if batches > 1 and samples % batch_size == 1:
        batches -= 1  # a single image has no variance, so it joins the previous batch
    return StatisticsPlan(
        processes=devices.phase1.processes,
        devices=devices.phase1.num_devices,
        num_models=num_models,
        passes=passes,
        batches=passes * batches,
        samples=passes * samples,
        samples_of_busiest=passes * min(samples, math.ceil(batches / devices.phase1.processes) * batch_size),
        flops=passes * samples * network.flops[image_size],
        image_size=image_size,
    )


def _notes(
    runs: tuple[RunPlan, ...],
    network: NetworkFacts,
    devices: Devices,
    *,
    num_workers: int,
    slots: int,
    leaving: Leaving,
) -> list[str]:
    notes = []
    if leaving.may_end_early:
        by_accuracy = f"after the first one whose training accuracy passes {leaving.stop_accuracy:g} %"
        when = by_accuracy if leaving.stop == "accuracy" else f"if phase1.stop ({leaving.stop}) says so"
        notes.append(f"phase 1 is planned for all of its epochs; it ends earlier, {when}")
    worker = runs[1]
    if worker.epochs and slots < num_workers:
        notes.append(
            f"only {slots} of {num_workers} workers can train at the same time: they take "
            f"{counted(math.ceil(num_workers / slots), 'round')}"
        )
    idle = devices.count - slots * worker.devices
    if worker.epochs and idle:
        notes.append(f"phase 2 leaves {idle} of {counted(devices.count, devices.kind)} idle")
    for run in runs if network.num_batch_norms else ():
        smallest = min((stretch.batch_per_shard for stretch in run.stretches), default=_FEW_IMAGES)
        if smallest < _FEW_IMAGES:
            notes.append(
                f"{run.section}: {counted(smallest, 'image')} per shard are few for batch norm, which normalises each "
                f"shard separately: use larger batches or fewer shards"
            )
    if not network.num_batch_norms:
        notes.append("the network has no batch norm: phase 3 only averages")
    return notes


def counted(count: int, thing: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
