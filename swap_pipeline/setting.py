"""What every job shares, whatever it computes: data, network and how numbers are computed."""

from __future__ import annotations

from dataclasses import dataclass

from swap_pipeline.params import Augment, Compute, Model, Params


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The part of `params.yaml` that all phases have in common."""

    root: str
    """where image files are found; what is in them was recorded when they were prepared"""
    test_crop: str
    augment: Augment
    model: Model
    compute: Compute


def setting_of(params: Params) -> Setting:
    return Setting(
        root=params.data.root,
        test_crop=params.data.test_crop,
        augment=params.data.augment,
        model=params.model,
        compute=params.compute,
    )
