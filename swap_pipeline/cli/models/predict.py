"""A trained network applied to image files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from swap_pipeline.data.loader import middle, rectangle
from swap_pipeline.data.prepared import is_size, view_in, why_no_images
from swap_pipeline.errors import SwapError, printable
from swap_pipeline.models.networks import load_model
from swap_pipeline.storage.image_files import decode
from swap_pipeline.storage.tensor_files import TensorFile

_MAX_PIXELS = 1 << 24


@torch.inference_mode()
def predict(
    paths: Sequence[Path], checkpoint: Path, *, own: str | None = None
) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """For each image, all classes with their probabilities, most probable first; `own` as for `load_model`."""
    network = load_model(checkpoint, own=own)
    info = TensorFile(checkpoint).info
    check_usable(info, checkpoint)
    for path in paths:
        image = seen(path, info)
        try:
            probabilities = network(image[None]).softmax(dim=1)[0]
        except (RuntimeError, SwapError) as error:
            size, why = "×".join(map(str, image.shape[1:])), " ".join(str(error).split())[:300]
            raise SwapError(f"{checkpoint}: its network cannot take {path} at {size} pixels: {why}") from None
        if not probabilities.isfinite().all():
            raise SwapError(f"{checkpoint}: no result for {path}, since weights are NaN or Inf: train it again")
        order = probabilities.argsort(descending=True).tolist()
        yield path, [(printable(info["classes"][index])[:200], probabilities[index].item()) for index in order]


def seen(path: Path, info: Mapping[str, Any]) -> torch.Tensor:
    """An image file as the network with this header takes it: of its size and channels, and normalised."""
    channels, height, width = info["shape"]
    mean, std = (torch.tensor(info[key], dtype=torch.float32).view(-1, 1, 1) for key in ("mean", "std"))
    image = decode(path, channels)
    if info.get("view") is not None:  # trained on crops of files of any size: seen as test images were
        is_square = info["test_crop"] == "square"
        image = middle(image, (height, width) if is_square else rectangle(image.height, image.width, height))
    elif image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    normalised: torch.Tensor = (pil_to_tensor(image).float() / 255 - mean) / std
    return normalised


def check_usable(info: Mapping[str, Any], path: Path) -> None:
    """That a header says what images its network takes, and what its outputs mean."""
    reason = why_no_images(info) or ("" if all(map(is_size, info["shape"])) else "shape is not one of images")
    if not reason and (info["shape"][0] not in (1, 3) or info["shape"][1] * info["shape"][2] > _MAX_PIXELS):
        reason = "shape is not one of grey or RGB images of a size that can be handled"
    model = info["model"]
    if not reason and (info["shape"][0] != model["channels"] or len(info["classes"]) != model["num_classes"]):
        reason = "images and classes are not those of the network"
    if not reason and view_in(info, path) is not None and info.get("test_crop") not in ("square", "rectangle"):
        reason = "test_crop is neither square nor rectangle"
    if reason:
        raise SwapError(f"{path} does not describe how to use its network ({reason}): use the original file")
