"""The data set that ships with the repository, and what `prepare` makes of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from swap_pipeline.data import read_images, read_meta
from swap_pipeline.datasets import prepare
from swap_pipeline.errors import SwapError

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "data" / "fashion-mini.safetensors"
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
# zcat t10k-images-idx3-ubyte.gz | tail -c +17 | sha256sum, and the labels from byte 9 on, of Fashion-MNIST itself
TEST_IMAGES_SHA256 = "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a"
TEST_LABELS_SHA256 = "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real data set, prepared."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        prepare("fashion-mini", folder)
    return folder


def arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    with safe_open(path, framework="np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_split_has_10000_grey_images_of_28_pixels_as_bytes(prepared: Path, split: str) -> None:
    found = arrays(prepared / f"{split}.safetensors")

    assert {key: (array.dtype.name, array.shape) for key, array in found.items()} == {
        "images": ("uint8", (10000, 1, 28, 28)),
        "labels": ("int64", (10000,)),
    }


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_split_has_1000_images_of_every_class(prepared: Path, split: str) -> None:
    labels = arrays(prepared / f"{split}.safetensors")["labels"]

    assert np.bincount(labels).tolist() == [1000] * 10


def test_the_test_split_is_that_of_fashion_mnist_byte_for_byte(prepared: Path) -> None:
    found = arrays(prepared / "test.safetensors")

    assert hashlib.sha256(found["images"].tobytes()).hexdigest() == TEST_IMAGES_SHA256
    assert hashlib.sha256(found["labels"].astype(np.uint8).tobytes()).hexdigest() == TEST_LABELS_SHA256


def test_prepared_images_and_labels_are_those_of_the_shipped_file(prepared: Path) -> None:
    shipped = arrays(SHIPPED)

    for split in ("train", "test"):
        for key, array in arrays(prepared / f"{split}.safetensors").items():
            np.testing.assert_array_equal(array, shipped[f"{split}_{key}"])


def test_no_training_image_is_there_twice(prepared: Path) -> None:
    images = arrays(prepared / "train.safetensors")["images"]

    assert len({image.tobytes() for image in images}) == 10000


def test_meta_names_the_classes_and_the_shape(prepared: Path) -> None:
    meta = json.loads((prepared / "meta.json").read_text())

    assert sorted(meta) == ["classes", "mean", "shape", "std"]
    assert meta["classes"] == CLASSES
    assert meta["shape"] == [1, 28, 28]


def test_mean_and_deviation_are_those_of_the_training_pixels_on_the_scale_0_to_1(prepared: Path) -> None:
    pixels = arrays(prepared / "train.safetensors")["images"].astype(np.float64) / 255

    meta = read_meta(prepared)

    assert meta.mean == pytest.approx([pixels.mean()], rel=1e-12)
    assert meta.std == pytest.approx([pixels.std()], rel=1e-12)
    assert 0.28 < meta.mean[0] < 0.29 and 0.35 < meta.std[0] < 0.36  # as published for Fashion-MNIST


def test_normalised_training_images_have_mean_0_and_deviation_1(prepared: Path) -> None:
    images = read_images(prepared, "train", torch.device("cpu"))

    values = images.normalise(images.pixels).double()

    assert values.mean().item() == pytest.approx(0, abs=1e-5)
    assert values.std().item() == pytest.approx(1, abs=1e-5)


def test_preparing_again_gives_the_same_bytes(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    prepare("fashion-mini", tmp_path / "again")

    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == {
        path.name: path.read_bytes() for path in prepared.iterdir()
    }


def file_mapped_at(address: int) -> str:
    """The file that a place in this process's memory belongs to, if it is one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            return path[0] if path else ""
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are read from Linux's /proc")
@pytest.mark.parametrize("split", ["train", "test"])
def test_images_on_the_cpu_are_pages_of_the_file_which_processes_share(prepared: Path, split: str) -> None:
    images = read_images(prepared, split, torch.device("cpu"))

    mapped = {file_mapped_at(images.pixels.data_ptr()), file_mapped_at(images.labels.data_ptr())}

    assert mapped == {str((prepared / f"{split}.safetensors").resolve())}


def test_an_unknown_data_set_is_refused_with_the_names_of_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"data\.name is 'mnist'.*fashion-mini"):
        prepare("mnist", tmp_path / "prepared")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_harmed_data_set_is_refused_with_the_command_that_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """It is kept in git and nothing makes it: neither `dvc repro` nor `dvc checkout` could."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    if harm == "damaged":
        shutil.copy(SHIPPED, tmp_path / "data")
        with (tmp_path / "data" / SHIPPED.name).open("r+b") as file:
            file.truncate(1_000_000)

    with pytest.raises(SwapError, match=r"data/fashion-mini\.safetensors is missing or damaged: `git checkout"):
        prepare("fashion-mini", tmp_path / "prepared")

    assert not (tmp_path / "prepared").exists()
