"""torchrun --standalone --nproc-per-node 2 -m stages.exits

What other exits from phase 1 would have given: phase 2 with a few workers, then phase 3, from phase 1's models after
several epochs (`phase1.keep_epochs`): `analysis/exits.json`.

`python -m stages.exits`, as in dvc.yaml, checks the params and runs the command above on all devices.
"""

from __future__ import annotations

import click

from swap_pipeline.analysis.params import Analysis, read_analysis
from swap_pipeline.config.instances import PHASE1, Instance
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.launch.stage_jobs import run_alone
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.stage_process import run_stage

EXITS = Instance(stage="exits")


@click.command(help=__doc__)
def main() -> None:
    params, given = read_params(), read_analysis()
    run_alone(EXITS, shards=params.phase1.shards, be_a_rank=lambda folder: leave_elsewhere(params, given, folder))


def leave_elsewhere(params: Params, given: Analysis, folder: JobFolder) -> None:
    """Run one of the ranks."""
    from swap_pipeline.analysis.exits import exits_of, run_exits_job
    from swap_pipeline.config.common_params import setting_of
    from swap_pipeline.config.seeds import derive_seed
    from swap_pipeline.engine.distributed import process_group
    from swap_pipeline.storage.files import read_json
    from swap_pipeline.training.job import make_run

    with process_group(deterministic=params.compute.deterministic) as group:
        run_exits_job(
            exits_of(given.exits, kept=params.phase1.keep_epochs, epochs=read_json(PHASE1.record)["epochs"]),
            phase1=make_run(
                params.phase1,
                name=PHASE1.name,
                section="phase1",
                seed=derive_seed("phase1", params.seed),
                epochs=params.phase1.max_epochs,
                leaving=params.phase1,
            ),
            phase2=params.phase2,
            seeds=params.workers.seeds[: given.exit_workers],
            name=EXITS.name,
            setting=setting_of(params),
            optimizer=params.phase2.optimizer or params.optimizer,
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
