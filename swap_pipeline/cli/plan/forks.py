"""What fork tests cost, by arithmetic: forks train for a few steps, then they and their average are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from swap_pipeline.config.params import Phase1
from swap_pipeline.config.schedules import num_fork_tests


@dataclass(frozen=True, kw_only=True)
class ForksPlan:
    """The fork tests of phase 1; none if it is left by another rule."""

    tests: int
    """at most"""
    steps: int
    """of all forks of a test together"""
    images: int
    """that these train on"""
    flops: int
    """of a test"""
    flops_of_busiest: int
    """of the process with the most forks"""


def plan_forks(given: Phase1, images: Mapping[str, int], *, forward: int, passes: int, processes: int) -> ForksPlan:
    """`images` by split; `forward`: FLOPs for one image, of which a training step costs `passes` times as many."""
    if not (tests := num_fork_tests(given)) or given.fork_batch_size is None:
        return ForksPlan(tests=0, steps=0, images=0, flops=0, flops_of_busiest=0)
    steps = min(given.fork_steps, images["train"] // given.fork_batch_size)
    seen = steps * given.fork_batch_size  # by a fork; the average's statistics are of as many
    measured = images["validation"]
    of_fork = passes * seen + measured
    busiest = math.ceil(given.forks / processes) * of_fork + math.ceil(seen / processes) + measured
    return ForksPlan(
        tests=tests,
        steps=given.forks * steps,
        images=given.forks * seen,
        flops=forward * (given.forks * of_fork + seen + processes * measured),
        flops_of_busiest=forward * busiest,
    )
