"""The launcher's display of the jobs' progress.

In a terminal it draws bars from the ranks' progress files, elsewhere it prints the ranks' lines. It may run on another
machine than the ranks, as long as it sees the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from swap_pipeline.runtime.progress import PROGRESS_FILE

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STDOUT_FILE = "stdout.log"


@dataclass
class _Watched:
    folder: Path
    position: int = 0
    task: TaskID | None = None


@dataclass
class Display:
    """One bar per job in a terminal, plain lines elsewhere."""

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
        # Refreshed by the launcher's loop: no extra thread.
        self._bars = Progress(*columns, console=Console(file=self.stream), auto_refresh=False)
        with self._bars:
            yield
            self.refresh()

    def say(self, text: str) -> None:
        """Print a line from the launcher itself."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def watch(self, name: str, folder: Path) -> None:
        """Follow the job in `folder`, whose logs of earlier attempts must have been removed."""
        watched = _Watched(folder)
        if self._bars is not None:
            watched.task = self._bars.add_task(name, total=1.0, line="starting")
        self._watched[name] = watched

    def mark(self, name: str, text: str) -> None:
        """Show beside its bar what a job that has not started is waiting for."""
        watched = self._watched.get(name)
        if self._bars is None or watched is None or watched.task is None or (watched.folder / PROGRESS_FILE).exists():
            return
        self._bars.update(watched.task, line=text)

    def agrees(self, question: str) -> bool:
        """Ask a yes-or-no question; no, if there is no terminal."""
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
            # Name, bar, percentage and time come first; the line is cut to the rest.
            room = max(0, bars.console.width - max(len(name) for name in self._watched) - 46)
            bars.update(task, completed=state["amount"], total=state["total"], line=state["line"][:room])
        except (OSError, ValueError, KeyError):
            return  # not written yet

    def _new_lines(self, watched: _Watched) -> list[str]:
        """Complete lines that the ranks have printed since the last call."""
        try:
            with (watched.folder / STDOUT_FILE).open("rb") as log:
                log.seek(watched.position)
                new = log.read()
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        watched.position += len(whole)
        return whole.decode(errors="replace").splitlines()
