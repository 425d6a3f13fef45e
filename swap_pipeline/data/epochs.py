"""Random choices of an epoch, and which images are in which step.

All random choices are drawn for the whole epoch from (seed, epoch) and then sliced by step and rank. They depend
neither on restarts nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from swap_pipeline.config.params import Augment
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.augmentation import Changes, draw_changes


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """The last, short batch of an epoch is dropped."""
    return num_images // batch_size


def batch_share(step: int, *, batch_size: int, shard: int, num_shards: int) -> slice:
    """A shard's positions in the epoch's order in a step; all shards have equal parts of the batch."""
    size = batch_size // num_shards
    first = step * batch_size + shard * size
    return slice(first, first + size)


@dataclass(frozen=True, kw_only=True)
class EpochChoices:
    """All random choices of one epoch; index i of every tensor is for the i-th image in its order."""

    order: torch.Tensor
    changes: Changes
    seed: int
    """for choices drawn image by image: crops of images from files"""

    def at(self, parts: Sequence[slice]) -> EpochChoices:
        """The choices at these positions, one part after another."""
        if all(part.stop == after.start for part, after in pairwise(parts)):
            positions: slice | torch.Tensor = slice(parts[0].start, parts[-1].stop) if parts else slice(0)
        else:
            positions = torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(self.order.device)
        return replace(self, order=self.order[positions], changes=self.changes.at(positions))


def draw_epoch(
    *,
    seed: int,
    epoch: int,
    num_images: int,
    image_size: tuple[int, int],
    augment: Augment | None = None,
    device: torch.device | None = None,
) -> EpochChoices:
    """Draw the choices of an epoch, on the CPU, so that they are the same for every kind of device."""
    own_seed = derive_seed("epoch", seed, epoch)
    generator = torch.Generator().manual_seed(own_seed)

    def choose(options: int) -> torch.Tensor:
        return torch.randint(options, (num_images,), generator=generator).to(device)

    order = torch.randperm(num_images, generator=generator).to(device)
    return EpochChoices(order=order, changes=draw_changes(augment, image_size, choose), seed=own_seed)
