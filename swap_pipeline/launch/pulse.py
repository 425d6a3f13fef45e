"""Whether a process is running or hangs: stopped, stuck on a dead disk, or waiting forever.

Ranks of one job notice when another does not answer; a single rank has nobody to notice. It counts as hung if it has
neither used the CPU nor written anything for a long while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_LEAST_SHARE = 0.01
"""of a core; waiting threads that wake up now and then use less"""
_LOOK_SECONDS = 1.0


class Pulse:
    """Signs of life: CPU time of all processes of a session, and the files that they write."""

    def __init__(self, session: int, files: Sequence[Path], *, limit_seconds: float) -> None:
        self._session = session
        self._files = files
        self._limit = limit_seconds
        self._since = self._looked = time.monotonic()
        self._signs = self._now()

    def is_lost(self) -> bool:
        """Whether there was no sign of life for as long as the limit; call it repeatedly."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK_SECONDS, self._limit / 4):
            return False
        self._looked = now
        (computed, written), (before, as_written) = self._now(), self._signs
        if written != as_written or computed - before > _LEAST_SHARE * (now - self._since):
            self._since, self._signs = now, (computed, written)
        return now - self._since >= self._limit

    def _now(self) -> tuple[float, list[int]]:
        return _cpu_seconds(self._session), [_changed(path) for path in self._files]


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _cpu_seconds(session: int) -> float:
    """Of the running processes of a session and their finished children (Linux only)."""
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
