"""A trained network applied to image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from swap_pipeline.checkpoint import TensorFile
from swap_pipeline.image_files import decode
from swap_pipeline.models import load_model


@torch.inference_mode()
def predict(paths: Sequence[Path], checkpoint: Path) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """For each image, all classes with their probabilities, most probable first."""
    network = load_model(checkpoint)
    info = TensorFile(checkpoint).info
    channels, height, width = info["shape"]
    mean, std = (torch.tensor(info[key]).view(-1, 1, 1) for key in ("mean", "std"))
    for path in paths:
        pixels = pil_to_tensor(_open(path, channels, (width, height)))
        batch = (pixels.float() / 255 - mean) / std
        probabilities = network(batch[None]).softmax(dim=1)[0]
        order = probabilities.argsort(descending=True).tolist()
        yield path, [(info["classes"][index], probabilities[index].item()) for index in order]


def _open(path: Path, channels: int, size: tuple[int, int]) -> Image.Image:
    image = decode(path, channels)
    return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
