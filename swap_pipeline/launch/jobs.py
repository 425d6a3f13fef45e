"""A job, its processes' environment, and why it failed; the same for all launchers."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from swap_pipeline.config.instances import Instance
from swap_pipeline.launch.display import STDOUT_FILE, Display
from swap_pipeline.runtime import environment
from swap_pipeline.runtime.environment import JOB, RESULT_NAME
from swap_pipeline.runtime.job_folder import LAUNCHER_LOCK, JobFolder, scratch_root
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.runtime.progress import PROGRESS_FILE
from swap_pipeline.runtime.rank import LOST, PARENT, SAID, STOPPED, UNEXPECTED, WORLD
from swap_pipeline.runtime.stop_request import STOP_FILE
from swap_pipeline.storage.files import read_json, write_json

STDERR_FILE = "stderr.log"
CODE_FILE = "exit_code.txt"
_KILLED = f"was killed by signal {int(signal.SIGKILL)}"
_FULL = 1 << 16  # bytes; with less free space than this, not even an error can be written
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node to compute on, or several equal ones."""

    device_type: str
    devices: tuple[str, ...]
    """of each node: GPUs, as in CUDA_VISIBLE_DEVICES, or cores; a worker of phase 2 can have one for itself"""
    cores: int
    """of each node"""
    nodes: int = 1
    uuids: Mapping[str, str] = field(default_factory=dict)
    """of this machine's GPUs, by their name in `devices`"""

    @property
    def num_devices(self) -> int:
        return self.nodes * len(self.devices)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run: processes on devices, with a scratch folder."""

    instance: Instance
    device_type: str
    processes: int
    threads: int
    num_devices: int
    folder: JobFolder
    nodes: int = 1
    """over which the processes are spread evenly"""

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def processes_per_node(self) -> int:
        return self.processes // self.nodes


@dataclass(frozen=True)
class Failure:
    """Why a job failed."""

    text: str
    """for the user; the first line must be enough"""
    may_pass: bool
    """whether it may be transient, so that trying again can help"""


class Work(Protocol):
    """A job that has been started."""

    job: Job

    def is_over(self) -> bool: ...

    def failure(self) -> Failure | None:
        """What went wrong, if anything; call it once the job is over."""

    def ask_to_end(self) -> None: ...

    def end(self) -> None: ...

    def release(self) -> None:
        """Release its locks."""


class Launcher(Protocol):
    """A place where jobs run."""

    shares_devices: bool
    """whether a job with all devices leaves none for another"""

    def start(self, jobs: Sequence[Job], *, room: int, display: Display) -> Sequence[Work]:
        """Start those jobs that can run now, at most `room`; the others have to wait."""

    def watch(self, display: Display) -> None:
        """Called repeatedly while jobs are running."""

    def interrupted(self, number: int, display: Display) -> str:
        """What to print about the running jobs after the signal `number`."""


_SAVED = "job.json"


def save(job: Job, **more: object) -> None:
    """Describe the job in its folder, so that a process on another machine can start it."""
    folder = job.folder
    described = {**dataclasses.asdict(job), "folder": str(folder.path.resolve()), "result": folder.result_name, **more}
    write_json(job.folder.path / _SAVED, described)


def describe(job: Job) -> None:
    """Describe the job for users and `swap clean`; an existing description may belong to a submitted job and stays."""
    if not (job.folder.path / _SAVED).exists():
        save(job)


def load(folder: Path) -> tuple[Job, dict[str, Any]]:
    """A saved job, and what else was saved with it."""
    tree = read_json(folder / _SAVED)
    known = {field.name: tree.pop(field.name) for field in dataclasses.fields(Job)}
    place = JobFolder(Path(known.pop("folder")), result_name=tree.pop("result"))
    instance = Instance(**known.pop("instance"))
    return Job(instance=instance, folder=place, **known), tree


def claim(job: Job, display: Display) -> Lock | None:
    """The lock on a job that is not complete; None if it is, or if another launcher is running it."""
    lock = Lock(job.folder.path / LAUNCHER_LOCK)
    if not lock.try_acquire():
        display.say_once(f"{job.name}: process {lock.holder()} is already running this, waiting for it")
        return None
    if job.folder.is_complete:
        lock.release()
        return None
    return lock


def forget_last_attempt(job: Job, *, logs: bool = True) -> None:
    """Remove messages of an earlier attempt, so that they are not taken for this one's."""
    folder = job.folder.path
    said = [path for kind in (SAID, LOST, STOPPED) for path in folder.glob(f"{kind}_*.txt")]
    written = (PROGRESS_FILE, STDOUT_FILE, STDERR_FILE) if logs else (PROGRESS_FILE,)
    for old in (*said, *(folder / name for name in (*written, STOP_FILE, CODE_FILE))):
        old.unlink(missing_ok=True)


def variables(job: Job, *, parent: int) -> dict[str, str]:
    """What a job's processes need in addition to the environment; they die with `parent`, if that is not 0."""
    return {
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        "SWAP_DEVICE": job.device_type,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch_root().resolve() / "compiled"),
        "TRITON_CACHE_DIR": str(scratch_root().resolve() / "compiled" / "triton"),
        "PYTHONUNBUFFERED": "1",
        PARENT: str(parent),
        WORLD: str(job.processes),
        JOB: str(job.folder.path.resolve()),
        RESULT_NAME: job.folder.result_name,
    }


def for_one_node(job: Job, *, parent: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a job's processes on this node."""
    # Keep freed activations for the next step: 15 to 30 % faster on CPU.
    inherited = {**MALLOC, **os.environ, **variables(job, parent=parent)}
    if job.processes == 1:
        # torchrun would add a second process with torch, only to watch this one.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        return [sys.executable, "-m", *job.instance.command], {**inherited, **alone}
    torchrun = [sys.executable, "-m", "swap_pipeline.launch.torchrun", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(job.processes), "-m", *job.instance.command], inherited


def why_incomplete(job: Job, code: int) -> Failure | None:
    """Why a job failed whose processes ended with this code: what its ranks reported, or what the disk shows."""
    if code == 0 and job.folder.is_complete:
        return None
    folder = job.folder.path
    said = sorted(folder.glob(f"{SAID}_*.txt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    texts = [text for path in said if (text := path.read_text(encoding="utf-8").strip())]  # none where the disk is full
    if texts:
        return Failure(texts[0], may_pass=texts[0].startswith(UNEXPECTED))
    if shutil.disk_usage(folder).free < _FULL:
        return Failure(f"{folder}: no space left on the disk: make room and run `dvc repro` again", may_pass=False)
    if how := _who_was_missing(job):
        return Failure(f"{job.name} {how}", may_pass=True)
    how, log = _how_it_ended(job, code), folder / STDERR_FILE
    if _KILLED in how:  # no log can explain that
        return Failure(f"{job.name} {how}: `dvc repro` resumes from the last snapshot", may_pass=True)
    return Failure("\n".join([f"{job.name} {how}; the end of {log}:", *tail(log)]), may_pass=True)


def tail(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:]
    except OSError:
        return []


def _who_was_missing(job: Job) -> str:
    """Which ranks did not answer the others; empty if all did."""
    folder = job.folder.path
    lost = {int(path.stem.split("_")[1]): path.read_text() for path in folder.glob(f"{LOST}_*.txt")}
    # NCCL's watchdog kills a rank that has waited too long before Python can report it.
    nccl = re.findall(r"\[Rank (\d+)\] Watchdog caught collective operation timeout", _text(folder / STDERR_FILE))
    if not nccl and not any(text.startswith("waited") for text in lost.values()):
        return ""
    silent = sorted(set(range(job.processes)) - lost.keys() - set(map(int, nccl)))
    return did_not_answer(silent) if silent else ""


def did_not_answer(ranks: Sequence[int]) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return (
        f"was killed: {who} did not answer for {environment.timeout_minutes():g} minutes (SWAP_TIMEOUT_MINUTES): "
        f"check disk, network and devices, then run `dvc repro` again; it resumes from here"
    )


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _how_it_ended(job: Job, code: int) -> str:
    """For jobs none of whose ranks reported an error."""
    folder = job.folder.path
    if any(folder.glob(f"{STOPPED}_*.txt")):
        return "was asked to stop and has written a snapshot"
    text = _text(folder / STDERR_FILE)
    if first := re.search(r"Root Cause.*?\brank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", text, re.DOTALL):
        return f"failed: its rank {first[1]} {_ended(int(first[2]))}"
    return _ended(code)


def _ended(code: int) -> str:
    number = -code if code < 0 else code - 128  # srun and shells return 128 + n for signal n
    if number == signal.SIGKILL:
        return f"{_KILLED}, as the system does when memory runs out (then lower batch_size or SWAP_EVAL_BATCH)"
    if 0 < number < 65:
        return f"was killed by signal {number}"
    return f"failed with exit code {code}"
