"""`report/index.html`: one run of SWAP for people."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from swap_pipeline.report.durations import duration
from swap_pipeline.report.figures import Drawing
from swap_pipeline.report.page import Html, bullets, commands, folded, page, paragraph, picture, section, table, tiles
from swap_pipeline.report.provenance import Origin, flat, shown
from swap_pipeline.report.summary import RESULT_COLUMNS, ResultRow, models_before_averaging

_FILES = "report/figures"
_CLASSES_SHOWN = 20


def report_page(
    phase1: Mapping[str, Any],
    workers: Mapping[int, Mapping[str, Any]],
    phase3: Mapping[str, Any],
    *,
    cycles: int,
    rows: Sequence[ResultRow],
    drawings: Mapping[str, Drawing],
    pictures: Mapping[str, bytes],
    params: Mapping[str, Any],
    origin: Origin,
    environment: Mapping[str, Any],
    data: Mapping[str, Any],
) -> str:
    """All of it, from the records; `pictures` are the drawings as SVG."""
    num_trained = sum(worker["epochs"] > 0 for worker in workers.values())
    return page(
        "SWAP report",
        lead=_lead(params, num_trained),
        content=[
            _headline(phase1, workers, phase3, cycles=cycles),
            section(
                "The course of the run",
                picture(
                    drawings["training"],
                    pictures["training"],
                    caption=_training_caption(phase3["points"] if num_trained else None),
                    files=_FILES,
                ),
            ),
            section("Results", _results(rows), bullets(_explained(num_trained, averages=phase3["models"] > 1))),
            section("Go on", commands(_COMMANDS)),
            section(
                "Schedules",
                picture(
                    drawings["schedules"],
                    pictures["schedules"],
                    caption="Learning rate and batch size by epoch as `params.yaml` has them"
                    + ("; phase 2 begins where phase 1 ends at the latest." if num_trained else "."),
                    files=_FILES,
                ),
            ),
            section("Params", *_params(params, origin)),
            section("Data", *_data(params, data)),
            section("Environment", *_environment(phase1, workers, phase3, environment)),
        ],
    )


def _lead(params: Mapping[str, Any], num_workers: int) -> str:
    data, model = params.get("data", {}).get("name"), params.get("model", {}).get("name")
    workers = {0: "", 1: ", 1 worker"}.get(num_workers, f", {num_workers} workers")
    method = params.get("method", "swap")
    return f"Recipe {params.get('recipe')}, method {method}: {model} on {data}{workers}, seed {params.get('seed')}."


def _headline(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any], *, cycles: int
) -> Html:
    accuracies = [model["test_accuracy"] for model in models_before_averaging(phase1, workers, cycles=cycles)]
    mean, best = statistics.fmean(accuracies), max(accuracies)
    slowest = max(worker["seconds"] for worker in workers.values())
    gained = (
        "gain over the workers' mean",
        f"{_signed(phase3['test_accuracy'] - mean)} points",
        f"mean {mean:.2f} %; {_signed(phase3['test_accuracy'] - best)} over the best worker, {best:.2f} %",
    )
    return tiles(
        [
            (
                "test accuracy",
                f"{phase3['test_accuracy']:.2f} %",
                f"loss {phase3['test_loss']:.4f}; phase 1 had {phase1['test_accuracy']:.2f} %",
            ),
            *([gained] if len(accuracies) > 1 else []),
            (
                "critical path",
                duration(phase1["seconds"] + slowest + phase3["seconds"]),
                f"phase 1: {duration(phase1['seconds'])}; {f'slowest worker: {duration(slowest)}; ' if slowest else ''}"
                f"phase 3: {duration(phase3['seconds'])}",
            ),
        ]
    )


def _signed(points: float) -> str:
    return f"{points:+.2f}".replace("-", "−")


def _training_caption(points: Sequence[Mapping[str, Any]] | None) -> str:
    if points is None:
        return "Learning rate and test accuracy by epoch."
    text = (
        "Learning rate and test accuracy over the epochs, as in Figure 1 of the paper: one model in phase 1, then "
        "independent workers, and the average of their weights as if phase 2 had ended at that epoch."
    )
    if len(points) < 2:
        text += " Of the average only the end is known: set `phase2.keep_epochs` to `all` for its course."
    return text


def _results(rows: Sequence[ResultRow]) -> Html:
    return table(
        ("model", *RESULT_COLUMNS[1:], "devices"),
        [(*row.cells, row.devices or "") for row in rows],
        caption="Test accuracy in percent; seconds of training alone.",
        marked=[index for index, row in enumerate(rows) if row.is_result],
    )


def _explained(num_trained: int, *, averages: bool) -> list[str]:
    """What the rows of the results are."""
    return [
        "**phase 1**: one model, trained on all devices.",
        *(["**worker**: that model, refined under one seed."] if num_trained else []),
        *(["**mean**: of the models that are averaged, ± one standard deviation."] if num_trained and averages else []),
        "**average**: the mean of their weights, with batch-norm statistics of its own."
        if averages
        else "**final model**: the one model that there is.",
        "**critical path**: phase 1, the slowest worker and phase 3, which is what a run takes with devices for every "
        "worker. Times exclude evaluation and start-up.",
    ]


_COMMANDS = {
    "swap compare": "plain training with small and with large batches, and SWA, as experiments beside this run",
    "dvc --cd analysis repro": "error landscapes, directions, choices and distances of workers: `analysis/index.html`",
    "dvc plots show": "the pictures and curves as DVC plots; `dvc plots diff` those of several experiments",
    "swap predict IMAGE": "the class of an image, by the averaged network",
}


def _params(params: Mapping[str, Any], origin: Origin) -> list[Html]:
    changed = {change.key for change in origin.changes}
    entries = flat(params)
    if origin.problem:
        told = [paragraph(f"params.yaml names the recipe {origin.recipe}: {origin.problem}.")]
    elif not changed:
        told = [paragraph(f"Exactly those of the recipe {origin.recipe}.")]
    else:
        told = [
            table(
                ("param", "this run", f"recipe {origin.recipe}"),
                [(change.key, _or_dash(change.here), _or_dash(change.recipe)) for change in origin.changes],
                caption=f"What differs from the recipe {origin.recipe}.",
                numbers=False,
            )
        ]
    listing = table(
        ("param", "value"),
        [(key, shown(value)) for key, value in entries.items()],
        caption="params.yaml; what differs from the recipe is marked." if changed else "params.yaml",
        marked=[index for index, key in enumerate(entries) if key in changed],
        numbers=False,
    )
    return [*told, folded(f"All {len(entries)} params", listing)]


def _or_dash(text: str | None) -> str:
    return "– (not there)" if text is None else text


def _data(params: Mapping[str, Any], data: Mapping[str, Any]) -> list[Html]:
    classes = [str(name) for name in data["classes"]]
    channels, *size = data["shape"]
    pixels = "of any size, in their files" if None in size else f"of {'×'.join(map(str, size))} pixels"
    more = len(classes) - _CLASSES_SHOWN
    names = ", ".join(classes[:_CLASSES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
    return [
        table(
            (),
            [
                ("data set", str(params.get("data", {}).get("name"))),
                ("images", f"{channels} channel{'' if channels == 1 else 's'}, {pixels}"),
                ("classes", f"{len(classes):,}: {names}"),
            ],
            caption="What was learned from.",
            numbers=False,
        )
    ]


def _environment(
    phase1: Mapping[str, Any],
    workers: Mapping[int, Mapping[str, Any]],
    phase3: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> list[Html]:
    ran = [
        ("phase 1", phase1),
        *((f"worker, seed {seed}", worker) for seed, worker in workers.items()),
        ("phase 3", phase3),
    ]
    where = [(name, record.get("devices") or "not recorded", _when(record.get("ran"))) for name, record in ran]
    code = environment["code"]
    facts = [
        ("git commit", code["commit"] or "not in a git repository"),
        ("changes since", _changes(code["changed"])),
        *([("experiment", code["experiment"])] if code["experiment"] else []),
        *([("its baseline", code["baseline"])] if code["baseline"] else []),
        ("system", environment["platform"]),
        *environment["versions"].items(),
    ]
    return [
        table(("part", "devices", "time (UTC)"), where, caption="Where and when it ran.", numbers=False),
        table((), facts, caption="Code and versions when this page was written.", numbers=False),
    ]


def _changes(changed: Sequence[str] | None) -> str:
    if changed is None:
        return "not known"
    return ", ".join(changed) if changed else "none"


def _when(span: Sequence[float] | None) -> str:
    if not span:
        return "not recorded"
    begun, ended = (datetime.datetime.fromtimestamp(moment, datetime.UTC) for moment in span)
    return f"{begun:%Y-%m-%d %H:%M} to {ended:%H:%M}"
