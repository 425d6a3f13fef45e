"""Tables as Markdown, JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from swap_pipeline.cli.compare.measured import Measured
from swap_pipeline.cli.compare.paper_numbers import Figure
from swap_pipeline.cli.compare.tables import QUANTITIES, Row, Table, Tables
from swap_pipeline.report.summary import aligned

DASH = "–"
TIMES = (
    "Mean ± sample standard deviation over seeds. Differences to SWAP are paired differences in accuracy, with a 95 % "
    "confidence interval (Student's t) for three seeds or more. Times are of training alone; SWAP's assumes that all "
    "workers train at the same time; device-seconds count all devices."
)


def columns_of(table: Table) -> tuple[str, ...]:
    return ("method", "seeds", *(QUANTITIES[key].title for key in table.columns), "difference to SWAP")


def cells_of(table: Table) -> list[tuple[tuple[str, ...], frozenset[int]]]:
    """The rows of a table, each with the positions of cells that are the best in their column; below a method, the
    paper's values."""
    best = {key: best_rows(key, [row.measured[key] for row in table.rows]) for key in table.columns}
    lines: list[tuple[tuple[str, ...], frozenset[int]]] = []
    for number, row in enumerate(table.rows):
        n = max(measured.n for measured in row.measured.values())
        values = (cell(key, row.measured[key]) for key in table.columns)
        strong = frozenset(2 + place for place, key in enumerate(table.columns) if number in best[key])
        lines.append(((row.title, str(n), *values, _difference(row.minus_swap.get(table.accuracy))), strong))
        if row.paper:
            figures = (paper_cell(key, row.paper.get(key)) for key in table.columns)
            lines.append((("paper", "", *figures, ""), frozenset()))
    return lines


def markdown(tables: Tables, *, bold: bool = True) -> str:
    """All tables with their notes; without `bold`, for a terminal."""
    parts = [f"# Recipe {tables.recipe}"]
    for table in tables.tables:
        rows = [columns_of(table)]
        for cells, strong in cells_of(table):
            rows.append(tuple(f"**{text}**" if bold and i in strong else text for i, text in enumerate(cells)))
        parts.append(f"## {table.title}\n\n{aligned(rows)}")
        if table.source:
            parts.append(f"paper: {table.source}.")
    parts.append(TIMES)
    if tables.notes:
        parts.append("Notes:\n\n" + "\n".join(f"- {note}" for note in tables.notes))
    return "\n\n".join(parts) + "\n"


def cell(key: str, measured: Measured) -> str:
    """`95.24 ± 0.09`; without ± for a single value and for devices."""
    if measured.mean is None:
        return DASH
    if key == "devices":
        return " or ".join(f"{value:g}" for value in sorted(set(measured.values.values())))
    digits = QUANTITIES[key].digits
    spread = "" if measured.std is None else f" ± {measured.std:.{digits}f}"
    return f"{measured.mean:.{digits}f}{spread}"


def _difference(measured: Measured | None) -> str:
    if measured is None or measured.mean is None:
        return "" if measured is None else DASH
    interval = "" if measured.interval is None else " [{:+.2f}, {:+.2f}]".format(*measured.interval)
    return f"{measured.mean:+.2f}{interval}"


def paper_cell(key: str, figure: Figure | None) -> str:
    if figure is None:
        return DASH
    return figure.text if figure.unit == QUANTITIES[key].unit else f"{figure.text} {figure.unit}"


def best_rows(key: str, column: Sequence[Measured]) -> set[int]:
    """Positions of the best mean, as displayed; none if there is nothing to compare."""
    best, digits = QUANTITIES[key].best, QUANTITIES[key].digits
    shown = {i: float(f"{entry.mean:.{digits}f}") for i, entry in enumerate(column) if entry.mean is not None}
    if best is None or len(shown) < 2:
        return set()
    return {i for i, value in shown.items() if value == best(shown.values())}


def as_json(tables: Tables) -> dict[str, Any]:
    """Everything, including each seed's values."""
    return {
        "recipe": tables.recipe,
        "tables": [
            {
                "key": table.key,
                "title": table.title,
                "rows": [{"method": row.key, "title": row.title, "quantities": _quantities(row)} for row in table.rows],
                "source": table.source,
            }
            for table in tables.tables
        ],
        "notes": list(tables.notes),
    }


def _quantities(row: Row) -> dict[str, Any]:
    return {
        key: {
            "unit": QUANTITIES[key].unit,
            **_measured_json(measured),
            "minus_swap": _difference_json(row.minus_swap.get(key)),
            "paper": _figure_json(row.paper.get(key)),
        }
        for key, measured in row.measured.items()
    }


def _measured_json(measured: Measured) -> dict[str, Any]:
    seeds = {str(seed): value for seed, value in measured.values.items()}
    return {"mean": measured.mean, "std": measured.std, "n": measured.n, "seeds": seeds}


def _difference_json(measured: Measured | None) -> dict[str, Any] | None:
    return None if measured is None else {**_measured_json(measured), "interval": measured.interval}


def _figure_json(figure: Figure | None) -> dict[str, Any] | None:
    return None if figure is None else {"mean": figure.mean, "std": figure.std, "unit": figure.unit}


def as_csv(tables: Tables) -> str:
    """One line for each quantity of each method in each table; missing values are empty.

    `mean`, `std`, differences and the seeds' values are in `unit`, the paper's values in `paper_unit`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    of_difference = ("minus_swap", "minus_swap_low", "minus_swap_high")
    of_paper = ("paper_mean", "paper_std", "paper_unit")
    of_seeds = (f"seed_{seed}" for seed in tables.seeds)
    writer.writerow(("table", "method", "quantity", "unit", "mean", "std", "n", *of_difference, *of_paper, *of_seeds))
    for table in tables.tables:
        for row in table.rows:
            for key, entry in row.measured.items():
                difference, figure = row.minus_swap.get(key, Measured({})), row.paper.get(key)
                paper = (None,) * 3 if figure is None else (figure.mean, figure.std, figure.unit)
                values = (entry.values.get(seed) for seed in tables.seeds)
                head = (table.key, row.key, key, QUANTITIES[key].unit, entry.mean, entry.std, entry.n)
                writer.writerow((*head, difference.mean, *(difference.interval or (None, None)), *paper, *values))
    return text.getvalue()
