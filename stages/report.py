"""python -m stages.report

Merge the phases' records into `metrics/swap.json`, `plots/curves.csv` and `report/`, and print the result.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from swap_pipeline.config.instances import PHASE1, PHASE3, worker
from swap_pipeline.config.reading import read_params
from swap_pipeline.runtime.environment import project_folder
from swap_pipeline.runtime.inputs import inputs_stay
from swap_pipeline.runtime.stage_process import dvc_started, run_stage


@click.command(help=__doc__)
@inputs_stay("report")
def main() -> None:
    params = read_params()
    from swap_pipeline.report import figures, provenance
    from swap_pipeline.report.figures_schedules import courses_as_run, draw_schedules, planned_courses
    from swap_pipeline.report.figures_training import draw_noise, draw_training
    from swap_pipeline.report.report_page import report_page
    from swap_pipeline.report.summary import closing_words, curves_csv, result_rows, result_table, summarise
    from swap_pipeline.storage.files import read_json, write_json, write_text

    phase1, phase3 = read_json(PHASE1.record), read_json(PHASE3.record)
    workers = {seed: read_json(worker(seed).record) for seed in params.workers.seeds}
    summary, rows = summarise(phase1, workers, phase3), result_rows(phase1, workers, phase3)
    write_json(Path("metrics/swap.json"), summary)
    write_text(Path("plots/curves.csv"), curves_csv(phase1, workers))

    courses = courses_as_run(params, phase1["epochs"])
    noise = draw_noise(phase1, courses[0].batch_sizes)
    drawings = [
        draw_training(phase1, workers, phase3["points"], rates=courses),
        *([noise] if noise else []),
        draw_schedules(planned_courses(params)),
    ]
    pictures = figures.save(drawings, Path("report/figures"))
    tree, environment = provenance.read_sections(Path("params.yaml")), provenance.environment()
    origin = provenance.origin_of(tree)
    page = report_page(
        phase1,
        workers,
        phase3,
        rows=rows,
        drawings={drawing.name: drawing for drawing in drawings},
        pictures=pictures,
        params=tree,
        origin=origin,
        environment=environment,
        data=phase3["data"],
    )
    write_text(Path("report/index.html"), page)
    numbers = {
        "summary": summary,
        "table": [asdict(row) for row in rows],
        "records": {"phase1": phase1, "phase2": workers, "phase3": phase3},
        "params": tree,
        "origin": asdict(origin),
        "environment": environment,
    }
    write_json(Path("report/report.json"), numbers)
    table = result_table(rows)
    write_text(Path("report/summary.md"), f"# SWAP\n\n{table}\n")
    experiment, is_temporary = environment["code"]["experiment"], project_folder() != Path()
    words = closing_words(
        phase1, workers, summary, since=dvc_started(), experiment=experiment, is_temporary=is_temporary
    )
    click.echo(f"\n{table}\n\n{words}\n")


if __name__ == "__main__":
    run_stage(main)
