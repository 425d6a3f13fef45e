"""Would more workers help? Averages of subsets of the workers, and distances between workers, as a job."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.analysis.planes import parameter_names
from swap_pipeline.averaging.job import Averager, measured_averages
from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.params import Phase3
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.engine.distributed import Group
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.storage.files import write_json
from swap_pipeline.storage.tensor_files import TensorFile


def subsets_of(seeds: Sequence[int], *, at_most: int, seed: int) -> list[tuple[int, ...]]:
    """For every k, all choices of k workers or `at_most` different ones, each sorted."""
    workers = sorted(seeds)
    chosen: list[tuple[int, ...]] = []
    for size in range(1, len(workers) + 1):
        if math.comb(len(workers), size) <= at_most:
            chosen += combinations(workers, size)
        else:
            draw = random.Random(derive_seed("subsets", seed, size))
            some: set[tuple[int, ...]] = set()
            while len(some) < at_most:
                some.add(tuple(sorted(draw.sample(workers, size))))
            chosen += sorted(some)
    return chosen


def label_of(subset: Sequence[int]) -> str:
    """`seeds_0_2`, or a hash of it if that is too long for a file name."""
    text = "_".join(map(str, subset))
    return f"seeds_{text}" if len(text) < 100 else f"{len(subset)}_seeds_{derive_seed(text):x}"


def geometry(start: Path, workers: Sequence[Path], names: Sequence[str]) -> dict[str, Any]:
    """Distances between models, and cosines between their directions from `start`, using only parameters.

    Both follow from inner products of these directions, which are summed over tensors in float64.
    """
    first, files = TensorFile(start), [TensorFile(path) for path in workers]
    products = torch.zeros(len(files), len(files), dtype=torch.float64)
    square = 0.0
    for name in names:
        origin = first.read(name).double().reshape(-1)
        ways = torch.stack([file.read(name).double().reshape(-1) - origin for file in files])
        products += ways @ ways.T
        square += float(origin @ origin)
    lengths = products.diagonal().sqrt()
    squares = products.diagonal()[:, None] + products.diagonal()[None, :] - 2 * products
    both = lengths[:, None] * lengths[None, :]
    cosines = torch.where(both > 0, products / both, torch.eye(len(files), dtype=torch.float64))
    return {
        "distance": squares.clamp(min=0).fill_diagonal_(0).sqrt().tolist(),
        "cosine": cosines.clamp(-1, 1).fill_diagonal_(1).tolist(),
        "distance_from_phase1": lengths.tolist(),
        "norm_of_phase1": math.sqrt(square),
    }


def run_subsets_job(
    workers: Mapping[int, Sequence[Path]],
    *,
    start: Path,
    at_most: int,
    name: str,
    setting: Setting,
    statistics: Phase3,
    group: Group,
    folder: JobFolder,
) -> None:
    """Run one rank of a job that averages and evaluates choices of `workers`, as phase 3 does with all of them.

    `workers` has each worker's models by seed, its final one last. Finished averages are saved.
    """
    with folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        seeds = sorted(workers)
        subsets = subsets_of(seeds, at_most=at_most, seed=setting.seed_of_statistics)
        reporter = Reporter(name=name, total=len(subsets), folder=folder.path, is_main=group.is_main)
        averager = Averager.open(setting, statistics, group)
        folder.check_inputs()
        reporter.done(
            0,
            f"{len(subsets)} averages × 2 passes ({len(averager.data.train):,} images for statistics, "
            f"{len(averager.data.held_out):,} {averager.data.held_out_name} images)",
        )
        models = {label_of(subset): [path for seed in subset for path in workers[seed]] for subset in subsets}
        points = measured_averages(models, averager, folder=folder, reporter=reporter)
        if group.is_main:
            between = geometry(start, [workers[seed][-1] for seed in seeds], parameter_names(averager.network))
            tested = [
                {**point, "seeds": subset, "size": len(subset)} for subset, point in zip(subsets, points, strict=True)
            ]
            with folder.complete() as result:
                split = averager.data.held_out_name
                record = {"subsets": tested, "split": split, "seeds": seeds, **between, **group.as_json()}
                write_json(result / "record.json", record)
