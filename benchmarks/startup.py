"""Start-up: from the start of a rank to its first training step, against `import torch` alone; and what comes before.

`python -m stages.phase1` in a copy of this project with a tiny network, so that the first step itself takes hardly any
time, but with data of CIFAR-10's size, which the launcher and the ranks hash to identify the job. Progress is seen from
files: the log that the launcher opens just before it starts something, and the progress file that the rank writes after
its first step, when it is stopped. With one process, which the launcher starts directly, and with two ranks under
torchrun, which imports torch itself: its share is measured separately, and the rank's start is taken from the kernel.
`import torch` is measured in the same number of processes at a time, without Python's exit.

`swap --help` should answer in well under a second.

Learned: the first use of torch.optim.SGD imports torch's compiler, which took 1.6 s besides 1.9 s for torch itself
(minimum of 6, busy machine); a single process now calls the fused step directly and does not need the compiler. Under
torchrun DistributedDataParallel imports it too (for a setting in its constructor, and to exclude its forward pass from
compilation), so ranks there still pay for it: `startup/ddp_2` is the least that a program with DDP needs. Python's
garbage collector scans all modules repeatedly during imports: without it, torch and its compiler take 2.1 s of CPU time
instead of 2.6 s (two runs each, busy machine). Reading params.yaml and dvc.yaml takes 15 ms and 12 ms.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import environment
from benchmarks.harness import Sample, divided, interleaved
from benchmarks.made_up import Project, write_prepared
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared
from swap_pipeline.launch.display import STDOUT_FILE
from swap_pipeline.runtime.progress import PROGRESS_FILE

_POLL_SECONDS = 0.01


def measure(options: Options) -> Iterator[Row]:
    params: dict[str, Any] = {"model.width": 1, "phase1.batch_size": 8, "phase1.keep_epochs": [1]}
    params |= {"phase1.max_epochs": 1, "phase1.warmup_epochs": 0}
    project = Project.copy(options.scratch / "startup", params)
    num_train, num_test = options.sized(50_000, 500), options.sized(10_000, 100)
    write_prepared(project.root / "data" / "prepared", num_train=num_train, num_test=num_test)
    for ranks in (1, 2) if options.cores > 1 and not options.quick else (1,):
        starts: list[_Start] = []

        def start_of_rank(ranks: int = ranks, starts: list[_Start] = starts) -> float:
            starts.append(_first_step(project, ranks))
            return starts[-1].rank

        measures: dict[str, Callable[[], float]]
        measures = {"rank": start_of_rank, "import": functools.partial(import_torch_seconds, ranks)}
        if ranks > 1:
            measures["ddp"] = functools.partial(_least_ddp, ranks)
        found = interleaved(
            measures,
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
        before = Sample(tuple(start.launcher for start in starts[-options.rounds :]))
        yield Row(
            name=f"startup/launcher_{ranks}",
            what=f"before that: the launcher, {how}",
            ours="",
            other="import torch",
            unit="s",
            our_figures=before,
            other_figures=found["import"],
            # The limit is in seconds.
            ratio=before,
            limit=Limit("≤", 1.0),
            more={"ratio_to_import": divided(before, found["import"]).as_json()},
        )
        if ranks > 1:
            yield compared(
                f"startup/ddp_{ranks}",
                f"start-up of a rank to its first training step, {how}, against the least that needs DDP",
                ours=("rank", found["rank"]),
                other=(f"import torch, gradients of one layer under DDP, {ranks} at once", found["ddp"]),
                unit="s",
                more={"least_to_import": divided(found["ddp"], found["import"]).as_json()},
            )
            yield compared(
                f"startup/torchrun_{ranks}",
                f"between them: torchrun, {how}",
                ours=("torchrun", Sample(tuple(start.torchrun for start in starts[-options.rounds :]))),
                other=(f"import torch, {ranks} at once", found["import"]),
                unit="s",
            )
    yield _help(options)


def _help(options: Options) -> Row:
    # What the console script does: import the module, call main.
    script = "import sys; sys.argv = ['swap', '--help']; from swap_pipeline.cli.main import main; main()"
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


def import_torch_seconds(processes: int) -> float:
    """Seconds until that many Pythons, started together, have imported torch."""
    return _all_at_once("import os, torch; os._exit(0)", [{}] * processes)


def _least_ddp(ranks: int) -> float:
    """Seconds until that many ranks, started together, have gradients of one layer under DDP, and nothing else."""
    program = (
        "import os, torch; torch.distributed.init_process_group('gloo')\n"
        "network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "network(torch.ones(1, 1)).sum().backward(); os._exit(0)"
    )
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    return _all_at_once(program, [{**together, "RANK": str(rank)} for rank in range(ranks)])


def _all_at_once(program: str, settings: Sequence[dict[str, str]]) -> float:
    """Seconds until Pythons, one for each of these environments, have run a program and exited."""
    began = time.perf_counter()
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, env=environment(threads=1, more=own)) for own in settings]
    if sum(process.wait(timeout=600) for process in running):
        raise RuntimeError(f"this failed: {program}")
    return time.perf_counter() - began


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Seconds of each part of the start-up."""

    launcher: float
    """until it starts torchrun or the rank"""
    torchrun: float
    """until it starts the first rank"""
    rank: float
    """to the end of its first step"""


def _first_step(project: Project, ranks: int) -> _Start:
    project.forget_scratch("phase1")
    scratch = project.root / ".swap" / "phase1"
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "stages.phase1"],
        cwd=project.root,
        env=project.environment(SWAP_NPROC=str(ranks)),
        stdout=subprocess.DEVNULL,
    )
    try:
        launched = _when(lambda: _made(scratch, STDOUT_FILE), launcher)
        rank_began = launched if ranks == 1 else _when(lambda: _start_of_rank(launcher.pid), launcher)
        first_step_ended = _when(lambda: _made(scratch, PROGRESS_FILE), launcher)
    finally:
        launcher.terminate()  # which stops the ranks
        launcher.wait()
    return _Start(launcher=launched - began, torchrun=rank_began - launched, rank=first_step_ended - rank_began)


def _when(happened: Callable[[], float | None], launcher: subprocess.Popen[bytes]) -> float:
    """Poll until something has happened; returns when that was, on the boot clock."""
    while (moment := happened()) is None:
        if launcher.poll() is not None:
            raise RuntimeError(f"stages.phase1 ended with code {launcher.returncode}")
        time.sleep(_POLL_SECONDS)
    return moment


def _made(folder: Path, name: str) -> float | None:
    """The current time, if one of the jobs' folders has such a file."""
    made = next(folder.glob(f"*/{name}"), None) is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) if made else None


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
