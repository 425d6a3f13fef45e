"""python -m stages.tables

SWAP beside plain training and SWA: collect what has run into `comparisons/tables.md`, `.json` and `.csv`, and print it.
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
    from swap_pipeline.tables import as_csv, as_json, compare, instances, markdown

    wanted = instances(seeds=params.workers.seeds, repeats=params.repeats)
    comparison = compare(
        {instance: read_json(instance.record) for instance in wanted if instance.record.exists()},
        seeds=params.workers.seeds,
        repeats=params.repeats,
        epochs=params.phase2.epochs,
        cycles=params.phase2.cycles,
        recipe=params.recipe,
    )
    text = markdown(comparison)
    write_text(Path("comparisons/tables.md"), text)
    write_json(Path("comparisons/tables.json"), as_json(comparison))
    write_text(Path("comparisons/tables.csv"), as_csv(comparison))
    click.echo(f"\n{text}\ntables: comparisons/tables.md")


if __name__ == "__main__":
    run_stage(main)
