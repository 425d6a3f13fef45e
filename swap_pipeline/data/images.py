"""Prepared images in memory, and batches of them; `Split` is what images in files can do too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from swap_pipeline.data.augmentation import crops, cut_out_by_index, cut_out_by_mask, flipped
from swap_pipeline.data.epochs import EpochChoices
from swap_pipeline.data.prepared import View, open_split, pixel_scale, read_labels, read_meta
from swap_pipeline.errors import SwapError


class Split(Protocol):
    """The training or the test images, in memory or in files."""

    def __len__(self) -> int: ...

    def start(self) -> None:
        """Get ready: what takes time only once is done here, before any clock runs."""

    def image_shape(self, view: View | None) -> tuple[int, int, int]:
        """Channels, height and width of what the network is trained on."""

    def batches(
        self,
        choices: EpochChoices,
        parts: Sequence[slice],
        *,
        view: View | None,
        padding: int,
        cutout: int,
        channels_last: bool,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Normalised, augmented images and their labels, for each of these ranges of positions in the epoch."""

    def test_batches(
        self, *, batch_size: int, rank: int, world_size: int, view: View | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's share of one pass over all images as they are."""


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

    def start(self) -> None:
        """Images in memory are there."""

    def image_shape(self, view: View | None) -> tuple[int, int, int]:
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def batches(
        self,
        choices: EpochChoices,
        parts: Sequence[slice],
        *,
        view: View | None,
        padding: int,
        cutout: int,
        channels_last: bool,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in parts:
            yield make_batch(self, choices, part, padding=padding, cutout=cutout, channels_last=channels_last)

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
    images: Images,
    choices: EpochChoices,
    positions: slice,
    *,
    padding: int = 0,
    cutout: int = 0,
    channels_last: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised, augmented images at `positions` of the epoch, and their labels."""
    own = choices.of_batch(positions)
    batch = replace(images, pixels=images.pixels.index_select(0, own.order), labels=images.labels[own.order])
    return augmented(batch, own, padding=padding, cutout=cutout, channels_last=channels_last)


def augmented(
    batch: Images, choices: EpochChoices, *, padding: int, cutout: int, channels_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, normalised and augmented by its own choices, and its labels; its pixels may be changed on the way.

    All is done by rows, with the channels of a pixel side by side, so that values are read and computed in long runs.
    """
    pixels = batch.pixels.permute(0, 2, 3, 1)
    number, height, width, channels = pixels.shape
    if choices.flip is not None:
        pixels = flipped(pixels, choices.flip)
    if padding:
        assert choices.top is not None and choices.left is not None
        # What is flipped already is cropped from the other side.
        left = choices.left if choices.flip is None else choices.left.where(~choices.flip, 2 * padding - choices.left)
        lines = crops(pixels, choices.top, left, padding)
    else:
        lines = pixels.reshape(number, height, width * channels)
    mean, std = (values.view(-1).repeat(width) for values in (batch.mean, batch.std))
    seen = lines.to(torch.float32).sub_(mean).div_(std).view(number, height, width, channels)
    if cutout:
        assert choices.cut_top is not None and choices.cut_left is not None
        cut_out = cut_out_by_index if seen.device.type == "cpu" else cut_out_by_mask
        cut_out(seen, choices.cut_top, choices.cut_left, cutout)
    seen = seen.permute(0, 3, 1, 2)
    return seen if channels_last else seen.contiguous(), batch.labels
