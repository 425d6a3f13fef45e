"""Many workers: the overhead of each in phase 2, and `dvc repro` with nothing to do.

Real DVC in a copy of this project, a tiny network, one epoch of a few images. Phase 2's wall time, times the workers at
a time, divided by W, is one worker's time on one core; its recorded training seconds are subtracted. The rest is DVC's
stage instance, the launcher, starting a Python with torch, and storing the result in the cache. The other column is one
import of torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Sample
from benchmarks.made_up import Project
from benchmarks.nothing_to_do import TINY, make_small
from benchmarks.options import Options
from benchmarks.results import Limit, Row
from benchmarks.startup import import_torch_seconds
from swap_pipeline.storage.files import read_json


def measure(options: Options) -> Iterator[Row]:
    for workers in (64, 256) if not options.quick else (2,):
        yield from _rows(options, workers)


def _rows(options: Options, workers: int) -> Iterator[Row]:
    params = {**TINY, "workers.seeds": list(range(workers)), "phase2.keep_epochs": []}
    project = Project.copy(options.scratch / f"workers_{workers}", params)
    make_small(project)
    project.commit()
    project.dvc("repro", "phase1", SWAP_NPROC="1")
    options.say(f"{workers} workers")
    seconds = _seconds(project, "repro", "phase2")
    side_by_side = min(options.cores, workers)
    records = [read_json(path) for path in _records(project)]
    training = sum(point["seconds"] for record in records for point in record["curve"]) / workers
    imports = import_torch_seconds(side_by_side)
    beyond = side_by_side * seconds / workers - training - imports
    yield _in_seconds(
        f"many_workers/each_{workers}",
        f"each of {workers} workers, beyond training and one import of torch",
        beyond,
        other=("import torch", imports),
        limit=1.0,
        more={"phase2_seconds": seconds, "training_seconds_each": training},
    )
    project.dvc("repro", "phase2")
    yield _in_seconds(
        f"many_workers/nothing_to_do_{workers}",
        f"nothing to do, {workers} workers: dvc repro phase2",
        _seconds(project, "repro", "phase2"),
        other=("dvc status phase2", _seconds(project, "status", "phase2")),
        limit=5.0,
    )


def _in_seconds(
    name: str,
    what: str,
    seconds: float,
    *,
    other: tuple[str, float],
    limit: float,
    more: dict[str, float] | None = None,
) -> Row:
    """A row of one measurement, with a limit in seconds."""
    return Row(
        name=name,
        what=what,
        ours="",
        other=other[0],
        unit="s",
        our_figures=Sample((seconds,)),
        other_figures=Sample((other[1],)),
        ratio=Sample((seconds,)),
        limit=Limit("≤", limit),
        more=more or {},
    )


def _seconds(project: Project, *command: str) -> float:
    began = time.perf_counter()
    project.dvc(*command)
    return time.perf_counter() - began


def _records(project: Project) -> list[Path]:
    return sorted((project.root / "metrics" / "phase2").glob("*.json"))
