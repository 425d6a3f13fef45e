"""The error type for messages meant for the user, and helpers that format values for them."""

from __future__ import annotations

import difflib
import reprlib
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class SwapError(ValueError):
    """Something the user can fix: the message says what is wrong, where, and what to do.

    Stages print it as a single line and exit with code 1. Unforeseen errors are handled by `last_resort`.
    """


class DamagedFileError(SwapError):
    """A file whose contents are not what was written to it."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = " ".join(reason.split())[:300]
        super().__init__(f"{path} is damaged ({self.reason}): delete it and run `dvc repro` (or `dvc checkout`)")


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlong = 40
        self.maxlist = self.maxdict = 6
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        # Python itself refuses to print numbers of more than 4,300 digits.
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()


def shown(value: Any) -> str:
    """The repr of a value from a user's file, short and on one line."""
    return _SHORT.repr(value)


def did_you_mean(name: Any, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """A hint after a misspelt name: the closest known names (for a mapping, their values).

    If none is close, `otherwise`; by default a list of all known names.
    """
    meant = known if isinstance(known, Mapping) else {each: each for each in known}
    by_lower = {each.lower(): meaning for each, meaning in meant.items()}
    if closest := [by_lower[match] for match in difflib.get_close_matches(str(name).lower(), by_lower)]:
        return f": did you mean {' or '.join(closest)}?"
    return f" (known: {', '.join(meant.values())})" if otherwise is None else otherwise


# Invisible marks that reverse the text direction: what follows them would read as something else.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
NEW_LINES = "\n\t"
"""kept in text that may have several lines"""
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")


def printable(text: str, *, keep: str = "") -> str:
    """Text from a user's file, safe for a terminal: control and other invisible characters are escaped as `\\x1b`."""
    return "".join(
        letter.encode("unicode_escape").decode()
        if letter not in keep and (letter in _DIRECTIONS or unicodedata.category(letter) in _UNSEEN)
        else letter
        for letter in text
    )
