"""A trained network applied to image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from swap_pipeline.checkpoint import TensorFile
from swap_pipeline.image_files import decode
from swap_pipeline.loader import middle, rectangle
from swap_pipeline.models import load_model


@torch.inference_mode()
def predict(
    paths: Sequence[Path], checkpoint: Path, *, own: str | None = None
) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """For each image, all classes with their probabilities, most probable first; `own` as for `load_model`."""
    network = load_model(checkpoint, own=own)
    info = TensorFile(checkpoint).info
    channels, height, width = info["shape"]
    mean, std = (torch.tensor(info[key]).view(-1, 1, 1) for key in ("mean", "std"))
    for path in paths:
        image = decode(path, channels)
        if "view" in info:  # trained on crops of files of any size: seen as test images were
            is_square = info["test_crop"] == "square"
            image = middle(image, (height, width) if is_square else rectangle(image.height, image.width, height))
        elif image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        batch = (pil_to_tensor(image).float() / 255 - mean) / std
        probabilities = network(batch[None]).softmax(dim=1)[0]
        order = probabilities.argsort(descending=True).tolist()
        yield path, [(info["classes"][index], probabilities[index].item()) for index in order]
