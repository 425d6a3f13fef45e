"""Decodes an image file, in the same way for preparing, training and predicting.

Without torch, so that the processes that only decode start quickly.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL import __version__ as PIL_VERSION

from swap_pipeline.errors import SwapError
from swap_pipeline.storage.files import open_plain, read_plain

# Other formats are never tried, whatever a file is called: for EPS, say, Pillow would start another program.
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Our own one-line error is enough for a file that cannot be read; Pillow's warnings do not help.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Of copies: bicubic, as in the ImageNet code that the paper builds on, and JPEG as measured in docs/data.md.
_QUALITY = 90
_SUBSAMPLING = "4:2:0"
COPIED_BY = f"Pillow {PIL_VERSION}, bicubic, JPEG {_QUALITY} {_SUBSAMPLING}"
"""what the bytes of a copy depend on, besides its image and its size"""
_GREY = ("1", "L", "LA", "I")  # and all that begin with I;16


def decode(path: Path, channels: int) -> Image.Image:
    """An image as 8-bit grey (1 channel) or RGB (3), fully loaded; a `SwapError` names the file and the problem.

    16 bits are scaled to 8, transparency is dropped, and only the first frame is read. EXIF orientation is ignored,
    as in torchvision's loaders: pixels stay as Pillow opens them (it rotates TIFFs, and nothing else).
    """
    _, image = read_image(path, channels)
    return image


def read_image(path: Path, channels: int | None) -> tuple[bytes, Image.Image]:
    """The bytes of a file and the image in them; without `channels`, grey files stay grey and all others are RGB."""
    data = read_bytes(path)
    return data, image_in(data, path, channels)


def read_bytes(path: Path) -> bytes:
    """All of an image file."""
    try:
        data = read_plain(path)
    except FileNotFoundError:
        raise SwapError(f"{path} not found") from None
    except OSError as error:
        raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None
    if not data:
        raise SwapError(f"{path} cannot be read as an image: the file is empty")
    return data


def image_in(data: bytes, path: Path, channels: int | None) -> Image.Image:
    """The image in the bytes of a file, as `read_image` has it."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _converted(image, channels)
    except UnidentifiedImageError:
        raise SwapError(f"{path} cannot be read as an image: its format is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise nearly anything on a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SwapError(f"{path} cannot be read as an image: {reason}") from None


def shape_of(path: Path) -> tuple[int, int, int]:
    """Channels, height and width of an image, from its header alone if possible."""
    try:
        with open_plain(path) as file, Image.open(file, formats=FORMATS) as image:
            return 1 if _is_grey(image) else 3, image.height, image.width
    except Exception:  # as above; reading all of it reports what is wrong
        _, whole = read_image(path, None)
        return len(whole.getbands()), whole.height, whole.width


def size_of_copy(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width of a copy: its shorter side has `side` pixels, unless the image has fewer."""
    short = min(height, width)
    return (height, width) if short <= side else (round(height * side / short), round(width * side / short))


def copy_of(image: Image.Image, side: int) -> bytes:
    """The bytes of an image's copy, a JPEG."""
    height, width = size_of_copy(image.height, image.width, side)
    made = io.BytesIO()
    copy = image.resize((width, height), Image.Resampling.BICUBIC)  # the same pixels, if it has this size already
    copy.save(made, "JPEG", quality=_QUALITY, subsampling=_SUBSAMPLING)
    return made.getvalue()


def _is_grey(image: Image.Image) -> bool:
    return image.mode in _GREY or image.mode.startswith("I;16")


def _converted(image: Image.Image, channels: int | None) -> Image.Image:
    if channels is None:
        channels = 1 if _is_grey(image) else 3
    mode = "L" if channels == 1 else "RGB"
    image.load()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # 16 bits, which Pillow would clip to 8 instead of scaling
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert(mode)
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range: save it with 8 or 16 bits")
    image.info.pop("transparency", None)  # Pillow would only warn that it is lost
    return image.convert(mode)
