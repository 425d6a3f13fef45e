"""Prepared data in memory: reading it, the order of an epoch, and batches with their augmentation.

Everything random in an epoch is drawn for the whole epoch from (seed, epoch) and then sliced by step and rank. Nothing
depends on how often the process was started or on how many ranks share the work.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from swap_pipeline.checkpoint import TensorFile, digest_of
from swap_pipeline.errors import SwapError
from swap_pipeline.files import read_json

# Larger than any image that a network is trained on; what claims more is no image.
_MAX_SIDE = 1 << 14
# Values of an image up to which it is quicker to mirror all and choose than to mirror one by one; 32 × 32 in colour.
_SMALL_IMAGE = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What `meta.json` says of the data."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int] | None
    """channels, height, width; of images that are read from their files only the channels are known"""
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str = ""
    """of all that the file says; the images of this data set carry it too"""

    @property
    def in_memory(self) -> bool:
        return self.shape is not None


def read_meta(folder: Path) -> Meta:
    path = folder / "meta.json"
    tree = read_json(path)
    if reason := _why_no_meta(tree):
        raise SwapError(f"{path} is damaged ({reason}): delete it and run `dvc repro`")
    channels, height, width = tree["shape"]
    return Meta(
        classes=tuple(tree["classes"]),
        shape=(channels, height, width) if tree["kind"] == "memory" else None,
        channels=channels,
        mean=tuple(tree["mean"]),
        std=tuple(tree["std"]),
        digest=digest_of(tree),
    )


def _why_no_meta(tree: Any) -> str:
    """What keeps a tree from being that of a `meta.json`; empty if nothing does."""
    if not isinstance(tree, dict) or tree.keys() != {"kind", "classes", "shape", "mean", "std"}:
        return "it has other entries"
    if tree["kind"] not in ("memory", "files"):
        return f"kind is {str(tree['kind'])[:40]!r}"
    shape = tree["shape"]
    if not isinstance(shape, list) or len(shape) != 3:
        return "shape is not channels, height and width"
    return why_no_images(tree) or (
        "" if all(map(is_size, shape[1:] if tree["kind"] == "memory" else ())) else "shape is not one of images"
    )


def why_no_images(tree: Mapping[str, Any]) -> str:
    """What is wrong with classes, channels and normalisation, as `meta.json` and checkpoints have them."""
    classes = tree.get("classes")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        return "classes is not a list of names"
    shape = tree.get("shape")
    if not isinstance(shape, list) or len(shape) != 3 or not is_size(shape[0]):
        return "shape is not channels, height and width"
    for key in ("mean", "std"):
        values = tree.get(key)
        if not isinstance(values, list) or len(values) != shape[0] or not all(map(_is_finite, values)):
            return f"{key} is not a number for each of {shape[0]} channels"
        if key == "std" and min(values) <= 0:
            return "std is not above 0"
    return ""


def is_size(value: Any) -> bool:
    """Whether it can be the side of an image, or the number of its channels."""
    return type(value) is int and 0 < value <= _MAX_SIDE


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_SIDE and math.isfinite(value)


def open_split(folder: Path, split: str, meta: Meta, dtypes: Mapping[str, torch.dtype]) -> TensorFile:
    """The file of the training or test images, which must be of the data set that `meta` is of, with these tensors."""
    path = folder / f"{split}.safetensors"
    file = TensorFile(path)
    for key, dtype in dtypes.items():
        if key not in file.layout:
            raise SwapError(f"{path} has no tensor {key!r}: delete it and run `dvc repro`")
        shape = file.layout[key].shape
        if file.layout[key].dtype != dtype or not shape or 0 in shape:
            raise SwapError(f"{path}: tensor {key!r} has another type, or is empty: delete it and run `dvc repro`")
    if file.info.get("split") != split or file.info.get("meta") != meta.digest:
        raise SwapError(f"{path} does not belong to {folder / 'meta.json'}: delete {folder} and run `dvc repro`")
    return file


def read_labels(file: TensorFile, meta: Meta) -> torch.Tensor:
    """The labels of a split, each of which has a class."""
    labels = file.read("labels")
    if labels.dim() != 1 or not len(labels) or not 0 <= int(labels.min()) <= int(labels.max()) < len(meta.classes):
        raise SwapError(f"{file.path} is empty or has labels without a class: delete it and run `dvc repro`")
    return labels


@dataclass(frozen=True, kw_only=True)
class View:
    """How images that are read from their files are seen; images in memory are as they are."""

    size: int
    """side of the square in pixels"""
    min_scale: float | None = None
    """training: a random crop of at least this share of the area; None: the middle of the image"""


def view_in(info: Mapping[str, Any], path: Path) -> View | None:
    """The view that a checkpoint's header tells of."""
    view = info.get("view")
    if view is None:
        return None
    if isinstance(view, dict) and view.keys() == {"size", "min_scale"} and is_size(view["size"]):
        scale = view["min_scale"]
        if scale is None or (type(scale) in (int, float) and 0 < scale <= 1):
            return View(size=view["size"], min_scale=scale)
    raise SwapError(f"{path}: its header says of the size of images what nobody can use: train it again")


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


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """The last, short batch of an epoch is dropped."""
    return num_images // batch_size


def batch_share(step: int, *, batch_size: int, shard: int, num_shards: int) -> slice:
    """The positions in the epoch's order that a shard has in a step, of a batch that all shards share equally."""
    size = batch_size // num_shards
    first = step * batch_size + shard * size
    return slice(first, first + size)


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


def pixel_scale(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Values of each channel on the scale 0–1, as 1×C×1×1 on the scale of pixels."""
    return (torch.tensor(values, dtype=torch.float32) * 255).view(1, -1, 1, 1).to(device)


def derive_seed(*parts: int | str) -> int:
    """An independent seed for every different sequence of parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` of the generators that are used; on a CPU it would note a stack trace for GPUs to come."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class EpochChoices:
    """All that chance decides in one epoch; position i of every tensor belongs to the i-th image that is shown."""

    order: torch.Tensor
    seed: int = 0
    """for what is drawn image by image: the crops of images that are read from their files"""
    top: torch.Tensor | None = None
    left: torch.Tensor | None = None
    flip: torch.Tensor | None = None
    cut_top: torch.Tensor | None = None
    cut_left: torch.Tensor | None = None

    def of_batch(self, positions: slice) -> EpochChoices:
        """Those of a batch: of the images at these positions."""

        def part(choice: torch.Tensor | None) -> torch.Tensor | None:
            return None if choice is None else choice[positions]

        return EpochChoices(
            seed=self.seed,
            order=self.order[positions],
            top=part(self.top),
            left=part(self.left),
            flip=part(self.flip),
            cut_top=part(self.cut_top),
            cut_left=part(self.cut_left),
        )


def draw_epoch(
    *,
    seed: int,
    epoch: int,
    num_images: int,
    image_size: tuple[int, int],
    padding: int = 0,
    flip: bool = False,
    cutout: int = 0,
    device: torch.device | None = None,
) -> EpochChoices:
    """Draw the choices of an epoch on the CPU, so that they are the same on every kind of device."""
    own_seed = derive_seed("epoch", seed, epoch)
    generator = torch.Generator().manual_seed(own_seed)
    height, width = image_size

    def choose(options: int) -> torch.Tensor:
        return torch.randint(options, (num_images,), generator=generator).to(device)

    order = torch.randperm(num_images, generator=generator).to(device)
    return EpochChoices(
        order=order,
        seed=own_seed,
        top=choose(2 * padding + 1) if padding else None,
        left=choose(2 * padding + 1) if padding else None,
        flip=choose(2).bool() if flip else None,
        cut_top=choose(height - cutout + 1) if cutout else None,
        cut_left=choose(width - cutout + 1) if cutout else None,
    )


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
