"""`comparisons/index.html`: SWAP beside plain training and SWA, from `comparisons/tables.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swap_pipeline.comparison import QUANTITIES, Measured
from swap_pipeline.figures import Drawing
from swap_pipeline.instances import SWA_STARTS
from swap_pipeline.page import Html, bullets, commands, element, page, paragraph, picture, section, table
from swap_pipeline.paper_figures import Figure
from swap_pipeline.tables import best_rows, cell, paper_cell

_FILES = "comparisons/figures"


def comparisons_page(
    tables: Mapping[str, Any], *, drawings: Mapping[str, Drawing], pictures: Mapping[str, bytes]
) -> str:
    """`pictures` are the drawings as SVG; that of times is missing if nothing has run."""
    repeats = len(tables["repeats"])
    return page(
        "SWAP beside plain training and SWA",
        lead=f"Recipe {tables['recipe']}, {repeats} repeat{'' if repeats == 1 else 's'}.",
        content=[
            section("Accuracy against time", _times(drawings, pictures)),
            *(section(entry["title"], *_table(entry)) for entry in tables["tables"].values()),
            section(
                "How the models to average come about",
                picture(
                    drawings["swa"],
                    pictures["swa"],
                    caption="Learning rates of SWA's variants and of SWAP as `params.yaml` has them, as in Figure 6 of "
                    "the paper. SWA samples one model after another; SWAP's workers run side by side.",
                    files=_FILES,
                ),
            ),
            section("Go on", commands(_COMMANDS)),
        ],
    )


_COMMANDS = {
    "dvc repro": "the run itself: `report/index.html`",
    "dvc repro comparisons/dvc.yaml": "whatever is missing here",
    "dvc repro analysis/dvc.yaml": "landscapes, directions, choices of workers: `analysis/index.html`",
}


# JSON has the rows by name.
_ORDER = ("small_batch", "large_batch", "swap_before", "swap_after", *SWA_STARTS, "swap")


def _times(drawings: Mapping[str, Drawing], pictures: Mapping[str, bytes]) -> Html:
    if "accuracy_time" not in drawings:
        return paragraph("Nothing has run to its end yet: `dvc repro comparisons/dvc.yaml`.")
    return picture(
        drawings["accuracy_time"],
        pictures["accuracy_time"],
        caption="Each method's mean over repeats, with standard deviations; small marks are single repeats. Time is "
        "that of training alone, for SWAP with its workers side by side.",
        files=_FILES,
    )


def _table(entry: Mapping[str, Any]) -> list[Html]:
    columns = entry["columns"]
    in_order = {method: entry["rows"][method] for method in _ORDER if method in entry["rows"]}
    measured = {
        method: {key: Measured(row["quantities"][key]["repeats"]) for key in columns}
        for method, row in in_order.items()
    }
    best = {key: best_rows(key, [values[key] for values in measured.values()]) for key in columns}
    rows: list[tuple[Any, ...]] = []
    of_paper = []
    for index, (method, row) in enumerate(in_order.items()):
        cells = ((cell(key, measured[method][key]), index in best[key]) for key in columns)
        rows.append((row["title"], *(element("strong", text) if is_best else text for text, is_best in cells)))
        figures = {key: row["quantities"][key]["paper"] for key in columns}
        if any(figures.values()):
            of_paper.append(len(rows))
            rows.append(("paper", *(_paper_cell(key, figure) for key, figure in figures.items())))
    told = [
        table(
            ("method", *(QUANTITIES[key].title for key in columns)),
            rows,
            caption="The best of each column is bold.",
            faint=of_paper,
        ),
        bullets(entry["captions"]),
    ]
    if entry["notes"]:
        told += [element("h3", "Notes"), bullets(entry["notes"])]
    return told


def _paper_cell(key: str, figure: Mapping[str, Any] | None) -> str:
    return paper_cell(key, None if figure is None else Figure(text=figure["text"], unit=figure["unit"]))
