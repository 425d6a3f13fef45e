"""Prepared images in memory, and batches of them; `Split` is the interface shared with images in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from swap_pipeline.data.augmentation import Changes, augmented
from swap_pipeline.data.epochs import EpochChoices
from swap_pipeline.data.prepared import View, open_split, pixel_scale, read_labels, read_meta
from swap_pipeline.errors import SwapError

# On a CPU, batches should still be in the cache when they are used.
_VALUES_AT_A_TIME = {"cpu": 1 << 18, "cuda": 1 << 25}
_MOST_AT_A_TIME = 16
_ALIGNMENT = 64  # bytes, as for torch's allocations on a CPU


class Split(Protocol):
    """The training, validation or test images, in memory or in files."""

    def __len__(self) -> int: ...

    def start(self) -> None:
        """Do one-off work before timing starts."""

    @property
    def has_many_test_shapes(self) -> bool:
        """Whether test batches differ in height or width."""

    def image_shape(self, view: View | None) -> tuple[int, int, int]:
        """Channels, height and width of the network's training input."""

    def batches(
        self,
        choices: EpochChoices,
        parts: Sequence[slice],
        *,
        view: View | None,
        channels_last: bool,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Normalised, augmented images and labels for each of these ranges of positions in the epoch."""

    def test_batches(
        self, *, batch_size: int, rank: int, world_size: int, view: View | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's share of one pass over all images without augmentation."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """A split of a data set, on the device that uses it."""

    pixels: torch.Tensor
    """uint8, N×C×H×W"""
    labels: torch.Tensor
    """int64, N"""
    mean: torch.Tensor
    """1×C×1×1, on the scale of the pixels, 0–255"""
    std: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.to(torch.float32).sub_(self.mean).div_(self.std)

    def augment(self, pixels: torch.Tensor, changes: Changes, *, channels_last: bool) -> torch.Tensor:
        """Augmented and normalised; `pixels` may be overwritten."""
        seen = augmented(pixels, changes, mean=self.mean, std=self.std)
        return seen if channels_last else seen.contiguous()

    def start(self) -> None:
        """Nothing to do."""

    @property
    def has_many_test_shapes(self) -> bool:
        return False

    def image_shape(self, view: View | None) -> tuple[int, int, int]:
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def batches(
        self,
        choices: EpochChoices,
        parts: Sequence[slice],
        *,
        view: View | None,
        channels_last: bool,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        own, first = choices.at(parts), 0
        sizes = [part.stop - part.start for part in parts]
        at_a_time = self._batches_at_a_time(max(sizes, default=0))
        for number in range(0, len(sizes), at_a_time):
            some = sizes[number : number + at_a_time]
            last = first + sum(some)
            seen, labels = make_batch(self, own, slice(first, last), channels_last=channels_last)
            yield from zip(seen.split(some), labels.split(some), strict=True)
            first = last

    def _batches_at_a_time(self, size: int) -> int:
        """How many batches to make together: several if they are small, to save calls and kernel launches.

        Each must start at an aligned address, like a batch made alone: with another alignment, libraries may compute
        differently.
        """
        values = size * self.pixels[0].numel()
        if values == 0 or values * 4 % _ALIGNMENT:
            return 1
        return max(1, min(_MOST_AT_A_TIME, _VALUES_AT_A_TIME[self.pixels.device.type] // values))

    def test_batches(
        self, *, batch_size: int, rank: int, world_size: int, view: View | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in range(rank * batch_size, len(self), world_size * batch_size):
            part = slice(first, first + batch_size)
            yield self.normalise(self.pixels[part]), self.labels[part]


def read_images(folder: Path, split: str, device: torch.device) -> Images:
    """Memory-map a split; on a GPU, copy it there once."""
    meta = read_meta(folder)
    assert meta.in_memory
    file = open_split(folder, split, meta, {"images": torch.uint8, "labels": torch.int64})
    pixels, labels = file.read("images"), read_labels(file, meta)
    if tuple(pixels.shape[1:]) != meta.shape or len(pixels) != len(labels):
        raise SwapError(f"{file.path} does not fit {folder / 'meta.json'}: delete both and run `dvc repro`")

    return Images(
        pixels=pixels.to(device),
        labels=labels.to(device),
        mean=pixel_scale(meta.mean, device),
        std=pixel_scale(meta.std, device),
    )


def make_batch(
    images: Images, choices: EpochChoices, positions: slice, *, channels_last: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised, augmented images at `positions` of the epoch, and their labels."""
    chosen, changes = choices.order[positions], choices.changes.at(positions)
    pixels = images.pixels.index_select(0, chosen)
    return images.augment(pixels, changes, channels_last=channels_last), images.labels[chosen]
