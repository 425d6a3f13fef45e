"""What came out as a picture: the course of a run (Figure 1 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swap_pipeline.config.kept_models import epoch_of_label
from swap_pipeline.report.figures import COLOURS, DASHES, GREY, Drawing, grid, new_figure, style, whole_epochs
from swap_pipeline.report.figures_schedules import Course

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Curve = list[tuple[float, float]]
"""(epoch, value)"""


def draw_training(
    phase1: Mapping[str, Any],
    workers: Mapping[int, Mapping[str, Any]],
    averaged: Sequence[Mapping[str, Any]],
    *,
    rates: Sequence[Course],
) -> Drawing:
    """Figure 1: rates of both phases, test accuracy of every model, and of the average had phase 2 ended earlier.

    A worker's epochs follow phase 1's; `rates` are those of phase 1 as it ran and of a worker after it. Beside the
    whole course stands phase 2 alone, where the differences are small, if there is one.
    """
    handover = phase1["epochs"]
    before = _accuracies(phase1)
    after = {seed: _accuracies(worker, handover) for seed, worker in workers.items() if worker["epochs"]}
    average: Curve = [
        (handover + epoch_of_label(point["label"]), point["test_accuracy"]) for point in averaged if after
    ]
    with style():
        figure = new_figure(9, 4.8)
        layout, widths = (
            ([["rate", "close"], ["course", "close"]], (1.15, 1)) if after else ([["rate"], ["course"]], (1,))
        )
        panels: dict[str, Axes] = figure.subplot_mosaic(layout, height_ratios=(1, 2), width_ratios=widths)  # type: ignore[arg-type]
        rate, course, close = panels["rate"], panels["course"], panels.get("close")
        course.sharex(rate)
        for part in rates:
            colour = COLOURS[part.section]
            rate.plot(*zip(*part.rates, strict=True), color=colour, linewidth=2, gid=f"rate-{part.section}")
        (line,) = course.plot(
            *zip(*before, strict=True), color=COLOURS["phase1"], linewidth=2, marker=".", gid="accuracy-phase1"
        )
        shown = {"phase 1": line}
        shown |= _draw_workers(course, after, average, "accuracy")
        if close is not None:
            shown |= _draw_workers(close, after, average, "close")
            shown["phase 1's end"] = close.axhline(
                before[-1][1], color=COLOURS["phase1"], linewidth=1.6, linestyle=(0, (4, 3)), gid="close-phase1"
            )
            if average:
                _say_last(close, average[-1])
            close.set_title("phase 2, enlarged")
            for axes in (rate, course):
                axes.axvline(handover, color=GREY, linewidth=0.8)
        rate.set_ylim(bottom=0)
        rate.set_xlim(left=0)
        rate.tick_params(labelbottom=False)
        rate.set_ylabel("learning rate")
        for words, side, away in (("phase 1", "right", -5), ("phase 2", "left", 5)) if after else ():
            rate.annotate(
                words,
                (handover, 1),
                xycoords=rate.get_xaxis_transform(),
                xytext=(away, 4),
                textcoords="offset points",
                ha=side,
                fontweight="bold",
            )
        for axes in (course, close) if close is not None else (course,):
            axes.set_ylabel("test accuracy (%)")
            axes.set_xlabel("epoch")
            whole_epochs(axes)
        grid(*panels.values())
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4)
    return Drawing(
        name="training",
        figure=figure,
        alt=_training_in_words(before, after, average),
        columns=("run", "epoch", "learning_rate", "test_accuracy"),
        rows=(
            *((part.section, epoch, value, None) for part in rates for epoch, value in part.rates),
            *(("phase1", epoch, None, accuracy) for epoch, accuracy in before),
            *((f"seed_{seed}", epoch, None, accuracy) for seed, curve in after.items() for epoch, accuracy in curve),
            *(("averaged", epoch, None, accuracy) for epoch, accuracy in average),
        ),
    )


def _accuracies(record: Mapping[str, Any], before: int = 0) -> Curve:
    return [(before + row["epoch"], row["test_accuracy"]) for row in record["curve"]]


def _draw_workers(axes: Axes, after: Mapping[int, Curve], average: Curve, prefix: str) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    few = len(after) <= len(DASHES)
    shown: dict[str, Any] = {}
    for index, (seed, curve) in enumerate(after.items()):
        (line,) = axes.plot(
            *zip(*curve, strict=True),
            color=COLOURS["phase2"],
            linewidth=1.2 if few else 0.7,
            linestyle=DASHES[index] if few else "-",
            alpha=1 if few else max(0.15, 8 / len(after)),
            marker="." if len(curve) == 1 else None,
            gid=f"{prefix}-seed_{seed}",
        )
        if not index:
            shown[_workers_in_legend(len(after))] = Line2D([], [], color=line.get_color(), linewidth=1.2)
    if average:
        (line,) = axes.plot(
            *zip(*average, strict=True),
            color=COLOURS["swap"],
            linewidth=2.4,
            marker="o",
            markersize=4,
            zorder=4,
            gid=f"{prefix}-averaged",
        )
        shown["their average, had phase 2 ended here"] = line
    return shown


def _workers_in_legend(count: int) -> str:
    return "the worker" if count == 1 else f"each of {count} workers"


def _say_last(axes: Axes, last: tuple[float, float]) -> None:
    axes.annotate(
        f"average {last[1]:.2f}",
        last,
        xytext=(0, 8),
        textcoords="offset points",
        ha="right",
        color=COLOURS["swap"],
        fontweight="bold",
        zorder=5,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )
    axes.margins(y=0.1)


def _training_in_words(before: Curve, after: Mapping[int, Curve], average: Curve) -> str:
    finals = [curve[-1][1] for curve in after.values()]
    told = [
        "Learning rate and test accuracy by epoch. "
        f"Phase 1 ends at {before[-1][1]:.2f} % after {before[-1][0]:g} epochs",
        *([f"the workers at {min(finals):.2f} to {max(finals):.2f} %"] if finals else []),
    ]
    if average:
        told.append(f"their average at {average[-1][1]:.2f} %")
    return "; ".join(told)
