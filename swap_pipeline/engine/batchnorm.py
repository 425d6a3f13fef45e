"""Exact batch-norm statistics of a network over a data set, across ranks.

Averaged weights produce other activations than any of the networks they come from, so the statistics are recomputed
(last line of Algorithm 1). Batches are weighted by their size; sums are float64 and added up over the ranks. A batch is
never split over ranks, so the result does not depend on the number of ranks beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from swap_pipeline.config.params import Augment
from swap_pipeline.data.epochs import draw_epoch
from swap_pipeline.data.images import Split
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.distributed import Group


def batches_of_rank(
    images: Split, *, batch_size: int, seed: int, augment: Augment | None, group: Group, view: View | None = None
) -> Iterator[torch.Tensor]:
    """This rank's share of one pass over all images, in a random order (folders are often sorted by class).

    Which images make up a batch depends on `batch_size` and `seed` alone; the last batch may be short.
    """
    edges = edges_of_batches(len(images), batch_size)
    for batch, _ in one_pass(images, edges, seed=seed, augment=augment, group=group, view=view):
        yield batch


def edges_of_batches(num_images: int, batch_size: int) -> list[int]:
    """Where the batches of a pass begin and end."""
    edges = [*range(0, num_images, batch_size), num_images]
    if edges[-1] - edges[-2] == 1 and len(edges) > 2:
        del edges[-2]  # one image has no variance: it joins the batch before it
    return edges


def one_pass(
    images: Split, edges: Sequence[int], *, seed: int, augment: Augment | None, group: Group, view: View | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of the images and labels, in a random order, in batches between these edges."""
    if view is not None and augment is None:
        view = replace(view, min_scale=None)
    choices = draw_epoch(
        seed=seed,
        epoch=0,
        num_images=len(images),
        image_size=images.image_shape(view)[1:],
        augment=augment,
        device=group.device,
    )
    parts = [slice(start, end) for start, end in pairwise(edges)]
    return images.batches(choices, parts[group.rank :: group.world_size], view=view, channels_last=True)


class _Moments:
    """Running sums of one layer's input over the pass."""

    def __init__(self, layer: _BatchNorm) -> None:
        assert layer.running_mean is not None
        zeros = torch.zeros(layer.num_features, dtype=torch.float64, device=layer.running_mean.device)
        self.layer = layer
        self.mean_sum = zeros.clone()
        self.square_sum = zeros.clone()
        self.count = zeros.new_zeros(1)

    def add(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        """Forward hook. With momentum 1, the layer's running statistics are those of the current batch."""
        count = inputs[0].numel() // self.layer.num_features
        assert self.layer.running_mean is not None and self.layer.running_var is not None
        mean, unbiased = self.layer.running_mean.double(), self.layer.running_var.double()
        biased = unbiased * ((count - 1) / count)
        self.mean_sum += count * mean
        self.square_sum += count * (biased + mean * mean)
        self.count += count

    def tensors(self) -> list[torch.Tensor]:
        return [self.mean_sum, self.square_sum, self.count]

    def finish(self) -> None:
        """Set the layer's statistics."""
        mean = self.mean_sum / self.count
        spread = (self.square_sum / self.count - mean * mean).clamp_(min=0)
        spread *= self.count / (self.count - 1)  # unbiased, like torch's running variance
        assert self.layer.running_mean is not None and self.layer.running_var is not None
        self.layer.running_mean.copy_(mean)
        self.layer.running_var.copy_(spread)


@torch.no_grad()
def recompute_statistics(network: nn.Module, batches: Iterable[torch.Tensor], *, group: Group) -> int:
    """Set all running statistics from this rank's `batches`; returns the number of layers.

    Only batch-norm layers are in training mode during the pass, so dropout is off. Later layers see inputs normalised
    by the batch, as in training.
    """
    layers = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        return 0
    was_training = {module: module.training for module in network.modules()}
    momenta = {layer: layer.momentum for layer in layers}
    # If this pass counted its batches, the file would depend on the number of ranks.
    counters = {
        layer: None if layer.num_batches_tracked is None else layer.num_batches_tracked.clone() for layer in layers
    }
    moments = [_Moments(layer) for layer in layers]
    hooks = [moment.layer.register_forward_hook(moment.add) for moment in moments]
    try:
        network.eval()
        for layer in layers:
            layer.train()
            layer.reset_running_stats()  # old values, even NaN, must leave no trace
            layer.momentum = 1.0
        for batch in batches:
            network(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, momentum in momenta.items():
            layer.momentum = momentum
            layer.num_batches_tracked = counters[layer]
        for module, training in was_training.items():
            module.training = training
    flat = group.sum(torch.cat([tensor for moment in moments for tensor in moment.tensors()]))
    parts = iter(flat.split([tensor.numel() for moment in moments for tensor in moment.tensors()]))
    for moment in moments:
        moment.mean_sum, moment.square_sum, moment.count = (next(parts) for _ in range(3))
        moment.finish()
    return len(layers)
