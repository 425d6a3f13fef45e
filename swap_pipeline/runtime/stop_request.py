"""A request to stop a job before it is done: its time is up, or it is preempted.

Slurm's batch script leaves a file in the job's folder, or Slurm itself sends SIGTERM. Training then stops after the
current step and writes a snapshot. All ranks have to stop at the same step: the main rank decides for all, and informs
the others about once a second.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

STOPPABLE = "SWAP_STOPPABLE"
"""set if the job is restarted automatically; otherwise a signal ends it at once"""
STOP_FILE = "stop"
_SECONDS = 1.0


class Stopped(BaseException):
    """The job's state is in a snapshot; not an `Exception`, so error handlers do not catch it."""


class StopRequest:
    """Whether this job should stop, the same answer on all ranks."""

    def __init__(self, folder: Path, *, of_main: Callable[[int], int]) -> None:
        """`of_main` broadcasts the main rank's number to all ranks."""
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
        """Called after each step; the ranks communicate so rarely that it costs nothing."""
        if not self._is_possible:
            return False
        self._left -= 1
        if self._left == 0:
            self._steps = self._left = self._of_main(self._next_interval())
        return self._left == 0

    def _next_interval(self) -> int:
        """Steps until the next check, based on how long the last ones took; 0: stop now."""
        if self._was_signalled or self._path.exists():
            return 0
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        return max(1, min(1000, round(self._steps * _SECONDS / max(seconds, 1e-3))))
