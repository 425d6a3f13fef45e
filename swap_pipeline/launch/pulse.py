"""Whether a process is at work or hangs: stopped, stuck on a dead disk, or waiting for what never comes.

Ranks of one job notice when another does not answer; a rank that is alone has nobody to notice. It hangs if it has
neither computed nor said anything for a long while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_LEAST_SHARE = 0.01
"""of a core; threads that only wait wake up now and then and take less"""
_LOOK_SECONDS = 1.0


class Pulse:
    """Of a process and all others of its session, and of the files that it writes while it works."""

    def __init__(self, session: int, files: Sequence[Path], *, limit_seconds: float) -> None:
        self._session = session
        self._files = files
        self._limit = limit_seconds
        self._since = self._looked = time.monotonic()
        self._signs = self._now()

    def is_lost(self) -> bool:
        """Whether there was no sign of life for as long as the limit; to be asked over and over."""
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
    """Of the living processes of a session and of their children that have ended; Linux alone can say so."""
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
