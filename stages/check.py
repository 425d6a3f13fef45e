"""python -m stages.check

Check `params.yaml` before any other stage runs: DVC deletes and reads what it names.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.datasets.check import check
from swap_pipeline.runtime.inputs import inputs_stay
from swap_pipeline.runtime.stage_process import run_stage
from swap_pipeline.storage.files import write_text


@click.command(help=__doc__)
def main() -> None:
    with inputs_stay("check"):
        check()
        # Always the same, so that a valid edit does not rerun stages that do not depend on it.
        write_text(Path("data/checked.txt"), "params.yaml was checked\n")


if __name__ == "__main__":
    run_stage(main)
