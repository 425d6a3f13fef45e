"""Which jobs there are and where they run: processes, devices, threads, phase 2's fan-out, and the wait for them.

Nothing here can change what is computed, so no stage lists this module in its `deps`. It decides by what the machine
or the cluster has and by the variables of `environment`. It does without torch, which takes seconds to import: the
processes that it starts have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swap_pipeline import cluster, environment
from swap_pipeline.errors import SwapError
from swap_pipeline.instances import Instance
from swap_pipeline.jobs import Job, Launcher, Machine, Work
from swap_pipeline.local import Local
from swap_pipeline.params import IntByEpoch, check_divisible
from swap_pipeline.progress import Display
from swap_pipeline.ranks import Interrupted, collects, is_orphan, is_rank, job_of_rank
from swap_pipeline.sbatch import Sbatch
from swap_pipeline.scratch import JobFolder, declared_stage, job_folder, unlisted_code
from swap_pipeline.srun import Srun


def launcher_kind() -> str:
    """`local`, `srun` or `sbatch`: SWAP_LAUNCHER, or what is at hand.

    Inside a Slurm allocation its nodes, unless this machine is the only one; outside of one, the cluster if a
    `cluster.yaml` describes it; else this machine.
    """
    if (wanted := environment.launcher()) is not None:
        return wanted
    if "SLURM_JOB_ID" in os.environ:
        return "local" if cluster.num_allocated_nodes() == 1 and cluster.is_on_allocated_node() else "srun"
    return "sbatch" if cluster.file().exists() else "local"


def launcher() -> Launcher:
    kind = launcher_kind()
    if kind == "srun":
        return Srun(len(this_machine().devices))
    return Sbatch(cluster.read()) if kind == "sbatch" else Local(local_machine())


def this_machine() -> Machine:
    """What jobs can have: this machine, the nodes of the allocation, or those that cluster.yaml speaks of."""
    kind = launcher_kind()
    if kind == "srun":
        return cluster.allocation()
    if kind == "sbatch":
        return cluster.read().machine
    return local_machine()


def local_machine() -> Machine:
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


def _job(instance: Instance, machine: Machine, *, nodes: int, processes: int, threads: int, num_devices: int) -> Job:
    return Job(
        instance=instance,
        device_type=machine.device_type,
        nodes=nodes,
        processes=processes,
        threads=threads,
        num_devices=num_devices,
        folder=job_folder(instance, device_type=machine.device_type, processes=processes, threads=threads),
    )


def num_ranks(machine: Machine) -> int:
    """Processes of a job that has all devices: SWAP_NPROC, or one for each GPU."""
    # On CPU two ranks are as fast as one with two threads and show that the ranks work; more would leave batch norm
    # too few samples each. Their threads use the other cores.
    on_cpu = machine.nodes if machine.nodes > 1 else min(2, machine.cores)
    processes = environment.num_processes(machine.num_devices if machine.device_type == "cuda" else on_cpu)
    if machine.device_type == "cuda" and processes > machine.num_devices:
        raise SwapError(f"SWAP_NPROC is {processes}, but there are {machine.num_devices} GPUs: lower it")
    if processes % machine.nodes:
        raise SwapError(
            f"SWAP_NPROC is {processes}, which {machine.nodes} nodes cannot share: set it to a multiple of that"
        )
    return processes


def threads_of_ranks(machine: Machine, processes: int) -> int:
    """Of each process of a job that has all devices."""
    return max(1, machine.cores // (processes // machine.nodes))


def job_on_all_devices(instance: Instance, *, section: str = "", batch_size: IntByEpoch | None = None) -> Job:
    """Phases 1 and 3: one job that has the machine, or all nodes, to itself."""
    machine = this_machine()
    processes = num_ranks(machine)
    if batch_size is not None:
        key = f"{section or instance.method}.batch_size"
        check_divisible(key, batch_size, processes, remedy="set SWAP_NPROC to")
    return _job(
        instance,
        machine,
        nodes=machine.nodes,
        processes=processes,
        threads=threads_of_ranks(machine, processes),
        num_devices=processes if machine.device_type == "cuda" else machine.num_devices,
    )


def worker_job(instance: Instance, *, processes: int, batch_size: IntByEpoch) -> Job:
    """Phase 2: a worker with devices of its own."""
    machine = this_machine()
    check_divisible("phase2.batch_size", batch_size, processes, remedy="set phase2.gpus_per_worker to")
    if processes > machine.num_devices:
        what = "GPUs" if machine.device_type == "cuda" else "CPU cores, which stand in for GPUs"
        who = "this machine has" if machine.nodes == 1 else f"{machine.nodes} nodes have"
        raise SwapError(f"params.yaml: phase2.gpus_per_worker is {processes}, but {who} {machine.num_devices} {what}")
    return _job_on_some_devices(instance, machine, processes, key="phase2.gpus_per_worker")


def baseline_job(instance: Instance, *, gpus: int, batch_size: IntByEpoch, section: str = "") -> Job:
    """A comparison: `gpus` devices, or all if there are fewer. On a CPU that is one core, or all as in phase 1."""
    machine = this_machine()
    if gpus > 1 and (gpus >= machine.num_devices or machine.device_type == "cpu"):
        return job_on_all_devices(instance, section=section, batch_size=batch_size)
    section = section or instance.method
    check_divisible(f"{section}.batch_size", batch_size, gpus, remedy=f"set {section}.gpus to")
    return _job_on_some_devices(instance, machine, gpus, key=f"{section}.gpus")


def _job_on_some_devices(instance: Instance, machine: Machine, processes: int, *, key: str) -> Job:
    """On a CPU a device is a core, and a process has one thread, always: the number of threads changes the bytes and
    must not depend on how many jobs there are."""
    per_node = len(machine.devices)
    nodes = math.ceil(processes / per_node)
    if processes % nodes:
        whole = processes // per_node * per_node
        raise SwapError(
            f"params.yaml: {key} is {processes}, which {nodes} nodes with {per_node} each cannot share evenly: "
            f"set it to {whole} or {whole + per_node}"
        )
    threads = 1 if machine.device_type == "cpu" else max(1, machine.cores // per_node)
    return _job(instance, machine, nodes=nodes, processes=processes, threads=threads, num_devices=processes)


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


def run_on_all_devices(
    instance: Instance, *, be_a_rank: Callable[[JobFolder], None], batch_size: IntByEpoch | None = None
) -> None:
    """The whole of a stage with one job: this process is one of its ranks, or starts them; the result is collected."""
    if is_rank():
        folder = job_of_rank(instance)
        be_a_rank(folder)
    else:
        folder = run_one(job_on_all_devices(instance, batch_size=batch_size))
    if collects():
        folder.collect(instance)


def run_fan_out(asked: Instance, *, others: Sequence[Instance], job: Callable[[Instance], Job]) -> JobFolder:
    """Run the job of an instance, and beside it, as devices allow, the pending ones of `others`; returns its folder.

    A job that fails does not disturb the rest. What became of the others is told when their turn comes.
    """
    own = job(asked)
    _say_unlisted(own)
    if own.folder.is_complete:
        _say_taken(own)
    else:
        alone = launcher().shares_devices and own.num_devices == this_machine().num_devices
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
    A launcher whose own `dvc` was killed lets its jobs end and starts no others.
    """
    place = launcher()
    at_once = environment.max_workers_at_once(default=len(jobs))
    display = Display()
    waiting = list(jobs)
    running: list[Work] = []
    failures: dict[str, str] = {}
    retries = {job.name: environment.num_retries() for job in jobs}
    with display.shown():
        try:
            while waiting or running:
                waiting = [job for job in waiting if not job.folder.is_complete]
                if is_orphan():
                    waiting = []  # what is running may end, but nobody is there to want more
                for work in place.start(waiting, room=at_once - len(running), display=display):
                    waiting.remove(work.job)
                    running.append(work)
                    display.watch(work.job.name, work.job.folder.path)
                if waiting and not running and place.shares_devices:
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
                            first = failure.text.splitlines()[0]
                            display.say(first if first.startswith(work.job.name) else f"{work.job.name}: {first}")
                place.watch(display)
                display.refresh()
                if waiting or running:
                    time.sleep(0.1)
        except Interrupted as interrupted:
            display.say(place.interrupted(interrupted.number, display))
            interrupted.is_told = True
            raise
        finally:
            for work in running:
                work.ask_to_end()
            for work in running:
                work.end()
    return failures
