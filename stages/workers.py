"""torchrun --standalone --nproc-per-node 2 -m stages.workers

Would more workers help? The accuracy of averages of 1, 2, … workers, and distances between workers:
`analysis/workers.json`.

`python -m stages.workers`, as in dvc.yaml, checks the params and runs the command above on all devices.
"""

from __future__ import annotations

import click

from swap_pipeline.analysis.params import Analysis, read_analysis
from swap_pipeline.config.instances import PHASE1, Instance, worker
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.launch.stage_jobs import run_alone
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.stage_process import run_stage

WORKERS = Instance(stage="workers")


@click.command(help=__doc__)
def main() -> None:
    params, given = read_params(), read_analysis()
    run_alone(WORKERS, shards=params.phase1.shards, be_a_rank=lambda folder: average_some(params, given, folder))


def average_some(params: Params, given: Analysis, folder: JobFolder) -> None:
    """Run one of the ranks."""
    from swap_pipeline.analysis.subsets import run_subsets_job
    from swap_pipeline.config.common_params import setting_of
    from swap_pipeline.config.kept_models import LAST_MODEL, models_of_cycles
    from swap_pipeline.engine.distributed import process_group

    cycles = models_of_cycles(epochs=params.phase2.epochs, cycles=params.phase2.cycles)
    names = [*cycles.values(), LAST_MODEL]
    folders = {seed: worker(seed).checkpoints for seed in params.workers.seeds}
    with process_group(deterministic=params.compute.deterministic) as group:
        run_subsets_job(
            {seed: [models / name for name in names] for seed, models in folders.items()},
            start=PHASE1.model,
            at_most=given.subsets,
            name=WORKERS.name,
            setting=setting_of(params),
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
