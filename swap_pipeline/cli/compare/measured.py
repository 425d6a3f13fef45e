"""A quantity measured under several seeds: mean, spread, and the difference to another method with the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

CONFIDENCE = 0.95
LEAST_FOR_INTERVAL = 3


@dataclass(frozen=True)
class Measured:
    """Values by seed."""

    values: Mapping[int, float]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None for a single value."""
        return statistics.stdev(self.values.values()) if self.n > 1 else None

    def minus(self, other: Measured) -> Measured:
        """Paired differences, for seeds that both have."""
        return Measured(
            {seed: value - other.values[seed] for seed, value in self.values.items() if seed in other.values}
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean, by Student's t; None for fewer than three values."""
        if self.mean is None or self.std is None or self.n < LEAST_FOR_INTERVAL:
            return None
        reach = student_t(CONFIDENCE, self.n - 1) * self.std / math.sqrt(self.n)
        return self.mean - reach, self.mean + reach


def student_t(confidence: float, degrees: int) -> float:
    """The t with P(|T| ≤ t) = confidence."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """P(|T| ≤ t), a finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
