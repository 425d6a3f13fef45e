"""Times as people say them."""

from __future__ import annotations

import time


def duration(seconds: float) -> str:
    """`9.5 s`, `12 min 05 s`, `3 h 55 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min"


def roughly(seconds: float) -> str:
    """For people, and not more exact than an estimate is."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def time_left(began: float, done: int, total: int) -> str:
    """For the end of a line of progress, where all parts take about as long; `began` is by time.monotonic()."""
    return f", about {roughly((time.monotonic() - began) / done * (total - done))} left" if done < total else ""
