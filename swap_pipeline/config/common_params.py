"""Settings that every job shares: data, network and how numbers are computed."""

from __future__ import annotations

from dataclasses import dataclass

from swap_pipeline.config.params import Augment, Compute, Model, Params
from swap_pipeline.config.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The part of `params.yaml` that all phases have in common."""

    seed: int
    root: str
    """where image files are found; their contents were recorded when they were prepared"""
    augment: Augment
    model: Model
    compute: Compute

    @property
    def seed_of_statistics(self) -> int:
        """Seed for the image order and augmentation of a pass that computes batch-norm statistics."""
        return derive_seed("phase3", self.seed)


def setting_of(params: Params) -> Setting:
    return Setting(
        seed=params.seed,
        root=params.data.root,
        augment=params.augment,
        model=params.model,
        compute=params.compute,
    )
