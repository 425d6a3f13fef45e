"""What plain training and SWA give beside SWAP, at what cost: the paper's Tables 1 to 4 from the records of all runs.

What is missing leaves a dash and a note. A quantity has one value in each repeat; tables show their mean, and under it
what the paper reports.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from swap_pipeline.comparison import (
    QUANTITIES,
    Comparison,
    Measured,
    Method,
    Record,
    Row,
    Runs,
    Table,
    by_method,
    is_known,
    make_rows,
    of_average,
    of_plain,
    of_swa,
    of_swap,
    of_workers,
    parts_of,
)
from swap_pipeline.instances import SWA_STARTS, Instance
from swap_pipeline.paper_figures import PLAIN_IN_PAPER, SWA_IN_PAPER, Figure, Paper
from swap_pipeline.report import aligned
from swap_pipeline.tables_words import (
    different_repeats,
    distinct,
    missing_parts,
    missing_start,
    not_recorded,
    other_samples,
    ratio,
    shared_captions,
    source,
)

DASH = "–"


def instances(*, seeds: Sequence[int], repeats: Sequence[int]) -> list[Instance]:
    """All runs whose records the tables show; `repeats` are the further ones, as in the params."""
    methods = ("swap", "small_batch", "large_batch", *SWA_STARTS)
    return [part for repeat in (0, *repeats) for method in methods for part in parts_of(method, repeat, seeds)]


def compare(
    records: Mapping[Instance, Record],
    *,
    seeds: Sequence[int],
    repeats: Sequence[int],
    epochs: int,
    cycles: int,
    recipe: str,
) -> Comparison:
    """Both tables, from the records that there are; epochs and cycles are those of phase 2."""
    wanted = {part: records[part] for part in instances(seeds=seeds, repeats=repeats) if part in records}
    for part in [part for part in wanted if part.method == "phase3"]:
        if wanted[part].get("models", len(seeds) * cycles) != len(seeds) * cycles:
            del wanted[part]  # the average of other workers than those that are listed
    runs = Runs(records=wanted, repeats=(0, *repeats), seeds=tuple(seeds), epochs=epochs, cycles=cycles)
    tables = (
        plain_table(runs, PLAIN_IN_PAPER.get(recipe, Paper())),
        swa_table(runs, SWA_IN_PAPER.get(recipe, Paper())),
    )
    return Comparison(recipe=recipe, repeats=runs.repeats, tables=tables)


def plain_table(runs: Runs, paper: Paper) -> Table:
    """Tables 1 to 3 of the paper."""
    small, large, swap = runs.complete("small_batch"), runs.complete("large_batch"), runs.complete("swap")
    measured: list[Method] = [
        ("small_batch", "SGD (small-batch)", {r: of_plain(run) for r, [run] in small.items()}),
        ("large_batch", "SGD (large-batch)", {r: of_plain(run) for r, [run] in large.items()}),
        ("swap_before", "SWAP (before averaging)", {r: of_workers(parts) for r, parts in swap.items()}),
        ("swap_after", "SWAP (after averaging)", {r: of_average(parts) for r, parts in swap.items()}),
    ]
    top5 = ("test_top5",) if is_known("test_top5", measured, paper) else ()
    columns = ("test_accuracy", *top5, "devices", "training_time", "total_compute")
    rows = make_rows(measured, columns, paper)
    shown = by_method(rows)
    return Table(
        key="plain_training",
        title="SWAP beside plain training",
        columns=columns,
        rows=rows,
        captions=(
            *shared_captions(runs, rows, ("small_batch", "large_batch", "phase1", "phase2", "phase3")),
            *ratio(shown["swap_after"], shown["small_batch"]),
            *source(paper),
        ),
        notes=(
            *(note for method in ("small_batch", "large_batch", "swap") for note in missing_parts(runs, method)),
            *not_recorded(rows, columns),
            *different_repeats(rows),
        ),
    )


def swa_table(runs: Runs, paper: Paper) -> Table:
    """Table 4 of the paper."""
    columns = ("before_averaging", "after_averaging", "training_time", "total_compute")
    titles = {
        "swa_large_batch": "Large-batch SWA",
        "swa_large_then_small": "Large-batch followed by small-batch SWA",
        "swa_small_batch": "Small-batch SWA",
    }
    epochs = "1 small-batch epoch" if runs.epochs == 1 else f"{runs.epochs} small-batch epochs"
    measured: list[Method] = [
        *((method, titles[method], of_swa(runs, method)) for method in SWA_STARTS),
        ("swap", f"SWAP ({epochs})", {r: of_swap(parts) for r, parts in runs.complete("swap").items()}),
    ]
    rows = make_rows(measured, (*columns, "devices"), paper)
    shown = by_method(rows)
    return Table(
        key="swa",
        title="SWA beside SWAP",
        columns=columns,
        rows=rows,
        captions=(
            "Before averaging: the mean over the sampled models, of SWAP over the workers.",
            "Training time of SWA: the run that it starts from (large batch, phase 1, small batch), then its cycles, "
            "one after another, and the average.",
            *shared_captions(runs, rows, ("large_batch", "phase1", "small_batch", *SWA_STARTS, "phase2", "phase3")),
            *ratio(shown["swap"], shown["swa_small_batch"]),
            *source(paper),
        ),
        notes=(
            *(note for method in (*SWA_STARTS, "swap") for note in missing_parts(runs, method)),
            *(note for method in SWA_STARTS for note in missing_start(runs, method)),
            *(note for method in SWA_STARTS for note in other_samples(runs, method)),
            *not_recorded(rows, (*columns, "devices")),
            *different_repeats(rows),
        ),
    )


def markdown(comparison: Comparison) -> str:
    """Both tables with their captions and notes; reads well as it is, too."""
    return "# Comparisons\n\n" + "\n".join(map(_table_markdown, comparison.tables))


def _table_markdown(table: Table) -> str:
    rows = [("method", *(QUANTITIES[key].title for key in table.columns))]
    bold = {key: best_rows(key, [row.measured[key] for row in table.rows]) for key in table.columns}
    for i, row in enumerate(table.rows):
        cells = ((cell(key, row.measured[key]), i in bold[key]) for key in table.columns)
        rows.append((row.title, *(f"**{text}**" if is_best else text for text, is_best in cells)))
        if row.paper:
            rows.append(("*paper*", *(paper_cell(key, row.paper.get(key)) for key in table.columns)))
    lines = [f"- {line}" for line in table.captions]
    if table.notes:
        lines += ["", "Notes:", "", *(f"- {note}" for note in table.notes)]
    return f"## {table.title}\n\n{aligned(rows)}\n\n" + "\n".join(lines) + "\n"


def cell(key: str, measured: Measured) -> str:
    """`95.24 ± 0.09`; without ± for one value, and for devices, which are counted."""
    if measured.mean is None:
        return DASH
    if key == "devices":
        return distinct(measured)
    digits = QUANTITIES[key].digits
    spread = "" if measured.std is None else f" ± {measured.std:.{digits}f}"
    return f"{measured.mean:.{digits}f}{spread}"


def paper_cell(key: str, figure: Figure | None) -> str:
    if figure is None:
        return DASH
    return figure.text if figure.unit == QUANTITIES[key].unit else f"{figure.text} {figure.unit}"


def best_rows(key: str, column: Sequence[Measured]) -> set[int]:
    """Positions of the best mean, by the digits that are shown; none where there is nothing to compare."""
    best, digits = QUANTITIES[key].best, QUANTITIES[key].digits
    shown = {i: float(f"{entry.mean:.{digits}f}") for i, entry in enumerate(column) if entry.mean is not None}
    if best is None or len(shown) < 2:
        return set()
    return {i for i, value in shown.items() if value == best(shown.values())}


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, each repeat's values too: tables, then methods, then quantities, by name."""
    return {
        "recipe": comparison.recipe,
        "repeats": list(comparison.repeats),
        "tables": {
            table.key: {
                "title": table.title,
                "columns": list(table.columns),
                "rows": {row.method: _row_json(row) for row in table.rows},
                "captions": list(table.captions),
                "notes": list(table.notes),
            }
            for table in comparison.tables
        },
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "title": row.title,
        "quantities": {
            key: {
                "unit": QUANTITIES[key].unit,
                "mean": measured.mean,
                "std": measured.std,
                "n": measured.n,
                "repeats": {str(repeat): value for repeat, value in measured.values.items()},
                "paper": _figure_json(row.paper.get(key)),
            }
            for key, measured in row.measured.items()
        },
    }


def _figure_json(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {"mean": figure.mean, "std": figure.std, "text": figure.text, "unit": figure.unit}


def as_csv(comparison: Comparison) -> str:
    """One line for each quantity of each method in each table.

    `mean`, `std` and the values of the repeats, in columns `repeat_0`, `repeat_1`, …, are in `unit`; the paper's
    figures are in `paper_unit`. What is missing is empty.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    of_repeats = (f"repeat_{repeat}" for repeat in comparison.repeats)
    of_paper = ("paper_mean", "paper_std", "paper_unit")
    writer.writerow(("table", "method", "quantity", "unit", "mean", "std", "n", *of_paper, *of_repeats))
    for table in comparison.tables:
        for row in table.rows:
            for key, entry in row.measured.items():
                figure = row.paper.get(key)
                paper = (None,) * 3 if figure is None else (figure.mean, figure.std, figure.unit)
                values = (entry.values.get(repeat) for repeat in comparison.repeats)
                head = (table.key, row.method, key, QUANTITIES[key].unit)
                writer.writerow((*head, entry.mean, entry.std, entry.n, *paper, *values))
    return text.getvalue()
