"""Folders of images, `train/<class>/…` and `test/<class>/…`: listing them, and decoding them on all cores.

Does not import torch, since the decoding processes import this module.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.environment import num_cores
from swap_pipeline.runtime.progress import time_left
from swap_pipeline.runtime.rank import die_with_parent
from swap_pipeline.storage.image_files import read_image

Result = TypeVar("Result")

# As in torchvision's ImageFolder.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# The unit of work; small, because Ctrl-C waits for the current ones.
IMAGES_AT_ONCE = 100
# Fewer are decoded faster than processes start.
POOL_FROM_IMAGES = 300
MAX_PROCESSES = 32


@dataclass(frozen=True)
class FolderSplit:
    """Images sorted by class, then by path."""

    paths: list[str]
    """relative to the folder of the data set, with forward slashes"""
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.paths)

    def only(self, chosen: NDArray[np.int64]) -> FolderSplit:
        return FolderSplit([self.paths[index] for index in chosen], self.labels[chosen])


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The contents of a folder of images."""

    root: Path
    classes: tuple[str, ...]
    train: FolderSplit
    test: FolderSplit
    notes: tuple[str, ...]
    """notes for the user, one line each"""


def scan(root: Path, *, test_names: Sequence[str] = ("test", "val")) -> Tree:
    """List the images and check the tree, without opening files; uses the first of `test_names` that exists."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise SwapError(
            f"params.yaml: data.root is {str(root)!r}, which {what}: set it to the one that holds train and test"
        )
    notes = []
    present = [name for name in test_names if (root / name).is_dir()]
    for name, there in (("train", (root / "train").is_dir()), (" or ".join(test_names), bool(present))):
        if not there:
            raise SwapError(
                f"{root} has no folder {name}: images belong in train/<class>/ and {test_names[0]}/<class>/ "
                f"(params.yaml: data.root)"
            )
    if len(present) > 1:
        notes.append(f"note: {root} has both {present[0]} and {present[1]}: {present[0]} is used for testing")
    train, num_skipped = _images_by_class(root, "train")
    test, num_skipped_in_test = _images_by_class(root, present[0])
    num_skipped += num_skipped_in_test
    empty = [name for name, paths in train.items() if not paths]
    if empty:
        raise SwapError(f"{root}/train has no images of {_names(empty)}: add some, or remove the folder")
    if len(train) == 1:
        raise SwapError(f"{root}/train has a single class ({next(iter(train))}): there must be at least two")
    unknown = [name for name in test if name not in train]
    if unknown:
        raise SwapError(f"{root}/{present[0]} has {_names(unknown)}, which train lacks: add it there, or remove it")
    untested = [name for name in train if not test.get(name)]
    if len(untested) == len(train):
        raise SwapError(f"{root}/{present[0]} has no images: put test images into {present[0]}/<class>/")
    if untested:
        notes.append(
            f"warning: {root}/{present[0]} has no images of {_names(untested)}: the test accuracy says nothing about it"
        )
    if links := _linked_folders(root, ("train", present[0])):
        shown = ", ".join(links[:3]) + (" …" if len(links) > 3 else "")
        notes.append(
            f"warning: {len(links):,} folders in {root} are links ({shown}): DVC does not follow them, so it will "
            f"not notice when images there change"
        )
    if num_skipped:
        notes.append(f"note: {num_skipped:,} files or folders in {root} were skipped: hidden, or not images of a class")
    classes = tuple(train)
    return Tree(
        root=root,
        classes=classes,
        train=_in_one_list(classes, train),
        test=_in_one_list(classes, test),
        notes=tuple(notes),
    )


def _linked_folders(root: Path, splits: Sequence[str]) -> list[str]:
    """Links to folders, of splits or of classes."""
    found = [name for name in splits if (root / name).is_symlink()]
    for split in splits:
        with os.scandir(root / split) as entries:
            found += sorted(f"{split}/{entry.name}" for entry in entries if entry.is_symlink() and entry.is_dir())
    return found


def _images_by_class(root: Path, split: str) -> tuple[dict[str, list[str]], int]:
    """Sorted images of each class, and the number of other entries."""
    folders, files, num_skipped = _list(root / split)
    if not folders:
        if files:
            raise SwapError(
                f"{root}/{split} has {len(files):,} images but no class folders: "
                f"sort them into {split}/<class>/, with one folder for each class"
            )
        raise SwapError(f"{root}/{split} is empty: put the images of each class into {split}/<class>/")
    found = {}
    for name in folders:
        paths, skipped = _images_below(root / split / name, f"{split}/{name}/", ())
        found[name] = sorted(paths)
        num_skipped += skipped
    return found, num_skipped + len(files)


def _images_below(folder: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> tuple[list[str], int]:
    folders, files, num_skipped = _list(folder)
    paths = [prefix + name for name in files]
    status = folder.stat()
    above = (*above, (status.st_dev, status.st_ino))
    for name in folders:
        status = (folder / name).stat()
        if (status.st_dev, status.st_ino) in above:  # a link to a parent folder
            num_skipped += 1
            continue
        deeper, skipped = _images_below(folder / name, f"{prefix}{name}/", above)
        paths += deeper
        num_skipped += skipped
    return paths, num_skipped


def _list(folder: Path) -> tuple[list[str], list[str], int]:
    """Names of folders and of image files, sorted, and the number of all others."""
    folders, files, num_others = [], [], 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    num_others += 1
                elif entry.is_dir():
                    folders.append(entry.name)
                # A broken link is reported as an unreadable image.
                elif entry.name.lower().endswith(EXTENSIONS) and (entry.is_file() or entry.is_symlink()):
                    files.append(entry.name)
                else:
                    num_others += 1
    except OSError as error:
        raise SwapError(f"{folder} cannot be read: {error.strerror or error}") from None
    for name in (*folders, *files):
        if not _is_utf8(name):
            raise SwapError(f"{folder} has {name!a}, a name that is not UTF-8: rename it")
        if any(unicodedata.category(letter) == "Cc" for letter in name):  # unsafe to print in a terminal
            raise SwapError(f"{folder} has {name!a}, a name with control characters: rename it")
    return sorted(folders), sorted(files), num_others


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _names(classes: Sequence[str]) -> str:
    shown = ", ".join(classes[:5])
    more = f" and {len(classes) - 5:,} more" if len(classes) > 5 else ""
    return f"{'class' if len(classes) == 1 else f'{len(classes):,} classes:'} {shown}{more}"


def _in_one_list(classes: Sequence[str], found: dict[str, list[str]]) -> FolderSplit:
    lists = [found.get(name, []) for name in classes]
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in lists])
    return FolderSplit([path for paths in lists for path in paths], labels)


@dataclass(frozen=True)
class Looks:
    """Facts found by decoding images, in their order."""

    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    grey: NDArray[np.bool_]
    digests: NDArray[np.uint8]
    """xxh3_64 of each file's bytes, N×8"""
    counts: NDArray[np.int64]
    """how often each value occurs in each channel over all images, 3×256; grey counts in all three"""
    errors: list[str]
    pixels: NDArray[np.uint8] | None = None
    """N×C×H×W, C = 1 if all are grey; None if not requested, or if sizes differ"""

    def __len__(self) -> int:
        return len(self.heights)


def look_at(run: Run, root: Path, paths: Sequence[str], *, keep: tuple[int, int] | None, what: str) -> Looks:
    """Decode every image once, and keep the pixels if all have the height and width of `keep`.

    Those that cannot be decoded are in `errors`.
    """
    chunks = [paths[first : first + IMAGES_AT_ONCE] for first in range(0, len(paths), IMAGES_AT_ONCE)]
    parts: list[Looks] = []
    pixels: NDArray[np.uint8] | None = None
    first = 0
    for part in run(_look, [(root, chunk, keep) for chunk in chunks], f"checking {what} images"):
        if part.pixels is None:
            keep = pixels = None
        elif keep is not None:
            channels = part.pixels.shape[1]
            if pixels is None:
                pixels = np.empty((len(paths), channels, *keep), dtype=np.uint8)
            elif pixels.shape[1] < channels:
                pixels = pixels.repeat(channels, axis=1)
            pixels[first : first + len(part)] = part.pixels  # grey fills all channels
        first += len(part)
        parts.append(replace(part, pixels=None))
    return replace(joined(parts), pixels=pixels)


def joined(parts: Sequence[Looks]) -> Looks:
    """All of them together, without pixels."""
    return Looks(
        np.concatenate([part.heights for part in parts]),
        np.concatenate([part.widths for part in parts]),
        np.concatenate([part.grey for part in parts]),
        np.concatenate([part.digests for part in parts]),
        np.sum([part.counts for part in parts], axis=0),
        [error for part in parts for error in part.errors],
    )


def _look(root: Path, paths: Sequence[str], keep: tuple[int, int] | None) -> Looks:
    sizes = np.zeros((2, len(paths)), dtype=np.int32)
    grey = np.zeros(len(paths), dtype=np.bool_)
    digests = np.zeros((len(paths), 8), dtype=np.uint8)
    counts = np.zeros((3, 256), dtype=np.int64)
    errors = []
    kept: list[NDArray[np.uint8]] = []
    for index, path in enumerate(paths):
        try:
            data, image = read_image(root / path, None)
        except SwapError as error:
            errors.append(str(error))
            continue
        sizes[:, index] = image.height, image.width
        grey[index] = image.mode == "L"
        digests[index] = np.frombuffer(xxhash.xxh3_64_digest(data), dtype=np.uint8)
        counts += np.asarray(image.histogram(), dtype=np.int64).reshape(-1, 256)  # grey counts in all channels
        if keep == (image.height, image.width):
            kept.append(np.asarray(image).reshape(*keep, -1).transpose(2, 0, 1))
        else:
            keep = None
            kept.clear()
    if keep is None or len(kept) < len(paths):
        return Looks(sizes[0], sizes[1], grey, digests, counts, errors)
    pixels = np.empty((len(paths), 1 if grey.all() else 3, *keep), dtype=np.uint8)
    for index, values in enumerate(kept):
        pixels[index] = values
    return Looks(sizes[0], sizes[1], grey, digests, counts, errors, pixels)


class Run:
    """Calls of one function, sequentially or over processes; results are in the calls' order."""

    def __init__(self, executor: ProcessPoolExecutor | None, num_processes: int) -> None:
        self._executor = executor
        # Enough to keep all processes busy, few enough that results do not pile up in memory.
        self._max_waiting = 3 * num_processes

    def __call__(
        self, function: Callable[..., Result], calls: Sequence[tuple[Any, ...]], what: str
    ) -> Generator[Result, None, None]:
        """A call's second argument is its list of images, by which progress is counted."""
        waiting: deque[tuple[int, Future[Result]]] = deque()
        with _progress(what, sum(len(call[1]) for call in calls)) as advance:
            if self._executor is None:
                for call in calls:
                    yield function(*call)
                    advance(len(call[1]))
                return
            for call in calls:
                waiting.append((len(call[1]), _submit(self._executor, function, call)))
                if len(waiting) >= self._max_waiting:
                    number, future = waiting.popleft()
                    yield future.result()
                    advance(number)
            for number, future in waiting:
                yield future.result()
                advance(number)


@contextlib.contextmanager
def processes_for(num_images: int) -> Iterator[Run]:
    """Decoding processes on all cores that this one may use; they end with the block, however it is left."""
    number = min(num_cores(), MAX_PROCESSES, math.ceil(num_images / IMAGES_AT_ONCE))
    if number == 1 or num_images < POOL_FROM_IMAGES:
        yield Run(None, 1)
        return
    # Spawned, not forked: this process may have threads.
    executor = ProcessPoolExecutor(
        number, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        yield Run(executor, number)
    except BrokenProcessPool:
        raise SwapError("a process that decodes images was killed (is there enough memory?)") from None
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(started_by: int) -> None:
    die_with_parent()
    if os.getppid() != started_by:
        os._exit(1)  # the parent was already gone


def _submit(executor: ProcessPoolExecutor, function: Callable[..., Result], call: tuple[Any, ...]) -> Future[Result]:
    # Ctrl-C reaches every process; only this one handles it, so the others must ignore it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return executor.submit(function, *call)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar where there is a terminal; elsewhere a line now and then, if it takes long."""
    began = time.monotonic()
    done, next_time = 0, began + 10.0
    if not sys.stderr.isatty():

        def say(number: int) -> None:
            nonlocal done, next_time
            done += number
            if time.monotonic() >= next_time:
                print(f"{what}: {done:,} of {total:,}{time_left(began, done, total)}", flush=True)
                next_time = time.monotonic() + 10.0

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:
        task = bars.add_task(what, total=total)
        yield lambda number: bars.update(task, advance=number)
