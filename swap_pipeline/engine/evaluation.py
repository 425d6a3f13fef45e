"""How well a network does on the test images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from swap_pipeline.config.params import Precision
from swap_pipeline.data.images import Split
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.loss import CLASSES_FOR_TOP5, num_hits, num_top5_hits, summed_loss
from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.engine.precision import autocast
from swap_pipeline.runtime.environment import eval_batch_size


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a network does on the test images."""

    loss: float
    accuracy: float
    """in percent"""
    top5: float | None
    """share of images whose class is among the first five guesses, in percent; None below 100 classes"""

    def as_json(self) -> dict[str, float]:
        top5 = {} if self.top5 is None else {"test_top5": self.top5}
        return {"test_accuracy": self.accuracy, "test_loss": self.loss, **top5}


@torch.inference_mode()
def evaluate(
    network: nn.Module, images: Split, *, group: Group, precision: Precision = "fp32", view: View | None = None
) -> Score:
    """Mean cross-entropy and accuracies, over all ranks."""
    network.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)  # loss, hits, hits of the first five
    top5 = False
    for batch, labels in images.test_batches(
        batch_size=eval_batch_size(), rank=group.rank, world_size=group.world_size, view=view
    ):
        too_much = must_fit(f"an evaluation's batch of {len(labels)} images", remedy="lower SWAP_EVAL_BATCH")
        with too_much, autocast(precision, group.device):
            logits = network(batch)
        sums[0] += summed_loss(logits, labels)
        sums[1] += num_hits(logits, labels)
        if top5 := logits.shape[1] >= CLASSES_FOR_TOP5:
            sums[2] += num_top5_hits(logits, labels)
    loss_sum, hits, top5_hits = group.sum(sums).tolist()
    return Score(
        loss=loss_sum / len(images),
        accuracy=100 * hits / len(images),
        top5=100 * top5_hits / len(images) if top5 else None,
    )
