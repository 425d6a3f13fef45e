"""torchrun --standalone --nproc-per-node 1 -m stages.phase2 --seed 3

Phase 2 of SWAP: a worker refines phase 1's model with small batches, in a data order of its own.

`python -m stages.phase2 --seed 3`, as DVC calls it, starts the line above, and beside it every other seed of
`workers.seeds` that DVC would have to train, in parallel over the devices; their turn then finds the work done.
"""

from __future__ import annotations

from dataclasses import replace

import click

from swap_pipeline.errors import SwapError
from swap_pipeline.instances import Instance
from swap_pipeline.launch import run_fan_out, worker_job
from swap_pipeline.params import Params, read_params
from swap_pipeline.ranks import chosen_repeat, collects, is_rank, job_of_rank, run_stage
from swap_pipeline.scratch import JobFolder


@click.command(help=__doc__)
@click.option("--seed", "text", required=True, help="which worker, one of workers.seeds")
@click.option("--repeat", default="0", help="for the comparisons: one of repeats; 0 is the plain pipeline")
def main(text: str, repeat: str) -> None:
    params = read_params()
    seed = chosen_seed(text, params.workers.seeds)
    instance = Instance(method="phase2", repeat=chosen_repeat(repeat, params.repeats), seed=seed)
    if is_rank():
        folder = job_of_rank(instance)
        train_worker(params, instance, folder)
    else:
        folder = run_fan_out(
            instance,
            others=[replace(instance, seed=other) for other in params.workers.seeds if other != seed],
            job=lambda instance: worker_job(
                instance, processes=params.phase2.gpus_per_worker, batch_size=params.phase2.batch_size
            ),
        )
    if collects():
        folder.collect(instance)


def chosen_seed(text: str, listed: tuple[int, ...]) -> int:
    """One of `workers.seeds`; only those take part in the average, and only those are kept."""
    if text not in map(str, listed):
        raise SwapError(f"--seed {text} is not in workers.seeds {list(listed)}: add it there first")
    return int(text)


def train_worker(params: Params, instance: Instance, folder: JobFolder) -> None:
    """Algorithm 1, phase 2, for one w."""
    from swap_pipeline.data import derive_seed
    from swap_pipeline.distributed import process_group
    from swap_pipeline.schedules import models_of_cycles, models_to_keep
    from swap_pipeline.setting import setting_of
    from swap_pipeline.training_job import make_run, run_training_job

    phase = params.phase2
    assert instance.start is not None and instance.seed is not None
    with process_group() as group:
        run_training_job(
            make_run(
                phase,
                name=instance.name,
                section="phase2",
                seed=derive_seed("phase2", instance.seed, *instance.chance),
                epochs=phase.epochs,
                cycles=phase.cycles,
                first_epoch=phase.first_epoch or 0,
            ),
            start=instance.start.model,
            header={"phase": "phase2", "seed": instance.seed, **instance.header},
            setting=setting_of(params),
            optimizer=params.optimizer,
            group=group,
            folder=folder,
            keep={
                **({} if instance.repeat else models_to_keep(phase.keep_epochs, epochs=phase.epochs)),
                **models_of_cycles(epochs=phase.epochs, cycles=phase.cycles),
            },
        )


if __name__ == "__main__":
    run_stage(main)
