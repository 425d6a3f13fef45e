"""python -m stages.report

Merge what the phases recorded into `metrics/swap.json`, `plots/curves.csv` and `report/`, and print the result.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.params import read_params
from swap_pipeline.ranks import run_stage


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    from swap_pipeline.files import read_json, write_json, write_text
    from swap_pipeline.report import curves_csv, result_table, summarise

    phase1, phase3 = read_json(Path("metrics/phase1.json")), read_json(Path("metrics/phase3.json"))
    workers = {seed: read_json(Path(f"metrics/phase2/seed_{seed}.json")) for seed in params.workers.seeds}
    averaged = read_json(Path("metrics/averaged.json"))["points"]
    table = result_table(phase1, workers, phase3)
    write_json(Path("metrics/swap.json"), summarise(phase1, workers, phase3))
    write_text(Path("plots/curves.csv"), curves_csv(phase1, workers))
    write_text(Path("report/summary.md"), f"# SWAP\n\n{table}\n")
    click.echo(f"\n{table}\n\nreport: report/summary.md")


if __name__ == "__main__":
    run_stage(main)
