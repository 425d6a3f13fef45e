"""Copies of image files that are made smaller once (`data.copies`): which one an epoch reads, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".jpegs"
IMAGES_IN_A_FILE = 8192
"""so that a network file system is asked for few files: at 10 to 40 kB each, 80 to 330 MB"""
# For estimates: those of photographs had 0.23 (side 352) to 0.29 (160); with fine detail or noise it may be more.
_BYTES_PER_PIXEL = 0.3


def copy_for(image_size: int, copies: Sequence[int]) -> int | None:
    """Which of these copies, named by their shorter side, is read for images of this size; None: the file itself.

    It is larger by a quarter at least, as in the ImageNet code that the paper builds on. A test image, which is brought
    to 8/7 of `image_size` before its middle is taken, is then never enlarged.
    """
    return next((side for side in copies if 4 * side >= 5 * image_size), None)


def file_of_copies(folder: Path, split: str, side: int, number: int) -> Path:
    """One of the files that hold the copies of a split, one after another."""
    return folder / f"{split}_{side}_{number:05}{SUFFIX}"


def expected_bytes(num_images: int, copies: Sequence[int]) -> int:
    """Of copies of photographs with sides of 4:3."""
    return round(num_images * sum(side * side * 4 / 3 for side in copies) * _BYTES_PER_PIXEL)
