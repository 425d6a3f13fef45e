"""Planes in weight space (the paper's Figures 2 and 3): the models that span them, their points, and the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swap_pipeline.analysis.planes import Plane, Position, axis
from swap_pipeline.errors import SwapError

LB, SWAP = "LB", "SWAP"
"""The paper's names for the outputs of phases 1 and 3."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A model marked in a landscape."""

    name: str
    model: str
    """its key among the models"""
    position: Position
    distance: float | None = None
    """from the plane, if the model is projected"""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plane with its marks and its grid."""

    name: str
    title: str
    seeds: tuple[int, ...]
    """of the workers that it shows"""
    plane: Plane
    marks: tuple[Mark, ...]
    along_u: list[float]
    along_v: list[float]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors at one point, in percent."""

    train: float
    test: float
    seconds: float
    """time that the point took"""


def worker(seed: int) -> str:
    return f"worker {seed}"


def charts_of(
    models: Mapping[str, torch.Tensor], *, seeds: Sequence[int], grid: int, margin: float
) -> tuple[list[Chart], list[dict[str, str]]]:
    """Both landscapes, if there is a plane, and those that were left out, with the reason."""
    first = tuple(seeds[:3])

    def phases() -> Chart:
        if len(seeds) == 1:
            raise SwapError("with one worker, SWAP is that worker: list more seeds in workers.seeds")
        points = {LB: models[LB], "SGD": models[worker(first[0])], SWAP: models[SWAP]}
        plane = Plane.through(points)
        names = {LB: LB, "SGD": worker(first[0]), SWAP: SWAP}
        marks = [Mark(name=name, model=names[name], position=plane.project(at)[0]) for name, at in points.items()]
        return chart(
            "phases",
            f"phase 1 (LB), the worker with seed {first[0]} (SGD) and the average (SWAP)",
            first[:1],
            marks,
            plane,
        )

    def workers() -> Chart:
        if len(first) < 3:
            there_are = "there is only 1" if len(first) == 1 else f"there are only {len(first)}"
            raise SwapError(f"it needs three workers, but {there_are}: list more seeds in workers.seeds")
        points = {worker(seed): models[worker(seed)] for seed in first}
        plane = Plane.through(points)
        marks = [Mark(name=name, model=name, position=plane.project(at)[0]) for name, at in points.items()]
        position, distance = plane.project(models[SWAP])
        marks.append(Mark(name=SWAP, model=SWAP, position=position, distance=distance))
        listed = ", ".join(map(str, first[:-1]))
        return chart("workers", f"the workers with seeds {listed} and {first[-1]}", first, marks, plane)

    def chart(name: str, title: str, seeds: tuple[int, ...], marks: list[Mark], plane: Plane) -> Chart:
        along_u, along_v = (axis([mark.position[side] for mark in marks], margin=margin, num=grid) for side in (0, 1))
        return Chart(
            name=name, title=title, seeds=seeds, plane=plane, marks=tuple(marks), along_u=along_u, along_v=along_v
        )

    charts, left_out = [], []
    for make in (phases, workers):
        try:
            charts.append(make())
        except SwapError as error:
            left_out.append({"name": make.__name__, "why": str(error)})
    return charts, left_out


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point in weight space; `key` names it in files."""

    key: str
    weights: Callable[[], torch.Tensor]


def points_of(charts: Sequence[Chart], models: Mapping[str, torch.Tensor]) -> list[Point]:
    """All marked models themselves, then the grids, row by row."""

    def at_model(name: str) -> Point:
        return Point(key=name, weights=lambda: models[name])

    def on_grid(chart: Chart, row: int, column: int) -> Point:
        position = chart.along_u[column], chart.along_v[row]
        return Point(key=_grid_key(chart, row, column), weights=lambda: chart.plane.at(position))

    marked = dict.fromkeys(mark.model for chart in charts for mark in chart.marks)
    return [
        *(at_model(name) for name in marked),
        *(
            on_grid(chart, row, column)
            for chart in charts
            for row in range(len(chart.along_v))
            for column in range(len(chart.along_u))
        ),
    ]


def _grid_key(chart: Chart, row: int, column: int) -> str:
    return f"{chart.name} {row} {column}"


def as_json(chart: Chart, found: Mapping[str, Errors]) -> dict[str, Any]:
    """A landscape for the record: rows follow v, columns u."""
    grid = [
        [found[_grid_key(chart, row, column)] for column in range(len(chart.along_u))]
        for row in range(len(chart.along_v))
    ]
    marks = [_mark_as_json(mark, found[mark.model]) for mark in chart.marks]
    if chart.name == "workers":
        marks.append(_best(chart, grid))
    return {
        "name": chart.name,
        "title": chart.title,
        "seeds": list(chart.seeds),
        "grid": len(chart.along_u),
        "u_range": [chart.along_u[0], chart.along_u[-1]],
        "v_range": [chart.along_v[0], chart.along_v[-1]],
        "marks": marks,
        "train_error": [[errors.train for errors in row] for row in grid],
        "test_error": [[errors.test for errors in row] for row in grid],
    }


def _mark_as_json(mark: Mark, errors: Errors) -> dict[str, Any]:
    projected = {} if mark.distance is None else {"projected": True, "distance": mark.distance}
    return {
        "name": mark.name,
        "position": list(mark.position),
        "train_error": errors.train,
        "test_error": errors.test,
        **projected,
    }


def _best(chart: Chart, grid: Sequence[Sequence[Errors]]) -> dict[str, Any]:
    """The point with the lowest test error, and among several the lowest training error."""
    test, train, row, column = min(
        (errors.test, errors.train, row, column) for row, line in enumerate(grid) for column, errors in enumerate(line)
    )
    position = [chart.along_u[column], chart.along_v[row]]
    return {"name": "BEST", "position": position, "train_error": train, "test_error": test}
