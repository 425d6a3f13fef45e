"""What `swap export` has written, and how far it is from the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

CARD = "README.md"


@dataclass(kw_only=True)
class Comparison:
    """How far the exported file is from the network, over all images."""

    difference: float = 0.0
    """the largest, of any logit"""
    num_same: int = 0
    """images that both give the same class"""
    num_images: int = 0

    def add(self, found: torch.Tensor, logits: torch.Tensor) -> None:
        self.difference = max(self.difference, (found - logits).abs().max().item())
        self.num_same += int((found.argmax(1) == logits.argmax(1)).sum())
        self.num_images += len(logits)


@dataclass(kw_only=True)
class Exported:
    """What was written, and how it compares."""

    comparisons: dict[str, Comparison]
    """by name of file"""
    images: str
    """what they were compared on: test or random"""
    accuracy: float | None = None
    """of the network on these images, a share; None for random ones"""

    def lines(self, folder: Path) -> Iterator[str]:
        for name, compared in self.comparisons.items():
            yield (
                f"{folder / name}: the same class as the network for {compared.num_same:,} of {compared.num_images:,} "
                f"{self.images} images, logits differ by at most {compared.difference:.2g}"
            )
        yield f"{folder / CARD}: the model card"
