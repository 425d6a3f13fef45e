"""How far a job has come, as its main rank tells it: a small file, and a line at each epoch."""

from __future__ import annotations

import json
import time
from pathlib import Path

from swap_pipeline.storage.files import atomic_write

PROGRESS_FILE = "progress.json"


class Reporter:
    """The rank's side; silent on all ranks but the main one."""

    def __init__(self, *, name: str, total: float, folder: Path | None, is_main: bool) -> None:
        self._name = name
        self._total = total
        self._path = folder / PROGRESS_FILE if folder and is_main else None
        self._is_main = is_main
        self._next = 0.0
        self._line = ""

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Called at every step; writes about twice a second."""
        if self._path is None or time.monotonic() < self._next:
            return
        self._write(epoch + (step + 1) / steps)

    def done(self, amount: float, line: str) -> None:
        """A piece of work is done that deserves a line."""
        if not self._is_main:
            return
        print(f"{self._name}: {line}", flush=True)
        self._line = line
        if self._path is not None:
            self._write(amount)

    def _write(self, amount: float) -> None:
        assert self._path is not None
        self._next = time.monotonic() + 0.5
        with atomic_write(self._path, durable=False) as file:
            file.write(json.dumps({"amount": amount, "total": self._total, "line": self._line}).encode())


def roughly(seconds: float) -> str:
    """For people, and not more exact than an estimate is."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def time_left(began: float, done: int, total: int) -> str:
    """For the end of a line of progress, where all parts take about as long; `began` is by time.monotonic()."""
    return f", about {roughly((time.monotonic() - began) / done * (total - done))} left" if done < total else ""
