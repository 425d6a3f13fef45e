"""Selecting workers to average: a greedy soup on the validation images (Wortsman et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.config.params import Params
from swap_pipeline.engine.distributed import Group

Measure = Callable[[Mapping[str, Sequence[Path]]], list[dict[str, Any]]]
"""Scores of the mean of each set of models, with its label; complete only on the main rank"""


def select_greedily(
    workers: Mapping[int, Sequence[Path]], measure: Measure, group: Group
) -> tuple[list[int], list[dict[str, Any]]]:
    """The seeds to average, in the order in which they were added, and the measurements (on the main rank).

    Starts with the best single worker (lower loss if accuracies are equal) and adds the others, best first, unless that
    lowers the average's accuracy. `workers` has each worker's models by seed.
    """
    measured = measure({f"seed_{seed}": models for seed, models in workers.items()})
    alone = dict(zip(workers, _scores_of_main(measured, len(workers), group), strict=True))
    first, *others = sorted(workers, key=lambda seed: (-alone[seed][0], alone[seed][1], seed))
    taken, (best, _) = [first], alone[first]
    for seed in others:
        models = [path for each in sorted([*taken, seed]) for path in workers[each]]
        points = measure({f"with_seed_{seed}": models})
        ((accuracy, _),) = _scores_of_main(points, 1, group)
        measured += points
        if accuracy >= best:
            taken, best = [*taken, seed], accuracy
    return taken, measured


def _scores_of_main(points: Sequence[Mapping[str, Any]], count: int, group: Group) -> list[tuple[float, float]]:
    """The main rank's accuracies and losses, on all ranks."""
    scores = torch.zeros(count, 2, dtype=torch.float64, device=group.device)
    if group.is_main:
        scores += torch.tensor([(point["accuracy"], point["loss"]) for point in points], dtype=torch.float64).to(scores)
    return [(accuracy, loss) for accuracy, loss in group.sum(scores).tolist()]


def num_passes(params: Params) -> int:
    """Upper limit on passes for batch-norm statistics, one per mean. If greedy: each worker's mean if it has several
    models, one for each worker tried, and the result."""
    num_workers, trained_last = len(params.workers.seeds), params.phase2 if params.phase2.epochs else params.phase1
    alone = int(params.phase2.cycles > 1 or trained_last.ema_decay is not None)
    if num_workers == 1:
        return alone
    return num_workers * (alone + 1) if params.phase3.select == "greedy" else 1
