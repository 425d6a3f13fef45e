"""A stage's process, launcher or rank: signals, who collects the result, and how errors are reported."""

from __future__ import annotations

import contextlib
import filecmp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swap_pipeline.errors import NEW_LINES, DamagedFileError, SwapError, printable
from swap_pipeline.runtime.environment import JOB, is_debugging, timeout_minutes
from swap_pipeline.runtime.last_resort import HANDLED, line_of, open_closed_streams, outlive_readers, remedy_of, report
from swap_pipeline.runtime.rank import (
    LOST,
    STOPPED,
    UNEXPECTED,
    check_variables,
    die_with_parent,
    is_rank,
    leave_for_launcher,
    quick_imports,
)
from swap_pipeline.runtime.stop_request import Stopped

_STARTED_BY = os.getppid()


class Interrupted(BaseException):
    """A signal asked the launcher to stop; not an `Exception`, so error handlers do not catch it."""

    is_told = False
    """whether the user was told what happens to the running jobs"""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP stop the launcher's children first, then the launcher. `nohup` still works."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted(number)

    signals = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def is_orphan() -> bool:
    """Whether the process that started this one, usually `dvc`, is gone."""
    return os.getppid() != _STARTED_BY


def dvc_started() -> float | None:
    """When the `dvc` that runs this stage was started; None if it was started by hand."""
    import psutil

    try:
        for process in psutil.Process().parents():
            if any(Path(part).name == "dvc" for part in process.cmdline()[:3]):
                return float(process.create_time())
    except psutil.Error:  # it has just exited, or belongs to another user
        pass
    return None


def collects() -> bool:
    """Whether this process collects the result: the launcher, or the main rank if torchrun was started by hand.

    A launcher whose `dvc` was killed leaves the result in scratch: another `dvc` may be running by now.
    """
    if is_rank():
        return JOB not in os.environ and os.environ["RANK"] == "0"
    if is_orphan():
        print(f"{sys.argv[0]}: the process that started this is gone; `dvc repro` will find the result in scratch")
        return False
    return True


def run_stage(main: Callable[[], Any]) -> None:
    """Call a stage's click command; an error that the user can fix becomes one line and exit code 1."""
    open_closed_streams()
    outlive_readers()
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
            _distrust(error.path)
        _fail(str(error))
    except Interrupted as interrupted:
        if not interrupted.is_told:
            print("interrupted: `dvc repro` resumes from here", flush=True)
        sys.exit(128 + interrupted.number)
    except Stopped:
        leave_for_launcher("asked to stop, snapshot written", kind=STOPPED)  # exit code 0: not a failure to torchrun
    except Exception as error:
        if is_rank():
            _tell_launcher(error)
        elif isinstance(error, HANDLED):
            report(error, doing=Path(sys.argv[0]).stem)
            sys.exit(1)
        raise


def _distrust(damaged: Path) -> None:
    """Make DVC verify the objects in its cache that equal a damaged file before it uses them again.

    DVC trusts a read-only object without reading it. If its cache links files (`cache.type`), the damaged file is such
    an object, and otherwise it may be a copy of one: deleting it and running `dvc repro` would bring it back. DVC
    hashes a writable object that was just touched, and removes it if it does not match its name.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            objects = Path(repo.cache.local.path)
        size = damaged.stat().st_size
    except (DvcException, OSError):  # no DVC project, or the file is gone
        return
    for path in objects.glob("??/*"):
        with contextlib.suppress(OSError):  # another user's
            if path.stat().st_size == size and filecmp.cmp(path, damaged, shallow=False):
                path.chmod(0o644)
                os.utime(path)


def _fail(message: str) -> None:
    leave_for_launcher(message)
    print(f"error: {printable(message, keep=NEW_LINES)}", file=sys.stderr, flush=True)
    sys.exit(1)


def _tell_launcher(error: Exception) -> None:
    """Leave a message about an error that is not a `SwapError`; its traceback is in the rank's log."""
    if message := remedy_of(error):
        _fail(message)
    if message := _of_other_ranks(error):
        leave_for_launcher(message, kind=LOST)
        time.sleep(2)  # gives other waiting ranks time to report it too
        return
    who = f"{UNEXPECTED} error in rank {os.environ['RANK']}"
    if isinstance(error, HANDLED) and not is_debugging():
        leave_for_launcher(line_of(error, doing=who))
    else:
        leave_for_launcher(f"{who}\n{traceback.format_exc()}")


# Error messages of gloo and NCCL.
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
    "Failed to recv",
)


def _of_other_ranks(error: Exception) -> str:
    """The message for an error that only means that another rank is gone; empty for any other error."""
    text = str(error)
    if "Timed out waiting" in text or "wait timeout after" in text:
        return f"waited {timeout_minutes():g} minutes for another rank"
    if any(words in text for words in _GONE):
        return "another rank is gone"
    return ""
