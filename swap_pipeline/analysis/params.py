"""`analysis/params.yaml`: what the analysis of a finished run computes, and at which resolution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swap_pipeline.config.params import EpochList
from swap_pipeline.config.parsing import knob, parse_as, read_tree

ANALYSIS_PARAMS = Path("analysis/params.yaml")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All of `analysis/params.yaml`."""

    grid: int = knob("points along each side of a landscape", minimum=2)
    margin: float = knob("how far a landscape extends beyond its marked points, as a share of their extent", minimum=0)
    train_images: int | Literal["all"] = knob("for statistics and training error at each point", minimum=2)
    test_images: int | Literal["all"] = knob("for the test error at each point", minimum=1)
    gradient_images: int | Literal["all"] = knob("for the gradient at each model", minimum=2)
    subsets: int = knob("for every k, how many choices of k workers to average and test at most", minimum=1)
    exits: EpochList = knob("epochs after which to leave phase 1; a list, or all; only kept epochs count", minimum=1)
    exit_workers: int = knob("workers to train from each exit: the first of workers.seeds", minimum=1)


def read_analysis() -> Analysis:
    """Read and check the file; the first bad entry is a `SwapError`."""
    return parse_as(Analysis, read_tree(ANALYSIS_PARAMS), file=str(ANALYSIS_PARAMS))
