"""Files that are complete or absent, JSON and YAML."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swap_pipeline.errors import DamagedFileError, SwapError


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears at `path` complete or not at all; `durable` fsyncs it, so that it survives a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file for reading. Pipes, devices and sockets, which could block forever, raise an `OSError`."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer does not wait
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return io.BufferedReader(io.FileIO(handle))


def read_plain(path: Path, *, max_bytes: int = 1 << 31) -> bytes:
    """All bytes of a plain file; more than `max_bytes` also raise an `OSError`."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
        return file.read()


def write_json(path: Path, value: Any) -> None:
    """Write sorted, indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def read_json(path: Path) -> Any:
    """Read JSON; a missing or damaged file is a `SwapError` that names it."""
    try:
        return json.loads(read_plain(path))
    except FileNotFoundError:
        raise SwapError(f"{path} is missing: run `dvc repro`, or `dvc checkout` if it was made before") from None
    except OSError as error:
        raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise DamagedFileError(path, str(error)) from None


def read_yaml(path: Path, *, max_bytes: int = 1 << 31) -> Any:
    """Parse a YAML file; one that cannot be opened raises an `OSError`."""
    return parse_yaml(read_plain(path, max_bytes=max_bytes), name=path)


def parse_yaml(content: bytes, *, name: object) -> Any:
    """YAML 1.2, as DVC reads it: PyYAML would read `1e-3` as a string. A syntax error is a `SwapError` with `name`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(content.decode())
    except Exception as error:  # the reader passes on other errors: invalid dates, deep nesting
        kind = "" if isinstance(error, YAMLError | UnicodeDecodeError) else f"{type(error).__name__}: "
        raise SwapError(f"{name} is not valid YAML: {kind}{' '.join(str(error).split())[:400]}") from None


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file, or a copy where the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:
        copy_file(source, target)


def copy_file(source: Path, target: Path) -> None:
    """An atomic copy; on file systems with reflinks (XFS, btrfs), both share their blocks until one is changed.

    Not synced to disk: the source is, and a copy torn by a power cut fails its digests.
    """
    with open_plain(source) as given, atomic_write(target, durable=False) as taken:
        left = os.fstat(given.fileno()).st_size
        with contextlib.suppress(AttributeError, OSError):  # not supported everywhere
            while left and (count := os.copy_file_range(given.fileno(), taken.fileno(), left)):
                left -= count
        if left:
            given.seek(-left, os.SEEK_END)
            taken.seek(0, os.SEEK_END)
            shutil.copyfileobj(given, taken, 1 << 22)  # also fails if the disk is full
