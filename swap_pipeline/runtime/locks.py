"""File locks, which the kernel releases when the process that holds them ends."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from swap_pipeline.errors import SwapError


class Lock:
    """A lock on a file, released by the kernel when the process ends, however it ends.

    The file is opened only if it is a regular file with a single name: a link may lead to someone else's file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Acquire it exclusively or, if `shared`, together with others that share it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = self._open(os.O_RDWR | os.O_CREAT)
        try:
            if not self._try_flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX) or not self._is_of(handle):
                return False  # not ours, or `swap clean` removed the folder between the two calls
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            self._handle, handle = handle, -1
            return True
        finally:
            if handle >= 0:
                os.close(handle)

    def is_held(self) -> bool:
        """Whether some process holds it; asking creates and changes nothing."""
        try:
            handle = self._open(os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not self._try_flock(handle, fcntl.LOCK_SH)
        finally:
            os.close(handle)

    def _open(self, flags: int) -> int:
        try:
            handle = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._not_plain() from None
            raise
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(handle)
            raise self._not_plain()
        return handle

    def _not_plain(self) -> SwapError:
        return SwapError(f"{self.path} is a link or not a regular file, so it cannot be used as a lock: delete it")

    def _try_flock(self, handle: int, kind: int) -> bool:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SwapError(
                f"{self.path.parent} is on a file system without file locks ({error.strerror}): move the project"
            ) from None
        return True

    def _is_of(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self.path.lstat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._handle is not None:
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # closing is not enough if a child process has it too
            os.close(self._handle)
            self._handle = None

    def holder(self) -> str:
        """The id of the process that holds it, if known."""
        try:
            text = self.path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return "?"
        return text if text.isdecimal() else "?"
