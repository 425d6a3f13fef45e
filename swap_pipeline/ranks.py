"""A stage's process and those that started it: who is a rank, whose job it is, and how errors reach people."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swap_pipeline.dvc_cache import distrust
from swap_pipeline.environment import JOB, device_type, is_debugging, timeout_minutes
from swap_pipeline.errors import NEW_LINES, DamagedFileError, SwapError, printable
from swap_pipeline.instances import Instance
from swap_pipeline.last_resort import HANDLED, line_of, open_closed_streams, remedy_of, report
from swap_pipeline.scratch import JobFolder, job_folder
from swap_pipeline.stopping import STOPPABLE, Stopped

PARENT = "SWAP_PARENT_PID"
WORLD = "SWAP_WORLD_SIZE"
"""how many ranks the launcher meant to start"""
SAID, LOST, STOPPED = "error", "lost", "stopped"
"""What a rank leaves for the launcher in a file of that name: an error of its own, that others are gone, or that it was
asked to end and has left a snapshot."""
UNEXPECTED = "unexpected"
"""An error that begins so may not come a second time: the job is started once more."""
_STARTED_BY = os.getppid()
_LAG_SECONDS = 60
_PAUSE_SECONDS = 5


class Interrupted(BaseException):
    """The launcher was asked to end by a signal; not an error, so nothing that handles errors sees it."""

    is_told = False
    """whether the user knows what becomes of the jobs that were at work"""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
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

    device = device_type(has_gpu=torch.cuda.is_available())
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
            if Path(os.environ[JOB]).name == folder.path.name:
                return JobFolder(Path(os.environ[JOB]), folder.inputs)
            raise SwapError(
                f"{instance.name}: params.yaml or a dependency changed after the start: run `dvc repro` again"
            )
        except (SwapError, OSError):
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


def is_orphan() -> bool:
    """Whether the process that started this one, `dvc` as a rule, was killed."""
    return os.getppid() != _STARTED_BY


def collects() -> bool:
    """Whether this process puts the result in its place: the launcher, or the main rank of torchrun by hand.

    A launcher whose `dvc` was killed leaves the result in scratch: by now, another `dvc` may have other plans.
    """
    if is_rank():
        return JOB not in os.environ and os.environ["RANK"] == "0"
    if is_orphan():
        print(f"{sys.argv[0]}: whoever started this is gone; `dvc repro` will find the result in scratch")
        return False
    return True


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


def run_stage(main: Callable[[], Any]) -> None:
    """Call a stage's click command; what the user can mend ends in one line and exit code 1."""
    open_closed_streams()
    if is_rank():
        die_with_parent()
    try:
        if is_rank():
            check_variables()
            with quick_imports():
                import torch  # noqa: F401
        if "TORCHELASTIC_RUN_ID" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import record

            main = record(main)  # torchrun then shows the traceback of the rank that failed first
        with contextlib.nullcontext() if is_rank() else signals_as_exceptions():
            main()
    except SwapError as error:
        if isinstance(error, DamagedFileError):
            distrust(error.path)
        _fail(str(error))
    except Interrupted as interrupted:
        if not interrupted.is_told:
            print("interrupted: `dvc repro` goes on from here", flush=True)
        sys.exit(128 + interrupted.number)
    except Stopped:
        leave_for_launcher("asked to end, state kept", kind=STOPPED)  # exit code 0: torchrun takes others for failures
    except Exception as error:
        if is_rank():
            _tell_launcher(error)
        elif isinstance(error, HANDLED):
            report(error, doing=Path(sys.argv[0]).stem)
            sys.exit(1)
        raise


def _fail(message: str) -> None:
    leave_for_launcher(message)
    print(f"error: {printable(message, keep=NEW_LINES)}", file=sys.stderr, flush=True)
    sys.exit(1)


def _tell_launcher(error: Exception) -> None:
    """What a rank has to say of an error that is no `SwapError`; its traceback is in its log."""
    if message := remedy_of(error):
        _fail(message)
    if message := _of_other_ranks(error):
        leave_for_launcher(message, kind=LOST)
        time.sleep(2)  # so that every other rank that waits has the time to say so too
        return
    who = f"{UNEXPECTED} error in rank {os.environ['RANK']}"
    if isinstance(error, HANDLED) and not is_debugging():
        leave_for_launcher(line_of(error, doing=who))
    else:
        leave_for_launcher(f"{who}\n{traceback.format_exc()}")


def check_variables() -> None:
    """That who calls this process a rank also says which one: an exported variable may have been left behind."""
    missing = [name for name in ("RANK", "WORLD_SIZE") if not os.environ.get(name, "").isdecimal()]
    stale = [name for name in (JOB, "TORCHELASTIC_RUN_ID") if name in os.environ]
    if missing:
        raise SwapError(
            f"{' and '.join(stale)} of another job in the environment, without {' and '.join(missing)}: "
            f"`unset {' '.join(stale)}`, then run this again"
        )


def _of_other_ranks(error: Exception) -> str:
    """What to tell of an error that only says that another rank is gone; empty for any other."""
    text = str(error)
    if "Timed out waiting" in text or "wait timeout after" in text:
        return f"waited {timeout_minutes():g} minutes for another rank"
    if any(words in text for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")):
        return "another rank is gone"
    return ""


def leave_for_launcher(message: str, *, kind: str = SAID) -> None:
    """A rank's standard error goes to a log; its launcher shows what stands in this file."""
    if JOB in os.environ and "RANK" in os.environ:
        with contextlib.suppress(OSError):  # on a full disk; the launcher looks at that too
            (Path(os.environ[JOB]) / f"{kind}_{os.environ['RANK']}.txt").write_text(message, encoding="utf-8")
