"""python -m stages.comparisons_page

The tables of the comparisons, with pictures, as a page: `comparisons/index.html`.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.params import read_params
from swap_pipeline.ranks import run_stage


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    from swap_pipeline import figures
    from swap_pipeline.comparisons_page import comparisons_page
    from swap_pipeline.figures_schedules import draw_samplings, samplings
    from swap_pipeline.figures_training import draw_accuracy_against_time
    from swap_pipeline.files import read_json, write_text

    tables = read_json(Path("comparisons/tables.json"))
    times = draw_accuracy_against_time(tables["tables"])
    drawings = [draw_samplings(samplings(params)), *([times] if times else [])]
    pictures = figures.save(drawings, Path("comparisons/figures"))
    page = comparisons_page(tables, drawings={drawing.name: drawing for drawing in drawings}, pictures=pictures)
    write_text(Path("comparisons/index.html"), page)
    click.echo("comparisons: comparisons/index.html")


if __name__ == "__main__":
    run_stage(main)
