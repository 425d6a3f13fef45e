"""The one kind of error that is meant for the person at the keyboard, and values as it shows them."""

from __future__ import annotations

import reprlib
from typing import Any


class SwapError(ValueError):
    """Something the user can mend: its text names what is wrong, where, and what to do.

    Stages print it as a single line and leave with exit code 1; any other exception is a bug and keeps its traceback.
    """


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlong = 40
        self.maxlist = self.maxdict = 6
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        # Python itself refuses to write out numbers of more than 4,300 digits.
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()


def shown(value: Any) -> str:
    """A value from somebody's file, as Python writes it: on one line and never long."""
    return _SHORT.repr(value)
