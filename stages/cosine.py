"""torchrun --standalone --nproc-per-node 2 -m stages.cosine

During training, the cosine between the descent direction and the direction to SWAP's output (the paper's Figure 4), at
the models kept by `phase1.keep_epochs` and `phase2.keep_epochs`: `analysis/cosine.json`.

`python -m stages.cosine`, as in dvc.yaml, checks the params and runs the command above on all devices.
"""

from __future__ import annotations

import click

from swap_pipeline.analysis.params import Analysis, read_analysis
from swap_pipeline.config.instances import PHASE1, PHASE3, Instance
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.launch.stage_jobs import run_alone
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.stage_process import run_stage

COSINE = Instance(stage="cosine")


@click.command(help=__doc__)
def main() -> None:
    params, given = read_params(), read_analysis()
    run_alone(COSINE, shards=params.phase1.shards, be_a_rank=lambda folder: compute_cosines(params, given, folder))


def compute_cosines(params: Params, given: Analysis, folder: JobFolder) -> None:
    """Run one of the ranks."""
    from swap_pipeline.analysis.gradient_direction import run_cosine_job, snapshots_of_phase1, snapshots_of_worker
    from swap_pipeline.config.common_params import setting_of
    from swap_pipeline.engine.distributed import process_group
    from swap_pipeline.storage.files import read_json

    epochs = read_json(PHASE1.record)["epochs"]
    course = [snapshots_of_phase1(wanted=params.phase1.keep_epochs, epochs=epochs)]
    course += [
        snapshots_of_worker(
            seed,
            wanted=params.phase2.keep_epochs,
            before=epochs,
            epochs=params.phase2.epochs,
            cycles=params.phase2.cycles,
        )
        for seed in params.workers.seeds
    ]
    kept_on_the_way = any(len(snapshots) > 1 for snapshots in course)
    with process_group(deterministic=params.compute.deterministic) as group:
        run_cosine_job(
            [snapshot for snapshots in course for snapshot in snapshots] if kept_on_the_way else [],
            swap=PHASE3.model,
            gradient_images=given.gradient_images,
            label_smoothing=params.optimizer.label_smoothing,
            name=COSINE.name,
            setting=setting_of(params),
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
