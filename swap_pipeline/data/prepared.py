"""Reading `data/prepared`: facts of the data set, and its splits, checked on opening."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.errors import SwapError
from swap_pipeline.storage.files import read_json
from swap_pipeline.storage.tensor_files import TensorFile, digest_of

# Larger than the side of any image that a network is trained on.
_MAX_SIDE = 1 << 14
_OPTIONAL = {"validation", "copies"}


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The contents of `meta.json`."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int] | None
    """channels, height, width; None for images read from files"""
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_validation: int = 0
    """images that were held back from training; 0: there is no such split"""
    copies: tuple[int, ...] = ()
    """shorter sides, in rising order, to which there are copies of images that stay in files"""
    digest: str = ""
    """of the whole file; the splits' files contain it too"""

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
        num_validation=tree.get("validation", 0),
        copies=tuple(tree.get("copies", ())),
        digest=digest_of(tree),
    )


def _why_no_meta(tree: Any) -> str:
    """What keeps a tree from being that of a `meta.json`; empty if nothing does."""
    if not isinstance(tree, dict) or tree.keys() - _OPTIONAL != {"kind", "classes", "shape", "mean", "std"}:
        return "it has other entries"
    if type(tree.get("validation", 1)) is not int or tree.get("validation", 1) < 1:
        return "validation is not a number of images"
    if tree["kind"] not in ("memory", "files"):
        return f"kind is {str(tree['kind'])[:40]!r}"
    copies = tree.get("copies", [])
    if not isinstance(copies, list) or not all(map(is_size, copies)) or copies != sorted(set(copies)):
        return "copies is not a list of sizes in rising order"
    if copies and tree["kind"] == "memory":
        return "it has copies of images in memory"
    shape = tree["shape"]
    if not isinstance(shape, list) or len(shape) != 3:
        return "shape is not channels, height and width"
    return why_no_images(tree) or (
        "" if all(map(is_size, shape[1:] if tree["kind"] == "memory" else ())) else "shape is not one of images"
    )


def why_no_images(tree: Mapping[str, Any]) -> str:
    """What is wrong with classes, channels and normalisation in a `meta.json` or checkpoint; empty if nothing is."""
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
    """Whether it can be an image's side or number of channels."""
    return type(value) is int and 0 < value <= _MAX_SIDE


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_SIDE and math.isfinite(value)


def open_split(folder: Path, split: str, meta: Meta, dtypes: Mapping[str, torch.dtype]) -> TensorFile:
    """The file of a split, which must belong to `meta` and have these tensors."""
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
    """The labels of a split, each of which must have a class."""
    labels = file.read("labels")
    if labels.dim() != 1 or not len(labels) or not 0 <= int(labels.min()) <= int(labels.max()) < len(meta.classes):
        raise SwapError(f"{file.path} is empty or has labels without a class: delete it and run `dvc repro`")
    return labels


@dataclass(frozen=True, kw_only=True)
class View:
    """How images from files are cropped and resized; images in memory are not."""

    size: int
    """side of the square in pixels"""
    min_scale: float | None = None
    """for training: a random crop of at least this share of the area; None: the centre of the image"""


def view_in(info: Mapping[str, Any], path: Path) -> View | None:
    """The view in a checkpoint's header."""
    view = info.get("view")
    if view is None:
        return None
    if isinstance(view, dict) and view.keys() == {"size", "min_scale"} and is_size(view["size"]):
        scale = view["min_scale"]
        if scale is None or (type(scale) in (int, float) and 0 < scale <= 1):
            return View(size=view["size"], min_scale=scale)
    raise SwapError(f"{path}: its header has an invalid image size: train it again")


def pixel_scale(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Values per channel on the scale 0–1, as 1×C×1×1 on the scale 0–255."""
    return (torch.tensor(values, dtype=torch.float32) * 255).view(1, -1, 1, 1).to(device)
