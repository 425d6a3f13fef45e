"""Start-up: from the start of a rank to its first training step, against `import torch` alone; and what comes before.

`python -m stages.phase1` in a copy of this project with a tiny network, so that the first step itself takes next to no
time; how far it has come is seen from the files that it leaves: the log that the launcher opens for the rank just
before it starts it, and the progress file that the rank writes after its first step. With one process, which the
launcher starts directly, and with two ranks under torchrun: there a rank begins when torchrun has started, which
imports torch itself; the rank's start is the kernel's. `import torch` is measured in the same number of processes at
once.

`swap --help` is to answer in well under a second.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.children import environment
from benchmarks.harness import Sample, divided, interleaved
from benchmarks.made_up import Project, write_prepared
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared
from swap_pipeline.progress import PROGRESS_FILE, STDOUT_FILE

_POLL_SECONDS = 0.002


def measure(options: Options) -> Iterator[Row]:
    params: dict[str, Any] = {"model.width": 1, "phase1.batch_size": 8, "phase1.keep_epochs": [1]}
    params |= {"phase1.max_epochs": 1, "phase1.warmup_epochs": 0}
    project = Project.copy(options.scratch / "startup", params)
    write_prepared(project.root / "data" / "prepared", num_train=16, num_test=8, shape=(1, 28, 28))
    for ranks in (1, 2) if options.cores > 1 and not options.quick else (1,):
        launching: list[float] = []

        def start_of_rank(ranks: int = ranks, launching: list[float] = launching) -> float:
            before, after = _first_step(project, ranks)
            launching.append(before)
            return after

        found = interleaved(
            {"rank": start_of_rank, "import": functools.partial(_import_torch, ranks)},
            rounds=options.rounds,
            warm_up=options.sized(1, 0),
            say=options.say,
        )
        how = "1 process" if ranks == 1 else f"{ranks} ranks under torchrun"
        yield compared(
            f"startup/rank_{ranks}",
            f"start-up of a rank to its first training step, {how}",
            ours=("rank", found["rank"]),
            other=("import torch" + ("" if ranks == 1 else f", {ranks} at once"), found["import"]),
            unit="s",
            limit=Limit("≤", 2.0),
        )
        before = Sample(tuple(launching[-options.rounds :]))
        yield Row(
            name=f"startup/launcher_{ranks}",
            what=f"before that: the launcher{'' if ranks == 1 else ' and torchrun'}, {how}",
            ours="",
            other="import torch",
            unit="s",
            our_figures=before,
            other_figures=found["import"],
            # The limit is one of seconds.
            ratio=before,
            limit=Limit("≤", 1.0),
            note=""
            if ranks == 1
            else "Of two ranks, the time before they start is torchrun's for the most part, which imports torch.",
            more={"ratio_to_import": divided(before, found["import"]).as_json()},
        )
    yield _help(options)


def _help(options: Options) -> Row:
    # What the console script does: import the module, call main.
    script = "import sys; sys.argv = ['swap', '--help']; from swap_pipeline.cli import main; main()"
    commands = {"help": ["-c", script], "python": ["-c", "pass"]}

    def seconds(arguments: list[str]) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], env=environment(), capture_output=True, check=True)
        return time.perf_counter() - began

    found = interleaved(
        {name: functools.partial(seconds, arguments) for name, arguments in commands.items()},
        rounds=options.rounds,
        say=options.say,
    )
    return Row(
        name="startup/help",
        what="`swap --help`",
        ours="",
        other="python -c pass",
        unit="s",
        our_figures=found["help"],
        other_figures=found["python"],
        ratio=found["help"],
        limit=Limit("≤", 0.5),
        note="Of start-up's rows with a limit in seconds, the column of ratios has seconds.",
    )


def _import_torch(processes: int) -> float:
    """Seconds until so many Pythons that start at once have torch."""
    began = time.perf_counter()
    running = [
        subprocess.Popen([sys.executable, "-c", "import torch"], env=environment(threads=1)) for _ in range(processes)
    ]
    if any(process.wait() for process in running):
        raise RuntimeError("torch cannot be imported")
    return time.perf_counter() - began


def _first_step(project: Project, ranks: int) -> tuple[float, float]:
    """Seconds until a rank starts, and from there to the end of its first step."""
    project.forget_scratch("phase1")
    scratch = project.root / ".swap" / "phase1"
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "stages.phase1"],
        cwd=project.root,
        env=project.environment(SWAP_NPROC=str(ranks)),
        stdout=subprocess.DEVNULL,
    )
    rank_began = _when_there(scratch, STDOUT_FILE, launcher)
    first_step_ended = None
    while first_step_ended is None:
        if ranks > 1 and (started := _start_of_rank(launcher.pid)) is not None:
            rank_began = started
        if next(scratch.glob(f"*/{PROGRESS_FILE}"), None) is not None:
            first_step_ended = time.clock_gettime(time.CLOCK_BOOTTIME)
        _still_there(launcher)
        time.sleep(_POLL_SECONDS)
    if launcher.wait():
        raise RuntimeError(f"stages.phase1 ended with code {launcher.returncode}")
    return rank_began - began, first_step_ended - rank_began


def _when_there(folder: Path, name: str, process: subprocess.Popen[bytes]) -> float:
    while next(folder.glob(f"*/{name}"), None) is None:
        _still_there(process)
        time.sleep(_POLL_SECONDS)
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _still_there(process: subprocess.Popen[bytes]) -> None:
    if process.poll() not in (None, 0):
        raise RuntimeError(f"stages.phase1 ended with code {process.returncode}")


def _start_of_rank(launcher: int) -> float | None:
    """When the kernel started the first rank, a grandchild of the launcher, if there is one; on the boot clock."""
    for torchrun in _children(launcher):
        for rank in _children(torchrun):
            try:
                fields = Path(f"/proc/{rank}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                command = Path(f"/proc/{rank}/cmdline").read_bytes()
            except OSError:
                continue
            if b"stages.phase1" in command:
                return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None


def _children(process: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{process}/task").iterdir()
            for child in (task / "children").read_text(encoding="utf-8").split()
        ]
    except OSError:
        return []
