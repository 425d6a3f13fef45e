"""Build `data/fashion-mini.safetensors` from the original idx files of Fashion-MNIST.

    apt-get install dataset-fashion-mnist
    python data/make_fashion_mini.py /usr/share/datasets/fashion-mnist

Source: Fashion-MNIST, Han Xiao, Kashif Rasul and Roland Vollgraf, Zalando SE, 2017, MIT licence. The training split is
a balanced draw with a fixed seed, 1,000 images a class, in the order of the original; the test split is whole.
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import click
import torch

from swap_pipeline.storage.tensor_files import write_tensors

CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
PER_CLASS = 1000
SEED = 20200426


def read_idx(path: Path) -> torch.Tensor:
    """An idx file: two zero bytes, a type (8: unsigned byte), the number of dimensions, their sizes, the data."""
    raw = gzip.decompress(path.read_bytes())
    assert raw[:3] == b"\x00\x00\x08", f"{path} is not an idx file of bytes"
    sizes = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    data = raw[4 + 4 * len(sizes) :]
    assert len(data) == math.prod(sizes), f"{path} is cut short"
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(sizes)


def draw_balanced(labels: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    chosen = []
    for label in range(len(CLASSES)):
        of_class = (labels == label).nonzero().flatten()
        chosen.append(of_class[torch.randperm(len(of_class), generator=generator)[:PER_CLASS]])
    return torch.cat(chosen).sort().values


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("data/fashion-mini.safetensors"))
def main(folder: Path, out: Path) -> None:
    train_images, train_labels = (
        read_idx(folder / f"train-{kind}.gz") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    test_images, test_labels = (
        read_idx(folder / f"t10k-{kind}.gz") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    chosen = draw_balanced(train_labels)
    tensors = {
        "train_images": train_images[chosen][:, None],
        "train_labels": train_labels[chosen].long(),
        "test_images": test_images[:, None],
        "test_labels": test_labels.long(),
    }
    write_tensors(out, tensors, {"classes": CLASSES, "source": "Fashion-MNIST, Zalando SE, MIT licence", "seed": SEED})
    click.echo(f"{out}: {len(chosen):,} training and {len(test_labels):,} test images")


if __name__ == "__main__":
    main()
