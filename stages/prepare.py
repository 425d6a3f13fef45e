"""Prepare the data set that `data.name` names: `data/prepared/`.

python -m stages.prepare
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.launch import run_stage
from swap_pipeline.params import read_params


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    from swap_pipeline.datasets import prepare

    click.echo(prepare(params.data.name, Path("data/prepared")))


if __name__ == "__main__":
    run_stage(main)
