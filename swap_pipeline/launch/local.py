"""Jobs on this machine; locks share its devices among launchers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence

from swap_pipeline.config.instances import Instance
from swap_pipeline.launch.display import STDOUT_FILE, Display
from swap_pipeline.launch.jobs import (
    STDERR_FILE,
    Failure,
    Job,
    Machine,
    claim,
    describe,
    did_not_answer,
    for_one_node,
    forget_last_attempt,
    why_incomplete,
)
from swap_pipeline.launch.pulse import Pulse
from swap_pipeline.runtime import environment
from swap_pipeline.runtime.inputs import CODE_STAMP, code_stamp
from swap_pipeline.runtime.job_folder import scratch_root
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.runtime.progress import PROGRESS_FILE


def places_per_device(instance: Instance, device_type: str) -> int:
    """How many jobs of this kind may share a device."""
    return environment.workers_per_gpu() if device_type == "cuda" and instance.stage == "phase2" else 1


class Local:
    """The launcher for this machine."""

    shares_devices = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def start(self, jobs: Sequence[Job], *, room: int, display: Display) -> list[Running]:
        started: list[Running] = []
        for job in jobs:
            if len(started) < room and (work := self._try_start(job, display)):
                started.append(work)
        return started

    def _try_start(self, job: Job, display: Display) -> Running | None:
        """Start a job; None if it has to wait for its devices, or for another launcher that is running it."""
        devices, locks = self._free_devices(job)
        if len(devices) == job.num_devices and (own := claim(job, display)):
            command, variables = for_one_node(job, parent=os.getpid())
            if job.device_type == "cuda":
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            forget_last_attempt(job)
            describe(job)
            variables[CODE_STAMP] = code_stamp(job.instance)
            return LocalRun(job, command, variables, [own, *locks])
        for lock in locks:
            lock.release()
        return None

    def _free_devices(self, job: Job) -> tuple[list[str], list[Lock]]:
        """Free devices, at most as many as the job needs, and the locks that hold them.

        Workers may share a GPU: each takes a place on it, the first place of every GPU before any second one. They lock
        the device itself as shared, so that no other job can have it exclusively.
        """
        places = places_per_device(job.instance, job.device_type)
        devices: dict[str, list[Lock]] = {}
        for place in range(places):
            for device in self._machine.devices:
                if len(devices) == job.num_devices or device in devices:
                    continue
                # CUDA_VISIBLE_DEVICES may name a GPU by its index or its UUID.
                name = f"{job.device_type}_{self._machine.uuids.get(device, device)}"
                whole = Lock(scratch_root() / "devices" / f"{name}.lock")
                own = Lock(scratch_root() / "devices" / f"{name}_place_{place}.lock")
                if not whole.try_acquire(shared=places > 1):
                    continue
                if places > 1 and not own.try_acquire():
                    whole.release()
                    continue
                devices[device] = [whole, own]
        return list(devices), [lock for locks in devices.values() for lock in locks]

    def watch(self, display: Display) -> None:
        """Nothing to do: the processes are children of this one."""

    def interrupted(self, number: int, display: Display) -> str:
        return "interrupted: `dvc repro` resumes from the last snapshot"


class Running:
    """A job whose processes, or whose `srun`, are children of this one."""

    patience_seconds = 5

    def __init__(self, job: Job, command: list[str], variables: dict[str, str], locks: list[Lock]) -> None:
        self.job = job
        self._locks = locks
        folder = job.folder.path
        with (folder / STDOUT_FILE).open("ab") as out, (folder / STDERR_FILE).open("ab") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                start_new_session=True,  # signals reach it through the launcher, once
                preexec_fn=self._die_with_launcher(),
            )

    def _die_with_launcher(self) -> Callable[[], object] | None:
        """For the new process to call before it becomes the command; None here, since ranks take care of it."""
        return None

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> Failure | None:
        return why_incomplete(self.job, self._process.returncode)

    def ask_to_end(self) -> None:
        if not self.is_over():
            self._process.terminate()

    def end(self) -> None:
        try:
            self._process.wait(timeout=self.patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.release()

    def release(self) -> None:
        for lock in self._locks:
            lock.release()


class LocalRun(Running):
    """A job on this machine. Watches for hangs that no other rank can notice: of a single rank, and of a rank that does
    not exit although its job is complete."""

    _has_hung = False
    _complete_since: float | None = None

    def __init__(self, job: Job, command: list[str], variables: dict[str, str], locks: list[Lock]) -> None:
        super().__init__(job, command, variables, locks)
        signs = [job.folder.path / name for name in (PROGRESS_FILE, STDOUT_FILE, STDERR_FILE)]
        self._limit = 60 * environment.timeout_minutes()
        self._pulse = Pulse(self._process.pid, signs, limit_seconds=self._limit) if job.processes == 1 else None

    def is_over(self) -> bool:
        if super().is_over():
            return True
        if self._is_lost():
            self._has_hung = True
            self._kill()
        return self._has_hung

    def _is_lost(self) -> bool:
        if self._pulse is not None:
            return self._pulse.is_lost()
        if not self.job.folder.is_complete:
            return False  # the ranks still watch each other
        if self._complete_since is None:
            self._complete_since = time.monotonic()
        return time.monotonic() - self._complete_since >= self._limit

    def _kill(self) -> None:
        """Kill all of its processes; torchrun's ranks have sessions of their own."""
        import psutil

        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()

    def failure(self) -> Failure | None:
        if not self._has_hung:
            return super().failure()
        if self.job.folder.is_complete:
            return None
        return Failure(f"{self.job.name} {did_not_answer([0])}", may_pass=True)
