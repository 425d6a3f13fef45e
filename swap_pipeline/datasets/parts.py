"""Which training images are used, and which are held back for validation: always the same ones.

Decided by a hash of the image's position in its class, not by a random generator, which may differ between versions,
and not by `seed`, so repeats share the validation set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swap_pipeline.config.params import Data
from swap_pipeline.errors import SwapError

Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Positions among the training images, sorted."""

    train: Positions
    validation: Positions
    notes: tuple[str, ...]
    """notes for the user, one line each"""


def parts_of(labels: Positions, classes: Sequence[str], data: Data) -> Parts:
    """Each class's last draws are for validation, its first ones for training; larger parts contain smaller ones."""
    num_classes, held_back = len(classes), data.validation_images
    by_lot = _by_lot(labels, num_classes)
    sizes = [len(lots) for lots in by_lot]
    try:
        number = num_trained_on(len(labels), data)
        _check_classes(sizes, classes, held_back)
    except SwapError as error:
        raise SwapError(f"params.yaml: {error}") from None
    for_validation = even_shares([len(labels)] * num_classes, held_back)
    left = [size - share for size, share in zip(sizes, for_validation, strict=True)]
    for_training = even_shares(left, number)
    parts = {
        "training": _sorted(lots[:share] for lots, share in zip(by_lot, for_training, strict=True)),
        "validation": _sorted(lots[rest:] for lots, rest in zip(by_lot, left, strict=True)),
    }
    notes = []
    if number < sum(left):
        notes.append(f"note: {number:,} of {sum(left):,} training images are used (data.train_images)")
    for (part, positions), limited in zip(parts.items(), (number < sum(left), held_back > 0), strict=True):
        num_unseen = num_classes - len(np.unique(labels[positions]))
        if num_unseen and limited:
            notes.append(
                f"warning: {num_unseen:,} of {num_classes:,} classes have no {part} image: raise it to see all"
            )
    return Parts(train=parts["training"], validation=parts["validation"], notes=tuple(notes))


def num_trained_on(total: int, data: Data) -> int:
    """Number of images to train on, without those held back for validation."""
    left = total - data.validation_images
    if left < 1:
        raise SwapError(
            f"data.validation_images is {data.validation_images}, but {data.name} has {total} training images: lower it"
        )
    if data.train_images == "all":
        return left
    if data.train_images > left:
        beside = f" beside {data.validation_images} for validation" if data.validation_images else ""
        raise SwapError(
            f"data.train_images is {data.train_images}, but {data.name} has {left}{beside}: lower it, or set it to all"
        )
    return data.train_images


def _check_classes(sizes: Sequence[int], classes: Sequence[str], held_back: int) -> None:
    """Check that the smallest class has enough images for validation and one more."""
    smallest = min(range(len(sizes)), key=lambda label: sizes[label])
    each = -(-held_back // len(sizes))
    if sizes[smallest] <= each > 0:
        raise SwapError(
            f"data.validation_images is {held_back}, {each} of each class, but {classes[smallest]} has "
            f"{sizes[smallest]} training images: set it to at most {(sizes[smallest] - 1) * len(sizes)}"
        )


def even_shares(sizes: Sequence[int], number: int) -> list[int]:
    """How many of each class, as evenly as their sizes allow; what smaller classes lack, larger ones share."""
    shares = [0] * len(sizes)
    for rank, label in enumerate(sorted(range(len(sizes)), key=lambda label: (sizes[label], label))):
        shares[label] = min(sizes[label], (number - sum(shares)) // (len(sizes) - rank))
    return shares


def _by_lot(labels: Positions, num_classes: int) -> list[Positions]:
    """The positions of each class's images, in the order of their draws."""
    of_class = [np.flatnonzero(labels == label) for label in range(num_classes)]
    return [
        places[sorted(range(len(places)), key=lambda place: _lot(label, place))]
        for label, places in enumerate(of_class)
    ]


def _lot(label: int, place: int) -> bytes:
    return hashlib.blake2b(f"training image {place} of class {label}".encode(), digest_size=8).digest()


def _sorted(parts: Iterable[Positions]) -> Positions:
    return np.sort(np.concatenate(list(parts)))
