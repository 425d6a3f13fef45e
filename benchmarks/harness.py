"""Interleaved measurements: things that are compared take turns, so that a slow minute of the machine affects all.

A ratio is computed within each round, and the median, lowest and highest of the rounds are reported: times of different
minutes are never divided by each other.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Measurements of one thing, one per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": min(self.values), "high": max(self.values), "values": list(self.values)}


def interleaved(
    measures: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Sample]:
    """Call each in turn, `rounds` times, after `warm_up` rounds; returns what they return.

    Every other round goes backwards, so that nothing is always measured after the same neighbour.
    """
    names = list(measures)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        say("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        for name in names if number % 2 == 0 else names[::-1]:
            gc.collect()
            value = measures[name]()
            if number >= 0:
                found[name].append(value)
    return {name: Sample(tuple(values)) for name, values in found.items()}


def divided(above: Sample, below: Sample) -> Sample:
    """The ratio in each round."""
    return Sample(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Line:
    """How straight a line of points is."""

    slope: float
    offset: float
    r_squared: float
    """1 for a perfectly straight line"""
    last_slope: float
    """between the last two points, relative to the whole line's: more than 1 if it bends upwards"""


def straight(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The least-squares line through the points, and how well it fits."""
    slope, offset = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    spread = sum((y - mean) ** 2 for y in ys)
    error = sum((y - offset - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    last = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return Line(
        slope=slope,
        offset=offset,
        r_squared=1 - error / spread if spread else 1.0,
        last_slope=last / slope if slope else 1.0,
    )
