"""Learning rate and batch size over the epochs as a picture, like Figure 5 of the paper."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from swap_pipeline.errors import SwapError
from swap_pipeline.files import atomic_write

if TYPE_CHECKING:  # which imports torch: a name can be refused without
    from swap_pipeline.plan import Plan, RunPlan

FORMATS = ("svg", "png")
# Okabe and Ito's colours, which stay apart for colour-blind eyes; the runs differ in their lines too.
_STYLES = {
    "phase1": {"color": "#56B4E9", "linewidth": 4.0, "linestyle": "-"},
    "phase2": {"color": "#D55E00", "linewidth": 4.0, "linestyle": "-"},
    "small_batch": {"color": "#009E73", "linewidth": 1.2, "linestyle": "--"},
    "large_batch": {"color": "#000000", "linewidth": 1.2, "linestyle": ":"},
}


def check_format(path: Path) -> str:
    """The format that a file's name asks for."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise SwapError(f"--plot {path}: name a file that ends in {' or '.join(f'.{known}' for known in FORMATS)}")
    return kind


def draw(plan: Plan, path: Path, *, title: str) -> None:
    """Write the picture; phase 2 begins where phase 1 ends at the latest."""
    kind = check_format(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "swap", "font.size": 10}):
        figure = Figure(figsize=(8, 6), layout="constrained")
        rates, batches = figure.subplots(2, 1, sharex=True)
        handover = plan.phase1.epochs
        runs = {
            "phase 1, at most" if plan.may_end_early else "phase 1": (plan.phase1, 0),
            f"phase 2, W = {plan.num_workers}": (plan.worker, handover),
            **{run.section.replace("_", " "): (run, 0) for run in plan.baselines},
        }
        for label, (run, start) in runs.items():
            style = _STYLES[run.section]
            rates.plot(*zip(*_rates(run, start), strict=True), label=label, gid=f"rate-{run.section}", **style)
            batches.plot(*zip(*_batch_sizes(run, start), strict=True), gid=f"batch-{run.section}", **style)
        for axes in (rates, batches):
            axes.axvline(handover, color="#999999", linewidth=0.8)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        rates.set_title(title)
        rates.set_ylabel("learning rate")
        batches.set_ylabel("batch size")
        batches.set_xlabel("epoch")
        batches.set_xlim(left=0)
        figure.legend(loc="outside lower center", ncols=len(runs), frameon=False)
        picture = io.BytesIO()
        # Without a date, so that the same plan gives the same bytes.
        figure.savefig(picture, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    try:
        with atomic_write(path) as file:
            file.write(picture.getvalue())
    except OSError as error:
        raise SwapError(f"--plot {path} cannot be written: {error.strerror or error}") from None


def _rates(run: RunPlan, start: float) -> Iterator[tuple[float, float]]:
    for part in run.stretches:
        yield start + part.first_epoch, part.first_rate
        yield start + part.last_epoch, part.last_rate


def _batch_sizes(run: RunPlan, start: float) -> Iterator[tuple[float, float]]:
    for part in run.stretches:
        yield start + part.first_epoch, part.batch_size
        yield start + part.last_epoch, part.batch_size
