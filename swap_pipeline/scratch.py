"""Scratch: where a job trains, resumes, and leaves its result until it is collected.

DVC deletes a stage's outs before the stage runs, so what must survive a kill lives here, outside of them, in
`.swap/<stage>/<fingerprint>/`. The fingerprint covers all that can change the bytes of the result: a job that is
started again finds its own snapshots, and a job with any other setting gets another folder. A result is given out only
if it is as it was written, and only while what it was made from is as it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from swap_pipeline.environment import project_folder
from swap_pipeline.errors import DamagedFileError, SwapError
from swap_pipeline.files import copy_file, read_json, write_json
from swap_pipeline.inputs import Inputs
from swap_pipeline.instances import Instance

RESULT = "result"
RECORD = "record.json"
_DIGESTS = "digests.json"
LAUNCHER_LOCK, WRITER_LOCK = "launcher.lock", "writer.lock"


def scratch_root() -> Path:
    """`.swap` of the project; experiments in temporary folders and the analysis share it."""
    return project_folder() / ".swap"


def job_folder(instance: Instance, *, device_type: str, processes: int, threads: int) -> JobFolder:
    """Where this job works: named after everything that can change its result."""
    facts = facts_of(device_type=device_type, processes=processes, threads=threads)
    inputs = Inputs.now(instance)
    return JobFolder(scratch_root() / instance.stage / inputs.fingerprint(facts), inputs)


def facts_of(*, device_type: str, processes: int, threads: int) -> dict[str, Any]:
    """What of the machine can change bytes: on a CPU also the threads, since they change the order of sums."""
    facts: dict[str, Any] = {"device": device_type, "processes": processes}
    return facts | {"threads": threads} if device_type == "cpu" else facts


@dataclass(frozen=True)
class JobFolder:
    """The scratch folder of one job."""

    path: Path
    inputs: Inputs | None = field(default=None, compare=False, repr=False)
    """what it was named after, where that is known"""

    @property
    def result(self) -> Path:
        """Exists once the job is complete, and then holds all that it made, and a digest of each file."""
        return self.path / RESULT

    @property
    def is_complete(self) -> bool:
        return self.result.is_dir()

    @property
    def kept(self) -> Path:
        """Files that are made on the way and belong to the result: they outlive a kill."""
        return self.path / "kept"

    @property
    def can_go_on(self) -> bool:
        """Whether a job that is started again has something to go on from: snapshots, or what is done piece by piece;
        in SWA also a training that is complete."""
        patterns = ("snapshot_*", "kept/*", f"*/{RESULT}", "*/snapshot_*", "*/kept/*")
        return any(True for pattern in patterns for _ in self.path.glob(pattern))

    @contextlib.contextmanager
    def complete(self, *, kept: Iterable[str] = ()) -> Iterator[Path]:
        """A folder to fill; when the block ends without an error it becomes the result, in one step.

        The files of these names that were kept on the way are in it; all of them have to be there.
        """
        partial = self.path / f"{RESULT}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in kept:
            _link(self.kept / name, partial / name)
        yield partial
        write_json(partial / _DIGESTS, {path.name: _digest(path) for path in partial.iterdir()})
        partial.rename(self.result)
        shutil.rmtree(self.kept, ignore_errors=True)

    def digests(self) -> dict[str, str]:
        """Of all files of the result, as the job wrote them, by name."""
        digests = read_json(self.result / _DIGESTS)
        if not isinstance(digests, dict) or RECORD not in digests:
            raise DamagedFileError(self.result / _DIGESTS, "it has another form")
        return digests

    def damage(self) -> str:
        """Why the result is not as the job wrote it; empty if it is."""
        path = self.result / _DIGESTS
        try:
            for name, digest in self.digests().items():
                path = self.result / name
                if _digest(path) != digest:
                    return f"{name} does not match its digest"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:  # it may be whole: it is for people to fix the disk
            raise SwapError(
                f"{path} cannot be read ({error.strerror}): check the disk, then `dvc repro` again"
            ) from None
        except SwapError:
            return f"{path.name} is missing or cannot be read"
        return ""

    def check_inputs(self) -> None:
        """For a rank that has read params, code and data: they must be those that its folder was named after."""
        if self.inputs is not None:
            self.inputs.check(when="while it started", remedy="run `dvc repro` again")

    @contextlib.contextmanager
    def writer(self, *, is_main: bool) -> Iterator[None]:
        """Held by a job's main rank while it writes here; sweeps what killed writers left behind."""
        if not is_main:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.path / WRITER_LOCK)
        deadline = time.monotonic() + 60
        while not lock.try_acquire():
            # An orphan of a killed launcher is about to end; anything that stays longer is not ours to end.
            if time.monotonic() > deadline:
                raise SwapError(f"process {lock.holder()} is still writing in {self.path}: end it, then start again")
            time.sleep(0.1)
        try:
            for leftover in self.path.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def remove_unlisted(*folders: Path, seeds: Collection[int]) -> list[Path]:
    """Remove `seed_<S>` and `seed_<S>.json` of seeds that are not listed; returns what was removed."""
    listed = {f"seed_{seed}" for seed in seeds}
    removed = [
        path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if re.fullmatch(r"seed_\d+", path.stem) and path.stem not in listed
    ]
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return removed


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on all file systems
        copy_file(source, target)


def _digest(path: Path) -> str:
    """Of a whole file: finds damage, at the speed of memory."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


class Lock:
    """An exclusive lock on a file, released by the kernel when the process ends, however it ends.

    The file is opened only if it is a plain one with this one name: what a link leads to is somebody else's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def try_acquire(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = self._open(os.O_RDWR | os.O_CREAT)
        try:
            if not self._try_flock(handle, fcntl.LOCK_EX) or not self._is_of(handle):
                return False  # not ours, or the folder was removed between the two calls: `swap clean`
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            self._handle, handle = handle, -1
            return True
        finally:
            if handle >= 0:
                os.close(handle)

    def is_held(self) -> bool:
        """Whether some process has it; nothing is made or changed by asking."""
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
        return SwapError(f"{self.path} is a link or no plain file, so it is not used as a lock: delete it")

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
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # closing is not enough where a child process has it too
            os.close(self._handle)
            self._handle = None

    def holder(self) -> str:
        """The process id of the one who has it, as far as is known."""
        try:
            text = self.path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return "?"
        return text if text.isdecimal() else "?"


def set_aside_damaged(folder: JobFolder) -> None:
    """Of a complete job: a result that is not as it was written must not be given out, but made again."""
    lock = Lock(folder.path / LAUNCHER_LOCK)
    if not folder.is_complete or not lock.try_acquire():
        return
    try:
        if reason := folder.damage():
            aside = folder.path / f"{RESULT}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            folder.result.rename(aside)
            what = f"{folder.result} is damaged ({reason})"
            print(f"warning: {what}: it is set aside as {aside.name} and made again", flush=True)
    finally:
        lock.release()


def collect(folder: JobFolder, instance: Instance) -> None:
    """Put the result where DVC expects it, if it is whole and what it was made from is as it was.

    A copy, since the workspace's file may share an inode with DVC's cache: what damages that must not damage this.
    What a launcher that was killed here left behind goes.
    """
    if reason := folder.damage():
        raise SwapError(f"{folder.result} is damaged ({reason}): run `dvc repro` again, which makes it again")
    _check_current(folder)
    for leftover in instance.record.parent.glob(f".{instance.record.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    if instance.has_models:
        made = [folder.result / name for name in sorted(folder.digests()) if name.endswith(".safetensors")]
        checkpoints = instance.checkpoints
        checkpoints.mkdir(parents=True, exist_ok=True)
        for stale in set(checkpoints.glob("*.safetensors")) - {checkpoints / path.name for path in made}:
            stale.unlink()
        for leftover in checkpoints.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        for path in made:
            copy_file(path, checkpoints / path.name)
    copy_file(folder.result / RECORD, instance.record)
    _check_current(folder)  # again, since copies take time: DVC takes note of params and deps after this


def _check_current(folder: JobFolder) -> None:
    if folder.inputs is not None:
        kept = f"its result stays in {folder.path}"
        folder.inputs.check(when="while it ran", remedy=f"{kept}; run `dvc repro` again")
