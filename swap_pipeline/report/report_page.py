"""`report/index.html`: the report on one run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from swap_pipeline.report.figures import Drawing
from swap_pipeline.report.page import images, render
from swap_pipeline.report.provenance import Origin, flat, shown
from swap_pipeline.report.summary import RESULT_COLUMNS, ResultRow, models_before_averaging, without_empty_columns

_CLASSES_SHOWN = 20


def report_page(
    phase1: Mapping[str, Any],
    workers: Mapping[int, Mapping[str, Any]],
    phase3: Mapping[str, Any],
    *,
    rows: Sequence[ResultRow],
    drawings: Mapping[str, Drawing],
    pictures: Mapping[str, bytes],
    params: Mapping[str, Any],
    origin: Origin,
    environment: Mapping[str, Any],
    data: Mapping[str, Any],
) -> str:
    """The page; `pictures` are the drawings' SVGs."""
    entries = flat(params)
    head = ("model", *RESULT_COLUMNS[1:], "devices")
    columns, *results = without_empty_columns([head, *((*row.cells, row.devices or "") for row in rows)])
    changed = {change.key for change in origin.changes}
    return render(
        "report.html",
        files="report/figures",
        images=images(drawings.values(), pictures),
        noise=drawings["noise"].alt if "noise" in drawings else "",
        phase1=phase1,
        phase3=phase3,
        num_trained=sum(worker["epochs"] > 0 for worker in workers.values()),
        accuracies=[model["test_accuracy"] for model in models_before_averaging(phase1, workers)],
        slowest=max(worker["seconds"] for worker in workers.values()),
        result_columns=columns,
        results=results,
        result_classes={index: "marked" for index, row in enumerate(rows) if row.is_result},
        params=params,
        origin=origin,
        changes=[(change.key, _or_dash(change.here), _or_dash(change.recipe)) for change in origin.changes],
        entries=[(key, shown(value)) for key, value in entries.items()],
        entry_classes={index: "marked" for index, key in enumerate(entries) if key in changed},
        data=[("data set", str(params.get("data", {}).get("name"))), *_data(data)],
        parts=_parts(phase1, workers, phase3),
        environment=_environment(environment),
    )


def _or_dash(text: str | None) -> str:
    return "– (not set)" if text is None else text


def _data(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    classes = [str(name) for name in data["classes"]]
    channels, *size = data["shape"]
    pixels = "of any size, in their files" if None in size else f"of {'×'.join(map(str, size))} pixels"
    more = len(classes) - _CLASSES_SHOWN
    names = ", ".join(classes[:_CLASSES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
    splits = {"train": "training", "validation": "validation", "test": "test"}
    counts = [f"{data['images'][split]:,} {name}" for split, name in splits.items() if split in data["images"]]
    return [
        ("images", ", ".join(counts)),
        ("each", f"{channels} channel{'' if channels == 1 else 's'}, {pixels}"),
        ("classes", f"{len(classes):,}: {names}"),
    ]


def _parts(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Where and when each part ran."""
    of_workers = ((f"worker, seed {seed}", worker) for seed, worker in workers.items())
    ran = [("phase 1", phase1), *of_workers, ("phase 3", phase3)]
    return [(name, record.get("devices") or "not recorded", _when(record.get("ran"))) for name, record in ran]


def _when(span: Sequence[float] | None) -> str:
    if not span:
        return "not recorded"
    begun, ended = (datetime.datetime.fromtimestamp(moment, datetime.UTC) for moment in span)
    return f"{begun:%Y-%m-%d %H:%M} to {ended:%H:%M}"


def _environment(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    code = environment["code"]
    return [
        ("git commit", code["commit"] or "not in a git repository"),
        ("changes since", "not known" if code["changed"] is None else ", ".join(code["changed"]) or "none"),
        *([("experiment", code["experiment"])] if code["experiment"] else []),
        *([("its baseline", code["baseline"])] if code["baseline"] else []),
        ("system", environment["platform"]),
        *environment["versions"].items(),
    ]
