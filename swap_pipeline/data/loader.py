"""Images in files: decoded batch by batch in data-loader processes, uint8 until they are on the device.

The images of a batch and their crops are chosen before the loaders see it, so neither the number of loaders nor a
restart changes them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import multiprocessing.queues
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional

from swap_pipeline.config.copies import copy_for
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.copies import Copies
from swap_pipeline.data.decoding import decode, image_of, pixels_in, pixels_of
from swap_pipeline.data.epochs import EpochChoices
from swap_pipeline.data.images import Images
from swap_pipeline.data.prepared import Meta, View, open_split, pixel_scale, read_labels
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.environment import num_loaders
from swap_pipeline.runtime.rank import die_with_parent
from swap_pipeline.storage.image_files import size_of_copy
from swap_pipeline.storage.tensor_files import TensorFile

# A test image's shorter side is resized to this multiple of the size of its centre crop (256 for 224).
MARGIN = 256 / 224
# Sides of rectangles are multiples of this, so that images of similar shape share a batch.
_GRAIN = 16
# A random crop's longer side is at most this multiple of its shorter one.
_LONGEST = 4 / 3
# Batches come through sockets in this folder, whose paths are limited to 107 characters.
_LONGEST_TMPDIR = 70
_INDEX = {
    "labels": torch.int64,
    "heights": torch.int32,
    "widths": torch.int32,
    "paths": torch.uint8,
    "path_ends": torch.int64,
}


@dataclass(frozen=True)
class Cut:
    """What to read: which image, the height and width to resize it to, and the crop."""

    index: int
    size: tuple[int, int]
    seed: int | None = None
    """of the random crop; None: the centre of the image"""
    min_scale: float = 1.0


def middle(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The centre of an image whose shorter side has been resized to a little more than that of `size`."""
    resized = functional.resize(image, [round(min(size) * MARGIN)], antialias=True)
    cropped: Image.Image = functional.center_crop(resized, list(size))
    return cropped


def random_crop(pixels: torch.Tensor, size: tuple[int, int], *, min_scale: float, seed: int) -> torch.Tensor:
    """A part of at least this share of an image, brought to `size`; all height × width × channels.

    As torchvision's RandomResizedCrop does it, but torch brings it to its size, bilinear and antialiased, which takes a
    fifth of Pillow's time and gives the same to within one of its 255 steps.
    """
    top, left, height, width = random_box(*pixels.shape[:2], min_scale=min_scale, seed=seed)
    part = pixels[top : top + height, left : left + width].contiguous()
    batch = part.permute(2, 0, 1)[None]  # in memory channels come last: the quick way
    return F.interpolate(batch, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def random_box(height: int, width: int, *, min_scale: float, seed: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part: torchvision's distribution in plain Python, ten times as fast.

    The share of the area is uniform, and so is the logarithm of the aspect ratio, up to 4:3; if ten in a row do not fit
    into the image, the largest centre crop with an allowed ratio.
    """
    chance = random.Random(seed).random
    for _ in range(10):
        area = height * width * (min_scale + (1 - min_scale) * chance())
        ratio = _LONGEST ** (2 * chance() - 1)
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= height and 0 < columns <= width:
            return int((height - rows + 1) * chance()), int((width - columns + 1) * chance()), rows, columns
    rows, columns = min(height, round(width * _LONGEST)), min(width, round(height * _LONGEST))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def rectangle(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of a test crop in the shape of the image, with `size` as its shorter side.

    Long images are cut to 2:1. The original (cybertronai/imagenet18_old) takes the mean shape of each batch of a list
    sorted by shape, which makes the result depend on the batch size; this does not.
    """
    ratio = min(2.0, max(height, width) / min(height, width))
    long = max(size, int(size * ratio) // _GRAIN * _GRAIN)
    return (long, size) if height > width else (size, long)


class _Reader(Dataset[Any]):
    """Decodes and crops, in the loader processes."""

    def __init__(self, root: Path, meta: Meta, index: TensorFile, copies: Mapping[int, Copies]) -> None:
        self._root = root
        self._channels = meta.channels
        self._index = index.path
        self.labels = read_labels(index, meta)
        self._paths, self._ends = index.read("paths").numpy(), index.read("path_ends").numpy()
        self.heights, self.widths = index.read("heights").numpy(), index.read("widths").numpy()
        one_each = all(values.shape == self.labels.shape for values in (self._ends, self.heights, self.widths))
        rising = one_each and self._ends[0] > 0 and bool((self._ends[1:] > self._ends[:-1]).all())
        if not rising or self._paths.shape != (self._ends[-1],) or min(self.heights.min(), self.widths.min()) < 1:
            raise SwapError(f"{index.path} does not say where each image is: delete it and run `dvc repro`")
        self._copies = copies

    def path(self, index: int) -> Path:
        """An image's path, which must be inside the data set's folder."""
        start = int(self._ends[index - 1]) if index else 0
        name = bytes(self._paths[start : int(self._ends[index])])
        if name.startswith(b"/") or b".." in name.split(b"/") or b"\0" in name:
            raise SwapError(f"{self._index} names an image outside of {self._root}: delete it and run `dvc repro`")
        return self._root / os.fsdecode(name)

    def __getitems__(self, cuts: Sequence[Cut]) -> tuple[torch.Tensor, torch.Tensor] | str:
        """A uint8 batch and its labels, or the error of one of its files."""
        try:
            # Channels last, as in Pillow, which is also the network's layout.
            pixels = torch.stack([self._read(cut) for cut in cuts]).permute(0, 3, 1, 2)
            return pixels, self.labels[[cut.index for cut in cuts]]
        except SwapError as error:
            return str(error)

    def _read(self, cut: Cut) -> torch.Tensor:
        """Height × width × channels."""
        side = copy_for(min(cut.size), [*self._copies])
        shape: tuple[int, int] = (int(self.heights[cut.index]), int(self.widths[cut.index]))
        if side is None:
            path = self.path(cut.index)
            pixels = decode(path, self._channels)
        else:
            data, path = self._copies[side].read(cut.index)
            pixels, shape = pixels_in(data, path, self._channels), size_of_copy(*shape, side)
        if pixels.shape[:2] != shape:
            raise SwapError(f"{path} has changed since it was prepared: run `dvc repro`")
        if cut.seed is None:
            return pixels_of(middle(image_of(pixels), cut.size))
        return random_crop(pixels, cut.size, min_scale=cut.min_scale, seed=cut.seed)


class _Plan:
    """The batches of the next pass; a `DataLoader` reads them each time it is iterated over."""

    def __init__(self) -> None:
        self.batches: Iterable[list[Cut]] = ()

    def __iter__(self) -> Iterator[list[Cut]]:
        return iter(self.batches)


class FileImages:
    """A split of a data set whose images are in files under `root`."""

    def __init__(
        self,
        folder: Path,
        split: str,
        meta: Meta,
        *,
        root: Path,
        test_crop: str,
        device: torch.device,
        copies: Path | None = None,
    ) -> None:
        """`copies` is where copies made smaller are, if not in `folder`."""
        index = open_split(folder, split, meta, _INDEX)
        if not root.is_dir():
            raise SwapError(f"params.yaml: data.root is {str(root)!r}, which is no folder: name that of the images")
        place = copies or folder / "copies"
        reader = _Reader(root, meta, index, {side: Copies(place, split, side, index) for side in meta.copies})
        self._heights, self._widths = reader.heights, reader.widths
        self._channels = meta.channels
        self._device = device
        self._mean, self._std = pixel_scale(meta.mean, device), pixel_scale(meta.std, device)
        self._test_crop = test_crop
        self._plan = _Plan()
        self._last_words, speaker = multiprocessing.Pipe(duplex=False)
        self._loader = DataLoader(
            reader,
            batch_sampler=self._plan,
            collate_fn=_as_it_is,
            num_workers=num_loaders(default=torch.get_num_threads()),
            persistent_workers=True,
            pin_memory=device.type == "cuda",
            multiprocessing_context="fork",  # other methods would import torch again in every loader
            generator=torch.Generator(),
            worker_init_fn=functools.partial(_begin, os.getpid(), speaker),
        )

    def __len__(self) -> int:
        return len(self._heights)

    def start(self) -> None:
        for _ in self._read([[Cut(0, (8, 8))]] * self._loader.num_workers):
            pass

    @property
    def has_many_test_shapes(self) -> bool:
        return self._test_crop == "rectangle"

    def image_shape(self, view: View | None) -> tuple[int, int, int]:
        assert view is not None
        return self._channels, view.size, view.size

    def batches(
        self,
        choices: EpochChoices,
        parts: Sequence[slice],
        *,
        view: View | None,
        channels_last: bool,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert view is not None
        order, size = choices.order.tolist(), (view.size, view.size)

        def cut(position: int) -> Cut:
            if view.min_scale is None:
                return Cut(order[position], size)
            return Cut(order[position], size, derive_seed("crop", choices.seed, position), view.min_scale)

        plan = ([cut(position) for position in range(part.start, part.stop)] for part in parts)
        for part, images in zip(parts, self._read(plan), strict=True):
            changes = choices.changes.at(part)
            yield images.augment(images.pixels, changes, channels_last=channels_last), images.labels

    def test_batches(
        self, *, batch_size: int, rank: int, world_size: int, view: View | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert view is not None
        shapes: dict[tuple[int, int], list[int]] = {}
        if self._test_crop == "square":
            shapes[view.size, view.size] = list(range(len(self)))
        else:
            for index, (height, width) in enumerate(zip(self._heights.tolist(), self._widths.tolist(), strict=True)):
                shapes.setdefault(rectangle(height, width, view.size), []).append(index)
        batches = [
            [Cut(index, shape) for index in indices[first : first + batch_size]]
            for shape, indices in sorted(shapes.items())
            for first in range(0, len(indices), batch_size)
        ][rank::world_size]
        for images in self._read(batches):
            yield images.normalise(images.pixels.contiguous()), images.labels

    def _read(self, plan: Iterable[list[Cut]]) -> Iterator[Images]:
        """The planned batches, on the device."""
        self._plan.batches = plan
        for batch in self._decoded():
            if isinstance(batch, str):
                raise SwapError(batch)
            pixels, labels = (tensor.to(self._device, non_blocking=True) for tensor in batch)
            yield Images(pixels=pixels, labels=labels, mean=self._mean, std=self._std)

    def _said_at_the_end(self) -> str:
        """Raised for a loader that failed."""
        said = self._last_words.recv_bytes() if self._last_words.poll() else b""
        return " ".join(said.decode(errors="replace").split())

    def _decoded(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except RuntimeError as error:
            if "worker" not in str(error):
                raise
            if reason := self._said_at_the_end():
                raise SwapError(f"a process that decodes images failed: {reason}") from None
            raise SwapError(
                f"a process that decodes images was killed ({' '.join(str(error).split())}): if memory or /dev/shm is "
                f"short, set SWAP_LOADERS to less, or give the container more (--shm-size)"
            ) from None


def _begin(rank: int, speaker: Connection, worker: int) -> None:
    """Called first in a loader's process."""
    die_with_parent(rank)  # a loader that outlives its rank would keep the locks that it inherited

    def fail(error: Exception, batch: object) -> None:
        # Python would only print the error and drop the batch, for which the rank would wait forever.
        with contextlib.suppress(OSError):
            speaker.send_bytes(f"{type(error).__name__}: {error}".encode(errors="replace")[:1000])
        os._exit(1)

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(fail)  # type: ignore[attr-defined]
    if len(tempfile.gettempdir()) > _LONGEST_TMPDIR:
        tempfile.tempdir = "/tmp"


def _as_it_is(batch: Any) -> Any:
    return batch
