"""Jobs on this machine: torchrun on its devices, which launchers share by locks."""

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
        """The job at work, or None if it has to wait for its devices or for another launcher that is at it."""
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
        """As many as the job needs, or fewer if there are not so many, and the locks that hold them.

        Workers may share a GPU: each has a place on it, of which the first ones of all GPUs are taken before the second
        ones. Whoever shares a device locks it as shared, so that nobody else has it for himself meanwhile.
        """
        places = places_per_device(job.instance, job.device_type)
        devices: dict[str, list[Lock]] = {}
        for place in range(places):
            for device in self._machine.devices:
                if len(devices) == job.num_devices or device in devices:
                    continue
                # A GPU may be called by its index or its UUID.
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
        """The processes are children of this one: nothing to look up."""

    def interrupted(self, number: int, display: Display) -> str:
        return "interrupted: `dvc repro` resumes from the last snapshot"


class Running:
    """A job whose processes are children of this one, or of the `srun` that is."""

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
        """What the new process does before it becomes the command; the ranks see to it themselves."""
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
    """On this machine, where hangs that no rank can notice are watched for: of a rank that is alone, and of one whose
    job is complete but whose process does not end."""

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
            return False  # until then the ranks watch each other
        if self._complete_since is None:
            self._complete_since = time.monotonic()
        return time.monotonic() - self._complete_since >= self._limit

    def _kill(self) -> None:
        """All of its processes; torchrun's ranks have sessions of their own."""
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
