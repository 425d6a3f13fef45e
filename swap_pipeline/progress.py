"""How far a job has come: written by its main rank, drawn by whoever waits for it.

The rank writes a small file, and prints a line at each epoch. The launcher draws bars from the files in a terminal and
passes the lines on elsewhere; it may run on another machine than the rank, as long as it sees the file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from swap_pipeline.files import atomic_write

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PROGRESS_FILE = "progress.json"
STDOUT_FILE = "stdout.log"


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


@dataclass
class _Watched:
    folder: Path
    position: int = 0
    task: TaskID | None = None


@dataclass
class Display:
    """The launcher's side: one bar a job in a terminal, plain lines elsewhere."""

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _bars: Progress | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self.stream.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
        )
        # Refreshed by hand: no thread runs beside the launcher's loop.
        self._bars = Progress(*columns, console=Console(file=self.stream), auto_refresh=False)
        with self._bars:
            yield
            self.refresh()

    def say(self, text: str) -> None:
        """A line from the launcher itself."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def watch(self, name: str, folder: Path) -> None:
        """Follow the job in `folder` from now on; logs of earlier attempts must be gone by now."""
        watched = _Watched(folder)
        if self._bars is not None:
            watched.task = self._bars.add_task(name, total=1.0, line="starting")
        self._watched[name] = watched

    def mark(self, name: str, text: str) -> None:
        """What a job that has not begun is waiting for; shown beside its bar."""
        watched = self._watched.get(name)
        if self._bars is None or watched is None or watched.task is None or (watched.folder / PROGRESS_FILE).exists():
            return
        self._bars.update(watched.task, line=text)

    def agrees(self, question: str) -> bool:
        """Whether somebody at the terminal says yes; no terminal, no yes."""
        if not (sys.stdin.isatty() and self.stream.isatty()):
            return False
        if self._bars is not None:
            self._bars.stop()
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False

    def refresh(self) -> None:
        for watched in self._watched.values():
            lines = self._new_lines(watched)
            if self._bars is not None and watched.task is not None:
                self._draw(self._bars, watched.folder, watched.task)
                for line in lines:
                    if line.startswith("warning: "):  # a bar shows the rest
                        self.say(line)
            elif lines:
                print(*lines, sep="\n", file=self.stream, flush=True)
        if self._bars is not None:
            self._bars.refresh()

    def _draw(self, bars: Progress, folder: Path, task: TaskID) -> None:
        try:
            state = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
            # Name, bar, percentage and time come first; of the rest, what fits.
            room = max(0, bars.console.width - max(len(name) for name in self._watched) - 46)
            bars.update(task, completed=state["amount"], total=state["total"], line=state["line"][:room])
        except (OSError, ValueError, KeyError):
            return  # not written yet

    def _new_lines(self, watched: _Watched) -> list[str]:
        """What the ranks have said since the last time, in whole lines."""
        try:
            with (watched.folder / STDOUT_FILE).open("rb") as log:
                log.seek(watched.position)
                new = log.read()
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        watched.position += len(whole)
        return whole.decode(errors="replace").splitlines()


def roughly(seconds: float) -> str:
    """For people, and not more exact than an estimate is."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def time_left(began: float, done: int, total: int) -> str:
    """For the end of a line of progress, where all parts take about as long; `began` is by time.monotonic()."""
    return f", about {roughly((time.monotonic() - began) / done * (total - done))} left" if done < total else ""
