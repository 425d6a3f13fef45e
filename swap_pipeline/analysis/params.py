"""`analysis/params.yaml`: what is computed of a finished run, and how finely."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swap_pipeline.config.params import EpochList
from swap_pipeline.config.parsing import knob, parse_as, read_tree

ANALYSIS_PARAMS = Path("analysis/params.yaml")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The whole of `analysis/params.yaml`."""

    grid: int = knob("points along each side of a landscape", minimum=2)
    margin: float = knob("how far a landscape reaches beyond its marked points, as a share of their extent", minimum=0)
    train_images: int | Literal["all"] = knob("for statistics and training error at each point", minimum=2)
    test_images: int | Literal["all"] = knob("for the test error at each point", minimum=1)
    gradient_images: int | Literal["all"] = knob("for the gradient whose direction is looked at", minimum=2)
    subsets: int = knob("at most this many choices of k workers are averaged and tested, for every k", minimum=1)
    exits: EpochList = knob("epochs of phase 1, of those that were kept, to leave it after; a list, or all", minimum=1)
    exit_workers: int = knob("workers that are trained from each of them, of workers.seeds the first", minimum=1)


def read_analysis() -> Analysis:
    """Read and check the file; a `SwapError` says what is wrong with the first bad entry."""
    return parse_as(Analysis, read_tree(ANALYSIS_PARAMS), file=str(ANALYSIS_PARAMS))
