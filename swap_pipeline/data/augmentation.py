"""The augmentations of a batch: mirrored, cropped, cut out, by what was drawn for each image."""

from __future__ import annotations

import torch

from swap_pipeline.errors import SwapError

# Values of an image up to which it is quicker to mirror all and choose than to mirror one by one; 32 × 32 in colour.
_SMALL_IMAGE = 3 * 32 * 32


def check_augment(*, padding: int, cutout: int, image_size: tuple[int, int]) -> None:
    """Refuse what does not fit the images."""
    smallest = min(image_size)
    if padding >= smallest:
        raise SwapError(
            f"params.yaml: augment.padding is {padding}, but images of {smallest} pixels "
            f"can be reflected by at most {smallest - 1}"
        )
    if cutout > smallest:
        raise SwapError(
            f"params.yaml: augment.cutout is {cutout}, larger than the images ({smallest} pixels): lower it"
        )


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
