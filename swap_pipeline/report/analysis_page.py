"""`analysis/index.html`: what the analysis found. What it could not find, the page says, and what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from swap_pipeline.report.durations import duration
from swap_pipeline.report.figures import Drawing
from swap_pipeline.report.figures_analysis import draw_cosine, draw_landscape, draw_pairs, draw_subsets
from swap_pipeline.report.page import Html, commands, element, page, paragraph, picture, section, table

Record = Mapping[str, Any]
_FILES = "analysis/figures"


def draw_analysis(records: Mapping[str, Record | None]) -> list[Drawing]:
    """All pictures that can be drawn of `landscape`, `cosine` and `workers`."""
    landscape, cosine, workers = (records.get(name) or {} for name in ("landscape", "cosine", "workers"))
    return [
        *(draw_landscape(plane) for plane in landscape.get("planes", ())),
        *([draw_cosine(cosine["points"])] if cosine.get("points") else []),
        *([draw_subsets(workers["subsets"])] if workers.get("subsets") else []),
        *([draw_pairs(workers)] if len(workers.get("seeds", ())) > 1 else []),
    ]


def analysis_page(
    records: Mapping[str, Record | None], *, drawings: Mapping[str, Drawing], pictures: Mapping[str, bytes]
) -> str:
    """From the records, each of which may be missing; `pictures` are the drawings as SVG."""
    return page(
        "SWAP analysis",
        lead="Why the average is better than its parts, and whether more workers would help.",
        content=[
            section("Error landscapes", *_landscapes(records.get("landscape"), drawings, pictures)),
            section("Directions", *_directions(records.get("cosine"), drawings, pictures)),
            section("How many workers", *_workers(records.get("workers"), drawings, pictures)),
            section("Go on", commands(_COMMANDS)),
        ],
    )


_COMMANDS = {
    "dvc repro": "the run itself: `report/index.html`",
    "swap compare": "SWAP beside plain training and SWA: `tables/index.html`",
    "dvc exp run -S 'workers.seeds=[0,1,2,3,4,5,6,7]'": "the same run with more workers; those that there are stay",
}
_CAPTIONS = {
    "phases": "The plane through the output of phase 1 (LB), of one worker (SGD) and of SWAP, as in Figure 2 of the "
    "paper.",
    "workers": "The plane through three workers, as in Figure 3 of the paper: SWAP is projected onto it, BEST is the "
    "lowest test error of the grid.",
}


def _landscapes(record: Record | None, drawings: Mapping[str, Drawing], pictures: Mapping[str, bytes]) -> list[Html]:
    if record is None:
        return [_not_run("landscape")]
    told = [
        paragraph(
            f"Errors on a grid of {record['grid']} × {record['grid']} models. At each, batch-norm statistics and train "
            f"error are of {_number(record['train_images'])} training images, the test error is of "
            f"{_number(record['test_images'])} test images{_cost(record)}. Levels are close together near the minimum "
            f"and far apart up the walls."
        )
    ]
    for plane in record["planes"]:
        name = f"landscape_{plane['name']}"
        told += [
            element("h3", plane["title"]),
            picture(drawings[name], pictures[name], caption=_CAPTIONS.get(plane["name"], ""), files=_FILES),
            table(
                ("model", "train error (%)", "test error (%)", "distance from the plane"),
                [
                    (mark["name"], f"{mark['train_error']:.2f}", f"{mark['test_error']:.2f}", _distance(mark))
                    for mark in plane["marks"]
                ],
                caption="The marked models.",
            ),
        ]
    for absent in record.get("left_out", ()):
        told.append(paragraph(f"The plane {absent['name']} is left out: {absent['why']}."))
    return told


def _distance(mark: Record) -> str:
    return f"{mark['distance']:.2f}" if mark.get("projected") else "on it"


def _directions(record: Record | None, drawings: Mapping[str, Drawing], pictures: Mapping[str, bytes]) -> list[Html]:
    if record is None:
        return [_not_run("cosine")]
    if not record["points"]:
        return [
            paragraph(
                "No models on the way were kept: set `phase1.keep_epochs` and `phase2.keep_epochs` in `params.yaml`, "
                "to `all` or a list of epochs, and run `dvc repro` and `dvc --cd analysis repro` again."
            )
        ]
    ends = {point["run"]: point for point in sorted(record["points"], key=lambda point: float(point["epoch"]))}
    return [
        picture(
            drawings["cosine"],
            pictures["cosine"],
            caption="Cosine between the direction of descent, −gradient, and the direction from the model to SWAP's "
            "result, as in Figure 4 of the paper. Near 0, another step of SGD hardly leads there; averaging does. "
            f"Gradients are of {_number(record['images'])} training images.",
            files=_FILES,
        ),
        table(
            ("run", "epoch", "cosine", "gradient norm", "distance to SWAP"),
            [
                (
                    _run_name(run),
                    point["epoch"],
                    f"{point['cosine']:.4f}".replace("-", "−"),
                    f"{point['gradient_norm']:.4f}",
                    f"{point['distance']:.3f}",
                )
                for run, point in ends.items()
            ],
            caption="The last model of each run.",
        ),
    ]


def _run_name(run: str) -> str:
    return "phase 1" if run == "phase1" else run.replace("seed_", "worker, seed ")


def _workers(record: Record | None, drawings: Mapping[str, Drawing], pictures: Mapping[str, bytes]) -> list[Html]:
    if record is None:
        return [_not_run("workers")]
    told: list[Html] = []
    if record["subsets"]:
        told += [
            paragraph(_would_more_help(record["subsets"])),
            picture(
                drawings["workers_accuracy"],
                pictures["workers_accuracy"],
                caption="Test accuracy of averages of so many workers, each with batch-norm statistics of its own: "
                "single choices of workers, their mean and standard deviation.",
                files=_FILES,
            ),
        ]
    if "workers_pairs" in drawings:
        told.append(
            picture(
                drawings["workers_pairs"],
                pictures["workers_pairs"],
                caption="How far apart the workers are, and the cosines between their ways from phase 1's model (LB): "
                "at 1 they went the same way and there is nothing to average, at 0 each went its own. The norm of "
                f"phase 1's weights is {record['norm_of_phase1']:.2f}.",
                files=_FILES,
            )
        )
    if len(record["seeds"]) < 2:
        told.append(paragraph("With one worker there is nothing to choose or compare: add to `workers.seeds`."))
    return told


def _would_more_help(subsets: Sequence[Record]) -> str:
    by_size: dict[int, list[float]] = {}
    for subset in subsets:
        by_size.setdefault(subset["size"], []).append(subset["test_accuracy"])
    sizes = sorted(by_size)
    if len(sizes) < 2:
        return "Only averages of one size are known."
    before, last = (statistics.fmean(by_size[size]) for size in sizes[-2:])
    alone = statistics.fmean(by_size[sizes[0]])
    gained = f"{last - alone:+.2f}".replace("-", "−")
    step = f"{last - before:+.2f}".replace("-", "−")
    return (
        f"Averaging {sizes[-1]} workers gives {gained} points over {sizes[0]}; the last step, from {sizes[-2]} to "
        f"{sizes[-1]}, gives {step}. If the curve still rises at its end, more workers would help."
    )


def _not_run(stage: str) -> Html:
    return paragraph(f"Not computed yet: `dvc --cd analysis repro {stage}`.")


def _number(count: Any) -> str:
    return f"{count:,}" if isinstance(count, int) else str(count)


def _cost(record: Record) -> str:
    return f"; {duration(record['seconds'])} on {record.get('devices')}" if record.get("seconds") is not None else ""
