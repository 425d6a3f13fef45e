"""torchrun --standalone --nproc-per-node 2 -m stages.phase1

Phase 1 of SWAP: all devices train one model with large batches, until its training accuracy passes τ.

`python -m stages.phase1`, as DVC calls it, checks the params and starts the line above on all devices.
"""

from __future__ import annotations

import click

from swap_pipeline.instances import Instance
from swap_pipeline.launch import run_on_all_devices
from swap_pipeline.params import Params, read_params
from swap_pipeline.ranks import chosen_repeat, run_stage
from swap_pipeline.scratch import JobFolder


@click.command(help=__doc__)
@click.option("--repeat", default="0", help="for the comparisons: one of repeats; 0 is the plain pipeline")
def main(repeat: str) -> None:
    params = read_params()
    instance = Instance(method="phase1", repeat=chosen_repeat(repeat, params.repeats))
    run_on_all_devices(
        instance,
        be_a_rank=lambda folder: train_phase1(params, instance, folder),
        batch_size=params.phase1.batch_size,
    )


def train_phase1(params: Params, instance: Instance, folder: JobFolder) -> None:
    """Algorithm 1, phase 1, as one of its ranks."""
    from swap_pipeline.data import derive_seed
    from swap_pipeline.distributed import process_group
    from swap_pipeline.schedules import models_to_keep
    from swap_pipeline.setting import setting_of
    from swap_pipeline.training_job import make_run, run_training_job

    phase = params.phase1
    with process_group() as group:
        run_training_job(
            make_run(
                phase,
                name=instance.name,
                section="phase1",
                seed=derive_seed("phase1", phase.seed, *instance.chance),
                epochs=phase.max_epochs,
                stop_accuracy=phase.stop_accuracy,
                chance=f"phase1.seed {phase.seed}",
            ),
            start=derive_seed("initial weights", phase.seed, *instance.chance),
            header={"phase": "phase1", "seed": phase.seed, **instance.header},
            setting=setting_of(params),
            optimizer=params.optimizer,
            group=group,
            folder=folder,
            keep={} if instance.repeat else models_to_keep(phase.keep_epochs, epochs=phase.max_epochs),
        )


if __name__ == "__main__":
    run_stage(main)
