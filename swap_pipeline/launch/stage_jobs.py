"""Starting jobs and waiting for them; phase 2's fan-out.

Nothing here can change the result, so no stage lists this room in its `deps`. It does not import torch, which takes
seconds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from swap_pipeline.config.instances import Instance
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.collecting import collect, set_aside_damaged
from swap_pipeline.launch.devices import Share, launcher_kind, local_machine, share_of_phase1, this_machine
from swap_pipeline.launch.display import Display
from swap_pipeline.launch.jobs import Job, Launcher, Work
from swap_pipeline.launch.local import Local, places_per_device
from swap_pipeline.launch.slurm import cluster
from swap_pipeline.launch.slurm.sbatch import Sbatch
from swap_pipeline.launch.slurm.srun import Srun
from swap_pipeline.runtime import environment
from swap_pipeline.runtime.inputs import declared_stage, unlisted_code
from swap_pipeline.runtime.job_folder import JobFolder, job_folder
from swap_pipeline.runtime.rank import is_rank, job_of_rank
from swap_pipeline.runtime.stage_process import Interrupted, collects, is_orphan

_OPEN_FILES = 256


def launcher() -> Launcher:
    kind = launcher_kind()
    if kind == "srun":
        return Srun(len(this_machine().devices))
    return Sbatch(cluster.read()) if kind == "sbatch" else Local(local_machine())


def job_with(instance: Instance, share: Share) -> Job:
    """An instance as a job on that part of the machine."""
    device_type = this_machine().device_type
    return Job(
        instance=instance,
        device_type=device_type,
        nodes=share.nodes,
        processes=share.processes,
        threads=share.threads,
        num_devices=share.num_devices,
        folder=job_folder(instance, device_type=device_type, processes=share.processes, threads=share.threads),
    )


def pending(instances: Sequence[Instance], *, asked: Instance) -> list[Instance]:
    """Those that DVC would run too: neither up to date nor in its run cache.

    Only DVC knows, so it is asked. Without DVC, or with SWAP_FANOUT=0, there are none.
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
        stage = load(instance)
        if not (stage.changed_stage() or stage.changed_deps()):
            # As in dvc.lock: DVC keeps the outs, or restores them from its cache.
            return bool(stage.changed_outs() and not stage.outs_cached())
        stage.save_deps()
        for out in stage.outs:
            out.hash_info = HashInfo()  # those in dvc.lock belong to the old deps
        try:
            repo.stage_cache.restore(stage, dry=True)
        except RunCacheNotFoundError:
            return True
        return False

    try:
        with _quiet_dvc(), Repo() as repo, repo.lock:
            return [instance for instance in instances if would_run(instance)]
    except DvcException as error:
        # For example, another dvc is running in this checkout. Training alone is slower, but never wrong.
        print(f"{asked.name} trains alone: DVC could not say which others are pending ({error})", flush=True)
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
    set_aside_damaged(job.folder)
    if job.folder.is_complete:
        _say_taken(job)
    if failures := run_jobs([job]):
        raise SwapError(failures[job.name])
    return job.folder


def run_alone(instance: Instance, *, shards: int, be_a_rank: Callable[[JobFolder], None]) -> None:
    """A whole stage with one job: this process is one of its ranks, or starts them; then the result is collected."""
    if is_rank():
        folder = job_of_rank(instance)
        be_a_rank(folder)
    else:
        share = share_of_phase1(this_machine(), shards=shards, at_most=environment.num_processes())
        folder = run_one(job_with(instance, share))
    if collects():
        collect(folder, instance)


def run_fan_out(asked: Instance, *, others: Sequence[Instance], job: Callable[[Instance], Job]) -> JobFolder:
    """Run an instance's job and, as far as there are devices, the pending ones of `others`; returns its folder.

    A job that fails does not disturb the rest. The others report their results when their turn comes.
    """
    own = job(asked)
    _say_unlisted(own)
    set_aside_damaged(own.folder)
    if own.folder.is_complete:
        _say_taken(own)
    else:
        fills_all = own.num_devices == this_machine().num_devices and places_per_device(asked, own.device_type) == 1
        alone = launcher().shares_devices and fills_all
        beside = [] if alone else pending(others, asked=asked)
        if beside:
            names = ", ".join(other.name for other in beside)
            print(f"{own.name}: also training {names}, as devices allow", flush=True)
        failures = run_jobs([own, *(job(other) for other in beside)])
        for name in sorted(failures.keys() - {own.name}):
            print(f"{name} failed; it will be tried again when its turn comes", file=sys.stderr, flush=True)
        if own.name in failures:
            raise SwapError(failures[own.name])
    return own.folder


def _say_unlisted(job: Job) -> None:
    """Only in phase 1: once is enough."""
    if job.instance.stage != "phase1":
        return
    deps, _ = declared_stage(job.instance)
    for file in unlisted_code(deps):
        print(
            f"note: DVC does not know that {file} defines the network: add it to the deps of every stage in "
            f"{job.instance.stage_file} that trains or averages, so that `dvc repro` notices when you change it",
            flush=True,
        )


def _say_taken(job: Job) -> None:
    print(f"{job.name}: already trained, taken from {job.folder.path} (delete that folder to train again)", flush=True)


def _allow_open_files() -> None:
    """Raise the limit, which ranks and their loaders inherit; torchrun does not explain one that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        if 0 <= hard < _OPEN_FILES:
            raise SwapError(
                f"this process may open only {hard} files: raise the limit (`ulimit -n 1024`), then try again"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, hard))


def run_jobs(jobs: Sequence[Job]) -> dict[str, str]:
    """Run the jobs, as many at a time as there are devices for; returns errors by name of the job.

    If another launcher is already running a job (a second experiment, or one whose `dvc` was killed), wait for it. A
    launcher whose own `dvc` was killed lets its jobs finish and starts no others.
    """
    _allow_open_files()
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
                    waiting = []  # nobody is left to use more results
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
                        display.say(f"{failure.text}\n{work.job.name}: restarting it")
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
