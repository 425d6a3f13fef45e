"""torchrun --standalone --nproc-per-node 2 -m stages.phase3

Phase 3 of SWAP: the mean of the workers' weights, with batch-norm statistics of its own.

`python -m stages.phase3`, as DVC calls it, checks the params and starts the line above on all devices.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.instances import Instance
from swap_pipeline.launch import run_on_all_devices
from swap_pipeline.params import Params, read_params
from swap_pipeline.ranks import chosen_repeat, is_rank, run_stage
from swap_pipeline.scratch import JobFolder, remove_unlisted


@click.command(help=__doc__)
@click.option("--repeat", default="0", help="for the comparisons: one of repeats; 0 is the plain pipeline")
def main(repeat: str) -> None:
    params = read_params()
    instance = Instance(method="phase3", repeat=chosen_repeat(repeat, params.repeats))
    if not is_rank():
        # DVC hashes the whole folder of workers: one that is no longer listed must not be in it.
        worker = Instance(method="phase2", repeat=instance.repeat, seed=params.workers.seeds[0])
        for path in remove_unlisted(worker.checkpoints.parent, worker.record.parent, seeds=params.workers.seeds):
            click.echo(f"removed {path}: its seed is not in workers.seeds")
    run_on_all_devices(instance, be_a_rank=lambda folder: average_workers(params, instance, folder))


def model_files(repeat: int, seeds: tuple[int, ...], cycles: int) -> dict[Path, Instance]:
    """All models to average: of each worker one for every cycle, the last of which is its final model."""
    names = [*(f"cycle_{k}.safetensors" for k in range(1, cycles)), "model.safetensors"]
    workers = [Instance(method="phase2", repeat=repeat, seed=seed) for seed in sorted(seeds)]
    return {worker.checkpoints / name: worker for worker in workers for name in names}


def average_workers(params: Params, instance: Instance, folder: JobFolder) -> None:
    """Algorithm 1, phase 3, as one of its ranks."""
    from swap_pipeline.averaging import check_origin
    from swap_pipeline.averaging_job import run_averaging_job
    from swap_pipeline.distributed import process_group
    from swap_pipeline.setting import setting_of

    models = model_files(instance.repeat, params.workers.seeds, params.phase2.cycles)
    with process_group() as group:
        for path, worker in models.items():
            check_origin(path, worker.origin)
        run_averaging_job(
            list(models),
            name=instance.name,
            header={"phase": "phase3", "seeds": sorted(params.workers.seeds), **instance.header},
            setting=setting_of(params),
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
