"""What ranks send one another in local SGD: weights and momentum now and then, instead of gradients at every step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swap_pipeline.cli.amounts import in_bytes
from swap_pipeline.config.params import Phase1
from swap_pipeline.config.schedules import by_epoch
from swap_pipeline.data.epochs import steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class LocalEpochs:
    """Epochs of phase 1 in which each shard takes steps of its own; bytes are those that a rank gives to be summed."""

    first_epoch: int
    last_epoch: int
    """one after them"""
    steps: int
    """of an epoch, as all that follows; without local SGD there is an exchange at each of them"""
    exchanges: int
    bytes_sent: int
    bytes_without: int


def local_epochs(given: Phase1, num_train: int, gradient_bytes: int, momentum_bytes: int) -> Iterator[LocalEpochs]:
    """To the last epoch."""
    batch_sizes, sync_steps = by_epoch(given.batch_size), by_epoch(given.sync_steps)
    alike = itertools.groupby(range(given.max_epochs), lambda epoch: (batch_sizes(epoch), sync_steps(epoch)))
    for (batch_size, every), epochs in alike:
        first, *others = epochs
        steps = steps_per_epoch(num_train, batch_size)
        if min(every, steps) > 1:
            exchanges = math.ceil(steps / every)
            yield LocalEpochs(
                first_epoch=first,
                last_epoch=first + len(others) + 1,
                steps=steps,
                exchanges=exchanges,
                bytes_sent=exchanges * (gradient_bytes + momentum_bytes),
                bytes_without=steps * gradient_bytes,
            )


def copies_on_a_rank(given: Phase1, *, processes: int) -> int:
    """How many shards of a rank have weights and momentum beside the network's own."""
    shards = given.shards // processes
    return shards if shards > 1 else 0


def notes_on(parts: Sequence[LocalEpochs], *, processes: int) -> Iterator[str]:
    if parts and processes == 1:
        yield "phase 1 has one rank, so local SGD (phase1.sync_steps) has no exchanges to save"
        return
    for part in parts:
        yield (
            f"phase 1, epochs {part.first_epoch}–{part.last_epoch}: {part.exchanges:,} exchanges an epoch instead of "
            f"{part.steps:,}, of {in_bytes(part.bytes_sent)} instead of {in_bytes(part.bytes_without)} from each rank"
        )
