"""Which workers are worth averaging: a greedy soup on the validation images (Wortsman et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.config.params import Params
from swap_pipeline.engine.distributed import Group

Measure = Callable[[Mapping[str, Sequence[Path]]], list[dict[str, Any]]]
"""What the mean of each set of models reaches, under its label; complete on the main rank alone"""


def select_greedily(
    workers: Mapping[int, Sequence[Path]], measure: Measure, group: Group
) -> tuple[list[int], list[dict[str, Any]]]:
    """The seeds to average, in the order in which they were taken, and what was measured for it (on the main rank).

    Begins with the worker that does best alone (of equal accuracies, the lower loss); takes each of the others, from
    the best down, unless the average's accuracy gets worse. `workers` has each one's models by seed.
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
    """Accuracies and losses as the main rank has them, for all ranks to decide by."""
    scores = torch.zeros(count, 2, dtype=torch.float64, device=group.device)
    if group.is_main:
        scores += torch.tensor([(point["accuracy"], point["loss"]) for point in points], dtype=torch.float64).to(scores)
    return [(accuracy, loss) for accuracy, loss in group.sum(scores).tolist()]


def num_passes(params: Params) -> int:
    """Of batch-norm statistics, at most: one for each mean. Greedily, a mean of each worker's models where it has
    several, one for each worker that is added, and the result once more."""
    num_workers, trained_last = len(params.workers.seeds), params.phase2 if params.phase2.epochs else params.phase1
    alone = int(params.phase2.cycles > 1 or trained_last.ema_decay is not None)
    if num_workers == 1:
        return alone
    return num_workers * (alone + 1) if params.phase3.select == "greedy" else 1
