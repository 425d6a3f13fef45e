"""python tests/chaos.py --seed 1

One fault after another, each at a random moment, into tiny runs of the real pipeline; then the same command once more,
undisturbed. The files must come out with the bytes of a run that nothing happened to, or the fault must have ended in
one line that says what to mend.

Every fault and moment follows from `--seed` and the number of the injection: `--first 37 --last 37` repeats the 37th
(as far as a machine's timing can be repeated).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import conftest
import numpy as np
from conftest import Project, make_project
from PIL import Image
from ruamel.yaml import YAML

SABOTAGE = Path(__file__).parent / "sabotage"
PARAMS = {
    "phase1.shards": 2,
    "phase1.max_epochs": 12,
    "phase1.keep_epochs": [4],
    "phase2.epochs": 12,
    "phase2.keep_epochs": [5],
    "workers.seeds": [0, 1],
}
IN_FILES = {
    "data.name": "imagefolder",
    "data.max_gb_in_memory": 0,
    "augment.padding": 0,
    "phase1.image_size": 20,
    "phase1.min_scale": 0.5,
    "phase2.image_size": 20,
    "phase2.min_scale": 0.5,
}
TWO_RANKS = {"SWAP_NPROC": "2"}
STAGES = {
    "phase1": ("stages.phase1",),
    "phase2": ("stages.phase2", "--seed", "0"),
    "phase3": ("stages.phase3",),
}
OUTPUTS = {
    "phase1": ("checkpoints/phase1", "metrics/phase1.json"),
    "phase2": ("checkpoints/phase2/seed_0", "metrics/phase2/seed_0.json"),
    "phase3": ("checkpoints/phase3", "metrics/phase3.json"),
}
EPOCHS = {"phase1": "max_epochs", "phase2": "epochs"}
CLOCKS = ("seconds", "ran")


class TooLateError(Exception):
    """The work was over before the fault could strike: not counted."""


class LostError(Exception):
    """The promise was broken."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a stage, or to a whole pipeline under DVC."""

    name: str
    stage: str | None = None
    """which it strikes; None: the pipeline under DVC"""
    strike: Callable[[Project, str, random.Random], None]
    damages: bool = False
    """whether it leaves a damaged file behind, for the next start to find"""
    images_in_files: bool = False
    """whether it strikes a project whose images are read from their files"""


# ---- processes


def processes_in(folder: Path) -> dict[int, str]:
    """Running processes of a folder by kind: dvc, launcher, torchrun, rank."""
    found = {}
    for pid in conftest.processes_in(folder):
        with contextlib.suppress(OSError):
            words, variables = (
                Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ")
            )
            found[pid] = _role(words, variables)
    return found


def _role(words: list[bytes], variables: list[bytes]) -> str:
    if b"swap_pipeline.launch.torchrun" in words:
        return "torchrun"
    if any(word.startswith(b"stages.") for word in words):
        return "rank" if any(entry.startswith(b"RANK=") for entry in variables) else "launcher"
    return "dvc" if any(word.endswith(b"/dvc") for word in words) else "other"


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise LostError(f"{what} did not come in {seconds:g} s")
        time.sleep(0.01)
    return value


class Running:
    """A command running in a project, in its own process group."""

    def __init__(self, project: Project, *command: str, limit: int | None = None, **environment: str) -> None:
        self.project = project
        self._log = project.root / "chaos.log"

        def before() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where this runs in the background
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=project.root,
                env=project.full_environment(environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def until(self, moment: Callable[[], Any]) -> Any:
        """Wait for a moment of the work; too late if it is over before."""

        def came() -> Any:
            value = moment()
            if not value and self.is_over():
                raise TooLateError
            return value

        return wait_for(came, "the moment of the fault")

    def find(self, *roles: str) -> list[int]:
        return [pid for pid, role in processes_in(self.project.root).items() if role in roles]

    def kill(self, pids: list[int], number: int = signal.SIGKILL) -> None:
        if not pids or self.is_over():
            raise TooLateError
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_group(self, number: int) -> None:
        """As a terminal does, or a batch system: the command and what it started, apart from sessions of their own."""
        if self.is_over():
            raise TooLateError
        os.killpg(self.process.pid, number)

    def end(self, seconds: float = 180) -> int:
        return self.process.wait(timeout=seconds)


def random_moment(project: Project, stage: str, rng: random.Random) -> Callable[[], bool]:
    """Some time during the start, or at some share of the work."""
    if rng.random() < 0.2:
        due = time.monotonic() + rng.uniform(0.2, 4.0)
        return lambda: time.monotonic() > due
    share, delay = rng.random(), rng.uniform(0, 0.1)

    def came() -> bool:
        if stage != "any" and progress(project, stage) < share:
            return False
        if stage == "any" and sum(progress(project, name) for name in STAGES) < 3 * share:
            return False
        time.sleep(delay)
        return True

    return came


def progress(project: Project, stage: str) -> float:
    """How far the newest job of a stage has come, from 0 to 1."""
    states = []
    for path in (project.root / ".swap" / stage).glob("*/progress.json"):
        try:
            state = json.loads(path.read_text())
            states.append(state["amount"] / state["total"])
        except (OSError, ValueError):
            continue
    return max(states, default=0.0)


# ---- what must hold


def contents(project: Project, paths: tuple[str, ...]) -> dict[str, Any]:
    """Files as bytes, records without their clocks."""
    found: dict[str, Any] = {}
    for path in paths:
        place = project.root / path
        files = [path for path in sorted(place.rglob("*")) if path.is_file()] if place.is_dir() else [place]
        for file in files:
            name = str(file.relative_to(project.root))
            found[name] = without_clocks(json.loads(file.read_text())) if file.suffix == ".json" else file.read_bytes()
    return found


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_clocks(entry) for key, entry in value.items() if not any(clock in key for clock in CLOCKS)}
    return [without_clocks(entry) for entry in value] if isinstance(value, list) else value


def bytes_that_differ(found: dict[str, Any], expected: dict[str, Any]) -> int:
    lost = 0
    for name in found.keys() | expected.keys():
        one, other = found.get(name), expected.get(name)
        if one != other:
            lost += len(other) if isinstance(other, bytes) else len(json.dumps(other))
    return lost


def check_no_half_files(project: Project) -> None:
    """Under its final name a file is whole."""
    from swap_pipeline.storage.tensor_files import read_tensors

    walks = (os.walk(project.root / folder) for folder in ("checkpoints", ".swap", "metrics"))
    for path in (Path(place, name) for walk in walks for place, _, names in walk for name in names):
        with contextlib.suppress(FileNotFoundError):  # a launcher whose `dvc` was killed may still be running
            if path.suffix == ".safetensors":
                read_tensors(path)
            elif path.suffix == ".json" and path.name != "progress.json":
                json.loads(path.read_text())


def check_swept(project: Project) -> None:
    left = [path for folder in (".swap", "checkpoints") for path in (project.root / folder).rglob(".*.tmp")]
    if left:
        raise LostError(f"left behind: {left}")


def check_one_line(run: Running, *words: str) -> None:
    """The error is one line for people, not a traceback."""
    lines = [line for line in run.output.splitlines() if line.startswith("error: ")]
    if len(lines) != 1 or "Traceback" in run.output or not all(word in lines[0] for word in words):
        raise LostError(f"not one line with {words}:\n{run.output}")


# ---- faults of single stages


def killed(*roles: str, one: bool = False) -> Callable[..., None]:
    """Kill those processes of a stage at a random moment, all of them or one."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        run = start(project, stage)
        run.until(random_moment(project, stage, rng))
        pids = run.find(*roles)
        run.kill([rng.choice(pids)] if one and pids else pids)
        code = run.end()
        wait_for(lambda: not processes_in(project.root), "the end of all processes", 60)
        if "Traceback" in run.output or (code != 0 and roles == ("rank",)):
            raise LostError(f"exit code {code}, although what was killed is started once more\n{run.output}")

    return strike


def asked_to_end(number: int) -> Callable[..., None]:
    """SIGINT or SIGTERM for the group: a short message, the usual exit code, and the snapshots stay."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        run = start(project, stage)
        run.until(random_moment(project, stage, rng))
        had_begun = progress(project, stage) >= 1 / PARAMS[f"{stage}.{EPOCHS[stage]}"]
        run.signal_group(number)
        code = run.end()
        wait_for(lambda: not processes_in(project.root), "the end of all processes", 60)
        if code == -number and not run.output:
            raise TooLateError  # Python itself had not started yet
        if code != 128 + number or "Traceback" in run.output or "interrupted: `dvc repro`" not in run.output:
            raise LostError(f"exit code {code}\n{run.output}")
        scratch = project.root / ".swap" / stage
        if had_begun and not any(scratch.glob("*/snapshot_*")) and not any(scratch.glob("*/result*")):
            raise LostError(f"neither snapshot nor result was kept\n{run.output}")

    return strike


def killed_while_writing() -> Callable[..., None]:
    """Kill everything while a file is half written."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        run = start(project, stage, SWAP_CHAOS=json.dumps({"slow_writes": 0.004}), PYTHONPATH=str(SABOTAGE))
        skip = rng.randrange(0, 30 if stage != "phase3" else 2)
        seen: set[str] = set()

        def half_written() -> bool:
            for path in (project.root / ".swap" / stage).rglob(".*safetensors*.tmp"):
                try:
                    if path.stat().st_size:
                        seen.add(f"{path}{path.stat().st_ino}")
                except OSError:
                    continue
            return len(seen) > skip

        run.until(half_written)
        time.sleep(rng.uniform(0, 0.02))
        run.kill(list(processes_in(project.root)))
        run.end()
        wait_for(lambda: not processes_in(project.root), "the end of all processes", 60)

    return strike


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A separate file system mounted on a folder during the block."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder), "size=64k"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def disk_full() -> Callable[..., None]:
    """Scratch has room for a part of the snapshots and checkpoints only."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        scratch = project.root / ".swap"
        with small_disk(scratch, f"size={4 * rng.randrange(4, 40)}k"):
            run = start(project, stage)
            if run.end() == 0:
                raise TooLateError
            check_one_line(run, "no space")
            check_no_half_files(project)
            if rng.random() < 0.5:  # space is freed, and the job resumes
                subprocess.run(["mount", "-o", "remount,size=64m", str(scratch)], check=True)
                project.run(sys.executable, "-m", *STAGES[stage])
                check_swept(project)

    return strike


def disk_full_of_records(project: Project, stage: str, rng: random.Random) -> None:
    """No room where the record is put, with the curve in it."""
    folder = project.root / "metrics"
    kept = contents(project, ("metrics",))
    with small_disk(folder, "size=8k"):
        (folder / "filler").write_bytes(b"x" * 8192)
        run = start(project, stage)
        if run.end() == 0:
            raise LostError("it wrote on a full disk")
        check_one_line(run, "no space")
        if [path.name for path in folder.rglob("*") if path.is_file()] != ["filler"]:
            raise LostError(f"left behind: {list(folder.rglob('*'))}")
    assert contents(project, ("metrics",)) == kept


def file_too_large() -> Callable[..., None]:
    def strike(project: Project, stage: str, rng: random.Random) -> None:
        run = start(project, stage, limit=rng.randrange(2_000, 12_000))
        if run.end() == 0:
            raise TooLateError
        check_one_line(run, "beyond the size limit")

    return strike


def read_only_scratch(project: Project, stage: str, rng: random.Random) -> None:
    with small_disk(project.root / ".swap", "ro,size=1m"):
        run = start(project, stage)
        if run.end() == 0:
            raise LostError("it wrote on a disk that cannot be written")
        check_one_line(run, "cannot be used")


def hanging_rank(project: Project, stage: str, rng: random.Random) -> None:
    """A rank stops for ever; the others give up after a while, and the error names it."""
    run = start(project, stage, SWAP_TIMEOUT_MINUTES="0.1", SWAP_RETRIES="0")
    run.until(random_moment(project, stage, rng))
    ranks = {pid: int(re.search(rb"\0RANK=(\d+)", environ(pid))[1]) for pid in run.find("rank")}  # type: ignore[index]
    if len(ranks) < (2 if stage == "phase1" else 1) or progress(project, stage) == 0:
        raise TooLateError
    pid = rng.choice(sorted(ranks))
    run.kill([pid], signal.SIGSTOP)
    code = run.end()
    wait_for(lambda: not processes_in(project.root), "the end of all processes", 60)
    if code == 0:
        return  # it had left its result, and had only to be ended
    check_one_line(run, f"rank {ranks[pid]} did not answer for 0.1 minutes")


def environ(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        raise TooLateError from None


def not_finite(ranks: int) -> Callable[..., None]:
    """The loss of one rank is spoiled: all stop together, and nothing is written."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        spoiled = {"rank": rng.randrange(ranks), "step": rng.randrange(1, 60)}
        run = start(project, stage, SWAP_CHAOS=json.dumps({"spoil": spoiled}), PYTHONPATH=str(SABOTAGE))
        if run.end() == 0:
            raise LostError("it trained on")
        check_one_line(run, "not finite at epoch", "step", f"{stage}.peak_lr")
        if any((project.root / OUTPUTS[stage][0]).rglob("model.safetensors")):
            raise LostError("a checkpoint was written")

    return strike


def kept_harmed(harm: Callable[[Path], object]) -> Callable[..., None]:
    """Kill a stage that has kept a model on the way, and harm that model before the next start."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        run = start(project, stage)
        models = (project.root / ".swap" / stage).glob
        run.until(lambda: any(models("*/kept/*.safetensors")))
        share = rng.uniform(progress(project, stage), 1)
        run.until(lambda: progress(project, stage) >= share)
        run.kill(list(processes_in(project.root)))
        run.end()
        wait_for(lambda: not processes_in(project.root), "the end of all processes", 60)
        kept = sorted(models("*/kept/*.safetensors"))
        if not kept:
            raise TooLateError
        harm(rng.choice(kept))

    return strike


def scratch_deleted(project: Project, stage: str, rng: random.Random) -> None:
    """`rm -rf .swap` while a stage trains: it may take longer, and must come out whole."""
    run = start(project, stage)
    run.until(random_moment(project, stage, rng))
    if run.is_over() or not (project.root / ".swap").exists():
        raise TooLateError
    shutil.rmtree(project.root / ".swap", ignore_errors=True)
    if run.end() != 0:
        check_one_line(run)


def flip_a_byte(path: Path, rng: random.Random) -> None:
    """Of its data, in place: all names of the file see it, and DVC, which looks at mode and time, does not."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content) // 2, len(content))] ^= 1 << rng.randrange(8)
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def result_damaged(project: Project, stage: str, rng: random.Random) -> None:
    """A complete result in scratch is damaged in some way, and DVC asks for it once more."""
    run = start(project, stage)
    if run.end() != 0:
        raise LostError(run.output)
    (result,) = (project.root / ".swap" / stage).glob("*/result*")
    victim = rng.choice(sorted(result.iterdir()))
    harms: list[Callable[[], object]] = [
        lambda: flip_a_byte(victim, rng),
        lambda: os.truncate(victim, rng.randrange(victim.stat().st_size)),
        victim.unlink,
        lambda: [path.unlink() for path in result.iterdir()],
        lambda: shutil.rmtree(result),
    ]
    rng.choice(harms)()


def loader_killed(project: Project, stage: str, rng: random.Random) -> None:
    """Kill a process that decodes images: its rank notices, and the job continues or ends with a one-line error."""
    run = start(project, stage)
    run.until(random_moment(project, stage, rng))
    ranks = set(run.find("rank"))
    run.kill([rng.choice(loaders)] if (loaders := sorted(pid for pid in ranks if parent(pid) in ranks)) else [])
    if run.end() != 0:
        check_one_line(run)


def no_loader_can_start(project: Project, stage: str, rng: random.Random) -> None:
    """In a temporary folder with a name that is too long for sockets."""
    folder = project.root.parent / ("x" * rng.randrange(110, 200))
    folder.mkdir()
    run = start(project, stage, TMPDIR=str(folder), TMP=str(folder))
    if run.end() != 0:
        check_one_line(run)


def pipe_in_place(of: Callable[[Project], Path]) -> Callable[..., None]:
    """A named pipe in place of a file: nothing waits forever, and the error names it."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        path = of(project)
        aside = path.rename(project.root.parent / "aside")
        os.mkfifo(path)
        run = start(project, stage)
        try:
            if run.end() == 0:
                raise LostError("it took no notice")
        finally:
            path.unlink()
            aside.rename(path)
        check_one_line(run, path.name, "pipe")

    return strike


def image_root(project: Project) -> Path:
    return Path(YAML(typ="safe", pure=True).load(project.root / "params.yaml")["data"]["root"])


def paused(project: Project, stage: str, rng: random.Random) -> None:
    """Everything is stopped for a while, as a laptop that sleeps does, and continues as if nothing had happened."""
    run = start(project, stage, SWAP_TIMEOUT_MINUTES="0.1")
    run.until(random_moment(project, stage, rng))
    pids = list(processes_in(project.root))
    run.kill(pids, signal.SIGSTOP)
    time.sleep(rng.uniform(1, 9))
    run.kill(pids, signal.SIGCONT)
    if run.end() != 0:
        raise LostError(run.output)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def start(project: Project, stage: str, *, limit: int | None = None, **environment: str) -> Running:
    return Running(project, sys.executable, "-m", *STAGES[stage], limit=limit, **environment)


# ---- faults of the whole pipeline under DVC


def pipeline_killed(*roles: str, one: bool = False) -> Callable[..., None]:
    def strike(project: Project, stage: str, rng: random.Random) -> None:
        run = Running(project, "dvc", "repro")
        run.until(random_moment(project, "any", rng))
        pids = list(processes_in(project.root)) if roles == ("all",) else run.find(*roles)
        run.kill([rng.choice(pids)] if one and pids else pids)
        run.end()

    return strike


def pipeline_asked_to_end(number: int) -> Callable[..., None]:
    """As Ctrl-C at a terminal, or the end of a shell, does."""

    def strike(project: Project, stage: str, rng: random.Random) -> None:
        run = Running(project, "dvc", "repro")
        run.until(random_moment(project, "any", rng))
        at_work = bool(run.find("rank"))
        run.signal_group(number)
        code = run.end()
        wait_for(lambda: not processes_in(project.root), "the end of all processes", 60)
        if code == 0 or "Traceback" in run.output:
            raise LostError(f"exit code {code}\n{run.output}")
        if at_work and "interrupted: `dvc repro`" not in run.output:
            raise LostError(f"no word of going on\n{run.output}")

    return strike


def edited_during(stage: str, edit: Callable[[Project], object]) -> Callable[..., None]:
    """Params or code are edited while a stage trains, and put back when DVC has ended, with one line."""

    def strike(project: Project, _: str, rng: random.Random) -> None:
        run = Running(project, "dvc", "repro")
        share = rng.uniform(0.05, 0.8)
        run.until(lambda: progress(project, stage) >= share)
        files = [project.root / name for name in ("params.yaml", "swap_pipeline/training/loop.py")]
        before = [path.read_text() for path in files]
        edit(project)
        code = run.end(400)
        for path, text in zip(files, before, strict=True):
            path.write_text(text)
        if code == 0:
            raise LostError(f"it took no notice\n{run.output}")
        check_one_line(run, "changed while it")

    return strike


def checkpoint_damaged(project: Project, stage: str, rng: random.Random) -> None:
    """A checkpoint, with its link in DVC's cache: it is named, and comes back whole once it is deleted."""
    project.dvc("config", "cache.type", "hardlink")
    project.dvc("repro", "phase2")
    victim = rng.choice(sorted((project.root / "checkpoints").rglob("model.safetensors")))
    flip_a_byte(victim, rng)
    reader = "phase2@0" if "phase1" in str(victim) else "phase3"
    run = Running(project, "dvc", "repro", "--force", "--downstream", reader)
    if run.end(400) == 0:
        raise LostError(f"it took no notice of {victim}\n{run.output}")
    check_one_line(run, str(victim.relative_to(project.root)), "is damaged", "delete it and run `dvc repro`")
    victim.unlink()


def two_at_once(project: Project, stage: str, rng: random.Random) -> None:
    """Two `dvc repro` in one checkout: the second waits, gives up or finds the work done, but nothing gets mixed."""
    run = Running(project, "dvc", "repro")
    run.until(random_moment(project, "any", rng))
    second = project.dvc("repro", check=False)
    run.end()
    check_trained_once(run.output + second)


def two_experiments(project: Project, stage: str, rng: random.Random) -> None:
    """Two experiments at a time that share phase 1: it is trained once, and each averages its own workers."""
    project.dvc("exp", "run", "--queue", "-n", "one")
    project.dvc("exp", "run", "--queue", "-n", "other", "-S", "phase2.peak_lr=0.02")
    project.dvc("queue", "start", "-j", "2")
    try:
        wait_for(lambda: not re.search("Queued|Running", project.dvc("queue", "status")), "the end of the queue", 400)
    finally:
        project.dvc("queue", "stop", "--kill", check=False)
    logs = [project.dvc("queue", "logs", name, check=False) for name in ("one", "other")]
    if project.dvc("queue", "status").count("Success") != 2:
        raise LostError("\n".join(logs))
    check_trained_once("".join(logs), seeds=4)
    # What must be as in an undisturbed run; DVC ends with an error since comparisons and analysis have never run.
    project.dvc("exp", "apply", "one", check=False)


def check_trained_once(output: str, seeds: int = 2) -> None:
    """Every job was started once, by any process; outputs show what a process trained, not what it found."""
    for job, times in (("phase1", 1), ("phase2 seed", seeds)):
        begun = len(re.findall(rf"^\S*{job}.*: epoch 1/", output, re.MULTILINE))
        if begun != times:
            raise LostError(f"{job} was trained {begun} times, not {times}:\n{output}")


def bad_worker(project: Project, stage: str, rng: random.Random, *, times: int = 1000) -> None:
    """A worker dies each time: the other is kept, the error names the seed."""
    counter = project.root.parent / "deaths"
    counter.unlink(missing_ok=True)
    death = {"die": {"seed": 1, "times": times, "counter": str(counter)}}
    run = Running(project, "dvc", "repro", SWAP_CHAOS=json.dumps(death), PYTHONPATH=str(SABOTAGE))
    code = run.end(400)
    if times == 1:
        if code != 0 or "phase2 seed 1: restarting it" not in run.output:
            raise LostError(f"a worker that failed once was not helped:\n{run.output}")
        return
    if code == 0 or "phase2 seed 1 failed with exit code 3" not in run.output:
        raise LostError(f"the error does not name the seed:\n{run.output}")
    if project.trained("phase2") != 1:
        raise LostError("the other worker was not kept")
    again = project.dvc("repro")
    if "phase2 seed 1: epoch 1/" not in again or "phase2 seed 0: epoch" in again:
        raise LostError(f"the next start did not train that seed alone:\n{again}")


FAULTS = (
    Fault(name="SIGKILL of one rank of phase 1", stage="phase1", strike=killed("rank", one=True)),
    Fault(name="SIGKILL of phase 1's launcher", stage="phase1", strike=killed("launcher")),
    Fault(name="SIGKILL of phase 1's torchrun", stage="phase1", strike=killed("torchrun")),
    Fault(name="SIGKILL of a worker of phase 2", stage="phase2", strike=killed("rank")),
    Fault(name="SIGKILL of all of phase 2", stage="phase2", strike=killed("rank", "launcher")),
    Fault(name="SIGKILL of all of phase 3", stage="phase3", strike=killed("rank", "torchrun", "launcher")),
    Fault(name="SIGINT of phase 1", stage="phase1", strike=asked_to_end(signal.SIGINT)),
    Fault(name="SIGTERM of phase 2", stage="phase2", strike=asked_to_end(signal.SIGTERM)),
    Fault(name="SIGKILL while phase 1 writes", stage="phase1", strike=killed_while_writing()),
    Fault(name="SIGKILL while a worker writes", stage="phase2", strike=killed_while_writing()),
    Fault(name="SIGKILL while phase 3 writes", stage="phase3", strike=killed_while_writing()),
    Fault(name="disk full in phase 1", stage="phase1", strike=disk_full()),
    Fault(name="disk full in phase 2", stage="phase2", strike=disk_full()),
    Fault(name="disk full of records", stage="phase1", strike=disk_full_of_records),
    Fault(name="file-size limit in phase 2", stage="phase2", strike=file_too_large()),
    Fault(name="read-only scratch", stage="phase1", strike=read_only_scratch),
    Fault(name="a rank of phase 1 that hangs", stage="phase1", strike=hanging_rank),
    Fault(name="a worker that hangs", stage="phase2", strike=hanging_rank),
    Fault(name="loss not finite on one rank of phase 1", stage="phase1", strike=not_finite(ranks=2)),
    Fault(name="loss not finite in phase 2", stage="phase2", strike=not_finite(ranks=1)),
    Fault(name="a kept model of phase 1 lost", stage="phase1", strike=kept_harmed(Path.unlink)),
    Fault(
        name="a kept model of phase 2 damaged",
        stage="phase2",
        strike=kept_harmed(lambda path: flip_a_byte(path, random.Random(path.name))),
        damages=True,
    ),
    Fault(name="scratch deleted while a worker trains", stage="phase2", strike=scratch_deleted),
    Fault(name="a worker's result damaged in scratch", stage="phase2", strike=result_damaged, damages=True),
    Fault(name="phase 3's result damaged in scratch", stage="phase3", strike=result_damaged, damages=True),
    Fault(name="SIGKILL of a data loader", stage="phase1", strike=loader_killed, images_in_files=True),
    Fault(name="data loaders that cannot start", stage="phase2", strike=no_loader_can_start, images_in_files=True),
    Fault(
        name="a pipe in place of phase 1's checkpoint",
        stage="phase2",
        strike=pipe_in_place(lambda project: project.root / "checkpoints/phase1/model.safetensors"),
    ),
    Fault(
        name="a pipe in place of an image",
        stage="phase2",
        strike=pipe_in_place(lambda project: image_root(project) / "train/cat/7.png"),
        images_in_files=True,
    ),
    Fault(name="phase 1 stopped for a while, and continued", stage="phase1", strike=paused),
    Fault(name="dvc repro: SIGKILL of dvc alone", strike=pipeline_killed("dvc")),
    Fault(name="dvc repro: SIGKILL of a launcher", strike=pipeline_killed("launcher", one=True)),
    Fault(name="dvc repro: SIGKILL of one rank", strike=pipeline_killed("rank", one=True)),
    Fault(name="dvc repro: SIGKILL of everything", strike=pipeline_killed("all")),
    Fault(name="dvc repro: SIGINT of its group", strike=pipeline_asked_to_end(signal.SIGINT)),
    Fault(name="dvc repro: SIGTERM of its group", strike=pipeline_asked_to_end(signal.SIGTERM)),
    Fault(
        name="dvc repro: params edited while workers train",
        strike=edited_during("phase2", lambda project: project.set_params({"phase2.peak_lr": 0.01})),
    ),
    Fault(
        name="dvc repro: code edited while phase 1 trains",
        strike=edited_during(
            "phase1",
            lambda project: (project.root / "swap_pipeline" / "training" / "loop.py").open("a").write("# edited\n"),
        ),
    ),
    Fault(name="dvc repro: a checkpoint damaged, and the cache with it", strike=checkpoint_damaged, damages=True),
    Fault(name="dvc repro: a second one at the same time", strike=two_at_once),
    Fault(name="two experiments from the queue at the same time", strike=two_experiments),
    Fault(name="dvc repro: a worker that always dies", strike=bad_worker),
    Fault(name="dvc repro: a worker that dies once", strike=functools.partial(bad_worker, times=1)),
)


# ---- the run


@dataclass
class Tally:
    injected: int = 0
    survived: int = 0
    bytes_lost: int = 0


def make_reference(folder: Path, *, images_in_files: bool = False) -> Project:
    project = make_project(folder / "reference")
    project.environment = dict(TWO_RANKS)
    project.set_params(PARAMS)
    if images_in_files:
        make_images(folder / "images")
        project.set_params({**IN_FILES, "data.root": str(folder / "images")})
    project.run("git", "commit", "-qam", "params")
    project.dvc("repro")
    project.run("git", "add", "-A")
    project.run("git", "commit", "-qm", "reference")
    return project


def make_images(root: Path) -> None:
    """96 for training and 24 for the test, of two classes."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 48), ("test", 12)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 120, (28, 28, 3), dtype=np.uint8)
                pixels[..., label] += 100
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")


def ready_for(fault: Fault, reference: Project, folder: Path) -> Project:
    """A copy in which the stage has not run yet, or nothing has."""
    project = reference.copy_to(folder)
    everything = ("checkpoints", "metrics", "plots", "report", ".dvc/cache", ".dvc/tmp", "dvc.lock")
    for name in (".swap", *(everything if fault.stage is None else OUTPUTS[fault.stage])):
        place = project.root / name
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    return project


def recover(fault: Fault, project: Project) -> tuple[str, ...]:
    """What a user does next: the same again; returns what must have come out."""
    if fault.stage is None:
        project.dvc("repro")
        return ("checkpoints", "metrics")
    project.run(sys.executable, "-m", *STAGES[fault.stage])
    return OUTPUTS[fault.stage]


def inject(fault: Fault, reference: Project, folder: Path, rng: random.Random) -> int:
    """Strike, check, start again, compare; returns the bytes that differ."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    project = ready_for(fault, reference, folder / "project")
    try:
        fault.strike(project, fault.stage or "any", rng)
        if not fault.damages:
            check_no_half_files(project)
        paths = recover(fault, project)
        wait_for(lambda: not processes_in(project.root), "the end of all processes", 60)
        check_swept(project)
        return bytes_that_differ(contents(project, paths), contents(reference, paths))
    finally:
        for pid in processes_in(project.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def table(tallies: dict[str, Tally]) -> str:
    from swap_pipeline.report.summary import aligned

    rows: list[tuple[str, ...]] = [("fault", "injected", "survived", "bytes lost")]
    rows += [(name, str(t.injected), str(t.survived), str(t.bytes_lost)) for name, t in tallies.items()]
    total = [sum(getattr(t, key) for t in tallies.values()) for key in ("injected", "survived", "bytes_lost")]
    rows.append(("all", *map(str, total)))
    return aligned(rows)


def run_chaos(
    faults: list[Fault], *, first: int, seed: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Tally]:
    """Inject the faults in turn; the n-th draws its moment from (seed, n)."""
    reference_of = functools.cache(
        lambda in_files: make_reference(folder / ("files" if in_files else "memory"), images_in_files=in_files)
    )
    tallies: dict[str, Tally] = collections.defaultdict(Tally)
    for number, fault in enumerate(faults, start=first):
        for attempt in range(20):
            rng = random.Random(f"{seed} {number} {attempt}")
            try:
                lost = inject(fault, reference_of(fault.images_in_files), folder / "struck", rng)
            except TooLateError:
                continue
            except Exception as error:  # whatever it is, the promise was broken; the others are to have their turn
                lost = -1
                say(f"{number}: {fault.name}: BROKEN: {error}")
                shutil.copytree(folder / "struck", folder / f"broken_{number}", symlinks=True, dirs_exist_ok=True)
            tally = tallies[fault.name]
            tally.injected += 1
            tally.survived += lost == 0
            tally.bytes_lost += max(lost, 0)
            say(
                f"{number}: {fault.name}: {'survived' if lost == 0 else f'{lost} bytes lost' if lost > 0 else 'broken'}"
            )
            break
        else:
            say(f"{number}: {fault.name}: always too late")
    return dict(tallies)


def chosen(known: Sequence[Fault], injections: int, pipelines: int, only: str | None) -> list[Fault]:
    """In turn, so that every kind has its share."""
    faults = [fault for fault in known if only is None or only in fault.name]
    single, whole = [f for f in faults if f.stage], [f for f in faults if not f.stage]
    if not single:
        pipelines = injections
    if not whole:
        pipelines = 0
    picked = [single[i % len(single)] for i in range(injections - pipelines)] if single else []
    return [*picked, *(whole[i % len(whole)] for i in range(pipelines))]


@click.command(help=__doc__)
@click.option("--injections", default=146, show_default=True, help="faults in all")
@click.option("--pipelines", default=26, show_default=True, help="of these, so many into a whole `dvc repro`")
@click.option("--seed", default=0, show_default=True)
@click.option("--first", default=1, show_default=True, help="begin with this one of them")
@click.option("--last", type=int, help="end with this one of them")
@click.option("--only", help="only faults whose name contains this")
@click.option("--folder", type=click.Path(path_type=Path), help="where to work; by default a temporary folder")
@click.option("--result", type=click.Path(path_type=Path), help="write the table here too")
def main(
    injections: int,
    pipelines: int,
    seed: int,
    first: int,
    last: int | None,
    only: str | None,
    folder: Path | None,
    result: Path | None,
) -> None:
    known = FAULTS
    if not may_mount():
        click.echo("may not mount small disks here: full and read-only disks are left out, others strike more often")
        known = tuple(fault for fault in FAULTS if "disk full" not in fault.name and "read-only" not in fault.name)
    faults = chosen(known, injections, pipelines, only)[first - 1 : last]
    with tempfile.TemporaryDirectory() as temporary:
        tallies = run_chaos(faults, first=first, seed=seed, folder=folder or Path(temporary), say=click.echo)
    text = table(tallies)
    click.echo(f"\n{text}")
    if result is not None:
        result.write_text(f"{text}\n")
    survived = sum(tally.survived for tally in tallies.values())
    if survived < len(faults):
        click.echo(f"\n{len(faults) - survived} of {len(faults)} were lost, or could not be injected")
    sys.exit(survived < len(faults))


if __name__ == "__main__":
    main()
