"""Where a job runs: processes, devices, threads, and phase 2's fan-out over device slots.

Nothing here can change what is computed, so no stage lists this module in its `deps`. It decides by what the machine
has and by the variables of `environment`. It does without torch, which takes seconds to import: the processes that it
starts have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_pipeline import environment
from swap_pipeline.errors import SwapError
from swap_pipeline.instances import Instance
from swap_pipeline.params import IntByEpoch, check_divisible
from swap_pipeline.progress import PROGRESS_FILE, STDOUT_FILE, Display
from swap_pipeline.ranks import JOB, LOST, PARENT, SAID, Interrupted
from swap_pipeline.scratch import JobFolder, Lock, declared_stage, job_folder, scratch_root, unlisted_code

STDERR_FILE = "stderr.log"
_FULL = 1 << 16  # bytes; with less room than this, not even an error finds any
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to compute on."""

    device_type: str
    devices: tuple[str, ...]
    """what a worker of phase 2 can have for itself: a GPU, as CUDA_VISIBLE_DEVICES names it, or a core"""
    cores: int


def this_machine() -> Machine:
    cores, gpus = environment.num_cores(), _gpus()
    device_type = environment.device_type(has_gpu=bool(gpus))
    devices = gpus if device_type == "cuda" else tuple(str(core) for core in range(cores))
    return Machine(device_type=device_type, devices=devices, cores=cores)


def _gpus() -> tuple[str, ...]:
    """GPUs that this process may use, asked of the driver; it heeds CUDA_VISIBLE_DEVICES, unlike nvidia-smi."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named[: count.value]) if named else tuple(str(i) for i in range(count.value))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run: some processes on some devices, with a scratch folder."""

    instance: Instance
    processes: int
    threads: int
    num_devices: int
    folder: JobFolder

    @property
    def name(self) -> str:
        return self.instance.name


def _job(instance: Instance, machine: Machine, *, processes: int, threads: int, num_devices: int) -> Job:
    return Job(
        instance=instance,
        processes=processes,
        threads=threads,
        num_devices=num_devices,
        folder=job_folder(instance, device_type=machine.device_type, processes=processes, threads=threads),
    )


def job_on_all_devices(instance: Instance, *, section: str = "", batch_size: IntByEpoch | None = None) -> Job:
    """Phases 1 and 3: one job that has the machine to itself."""
    machine = this_machine()
    # On CPU two ranks are as fast as one with two threads and show that the ranks work; more would leave batch norm
    # too few samples each. Their threads use the other cores.
    default = len(machine.devices) if machine.device_type == "cuda" else min(2, machine.cores)
    processes = environment.num_processes(default)
    if machine.device_type == "cuda" and processes > len(machine.devices):
        raise SwapError(f"SWAP_NPROC is {processes}, but there are {len(machine.devices)} GPUs: lower it")
    if batch_size is not None:
        key = f"{section or instance.method}.batch_size"
        check_divisible(key, batch_size, processes, remedy="set SWAP_NPROC to")
    return _job(
        instance,
        machine,
        processes=processes,
        threads=max(1, machine.cores // processes),
        num_devices=processes if machine.device_type == "cuda" else len(machine.devices),
    )


def worker_job(instance: Instance, *, processes: int, batch_size: IntByEpoch) -> Job:
    """Phase 2: a worker with devices of its own."""
    machine = this_machine()
    check_divisible("phase2.batch_size", batch_size, processes, remedy="set phase2.gpus_per_worker to")
    if processes > len(machine.devices):
        what = "GPUs" if machine.device_type == "cuda" else "CPU cores, which stand in for GPUs"
        raise SwapError(
            f"params.yaml: phase2.gpus_per_worker is {processes}, but this machine has {len(machine.devices)} {what}"
        )
    return _job_on_some_devices(instance, machine, processes)


def baseline_job(instance: Instance, *, gpus: int, batch_size: IntByEpoch, section: str = "") -> Job:
    """A comparison: `gpus` devices, or all if there are fewer. On a CPU that is one core, or all as in phase 1."""
    machine = this_machine()
    if gpus > 1 and (gpus >= len(machine.devices) or machine.device_type == "cpu"):
        return job_on_all_devices(instance, section=section, batch_size=batch_size)
    section = section or instance.method
    check_divisible(f"{section}.batch_size", batch_size, gpus, remedy=f"set {section}.gpus to")
    return _job_on_some_devices(instance, machine, gpus)


def _job_on_some_devices(instance: Instance, machine: Machine, processes: int) -> Job:
    """On a CPU a device is a core, and a process has one thread, always: the number of threads changes the bytes and
    must not depend on how many jobs there are."""
    threads = 1 if machine.device_type == "cpu" else max(1, machine.cores // len(machine.devices))
    return _job(instance, machine, processes=processes, threads=threads, num_devices=processes)


def pending(instances: Sequence[Instance], *, asked: Instance) -> list[Instance]:
    """Those that DVC would run too: not up to date, nor to be had from its cache, but with all they start from.

    Only DVC itself knows, so it is asked. Without DVC, or with SWAP_FANOUT=0, there are none.
    """
    if "DVC_STAGE" not in os.environ or not environment.fan_out():
        return []
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.stage.cache import RunCacheNotFoundError
    from dvc_data.hashfile.hash_info import HashInfo

    def load(instance: Instance) -> Any:
        return repo.stage.load_one(path=instance.stage_file, name=instance.stage_name)

    def would_run(instance: Instance) -> bool:
        if instance.start is not None and instance.start != asked.start and load(instance.start).changed():
            return False
        stage = load(instance)
        if not (stage.changed_stage() or stage.changed_deps()):
            # As in dvc.lock: DVC keeps the outs, or checks them out of its cache.
            return bool(stage.changed_outs() and not stage.outs_cached())
        stage.save_deps()
        for out in stage.outs:
            out.hash_info = HashInfo()  # what dvc.lock says of them belongs to the old deps
        try:
            repo.stage_cache.restore(stage, dry=True)
        except RunCacheNotFoundError:
            return True
        return False

    try:
        with _quiet_dvc(), Repo() as repo, repo.lock:
            return [instance for instance in instances if would_run(instance)]
    except DvcException as error:
        # For example because another dvc is at work in this checkout. To train alone is slower, but never wrong.
        print(f"{asked.name} trains alone, since DVC cannot say which others are pending: {error}", flush=True)
        return []


@contextlib.contextmanager
def _quiet_dvc() -> Iterator[None]:
    import logging

    logger = logging.getLogger("dvc")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_one(job: Job) -> JobFolder:
    """Run a job that has the devices to itself; returns its folder, with the result in it."""
    _say_unlisted(job)
    if job.folder.is_complete:
        _say_taken(job)
    if failures := run_jobs([job]):
        raise SwapError(failures[job.name])
    return job.folder


def run_fan_out(asked: Instance, *, others: Sequence[Instance], job: Callable[[Instance], Job]) -> JobFolder:
    """Run the job of an instance, and beside it, as devices allow, the pending ones of `others`; returns its folder.

    A job that fails does not disturb the rest. What became of the others is told when their turn comes.
    """
    own = job(asked)
    _say_unlisted(own)
    if own.folder.is_complete:
        _say_taken(own)
    else:
        alone = own.num_devices == len(this_machine().devices)
        beside = [] if alone else pending(others, asked=asked)
        failures = run_jobs([own, *(job(other) for other in beside)])
        for name in sorted(failures.keys() - {own.name}):
            print(f"{name} failed and will be tried again at its turn", file=sys.stderr, flush=True)
        if own.name in failures:
            raise SwapError(failures[own.name])
    return own.folder


def _say_unlisted(job: Job) -> None:
    """Once, in the first of the stages, is enough."""
    if job.instance.stage not in ("phase1", "small_batch"):
        return
    from ruamel.yaml import YAML

    params = YAML(typ="safe", pure=True).load(Path("params.yaml").read_text(encoding="utf-8"))
    deps, _ = declared_stage(job.instance)
    for file in unlisted_code(deps, params["model"]["name"]):
        print(
            f"note: {file} makes the network, but DVC does not know: list it in {job.instance.stage_file} under the "
            f"deps of every stage that trains or averages, so that `dvc repro` notices when you change it",
            flush=True,
        )


def _say_taken(job: Job) -> None:
    print(f"{job.name}: trained before, taken from {job.folder.path} (delete that folder to train again)", flush=True)


def run_jobs(jobs: Sequence[Job]) -> dict[str, str]:
    """Run the jobs, as many side by side as there are devices for; returns what failed, by name of the job.

    A job that another launcher is running already (a second experiment, or one whose `dvc` was killed) is waited for.
    """
    machine = this_machine()
    at_once = environment.max_workers_at_once(default=len(jobs))
    display = Display()
    waiting = list(jobs)
    running: list[_Running] = []
    failures: dict[str, str] = {}
    retries = {job.name: environment.num_retries() for job in jobs}
    with _signals_as_exceptions(), display.shown():
        try:
            while waiting or running:
                waiting = [job for job in waiting if not job.folder.is_complete]
                for job in list(waiting):
                    if len(running) < at_once and (started := _try_start(job, machine, display)):
                        waiting.remove(job)
                        running.append(started)
                        display.watch(job.name, job.folder.path)
                if waiting and not running:
                    display.say_once(f"{waiting[0].name}: waiting, its devices are in use by another process")
                for work in [work for work in running if work.is_over()]:
                    running.remove(work)
                    work.release()
                    failure = work.failure()
                    if failure and failure.may_pass and retries[work.job.name]:
                        retries[work.job.name] -= 1
                        display.say(f"{failure.text}\n{work.job.name}: starting it once more")
                        waiting.append(work.job)
                    elif failure:
                        failures[work.job.name] = failure.text
                        if len(jobs) > 1:
                            display.say(f"{work.job.name}: {failure.text.splitlines()[0]}")
                display.refresh()
                if waiting or running:
                    time.sleep(0.1)
        except Interrupted:
            display.say("interrupted: `dvc repro` goes on from the last finished epoch")
            raise
        finally:
            for work in running:
                work.ask_to_end()
            for work in running:
                work.end()
    return failures


def _try_start(job: Job, machine: Machine, display: Display) -> _Running | None:
    """The job at work, or None if it has to wait for its devices or for another launcher that is at it."""
    locks: list[Lock] = []
    devices: list[str] = []
    for device in machine.devices:
        lock = Lock(scratch_root() / "devices" / f"{machine.device_type}_{device}.lock")
        if len(devices) < job.num_devices and lock.try_acquire():
            locks.append(lock)
            devices.append(device)
    claim = Lock(job.folder.path / "launcher.lock")
    if len(devices) == job.num_devices:
        if claim.try_acquire():
            if not job.folder.is_complete:
                return _Running(job, machine, [claim, *locks], devices)
            claim.release()
        else:
            display.say_once(f"{job.name}: process {claim.holder()} is at this already, waiting for it")
    for lock in locks:
        lock.release()
    return None


@dataclass(frozen=True)
class _Failure:
    """Why a job is not complete."""

    text: str
    """for people; the first line says it all"""
    may_pass: bool
    """whether it may go better another time: nothing that the user has to mend was found"""


def _ended(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by signal {-code}{hint}"


class _Running:
    """A job whose processes are at work."""

    def __init__(self, job: Job, machine: Machine, locks: list[Lock], devices: list[str]) -> None:
        self.job = job
        self._locks = locks
        folder = job.folder.path
        for old in (*folder.glob(f"{SAID}_*.txt"), *folder.glob(f"{LOST}_*.txt"), folder / PROGRESS_FILE):
            old.unlink(missing_ok=True)
        variables = {
            **_MALLOC,  # freed activations are kept for the next step: on CPU 15 to 30 % faster
            **os.environ,
            "OMP_NUM_THREADS": str(job.threads),
            "MKL_NUM_THREADS": str(job.threads),
            "SWAP_DEVICE": machine.device_type,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_CACHE_DIR": str(scratch_root().resolve() / "compiled"),
            "TRITON_CACHE_DIR": str(scratch_root().resolve() / "compiled" / "triton"),
            "PYTHONUNBUFFERED": "1",
            PARENT: str(os.getpid()),
            JOB: str(folder.resolve()),
        }
        if machine.device_type == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if job.processes == 1:
            # torchrun would add a second process with torch in it, to watch over this one.
            command = [sys.executable, "-m", *job.instance.command]
            variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        else:
            command = [sys.executable, "-m", "swap_pipeline.torchrun", "--standalone"]
            command += ["--nproc-per-node", str(job.processes), "-m", *job.instance.command]
        with (folder / STDOUT_FILE).open("wb") as out, (folder / STDERR_FILE).open("wb") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                start_new_session=True,  # signals reach it through the launcher, once
            )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> _Failure | None:
        """What went wrong, if anything did."""
        if self._process.returncode == 0 and self.job.folder.is_complete:
            return None
        folder = self.job.folder.path
        said = sorted(folder.glob(f"{SAID}_*.txt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        if said:
            text = said[0].read_text(encoding="utf-8").strip()
            return _Failure(text, may_pass=text.startswith("unexpected"))
        if shutil.disk_usage(folder).free < _FULL:
            return _Failure(
                f"{folder}: no space is left on the disk: make room and run `dvc repro` again", may_pass=False
            )
        log = folder / STDERR_FILE
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:]
        return _Failure("\n".join([f"{self.job.name} {self._how_it_ended()}; the end of {log}:", *tail]), may_pass=True)

    def _how_it_ended(self) -> str:
        """Where no rank had anything to say of itself."""
        folder, code = self.job.folder.path, self._process.returncode
        lost = {int(path.stem.split("_")[1]): path.read_text() for path in folder.glob(f"{LOST}_*.txt")}
        silent = sorted(set(range(self.job.processes)) - set(lost))
        if silent and any(text.startswith("waited") for text in lost.values()):
            who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
            return (
                f"was ended: {who} did not answer for {environment.timeout_minutes():g} minutes (SWAP_TIMEOUT_MINUTES)"
            )
        log = (folder / STDERR_FILE).read_text(encoding="utf-8", errors="replace")
        if first := re.search(r"Root Cause.*?\brank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", log, re.DOTALL):
            return f"failed: its rank {first[1]} {_ended(int(first[2]))}"
        return _ended(code)

    def ask_to_end(self) -> None:
        if not self.is_over():
            self._process.terminate()

    def end(self) -> None:
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.release()

    def release(self) -> None:
        for lock in self._locks:
            lock.release()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the launcher's children first, then itself. `nohup` stays in force."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted(number)

    signals = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
