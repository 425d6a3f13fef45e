"""Files that are whole or absent, and JSON."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swap_pipeline.errors import SwapError


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears under `path` whole, or not at all; `durable` also outlives a power cut, for an fsync."""
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
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SwapError(f"{path} is missing: run `dvc repro`, or `dvc checkout` if it was made before") from None
    except OSError as error:
        raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise SwapError(f"{path} is damaged ({error}): delete it and run `dvc repro`") from None
