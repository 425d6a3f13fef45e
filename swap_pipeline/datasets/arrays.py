"""Data sets that are arrays: Fashion-MNIST and CIFAR, from their official archives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swap_pipeline.config.params import Data
from swap_pipeline.datasets.archives import find, find_or_download, read_idx, read_members
from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import TensorFile

FASHION_MINI = Path("data/fashion-mini.safetensors")

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CIFAR100_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
# MD5 of each file as published, and of its contents, since Debian recompresses it.
FASHION_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
}
FASHION_MNIST_DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # apt-get install dataset-fashion-mnist
FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set in memory: uint8 N×C×H×W images and int64 labels of both splits."""

    classes: tuple[str, ...]
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def _fashion_mini(_root: str) -> Source:
    """10,000 training images (1,000 per class) and the whole test set of Fashion-MNIST, kept in this repository."""
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        file = TensorFile(FASHION_MINI)
        return Source(classes=tuple(file.info["classes"]), **{key: file.read(key) for key in keys})
    except (SwapError, KeyError, TypeError):
        raise SwapError(f"{FASHION_MINI} is missing or damaged: run `git checkout {FASHION_MINI}`") from None


def _fashion_mnist(root: str) -> Source:
    def read(name: str) -> torch.Tensor:
        md5, contents_md5 = FASHION_MNIST_MD5[name]
        url = f"{FASHION_MNIST_URL}/{name}"
        path = find_or_download(url, md5, root, contents_md5=contents_md5, also_in=FASHION_MNIST_DEBIAN)
        return torch.from_numpy(read_idx(path))

    splits: dict[str, torch.Tensor] = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = read(f"{prefix}-images-idx3-ubyte.gz"), read(f"{prefix}-labels-idx1-ubyte.gz")
        if images.dim() != 3 or labels.shape != (len(images),) or int(labels.max()) >= len(FASHION_MNIST_CLASSES):
            raise SwapError(f"Fashion-MNIST: {prefix}-images and {prefix}-labels do not belong together")
        splits |= {f"{split}_images": images[:, None], f"{split}_labels": labels.long()}
    return Source(classes=FASHION_MNIST_CLASSES, **splits)


def _cifar10(root: str) -> Source:
    path = find_or_download(CIFAR10_URL, CIFAR10_MD5, root)
    folder = "cifar-10-batches-bin"
    train = [f"{folder}/data_batch_{number}.bin" for number in range(1, 6)]
    return _cifar(path, train, f"{folder}/test_batch.bin", f"{folder}/batches.meta.txt", num_labels=1)


def _cifar100(root: str) -> Source:
    path = find_or_download(CIFAR100_URL, CIFAR100_MD5, root)
    folder = "cifar-100-binary"
    # CIFAR-100 has a coarse and a fine label; the last one is used.
    return _cifar(path, [f"{folder}/train.bin"], f"{folder}/test.bin", f"{folder}/fine_label_names.txt", num_labels=2)


def _cifar(path: Path, train: Sequence[str], test: str, names: str, *, num_labels: int) -> Source:
    """Records of labels and 3×32×32 pixels, red, green, blue; class names are in a text file, one per line."""
    files = read_members(path, [*train, test, names])
    classes = tuple(line.strip() for line in files[names].decode(errors="replace").splitlines() if line.strip())

    def split(members: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        for member in members:
            if not files[member] or len(files[member]) % (num_labels + 3072):
                raise SwapError(f"{path}: {member} does not consist of records of {num_labels + 3072} bytes")
        together = b"".join(files[member] for member in members)
        records = np.frombuffer(together, dtype=np.uint8).reshape(-1, num_labels + 3072)
        labels = records[:, num_labels - 1].astype(np.int64)
        if labels.max() >= len(classes):
            raise SwapError(f"{path}: {members[0]} has label {labels.max()}, but {names} names {len(classes)} classes")
        images = records[:, num_labels:].reshape(-1, 3, 32, 32)
        return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels)

    (train_images, train_labels), (test_images, test_labels) = split(train), split([test])
    return Source(
        classes=classes,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )


FROM_ARRAYS: dict[str, Callable[[str], Source]] = {
    "fashion-mini": _fashion_mini,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
}


# For `swap doctor`; no entry for data sets that download nothing.
OFFICIAL_FILES = {
    "cifar10": [CIFAR10_URL],
    "cifar100": [CIFAR100_URL],
    "fashion-mnist": [f"{FASHION_MNIST_URL}/{name}" for name in FASHION_MNIST_MD5],
}


def missing_files(data: Data) -> list[str] | None:
    """Official files of a data set that are not here and will be downloaded; None if it is not known."""
    if data.name not in FROM_ARRAYS:
        return None
    urls = OFFICIAL_FILES.get(data.name, [])
    also_in = FASHION_MNIST_DEBIAN if data.name == "fashion-mnist" else None
    return [url.rpartition("/")[2] for url in urls if find(url, data.root, also_in=also_in) is None]
