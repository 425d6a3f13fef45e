"""The one SGD loop.

Phase 1, every worker of phase 2 and any baseline are calls of `train`; they differ in the `Run` they hand it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swap_pipeline.config.params import Augment, Compute, Optimizer
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.augmentation import check_augment
from swap_pipeline.data.epochs import batch_share, draw_epoch, steps_per_epoch
from swap_pipeline.data.images import Split
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.evaluation import evaluate
from swap_pipeline.engine.out_of_memory import is_out_of_memory, must_fit
from swap_pipeline.engine.placement import seed_torch, set_up
from swap_pipeline.engine.precision import Scaler, autocast
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.runtime.rank import quick_imports
from swap_pipeline.runtime.stop_request import Stopped, StopRequest
from swap_pipeline.training.moving_mean import MovingMean
from swap_pipeline.training.resuming import Begun, State, keep, resume
from swap_pipeline.training.run import Epoch, Record, Run, reason_to_stop
from swap_pipeline.training.sgd import FiniteGuard, Sgd
from swap_pipeline.training.shards import Shards


def train(
    run: Run,
    network: nn.Module,
    *,
    train_images: Split,
    test_images: Split,
    augment: Augment,
    optimizer: Optimizer,
    compute: Compute,
    group: Group,
    snapshots: Path,
    reporter: Reporter,
    num_classes: int | None = None,
    at_epoch_end: Callable[[int, nn.Module], None] = lambda epoch, network: None,
) -> Record:
    """Train `network` in place, from its present weights or from the newest snapshot in the folder `snapshots`.

    `at_epoch_end(epoch, network)` is called on the main rank with the network that would be the result after so many
    epochs, and once more for an epoch that is repeated after a kill.
    """
    _check(run, train_images, augment, group)
    set_up(network, compute, group)
    with autocast(compute.precision, group.device):
        shapes = {train_images.image_shape(run.view(epoch)) for epoch in range(run.epochs)}
        _try_out(network, shapes, num_classes, group)
    loop = _Loop(run, network, optimizer=optimizer, compute=compute, group=group)
    loop.wrap(train_images.image_shape(run.view(0)))
    curve, begun = resume(run, loop.state, snapshots, num_images=len(train_images))
    if curve or begun.step:
        after = f"epoch {len(curve)}" + (f" and {begun.step} steps" if begun.step else "")
        reporter.done(len(curve), f"resuming after {after}")
    stop = StopRequest(snapshots, of_main=group.number_of_main)

    while not (finished := reason_to_stop(run, curve)):
        epoch = len(curve)
        steps = Steps(run, epoch, train_images, augment=augment, compute=compute, group=group)
        done = loop.epoch(steps, begun, must_stop=stop.is_due, report=reporter.step)
        if isinstance(done, Begun):
            keep(run, snapshots, loop.state, curve, done)
            raise Stopped
        begun = Begun.new(group)
        test = evaluate(loop.result, test_images, group=group, precision=compute.precision, view=run.view(epoch))
        row = Epoch(
            epoch=epoch + 1,
            learning_rate=done.rate,
            train_loss=done.loss_sum / steps.num_images,
            train_accuracy=100 * done.hits / steps.num_images,
            test_loss=test.loss,
            test_accuracy=test.accuracy,
            test_top5=test.top5,
            seconds=done.seconds,
        )
        curve.append(row)
        if group.is_main:
            at_epoch_end(row.epoch, loop.result)
        keep(run, snapshots, loop.state, curve)
        reporter.done(row.epoch, _line(row, run))
        if not reason_to_stop(run, curve) and stop.is_due():  # with all done, only the result is left to be written
            raise Stopped
    if loop.state.mean is not None and curve:
        network.load_state_dict(loop.state.mean.network.state_dict())
    if curve:
        score = curve[-1].score
    else:
        score = evaluate(network, test_images, group=group, precision=compute.precision, view=run.view(0))
    return Record(curve=tuple(curve), stopped_by=finished, score=score)


class Steps:
    """The steps of one epoch: this rank's shards of each batch, and the learning rate."""

    def __init__(
        self, run: Run, epoch: int, images: Split, *, augment: Augment, compute: Compute, group: Group
    ) -> None:
        self.epoch, self.batch_size = epoch, run.batch_size(epoch)
        self.count = steps_per_epoch(len(images), self.batch_size)
        self.num_images = self.count * self.batch_size
        self._run, self._images, self._view = run, images, run.view(epoch)
        self._augment, self._compute, self._group = augment, compute, group

    def rate(self, step: int) -> float:
        return self._run.learning_rate(self.epoch + step / self.count)

    def batches(self, shards: range, *, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of these shards, step after step, from the step `first` on."""
        choices = draw_epoch(
            seed=self._run.seed,
            epoch=self.epoch,
            num_images=len(self._images),
            image_size=self._images.image_shape(self._view)[1:],
            augment=self._augment,
            device=self._group.device,
        )
        parts = [
            batch_share(step, batch_size=self.batch_size, shard=shard, num_shards=self._run.shards)
            for step in range(first, self.count)
            for shard in shards
        ]
        return self._images.batches(choices, parts, view=self._view, channels_last=self._compute.channels_last)


@dataclass(frozen=True, kw_only=True)
class EpochSums:
    """What an epoch's steps add up to, over all ranks."""

    loss_sum: float
    hits: float
    rate: float
    """of the last step"""
    seconds: float


class _Loop:
    """A network in training: SGD on the mean gradient over the shards of each batch."""

    def __init__(self, run: Run, network: nn.Module, *, optimizer: Optimizer, compute: Compute, group: Group) -> None:
        self._run, self._network, self._group = run, network, group
        self._compute, self._label_smoothing = compute, optimizer.label_smoothing
        self._scaler = Scaler(compute.precision, group.device)
        self._sgd = Sgd(network, optimizer, self._scaler)
        self._shards = Shards(network, run.shards, group)
        self._mean = None if run.ema_decay is None else MovingMean(network, run.ema_decay)
        self.state = State(network=network, sgd=self._sgd, shards=self._shards, mean=self._mean, group=group)
        self.guard = FiniteGuard(run, group.device, precision=self._scaler.precision, tolerance=self._scaler.tolerance)
        self._without_exchange: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._forward: Callable[..., torch.Tensor] = network

    def wrap(self, image_shape: tuple[int, ...]) -> None:
        """DDP where there are several ranks, and torch's compiler where it is wanted.

        What is compiled is a wrapper: the network itself, and with it the names in checkpoints, stay as they are. One
        static graph for each image size, so that a resumed run computes like one that was never stopped.
        """
        if self._group.world_size > 1:
            parallel = _parallel(self._network, image_shape, self._group)
            self._forward, self._without_exchange = parallel, parallel.no_sync
        if self._compute.compile:
            self._forward = torch.compile(self._forward, dynamic=False)

    @property
    def result(self) -> nn.Module:
        """The network to test and keep: the one that is trained, or the mean of its weights."""
        return self._network if self._mean is None else self._mean.network

    def epoch(
        self,
        steps: Steps,
        begun: Begun,
        *,
        must_stop: Callable[[], bool],
        report: Callable[[int, int, int], None],
    ) -> EpochSums | Begun:
        """Train for the rest of an epoch, or until it must stop; then returns how far it has come."""
        self._group.finish_queued_work()
        began, sums, rate = time.perf_counter() - begun.seconds, begun.sums, 0.0
        self._network.train()
        too_much = must_fit(
            f"{self._run.name}: {steps.batch_size // self._run.shards} images at a time on each device",
            remedy=f"raise {self._run.section}.shards, or lower {self._run.section}.batch_size",
        )
        with too_much:
            batches = steps.batches(self._shards.numbers, first=begun.step)
            for step in range(begun.step, steps.count):
                rate = steps.rate(step)
                self._step(steps.epoch, step, batches, rate, sums)
                report(steps.epoch, step, steps.count)
                if step + 1 < steps.count and must_stop():
                    self.guard.check()
                    self._group.finish_queued_work()
                    return Begun(step=step + 1, sums=sums, seconds=time.perf_counter() - began)
        self.guard.check()
        loss_sum, hits = self._group.sum(sums).tolist()
        self.guard.check_loss(steps.epoch, loss_sum)
        seconds = time.perf_counter() - began
        self._shards.mean_over_all()
        if self._mean is not None:
            self._mean.end_epoch(self._group)
        return EpochSums(loss_sum=loss_sum, hits=hits, rate=rate, seconds=seconds)

    def _step(
        self,
        epoch: int,
        step: int,
        batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
        rate: float,
        sums: torch.Tensor,
    ) -> None:
        """One step of SGD."""
        self._sgd.zero_grad()
        *others, last = self._shards.numbers
        for shard in others:
            with self._without_exchange():
                self._add_gradient(epoch, step, shard, next(batches), sums)
        self._add_gradient(epoch, step, last, next(batches), sums)
        self._sgd.step(rate, skip_if=self.guard.look(epoch, step, self._sgd.gradients()))
        if self._mean is not None:
            self._shards.mean_here()
            self._mean.update()

    def _add_gradient(
        self, epoch: int, step: int, shard: int, batch: tuple[torch.Tensor, torch.Tensor], sums: torch.Tensor
    ) -> None:
        """Forward and backward pass of one shard; its share of the mean gradient is added to what is there."""
        images, labels = batch
        # For dropout and the like: a function of the step, never of how often the process was started.
        seed_torch(derive_seed("step", self._run.seed, epoch, step, shard), self._group.device)
        with self._shards.as_in(shard), autocast(self._compute.precision, self._group.device):
            logits = self._forward(images)
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=self._label_smoothing)
        here = len(self._shards.numbers)
        self._scaler.scale(loss / here if here > 1 else loss).backward()
        with torch.no_grad():
            sums[0] += loss.detach() * len(labels)
            sums[1] += (logits.argmax(dim=1) == labels).sum()


def _line(row: Epoch, run: Run) -> str:
    return (
        f"epoch {row.epoch}/{run.epochs}  test {row.test_accuracy:.2f} %  train {row.train_accuracy:.2f} %  "
        f"loss {row.train_loss:.4f}  lr {row.learning_rate:.4f}  {row.seconds:.1f} s"
    )


def _check(run: Run, train_images: Split, augment: Augment, group: Group) -> None:
    """Refuse, before anything is computed, what would fail in one of the epochs."""
    if run.shards % group.world_size:
        raise SwapError(
            f"params.yaml: {run.section}.shards is {run.shards}, which {group.world_size} processes cannot share "
            f"equally: set --nproc-per-node to a number that divides it"
        )
    key = f"{run.section}.batch_size"
    for epoch in range(run.epochs):
        batch_size = run.batch_size(epoch)
        if steps_per_epoch(len(train_images), batch_size) == 0:
            raise SwapError(
                f"params.yaml: {key} is {batch_size}, more than the {len(train_images)} training images: lower it"
            )
        size = train_images.image_shape(run.view(epoch))[1:]
        check_augment(augment, size)


def _try_out(network: nn.Module, image_shapes: Set[tuple[int, ...]], num_classes: int | None, group: Group) -> None:
    """Find out with two blank images, before training, whether the network takes these sizes and tells all classes."""
    for shape in sorted(image_shapes):
        network.eval()
        try:
            with torch.no_grad():
                output = network(torch.zeros(2, *shape, device=group.device))
        except Exception as error:
            size, why = "×".join(map(str, shape[1:])), " ".join(str(error).split())
            if is_out_of_memory(error):
                raise SwapError(
                    f"two images of {size} pixels and the network of params.yaml (model) did not fit into memory: take "
                    f"a smaller network or image_size, or free the device of other processes"
                ) from None
            raise SwapError(
                f"the network of params.yaml (model) cannot take images of {size} pixels ({type(error).__name__}: "
                f"{why}): change image_size or model.options, or take another one"
            ) from None
        if num_classes is not None and getattr(output, "shape", None) != (2, num_classes):
            found = f"{output.shape[1]} values" if getattr(output, "ndim", 0) == 2 else f"{type(output).__name__}"
            raise SwapError(
                f"the network of params.yaml (model) gives {found} for each image, but the data has {num_classes} "
                f"classes: let it give one value for each class"
            )


def _check_that_all_learn(network: nn.Module, loss: torch.Tensor) -> None:
    """DDP waits for the gradient of every parameter."""
    loss.backward()
    idle = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise SwapError(
            f"the network of params.yaml (model) has parameters that nothing depends on ({', '.join(idle[:3])}"
            f"{' …' if len(idle) > 3 else ''}), which several processes cannot train: remove them, or SWAP_NPROC=1"
        )
    network.zero_grad(set_to_none=True)


def _parallel(network: nn.Module, image_shape: tuple[int, ...], group: Group) -> DistributedDataParallel:
    """DDP, with its gradient buckets in their final form.

    DDP regroups its buckets after the first backward pass, which changes the order of sums over more than two ranks.
    A pass is spent on that now, so that a resumed run adds up in the same order as one that was never stopped.
    """
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    blank = torch.zeros(2, *image_shape, device=group.device)
    network.train()
    _check_that_all_learn(network, network(blank).sum())
    with quick_imports():  # of torch's compiler, by DDP
        parallel = DistributedDataParallel(
            network,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
    parallel(blank).sum().backward()
    parallel.zero_grad(set_to_none=True)
    network.load_state_dict(before)
    return parallel
