"""Named data sets → `data/prepared/`: uint8 tensors or an index of image files, and facts about them."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from swap_pipeline.config.params import Data
from swap_pipeline.datasets.arrays import FROM_ARRAYS
from swap_pipeline.datasets.copies import make_copies, scratch_for_copies
from swap_pipeline.datasets.image_folders import FolderSplit, Looks, joined, look_at, processes_for, scan
from swap_pipeline.datasets.parts import Positions, parts_of
from swap_pipeline.errors import SwapError, did_you_mean
from swap_pipeline.runtime.environment import find_root
from swap_pipeline.storage.files import link_or_copy, write_json
from swap_pipeline.storage.image_files import shape_of
from swap_pipeline.storage.tensor_files import digest_of, write_tensors

# ImageNet's usual normalisation, so that published weights fit.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_CALLED = {"train": "training", "validation": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a data set, which need not be there yet."""

    num_train: int
    num_test: int
    shape: tuple[int, int | None, int | None]
    """channels, height and width; None where images differ"""
    num_classes: int


FACTS = {
    "fashion-mini": Facts(num_train=10_000, num_test=10_000, shape=(1, 28, 28), num_classes=10),
    "fashion-mnist": Facts(num_train=60_000, num_test=10_000, shape=(1, 28, 28), num_classes=10),
    "cifar10": Facts(num_train=50_000, num_test=10_000, shape=(3, 32, 32), num_classes=10),
    "cifar100": Facts(num_train=50_000, num_test=10_000, shape=(3, 32, 32), num_classes=100),
    "imagenet": Facts(num_train=1_281_167, num_test=50_000, shape=(3, None, None), num_classes=1000),
}


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Everything that is written."""

    splits: Mapping[str, Mapping[str, torch.Tensor]]
    """train, test and, if there is one, validation"""
    kind: Literal["memory", "files"]
    classes: tuple[str, ...]
    shape: tuple[int, int | None, int | None]
    normalisation: tuple[list[float], list[float]]
    about: str
    """the end of the summary line"""
    notes: Sequence[str] = ()
    copies: Sequence[int] = ()
    """sides of the copies that `files` holds"""
    files: Sequence[Path] = ()


def prepare(data: Data, folder: Path) -> str:
    """Write the named data set to `folder`; returns a line about it, and one for each thing that people should know."""
    with scratch_for_copies() if data.copies else contextlib.nullcontext() as scratch:
        if data.name in FROM_ARRAYS:
            if data.copies:
                raise no_copies(data)
            made = _from_arrays(data)
        elif data.name in TEST_FOLDERS:
            made = _from_folder(data, scratch)
        else:
            raise unknown(data.name)
        _write(folder, made)
    counts = {split: len(tensors["labels"]) for split, tensors in made.splits.items()}
    line = f"{data.name}: {in_words(counts)} images, {made.about}"
    return "\n".join([line, *made.notes])


def in_words(counts: Mapping[str, int]) -> str:
    """`9,000 training, 1,000 validation and 10,000 test`, of the images in each split."""
    *others, last = (f"{counts[split]:,} {name}" for split, name in _CALLED.items() if counts.get(split))
    return f"{', '.join(others)} and {last}"


def no_copies(data: Data) -> SwapError:
    """What is said of copies that nothing would read."""
    remedy = "" if data.name in FROM_ARRAYS else ", or set data.max_gb_in_memory: 0 to read them from their files"
    return SwapError(f"params.yaml: data.copies has no effect on images in memory: remove it{remedy}")


def unknown(name: str) -> SwapError:
    """The error for an unknown data set."""
    return SwapError(f"params.yaml: data.name is {name!r}{did_you_mean(name, [*FROM_ARRAYS, *TEST_FOLDERS])}")


def _write(folder: Path, made: _Prepared) -> None:
    """`meta.json` is written last and removed first: without it, the folder does not look complete."""
    mean, std = made.normalisation
    meta: dict[str, Any] = {
        "kind": made.kind,
        "classes": list(made.classes),
        "shape": list(made.shape),
        "mean": mean,
        "std": std,
    }
    if "validation" in made.splits:
        meta["validation"] = len(made.splits["validation"]["labels"])
    if made.copies:
        meta["copies"] = list(made.copies)
    for stale in ("meta.json", "validation.safetensors"):
        (folder / stale).unlink(missing_ok=True)
    shutil.rmtree(folder / "copies", ignore_errors=True)
    try:
        if made.files:
            (folder / "copies").mkdir(parents=True)
        for file in made.files:
            link_or_copy(file, folder / "copies" / file.name)
        for split, tensors in made.splits.items():
            info = {"split": split, "meta": digest_of(meta)}
            info |= {"list": _list_hash(tensors)} if made.kind == "files" else {}
            write_tensors(folder / f"{split}.safetensors", tensors, info)
    except BaseException:
        for split in made.splits:
            (folder / f"{split}.safetensors").unlink(missing_ok=True)
        shutil.rmtree(folder / "copies", ignore_errors=True)
        raise
    write_json(folder / "meta.json", meta)


def _list_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of an index, in the order of its keys."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _from_arrays(data: Data) -> _Prepared:
    source = FROM_ARRAYS[data.name](data.root)
    parts = parts_of(source.train_labels.numpy(), source.classes, data)

    def taken(positions: Positions) -> dict[str, torch.Tensor]:
        return {"images": source.train_images[positions], "labels": source.train_labels[positions]}

    train = taken(parts.train)
    channels, height, width = train["images"].shape[1:]
    return _Prepared(
        splits={
            "train": train,
            "test": {"images": source.test_images, "labels": source.test_labels},
            **({"validation": taken(parts.validation)} if len(parts.validation) else {}),
        },
        kind="memory",
        classes=source.classes,
        shape=(channels, height, width),
        normalisation=_moments(_counts(train["images"])),
        about=f"{channels}×{height}×{width}, {len(source.classes)} classes, in memory",
        notes=parts.notes,
    )


def _counts(images: torch.Tensor) -> torch.Tensor:
    """How often each of the 256 values occurs in each channel."""
    channels = range(images.shape[1])
    return torch.stack([torch.bincount(images[:, channel].reshape(-1), minlength=256) for channel in channels])


def _moments(counts: torch.Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel on the scale 0–1, from exact counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel, of_channel in enumerate(counts.double()):
        average = (of_channel @ values) / of_channel.sum()
        spread = ((of_channel @ (values - average) ** 2) / of_channel.sum()).sqrt()
        if spread == 0:
            raise SwapError(f"all training images have the same value in channel {channel}: there is nothing to learn")
        mean.append(average.item())
        std.append(spread.item())
    return mean, std


# --- folders of images

# Where to look for test images; ImageNet's own `test` has no labels.
TEST_FOLDERS = {"imagefolder": ("test", "val"), "imagenet": ("val", "test")}


def _from_folder(data: Data, scratch: Path | None) -> _Prepared:
    tree = scan(_hashed_root(data.root), test_names=TEST_FOLDERS[data.name])
    parts = parts_of(tree.train.labels, tree.classes, data)
    splits = {"train": tree.train.only(parts.train), "test": tree.test}
    if len(parts.validation):
        splits["validation"] = tree.train.only(parts.validation)
    notes = [*tree.notes, *parts.notes]
    is_imagenet = data.name == "imagenet"
    if is_imagenet and len(tree.classes) != FACTS["imagenet"].num_classes:
        notes.append(f"note: {tree.root} has {len(tree.classes):,} classes, ImageNet has 1,000")
    num_images = sum(map(len, splits.values()))
    keep = _size_to_keep(tree.root / splits["train"].paths[0], num_images, data.max_gb_in_memory)
    with processes_for(num_images) as run:
        seen = {
            name: look_at(run, tree.root, split.paths, keep=keep, what=_CALLED[name]) for name, split in splits.items()
        }
        looks = joined(list(seen.values()))
        _refuse_unreadable(tree.root, looks)
        channels = 1 if looks.grey.all() and not is_imagenet else 3
        why_not = _why_not_in_memory(looks, channels, data.max_gb_in_memory)
        copies: dict[str, dict[str, NDArray[Any]]] = {}
        files: list[Path] = []
        if scratch is not None:
            if not why_not:
                raise no_copies(data)
            copies, files = make_copies(
                run,
                tree.root,
                splits,
                seen,
                sides=data.copies,
                channels=channels,
                scratch=scratch,
                called=_CALLED,
            )
    if why_not:
        tensors = {name: _index(split, seen[name], copies.get(name, {})) for name, split in splits.items()}
        shape: tuple[int, int | None, int | None] = (channels, None, None)
        about = f"{'grey' if channels == 1 else 'in colour'}, {len(tree.classes):,} classes, left in files: {why_not}"
        if files:
            sides, num_bytes = " and ".join(map(str, data.copies)), sum(file.stat().st_size for file in files)
            about += f"; copies of {sides} pixels: {num_bytes / 1e9:.3g} GB"
    else:
        tensors = {name: _tensors(split, seen[name], channels) for name, split in splits.items()}
        shape = (channels, int(looks.heights[0]), int(looks.widths[0]))
        about = f"{'×'.join(map(str, shape))}, {len(tree.classes):,} classes, in memory"
    customary = list(IMAGENET_MEAN), list(IMAGENET_STD)
    return _Prepared(
        splits=tensors,
        kind="files" if why_not else "memory",
        classes=tree.classes,
        shape=shape,
        normalisation=customary if is_imagenet else _moments(torch.from_numpy(seen["train"].counts[:channels])),
        about=about,
        notes=notes,
        copies=data.copies,
        files=files,
    )


def _hashed_root(root: str) -> Path:
    """The folder that DVC has hashed as a dependency; changes in any other would go unnoticed."""
    here, found = Path(root), find_root(root)
    if found != here:
        raise SwapError(
            f"params.yaml: data.root is {root!r}, and its images are not in this temporary folder, which has only what "
            f"git or DVC tracks: write it as an absolute path, or `dvc add {root}`"
        )
    return here


def _size_to_keep(first: Path, num_images: int, max_gb: float) -> tuple[int, int] | None:
    """Height and width that all images need, to be kept in memory: the first one's, if so many of that size fit."""
    try:
        channels, height, width = shape_of(first)
    except SwapError:
        return None  # reported together with all other unreadable images
    return (height, width) if num_images * channels * height * width <= max_gb * 1e9 else None


def _refuse_unreadable(root: Path, looks: Looks) -> None:
    if looks.errors:
        first = f"{len(looks.errors):,} of {len(looks):,} images in {root} cannot be read: repair or remove them"
        raise SwapError("\n".join([first, *looks.errors]))


def _why_not_in_memory(looks: Looks, channels: int, max_gb: float) -> str:
    """Why the images have to stay in their files; empty if they need not."""
    if len(np.unique(looks.heights)) > 1 or len(np.unique(looks.widths)) > 1:
        return "they differ in size"
    num_bytes = channels * int((looks.heights.astype(np.int64) * looks.widths).sum())
    return f"{num_bytes / 1e9:.3g} GB, more than data.max_gb_in_memory" if num_bytes > max_gb * 1e9 else ""


def _tensors(split: FolderSplit, looks: Looks, channels: int) -> dict[str, torch.Tensor]:
    assert looks.pixels is not None
    pixels = looks.pixels if looks.pixels.shape[1] == channels else looks.pixels.repeat(channels, axis=1)
    return {"images": torch.from_numpy(pixels), "labels": torch.from_numpy(split.labels)}


def _index(split: FolderSplit, looks: Looks, copies: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Where the images are and what they were like; all paths in one row of bytes, and where each of them ends."""
    paths = [path.encode() for path in split.paths]
    ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
    arrays = {
        "labels": split.labels,
        "heights": looks.heights,
        "widths": looks.widths,
        "paths": np.frombuffer(b"".join(paths), dtype=np.uint8).copy(),
        "path_ends": ends,
        "digests": looks.digests,
        **copies,
    }
    return {key: torch.from_numpy(array) for key, array in arrays.items()}
