"""A trained network as ONNX and as a program of torch.export, compared with the network, and a model card."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_pipeline.cli.models.exported import CARD, Comparison, Exported
from swap_pipeline.cli.models.model_card import model_card
from swap_pipeline.cli.models.predict import check_usable
from swap_pipeline.config.reading import read_params
from swap_pipeline.data.images import Split, read_images
from swap_pipeline.data.prepared import View, pixel_scale, read_meta
from swap_pipeline.engine.opening import PREPARED
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.models.networks import load_model
from swap_pipeline.runtime.environment import eval_batch_size, find_root
from swap_pipeline.storage.files import write_text
from swap_pipeline.storage.tensor_files import TensorFile

ONNX, PROGRAM = "model.onnx", "model.pt2"
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LEAST_AGREEMENT = 0.99
_NUM_RANDOM = 64


class FromPixels(nn.Module):
    """A network that normalises its images itself: uint8, N×C×H×W, 0–255; gives logits."""

    def __init__(self, network: nn.Module, info: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = network
        mean, std = (pixel_scale(tuple(info[key]), torch.device("cpu")) for key in ("mean", "std"))
        self.mean, self.std = nn.Buffer(mean), nn.Buffer(std)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network((images.to(torch.float32) - self.mean) / self.std)
        return logits


Predict = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def export(
    checkpoint: Path,
    folder: Path,
    *,
    names: tuple[str, ...] = (PROGRAM, ONNX),
    data: Path | None = None,
    num_images: int | None = None,
    licence: str | None = None,
    own: str | None = None,
) -> Exported:
    """Write the files called `names`, and a model card, to a folder; nothing if one of them differs from the network.

    They are compared on the first `num_images` test images in the prepared folder `data`, or on random ones without it.
    """
    for name in (*names, CARD):
        if os.path.lexists(folder / name):
            raise SwapError(f"{folder / name} exists: remove it, or name another folder with -o")
    if ONNX in names and (missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]):
        raise SwapError(
            f"ONNX needs {', '.join(missing)}: run `pip install {' '.join(missing)}`, or take --format pt2 instead"
        )
    network = load_model(checkpoint, own=own)
    info = TensorFile(checkpoint).info
    check_usable(info, checkpoint)
    split = _test_images(data, info)
    network = FromPixels(network, info).eval()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as temporary:
        files = {name: Path(temporary) / name for name in names}
        program = _program(network, info)
        if PROGRAM in files:
            torch.export.save(program, files[PROGRAM])
        if ONNX in files:
            _write_onnx(program, files[ONNX])
        exported = _compare(
            network, {name: _READERS[name](path) for name, path in files.items()}, split, info, num_images
        )
        for name, compared in exported.comparisons.items():
            if compared.num_same < _LEAST_AGREEMENT * compared.num_images:
                raise SwapError(
                    f"{name} gives another class than the network for {compared.num_images - compared.num_same:,} of "
                    f"{compared.num_images:,} images, so nothing was written: this network cannot be exported"
                )
        for name, path in files.items():
            os.replace(path, folder / name)
    write_text(folder / CARD, model_card(checkpoint, info, exported, licence=licence))
    return exported


def _program(network: nn.Module, info: Mapping[str, Any]) -> torch.export.ExportedProgram:
    example = torch.zeros(2, *info["shape"], dtype=torch.uint8)
    try:
        return torch.export.export(network, (example,), dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
    except Exception as error:  # of anything that a network's code may do
        raise _cannot("torch.export", info, error) from error


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    try:
        model = torch.onnx.export(
            program,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes={"images": {0: "batch"}},  # the axis' name
            dynamo=True,
            verbose=False,
        )
        assert model is not None
        model.save(path, external_data=False)
    except Exception as error:
        raise _cannot("torch.onnx", {"model": {"name": "this network"}}, error) from error


def _cannot(who: str, info: Mapping[str, Any], error: Exception) -> SwapError:
    why = " ".join(str(error).split())[:300]
    return SwapError(f"{who} cannot export {shown(info['model']['name'])} ({type(error).__name__}: {why})")


def _read_program(path: Path) -> Predict:
    predict: Predict = torch.export.load(path).module()
    return predict


def _read_onnx(path: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


_READERS: dict[str, Callable[[Path], Predict]] = {PROGRAM: _read_program, ONNX: _read_onnx}


def _compare(
    network: nn.Module,
    readers: Mapping[str, Predict],
    split: Split | None,
    info: Mapping[str, Any],
    num_images: int | None,
) -> Exported:
    exported = Exported(
        comparisons={name: Comparison() for name in readers}, images="random" if split is None else "test"
    )
    hits = total = 0
    for pixels, labels in _batches(split, info, num_images):
        logits = network(pixels)
        for name, predict in readers.items():
            exported.comparisons[name].add(predict(pixels), logits)
        hits += int((logits.argmax(1) == labels).sum())
        total += len(labels)
    if split is not None:
        exported.accuracy = hits / total
    return exported


def _batches(
    split: Split | None, info: Mapping[str, Any], num_images: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pixels and labels; the first batch is a single image, which a file for a fixed batch would not take."""
    if split is None:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (_NUM_RANDOM, *info["shape"]), dtype=torch.uint8, generator=generator)
        yield from ((part, torch.zeros(len(part))) for part in (pixels[:1], pixels[1:]))
        return
    mean, std = (pixel_scale(tuple(info[key]), torch.device("cpu")) for key in ("mean", "std"))
    view = None if info.get("view") is None else View(size=info["shape"][1])
    left, is_first = len(split) if num_images is None else num_images, True
    for images, labels in split.test_batches(batch_size=eval_batch_size(), rank=0, world_size=1, view=view):
        pixels = (images * std + mean).round().to(torch.uint8)[:left]  # as they were before they were normalised
        for part in (slice(0, 1), slice(1, None)) if is_first else (slice(None),):
            if len(pixels[part]):
                yield pixels[part], labels[:left][part]
        left, is_first = left - len(pixels), False
        if left <= 0:
            return


def _test_images(data: Path | None, info: Mapping[str, Any]) -> Split | None:
    """The test images that `prepare` left in a folder, which must be of the data that the network was trained on.

    Without `data` those of this project, if they are.
    """
    folder = PREPARED if data is None else data
    if data is None and not (folder / "meta.json").is_file():
        return None
    meta = read_meta(folder)
    known = {"classes": meta.classes, "mean": meta.mean, "std": meta.std, "shape": meta.shape}
    for key, found in known.items():
        if found is not None and list(found) != info[key]:
            if data is None:
                return None
            raise SwapError(
                f"{folder} is not the data of this network: its {key} is {shown(list(found))}, not "
                f"{shown(info[key])}: name the right folder with --data"
            )
    cpu = torch.device("cpu")
    if meta.in_memory:
        return read_images(folder, "test", cpu)
    from swap_pipeline.data.loader import FileImages

    root = find_root(read_params().data.root)
    return FileImages(folder, "test", meta, root=root, test_crop="square", device=cpu)
