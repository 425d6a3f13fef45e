"""Jobs inside a Slurm allocation, each a job step: `srun` starts torchrun once per node.

Slurm itself queues steps for which there are no free devices.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence

from swap_pipeline.errors import SwapError
from swap_pipeline.launch.display import Display
from swap_pipeline.launch.jobs import MALLOC, STDERR_FILE, Job, claim, describe, forget_last_attempt, tail, variables
from swap_pipeline.launch.local import Running
from swap_pipeline.launch.torchrun import PORT
from swap_pipeline.runtime.progress import PROGRESS_FILE
from swap_pipeline.runtime.stop_request import STOP_FILE, STOPPABLE

# `srun` would take these as its own options, but they describe the allocation, or the step that a `salloc` shell is.
_OF_THE_ALLOCATION = (
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_EXPORT_ENV",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_GRES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_MEM_BIND",
    "SLURM_NNODES",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_OVERLAP",
    "SLURM_TASKS_PER_NODE",
    "SLURM_TRES_PER_TASK",
    "CUDA_VISIBLE_DEVICES",  # Slurm sets it for each step
)
_NO_STEP = 0xFFFFFFF0
"""step ids from here on are batch scripts, `salloc` shells and the like"""
_PATIENCE_SECONDS = 10
"""for a step that is asked to stop to write a snapshot"""


def step(job: Job, *, memory_share: float | None = None) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a job as a step of the allocation that this process is in."""
    if shutil.which("srun") is None:
        raise SwapError("srun is not on PATH: start this inside a Slurm allocation, or set SWAP_LAUNCHER=local")
    inherited = {name: value for name, value in {**MALLOC, **os.environ}.items() if name not in _OF_THE_ALLOCATION}
    nodes, per_node = str(job.nodes), job.processes_per_node
    command = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--exact", "--kill-on-bad-exit=1"]
    command += ["--cpus-per-task", str(per_node * job.threads), "--job-name", job.instance.stage_name, "--export=ALL"]
    if job.device_type == "cuda":
        command += ["--gpus-per-node", str(per_node)]
    memory = os.environ.get("SLURM_MEM_PER_NODE", "")
    if memory_share is not None and memory.isdecimal() and int(memory):
        # By default a step takes all memory of the allocation and leaves none for steps beside it.
        command += ["--mem", str(max(1, int(int(memory) * memory_share)))]
    extra = {**variables(job, parent=0), STOPPABLE: "1"}
    python = [sys.executable, "-m"]
    if job.processes == 1:
        return [*command, *python, *job.instance.command], {
            **inherited,
            **extra,
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }
    torchrun = [*python, "swap_pipeline.launch.torchrun"]
    if job.nodes == 1:
        torchrun += ["--standalone"]
    else:
        # Differs from an earlier step of the same job too, whose processes may not have exited yet.
        meeting = f"{os.environ['SLURM_JOB_ID']}.{job.folder.path.name}.{secrets.token_hex(4)}"
        torchrun += ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", meeting]
        extra[PORT] = str(20000 + zlib.crc32(meeting.encode()) % 12000)  # below Linux's ephemeral ports
    torchrun += ["--nproc-per-node", str(per_node), "-m", *job.instance.command]
    return [*command, *torchrun], {**inherited, **extra}


class Srun:
    """The launcher inside an allocation."""

    shares_devices = True

    def __init__(self, devices_per_node: int) -> None:
        self._devices_per_node = devices_per_node
        self._at_work: list[Step] = []

    def start(self, jobs: Sequence[Job], *, room: int, display: Display) -> list[Step]:
        started: list[Step] = []
        for job in jobs:
            if len(started) < room and (own := claim(job, display)):
                forget_last_attempt(job)
                describe(job)
                share = min(1.0, job.num_devices / job.nodes / self._devices_per_node)
                started.append(Step(job, *step(job, memory_share=share), [own]))
        self._at_work += started
        return started

    def watch(self, display: Display) -> None:
        """Report which steps are waiting, and why; their `srun`s are children of this process."""
        self._at_work = [work for work in self._at_work if not work.is_over()]
        for work in self._at_work:
            if why := work.waits_for():
                display.say_once(f"{work.job.name}: waiting for a place in the allocation ({why}){_hint()}")

    def interrupted(self, number: int, display: Display) -> str:
        return "interrupted: `dvc repro` resumes from the last snapshot"


def _hint() -> str:
    inside = os.environ.get("SLURM_STEP_ID", "")
    if not inside.isdecimal() or int(inside) >= _NO_STEP:
        return ""
    return "; this shell is itself a step of the job (srun --pty): if nothing starts, use salloc or sbatch instead"


class Step(Running):
    """A job step, through its `srun`."""

    _has_begun = False
    _next_look = 0.0
    _deadline = 0.0

    def waits_for(self) -> str:
        """Why Slurm has not started it yet, according to `srun`; empty if it has started or nothing is known."""
        folder = self.job.folder.path
        if self._has_begun or time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + 1
        if self.has_begun():
            return ""
        last = next(reversed(tail(folder / STDERR_FILE)), "")
        found = re.search(r"step creation (?:temporarily|still) disabled, retrying \((.*)\)", last)
        return found[1] if found else ""

    def has_begun(self) -> bool:
        self._has_begun = self._has_begun or (self.job.folder.path / PROGRESS_FILE).exists()
        return self._has_begun

    def ask_to_end(self) -> None:
        """Ask the ranks to write a snapshot and stop, if they have begun; a signal to `srun` would kill them."""
        if self.is_over():
            return
        if self.has_begun():
            (self.job.folder.path / STOP_FILE).touch()
            self._deadline = time.monotonic() + _PATIENCE_SECONDS
        else:
            self._process.terminate()

    def end(self) -> None:
        try:
            self._process.wait(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.terminate()
        super().end()

    def _die_with_launcher(self) -> Callable[[], object] | None:
        """SIGTERM to `srun`, which passes it on to its tasks on all nodes."""
        prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1
        return lambda: prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)
