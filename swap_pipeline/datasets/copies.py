"""Copies of image files that are made smaller once (`data.copies`), thousands in a file.

They are made in scratch, which survives a kill: a file of copies that is whole is not made again. Without torch, since
the processes that make them import this module.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from swap_pipeline.config.copies import IMAGES_IN_A_FILE, file_of_copies
from swap_pipeline.datasets.image_folders import IMAGES_AT_ONCE, FolderSplit, Looks, Run
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.job_folder import LAUNCHER_LOCK, scratch_root
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.storage.files import atomic_write, read_json, write_json
from swap_pipeline.storage.image_files import COPIED_BY, copy_of, read_image

_Digests = NDArray[np.uint8]
"""xxh3_64 of each image's bytes, N×8"""


@contextlib.contextmanager
def scratch_for_copies() -> Iterator[Path]:
    """A folder for copies that are being made; removed at the end, unless the block ends with an error."""
    folder = scratch_root() / "copies"
    lock = Lock(folder / LAUNCHER_LOCK)
    is_told = False
    while not lock.try_acquire():
        if not is_told:
            print(f"waiting for process {lock.holder()}, which is making copies of images", flush=True)
        is_told = True
        time.sleep(1)
    try:
        yield folder
        shutil.rmtree(folder)
    finally:
        lock.release()


def make_copies(
    run: Run,
    root: Path,
    splits: Mapping[str, FolderSplit],
    looks: Mapping[str, Looks],
    *,
    sides: Sequence[int],
    channels: int,
    scratch: Path,
    called: Mapping[str, str],
) -> tuple[dict[str, dict[str, NDArray[np.generic]]], list[Path]]:
    """What the index of each split says of its copies, and the files in scratch that hold them."""
    own = scratch / _fingerprint(splits, looks, sides, channels)
    for other in scratch.iterdir():
        if other.is_dir() and other != own:  # of other images or sizes: nobody else works here
            shutil.rmtree(other)
    own.mkdir(exist_ok=True)
    for leftover in own.glob(".*.tmp"):
        leftover.unlink()
    found, files = {}, []
    for name, split in splits.items():
        blocks = [
            _Block(own, name, number, range(first, min(first + IMAGES_IN_A_FILE, len(split))), sides)
            for number, first in enumerate(range(0, len(split), IMAGES_IN_A_FILE))
        ]
        parts = {block.number: block.read() for block in blocks}
        missing = [block for block in blocks if parts[block.number] is None]
        if num_there := sum(len(block.images) for block in blocks) - sum(len(block.images) for block in missing):
            print(f"copies of {num_there:,} of {len(split):,} {called[name]} images are there already", flush=True)
        chunks = [slice(chunk.start, chunk.stop) for block in missing for chunk in block.chunks]
        calls = [(root, split.paths[chunk], looks[name].digests[chunk], sides, channels) for chunk in chunks]
        with contextlib.closing(run(_copy, calls, f"copying {called[name]} images")) as results:
            for block in missing:
                parts[block.number] = block.write(itertools.islice(results, len(block.chunks)))
        found[name] = {
            key: np.concatenate([part[key] for block in blocks if (part := parts[block.number]) is not None])
            for side in sides
            for key in (f"copies_{side}", f"copy_digests_{side}")
        }
        files += [path for block in blocks for path in block.files.values()]
    return found, files


def _fingerprint(
    splits: Mapping[str, FolderSplit], looks: Mapping[str, Looks], sides: Sequence[int], channels: int
) -> str:
    """A name for all that the copies depend on."""
    digest = xxhash.xxh3_128(f"{COPIED_BY}, {list(sides)}, {channels}, {IMAGES_IN_A_FILE}".encode())
    for name in splits:
        digest.update(f"{name} {len(looks[name])} ".encode() + looks[name].digests.tobytes())
    return digest.hexdigest()[:20]


def _copy(
    root: Path, paths: Sequence[str], digests: _Digests, sides: Sequence[int], channels: int
) -> dict[int, list[bytes]]:
    """In a process of its own: the copies of some images, by side."""
    copies: dict[int, list[bytes]] = {side: [] for side in sides}
    for path, digest in zip(paths, digests, strict=True):
        data, image = read_image(root / path, channels)
        if xxhash.xxh3_64_digest(data) != digest.tobytes():
            raise SwapError(f"{root / path} has just been changed: run `dvc repro` again")
        try:
            for side in sides:
                copies[side].append(copy_of(image, side))
        except (OSError, ValueError) as error:  # longer than JPEG allows
            raise SwapError(f"{root / path} cannot be saved as a JPEG ({error}): remove it") from None
    return copies


class _Block:
    """As many images of a split as share a file of copies, one for each side."""

    def __init__(self, folder: Path, split: str, number: int, images: range, sides: Sequence[int]) -> None:
        self.number, self.images = number, images
        self.files = {side: file_of_copies(folder, split, side, number) for side in sides}
        self._record = folder / f"{split}_{number:05}.json"

    @property
    def chunks(self) -> list[range]:
        return [self.images[first : first + IMAGES_AT_ONCE] for first in range(0, len(self.images), IMAGES_AT_ONCE)]

    def write(self, chunks: Iterable[dict[int, list[bytes]]]) -> dict[str, NDArray[np.generic]]:
        """Write the files, and then a record of what is in them."""
        lengths: dict[int, list[int]] = {side: [] for side in self.files}
        digests: dict[int, list[str]] = {side: [] for side in self.files}
        with contextlib.ExitStack() as stack:
            open_files = {side: stack.enter_context(atomic_write(path)) for side, path in self.files.items()}
            for chunk in chunks:
                for side, copies in chunk.items():
                    open_files[side].writelines(copies)
                    lengths[side] += map(len, copies)
                    digests[side] += map(xxhash.xxh3_64_hexdigest, copies)
        write_json(self._record, {str(side): [lengths[side], digests[side]] for side in self.files})
        return self._arrays(lengths, digests)

    def read(self) -> dict[str, NDArray[np.generic]] | None:
        """What was written before a kill; None if it is not whole."""
        try:
            record = read_json(self._record)
            lengths = {side: record[str(side)][0] for side in self.files}
            digests = {side: record[str(side)][1] for side in self.files}
            for side, path in self.files.items():
                with path.open("rb") as file:
                    found = [xxhash.xxh3_64_hexdigest(file.read(length)) for length in lengths[side]]
                    if found != digests[side] or len(found) != len(self.images) or file.read(1):
                        return None
            return self._arrays(lengths, digests)
        except (SwapError, OSError, LookupError, TypeError, ValueError, OverflowError):
            return None

    def _arrays(self, lengths: dict[int, list[int]], digests: dict[int, list[str]]) -> dict[str, NDArray[np.generic]]:
        """For the index: of each copy, the number of its file, where it begins there and how many bytes it has."""
        arrays: dict[str, NDArray[np.generic]] = {}
        for side in self.files:
            sizes = np.array(lengths[side], dtype=np.int64)
            starts = np.cumsum(sizes) - sizes
            arrays[f"copies_{side}"] = np.stack([np.full_like(sizes, self.number), starts, sizes], axis=1)
            values = np.frombuffer(bytes.fromhex("".join(digests[side])), dtype=np.uint8)
            arrays[f"copy_digests_{side}"] = values.reshape(-1, 8)
        return arrays
