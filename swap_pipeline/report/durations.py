"""Readable durations."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`9.5 s`, `12 min 05 s`, `3 h 55 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min"
