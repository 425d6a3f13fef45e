"""A job that is asked to end before it is done: its time is up, or its place is needed.

Slurm's batch script leaves a file in the job's folder, or Slurm itself sends SIGTERM. Training then ends after the step
that it is at and leaves a snapshot. All ranks have to end at the same step: the main rank decides for all, and tells
the others about once a second.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

STOPPABLE = "SWAP_STOPPABLE"
"""set where somebody starts the job again by himself; elsewhere, a signal ends it at once"""
STOP_FILE = "stop"
_SECONDS = 1.0


class Stopped(BaseException):
    """The state of the job is in a snapshot; not an error, so nothing that handles errors sees it."""


class StopRequest:
    """Whether this job is to end, for all ranks alike."""

    def __init__(self, folder: Path, *, of_main: Callable[[int], int]) -> None:
        """`of_main` gives all ranks the main rank's number."""
        self._path = folder / STOP_FILE
        self._of_main = of_main
        self._is_possible = STOPPABLE in os.environ
        self._was_signalled = False
        self._steps = self._left = 1
        self._began = time.monotonic()
        if self._is_possible:
            signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self._was_signalled = True

    def is_due(self) -> bool:
        """Asked after each step; the ranks talk only so often that it costs nothing."""
        if not self._is_possible:
            return False
        self._left -= 1
        if self._left == 0:
            self._steps = self._left = self._of_main(self._next_interval())
        return self._left == 0

    def _next_interval(self) -> int:
        """Steps until the next look, by how long the last ones took; 0: end now."""
        if self._was_signalled or self._path.exists():
            return 0
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        return max(1, min(1000, round(self._steps * _SECONDS / max(seconds, 1e-3))))
