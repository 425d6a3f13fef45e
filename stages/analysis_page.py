"""python -m stages.analysis_page

The analysis as figures and a page: `analysis/index.html`.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.runtime.stage_process import run_stage


@click.command(help=__doc__)
def main() -> None:
    from swap_pipeline.config.instances import ANALYSES, Instance
    from swap_pipeline.report import figures
    from swap_pipeline.report.analysis_page import analysis_page, draw_analysis
    from swap_pipeline.storage.files import read_json, write_text

    paths = {stage: Instance(stage=stage).record for stage in ANALYSES}
    records = {method: read_json(path) if path.exists() else None for method, path in paths.items()}
    drawings = draw_analysis(records)
    pictures = figures.save(drawings, Path("analysis/figures"))
    Path("analysis/figures").mkdir(parents=True, exist_ok=True)  # an out, even if there is nothing to draw
    page = analysis_page(records, drawings={drawing.name: drawing for drawing in drawings}, pictures=pictures)
    write_text(Path("analysis/index.html"), page)
    click.echo("analysis: analysis/index.html")


if __name__ == "__main__":
    run_stage(main)
