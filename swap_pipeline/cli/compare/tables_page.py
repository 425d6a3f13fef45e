"""The tables as a page, with a figure of accuracy against time for all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swap_pipeline.cli.compare.measured import Measured
from swap_pipeline.cli.compare.tables import Table, Tables
from swap_pipeline.cli.compare.tables_text import TIMES, cells_of, columns_of
from swap_pipeline.report.figures import COLOURS, Drawing, grid, name_bars, new_figure, style
from swap_pipeline.report.page import images, render

_LOOKS = {
    "small_batch": (COLOURS["small_batch"], "D"),
    "small_batch_ema": (COLOURS["small_batch"], "d"),
    "large_batch": (COLOURS["large_batch"], "s"),
    "large_batch_ema": (COLOURS["large_batch"], "p"),
    "swap_before": (COLOURS["phase2"], "v"),
    "swap_after": (COLOURS["swap"], "o"),
    "swap_40": (COLOURS["swap"], "h"),
    "swa_large_batch": (COLOURS["swa"], "s"),
    "swa_large_then_small": (COLOURS["swa"], "^"),
    "swa_small_batch": (COLOURS["swa"], "D"),
}
"""Colour and shape of each method."""
_OTHERS = (COLOURS["best"], "X")


def tables_page(tables: Tables, drawings: Sequence[Drawing], pictures: Mapping[str, bytes]) -> str:
    """`pictures` are the drawings' SVGs by name."""
    return render(
        "tables.html",
        files="figures",
        images=images(drawings, pictures),
        recipe=tables.recipe,
        seeds=tables.seeds,
        tables=[_for_people(table) for table in tables.tables],
        times=TIMES,
        notes=tables.notes,
    )


def _for_people(table: Table) -> dict[str, Any]:
    lines = cells_of(table)
    return {
        "title": table.title,
        "columns": columns_of(table),
        "rows": [cells for cells, _ in lines],
        "classes": {index: "faint" for index, (cells, _) in enumerate(lines) if cells[0] == "paper"},
        "strong": {index: strong for index, (_, strong) in enumerate(lines)},
        "source": table.source,
    }


def draw_accuracy_against_time(tables: Tables) -> Drawing:
    """All methods in one figure."""
    plain, swa = tables.tables
    rows = [(row, plain.accuracy) for row in plain.rows]
    rows += [(row, swa.accuracy) for row in swa.rows if row.key != "swap"]
    found = [(row, row.measured["training_time"], row.measured[accuracy]) for row, accuracy in rows]
    points = [(row, _common(time, accuracy), _common(accuracy, time)) for row, time, accuracy in found]
    points = [point for point in points if point[1].n]
    with style():
        figure = new_figure(8, 4.6)
        axes = figure.subplots()
        for row, time, accuracy in points:
            colour, shape = _LOOKS.get(row.key, _OTHERS)
            axes.plot(
                list(time.values.values()),
                list(accuracy.values.values()),
                linestyle="none",
                marker=shape,
                markersize=4,
                color=colour,
                alpha=0.35,
                markeredgewidth=0,
                gid=f"seeds-{row.key}",
            )
            bars = axes.errorbar(
                [time.mean or 0],
                [accuracy.mean or 0],
                xerr=time.std,
                yerr=accuracy.std,
                marker=shape,
                markersize=9,
                color=colour,
                markeredgecolor="white",
                markeredgewidth=0.8,
                elinewidth=1.2,
                linestyle="none",
                label=row.title,
            )
            name_bars(bars, f"mean-{row.key}")
        axes.set_xlabel("training time (s)")
        axes.set_ylabel("test accuracy (%)")
        axes.set_xlim(left=0)
        axes.margins(y=0.12)
        grid(axes)
        figure.legend(loc="outside right upper")
    return Drawing(
        name="accuracy_time",
        figure=figure,
        alt="Test accuracy against training time: "
        + "; ".join(f"{row.title} {accuracy.mean:.2f} % in {time.mean:.1f} s" for row, time, accuracy in points),
        columns=("method", "seed", "training_time", "test_accuracy"),
        rows=tuple(
            (row.key, seed, seconds, accuracy.values[seed])
            for row, time, accuracy in points
            for seed, seconds in time.values.items()
        ),
    )


def _common(one: Measured, other: Measured) -> Measured:
    return Measured({seed: one.values[seed] for seed in sorted(one.values) if seed in other.values})
