"""A fixed random sample of the prepared images, for repeated passes.

The sample depends only on the number of images, its size and a seed. If all passes are the same, batches are made once
and kept on the device, if there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch

from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.images import Split, read_images
from swap_pipeline.data.prepared import View, read_meta
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.opening import PREPARED
from swap_pipeline.runtime.environment import find_root
from swap_pipeline.storage.tensor_files import TensorFile, write_tensors

Batch = TypeVar("Batch")

# Bytes of main memory for each rank; on a GPU, half of what is free.
_ROOM_ON_CPU = 2 << 30


def chosen(num_images: int, count: int | Literal["all"], *, seed: int, split: str) -> torch.Tensor | None:
    """Indices of the images in the sample, sorted; None for all images."""
    if count == "all" or count >= num_images:
        return None
    generator = torch.Generator().manual_seed(derive_seed("sample", split, seed))
    return torch.randperm(num_images, generator=generator)[:count].sort().values


def open_sample(
    split: str, count: int | Literal["all"], *, seed: int, setting: Setting, group: Group, scratch: Path
) -> Split:
    """A sample of the training or test images for this rank's device; must be called on all ranks."""
    meta = read_meta(PREPARED)
    if meta.in_memory:
        images = read_images(PREPARED, split, group.device)
        indices = chosen(len(images), count, seed=seed, split=split)
        if indices is None:
            return images
        indices = indices.to(group.device)
        return replace(images, pixels=images.pixels[indices], labels=images.labels[indices])
    from swap_pipeline.data.loader import FileImages  # with torchvision, which doubles a rank's start-up time

    index = TensorFile(PREPARED / f"{split}.safetensors")
    indices = chosen(len(index.read("labels")), count, seed=seed, split=split)
    folder = PREPARED
    if indices is not None:
        folder = scratch / "sample"
        if group.is_main:
            _write_index(folder / f"{split}.safetensors", index, indices, meta.copies)
        group.wait()
    root = find_root(setting.root)
    files = FileImages(
        folder,
        split,
        meta,
        root=root,
        test_crop=setting.augment.test_crop,
        device=group.device,
        copies=PREPARED / "copies",
    )
    files.start()
    return files


def _write_index(path: Path, index: TensorFile, indices: torch.Tensor, copies: Sequence[int]) -> None:
    """An index of image files with only some of its entries."""
    ends = index.read("path_ends").to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    paths = index.read("paths")
    names = [paths[starts[i] : ends[i]] for i in indices.tolist()]
    of_copies = [key for side in copies for key in (f"copies_{side}", f"copy_digests_{side}")]
    tensors = {key: index.read(key)[indices].clone() for key in ("labels", "heights", "widths", *of_copies)}
    tensors["paths"] = torch.cat(names)
    tensors["path_ends"] = torch.tensor([len(name) for name in names]).cumsum(0)
    write_tensors(path, tensors, index.info)


def has_room(images: Iterable[Split], *, view: View | None, device: torch.device) -> bool:
    """Whether one pass over each of these, normalised in float32, fits on the device."""
    needed = 0
    for split in images:
        channels, height, width = split.image_shape(view)
        needed += 4 * len(split) * channels * height * width
    room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _ROOM_ON_CPU
    return needed <= room


class SamePass(Generic[Batch]):
    """The batches of a pass that is the same each time: kept, or made again for each pass."""

    def __init__(self, make: Callable[[], Iterable[Batch]], *, keep: bool) -> None:
        self._make = make
        self._kept = list(make()) if keep else None

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._make() if self._kept is None else self._kept)
