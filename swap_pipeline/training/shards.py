"""The shards of a batch: each is normalised separately, as if on its own device, on any number of devices.

A rank computes its shards one after another and adds up their gradients. Batch norm's running statistics are kept for
each shard apart; what counts in the end is their mean over all shards. The update is linear, so it does not matter
whether that mean is taken after every step or once at the end of an epoch.

In local SGD a shard also has weights and momentum of its own between two exchanges (Stich 2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.training.sgd import FiniteGuard, Sgd


class Shards:
    """Those of this rank, with the network's buffers, or other tensors, as each of them has them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], num_shards: int, group: Group) -> None:
        self._group, self._num_shards = group, num_shards
        here = num_shards // group.world_size
        self.numbers = range(group.rank * here, (group.rank + 1) * here)
        """of this rank's shards among those of the batch"""
        self._named = dict(tensors)
        self._tensors = list(self._named.values())
        # With one shard a rank, its tensors are the network's own.
        self._sets = [[torch.empty_like(buffer) for buffer in self._tensors] for _ in self.numbers] if here > 1 else []
        self.start_from_network()

    def start_from_network(self) -> None:
        """All shards have what the network has now."""
        for own in self._sets:
            copy_all(self._tensors, to=own)

    @contextlib.contextmanager
    def as_in(self, number: int) -> Iterator[None]:
        """The network with what a shard has."""
        if not self._sets:
            yield
            return
        own = self._sets[number - self.numbers.start]
        copy_all(own, to=self._tensors)
        yield
        copy_all(self._tensors, to=own)

    @torch.no_grad()
    def mean_here(self) -> None:
        """Give the network the mean over this rank's shards."""
        for number, buffer in enumerate(self._tensors):
            if self._sets and buffer.is_floating_point():
                buffer.copy_(torch.stack([own[number] for own in self._sets]).mean(dim=0))

    def mean_over_all(self) -> None:
        """Give the network on every rank, and every shard, the mean over all shards."""
        self.mean_here()
        mean_over_ranks(self._tensors, self._group)
        self.start_from_network()

    def stacked(self) -> dict[str, torch.Tensor]:
        """What all shards of all ranks have, one row each."""
        rows = self._sets or [self._tensors]
        here = [torch.stack([own[number] for own in rows]) for number in range(len(self._tensors))]
        return {name: self._group.gather(own).flatten(0, 1) for name, own in zip(self._named, here, strict=True)}

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Types and shapes of what `stacked` gives."""
        return {name: (buffer.dtype, (self._num_shards, *buffer.shape)) for name, buffer in self._named.items()}

    def load(self, stacked: Mapping[str, torch.Tensor]) -> None:
        """Take up what this rank's shards had from what all had."""
        for own, shard in zip(self._sets or [self._tensors], self.numbers, strict=True):
            for name, buffer in zip(self._named, own, strict=True):
                buffer.copy_(stacked[name][shard])


class LocalSteps:
    """An epoch of local SGD: every shard takes steps of its own, and now and then all take the mean of their weights.

    Momentum is averaged with the weights (Yu, Jin, Yang 2019). So an average after every step would be the plain step
    with the mean gradient, and at an exchange nothing is left that differs between shards but running statistics.
    """

    def __init__(self, network: nn.Module, sgd: Sgd, num_shards: int, *, every: int, group: Group) -> None:
        self._sgd, self._group, self._every = sgd, group, every
        self._shards = Shards(_learnt(network, sgd), num_shards, group)
        self._flags = torch.zeros(every, num_shards, device=group.device)
        """since the last exchange, of each step and shard 1.0 if its gradient was not finite"""
        scaler = sgd.scaler
        self._scalers = {shard: Scaler(scaler.precision, group.device) for shard in self._shards.numbers}
        for own in self._scalers.values():
            own.set_state(scaler.state())

    @contextlib.contextmanager
    def as_in(self, shard: int) -> Iterator[None]:
        """The network, its momentum and its gradient scale as this shard has them."""
        with self._shards.as_in(shard), self._sgd.scaler.replaced_by(self._scalers[shard]):
            yield

    def flag(self, step: int, shard: int) -> torch.Tensor:
        return self._flags[step % self._every, shard]

    def exchange(self, epoch: int, step: int, guard: FiniteGuard) -> int:
        """Average over all shards, or stop all ranks if one of them had to; returns how many steps it was since the
        last time."""
        count = step % self._every + 1
        guard.check_shards(epoch, step + 1 - count, self._group.sum(self._flags)[:count])
        self._flags.zero_()
        self._shards.mean_over_all()
        if self._sgd.scaler.is_active:
            self._take_lowest_scale()
        return count

    def _take_lowest_scale(self) -> None:
        """A mean would not be a power of two."""
        states = [scaler.state() for scaler in self._scalers.values()]
        own = torch.tensor([[state["scale"], state["_growth_tracker"]] for state in states], device=self._group.device)
        scale, steps = self._group.gather(own).flatten(0, 1).amin(dim=0).tolist()
        for scaler in (self._sgd.scaler, *self._scalers.values()):
            scaler.set_state({**states[0], "scale": scale, "_growth_tracker": int(steps)})


def _learnt(network: nn.Module, sgd: Sgd) -> dict[str, torch.Tensor]:
    """What a step changes, in place."""
    weights = {f"weights.{name}": tensor for name, tensor in network.named_parameters() if tensor.requires_grad}
    return weights | {f"momentum.{name}": tensor for name, tensor in sgd.state().items()}


@torch.no_grad()
def mean_over_ranks(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Give all ranks the mean of what each has: running statistics, which DDP leaves to each rank, or weights."""
    real = [tensor for tensor in tensors if tensor.is_floating_point()]
    if group.world_size == 1 or not real:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in real])
    group.sum(flat).div_(group.world_size)
    for tensor, part in zip(real, flat.split([tensor.numel() for tensor in real]), strict=True):
        tensor.copy_(part.view_as(tensor))


_COPY_ALL = getattr(torch, "_foreach_copy_", None)


@torch.no_grad()
def copy_all(source: list[torch.Tensor], *, to: list[torch.Tensor]) -> None:
    """Copy all tensors, in one call if torch has it."""
    if _COPY_ALL is not None and source:
        _COPY_ALL(to, source)
        return
    for tensor, target in zip(source, to, strict=True):
        target.copy_(tensor)
