"""The augmentations: what chance draws for each image, and batches changed by it. A new one is added here.

`config/params.py` says which there are; `augment: None` means images as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from swap_pipeline.config.params import Augment
from swap_pipeline.errors import SwapError

# Values of an image up to which it is quicker to mirror all and choose than to mirror one by one; 32 × 32 in colour.
_SMALL_IMAGE = 3 * 32 * 32


def check_augment(augment: Augment, image_size: tuple[int, int]) -> None:
    """Refuse what does not fit the images."""
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
    """What is done to each image: position i of every tensor belongs to the i-th image that is shown."""

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
    """`choose` draws one of so many options for every image. A new augmentation draws last, so that all others stay
    as they were."""
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
    """Images N×C×H×W, changed and normalised, channels last in memory; `pixels` may be overwritten on the way.

    All is done by rows, with the channels of a pixel side by side, so that values are read and computed in long runs.
    """
    pixels = pixels.permute(0, 2, 3, 1)
    number, height, width, channels = pixels.shape
    if changes.flip is not None:
        pixels = flipped(pixels, changes.flip)
    if changes.top is not None and changes.left is not None:
        left = changes.left
        if changes.flip is not None:  # what is flipped already is cropped from the other side
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
    """Images N×H×W×C, some of them mirrored."""
    if pixels.device.type != "cpu" or pixels[0].numel() <= _SMALL_IMAGE:
        return torch.where(flip[:, None, None, None], pixels.flip(2), pixels)
    for index in flip.nonzero()[:, 0].tolist():
        pixels[index] = pixels[index].flip(1)
    return pixels


def crops(pixels: torch.Tensor, top: torch.Tensor, left: torch.Tensor, padding: int) -> torch.Tensor:
    """Of images N×H×W×C, reflected beyond their edges, a crop each of their own size, N×H×W·C."""
    number, height, width, channels = pixels.shape
    before, after = pixels[:, :, 1 : padding + 1].flip(2), pixels[:, :, width - 1 - padding : width - 1].flip(2)
    wide = torch.cat([before, pixels, after], dim=2).reshape(number, height, (width + 2 * padding) * channels)
    rows = (torch.arange(height, device=top.device) + top[:, None] - padding).abs_()
    rows = torch.where(rows < height, rows, 2 * (height - 1) - rows)
    each = torch.arange(number, device=top.device)
    return wide.unfold(2, width * channels, channels)[each[:, None], rows, left[:, None]]


def cut_out_by_index(batch: torch.Tensor, top: torch.Tensor, left: torch.Tensor, size: int) -> None:
    """Give a square of each image, N×H×W×C, the mean colour: 0 after normalising."""
    each, side = torch.arange(len(batch))[:, None, None], torch.arange(size)
    batch[each, (top[:, None] + side)[:, :, None], (left[:, None] + side)[:, None, :]] = 0.0


def cut_out_by_mask(batch: torch.Tensor, top: torch.Tensor, left: torch.Tensor, size: int) -> None:
    """The same for a GPU, which would sort all indices to be deterministic."""
    _, height, width, _ = batch.shape
    hidden = _inside(height, top, size)[:, :, None] & _inside(width, left, size)[:, None, :]
    batch.masked_fill_(hidden[..., None], 0.0)


def _inside(length: int, start: torch.Tensor, size: int) -> torch.Tensor:
    index = torch.arange(length, device=start.device)[None]
    return (index >= start[:, None]) & (index < start[:, None] + size)
