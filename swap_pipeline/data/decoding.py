"""Image files as tensors: JPEGs by torchvision's decoder, all others by Pillow.

For a JPEG both give the same pixels, since both use libjpeg-turbo with its defaults, and torchvision's takes 0.6 to 0.8
of the time: it copies the pixels once less.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from swap_pipeline.storage.image_files import image_in, read_bytes

try:
    from torchvision.io import decode_jpeg
except ImportError:  # torchvision has announced that it will remove it; the pixels stay the same
    decode_jpeg = None

_JPEG = b"\xff\xd8\xff"


def decode(path: Path, channels: int) -> torch.Tensor:
    """An image file as `storage.image_files.decode` reads it: uint8, height × width × channels."""
    return pixels_in(read_bytes(path), path, channels)


def pixels_in(data: bytes | bytearray, path: Path, channels: int) -> torch.Tensor:
    """The image in the bytes of a file."""
    if decode_jpeg is not None and data.startswith(_JPEG):
        try:
            pixels: torch.Tensor = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)).permute(1, 2, 0)
        except RuntimeError:
            pass  # Pillow says what is wrong with it
        else:
            if pixels.shape[2] in (1, channels):  # all others are converted by Pillow's rules
                return pixels.expand(-1, -1, channels)
    return pixels_of(image_in(bytes(data), path, channels))


def pixels_of(image: Image.Image) -> torch.Tensor:
    """Height × width × channels; a copy, since torch warns of what cannot be written to."""
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1)


def image_of(pixels: torch.Tensor) -> Image.Image:
    """The same for Pillow."""
    values = pixels.numpy()
    return Image.fromarray(values[..., 0] if values.shape[2] == 1 else values)
