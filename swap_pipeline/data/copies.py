"""Reads the copies of images that `prepare` made smaller (`data.copies`): thousands of JPEGs in each file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import torch
import xxhash

from swap_pipeline.config.copies import file_of_copies
from swap_pipeline.errors import DamagedFileError, SwapError
from swap_pipeline.storage.tensor_files import TensorFile

# Of a limit of usually 1,024; the copies of ImageNet are in 157 + 7 files for each size.
_MOST_OPEN = 256
_LIMITS = (100_000, 1 << 48, 1 << 31)
"""of files, bytes in a file and bytes of a copy; an index that says more is damaged"""


class Copies:
    """The copies of a split that have one size; files are opened when they are first read."""

    def __init__(self, folder: Path, split: str, side: int, index: TensorFile) -> None:
        (num_images, *_) = index.layout["labels"].shape
        places, digests = f"copies_{side}", f"copy_digests_{side}"
        for key, dtype, width in ((places, torch.int64, 3), (digests, torch.uint8, 8)):
            spec = index.layout.get(key)
            if spec is None or (spec.dtype, spec.shape) != (dtype, (num_images, width)):
                raise SwapError(f"{index.path} does not say where the copies are: delete it and run `dvc repro`")
        self._places, self._digests = index.read(places).numpy(), index.read(digests).numpy()
        numbers, starts, lengths = self._places.T
        if self._places.min() < 0 or lengths.min() < 1 or np.any(self._places.max(axis=0) >= _LIMITS):
            raise SwapError(f"{index.path} does not say where the copies are: delete it and run `dvc repro`")
        self._paths = {int(number): file_of_copies(folder, split, side, number) for number in np.unique(numbers)}
        ends = np.zeros(numbers.max() + 1, dtype=np.int64)
        np.maximum.at(ends, numbers, starts + lengths)
        for number, path in self._paths.items():
            _check_file(path, num_bytes=int(ends[number]))
        self._open: dict[int, int] = {}

    def read(self, index: int) -> tuple[bytes, Path]:
        """The bytes of an image's copy, checked against their digest, and the file that they are in."""
        number, start, length = self._places[index].tolist()
        path = self._paths[number]
        try:
            data = os.pread(self._handle(number), length, start)
        except OSError as error:
            raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None
        if xxhash.xxh3_64_digest(data) != self._digests[index].tobytes():
            raise DamagedFileError(path, f"the copy at byte {start:,} does not match its digest")
        return data, path

    def _handle(self, number: int) -> int:
        if number not in self._open:
            if len(self._open) == _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self._open[number]


def _check_file(path: Path, *, num_bytes: int) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise SwapError(f"{path} is missing: run `dvc repro`, or `dvc checkout` if it was made before") from None
    except OSError as error:
        raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size < num_bytes:
        raise DamagedFileError(path, f"it has not the {num_bytes:,} bytes that were written to it")
