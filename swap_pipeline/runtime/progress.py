"""A job's progress, as its main rank reports it: a small file, a line per epoch, events for TensorBoard."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from swap_pipeline.runtime.environment import project_folder, writes_tensorboard
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
        self._writes_events = writes_tensorboard() and self._path is not None
        self._events: Any = None

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Called at every step; writes about twice a second."""
        if self._path is None or time.monotonic() < self._next:
            return
        self._write(epoch + (step + 1) / steps)

    def done(self, amount: float, line: str) -> None:
        """Print a line about a finished piece of work."""
        if not self._is_main:
            return
        print(f"{self._name}: {line}", flush=True)
        self._line = line
        if self._path is not None:
            self._write(amount)

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Write the floating-point numbers among these as TensorBoard events, if SWAP_TENSORBOARD is set."""
        if not self._writes_events:
            return
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            experiment = os.environ.get("DVC_EXP_NAME") or "workspace"
            folder = project_folder() / "tensorboard" / experiment / self._name.replace(" ", "_")
            if step == 1:  # of an earlier run
                shutil.rmtree(folder, ignore_errors=True)
            self._events = SummaryWriter(str(folder), purge_step=step)
        for name, value in numbers.items():
            if isinstance(value, float):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def _write(self, amount: float) -> None:
        assert self._path is not None
        self._next = time.monotonic() + 0.5
        with atomic_write(self._path, durable=False) as file:
            file.write(json.dumps({"amount": amount, "total": self._total, "line": self._line}).encode())


def time_left(began: float, done: int, total: int) -> str:
    """`, about 0:02:30 left`, if all parts take about equally long; `began` is from time.monotonic()."""
    if done >= total:
        return ""
    seconds = round((time.monotonic() - began) / done * (total - done))
    return f", about {timedelta(seconds=seconds)} left"
