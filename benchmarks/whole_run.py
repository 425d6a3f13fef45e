"""Whole runs: `dvc repro` of the default recipe against the bare loops of its phases on the same cores.

The wall time of `dvc repro` includes everything: DVC, start-up, evaluation, snapshots, statistics, figures and the
report. The bare loops (see `loops.bare`) take as many steps as phases 1 and 2 did, with as many loops in parallel as
there were ranks and workers; only one epoch of each is measured, right after the run, and multiplied. They are not
synchronised, so phase 1's all-reduce counts as our overhead.

The row's `more` in results.json shows where the time went: seconds of each stage, and of training within it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML

from benchmarks.harness import Sample
from benchmarks.made_up import Project
from benchmarks.options import Options
from benchmarks.phase2 import side_by_side
from benchmarks.results import Limit, Row, compared, left_out
from swap_pipeline.storage.files import read_json

_LIMIT = Limit("≤", 1.25)
_SHAPE = (1, 28, 28)
_IMAGES = 9000  # fashion-mini's, without those for validation
_SIDE_BY_SIDE = 2
_QUICK: dict[str, Any] = {"phase1.max_epochs": 2, "phase1.warmup_epochs": 0, "phase2.epochs": 1, "model.width": 1}
_QUICK |= {"phase1.keep_epochs": [], "phase2.keep_epochs": []}


def measure(options: Options) -> Iterator[Row]:
    what = "whole run of the default recipe"
    if options.cores < 2:
        yield left_out("whole_run/default", what, other="bare loops", unit="s", why="there is one core", limit=_LIMIT)
        return
    walls, bares, parts = [], [], []
    for number in range(min(options.rounds, 3)):
        project = Project.copy(options.scratch / str(number), _QUICK if options.quick else {})
        project.commit()
        options.say(f"run {number + 1}")
        stages = _seconds_of_stages(project)
        walls.append(sum(stages.values()))
        bares.append(_bare_seconds(project))
        parts.append({"stages": stages, "training": _training_seconds(project)})
    yield compared(
        "whole_run/default",
        what,
        ours=("dvc repro", Sample(tuple(walls))),
        other=("bare loops", Sample(tuple(bares))),
        unit="s",
        limit=_LIMIT,
        note=_where_it_went(parts[0]),
        more={"parts": parts},
    )


def _seconds_of_stages(project: Project) -> dict[str, float]:
    """Wall time of each stage, and of DVC before the first and after the last."""
    command = [sys.executable, "-m", "dvc", "repro"]
    seconds: dict[str, float] = {}
    began, stage = time.perf_counter(), "dvc"
    with subprocess.Popen(
        command, cwd=project.root, env=project.environment(PYTHONUNBUFFERED="1"), stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("Running stage "):
                now = time.perf_counter()
                seconds[stage] = seconds.get(stage, 0) + now - began
                began, stage = now, line.split("'")[1].split("@")[0]
    seconds[stage] = seconds.get(stage, 0) + time.perf_counter() - began
    if run.returncode != 0:
        raise RuntimeError(f"`dvc repro` gave {run.returncode}")
    return seconds


def _training_seconds(project: Project) -> dict[str, float]:
    """Training seconds of phase 1, and of phase 2 with that many workers at a time."""
    phase1, workers = _records(project)
    return {
        "phase1": sum(point["seconds"] for point in phase1["curve"]),
        "phase2": sum(point["seconds"] for worker in workers for point in worker["curve"]) / _SIDE_BY_SIDE,
    }


def _bare_seconds(project: Project) -> float:
    """Time that bare loops would take for the same steps."""
    params = YAML(typ="safe", pure=True).load((project.root / "params.yaml").read_text(encoding="utf-8"))
    phase1, workers = _records(project)
    epochs = {"phase1": len(phase1["curve"]), "phase2": sum(len(worker["curve"]) for worker in workers) / _SIDE_BY_SIDE}
    seconds = 0.0
    for phase, number in epochs.items():
        batch_size = params[phase]["batch_size"]
        loop = {
            "shape": _SHAPE,
            "width": params["model"]["width"],
            "batch_size": batch_size // _SIDE_BY_SIDE if phase == "phase1" else batch_size,
            "steps": _IMAGES // batch_size,
        }
        seconds += number * side_by_side(loop, number=_SIDE_BY_SIDE)
    return seconds


def _records(project: Project) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    metrics = project.root / "metrics"
    return read_json(metrics / "phase1.json"), [read_json(path) for path in sorted(metrics.glob("phase2/*.json"))]


def _where_it_went(part: dict[str, dict[str, float]]) -> str:
    training = part["training"]
    times = ", ".join(
        f"{stage} {seconds:.1f} s" + (f" (training {training[stage]:.1f} s)" if stage in training else "")
        for stage, seconds in part["stages"].items()
    )
    return f"Whole run, where the time of the first went: {times}."
