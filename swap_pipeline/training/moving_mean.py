"""The exponential moving average (EMA) of a network's weights, as a copy of the network."""

from __future__ import annotations

import copy

import torch
from torch import nn

from swap_pipeline.engine.distributed import Group
from swap_pipeline.training.shards import copy_all, mean_over_ranks


class MovingMean:
    """After each step, mean ← decay · mean + (1 − decay) · weights; it starts with the weights after the first step.

    Running statistics are averaged in the same way, so that the mean can be evaluated at any time.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        from torch.optim.swa_utils import get_ema_multi_avg_fn  # imports torch's compiler, so only when needed

        self.network = copy.deepcopy(network).requires_grad_(False)
        self.steps = 0
        self._decay, self._averaging = decay, get_ema_multi_avg_fn
        pairs = [
            *zip(self.network.parameters(), network.parameters(), strict=True),
            *zip(self.network.buffers(), network.buffers(), strict=True),
        ]
        self._real = [(own, followed) for own, followed in pairs if own.is_floating_point()]
        self._counters = [(own, followed) for own, followed in pairs if not own.is_floating_point()]

    @torch.no_grad()
    def update(self, steps: int = 1) -> None:
        """Follow the weights, so many steps after the last time."""
        own, followed = [list(tensors) for tensors in zip(*self._real, strict=True)]
        if self.steps == 0:
            copy_all(followed, to=own)
        else:
            self._averaging(self._decay**steps)(own, followed, self.steps)
        self.steps += 1

    @torch.no_grad()
    def end_epoch(self, group: Group) -> None:
        """Average the statistics over ranks, which already have the same weights."""
        mean_over_ranks(list(self.network.buffers()), group)
        for own, followed in self._counters:
            own.copy_(followed)
