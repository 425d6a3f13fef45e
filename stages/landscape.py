"""torchrun --standalone --nproc-per-node 2 -m stages.landscape

Train and test error on the plane through phase 1's model (LB), one worker (SGD) and SWAP, and on the plane through
three workers (the paper's Figures 2 and 3): `analysis/landscape.json`.

`python -m stages.landscape`, as in dvc.yaml, checks the params and runs the command above on all devices.
"""

from __future__ import annotations

import click

from swap_pipeline.analysis.params import Analysis, read_analysis
from swap_pipeline.config.instances import PHASE1, PHASE3, Instance, worker
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.launch.stage_jobs import run_alone
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.stage_process import run_stage

LANDSCAPE = Instance(stage="landscape")


@click.command(help=__doc__)
def main() -> None:
    params, given = read_params(), read_analysis()
    run_alone(LANDSCAPE, shards=params.phase1.shards, be_a_rank=lambda folder: compute_planes(params, given, folder))


def compute_planes(params: Params, given: Analysis, folder: JobFolder) -> None:
    """Run one of the ranks."""
    from swap_pipeline.analysis.landscape_job import run_landscape_job
    from swap_pipeline.config.common_params import setting_of
    from swap_pipeline.engine.distributed import process_group

    with process_group(deterministic=params.compute.deterministic) as group:
        run_landscape_job(
            lb=PHASE1.model,
            workers={seed: worker(seed).model for seed in params.workers.seeds},
            swap=PHASE3.model,
            grid=given.grid,
            margin=given.margin,
            train_images=given.train_images,
            test_images=given.test_images,
            name=LANDSCAPE.name,
            setting=setting_of(params),
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
