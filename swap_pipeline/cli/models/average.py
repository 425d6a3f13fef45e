"""The mean of any checkpoints of one network, streamed, and batch-norm statistics for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_pipeline.averaging.mean import average_files, average_on_ranks, check_alike
from swap_pipeline.cli.models.predict import check_usable, seen
from swap_pipeline.config.params import Model
from swap_pipeline.config.reading import read_params
from swap_pipeline.data.images import Split, read_images
from swap_pipeline.data.prepared import Meta, read_meta, view_in
from swap_pipeline.datasets.image_folders import EXTENSIONS
from swap_pipeline.engine.batchnorm import batches_of_rank, edges_of_batches, recompute_statistics
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.models.networks import network_for, network_of, shapes_of
from swap_pipeline.models.starting import describe_file
from swap_pipeline.models.torchvision_and_timm import usual_images
from swap_pipeline.runtime.environment import find_root, num_cores
from swap_pipeline.runtime.gpus import device_type_of_rank
from swap_pipeline.storage.tensor_files import TensorFile, open_any, write_tensors

_OF_NETWORK = ("model", "classes", "shape", "mean", "std", "view", "test_crop")
"""the entries of a header that are the same for all checkpoints of a run"""
_MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the options of `swap average` say."""

    data: Path | None = None
    """images for the statistics: a folder with image files, or one that `prepare` made"""
    model: str | None = None
    """the network of files whose header does not describe one, as `model.name`; a user's own may run"""
    own: str | None = None
    """a user's own network that may run too: that of params.yaml"""
    size: int | None = None
    batch_size: int = 500
    average_statistics: bool = False


def average(paths: Sequence[Path], out: Path, wish: Wish) -> str:
    """Write the mean of `paths` to `out`; returns a line about it."""
    if os.path.lexists(out):
        raise SwapError(f"{out} exists: remove it, or name another file with -o")
    files = [open_any(path) for path in paths]
    check_alike(files)
    described = _described(files, wish)
    header = {} if described is None else {key: value for key, value in described.info.items() if key in _OF_NETWORK}
    made = f"{out}: {f'the mean of {len(files)} checkpoints' if len(files) > 1 else 'one checkpoint, as it is'}"
    info = {**header, "averaged": len(files)}
    if wish.data is None or not _has_batch_norm(files[0]):
        _check_without_data(files, wish)
        if wish.model is not None and not header:
            info["model"] = describe_file(_model(wish.model), files[0])
            network_for(info["model"], files[0])
        threads = min(_MOST_THREADS, num_cores())
        average_files(paths, out, info, threads=threads, open_file=open_any)
        return made if _has_batch_norm(files[0]) else f"{made}; it has no batch norm, so no statistics are needed"
    if wish.average_statistics:
        raise SwapError("--average-statistics has no effect with --data, which computes them: leave one of them out")
    network, images = _open(described or files[0], wish, data=wish.data)
    group = _group()
    network.load_state_dict(average_on_ranks(paths, group, open_file=open_any), assign=True)
    network.to(group.device)
    network.to(memory_format=torch.channels_last)
    try:
        with must_fit(f"a batch of {wish.batch_size} images", remedy="lower --batch-size"):
            layers = recompute_statistics(network, images.batches(wish.batch_size, group), group=group)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, SwapError):
            raise
        why = " ".join(str(error).split())[:300]
        raise SwapError(f"the network cannot take the images of {wish.data}: {why}") from None
    if not all(tensor.isfinite().all() for tensor in network.state_dict().values()):
        raise SwapError("the statistics are NaN or Inf: these checkpoints are too far from each other to be averaged")
    seen_as = {key: value for key, value in images.header.items() if key in _OF_NETWORK}
    write_tensors(out, network.state_dict(), {**seen_as, "averaged": len(files)})
    return f"{made}; statistics of {layers} batch-norm layers from {len(images):,} images"


def _has_batch_norm(file: TensorFile) -> bool:
    return any(key.rpartition(".")[2] == "running_mean" for key in file.layout)


def _described(files: Sequence[TensorFile], wish: Wish) -> TensorFile | None:
    """The last file whose header describes the network, as those of this pipeline do; all must say the same."""
    ours = [file for file in files if "model" in file.info]
    for file in ours[1:]:
        for key in ("model", "classes"):
            if file.info.get(key) != ours[0].info.get(key):
                found, first = shown(file.info.get(key)), shown(ours[0].info.get(key))
                raise SwapError(
                    f"{file.path} has {key} {found}, but {ours[0].path} has {first}: only equal networks can be "
                    f"averaged"
                )
    if not ours:
        return None
    model = ours[-1].info["model"]
    name = model.get("name") if isinstance(model, dict) else None
    if wish.model is not None and wish.model != name:
        raise SwapError(f"--model is {shown(wish.model)}, but {ours[-1].path} holds {shown(name)}: leave --model out")
    return ours[-1]


def _check_without_data(files: Sequence[TensorFile], wish: Wish) -> None:
    if not _has_batch_norm(files[0]):
        return
    if len(files) > 1 and not wish.average_statistics:
        raise SwapError(
            "these networks have batch norm, and the mean of their running statistics is not that of the averaged "
            "weights: name training images with --data, or take the mean of the statistics with --average-statistics"
        )


def _model(name: str) -> Model:
    """With the width and the options of params.yaml, if that names the same network."""
    try:
        model = read_params().model
    except SwapError:
        return Model(name=name)
    return model if model.name == name else Model(name=name)


def _group() -> Group:
    kind = device_type_of_rank()
    return Group(rank=0, world_size=1, device=torch.device(kind, 0) if kind == "cuda" else torch.device(kind))


# --- images for the statistics


@dataclass(frozen=True, kw_only=True)
class _Images:
    """Images as the network sees them."""

    header: Mapping[str, Any]
    """how they are seen, for the header of the result"""
    prepared: Split | None = None
    files: Sequence[Path] = ()

    def __len__(self) -> int:
        return len(self.files if self.prepared is None else self.prepared)

    def batches(self, batch_size: int, group: Group) -> Iterator[torch.Tensor]:
        """In a random order that is always the same, since folders are often sorted by class."""
        if self.prepared is not None:
            view = view_in(self.header, Path("the header"))
            yield from batches_of_rank(
                self.prepared, batch_size=batch_size, seed=0, augment=None, group=group, view=view
            )
            return
        header = {**self.header, "test_crop": "square"}  # rectangles would not share a batch
        order = torch.randperm(len(self.files), generator=torch.Generator().manual_seed(0)).tolist()
        with ThreadPoolExecutor(num_cores()) as pool:
            for start, end in pairwise(edges_of_batches(len(order), batch_size)):
                paths = [self.files[position] for position in order[start:end]]
                images = torch.stack(list(pool.map(lambda path: seen(path, header), paths)))
                yield images.to(group.device, memory_format=torch.channels_last)


def _open(file: TensorFile, wish: Wish, *, data: Path) -> tuple[nn.Module, _Images]:
    """The network of this file, with initial weights, and the images that it is to see."""
    meta = read_meta(data) if (data / "meta.json").is_file() else None
    header: Mapping[str, Any]
    if "model" in file.info:
        network, header = network_of(file, own=wish.model or wish.own), file.info
        check_usable(header, file.path)
        if wish.size is not None:
            raise SwapError("--size has no effect: the header of the checkpoint says what size its images have")
    else:
        if wish.model is None:
            raise SwapError(
                f"{file.path} does not say which network it is of: name that with --model, as timm:resnet50"
            )
        description = describe_file(_model(wish.model), file)
        if meta is not None and shapes_of(description) == shapes_of({**description, "channels": meta.channels}):
            description["channels"] = meta.channels  # torchvision's networks repeat the one channel of a grey image
        network = network_for(description, file)
        header = _usual_header(description, network, meta, wish)
    if meta is None:
        return network, _Images(header=header, files=_image_files(data))
    return network, _Images(header=header, prepared=_prepared(data, meta, header))


def _usual_header(description: Mapping[str, Any], network: nn.Module, meta: Meta | None, wish: Wish) -> dict[str, Any]:
    """How a network from elsewhere sees images: as they were prepared, or as its library has it."""
    name, channels, num_classes = (description[key] for key in ("name", "channels", "num_classes"))
    known = usual_images(name, network)
    if meta is not None and meta.shape is not None and wish.size is not None:
        raise SwapError("--size has no effect on images that were prepared in memory: leave it out")
    if meta is None and (known is None or len(known[1]) != channels):
        raise SwapError(
            f"--data: how {shown(name)} wants its {channels} channels normalised is not known: name a folder that "
            f"`dvc repro` prepared, such as data/prepared"
        )
    size = wish.size or (known[0] if known else None)
    if meta is not None and meta.shape is None and size is None:
        raise SwapError("--size is missing: say how many pixels the sides of the network's images have")
    in_memory = meta is not None and meta.shape is not None
    mean, std = (meta.mean, meta.std) if meta is not None else known[1:] if known else ((), ())
    fits = meta is not None and len(meta.classes) == num_classes
    return {
        "model": dict(description),
        "classes": list(meta.classes) if meta is not None and fits else [str(number) for number in range(num_classes)],
        "shape": list(meta.shape) if meta is not None and meta.shape is not None else [channels, size, size],
        "mean": list(mean),
        "std": list(std),
        **({} if in_memory else {"view": {"size": size, "min_scale": None}, "test_crop": "square"}),
    }


def _prepared(folder: Path, meta: Meta, header: Mapping[str, Any]) -> Split:
    """The training images that `prepare` left in a folder, which must be normalised as the network expects."""
    for key, found in (("shape", meta.shape), ("mean", meta.mean), ("std", meta.std)):
        if found is not None and list(found) != header[key]:
            raise SwapError(
                f"{folder} has images of {key} {shown(list(found))}, but the network was trained on "
                f"{shown(header[key])}: name the data that it was trained on, or a folder with image files"
            )
    if meta.channels != header["shape"][0]:
        raise SwapError(
            f"{folder} has images with {meta.channels} channels, but the network takes {header['shape'][0]}"
        )
    group, view = _group(), view_in(header, folder)
    if meta.in_memory:
        return read_images(folder, "train", group.device)
    if view is None:
        raise SwapError(f"{folder} has image files, but the network was trained on images in memory: name their folder")
    from swap_pipeline.data.loader import FileImages

    root = find_root(read_params().data.root)
    return FileImages(folder, "train", meta, root=root, test_crop="square", device=group.device)


def _image_files(folder: Path) -> list[Path]:
    """All images in a folder and below; if it has a folder `train`, only those there."""
    if not folder.is_dir():
        raise SwapError(f"--data is {shown(str(folder))}, which is not a folder: name one with images")
    root = folder / "train" if (folder / "train").is_dir() else folder
    found = [
        Path(parent) / name for parent, _, names in os.walk(root) for name in names if name.lower().endswith(EXTENSIONS)
    ]
    if len(found) < 2:
        raise SwapError(f"{root} has {len(found)} images, too few for statistics: name a folder with training images")
    return sorted(found)
