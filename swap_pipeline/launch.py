"""Where a job runs: processes, devices, threads, and phase 2's fan-out over device slots.

Nothing here can change what is computed, so no stage lists this module in its `deps`. What it decides on comes from
the machine and from environment variables:

    SWAP_DEVICE   cpu or cuda                              (default: cuda if there is a GPU)
    SWAP_NPROC    processes of phases 1 and 3              (default: one a GPU; on CPU 2)
    SWAP_SLOTS    workers of phase 2 that run side by side (default: as the devices allow; on CPU one a core)
    SWAP_FANOUT   0: a phase-2 instance trains its own seed alone

This module does without torch, which takes seconds to import: the processes that it starts have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_pipeline.errors import SwapError
from swap_pipeline.progress import PROGRESS_FILE, STDOUT_FILE, Display
from swap_pipeline.scratch import JobFolder, Lock, fingerprint, scratch_root

STDERR_FILE = "stderr.log"
_PARENT = "SWAP_PARENT_PID"
_JOB = "SWAP_JOB"
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = _gpus()
    wanted = os.environ.get("SWAP_DEVICE") or ("cuda" if gpus else "cpu")
    if wanted not in ("cpu", "cuda"):
        raise SwapError(f"SWAP_DEVICE is {wanted!r}: choose cpu or cuda")
    if wanted == "cuda" and not gpus:
        raise SwapError("SWAP_DEVICE is cuda, but no GPU can be seen: check `nvidia-smi`, or set SWAP_DEVICE=cpu")
    devices = gpus if wanted == "cuda" else tuple(str(core) for core in range(cores))
    return Machine(device_type=wanted, devices=devices[: _count("SWAP_SLOTS", len(devices))], cores=cores)


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


def _count(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise SwapError(f"{variable} is {text!r}: write a whole number, at least 1")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run: some processes on some devices, with a scratch folder."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    processes: int
    threads: int
    num_devices: int
    folder: JobFolder


def job_on_all_devices(stage: str, *, batch_size: int | None = None) -> Job:
    """Phases 1 and 3: one job that has the machine to itself."""
    machine = this_machine()
    default = len(machine.devices) if machine.device_type == "cuda" else min(2, machine.cores)
    processes = _count("SWAP_NPROC", default)
    if machine.device_type == "cuda" and processes > len(machine.devices):
        raise SwapError(f"SWAP_NPROC is {processes}, but there are {len(machine.devices)} GPUs: lower it")
    if batch_size is not None:
        check_divisible(f"{stage}.batch_size", batch_size, processes, "set SWAP_NPROC to")
    return _job(
        stage,
        name=stage,
        processes=processes,
        threads=max(1, machine.cores // processes),
        num_devices=processes if machine.device_type == "cuda" else len(machine.devices),
        device_type=machine.device_type,
    )


def worker_job(stage: str, *, seed: int, processes: int, batch_size: int) -> Job:
    """Phase 2: a worker with devices of its own. On a CPU a device is a core, and a process has one thread, always:
    the number of threads changes the bytes and must not depend on how many workers there are."""
    machine = this_machine()
    check_divisible(f"{stage}.batch_size", batch_size, processes, f"set {stage}.gpus_per_worker to")
    if processes > len(machine.devices):
        what = "GPUs" if machine.device_type == "cuda" else "CPU cores, which stand in for GPUs"
        raise SwapError(
            f"params.yaml: {stage}.gpus_per_worker is {processes}, but this machine has {len(machine.devices)} {what}"
        )
    return _job(
        stage,
        name=f"{stage} seed {seed}",
        arguments=("--seed", str(seed)),
        item={"seed": seed},
        processes=processes,
        threads=1 if machine.device_type == "cpu" else max(1, machine.cores // len(machine.devices)),
        num_devices=processes,
        device_type=machine.device_type,
    )


def _job(stage: str, *, device_type: str, item: dict[str, Any] | None = None, **fields: Any) -> Job:
    processes, threads = fields["processes"], fields["threads"]
    folder = job_folder(stage, device_type=device_type, processes=processes, threads=threads, item=item or {})
    return Job(module=f"stages.{stage}", folder=folder, **fields)


def job_folder(stage: str, *, device_type: str, processes: int, threads: int, item: dict[str, Any]) -> JobFolder:
    facts = {"processes": processes, "device": device_type}
    if device_type == "cpu":
        facts["threads"] = threads
    return JobFolder(scratch_root() / stage / fingerprint(stage, item=item, facts=facts))


def check_divisible(key: str, batch_size: int, processes: int, remedy: str) -> None:
    if batch_size % processes:
        best = max(n for n in range(1, processes + 1) if batch_size % n == 0)
        raise SwapError(
            f"params.yaml: {key} is {batch_size}, which {processes} processes cannot share equally: "
            f"choose a multiple of {processes}, or {remedy} {best}"
        )


def pending_seeds(stage: str, seeds: Sequence[int], *, asked: int) -> list[int]:
    """The seeds beside `asked` whose instance DVC would run too: not up to date, nor to be had from its cache.

    Only DVC itself knows, so it is asked. Without DVC, or with SWAP_FANOUT=0, there are none.
    """
    if "DVC_STAGE" not in os.environ or os.environ.get("SWAP_FANOUT") == "0":
        return []
    from dvc.lock import LockError
    from dvc.repo import Repo
    from dvc.stage.cache import RunCacheNotFoundError
    from dvc_data.hashfile.hash_info import HashInfo

    def would_run(instance: Any) -> bool:
        if not (instance.changed_stage() or instance.changed_deps()):
            # As in dvc.lock: DVC keeps the outs, or checks them out of its cache.
            return bool(instance.changed_outs() and not instance.outs_cached())
        instance.save_deps()
        for out in instance.outs:
            out.hash_info = HashInfo()  # what dvc.lock says of them belongs to the old deps
        try:
            repo.stage_cache.restore(instance, dry=True)
        except RunCacheNotFoundError:
            return True
        return False

    try:
        with _quiet_dvc(), Repo() as repo, repo.lock:
            instances = {seed: repo.stage.load_one(name=f"{stage}@{seed}") for seed in seeds if seed != asked}
            return [seed for seed, instance in instances.items() if would_run(instance)]
    except LockError:
        # Another dvc is at work in this checkout. To train alone is slower, but never wrong.
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
    if failures := run_jobs([job]):
        raise SwapError(failures[job.name])
    return job.folder


def run_fan_out(seed: int, *, others: Callable[[], Sequence[int]], job: Callable[[int], Job]) -> JobFolder:
    """Run the worker of `seed`, and the `others` beside it; returns its own folder, with the result in it.

    A worker that fails does not disturb the rest. What became of the others is told when their turn comes.
    """
    own = job(seed)
    if not own.folder.is_complete:
        failures = run_jobs([own, *(job(other) for other in others())])
        for name in sorted(failures.keys() - {own.name}):
            print(f"{name} failed and will be tried again at its turn", file=sys.stderr, flush=True)
        if own.name in failures:
            raise SwapError(failures[own.name])
    return own.folder


class _Running:
    """A job whose processes are at work."""

    def __init__(self, job: Job, machine: Machine, locks: list[Lock], devices: list[str]) -> None:
        self.job = job
        self._locks = locks
        folder = job.folder.path
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("error_*.txt"), folder / PROGRESS_FILE):
            old.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(job.threads),
            "MKL_NUM_THREADS": str(job.threads),
            "SWAP_DEVICE": machine.device_type,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Keep freed activations for the next step instead of handing them back to the kernel: on two cores,
            # ResNet-9 at width 8 trains about a quarter faster.
            **{name: os.environ.get(name, value) for name, value in _MALLOC.items()},
            "PYTHONUNBUFFERED": "1",
            _PARENT: str(os.getpid()),
            _JOB: str(folder.resolve()),
        }
        if machine.device_type == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if job.processes == 1:
            # torchrun would add a second process with torch in it, to watch over this one.
            command = [sys.executable, "-m", job.module]
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        else:
            command = [sys.executable, "-m", "swap_pipeline.torchrun", "--standalone"]
            command += ["--nproc-per-node", str(job.processes), "-m", job.module]
        command += job.arguments
        with (folder / STDOUT_FILE).open("wb") as out, (folder / STDERR_FILE).open("wb") as err:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> str:
        """What went wrong, for people; empty if nothing did."""
        if self._process.returncode == 0 and self.job.folder.is_complete:
            return ""
        folder = self.job.folder.path
        said = sorted(folder.glob("error_*.txt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        if said:
            return said[0].read_text(encoding="utf-8").strip()
        log = folder / STDERR_FILE
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-30:]
        code = self._process.returncode
        ended = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
        return "\n".join([*tail, f"{self.job.name} {ended}; its whole log is {log}"])

    def end(self) -> None:
        if not self.is_over():
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.release()

    def release(self) -> None:
        for lock in self._locks:
            lock.release()


def run_jobs(jobs: Sequence[Job]) -> dict[str, str]:
    """Run the jobs, as many side by side as there are devices for; returns what failed, by name of the job.

    A job that another launcher is running already (a second experiment, or one whose `dvc` was killed) is waited for.
    """
    machine = this_machine()
    display = Display()
    waiting = list(jobs)
    running: list[_Running] = []
    failures: dict[str, str] = {}
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            display.say(text)

    with _signals_as_exceptions(), display.shown():
        try:
            while waiting or running:
                for job in list(waiting):
                    started = _try_start(job, machine, tell)
                    if started is None:
                        continue
                    waiting.remove(job)
                    if isinstance(started, _Running):
                        running.append(started)
                        display.watch(job.name, job.folder.path)
                for work in [work for work in running if work.is_over()]:
                    running.remove(work)
                    display.refresh()
                    work.release()
                    if failure := work.failure():
                        failures[work.job.name] = failure
                display.refresh()
                if waiting or running:
                    time.sleep(0.05)
        except Interrupted:
            display.say("interrupted: `dvc repro` goes on from the last finished epoch")
            raise
        finally:
            for work in running:
                work.end()
    return failures


def _try_start(job: Job, machine: Machine, tell: Callable[[str], None]) -> _Running | bool | None:
    """The job at work, True if there is nothing left to do for it, or None if it has to wait."""
    if job.folder.is_complete:
        return True
    claim = Lock(job.folder.path / "launcher.lock")
    if not claim.try_acquire():
        tell(f"{job.name}: process {claim.holder()} is at this already, waiting for it")
        return None
    if job.folder.is_complete:
        claim.release()
        return True
    locks, devices = [claim], []
    for device in machine.devices:
        lock = Lock(scratch_root() / "devices" / f"{machine.device_type}_{device}.lock")
        if lock.try_acquire():
            locks.append(lock)
            devices.append(device)
        if len(devices) == job.num_devices:
            return _Running(job, machine, locks, devices)
    for lock in locks:
        lock.release()
    return None


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the launcher's children first, then itself."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Interrupted(BaseException):
    """The launcher was asked to end by a signal; not an error, so nothing that handles errors sees it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def is_rank() -> bool:
    """Whether this process is one of a job's ranks, started by torchrun or by the launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def job_of_rank(stage: str, **item: Any) -> JobFolder:
    """The scratch folder of the job that this rank belongs to, also where torchrun was started by hand."""
    if _JOB in os.environ:
        return JobFolder(Path(os.environ[_JOB]))
    import torch

    device_type = os.environ.get("SWAP_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    processes, threads = int(os.environ["WORLD_SIZE"]), torch.get_num_threads()
    return job_folder(stage, device_type=device_type, processes=processes, threads=threads, item=item)


def collects() -> bool:
    """Whether this process puts the result in its place: the launcher, or the main rank of torchrun by hand."""
    return not is_rank() or (_JOB not in os.environ and os.environ["RANK"] == "0")


def die_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it.

    torchrun puts its ranks into sessions of their own, so they outlive a kill of its process group and would go on
    training beside their successors.
    """
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get(_PARENT)
    if expected is not None and os.getppid() != int(expected):
        os._exit(1)  # it was gone before the kernel knew


def parent_of_ranks() -> None:
    """Announce this process to its children as the one to die with."""
    os.environ[_PARENT] = str(os.getpid())


def run_stage(main: Callable[[], Any]) -> None:
    """Call a stage's click command; what the user can mend ends in one line and exit code 1."""
    if is_rank():
        die_with_parent()
    try:
        main()
    except SwapError as error:
        _leave_for_launcher(str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("swap_pipeline", "stages")):
            raise
        print(
            f"error: {sys.executable} has no package {error.name!r}: activate the project's environment "
            f"(`source .venv/bin/activate`), or install the project there (`pip install -c constraints.txt -e .`)",
            file=sys.stderr,
        )
        sys.exit(1)


def _leave_for_launcher(message: str) -> None:
    """A rank's standard error goes to a log; its launcher shows what stands in this file."""
    if is_rank() and _JOB in os.environ:
        (Path(os.environ[_JOB]) / f"error_{os.environ['RANK']}.txt").write_text(message, encoding="utf-8")
