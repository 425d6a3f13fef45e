"""The gradient noise scale of McCandlish et al. 2018: the batch size up to which larger batches are worth their cost.

B_noise = tr(Σ) / |G|²: the variance of one image's gradient over the squared norm of the mean gradient. A shard's
gradient is noisier than the whole batch's, so the norms of both separate noise and mean (their appendix A.1). They are
measured in a few steps of each epoch and change nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from swap_pipeline.engine.precision import Scaler

_STEPS = 8
"""per epoch in which norms are measured, evenly spaced"""


def noise_scale(shard_square: float, batch_square: float, *, batch_size: int, num_shards: int) -> float | None:
    """B_noise in images, from mean squared norms of the gradients of shards and of whole batches.

    None for one shard, or if noise hides the mean gradient.
    """
    if num_shards == 1:
        return None
    shard_size = batch_size / num_shards
    mean_square = (batch_size * batch_square - shard_size * shard_square) / (batch_size - shard_size)
    variance = (shard_square - batch_square) / (1 / shard_size - 1 / batch_size)
    return variance / mean_square if mean_square > 0 else None


class NoiseMeter:
    """Sums squared norms over an epoch, of this rank's shards and of the whole batch, on the device."""

    def __init__(self, network: nn.Module, scaler: Scaler, *, num_shards: int, world_size: int) -> None:
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._scaler, self._num_shards, self._world_size = scaler, num_shards, world_size
        self._norms: list[torch.Tensor] = []

    @contextlib.contextmanager
    def listening(self, step: int, num_steps: int) -> Iterator[None]:
        """Around the backward passes of a step. Hooks see each gradient before DDP and the sum over shards."""
        self._norms = []
        is_due = self._num_shards > 1 and step * _STEPS % num_steps < _STEPS
        hooks = [parameter.register_hook(self._note) for parameter in self._parameters] if is_due else []
        yield
        for hook in hooks:
            hook.remove()

    def _note(self, gradient: torch.Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient))

    @torch.no_grad()
    def add(self, mean: Sequence[torch.Tensor], sums: torch.Tensor, *, unless: torch.Tensor) -> None:
        """Add the shards' squared norms and that of the batch's `mean` gradient to `sums`, if the step is taken."""
        if not self._norms:
            return
        here = self._num_shards // self._world_size
        heard, whole = torch.stack(self._norms), torch.stack([torch.linalg.vector_norm(part) for part in mean])
        # A rank divides its shards' losses by their number, so that their gradients add up to a mean.
        squares = torch.stack([(heard.double() * here).square().sum(), whole.double().square().sum()])
        squares /= self._scaler.scale(torch.ones_like(squares)).square()
        sums += torch.where(unless > 0, 0.0, squares)

    def scale(self, sums: Sequence[float], *, batch_size: int) -> float | None:
        """B_noise from the `sums` of all ranks, over any number of steps."""
        heard, whole = sums
        return noise_scale(
            heard / self._num_shards, whole / self._world_size, batch_size=batch_size, num_shards=self._num_shards
        )
