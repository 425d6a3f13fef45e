"""`report/index.html`: one run of SWAP for people."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from swap_pipeline.durations import duration
from swap_pipeline.figures import Drawing
from swap_pipeline.page import Html, bullets, commands, folded, page, paragraph, picture, section, table, tiles
from swap_pipeline.provenance import Origin, flat, shown
from swap_pipeline.report import RESULT_COLUMNS, ResultRow, summarise

_FILES = "report/figures"
_CLASSES_SHOWN = 20


def report_page(
    phase1: Mapping[str, Any],
    workers: Mapping[int, Mapping[str, Any]],
    phase3: Mapping[str, Any],
    averaged: Mapping[str, Any],
    *,
    rows: Sequence[ResultRow],
    drawings: Mapping[str, Drawing],
    pictures: Mapping[str, bytes],
    params: Mapping[str, Any],
    origin: Origin,
    environment: Mapping[str, Any],
    data: Mapping[str, Any],
) -> str:
    """All of it, from the records; `pictures` are the drawings as SVG."""
    return page(
        "SWAP report",
        lead=_lead(params, len(workers)),
        content=[
            _headline(phase1, workers, phase3),
            section(
                "The course of the run",
                picture(drawings["training"], pictures["training"], caption=_training_caption(averaged), files=_FILES),
            ),
            section("Results", _results(rows), bullets(_RESULTS_EXPLAINED)),
            section("Go on", commands(_COMMANDS)),
            section(
                "Schedules",
                picture(
                    drawings["schedules"],
                    pictures["schedules"],
                    caption="Learning rate and batch size by epoch as `params.yaml` has them, with the baselines that "
                    "SWAP is compared with; phase 2 begins where phase 1 ends at the latest.",
                    files=_FILES,
                ),
            ),
            section("Params", *_params(params, origin)),
            section("Data", *_data(params, data)),
            section("Environment", *_environment(phase1, workers, phase3, environment)),
        ],
    )


def gain(workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]) -> float:
    """SWAP's points over the mean of its workers."""
    mean = statistics.fmean(worker["test_accuracy"] for worker in workers.values())
    return float(phase3["test_accuracy"] - mean)


def _lead(params: Mapping[str, Any], num_workers: int) -> str:
    data, model = params.get("data", {}).get("name"), params.get("model", {}).get("name")
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"Recipe {params.get('recipe')}: {model} on {data}, {workers}, averaged."


def _headline(phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]) -> Html:
    summary = summarise(phase1, workers, phase3)
    mean, best = summary["workers"]["test_accuracy_mean"], summary["workers"]["test_accuracy_best"]
    over_mean = gain(workers, phase3)
    over_best = phase3["test_accuracy"] - best
    time = summary["time"]
    return tiles(
        [
            (
                "SWAP's test accuracy",
                f"{phase3['test_accuracy']:.2f} %",
                f"loss {phase3['test_loss']:.4f}; phase 1 had {phase1['test_accuracy']:.2f} %",
            ),
            (
                "gain over the workers' mean",
                f"{_signed(over_mean)} points",
                f"mean {mean:.2f} %; {_signed(over_best)} over the best worker, {best:.2f} %",
            ),
            (
                "critical path",
                duration(time["critical_path_seconds"]),
                f"phase 1: {duration(time['phase1_seconds'])}; slowest worker: {duration(time['phase2_seconds_max'])}; "
                f"phase 3: {duration(time['phase3_seconds'])}",
            ),
        ]
    )


def _signed(points: float) -> str:
    return f"{points:+.2f}".replace("-", "−")


def _training_caption(averaged: Mapping[str, Any]) -> str:
    text = (
        "Learning rate and test accuracy over the epochs, as in Figure 1 of the paper: one model in phase 1, then "
        "independent workers, and the average of their weights as if phase 2 had ended at that epoch."
    )
    if len(averaged["points"]) < 2:
        text += " Of the average only the end is known: set `phase2.keep_epochs` to `all` for its course."
    return text


def _results(rows: Sequence[ResultRow]) -> Html:
    return table(
        ("model", *RESULT_COLUMNS[1:], "devices"),
        [(*row.cells, row.devices or "") for row in rows],
        caption="Test accuracy in percent; seconds of training alone.",
        marked=[index for index, row in enumerate(rows) if row.is_result],
    )


_RESULTS_EXPLAINED = (
    "**phase 1**: one model, trained with large batches on all devices.",
    "**worker**: that model, refined with small batches under one seed. **mean**: over the workers, ± one standard "
    "deviation.",
    "**SWAP**: the average of the workers' weights, with batch-norm statistics of its own.",
    "**critical path**: phase 1, the slowest worker and phase 3, which is what a run takes with devices for every "
    "worker. Evaluation and start-up are in no time.",
)
_COMMANDS = {
    "dvc repro comparisons/dvc.yaml": "plain training with small and with large batches, and three kinds of SWA, "
    "beside this run: `comparisons/index.html`",
    "dvc repro analysis/dvc.yaml": "error landscapes, directions, choices and distances of workers: "
    "`analysis/index.html`",
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
