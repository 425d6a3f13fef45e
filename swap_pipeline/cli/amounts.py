"""Large numbers with SI prefixes."""

from __future__ import annotations

_POWERS = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def magnitude(number: float, unit: str = "") -> str:
    """Three digits and an SI prefix: `8.18 G`."""
    power = 0
    while number >= 999.5:
        number, power = number / 1000, power + 1
    digits = 0 if number >= 99.95 or not power else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {_POWERS[power]}{unit}".rstrip()


def in_bytes(number: float) -> str:
    """`1.05 GB`."""
    return magnitude(number, "B")
