"""Unforeseen errors, as one line that says what was being done; SWAP_DEBUG=1 also shows the traceback."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from swap_pipeline.errors import printable
from swap_pipeline.runtime.environment import is_debugging

HANDLED = (OSError, MemoryError, ValueError, ImportError)
"""Errors that the machine and its files can cause; any other exception is a bug and keeps its traceback."""
_HINT = "SWAP_DEBUG=1 shows where"
_AGAIN = "then run `dvc repro` again; it resumes"


def remedy_of(error: BaseException, *, again: str = _AGAIN) -> str:
    """What to do about a file-system error that will not go away by itself; empty for any other error."""
    if "Too many open files" in str(error):
        return f"{error}: raise the limit (`ulimit -n 1024`), {again}"
    if not isinstance(error, OSError):
        return ""
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "what was being written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}: no space left on the disk: make room, {_AGAIN}"
    if error.errno == errno.EFBIG:
        return f"{where}: a file grew beyond the size limit: raise the limit (`ulimit -f`), {again}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{where} cannot be used ({error.strerror}): give this user read and write permission, {again}"
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and (obstacle := _obstacle(Path(where))):
        return f"{obstacle} must be a folder, but is something else: move it elsewhere, {_AGAIN}"
    return ""


def _obstacle(path: Path) -> Path | None:
    """The file or broken link in place of a folder on the way to `path`."""
    ways = [path, *path.parents]
    return next((way for way in reversed(ways) if os.path.lexists(way) and not way.is_dir()), None)


def line_of(error: BaseException, *, doing: str) -> str:
    """A one-line description of an error."""
    again = "then try again" if doing.startswith("swap ") else _AGAIN
    if remedy := remedy_of(error, again=again):
        return f"{doing}: {' '.join(remedy.split())}"
    what = " ".join(str(error).split())[:500]
    if isinstance(error, MemoryError):
        return f"{doing}: not enough memory{f' ({what})' if what else ''} ({_HINT})"
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE):
        return f"{doing}: {what}: check disk and network, {again} ({_HINT})"
    return f"{doing}: {type(error).__name__}: {what} ({_HINT})"


def report(error: BaseException, *, doing: str) -> None:
    """Print the line, with the traceback if SWAP_DEBUG is set."""
    if is_debugging():
        traceback.print_exception(error)
    print(f"error: {printable(line_of(error, doing=doing))}", file=sys.stderr, flush=True)


def open_closed_streams() -> None:
    """Keep the descriptor of a closed standard stream from being reused: printed text would end up in a file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


class _Outliving(io.FileIO):
    """A standard stream that discards its output once the reader is gone or the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlive_readers() -> None:
    """Keep training if output cannot be printed (`| head`, a closed window, a full disk)."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        raw = _Outliving(old.fileno(), "w", closefd=False)
        new = io.TextIOWrapper(
            io.BufferedWriter(raw), old.encoding, "backslashreplace", line_buffering=old.line_buffering
        )
        setattr(sys, name, new)
