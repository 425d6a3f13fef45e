"""Learning rate, batch size and image size as pure functions of the fractional epoch."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swap_pipeline.config.params import Phase1, Schedule

Value = TypeVar("Value")


@dataclass(frozen=True)
class PiecewiseLinear:
    """Straight lines between knots, constant outside them: `PiecewiseLinear((0, 5, 24), (0, 0.4, 0))(2.5) == 0.2`.

    Two knots at the same epoch make a jump; the later value holds from that epoch on.
    """

    epochs: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.epochs) == len(self.values) > 0
        assert list(self.epochs) == sorted(self.epochs)

    def __call__(self, epoch: float) -> float:
        right = bisect_right(self.epochs, epoch)
        if right == 0:
            return self.values[0]
        if right == len(self.epochs):
            return self.values[-1]
        left = right - 1
        share = (epoch - self.epochs[left]) / (self.epochs[right] - self.epochs[left])
        return self._between(share, self.values[left], self.values[right])

    def _between(self, share: float, first: float, last: float) -> float:
        return first + share * (last - first)

    def drawn(self) -> list[tuple[float, float]]:
        """Epochs and values that show the whole course if straight lines join them."""
        return list(zip(self.epochs, self.values, strict=True))


class CosineFall(PiecewiseLinear):
    """The same, but where it falls it does so along half a cosine wave."""

    def _between(self, share: float, first: float, last: float) -> float:
        if last < first:
            share = (1 - math.cos(math.pi * share)) / 2
        return super()._between(share, first, last)

    def drawn(self) -> list[tuple[float, float]]:
        points = super().drawn()
        for (first, high), (last, low) in itertools.pairwise(super().drawn()):
            if low < high and first < last:
                inside = [first + (last - first) * part / 32 for part in range(1, 32)]
                points += [(epoch, self(epoch)) for epoch in inside]
        return sorted(points, key=lambda point: point[0])  # keeps the two points of a jump in their order


def warmup_then_decay(*, peak: float, warmup_epochs: float, epochs: float, schedule: str = "linear") -> PiecewiseLinear:
    """From 0 up to `peak` at `warmup_epochs`, then down to 0 at `epochs`; with no warm-up it starts at the peak."""
    kind = CosineFall if schedule == "cosine" else PiecewiseLinear
    return kind((0, warmup_epochs, epochs), (0, peak, peak if schedule == "constant" else 0))


def learning_rate_of(given: Schedule, *, epochs: int, cycles: int = 1, first_epoch: int = 0) -> PiecewiseLinear:
    """The learning rate of a run whose epoch 0 is `first_epoch` in the knots."""
    if given.lr_knots is not None:
        return PiecewiseLinear(
            tuple(epoch - first_epoch for epoch, _ in given.lr_knots), tuple(rate for _, rate in given.lr_knots)
        )
    assert given.peak_lr is not None
    length = epochs / cycles
    # A run of 0 epochs may have a warm-up in its section: ignore it.
    warmup_epochs = min(given.warmup_epochs or 0, length)
    cycle = warmup_then_decay(peak=given.peak_lr, warmup_epochs=warmup_epochs, epochs=length, schedule=given.schedule)
    return type(cycle)(
        tuple(k * length + epoch for k in range(cycles) for epoch in cycle.epochs), tuple(cycle.values) * cycles
    )


def end_of_warmup(rate: Callable[[float], float], *, epochs: int) -> int:
    """The epoch at which the learning rate is at its highest."""
    return max(range(epochs), key=rate)


def num_fork_tests(given: Phase1) -> int:
    """At most: every `fork_every` epochs after the warm-up, but not after the last epoch."""
    if given.stop != "fork":
        return 0
    epochs = given.max_epochs
    return (epochs - 1 - end_of_warmup(learning_rate_of(given, epochs=epochs), epochs=epochs)) // given.fork_every


@dataclass(frozen=True)
class Steps(Generic[Value]):
    """Each value holds from its epoch on: `Steps((0, 13), (128, 224))(13) == 224`."""

    epochs: Sequence[float]
    values: Sequence[Value]

    def __call__(self, epoch: float) -> Value:
        return self.values[max(0, bisect_right(self.epochs, epoch) - 1)]


def by_epoch(given: Value | tuple[tuple[int, Value], ...], *, first_epoch: int = 0) -> Steps[Value]:
    """A value, or `[[epoch, value], …]`, as a function of the epochs of a run that starts at `first_epoch`."""
    if not isinstance(given, tuple):
        return Steps((0,), (given,))
    return Steps(tuple(epoch - first_epoch for epoch, _ in given), tuple(value for _, value in given))
