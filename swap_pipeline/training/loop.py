"""The one SGD loop: phases 1 and 2 of Algorithm 1.

Phase 1, every worker of phase 2 and any baseline are calls of `train`; they differ in the `Run` they hand it. Beside
the loop: `checks` before it, `parallel` for several ranks, `sgd` for the update and its guard, `keeping` for all else.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from swap_pipeline.config.params import Compute, Optimizer
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.epochs import batch_share, draw_epoch, steps_per_epoch
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.evaluation import Score, evaluate
from swap_pipeline.engine.loss import Tally, training_loss
from swap_pipeline.engine.noise import NoiseMeter
from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.engine.placement import seed_torch, set_up
from swap_pipeline.engine.precision import Scaler, autocast
from swap_pipeline.training.checks import check_run, try_out
from swap_pipeline.training.keeping import Keeper, Keeping
from swap_pipeline.training.leaving.forks import Forks
from swap_pipeline.training.leaving.rules import Exit, exit_now, lacks_test
from swap_pipeline.training.moving_mean import MovingMean
from swap_pipeline.training.optimizers.named import new_optimizer
from swap_pipeline.training.parallel import wrapped
from swap_pipeline.training.resuming import Begun, State, resume
from swap_pipeline.training.run import Epoch, Record, Run, TrainingData
from swap_pipeline.training.sgd import FiniteGuard, Sgd
from swap_pipeline.training.shards import LocalSteps, Shards

_Batch = tuple[torch.Tensor, torch.Tensor]


def train(
    run: Run,
    network: nn.Module,
    data: TrainingData,
    *,
    optimizer: Optimizer,
    compute: Compute,
    group: Group,
    keeping: Keeping,
) -> Record:
    """Train `network` in place, from its current weights or from the newest snapshot."""
    check_run(run, data, group)
    set_up(network, compute, group)
    try_out(network, run, data, precision=compute.precision, group=group)
    learner = _Learner(run, network, data, optimizer=optimizer, compute=compute, group=group)
    forks = _forks(run, data, keeping.snapshots, optimizer=optimizer, compute=compute, group=group)
    take_up = functools.partial(
        resume,
        run,
        learner.state,
        keeping.snapshots,
        num_images=len(data.train),
        deterministic=compute.deterministic,
    )
    curve, begun = take_up(tests=forks.tests) or ([], Begun.new(group))

    def test(epoch: int) -> Score:
        return evaluate(learner.result, data.held_out, group=group, precision=compute.precision, view=run.view(epoch))

    def end_now(keeper: Keeper) -> Exit | None:
        nonlocal begun
        while lacks_test(run, len(curve), forks.tests):
            keeping.reporter.done(len(curve), str(forks.test(len(curve), learner.result_to_train())))
            keeper.settle()
            if later := take_up(tests=forks.tests, after=len(curve)):  # of a run that another rule ended
                curve[:], begun = later
        return exit_now(run, curve, forks.tests)

    with Keeper(keeping, run, learner.state, curve, begun, num_images=len(data.train)) as keeper:
        while (end := end_now(keeper)) is None:  # phase 1: while training accuracy ≤ τ
            epoch = len(curve)
            done = learner.epoch(_Steps(run, epoch, data, compute=compute, group=group), begun, keeper.after_step)
            if isinstance(done, Begun):
                keeper.end_within_epoch(done)
            curve.append(done.tested(epoch + 1, test(epoch)))
            keeper.after_epoch(learner.result)
            begun = Begun.new(group)

    if learner.result is not network:
        network.load_state_dict(learner.result.state_dict())
    return Record(
        curve=tuple(curve),
        stopped_by=end.by,
        left=end.after(len(curve)),
        score=curve[-1].score if curve else test(0),
        forks=tuple(asdict(test) for test in forks.tests if test.epoch <= len(curve)),
    )


def _forks(
    run: Run, data: TrainingData, folder: Path, *, optimizer: Optimizer, compute: Compute, group: Group
) -> Forks:
    """Fork tests, which train with this loop, each fork on one rank."""
    alone, compute = replace(group, rank=0, world_size=1), replace(compute, compile=False)

    def refine(fork: Run, network: nn.Module) -> None:
        learner = _Learner(fork, network, data, optimizer=optimizer, compute=compute, group=alone)
        steps = _Steps(fork, 0, data, compute=compute, group=alone)
        learner.epoch(steps, Begun.new(alone), lambda epoch, step, num_steps: False)

    return Forks(run, data, folder, refine, precision=compute.precision, group=group)


class _Steps:
    """The steps of one epoch: this rank's shards of each batch, and the learning rate."""

    def __init__(self, run: Run, epoch: int, data: TrainingData, *, compute: Compute, group: Group) -> None:
        self.epoch, self.batch_size = epoch, run.batch_size(epoch)
        self.count = min(steps_per_epoch(len(data.train), self.batch_size), run.max_steps or sys.maxsize)
        self._run, self._data, self._view = run, data, run.view(epoch)
        self._compute, self._group = compute, group

    def learning_rate(self, step: int) -> float:
        return self._run.learning_rate(self.epoch + step / self.count)

    def batches(self, shards: range, *, first: int) -> Iterator[_Batch]:
        """The batches of these shards, step after step, from the step `first` on."""
        images = self._data.train
        choices = draw_epoch(
            seed=self._run.seed,
            epoch=self.epoch,
            num_images=len(images),
            image_size=images.image_shape(self._view)[1:],
            augment=self._data.augment,
            device=self._group.device,
        )
        parts = [
            batch_share(step, batch_size=self.batch_size, shard=shard, num_shards=self._run.shards)
            for step in range(first, self.count)
            for shard in shards
        ]
        return images.batches(choices, parts, view=self._view, channels_last=self._compute.channels_last)


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """The results of an epoch's steps, over all ranks."""

    learning_rate: float
    """of the last step"""
    train_loss: float
    train_accuracy: float
    noise_scale: float | None
    seconds: float

    def tested(self, epoch: int, score: Score) -> Epoch:
        return Epoch(epoch=epoch, **asdict(score), **asdict(self))


class _Learner:
    """A network in training: SGD on the mean gradient over the shards of each batch."""

    def __init__(
        self, run: Run, network: nn.Module, data: TrainingData, *, optimizer: Optimizer, compute: Compute, group: Group
    ) -> None:
        self._run, self._network, self._group = run, network, group
        self._label_smoothing = optimizer.label_smoothing
        self._scaler = Scaler(compute.precision, group.device)
        self._in_precision = autocast(self._scaler.precision, group.device)
        self._sgd = new_optimizer(network, optimizer, self._scaler)
        self._shards = Shards(dict(network.named_buffers()), run.shards, group)
        self._noise = NoiseMeter(network, self._scaler, num_shards=run.shards, world_size=group.world_size)
        self._mean = None if run.ema_decay is None else MovingMean(network, run.ema_decay)
        self.state = State(network=network, sgd=self._sgd, shards=self._shards, mean=self._mean, group=group)
        self._guard = FiniteGuard(run, group.device, precision=self._scaler.precision, tolerance=self._scaler.tolerance)
        shape = data.train.image_shape(run.view(0))
        self._forward = wrapped(network, shape, compiled=compute.compile, group=group)

    @property
    def result(self) -> nn.Module:
        """The network to evaluate and keep: the trained one, or the mean of its weights."""
        return self._network if self._mean is None else self._mean.network

    def result_to_train(self) -> nn.Module:
        """A copy to continue from, as phase 2 does."""
        network = copy.deepcopy(self._network)
        network.load_state_dict(self.result.state_dict())
        return network

    def epoch(self, steps: _Steps, begun: Begun, after_step: Callable[[int, int, int], bool]) -> _Trained | Begun:
        """Train for the rest of an epoch, or until `after_step` says to stop; then returns the progress within it."""
        self._group.finish_queued_work()
        began, tally = time.perf_counter() - begun.seconds, Tally(begun.sums)
        self._network.train()
        too_much = must_fit(
            f"{self._run.name}: {steps.batch_size // self._run.shards} images at a time on each device",
            remedy=self._run.if_too_large,
        )
        with too_much:
            local = self._local_steps(steps)
            batches = steps.batches(self._shards.numbers, first=begun.step)
            for step in range(begun.step, steps.count):
                if local is None:
                    self._step(steps, step, batches, tally, begun.squares)
                else:
                    self._local_step(steps, step, batches, tally, local)
                if after_step(steps.epoch, step, steps.count):
                    self._guard.check()
                    self._group.finish_queued_work()
                    seconds = time.perf_counter() - began
                    return replace(begun, step=step + 1, sums=tally.sums(), seconds=seconds)
        self._guard.check()
        loss_sum, hits, *squares = self._group.sum(torch.cat([tally.sums(), begun.squares])).tolist()
        self._guard.check_loss(steps.epoch, loss_sum)
        seconds = time.perf_counter() - began
        self._shards.mean_over_all()
        if self._mean is not None:
            self._mean.end_epoch(self._group)
        num_images = steps.count * steps.batch_size
        return _Trained(
            learning_rate=steps.learning_rate(steps.count - 1),
            train_loss=loss_sum / num_images,
            train_accuracy=100 * hits / num_images,
            noise_scale=self._noise.scale(squares, batch_size=steps.batch_size),
            seconds=seconds,
        )

    def _step(self, steps: _Steps, step: int, batches: Iterator[_Batch], tally: Tally, squares: torch.Tensor) -> None:
        """The body of Algorithm 1's loops: η, g and θ are the paper's."""
        rate = steps.learning_rate(step)  # η ← LR(t)
        self._sgd.zero_grad()
        *others, last = self._shards.numbers
        here = len(self._shards.numbers)
        with self._noise.listening(step, steps.count):
            for shard in others:  # g of this rank's shards; the ranks exchange theirs with the last one
                with self._forward.without_exchange():
                    self._add_gradient(steps.epoch, step, shard, next(batches), tally, mean_over=here)
            self._add_gradient(steps.epoch, step, last, next(batches), tally, mean_over=here)
        gradients = self._sgd.gradients()
        is_bad = self._guard.look(steps.epoch, step, gradients)
        self._noise.add(gradients, squares, unless=is_bad)
        self._sgd.step(rate, skip_if=is_bad)  # θ ← θ + SGDUpdate(η, g)
        if self._mean is not None:
            self._shards.mean_here()
            self._mean.update()

    def _local_steps(self, steps: _Steps) -> LocalSteps | None:
        every, shards = min(self._run.sync_steps(steps.epoch), steps.count), self._run.shards
        if every == 1:
            return None
        assert isinstance(self._sgd, Sgd)
        return LocalSteps(self._network, self._sgd, shards, every=every, group=self._group)

    def _local_step(self, steps: _Steps, step: int, batches: Iterator[_Batch], tally: Tally, local: LocalSteps) -> None:
        """The same where each shard moves weights of its own, until all of them take their mean."""
        rate = steps.learning_rate(step)
        for shard in self._shards.numbers:
            with local.as_in(shard), self._forward.without_exchange():
                self._sgd.zero_grad()
                self._add_gradient(steps.epoch, step, shard, next(batches), tally, mean_over=1)
                is_bad = local.flag(step, shard)
                self._guard.mark(is_bad, self._sgd.gradients())
                self._sgd.step(rate, skip_if=is_bad)
        if self._run.is_in_sync(steps.epoch, step, steps.count):
            num_steps = local.exchange(steps.epoch, step, self._guard)
            if self._mean is not None:
                self._shards.mean_here()
                self._mean.update(num_steps)

    def _add_gradient(self, epoch: int, step: int, shard: int, batch: _Batch, tally: Tally, *, mean_over: int) -> None:
        """Forward and backward pass of one shard; its share of the mean gradient is added to what is there."""
        images, labels = batch
        # For dropout and the like: a function of the step, never of how often the process was started.
        seed_torch(derive_seed("step", self._run.seed, epoch, step, shard), self._group.device)
        with self._shards.as_in(shard), self._in_precision:
            logits = self._forward.logits(images)
            loss = training_loss(logits, labels, label_smoothing=self._label_smoothing)
        self._scaler.scale(loss / mean_over if mean_over > 1 else loss).backward()
        tally.add(loss, logits, labels)
