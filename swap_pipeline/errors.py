"""The one kind of error that is meant for the person at the keyboard."""

from __future__ import annotations


class SwapError(ValueError):
    """Something the user can mend: its text names what is wrong, where, and what to do.

    Stages print it as a single line and leave with exit code 1; any other exception is a bug and keeps its traceback.
    """
