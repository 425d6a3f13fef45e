"""Loss and accuracy of a network on images that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from swap_pipeline.config.params import Precision
from swap_pipeline.data.images import Split
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.loss import CLASSES_FOR_TOP5, cross_entropies, num_hits, num_top5_hits, summed_loss
from swap_pipeline.engine.opening import PreparedData
from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.engine.placement import no_tuning
from swap_pipeline.engine.precision import autocast
from swap_pipeline.runtime.environment import eval_batch_size


@dataclass(frozen=True, kw_only=True)
class Score:
    """Loss and accuracy on images that the network was not trained on."""

    loss: float
    accuracy: float
    """in percent"""
    top5: float | None
    """top-5 accuracy in percent; None below 100 classes"""

    def as_json(self, prefix: str = "") -> dict[str, float]:
        """Names start with `prefix`, as in `test_accuracy`; without one, the record names the split elsewhere."""
        top5 = {} if self.top5 is None else {f"{prefix}top5": self.top5}
        return {f"{prefix}accuracy": self.accuracy, f"{prefix}loss": self.loss, **top5}


def _predictions(
    network: nn.Module, images: Split, *, group: Group, precision: Precision, view: View | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and labels of this rank's share, batch by batch."""
    network.eval()
    in_precision = autocast(precision, group.device)
    for batch, labels in images.test_batches(
        batch_size=eval_batch_size(), rank=group.rank, world_size=group.world_size, view=view
    ):
        too_much = must_fit(f"an evaluation's batch of {len(labels)} images", remedy="lower SWAP_EVAL_BATCH")
        with too_much, in_precision, no_tuning(wanted=images.has_many_test_shapes):
            logits = network(batch)
        yield logits, labels


@torch.inference_mode()
def image_losses(
    network: nn.Module, images: Split, *, group: Group, precision: Precision = "fp32", view: View | None = None
) -> torch.Tensor:
    """Cross-entropy of each image of this rank's share, in a fixed order."""
    predictions = _predictions(network, images, group=group, precision=precision, view=view)
    return torch.cat([cross_entropies(logits, labels).double() for logits, labels in predictions])


@torch.inference_mode()
def evaluate(
    network: nn.Module, images: Split, *, group: Group, precision: Precision = "fp32", view: View | None = None
) -> Score:
    """Mean cross-entropy and accuracies, over all ranks."""
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)  # loss, hits, top-5 hits
    top5 = False
    for logits, labels in _predictions(network, images, group=group, precision=precision, view=view):
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


def final_scores(
    network: nn.Module,
    data: PreparedData,
    held_out: Score,
    *,
    group: Group,
    precision: Precision = "fp32",
    view: View | None = None,
) -> dict[str, float]:
    """Scores of a final model for the record. With a validation set, only this function uses the test images."""
    if data.validation is None:
        return held_out.as_json("test_")
    test = evaluate(network, data.test, group=group, precision=precision, view=view)
    return {**test.as_json("test_"), **held_out.as_json("validation_")}
