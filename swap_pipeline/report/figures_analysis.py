"""Figures of the analysis: landscapes (the paper's Figures 2 and 3), directions (Figure 4), subsets of workers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swap_pipeline.report.figures import (
    COLOURS,
    DASHES,
    GREY,
    Drawing,
    grid,
    name_bars,
    new_figure,
    style,
    whole_epochs,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Matrix = Sequence[Sequence[float]]

_NUM_LEVELS = 12
_STEEPNESS = 4.0  # the last step between levels is about e⁴ times the first
_NUMBERS_FIT = 12  # rows of a matrix whose cells have room for a number


def levels_above(lowest: float, highest: float) -> list[float]:
    """Contour levels, close together near the minimum and far apart where the error is large."""
    span = highest - lowest
    if span <= 1e-9 * max(1.0, abs(highest)):  # flat
        return [lowest - 0.5, lowest + 0.5]
    steps = [math.expm1(_STEEPNESS * i / _NUM_LEVELS) / math.expm1(_STEEPNESS) for i in range(_NUM_LEVELS + 1)]
    return [lowest + span * step for step in steps]


def draw_landscape(plane: Mapping[str, Any]) -> Drawing:
    """Train and test error on a plane in weight space, the marked models on it."""
    (u0, u1), (v0, v1) = plane["u_range"], plane["v_range"]
    us, vs = _spaced(u0, u1, plane["grid"]), _spaced(v0, v1, plane["grid"])
    with style():
        # The axes are distances, to the same scale in both directions if there is room.
        shape = (v1 - v0) / (u1 - u0)
        panel = (3.4, min(4.4, max(2.2, 3.4 * shape)))
        figure = new_figure(9, panel[1] + 0.9)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, kind in zip(panels, ("train", "test"), strict=True):
            errors = plane[f"{kind}_error"]
            _fill(figure, axes, us, vs, errors, gid=f"{kind}_error")
            axes.set_title(f"{kind} error (%)")
            axes.set_xlabel("distance along u")
            if panel[1] == 3.4 * shape:
                axes.set_aspect("equal")
            axes.spines[:].set_visible(True)
            _mark(axes, plane, panel)
        panels[0].set_ylabel("distance along v")
    return Drawing(
        name=f"landscape_{plane['name']}",
        figure=figure,
        alt=f"{plane['title']}. Train and test error on a plane in weight space; "
        + "; ".join(
            f"{mark['name']}: {mark['train_error']:.2f} % and {mark['test_error']:.2f} %" for mark in plane["marks"]
        ),
        columns=("mark", "u", "v", "train_error", "test_error"),
        rows=(
            *((mark["name"], *mark["position"], mark["train_error"], mark["test_error"]) for mark in plane["marks"]),
            *(
                (None, u, v, plane["train_error"][row][column], plane["test_error"][row][column])
                for row, v in enumerate(vs)
                for column, u in enumerate(us)
            ),
        ),
    )


def _spaced(first: float, last: float, count: int) -> list[float]:
    return [first + (last - first) * i / (count - 1) for i in range(count)]


def _fill(figure: Figure, axes: Axes, us: list[float], vs: list[float], errors: Matrix, *, gid: str) -> None:
    import matplotlib
    from matplotlib.colors import BoundaryNorm

    values = [value for row in errors for value in row]
    levels = levels_above(min(values), max(values))
    colours = matplotlib.colormaps["cividis"]
    filled = axes.contourf(us, vs, errors, levels=levels, cmap=colours, norm=BoundaryNorm(levels, colours.N))
    filled.set_gid(f"filled-{gid}")
    filled.set_edgecolor("face")  # without it, SVG viewers show seams
    filled.set_linewidth(0.2)
    if len(levels) > 2:
        axes.contour(us, vs, errors, levels=levels[1:-1], colors="white", linewidths=0.6, alpha=0.8)
    ticks = levels[::2] if len(levels) > 2 else [statistics.fmean(levels)]
    bar = figure.colorbar(filled, cax=_beside(axes), ticks=ticks, spacing="uniform")
    digits = _digits(ticks)
    bar.set_ticklabels([f"{tick:.{digits}f}" for tick in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)


def _beside(axes: Axes) -> Axes:
    """Axes for a colour bar as high as the picture."""
    return axes.inset_axes((1.03, 0, 0.045, 1))


def _digits(values: Sequence[float]) -> int:
    """As few decimals as are needed to tell them apart."""
    return next((digits for digits in (1, 2, 3) if len({f"{v:.{digits}f}" for v in values}) == len(values)), 4)


_SHAPES = {"LB": "s", "SGD": "^", "SWAP": "o", "BEST": "*"}


def _mark(axes: Axes, plane: Mapping[str, Any], panel: tuple[float, float]) -> None:
    """`panel` is the approximate size of the axes in inches."""
    marks, ((u0, u1), (v0, v1)) = plane["marks"], (plane["u_range"], plane["v_range"])
    labels = [f"{mark['name']} (projected)" if mark.get("projected") else mark["name"] for mark in marks]
    spots = [
        ((u - u0) / (u1 - u0) * panel[0], (v - v0) / (v1 - v0) * panel[1]) for u, v in (m["position"] for m in marks)
    ]
    places = _label_places(spots, [0.1 + 0.078 * len(label) for label in labels], panel)
    for mark, label, (dx, dy) in zip(marks, labels, places, strict=True):
        name = mark["name"]
        projected = mark.get("projected", False)
        colour = _colour_of(name)
        axes.plot(
            *mark["position"],
            marker=_SHAPES.get(name, "^"),
            markersize=13 if name == "BEST" else 9,
            markerfacecolor="white" if projected else colour,
            markeredgecolor=colour if projected else "white",
            markeredgewidth=2 if projected else 1.2,
            linestyle="none",
            gid=f"mark-{name}",
            zorder=5,
            clip_on=False,
        )
        axes.annotate(
            label,
            mark["position"],
            xytext=(72 * dx, 72 * dy),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            zorder=6,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            arrowprops={"arrowstyle": "-", "color": "white", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3},
        )


def _colour_of(name: str) -> str:
    return {"LB": COLOURS["phase1"], "SWAP": COLOURS["swap"], "BEST": COLOURS["best"]}.get(name, COLOURS["phase2"])


def _label_places(
    points: Sequence[tuple[float, float]], widths: Sequence[float], panel: tuple[float, float]
) -> list[tuple[float, float]]:
    """For each point, the offset of its label's centre: away from other points and labels, and inside the panel.

    All in inches; the point at (0, 0) is the panel's lower left corner.
    """
    height, radius = 0.22, 0.1
    taken: list[tuple[float, float, float]] = []
    chosen = []
    for (x, y), width in zip(points, widths, strict=True):
        reach = width / 2 + 0.14, height / 2 + 0.14
        directions = [(0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1)]
        places = [(dx * reach[0] * far, dy * reach[1] * far) for far in (1, 1.8, 2.8) for dx, dy in directions]

        def cost(place: tuple[float, float], x: float = x, y: float = y, width: float = width) -> float:
            cx, cy = x + place[0], y + place[1]
            outside = max(0.0, width / 2 - cx, cx + width / 2 - panel[0])
            outside += max(0.0, height / 2 - cy, cy + height / 2 - panel[1])
            on_points = sum(
                abs(cx - px) < width / 2 + radius and abs(cy - py) < height / 2 + radius for px, py in points
            )
            on_labels = sum(abs(cx - px) < (width + other) / 2 and abs(cy - py) < height for px, py, other in taken)
            return 20 * outside + 3 * on_points + 3 * on_labels + 0.1 * (abs(place[0]) + abs(place[1]))

        best = min(places, key=cost)
        taken.append((x + best[0], y + best[1], width))
        chosen.append(best)
    return chosen


def draw_cosine(points: Sequence[Mapping[str, Any]]) -> Drawing:
    """Figure 4: the cosine between the descent direction and the direction to SWAP's result."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda point: float(point["epoch"])):
        runs.setdefault(point["run"], []).append(point)
    workers = [run for run in runs if run != "phase1"]
    few = len(workers) <= len(DASHES)
    with style():
        figure = new_figure(8, 4)
        axes = figure.subplots()
        axes.axhline(0, color=GREY, linewidth=0.8)
        for run, rows in sorted(runs.items(), key=lambda item: item[0] != "phase1"):
            is_phase1 = run == "phase1"
            first = workers and run == workers[0]
            axes.plot(
                [row["epoch"] for row in rows],
                [row["cosine"] for row in rows],
                color=COLOURS["phase1" if is_phase1 else "phase2"],
                linewidth=2 if is_phase1 else 1.4,
                linestyle="-" if is_phase1 or not few else DASHES[workers.index(run)],
                alpha=1 if is_phase1 or few else max(0.15, 8 / len(workers)),
                marker="o",
                markersize=4,
                label="phase 1"
                if is_phase1
                else ("the worker" if len(workers) == 1 else f"each of {len(workers)} workers")
                if first
                else None,
                gid=f"cosine-{run}",
            )
        if "phase1" in runs and workers:
            axes.axvline(runs["phase1"][-1]["epoch"], color=GREY, linewidth=0.8, gid="handover")
        axes.set_xlabel("epoch")
        axes.set_ylabel("cosine of −gradient and\ndirection to SWAP")
        axes.set_xlim(left=0)
        whole_epochs(axes)
        grid(axes)
        figure.legend(loc="outside lower center", ncols=2)
    ends = [("phase 1" if run == "phase1" else run.replace("_", " "), rows) for run, rows in runs.items()]
    return Drawing(
        name="cosine",
        figure=figure,
        alt="Cosine between the direction of descent and the direction to SWAP's result, by epoch: "
        + "; ".join(f"{name} from {rows[0]['cosine']:.3f} to {rows[-1]['cosine']:.3f}" for name, rows in ends[:8]),
        columns=("run", "epoch", "cosine", "gradient_norm", "distance"),
        rows=tuple(
            (point["run"], point["epoch"], point["cosine"], point["gradient_norm"], point["distance"])
            for point in points
        ),
    )


def draw_subsets(subsets: Sequence[Mapping[str, Any]], split: str) -> Drawing:
    """Accuracy against the number of averaged workers: every choice, and mean and spread over choices."""
    by_size: dict[int, list[float]] = {}
    for subset in sorted(subsets, key=lambda subset: int(subset["size"])):
        by_size.setdefault(subset["size"], []).append(subset["accuracy"])
    means = [statistics.fmean(values) for values in by_size.values()]
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_size.values()]
    with style():
        figure = new_figure(8, 4.2)
        axes = figure.subplots()
        axes.plot(
            [size for size, values in by_size.items() for _ in values],
            [value for values in by_size.values() for value in values],
            linestyle="none",
            marker="o",
            markersize=6,
            markerfacecolor="none",
            markeredgecolor=COLOURS["phase2"],
            markeredgewidth=1.3,
            zorder=4,
            label="one choice of workers",
            gid="choices",
        )
        bars = axes.errorbar(
            list(by_size),
            means,
            yerr=spreads,
            color=COLOURS["swap"],
            linewidth=2,
            marker="D",
            markersize=5,
            capsize=4,
            elinewidth=1.4,
            label="mean ± standard deviation over choices",
        )
        name_bars(bars, "means")
        axes.set_xlabel("number of workers averaged")
        axes.set_ylabel(f"{split} accuracy (%)")
        whole_epochs(axes)
        axes.set_xlim(min(by_size) - 0.5, max(by_size) + 0.5)
        grid(axes)
        figure.legend(loc="outside lower center", ncols=2)
    return Drawing(
        name="workers_accuracy",
        figure=figure,
        alt=f"{split.capitalize()} accuracy against the number of workers averaged: "
        + "; ".join(f"{size}: {mean:.2f} %" for size, mean in zip(by_size, means, strict=True)),
        columns=("size", "seeds", "accuracy", "loss"),
        rows=tuple(
            (subset["size"], " ".join(map(str, subset["seeds"])), subset["accuracy"], subset["loss"])
            for subset in subsets
        ),
    )


def draw_pairs(record: Mapping[str, Any]) -> Drawing:
    """Distances between workers and from phase 1's model (LB), and cosines between their directions from there."""
    seeds = [str(seed) for seed in record["seeds"]]
    away = record["distance_from_phase1"]
    distance = [[0.0, *away], *([away[i], *row] for i, row in enumerate(record["distance"]))]
    with style():
        rows = len(seeds) + 1
        figure = new_figure(9, 4.2 if rows > 3 else 3.4)
        left, right = figure.subplots(1, 2)
        _draw_matrix(figure, left, distance, ["LB", *seeds], gid="distance")
        _draw_matrix(figure, right, record["cosine"], seeds, gid="cosine", most=1.0)
        left.set_title("distance in weight space")
        right.set_title("cosine of directions from LB")
        for axes in (left, right):
            axes.set_xlabel("worker's seed")
    off = [value for i, row in enumerate(record["cosine"]) for j, value in enumerate(row) if i != j]
    agreement = f", cosines of directions {min(off):.3f} to {max(off):.3f}" if off else ""
    return Drawing(
        name="workers_pairs",
        figure=figure,
        alt=f"{len(seeds)} workers: distances from phase 1 {min(away):.2f} to {max(away):.2f}{agreement}",
        columns=("first", "second", "distance", "cosine"),
        rows=(
            *(("phase1", seed, value, None) for seed, value in zip(seeds, away, strict=True)),
            *(
                (first, second, record["distance"][i][j], record["cosine"][i][j])
                for i, first in enumerate(seeds)
                for j, second in enumerate(seeds)
                if j > i
            ),
        ),
    )


def _draw_matrix(
    figure: Figure, axes: Axes, values: Matrix, names: Sequence[str], *, gid: str, most: float | None = None
) -> None:
    """Colours go from 0 or less to the largest actual or possible value. The diagonal is meaningless."""
    import matplotlib
    import numpy as np
    from matplotlib.colors import Normalize

    off = [value for i, row in enumerate(values) for j, value in enumerate(row) if i != j] or [0.0]
    colours = matplotlib.colormaps["cividis"].with_extremes(bad="#e4e4e4")
    norm = Normalize(min(0.0, *off), most or max(off) or 1.0)
    masked = np.ma.masked_array(values, mask=np.eye(len(values), dtype=bool))
    image = axes.imshow(masked, cmap=colours, norm=norm)
    image.set_gid(f"matrix-{gid}")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if len(names) <= _NUMBERS_FIT:
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        digits = 1 if max(off) >= 10 else 2
        words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9 if len(names) < 8 else 7}
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if i != j:
                    dark = norm(value) < 0.55
                    axes.text(j, i, f"{value:.{digits}f}", color="white" if dark else "black", **words)
    else:
        every = -(-len(names) // 10)
        axes.set_xticks(range(0, len(names), every), names[::every])
        axes.set_yticks(range(0, len(names), every), names[::every])
    if len(names) > 2:
        bar = figure.colorbar(image, cax=_beside(axes))
        bar.outline.set_visible(False)
