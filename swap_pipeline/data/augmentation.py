"""The augmentations: random choices for each image, and their application to batches. Add new ones here.

`config/params.py` declares them; `augment: None` means unchanged images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from swap_pipeline.config.params import Augment
from swap_pipeline.errors import SwapError

# Up to this many values per image (32 × 32 in colour), it is faster to flip all and select than to flip one by one.
_SMALL_IMAGE = 3 * 32 * 32


def check_augment(augment: Augment, image_size: tuple[int, int]) -> None:
    """Reject settings that do not fit the images."""
    smallest = min(image_size)
    if augment.padding >= smallest:
        raise SwapError(
            f"params.yaml: augment.padding is {augment.padding}, but images of {smallest} pixels "
            f"can be reflected by at most {smallest - 1}"
        )
    if augment.cutout > smallest:
        raise SwapError(
            f"params.yaml: augment.cutout is {augment.cutout}, larger than the images ({smallest} pixels): lower it"
        )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to each image: index i of every tensor is for the epoch's i-th image."""

    padding: int = 0
    top: torch.Tensor | None = None
    left: torch.Tensor | None = None
    flip: torch.Tensor | None = None
    cutout: int = 0
    cut_top: torch.Tensor | None = None
    cut_left: torch.Tensor | None = None

    def at(self, positions: slice | torch.Tensor) -> Changes:
        drawn = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        own: dict[str, Any] = {name: values[positions] for name, values in drawn.items()}
        return replace(self, **own)


def draw_changes(
    augment: Augment | None, image_size: tuple[int, int], choose: Callable[[int], torch.Tensor]
) -> Changes:
    """`choose(n)` draws a number below n for every image. New augmentations must draw last, so that the others'
    choices stay the same."""
    if augment is None:
        return Changes()
    (height, width), padding, cutout = image_size, augment.padding, augment.cutout
    return Changes(
        padding=padding,
        top=choose(2 * padding + 1) if padding else None,
        left=choose(2 * padding + 1) if padding else None,
        flip=choose(2).bool() if augment.flip else None,
        cutout=cutout,
        cut_top=choose(height - cutout + 1) if cutout else None,
        cut_left=choose(width - cutout + 1) if cutout else None,
    )


def augmented(pixels: torch.Tensor, changes: Changes, *, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Images N×C×H×W, augmented and normalised, channels last in memory; `pixels` may be overwritten.

    Works on rows with channels last, so that memory is accessed in long contiguous runs.
    """
    pixels = pixels.permute(0, 2, 3, 1)
    number, height, width, channels = pixels.shape
    if changes.flip is not None:
        pixels = flipped(pixels, changes.flip)
    if changes.top is not None and changes.left is not None:
        left = changes.left
        if changes.flip is not None:  # flipped images are cropped from the other side
            left = left.where(~changes.flip, 2 * changes.padding - left)
        lines = crops(pixels, changes.top, left, changes.padding)
    else:
        lines = pixels.reshape(number, height, width * channels)
    mean, std = (values.view(-1).repeat(width) for values in (mean, std))
    seen = lines.to(torch.float32).sub_(mean).div_(std).view(number, height, width, channels)
    if changes.cut_top is not None and changes.cut_left is not None:
        cut_out = cut_out_by_index if seen.device.type == "cpu" else cut_out_by_mask
        cut_out(seen, changes.cut_top, changes.cut_left, changes.cutout)
    return seen.permute(0, 3, 1, 2)


def flipped(pixels: torch.Tensor, flip: torch.Tensor) -> torch.Tensor:
    """Images N×H×W×C, some of them flipped."""
    if pixels.device.type != "cpu" or pixels[0].numel() <= _SMALL_IMAGE:
        return torch.where(flip[:, None, None, None], pixels.flip(2), pixels)
    for index in flip.nonzero()[:, 0].tolist():
        pixels[index] = pixels[index].flip(1)
    return pixels


def crops(pixels: torch.Tensor, top: torch.Tensor, left: torch.Tensor, padding: int) -> torch.Tensor:
    """Crops of images N×H×W×C, padded by reflection, in their original size, N×H×W·C."""
    number, height, width, channels = pixels.shape
    before, after = pixels[:, :, 1 : padding + 1].flip(2), pixels[:, :, width - 1 - padding : width - 1].flip(2)
    wide = torch.cat([before, pixels, after], dim=2).reshape(number, height, (width + 2 * padding) * channels)
    rows = (torch.arange(height, device=top.device) + top[:, None] - padding).abs_()
    rows = torch.where(rows < height, rows, 2 * (height - 1) - rows)
    each = torch.arange(number, device=top.device)
    return wide.unfold(2, width * channels, channels)[each[:, None], rows, left[:, None]]


def cut_out_by_index(batch: torch.Tensor, top: torch.Tensor, left: torch.Tensor, size: int) -> None:
    """Set a square of each image, N×H×W×C, to the mean colour, which is 0 after normalisation."""
    each, side = torch.arange(len(batch))[:, None, None], torch.arange(size)
    batch[each, (top[:, None] + side)[:, :, None], (left[:, None] + side)[:, None, :]] = 0.0


def cut_out_by_mask(batch: torch.Tensor, top: torch.Tensor, left: torch.Tensor, size: int) -> None:
    """The same for a GPU, where indexing deterministically would sort all indices."""
    _, height, width, _ = batch.shape
    hidden = _inside(height, top, size)[:, :, None] & _inside(width, left, size)[:, None, :]
    batch.masked_fill_(hidden[..., None], 0.0)


def _inside(length: int, start: torch.Tensor, size: int) -> torch.Tensor:
    index = torch.arange(length, device=start.device)[None]
    return (index >= start[:, None]) & (index < start[:, None] + size)
