"""One style for all figures: colours, and how a figure is saved together with its data.

Every figure is a `Drawing`: a matplotlib figure, the numbers in it, and a text alternative. The same drawing always
gives the same bytes.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swap_pipeline.storage.files import atomic_write, write_text

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure


FORMATS = ("svg", "png")
GREY = "#767676"
# Okabe and Ito's colours, which colour-blind people can tell apart. Lines also differ in dashes, points in shapes. A
# run has the same colour in all figures.
COLOURS = {
    "phase1": "#56B4E9",
    "phase2": "#D55E00",
    "swap": "#0072B2",
    "small_batch": "#009E73",
    "large_batch": "#000000",
    "swa": "#CC79A7",
    "best": "#F0E442",
}
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
"""for runs that share a colour"""

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "swap",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 10,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.solid_capstyle": "butt",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.06,
    "figure.constrained_layout.h_pad": 0.06,
}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure with its data."""

    name: str
    """of its files, without suffix"""
    figure: Figure
    alt: str
    """text alternative"""
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """all data drawn; None if a column does not apply"""


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw or save with the common style, whatever the user's matplotlib settings are."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Size in inches; an inch is about 100 pixels on a page."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def grid(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.grid(color="#cccccc", linewidth=0.6, alpha=0.7)


def whole_epochs(axes: Axes) -> None:
    """Ticks only at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))


def name_bars(bars: ErrorbarContainer, name: str) -> None:
    """Ids in the SVG: `name` for points, `name-spread` for bars."""
    points, _, spreads = bars.lines
    if points is not None:
        points.set_gid(name)
    for index, spread in enumerate(spreads):
        spread.set_gid(f"{name}-spread{index or ''}")


def picture_bytes(figure: Figure, kind: str) -> bytes:
    """As SVG or PNG; without a date, so that the same figure gives the same bytes."""
    picture = io.BytesIO()
    with style():
        figure.savefig(picture, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return picture.getvalue()


def data_csv(drawing: Drawing) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(drawing.columns)
    writer.writerows(drawing.rows)
    return text.getvalue()


def save(drawings: Sequence[Drawing], folder: Path) -> dict[str, bytes]:
    """Write each as SVG, PNG and CSV; returns the SVGs by name, for a page."""
    pictures: dict[str, bytes] = {}
    for drawing in drawings:
        assert drawing.name not in pictures, drawing.name
        for kind in FORMATS:
            content = picture_bytes(drawing.figure, kind)
            with atomic_write(folder / f"{drawing.name}.{kind}", durable=False) as file:
                file.write(content)
            if kind == "svg":
                pictures[drawing.name] = content
        write_text(folder / f"{drawing.name}.csv", data_csv(drawing))
    return pictures
