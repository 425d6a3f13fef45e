"""Running the experiments of a comparison: as many `dvc exp run` at a time as there are devices, shared stages once.

When DVC starts an experiment, it writes its params to the workspace for a moment, so starts happen one at a time and
are never interrupted. Results are named when they are complete, so a failure keeps the old ones.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from swap_pipeline.cli.compare.experiments import list_experiments, rename
from swap_pipeline.cli.compare.leftovers import MARK, UNFINISHED, clear_leftovers, forget_start, note_start
from swap_pipeline.cli.compare.wanted import Wanted
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import parse_params
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import share_of_phase1, share_of_worker
from swap_pipeline.launch.jobs import Machine
from swap_pipeline.report.durations import duration
from swap_pipeline.runtime.job_folder import scratch_root
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.runtime.progress import time_left

Say = Callable[[str], None]

_STAGE = re.compile(rb"^(?:Running stage|Stage) '(\w+)", re.MULTILINE)
_EPOCH = re.compile(rb"^phase[12][^:\n]*: epoch \d+/", re.MULTILINE)
_POLL_SECONDS = 0.2
_START_SECONDS = 120


def logs() -> Path:
    return scratch_root() / "compare"


@contextmanager
def only_one() -> Iterator[None]:
    """Allow one comparison at a time; first clear up after a killed one."""
    lock = Lock(logs() / "compare.lock")
    if not lock.try_acquire():
        raise SwapError(f"another `swap compare` is running here (process {lock.holder()}): wait for it, or stop it")
    try:
        clear_leftovers()
        yield
    finally:
        lock.release()


class Run:
    """`dvc exp run` of one experiment."""

    def __init__(self, wanted: Wanted, width: int) -> None:
        self.wanted = wanted
        self.width = width
        self.log = logs() / f"{wanted.name}.log"
        self.began = time.monotonic()
        # The environment's own Python, even if it is not activated.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        note_start()
        words = wanted.command(f"{UNFINISHED}{wanted.name}")[1:]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "dvc", "--wait-for-lock", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", MARK: str(Path.cwd())},
                start_new_session=True,  # Ctrl-C reaches it only through this process
            )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def stages(self) -> list[str]:
        """Stages that DVC has started so far; none while it is still setting up the experiment."""
        return [name.decode() for name in _STAGE.findall(self.log.read_bytes())]

    def is_starting(self) -> bool:
        return not self.is_over() and not self.stages()

    def epochs(self) -> int:
        return len(_EPOCH.findall(self.log.read_bytes()))

    def holds_back(self, other: Wanted) -> bool:
        """Whether the other one should wait, to reuse a stage that this one has yet to finish."""
        order = list(self.wanted.shared)
        reached = max((order.index(stage) for stage in self.stages() if stage in order), default=0)
        return any(self.wanted.shared[stage] == other.shared[stage] for stage in order[reached:])

    def last_words(self) -> str:
        """The error in the log if there is one, else its last line."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        errors = [line for line in lines if line.startswith(("error: ", "ERROR: "))]
        return next((line for line in [*errors, *reversed(lines)] if line), "no output")


def num_devices(params: Params, machine: Machine) -> int:
    """The most devices that an experiment can use at a time."""
    workers = len(params.workers.seeds) * share_of_worker(machine, shards=params.phase2.shards).num_devices
    phase1 = share_of_phase1(machine, shards=params.phase1.shards).num_devices
    return min(machine.num_devices, max(phase1, workers if params.phase2.epochs else 0))


def num_epochs(params: Params) -> int:
    return params.phase1.max_epochs + params.phase2.epochs * len(params.workers.seeds)


def run_experiments(
    waiting: Sequence[Wanted], *, machine: Machine, most_at_once: int | None, say: Say
) -> dict[str, str]:
    """Run them all; returns errors by name. After a signal, ends running ones and raises KeyboardInterrupt."""
    left, running, failures = list(waiting), list[Run](), dict[str, str]()
    params = {wanted.name: parse_params(wanted.params) for wanted in waiting}
    widths = {name: num_devices(one, machine) for name, one in params.items()}
    epochs = {name: num_epochs(one) for name, one in params.items()}
    began = time.monotonic()

    def progress() -> str:
        over = {wanted.name for wanted in waiting} - {one.name for one in (*left, *(run.wanted for run in running))}
        done = sum(epochs[name] for name in over)
        done += sum(min(run.epochs(), epochs[run.wanted.name]) for run in running)
        return f"{len(over)} of {len(waiting)} done{time_left(began, done, sum(epochs.values())) if done else ''}"

    with _display(say) as (say, draw), _interruptible():
        try:
            while left or running:
                for run in [run for run in running if run.is_over()]:
                    running.remove(run)
                    what = f"done in {duration(time.monotonic() - run.began)}"
                    if not _take_over(run.wanted.name):
                        failures[run.wanted.name] = f"{run.last_words()} (log: {run.log})"
                        what = f"failed: {failures[run.wanted.name]}"
                    say(f"{run.wanted.name}: {what} [{progress()}]")
                if not any(run.is_starting() for run in running):
                    forget_start()
                if (wanted := _next(left, running, widths, machine.num_devices, most_at_once)) is not None:
                    left.remove(wanted)
                    running.append(Run(wanted, widths[wanted.name]))
                    say(f"{wanted.name}: started")
                draw([progress(), *map(_state, running)])
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            deadline = time.monotonic() + _START_SECONDS
            while any(run.is_starting() for run in running) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            forget_start()
            clear_leftovers()
            raise
    return failures


def _next(
    left: Sequence[Wanted], running: Sequence[Run], widths: Mapping[str, int], devices: int, most: int | None
) -> Wanted | None:
    """The first for which there are devices and that needs to wait for no other."""
    if any(run.is_starting() for run in running) or (most is not None and len(running) >= most):
        return None
    free = devices - sum(run.width for run in running)
    return next(
        (
            wanted
            for wanted in left
            if widths[wanted.name] <= free and not any(run.holds_back(wanted) for run in running)
        ),
        None,
    )


def _take_over(name: str) -> bool:
    """Rename a complete experiment to its final name; returns whether there is one."""
    for experiment in list_experiments():
        if experiment.name == f"{UNFINISHED}{name}":
            rename(experiment, name)
            return True
    return False


def _state(run: Run) -> str:
    """Its stage, with that stage's last line."""
    stage = next(reversed(run.stages()), "starting")
    lines = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.startswith(stage) and ": " in line]
    return f"  {run.wanted.name}  {said[-1] if said else stage}"


@contextmanager
def _display(say: Say) -> Iterator[tuple[Say, Callable[[Sequence[str]], None]]]:
    """A function that prints a line, and one that draws what is running now, in a terminal only."""
    if not sys.stdout.isatty():
        yield say, lambda lines: None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, transient=True) as live:
        yield (
            lambda text: live.console.print(text, highlight=False, markup=False),
            lambda lines: live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True),
        )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
