"""Learning rate and batch size over the epochs as a picture, like Figure 5 of the paper."""

from __future__ import annotations

from pathlib import Path

from swap_pipeline.config.params import Params
from swap_pipeline.errors import SwapError
from swap_pipeline.report.figures import FORMATS, picture_bytes
from swap_pipeline.report.figures_schedules import draw_schedules, planned_courses
from swap_pipeline.storage.files import atomic_write


def check_format(path: Path) -> str:
    """The format that a file's name asks for."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise SwapError(f"--plot {path}: name a file that ends in {' or '.join(f'.{known}' for known in FORMATS)}")
    return kind


def draw(params: Params, path: Path, *, title: str) -> None:
    """Write the picture that the report will have, too."""
    picture = picture_bytes(draw_schedules(planned_courses(params), title=title).figure, check_format(path))
    try:
        with atomic_write(path) as file:
            file.write(picture)
    except OSError as error:
        raise SwapError(f"--plot {path} cannot be written: {error.strerror or error}") from None
