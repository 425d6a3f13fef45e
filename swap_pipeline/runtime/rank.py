"""A rank's process: whether this is one, its job, the parent it dies with, and its messages to the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from swap_pipeline.config.instances import Instance
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.environment import JOB, RESULT_NAME
from swap_pipeline.runtime.gpus import device_type_of_rank
from swap_pipeline.runtime.job_folder import JobFolder, job_folder
from swap_pipeline.runtime.stop_request import STOPPABLE

PARENT = "SWAP_PARENT_PID"
WORLD = "SWAP_WORLD_SIZE"
"""how many ranks the launcher started"""
SAID, LOST, STOPPED = "error", "lost", "stopped"
"""Kinds of message that a rank leaves for the launcher, in files of that name: its own error, that other ranks are
gone, or that it was asked to stop and has written a snapshot."""
UNEXPECTED = "unexpected"
"""An error that starts with this may be transient: the job is restarted."""
_LAG_SECONDS = 60
_PAUSE_SECONDS = 5


def is_rank() -> bool:
    """Whether this process is one of a job's ranks, started by the launcher or by torchrun."""
    return JOB in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def job_of_rank(instance: Instance) -> JobFolder:
    """The scratch folder of the job that this rank belongs to, also if torchrun was started by hand.

    A worker may have waited for its device. If params or dependencies have changed since its folder was named after
    them, it must not train under the old name.
    """
    meant, found = os.environ.get(WORLD), os.environ["WORLD_SIZE"]
    if JOB in os.environ and meant != found:
        raise SwapError(f"{instance.name}: expected {meant} ranks but found {found}: they did not find each other")
    import torch

    device = device_type_of_rank()
    # On a machine other than the launcher's, changes to files may become visible late.
    deadline = time.monotonic() + (_LAG_SECONDS if STOPPABLE in os.environ else 0)
    while True:
        try:
            folder = job_folder(
                instance,
                device_type=device,
                processes=int(os.environ["WORLD_SIZE"]),
                threads=torch.get_num_threads(),
            )
            if JOB not in os.environ:
                return folder
            path = Path(os.environ[JOB])
            if (path.name, os.environ.get(RESULT_NAME)) == (folder.path.name, folder.result_name):
                return replace(folder, path=path)
            raise SwapError(
                f"{instance.name}: params.yaml or a dependency changed after the start: run `dvc repro` again"
            )
        except (SwapError, OSError):
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it (`parent`, or the launcher) dies.

    torchrun puts its ranks into their own sessions, so they survive a kill of its process group and would keep training
    alongside their successors. Processes that `srun` starts on other nodes are ended by Slurm.
    """
    if sys.platform != "linux" or (parent is None and os.environ.get(PARENT) == "0"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    expected = parent or int(os.environ.get(PARENT, "0"))
    if expected and os.getppid() != expected:  # it died before the call above
        if parent is None:
            print(f"error: {PARENT} is {expected}, a process that is gone: `unset {PARENT} {JOB}`", file=sys.stderr)
            sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, which scans everything again and again and takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # modules stay, so later collections need not scan them
            gc.enable()


def check_variables() -> None:
    """Refuse an incomplete set of rank variables: one may have been left behind by an `export`."""
    needed = ("RANK", "WORLD_SIZE", *((WORLD,) if JOB in os.environ else ()))
    missing = [name for name in needed if not os.environ.get(name, "").isdecimal()]
    stale = [name for name in (JOB, "TORCHELASTIC_RUN_ID") if name in os.environ]
    if missing:
        raise SwapError(
            f"{' and '.join(stale)} left over from another job in the environment, without {' and '.join(missing)}: "
            f"`unset {' '.join(stale)}`, then run this again"
        )


def leave_for_launcher(message: str, *, kind: str = SAID) -> None:
    """A rank's standard error goes to a log; the launcher shows the contents of this file."""
    if JOB in os.environ and "RANK" in os.environ:
        with contextlib.suppress(OSError):  # on a full disk; the launcher checks for that too
            (Path(os.environ[JOB]) / f"{kind}_{os.environ['RANK']}.txt").write_text(message, encoding="utf-8")
