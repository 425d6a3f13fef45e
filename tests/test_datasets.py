"""The data sets that have names, and what `prepare` makes of them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torchvision
from conftest import Project, pack
from numpy.typing import NDArray
from safetensors import safe_open

from swap_pipeline.config.params import Data
from swap_pipeline.data.images import read_images
from swap_pipeline.data.prepared import read_meta
from swap_pipeline.datasets import arrays as official
from swap_pipeline.datasets.parts import parts_of
from swap_pipeline.datasets.prepare import FACTS, Facts, prepare
from swap_pipeline.errors import SwapError
from swap_pipeline.storage import tensor_files

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "data" / "fashion-mini.safetensors"
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
# zcat t10k-images-idx3-ubyte.gz | tail -c +17 | sha256sum, and the labels from byte 9 on, of Fashion-MNIST itself
TEST_IMAGES_SHA256 = "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a"
TEST_LABELS_SHA256 = "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9"


DEBIAN = Path("/usr/share/datasets/fashion-mnist")
needs_fashion_mnist = pytest.mark.skipif(not DEBIAN.exists(), reason="Debian's dataset-fashion-mnist is not installed")


def settings(name: str, *, root: Path | str = "data/raw", train_images: int | Literal["all"] = "all") -> Data:
    return Data(
        name=name,
        root=str(root),
        train_images=train_images,
        max_gb_in_memory=2.0,
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real data set, prepared."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        prepare(settings("fashion-mini"), folder)
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

    assert sorted(meta) == ["classes", "kind", "mean", "shape", "std"]
    assert meta["kind"] == "memory"
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

    prepare(settings("fashion-mini"), tmp_path / "again")

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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fashion-minni", "did you mean fashion-mini or fashion-mnist?"),
        ("CIFAR-10", "did you mean cifar10 or cifar100?"),
        ("imagenette", "did you mean imagenet"),
        ("svhn", "(known: fashion-mini, fashion-mnist, cifar10, cifar100, imagefolder, imagenet"),
    ],
)
def test_an_unknown_data_set_is_refused_with_the_closest_names(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(SwapError) as caught:
        prepare(settings(name), tmp_path / "prepared")

    assert str(caught.value).startswith(f"params.yaml: data.name is {name!r}") and words in str(caught.value)
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

    with pytest.raises(SwapError, match=r"data/fashion-mini\.safetensors is missing or damaged: run `git checkout"):
        prepare(settings("fashion-mini"), tmp_path / "prepared")

    assert not (tmp_path / "prepared").exists()


# --- CIFAR's archives


def records(number: int, *, seed: int, label_limits: tuple[int, ...]) -> NDArray[np.uint8]:
    """Labels and 3×32×32 pixels, as the archives have them."""
    generator = np.random.default_rng(seed)
    columns = [generator.integers(0, limit, (number, 1), dtype=np.uint8) for limit in label_limits]
    return np.concatenate([*columns, generator.integers(0, 256, (number, 3072), dtype=np.uint8)], axis=1)


CIFAR10 = [records(7, seed=seed, label_limits=(10,)) for seed in range(6)]
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR10_FILES = {
    "cifar-10-batches-bin/batches.meta.txt": "\n".join([*CIFAR10_CLASSES, "", ""]).encode(),
    # Not in their order, which an archive need not keep.
    **{f"cifar-10-batches-bin/data_batch_{number}.bin": CIFAR10[number - 1].tobytes() for number in (4, 1, 5, 2, 3)},
    "cifar-10-batches-bin/readme.html": b"<html>",
    "cifar-10-batches-bin/test_batch.bin": CIFAR10[5].tobytes(),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, in which nothing can be downloaded."""
    folder = tmp_path / "project"
    (folder / "data/raw").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    for constant in ("CIFAR10_URL", "CIFAR100_URL"):
        name = getattr(official, constant).rpartition("/")[2]
        monkeypatch.setattr(official, constant, f"http://127.0.0.1:9/{name}")  # nobody listens there
    monkeypatch.setattr(official, "FASHION_MNIST_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(official, "FASHION_MNIST_DEBIAN", tmp_path / "not-installed")
    return folder


def all_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_cifar10_is_read_from_the_official_archive(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    md5 = pack(here / "data/raw/cifar-10-binary.tar.gz", CIFAR10_FILES)
    monkeypatch.setattr(official, "CIFAR10_MD5", md5)

    line = prepare(settings("cifar10"), here / "prepared")

    train, test = (arrays(here / "prepared" / f"{split}.safetensors") for split in ("train", "test"))
    together = np.concatenate(CIFAR10[:5])
    np.testing.assert_array_equal(train["labels"], together[:, 0])
    np.testing.assert_array_equal(train["images"], together[:, 1:].reshape(35, 3, 32, 32))
    np.testing.assert_array_equal(test["labels"], CIFAR10[5][:, 0])
    np.testing.assert_array_equal(test["images"], CIFAR10[5][:, 1:].reshape(7, 3, 32, 32))
    meta = read_meta(here / "prepared")
    assert meta.classes == tuple(CIFAR10_CLASSES)
    assert meta.mean == pytest.approx((together[:, 1:].reshape(35, 3, -1).mean(axis=(0, 2)) / 255).tolist(), rel=1e-12)
    assert line == "cifar10: 35 training and 7 test images, 3×32×32, 10 classes, in memory"
    made = [f"prepared/{name}" for name in ("meta.json", "test.safetensors", "train.safetensors")]
    assert all_files(here) == ["data/raw/cifar-10-binary.tar.gz", *made]  # nothing was unpacked


def test_cifar100_has_the_fine_labels(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = (records(50, seed=seed, label_limits=(20, 100)) for seed in (10, 11))
    names = [f"thing_{number}" for number in range(100)]
    files = {
        "cifar-100-binary/coarse_label_names.txt": b"fish\n" * 20,
        "cifar-100-binary/fine_label_names.txt": "\n".join(names).encode(),
        "cifar-100-binary/test.bin": test.tobytes(),
        "cifar-100-binary/train.bin": train.tobytes(),
    }
    monkeypatch.setattr(official, "CIFAR100_MD5", pack(here / "data/raw/cifar-100-binary.tar.gz", files))

    prepare(settings("cifar100"), here / "prepared")

    for split, source in (("train", train), ("test", test)):
        found = arrays(here / f"prepared/{split}.safetensors")
        np.testing.assert_array_equal(found["labels"], source[:, 1])
        np.testing.assert_array_equal(found["images"], source[:, 2:].reshape(50, 3, 32, 32))
    assert read_meta(here / "prepared").classes == tuple(names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_batch_3.bin": b"x" * 3072}, "data_batch_3.bin does not consist of records of 3073 bytes"),
        ({"test_batch.bin": b""}, "test_batch.bin does not consist of records of 3073 bytes"),
        ({"test_batch.bin": b"\x0a" + bytes(3072)}, "has label 10, but cifar-10-batches-bin/batches.meta.txt names 10"),
        ({"data_batch_5.bin": None}, "has no cifar-10-batches-bin/data_batch_5.bin"),
        ({"batches.meta.txt": None}, "has no cifar-10-batches-bin/batches.meta.txt"),
    ],
)
def test_an_archive_that_does_not_hold_what_it_should_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, bytes | None], words: str
) -> None:
    files = {**CIFAR10_FILES, **{f"cifar-10-batches-bin/{name}": content for name, content in changes.items()}}
    whole = {name: content for name, content in files.items() if content is not None}
    monkeypatch.setattr(official, "CIFAR10_MD5", pack(here / "data/raw/cifar-10-binary.tar.gz", whole))

    with pytest.raises(SwapError) as caught:
        prepare(settings("cifar10"), here / "prepared")

    assert str(caught.value).startswith("data/raw/cifar-10-binary.tar.gz") and words in str(caught.value)
    assert not (here / "prepared").exists()


def test_an_archive_that_cannot_be_unpacked_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "data/raw/cifar-10-binary.tar.gz"
    pack(path, CIFAR10_FILES)
    for data in (path.read_bytes()[:-3000], b"no archive"):
        path.write_bytes(data)
        monkeypatch.setattr(official, "CIFAR10_MD5", hashlib.md5(data).hexdigest())

        with pytest.raises(SwapError, match=r"cifar-10-binary\.tar\.gz cannot be unpacked"):
            prepare(settings("cifar10"), here / "prepared")


def test_a_file_with_another_checksum_is_refused_by_name(here: Path) -> None:
    md5 = pack(here / "data/raw/cifar-10-binary.tar.gz", CIFAR10_FILES)

    with pytest.raises(SwapError) as caught:
        prepare(settings("cifar10"), here / "prepared")

    message = str(caught.value)
    assert message.startswith("data/raw/cifar-10-binary.tar.gz is not the published file")
    assert md5 in message and "c32a1d4ab5d03f1284b67883e8d87530" in message and "\n" not in message
    assert not (here / "prepared").exists()


def test_an_experiment_elsewhere_finds_the_archive_of_its_project(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official, "CIFAR10_MD5", pack(here / "data/raw/cifar-10-binary.tar.gz", CIFAR10_FILES))
    experiment = tmp_path / "experiment"
    (experiment / "data/raw").mkdir(parents=True)
    monkeypatch.chdir(experiment)
    monkeypatch.setenv("DVC_ROOT", str(here))

    prepare(settings("cifar10"), experiment / "prepared")

    assert len(arrays(experiment / "prepared/train.safetensors")["labels"]) == 35


# --- downloads


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A web server for the files of a folder; gives its address."""
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    return folder


def test_a_missing_archive_is_downloaded_once(here: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "CIFAR10_MD5", pack(published / "cifar-10-binary.tar.gz", CIFAR10_FILES))
    with serving(published) as address:
        monkeypatch.setattr(official, "CIFAR10_URL", f"{address}/cifar-10-binary.tar.gz")
        prepare(settings("cifar10"), here / "prepared")
    downloaded = (here / ".swap/downloads/cifar-10-binary.tar.gz").read_bytes()

    prepare(settings("cifar10"), here / "again")  # with nobody there to serve it

    assert downloaded == (published / "cifar-10-binary.tar.gz").read_bytes()
    for name in ("train.safetensors", "test.safetensors", "meta.json"):
        assert (here / "again" / name).read_bytes() == (here / "prepared" / name).read_bytes()
    assert all_files(here / "data/raw") == []
    assert all_files(here / ".swap") == ["downloads/cifar-10-binary.tar.gz"]


def test_what_lies_in_data_root_is_taken_before_anything_is_downloaded(
    here: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official, "CIFAR10_MD5", pack(here / "data/raw/cifar-10-binary.tar.gz", CIFAR10_FILES))

    prepare(settings("cifar10"), here / "prepared")  # the address of `here` leads nowhere

    assert not (here / ".swap").exists()


def test_a_download_with_another_checksum_is_refused_and_not_kept(
    here: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(published / "cifar-10-binary.tar.gz", CIFAR10_FILES)
    with serving(published) as address:
        url = f"{address}/cifar-10-binary.tar.gz"
        monkeypatch.setattr(official, "CIFAR10_URL", url)

        with pytest.raises(SwapError) as caught:
            prepare(settings("cifar10"), here / "prepared")

    assert str(caught.value) == (
        f"cifar-10-binary.tar.gz cannot be downloaded (the download has the wrong checksum): "
        f"get it from {url} and put it into data/raw"
    )
    assert all_files(here) == []


@pytest.mark.parametrize("trouble", ["no server", "no file"])
def test_a_failed_download_names_the_file_its_address_and_where_to_put_it(
    here: Path, published: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    with serving(published) as address:
        if trouble == "no file":
            monkeypatch.setattr(official, "CIFAR100_URL", f"{address}/cifar-100-binary.tar.gz")

        with pytest.raises(SwapError) as caught:
            prepare(settings("cifar100"), here / "prepared")

    message = str(caught.value)
    assert message.startswith("cifar-100-binary.tar.gz cannot be downloaded (")
    assert message.endswith(f": get it from {official.CIFAR100_URL} and put it into data/raw")
    assert ("404" if trouble == "no file" else "refused") in message and "\n" not in message
    assert all_files(here) == []


@pytest.mark.long
def test_the_stage_downloads_with_a_line_and_without_noise(project: Project, published: Path) -> None:
    """Addresses and checksums stand in the module as plain text, so a project can be pointed elsewhere."""
    md5 = pack(published / "cifar-10-binary.tar.gz", CIFAR10_FILES)
    module = project.root / "swap_pipeline/datasets/arrays.py"
    project.set_params({"data.name": "cifar10"})
    with serving(published) as address:
        text = module.read_text().replace("https://www.cs.toronto.edu/~kriz", address)
        module.write_text(text.replace("c32a1d4ab5d03f1284b67883e8d87530", md5))
        done = project.stage("prepare")

    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.splitlines() == [
        f"downloading {address}/cifar-10-binary.tar.gz",
        "cifar10: 35 training and 7 test images, 3×32×32, 10 classes, in memory",
    ]
    found = arrays(project.root / "data/prepared/test.safetensors")
    np.testing.assert_array_equal(found["labels"], CIFAR10[5][:, 0])


# --- Fashion-MNIST


def idx(path: Path) -> NDArray[np.uint8]:
    """An idx file as a flat array, without its header of 16 bytes (images) or 8 (labels)."""
    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8)[16 if "images" in path.name else 8 :]


def as_published(name: str) -> bytes:
    """Debian's file with the header of the published one, which has the name and the time of the original."""
    data = (DEBIAN / name).read_bytes()
    time = (1504176606 if name.startswith("train") else 1504176627).to_bytes(4, "little")
    return b"\x1f\x8b\x08\x08" + time + data[8:10] + name.removesuffix(".gz").encode() + b"\0" + data[10:]


def test_fashion_mnists_checksums_and_address_are_those_of_torchvision() -> None:
    theirs = torchvision.datasets.FashionMNIST

    assert {name: md5 for name, (md5, _) in official.FASHION_MNIST_MD5.items()} == dict(theirs.resources)
    assert f"{official.FASHION_MNIST_URL}/" in theirs.mirrors
    assert list(official.FASHION_MNIST_CLASSES) == theirs.classes == CLASSES


@needs_fashion_mnist
def test_fashion_mnist_is_found_where_debian_puts_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "FASHION_MNIST_DEBIAN", DEBIAN)

    line = prepare(settings("fashion-mnist"), here / "prepared")

    for split, prefix in (("train", "train"), ("test", "t10k")):
        found = arrays(here / f"prepared/{split}.safetensors")
        assert found["images"].shape[1:] == (1, 28, 28)
        np.testing.assert_array_equal(found["images"].reshape(-1), idx(DEBIAN / f"{prefix}-images-idx3-ubyte.gz"))
        np.testing.assert_array_equal(found["labels"], idx(DEBIAN / f"{prefix}-labels-idx1-ubyte.gz"))
    assert line == "fashion-mnist: 60,000 training and 10,000 test images, 1×28×28, 10 classes, in memory"
    meta = read_meta(here / "prepared")
    assert FACTS["fashion-mnist"] == Facts(num_train=60_000, num_test=10_000, shape=(1, 28, 28), num_classes=10)
    assert (meta.classes, meta.shape) == (tuple(CLASSES), (1, 28, 28))


@needs_fashion_mnist
def test_the_published_files_of_fashion_mnist_have_the_same_contents(here: Path) -> None:
    for name, (md5, contents_md5) in official.FASHION_MNIST_MD5.items():
        data = as_published(name)
        (here / "data/raw" / name).write_bytes(data)
        assert hashlib.md5(data).hexdigest() == md5
        assert hashlib.md5(gzip.decompress(data)).hexdigest() == contents_md5

    prepare(settings("fashion-mnist", train_images=100), here / "prepared")

    found = arrays(here / "prepared/test.safetensors")["images"]
    np.testing.assert_array_equal(found.reshape(-1), idx(DEBIAN / "t10k-images-idx3-ubyte.gz"))


@needs_fashion_mnist
@pytest.mark.parametrize("harm", ["other contents", "cut short"])
def test_a_file_of_fashion_mnist_with_other_contents_is_refused_by_name(here: Path, harm: str) -> None:
    for name in official.FASHION_MNIST_MD5:
        shutil.copy(DEBIAN / name, here / "data/raw")
    path = here / "data/raw/t10k-labels-idx1-ubyte.gz"
    contents = bytearray(gzip.decompress(path.read_bytes()))
    contents[-1] ^= 1
    path.write_bytes(gzip.compress(contents) if harm == "other contents" else path.read_bytes()[:-200])

    with pytest.raises(SwapError, match=r"data/raw/t10k-labels-idx1-ubyte\.gz is not the published file"):
        prepare(settings("fashion-mnist"), here / "prepared")


def test_without_fashion_mnist_the_first_missing_file_is_named(here: Path) -> None:
    with pytest.raises(SwapError) as caught:
        prepare(settings("fashion-mnist"), here / "prepared")

    url = "http://127.0.0.1:9/train-images-idx3-ubyte.gz"
    assert str(caught.value).startswith("train-images-idx3-ubyte.gz cannot be downloaded (")
    assert str(caught.value).endswith(f"get it from {url} and put it into data/raw")


# --- a part of the training images


def choose_balanced(labels: NDArray[np.int64], num_classes: int, number: int) -> NDArray[np.int64]:
    return parts_of(
        labels, [f"class {label}" for label in range(num_classes)], settings("any", train_images=number)
    ).train


def shares(sizes: list[int], number: int) -> list[int]:
    """How many images of each class are chosen."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(0).shuffle(labels)
    chosen = choose_balanced(labels, len(sizes), number)
    assert chosen.tolist() == sorted(set(chosen.tolist())) and len(chosen) == number
    return np.bincount(labels[chosen], minlength=len(sizes)).tolist()


def test_a_part_is_spread_as_evenly_as_the_classes_allow() -> None:
    assert shares([100, 100, 100], 30) == [10, 10, 10]
    assert sorted(shares([100, 100, 100], 31)) == [10, 10, 11]
    assert shares([100, 4, 100], 30) == [13, 4, 13]
    assert shares([2, 50, 5, 100], 87) == [2, 40, 5, 40]
    assert shares([2, 50, 5, 100], 137) == [2, 50, 5, 80]
    assert sorted(shares([10, 10, 10, 10], 2)) == [0, 0, 1, 1]
    assert shares([3, 1, 2], 6) == [3, 1, 2]


def test_a_larger_part_contains_a_smaller_one() -> None:
    labels = np.arange(1000) % 10

    small, large = (set(choose_balanced(labels, 10, number).tolist()) for number in (100, 300))

    assert small < large


def test_which_images_are_chosen_is_fixed_for_all_versions() -> None:
    """By rank of a hash: this list was worked out with b2sum, not with this code."""
    assert choose_balanced(np.zeros(10, dtype=np.int64), 1, 4).tolist() == [5, 6, 7, 9]


def test_a_part_of_fashion_mini_keeps_the_order_and_the_test_images(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    lines = [prepare(settings("fashion-mini", train_images=250), tmp_path / name) for name in ("one", "two")]

    whole, part = arrays(prepared / "train.safetensors"), arrays(tmp_path / "one/train.safetensors")
    assert np.bincount(part["labels"]).tolist() == [25] * 10
    place = {image.tobytes(): index for index, image in enumerate(whole["images"])}
    places = [place[image.tobytes()] for image in part["images"]]
    assert places == sorted(places)
    np.testing.assert_array_equal(part["labels"], whole["labels"][places])
    tests = [arrays(folder / "test.safetensors") for folder in (tmp_path / "one", prepared)]
    assert all(np.array_equal(tests[0][key], tests[1][key]) for key in ("images", "labels"))
    assert (tmp_path / "one/train.safetensors").read_bytes() == (tmp_path / "two/train.safetensors").read_bytes()
    assert read_meta(tmp_path / "one").mean == pytest.approx([part["images"].mean() / 255], rel=1e-12)
    assert lines[0].splitlines() == [
        "fashion-mini: 250 training and 10,000 test images, 1×28×28, 10 classes, in memory",
        "note: 250 of 10,000 training images are used (data.train_images)",
    ]


def test_all_images_by_number_are_all_images(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    prepare(settings("fashion-mini", train_images=10_000), tmp_path / "all")

    assert (tmp_path / "all/train.safetensors").read_bytes() == (prepared / "train.safetensors").read_bytes()


def test_fewer_images_than_classes_is_allowed_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    line = prepare(settings("fashion-mini", train_images=4), tmp_path / "few")

    assert "warning: 6 of 10 classes have no training image" in line


def test_more_images_than_there_are_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    with pytest.raises(
        SwapError, match=r"data\.train_images is 10001, but fashion-mini has 10000: lower it, or set it to all"
    ):
        prepare(settings("fashion-mini", train_images=10_001), tmp_path / "prepared")

    assert not (tmp_path / "prepared").exists()


# --- what is left when something goes wrong, and what is known beforehand


def test_a_failure_while_writing_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    prepare(settings("fashion-mini"), tmp_path / "prepared")
    write = tensor_files.write_tensors

    def fill_the_disk(path: Path, *arguments: Any) -> None:
        if path.name == "test.safetensors":
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    monkeypatch.setattr("swap_pipeline.datasets.prepare.write_tensors", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        prepare(settings("fashion-mini", train_images=100), tmp_path / "prepared")

    assert all_files(tmp_path / "prepared") == []
    with pytest.raises(SwapError, match=r"meta\.json is missing"):
        read_meta(tmp_path / "prepared")


def test_a_failure_before_writing_leaves_what_was_there(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "prepared")

    with pytest.raises(SwapError, match="does not exist"):
        prepare(settings("imagefolder", root=tmp_path / "nowhere"), tmp_path / "prepared")

    assert all_files(tmp_path / "prepared") == ["meta.json", "test.safetensors", "train.safetensors"]


def test_facts_of_fashion_mini_are_those_of_its_file(prepared: Path) -> None:
    train, test = (arrays(prepared / f"{split}.safetensors")["images"] for split in ("train", "test"))

    assert FACTS["fashion-mini"] == Facts(
        num_train=len(train), num_test=len(test), shape=train.shape[1:], num_classes=len(read_meta(prepared).classes)
    )


def test_facts_of_the_others_are_the_published_ones() -> None:
    assert FACTS["cifar10"] == Facts(num_train=50_000, num_test=10_000, shape=(3, 32, 32), num_classes=10)
    assert FACTS["cifar100"] == Facts(num_train=50_000, num_test=10_000, shape=(3, 32, 32), num_classes=100)
    assert FACTS["imagenet"] == Facts(num_train=1_281_167, num_test=50_000, shape=(3, None, None), num_classes=1000)
