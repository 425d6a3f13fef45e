"""What chance decides in an epoch, and which images are in which step.

Everything random in an epoch is drawn for the whole epoch from (seed, epoch) and then sliced by step and rank. Nothing
depends on how often the process was started or on how many ranks share the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swap_pipeline.config.seeds import derive_seed


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """The last, short batch of an epoch is dropped."""
    return num_images // batch_size


def batch_share(step: int, *, batch_size: int, shard: int, num_shards: int) -> slice:
    """The positions in the epoch's order that a shard has in a step, of a batch that all shards share equally."""
    size = batch_size // num_shards
    first = step * batch_size + shard * size
    return slice(first, first + size)


@dataclass(frozen=True, kw_only=True)
class EpochChoices:
    """All that chance decides in one epoch; position i of every tensor belongs to the i-th image that is shown."""

    order: torch.Tensor
    seed: int = 0
    """for what is drawn image by image: the crops of images that are read from their files"""
    top: torch.Tensor | None = None
    left: torch.Tensor | None = None
    flip: torch.Tensor | None = None
    cut_top: torch.Tensor | None = None
    cut_left: torch.Tensor | None = None

    def of_batch(self, positions: slice) -> EpochChoices:
        """Those of a batch: of the images at these positions."""

        def part(choice: torch.Tensor | None) -> torch.Tensor | None:
            return None if choice is None else choice[positions]

        return EpochChoices(
            seed=self.seed,
            order=self.order[positions],
            top=part(self.top),
            left=part(self.left),
            flip=part(self.flip),
            cut_top=part(self.cut_top),
            cut_left=part(self.cut_left),
        )


def draw_epoch(
    *,
    seed: int,
    epoch: int,
    num_images: int,
    image_size: tuple[int, int],
    padding: int = 0,
    flip: bool = False,
    cutout: int = 0,
    device: torch.device | None = None,
) -> EpochChoices:
    """Draw the choices of an epoch on the CPU, so that they are the same on every kind of device."""
    own_seed = derive_seed("epoch", seed, epoch)
    generator = torch.Generator().manual_seed(own_seed)
    height, width = image_size

    def choose(options: int) -> torch.Tensor:
        return torch.randint(options, (num_images,), generator=generator).to(device)

    order = torch.randperm(num_images, generator=generator).to(device)
    return EpochChoices(
        order=order,
        seed=own_seed,
        top=choose(2 * padding + 1) if padding else None,
        left=choose(2 * padding + 1) if padding else None,
        flip=choose(2).bool() if flip else None,
        cut_top=choose(height - cutout + 1) if cutout else None,
        cut_left=choose(width - cutout + 1) if cutout else None,
    )
