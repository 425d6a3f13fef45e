"""Named data sets → `data/prepared/`: uint8 tensors, labels and what there is to know about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from swap_pipeline.checkpoint import TensorFile, write_tensors
from swap_pipeline.errors import SwapError
from swap_pipeline.files import write_json

FASHION_MINI = Path("data/fashion-mini.safetensors")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set in memory: uint8 N×C×H×W images and int64 labels of both splits."""

    classes: tuple[str, ...]
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def fashion_mini() -> Source:
    """10,000 training images (1,000 a class) and the whole test set of Fashion-MNIST, kept in this repository."""
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        file = TensorFile(FASHION_MINI)
        return Source(classes=tuple(file.info["classes"]), **{key: file.read(key) for key in keys})
    except (SwapError, KeyError):
        raise SwapError(f"{FASHION_MINI} is missing or damaged: `git checkout {FASHION_MINI}` brings it back") from None


DATA_SETS: dict[str, Callable[[], Source]] = {"fashion-mini": fashion_mini}


def prepare(name: str, folder: Path) -> str:
    """Write the named data set to `folder`; returns a line about it."""
    if name not in DATA_SETS:
        raise SwapError(f"params.yaml: data.name is {name!r}: choose one of {', '.join(DATA_SETS)}")
    source = DATA_SETS[name]()
    mean, std = _moments(source.train_images)
    for split, images, labels in (
        ("train", source.train_images, source.train_labels),
        ("test", source.test_images, source.test_labels),
    ):
        write_tensors(folder / f"{split}.safetensors", {"images": images, "labels": labels}, {"split": split})
    shape = list(source.train_images.shape[1:])
    write_json(folder / "meta.json", {"classes": list(source.classes), "shape": shape, "mean": mean, "std": std})
    return (
        f"{name}: {len(source.train_labels):,} training and {len(source.test_labels):,} test images, "
        f"{'×'.join(map(str, shape))}, {len(source.classes)} classes"
    )


def _moments(images: torch.Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel on the scale 0–1, from exact counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].reshape(-1), minlength=256).double()
        average = (counts @ values) / counts.sum()
        spread = ((counts @ (values - average) ** 2) / counts.sum()).sqrt()
        if spread == 0:
            raise SwapError(f"all training images have the same value in channel {channel}: there is nothing to learn")
        mean.append(average.item())
        std.append(spread.item())
    return mean, std
