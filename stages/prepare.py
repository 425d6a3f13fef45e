"""python -m stages.prepare

Prepare the data set `data.name`: `data/prepared/`.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.config.reading import read_params
from swap_pipeline.runtime.inputs import inputs_stay
from swap_pipeline.runtime.stage_process import run_stage


@click.command(help=__doc__)
@inputs_stay("prepare")
def main() -> None:
    params = read_params()
    from swap_pipeline.datasets.prepare import prepare

    click.echo(prepare(params.data, Path("data/prepared")))


if __name__ == "__main__":
    run_stage(main)
