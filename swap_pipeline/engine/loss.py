"""What is minimised, and what counts as a hit: cross-entropy, and the class with the largest value."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

CLASSES_FOR_TOP5 = 100
"""With fewer classes, five guesses say little."""


def training_loss(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float) -> torch.Tensor:
    """Mean over a batch."""
    return cross_entropy(logits, labels, label_smoothing=label_smoothing)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Over a batch that may be short, in full precision; that of tests has no smoothing."""
    return cross_entropy(logits.float(), labels, label_smoothing=label_smoothing, reduction="sum")


def num_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).sum()


def num_top5_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many images have their class among the first five guesses."""
    return (logits.topk(5, dim=1).indices == labels[:, None]).sum()
