"""Learning rates as pure functions of the fractional epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


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
        return self.values[left] + share * (self.values[right] - self.values[left])


def warmup_then_decay(*, peak: float, warmup_epochs: float, epochs: float) -> PiecewiseLinear:
    """From 0 up to `peak` at `warmup_epochs`, then down to 0 at `epochs`; with no warm-up it starts at the peak."""
    return PiecewiseLinear((0, warmup_epochs, epochs), (0, peak, 0))
