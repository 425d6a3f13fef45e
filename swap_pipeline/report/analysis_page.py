"""`analysis/index.html`: the analysis's results, and for missing ones how to get them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from swap_pipeline.report.figures import Drawing
from swap_pipeline.report.figures_analysis import draw_cosine, draw_landscape, draw_pairs, draw_subsets
from swap_pipeline.report.figures_training import draw_exits
from swap_pipeline.report.page import images, render

Record = Mapping[str, Any]


def draw_analysis(records: Mapping[str, Record | None]) -> list[Drawing]:
    """All figures that these records allow."""
    names = ("landscape", "cosine", "workers", "exits")
    landscape, cosine, workers, exits = (records.get(name) or {} for name in names)
    return [
        *(draw_landscape(plane) for plane in landscape.get("planes", ())),
        *([draw_cosine(cosine["points"])] if cosine.get("points") else []),
        *([draw_subsets(workers["subsets"], workers["split"])] if workers.get("subsets") else []),
        *([draw_pairs(workers)] if len(workers.get("seeds", ())) > 1 else []),
        *([draw_exits(exits)] if len(exits.get("exits", ())) > 1 else []),
    ]


def analysis_page(
    records: Mapping[str, Record | None], *, drawings: Mapping[str, Drawing], pictures: Mapping[str, bytes]
) -> str:
    """From the records, each of which may be missing; `pictures` are the drawings' SVGs."""
    landscape, cosine, workers, exits = (records.get(name) for name in ("landscape", "cosine", "workers", "exits"))
    planes = landscape["planes"] if landscape else ()
    return render(
        "analysis.html",
        files="analysis/figures",
        images=images(drawings.values(), pictures),
        landscape=landscape,
        marks={plane["name"]: [_mark(mark) for mark in plane["marks"]] for plane in planes},
        cosine=cosine,
        ends=_ends(cosine["points"] if cosine else ()),
        workers=workers,
        by_size=_by_size(workers["subsets"] if workers else ()),
        exits=exits,
        rules=[
            (rule["rule"], rule["epoch"], rule["nearest"], f"{rule['regret']:.2f}")
            for rule in (exits["rules"] if exits else ())
        ],
    )


def _mark(mark: Record) -> tuple[str, ...]:
    distance = f"{mark['distance']:.2f}" if mark.get("projected") else "on it"
    return mark["name"], f"{mark['train_error']:.2f}", f"{mark['test_error']:.2f}", distance


def _ends(points: Sequence[Record]) -> list[tuple[Any, ...]]:
    """The last point of each run."""
    last = {point["run"]: point for point in sorted(points, key=lambda point: float(point["epoch"]))}
    return [
        (
            "phase 1" if run == "phase1" else run.replace("seed_", "worker, seed "),
            point["epoch"],
            f"{point['cosine']:.4f}".replace("-", "−"),
            f"{point['gradient_norm']:.4f}",
            f"{point['distance']:.3f}",
        )
        for run, point in last.items()
    ]


def _by_size(subsets: Sequence[Record]) -> list[tuple[int, float]]:
    """Mean accuracy of averages by number of workers."""
    accuracies: dict[int, list[float]] = {}
    for subset in subsets:
        accuracies.setdefault(subset["size"], []).append(subset["accuracy"])
    return [(size, statistics.fmean(accuracies[size])) for size in sorted(accuracies)]
