"""torchrun --standalone --nproc-per-node 2 -m stages.phase1

Phase 1 of SWAP: all devices train one model with large batches, until its training accuracy passes τ.

`python -m stages.phase1`, as in dvc.yaml, checks the params and runs the command above on as many devices as divide
`phase1.shards` evenly.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.config.instances import PHASE1
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.launch.stage_jobs import run_alone
from swap_pipeline.runtime.inputs import check_dvc_sees_start
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.stage_process import run_stage


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    check_dvc_sees_start(params.phase1.start)
    run_alone(PHASE1, shards=params.phase1.shards, be_a_rank=lambda folder: train_phase1(params, folder))


def train_phase1(params: Params, folder: JobFolder) -> None:
    """Algorithm 1, phase 1, as one of its ranks."""
    from swap_pipeline.config.common_params import setting_of
    from swap_pipeline.config.kept_models import models_to_keep
    from swap_pipeline.config.seeds import derive_seed
    from swap_pipeline.engine.distributed import process_group
    from swap_pipeline.training.job import make_run, run_training_job

    phase = params.phase1
    with process_group(deterministic=params.compute.deterministic) as group:
        run_training_job(
            make_run(
                phase,
                name=PHASE1.name,
                section="phase1",
                seed=derive_seed("phase1", params.seed),
                epochs=phase.max_epochs,
                sync_steps=phase.sync_steps,
                leaving=phase,
                chance=f"seed {params.seed}",
            ),
            start=derive_seed("initial weights", params.seed),
            weights=None if phase.start is None else Path(phase.start),
            header={"phase": "phase1", "seed": params.seed},
            setting=setting_of(params),
            optimizer=phase.optimizer or params.optimizer,
            group=group,
            folder=folder,
            keep=models_to_keep(phase.keep_epochs, epochs=phase.max_epochs),
        )


if __name__ == "__main__":
    run_stage(main)
