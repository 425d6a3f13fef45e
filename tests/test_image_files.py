"""One image file, decoded: every kind of image that people have, and those that cannot be read."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.environment import find_root
from swap_pipeline.storage.image_files import decode

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
GREYS = COLOURS[:, :, 0]


def saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def decoded(path: Path, channels: int) -> NDArray[np.uint8]:
    image = decode(path, channels)
    assert image.mode == {1: "L", 3: "RGB"}[channels]
    return np.asarray(image)


def test_colours_and_greys_come_as_they_were_saved(tmp_path: Path) -> None:
    colour = saved(tmp_path / "colour.png", Image.fromarray(COLOURS))
    grey = saved(tmp_path / "grey.png", Image.fromarray(GREYS))

    np.testing.assert_array_equal(decoded(colour, 3), COLOURS)
    np.testing.assert_array_equal(decoded(grey, 1), GREYS)


def test_grey_as_colour_is_the_same_in_all_channels(tmp_path: Path) -> None:
    path = saved(tmp_path / "grey.png", Image.fromarray(GREYS))

    np.testing.assert_array_equal(decoded(path, 3), np.stack([GREYS] * 3, axis=-1))


def test_colour_as_grey_is_its_brightness(tmp_path: Path) -> None:
    path = saved(tmp_path / "colour.png", Image.fromarray(COLOURS))

    brightness = COLOURS @ np.array([0.299, 0.587, 0.114])  # ITU-R 601

    np.testing.assert_allclose(decoded(path, 1), brightness, atol=1)


@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_transparency_is_dropped_and_not_blended(tmp_path: Path, suffix: str) -> None:
    alpha = np.random.default_rng(1).integers(1, 256, (6, 9, 1), dtype=np.uint8)
    image = Image.fromarray(np.concatenate([COLOURS, alpha], axis=-1))
    path = saved(tmp_path / f"transparent.{suffix}", image, **({"lossless": True} if suffix == "webp" else {}))

    np.testing.assert_array_equal(decoded(path, 3), COLOURS)


def test_grey_with_transparency_is_its_grey(tmp_path: Path) -> None:
    image = Image.fromarray(GREYS)
    image.putalpha(7)
    path = saved(tmp_path / "la.png", image)

    np.testing.assert_array_equal(decoded(path, 1), GREYS)
    np.testing.assert_array_equal(decoded(path, 3), np.stack([GREYS] * 3, axis=-1))


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 128, 255])])
def test_a_palette_is_looked_up_without_a_word(tmp_path: Path, transparency: int | bytes | None) -> None:
    palette = np.array([[10, 20, 30], [200, 100, 0], [0, 255, 128]], dtype=np.uint8)
    places = np.random.default_rng(2).integers(0, 3, (6, 9), dtype=np.uint8)
    image = Image.fromarray(places)
    image.putpalette(palette.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    path = saved(tmp_path / "palette.png", image, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decoded(path, 3)

    np.testing.assert_array_equal(found, palette[places])


def test_print_colours_become_screen_colours(tmp_path: Path) -> None:
    ink = np.concatenate([255 - COLOURS, np.zeros((6, 9, 1), dtype=np.uint8)], axis=-1)  # no black: the complement
    path = saved(tmp_path / "print.tiff", Image.fromarray(ink, mode="CMYK"))

    np.testing.assert_array_equal(decoded(path, 3), COLOURS)


def test_black_and_white_is_0_and_255(tmp_path: Path) -> None:
    path = saved(tmp_path / "bits.png", Image.fromarray(GREYS > 127))

    np.testing.assert_array_equal(decoded(path, 1), np.where(GREYS > 127, 255, 0))


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, suffix: str, channels: int) -> None:
    deep = np.random.default_rng(3).integers(0, 2**16, (6, 9), dtype=np.uint16)
    path = saved(tmp_path / f"deep.{suffix}", Image.fromarray(deep))

    found = decoded(path, channels).reshape(6, 9, channels)

    np.testing.assert_array_equal(found, np.repeat((deep // 256)[:, :, None], channels, axis=-1))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_thirty_two_bits_have_no_known_range_and_are_refused(tmp_path: Path, kind: type) -> None:
    path = saved(tmp_path / "deeper.tiff", Image.fromarray(GREYS.astype(kind)))

    with pytest.raises(
        SwapError, match=r"deeper\.tiff cannot be read as an image: .*32-bit.*save it with 8 or 16 bits"
    ):
        decode(path, 1)


def test_orientation_in_exif_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    path = saved(tmp_path / "turned.png", Image.fromarray(COLOURS), exif=exif)

    np.testing.assert_array_equal(decoded(path, 3), COLOURS)


def test_the_content_counts_and_not_the_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "image.jpg", Image.fromarray(COLOURS), format="PNG")

    np.testing.assert_array_equal(decoded(path, 3), COLOURS)


def test_the_image_is_loaded_and_needs_its_file_no_more(tmp_path: Path) -> None:
    path = saved(tmp_path / "image.png", Image.fromarray(COLOURS))

    image = decode(path, 3)
    path.unlink()

    np.testing.assert_array_equal(np.asarray(image), COLOURS)


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "ppm", "tif", "webp"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_file_cut_short_is_refused_by_name_in_one_line(tmp_path: Path, suffix: str, share: float) -> None:
    noise = np.random.default_rng(4).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = saved(tmp_path / f"cut.{suffix}", Image.fromarray(noise))
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])

    with pytest.raises(SwapError, match=rf"cut\.{suffix} cannot be read as an image: \S") as caught:
        decode(path, 3)

    assert "\n" not in str(caught.value) and "0x" not in str(caught.value)


def test_other_unreadable_files_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no image at all")
    (tmp_path / "folder.png").mkdir()

    for name, reason in {
        "empty.png": "the file is empty",
        "text.png": "its format is none of",
        "folder.png": "Is a directory",
        "none.png": "not found",
    }.items():
        with pytest.raises(SwapError, match=rf"{name}.*{reason}"):
            decode(tmp_path / name, 3)


@pytest.mark.parametrize("module", ["storage.image_files", "datasets.image_folders"])
def test_processes_that_only_decode_do_without_torch(module: str) -> None:
    code = f"import sys, swap_pipeline.{module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


def test_an_experiment_elsewhere_finds_its_projects_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git brings `data/raw` with its page there, but not the images."""
    project, experiment = tmp_path / "project", tmp_path / "experiment"
    (project / "data/raw/train").mkdir(parents=True)
    (project / "only-here").mkdir()
    (experiment / "data/raw").mkdir(parents=True)
    (experiment / "own/train").mkdir(parents=True)
    (project / "own/train").mkdir(parents=True)
    monkeypatch.chdir(experiment)
    monkeypatch.setenv("DVC_ROOT", str(project))

    assert find_root("data/raw") == project / "data/raw"
    assert find_root("only-here") == project / "only-here"
    assert find_root("own") == Path("own")
    assert find_root("nowhere") == Path("nowhere")
    assert find_root(str(tmp_path / "nowhere")) == tmp_path / "nowhere"
