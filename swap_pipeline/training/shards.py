"""The shards of a batch: each is normalised separately, as if on its own device, on any number of devices.

A rank computes its shards one after another and adds up their gradients. Batch norm's running statistics are kept for
each shard apart; what counts in the end is their mean over all shards. The update is linear, so it does not matter
whether that mean is taken after every step or once at the end of an epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from swap_pipeline.engine.distributed import Group


class Shards:
    """Those of this rank, with the network's buffers as each of them has them."""

    def __init__(self, network: nn.Module, num_shards: int, group: Group) -> None:
        self._group, self._num_shards = group, num_shards
        here = num_shards // group.world_size
        self.numbers = range(group.rank * here, (group.rank + 1) * here)
        """of this rank's shards among those of the batch"""
        self._named = dict(network.named_buffers())
        self._buffers = list(self._named.values())
        # With one shard a rank, its buffers are the network's own.
        self._sets = [[torch.empty_like(buffer) for buffer in self._buffers] for _ in self.numbers] if here > 1 else []
        self.start_from_network()

    def start_from_network(self) -> None:
        """All shards have the statistics that the network has now."""
        for own in self._sets:
            copy_all(self._buffers, to=own)

    @contextlib.contextmanager
    def as_in(self, number: int) -> Iterator[None]:
        """The network with the buffers of a shard."""
        if not self._sets:
            yield
            return
        own = self._sets[number - self.numbers.start]
        copy_all(own, to=self._buffers)
        yield
        copy_all(self._buffers, to=own)

    def mean_here(self) -> None:
        """Give the network the mean of the statistics of this rank's shards."""
        for number, buffer in enumerate(self._buffers):
            if self._sets and buffer.is_floating_point():
                buffer.copy_(torch.stack([own[number] for own in self._sets]).mean(dim=0))

    def mean_over_all(self) -> None:
        """Give the network on every rank, and every shard, the mean over all shards."""
        self.mean_here()
        mean_over_ranks(self._buffers, self._group)
        self.start_from_network()

    def stacked(self) -> dict[str, torch.Tensor]:
        """The buffers of all shards of all ranks, one row each."""
        rows = self._sets or [self._buffers]
        here = [torch.stack([own[number] for own in rows]) for number in range(len(self._buffers))]
        return {name: self._group.gather(own).flatten(0, 1) for name, own in zip(self._named, here, strict=True)}

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Types and shapes of what `stacked` gives."""
        return {name: (buffer.dtype, (self._num_shards, *buffer.shape)) for name, buffer in self._named.items()}

    def load(self, stacked: Mapping[str, torch.Tensor]) -> None:
        """Take up the buffers of this rank's shards from those of all."""
        for own, shard in zip(self._sets or [self._buffers], self.numbers, strict=True):
            for name, buffer in zip(self._named, own, strict=True):
                buffer.copy_(stacked[name][shard])


def mean_over_ranks(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Give all ranks the mean of their running statistics, which DDP leaves to each rank."""
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
