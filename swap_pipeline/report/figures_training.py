"""Figures of results: a run's curves (the paper's Figure 1), gradient noise, and other exits from phase 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swap_pipeline.config.kept_models import epoch_of_label
from swap_pipeline.report.figures import COLOURS, DASHES, GREY, Drawing, grid, new_figure, style, whole_epochs
from swap_pipeline.report.figures_schedules import Course, Points

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
    """Figure 1: rates of both phases, accuracy of every model, and of the average if phase 2 had ended earlier.

    A worker's epochs follow phase 1's; `rates` are those of phase 1 as it ran and of a worker after it. Next to the
    whole run, phase 2 is shown enlarged, since its differences are small. The records name the split.
    """
    handover, split = phase1["epochs"], phase1["split"]
    before = _accuracies(phase1)
    after = {seed: _accuracies(worker, handover) for seed, worker in workers.items() if worker["epochs"]}
    average: Curve = [(handover + epoch_of_label(point["label"]), point["accuracy"]) for point in averaged if after]
    with style():
        figure = new_figure(9, 4.8)
        layout, widths = (
            ([["rate", "close"], ["course", "close"]], (1.15, 1)) if after else ([["rate"], ["course"]], (1,))
        )
        panels: dict[str, Axes] = figure.subplot_mosaic(layout, height_ratios=(1, 2), width_ratios=widths)  # type: ignore[arg-type]
        rate, course, close = panels["rate"], panels["course"], panels.get("close")
        course.sharex(rate)
        _draw_rates(rate, rates, handover if after else None)
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
            _say_exit(course, handover, phase1["stopped_by"])
        for axes in (course, close) if close is not None else (course,):
            axes.set_ylabel(f"{split} accuracy (%)")
            axes.set_xlabel("epoch")
            whole_epochs(axes)
        grid(*panels.values())
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4)
    return Drawing(
        name="training",
        figure=figure,
        alt=_training_in_words(before, after, average, split),
        columns=("run", "epoch", "learning_rate", "accuracy"),
        rows=(
            *((part.section, epoch, value, None) for part in rates for epoch, value in part.rates),
            *(("phase1", epoch, None, accuracy) for epoch, accuracy in before),
            *((f"seed_{seed}", epoch, None, accuracy) for seed, curve in after.items() for epoch, accuracy in curve),
            *(("averaged", epoch, None, accuracy) for epoch, accuracy in average),
        ),
    )


def _draw_rates(axes: Axes, rates: Sequence[Course], handover: int | None) -> None:
    """The learning rate, above the accuracies; phases are labelled if there are two."""
    for part in rates:
        colour = COLOURS[part.section]
        axes.plot(*zip(*part.rates, strict=True), color=colour, linewidth=2, gid=f"rate-{part.section}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.tick_params(labelbottom=False)
    axes.set_ylabel("learning rate")
    if handover is None:
        return
    axes.axvline(handover, color=GREY, linewidth=0.8)
    for words, side, away in (("phase 1", "right", -5), ("phase 2", "left", 5)):
        axes.annotate(
            words,
            (handover, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(away, 4),
            textcoords="offset points",
            ha=side,
            fontweight="bold",
        )


def _accuracies(record: Mapping[str, Any], before: int = 0) -> Curve:
    return [(before + row["epoch"], row["accuracy"]) for row in record["curve"]]


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


def _say_exit(course: Axes, handover: float, rule: str) -> None:
    """A line where phase 1 ended, with the rule."""
    course.axvline(handover, color=GREY, linewidth=0.8)
    if rule != "epochs":
        course.annotate(
            f"left by {rule}",
            (handover, 0),
            xycoords=course.get_xaxis_transform(),
            xytext=(-3, 5),
            textcoords="offset points",
            ha="right",
            color=GREY,
            fontsize=8.5,
        )


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


def _training_in_words(before: Curve, after: Mapping[int, Curve], average: Curve, split: str) -> str:
    finals = [curve[-1][1] for curve in after.values()]
    told = [
        f"Learning rate and {split} accuracy by epoch. "
        f"Phase 1 ends at {before[-1][1]:.2f} % after {before[-1][0]:g} epochs",
        *([f"the workers at {min(finals):.2f} to {max(finals):.2f} %"] if finals else []),
    ]
    if average:
        told.append(f"their average at {average[-1][1]:.2f} %")
    return "; ".join(told)


def draw_noise(phase1: Mapping[str, Any], batch_sizes: Points) -> Drawing | None:
    """The gradient noise scale and the batch size by epoch; None if it was not measured."""
    scales = [(row["epoch"], row["noise_scale"]) for row in phase1["curve"] if row.get("noise_scale")]
    if not scales:
        return None
    with style():
        figure = new_figure(6, 2.8)
        axes = figure.subplots()
        axes.plot(
            *zip(*scales, strict=True),
            color=COLOURS["phase1"],
            linewidth=2,
            marker=".",
            label="noise scale",
            gid="noise",
        )
        axes.plot(*zip(*batch_sizes, strict=True), color=GREY, linestyle="--", label="batch size", gid="batch-size")
        axes.set_yscale("log")
        axes.set_ylabel("images")
        axes.set_xlabel("epoch")
        whole_epochs(axes)
        grid(axes)
        figure.legend(loc="outside lower center", ncols=2)
    return Drawing(
        name="noise",
        figure=figure,
        alt=_noise_in_words(*scales[-1], batch_sizes[-1][1]),
        columns=("what", "epoch", "images"),
        rows=(
            *(("noise_scale", epoch, scale) for epoch, scale in scales),
            *(("batch_size", epoch, size) for epoch, size in batch_sizes),
        ),
    )


def _noise_in_words(epoch: int, scale: float, batch_size: float) -> str:
    ratio = scale / batch_size
    if ratio >= 2:
        verdict = "B₁ could be larger"
    else:
        verdict = "larger batches would gain little" if ratio < 0.5 else "B₁ is about as large as is efficient"
    return (
        f"After epoch {epoch} of phase 1 the gradient noise scale was about {float(f'{scale:.2g}'):,.0f} images, "
        f"{ratio:.2g} times the batch of {batch_size:,.0f}: {verdict}."
    )


def draw_exits(record: Mapping[str, Any]) -> Drawing:
    """Accuracy of the average and critical path against the epoch at which phase 1 ends; rules are marked."""
    exits, split = record["exits"], record["split"]
    epochs = [point["epoch"] for point in exits]
    lines = {"average, test images": ("test_accuracy", "swap"), "its workers, test images": ("workers", "phase2")}
    if split != "test":
        lines = {f"average, {split} images": ("accuracy", "small_batch"), **lines}
    with style():
        figure = new_figure(8, 4.8)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for dash, (label, (key, colour)) in zip(DASHES, lines.items(), strict=False):
            values = [point[key] for point in exits]
            top.plot(
                epochs, values, color=COLOURS[colour], linestyle=dash, linewidth=2, marker="o", label=label, gid=key
            )
        seconds = [point["seconds"] for point in exits]
        bottom.plot(epochs, seconds, color=COLOURS["phase1"], linewidth=2, marker="o", gid="seconds")
        for index, rule in enumerate(record["rules"]):
            for axes in (top, bottom):
                axes.axvline(rule["epoch"], color=GREY, linestyle=DASHES[index], gid=f"rule-{rule['rule']}")
            top.annotate(
                rule["rule"],
                (rule["epoch"], 1),
                xycoords=top.get_xaxis_transform(),
                xytext=(-3, -10 - 11 * index),
                textcoords="offset points",
                ha="right",
                fontsize=9,
            )
        top.set_ylabel("accuracy (%)")
        bottom.set_ylabel("critical path (s)")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("epoch of leaving phase 1")
        whole_epochs(bottom)
        grid(top, bottom)
        figure.legend(loc="outside lower center", ncols=3)
    columns = ("epoch", "accuracy", "test_accuracy", "workers", "seconds")
    return Drawing(
        name="exits",
        figure=figure,
        alt="Test accuracy of the average by epoch of leaving phase 1: "
        + "; ".join(f"{point['epoch']}: {point['test_accuracy']:.2f} %" for point in exits),
        columns=columns,
        rows=tuple(tuple(point[key] for key in columns) for point in exits),
    )
