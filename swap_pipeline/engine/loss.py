"""The loss, which is cross-entropy, and what counts as a hit: the class with the largest logit."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

CLASSES_FOR_TOP5 = 100
"""with fewer classes, top-5 accuracy means little"""


def training_loss(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float) -> torch.Tensor:
    """Mean over a batch."""
    return cross_entropy(logits, labels, label_smoothing=label_smoothing)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0) -> torch.Tensor:
    """Sum over a batch, in full precision; evaluations use no smoothing."""
    return cross_entropy(logits.float(), labels, label_smoothing=label_smoothing, reduction="sum")


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """For each image, in full precision."""
    return cross_entropy(logits.float(), labels, reduction="none")


def num_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).sum()


class Tally:
    """Loss and hits over batches of one size, on the device; batches are added several at a time, to save kernel
    launches."""

    _AT_ONCE = 16

    def __init__(self, sums: torch.Tensor) -> None:
        """`sums` are loss and hits so far, in float64."""
        self._sums = sums
        self._losses: list[torch.Tensor] = []
        self._hits: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """`loss` is the batch's mean."""
        self._losses.append(loss.detach())
        self._hits.append(logits.argmax(dim=1) == labels)
        if len(self._losses) == self._AT_ONCE:
            self.sums()

    @torch.no_grad()
    def sums(self) -> torch.Tensor:
        if self._losses:
            loss_sums = torch.stack(self._losses) * len(self._hits[0])
            self._sums += torch.stack([loss_sums.sum(dtype=torch.float64), torch.stack(self._hits).sum()])
            self._losses, self._hits = [], []
        return self._sums


def num_top5_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many images have their class among the five largest logits."""
    return (logits.topk(5, dim=1).indices == labels[:, None]).sum()
