"""A trained network applied to image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchvision.transforms.v2.functional import pil_to_tensor

from swap_pipeline.checkpoint import TensorFile
from swap_pipeline.errors import SwapError
from swap_pipeline.models import load_model


@torch.inference_mode()
def predict(paths: Sequence[Path], checkpoint: Path) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """For each image, all classes with their probabilities, most probable first."""
    network = load_model(checkpoint)
    info = TensorFile(checkpoint).info
    channels, height, width = info["shape"]
    mean, std = (torch.tensor(info[key]).view(-1, 1, 1) for key in ("mean", "std"))
    for path in paths:
        pixels = pil_to_tensor(_open(path, "L" if channels == 1 else "RGB", (width, height)))
        batch = (pixels.float() / 255 - mean) / std
        probabilities = network(batch[None]).softmax(dim=1)[0]
        order = probabilities.argsort(descending=True).tolist()
        yield path, [(info["classes"][index], probabilities[index].item()) for index in order]


def _open(path: Path, mode: str, size: tuple[int, int]) -> Image.Image:
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8 instead of scaling them
                converted = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert(mode)
            else:
                converted = image.convert(mode)
    except FileNotFoundError:
        raise SwapError(f"{path} not found") from None
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise SwapError(f"{path} cannot be read as an image: {error}") from None
    return converted if converted.size == size else converted.resize(size, Image.Resampling.BILINEAR)
