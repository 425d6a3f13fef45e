"""One style for all pictures: who has which colour, how a picture is saved, and its data beside it.

Every picture is a `Drawing`: a matplotlib figure, the numbers that are drawn, and words for those who cannot see it.
The same drawing gives the same bytes each time.
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
# Okabe and Ito's colours, which stay apart for colour-blind eyes. Lines differ in their dashes too, points in their
# shapes. A run has the same colour in all pictures.
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
"""Of runs that share a colour."""

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
    """A picture with its data."""

    name: str
    """of its files, without their ending"""
    figure: Figure
    alt: str
    """what is to be seen, in words"""
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """all that is drawn; None where a column does not apply"""


@contextlib.contextmanager
def style() -> Iterator[None]:
    """What is drawn inside, or saved, has the common style, whatever the user's own matplotlib settings are."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def new_figure(width: float, height: float) -> Figure:
    """In inches; on a page, an inch is about 100 pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def grid(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.grid(color="#cccccc", linewidth=0.6, alpha=0.7)


def whole_epochs(axes: Axes) -> None:
    """Ticks only at whole numbers, of which there may be few."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))


def name_bars(bars: ErrorbarContainer, name: str) -> None:
    """In SVG, the points are called `name`, the bars `name-spread`."""
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
    """Write each as SVG, PNG and CSV; the SVG of each, by name, for a page."""
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
