"""Learning rate and batch size over the epochs as a picture, like Figure 5 of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swap_pipeline.errors import SwapError
from swap_pipeline.report.figures import FORMATS, picture_bytes
from swap_pipeline.report.figures_schedules import Course, draw_schedules
from swap_pipeline.storage.files import atomic_write

if TYPE_CHECKING:  # which imports torch: a name can be refused without
    from swap_pipeline.cli.plan.plan import Plan, RunPlan


def check_format(path: Path) -> str:
    """The format that a file's name asks for."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise SwapError(f"--plot {path}: name a file that ends in {' or '.join(f'.{known}' for known in FORMATS)}")
    return kind


def draw(plan: Plan, path: Path, *, title: str) -> None:
    """Write the picture; phase 2, if there is one, begins where phase 1 ends at the latest."""
    kind = check_format(path)
    courses = [
        _course(plan.phase1, "phase 1, at most" if plan.may_end_early else "phase 1"),
    ]
    if plan.worker.epochs:
        courses.append(_course(plan.worker, f"phase 2, W = {plan.num_workers}").later(plan.phase1.epochs))
    picture = picture_bytes(draw_schedules(courses, title=title).figure, kind)
    try:
        with atomic_write(path) as file:
            file.write(picture)
    except OSError as error:
        raise SwapError(f"--plot {path} cannot be written: {error.strerror or error}") from None


def _course(run: RunPlan, label: str) -> Course:
    return Course(
        section=run.section,
        label=label,
        rates=tuple(
            point
            for part in run.stretches
            for point in ((part.first_epoch, part.first_rate), (part.last_epoch, part.last_rate))
        ),
        batch_sizes=tuple(
            (epoch, float(part.batch_size)) for part in run.stretches for epoch in (part.first_epoch, part.last_epoch)
        ),
    )
