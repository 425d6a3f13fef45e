"""A rank's process: whether this is one, whose job it is, whom it dies with, and what it leaves for the launcher."""

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
"""how many ranks the launcher meant to start"""
SAID, LOST, STOPPED = "error", "lost", "stopped"
"""What a rank leaves for the launcher in a file of that name: an error of its own, that others are gone, or that it was
asked to end and has left a snapshot."""
UNEXPECTED = "unexpected"
"""An error that begins so may not come a second time: the job is started once more."""
_LAG_SECONDS = 60
_PAUSE_SECONDS = 5


def is_rank() -> bool:
    """Whether this process is one of a job's ranks, started by the launcher or by torchrun."""
    return JOB in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def job_of_rank(instance: Instance) -> JobFolder:
    """The scratch folder of the job that this rank belongs to, also where torchrun was started by hand.

    A worker may have waited for its device. If params or dependencies have changed since its folder was named after
    them, it must not train under the old name.
    """
    meant, found = os.environ.get(WORLD), os.environ["WORLD_SIZE"]
    if JOB in os.environ and meant != found:
        raise SwapError(f"{instance.name}: {meant} ranks were meant to start, but they are {found}: they did not meet")
    import torch

    device = device_type_of_rank()
    # On another machine than the launcher's, files may be seen late as they are now.
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
    """Ask the kernel to end this process with the one that started it: `parent`, or the launcher.

    torchrun puts its ranks into sessions of their own, so they outlive a kill of its process group and would go on
    training beside their successors. What `srun` starts on other nodes, where the launcher is not, Slurm ends.
    """
    if sys.platform != "linux" or (parent is None and os.environ.get(PARENT) == "0"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    expected = parent or int(os.environ.get(PARENT, "0"))
    if expected and os.getppid() != expected:  # it was gone before the kernel knew
        if parent is None:
            print(f"error: {PARENT} is {expected}, a process that is gone: `unset {PARENT} {JOB}`", file=sys.stderr)
            sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Without garbage collection, which looks through all that is imported again and again, for a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # modules stay, so that no later collection need look at them
            gc.enable()


def check_variables() -> None:
    """That who calls this process a rank also says which one: an exported variable may have been left behind."""
    needed = ("RANK", "WORLD_SIZE", *((WORLD,) if JOB in os.environ else ()))
    missing = [name for name in needed if not os.environ.get(name, "").isdecimal()]
    stale = [name for name in (JOB, "TORCHELASTIC_RUN_ID") if name in os.environ]
    if missing:
        raise SwapError(
            f"{' and '.join(stale)} of another job in the environment, without {' and '.join(missing)}: "
            f"`unset {' '.join(stale)}`, then run this again"
        )


def leave_for_launcher(message: str, *, kind: str = SAID) -> None:
    """A rank's standard error goes to a log; its launcher shows what stands in this file."""
    if JOB in os.environ and "RANK" in os.environ:
        with contextlib.suppress(OSError):  # on a full disk; the launcher looks at that too
            (Path(os.environ[JOB]) / f"{kind}_{os.environ['RANK']}.txt").write_text(message, encoding="utf-8")
