"""torchrun --standalone --nproc-per-node 2 -m stages.averaged

What SWAP's average would have been, had phase 2 stopped earlier: after each of `phase2.keep_epochs` the workers'
models are averaged and tested, as in phase 3. After the last epoch it is phase 3's own result.

`python -m stages.averaged`, as DVC calls it, checks the params and starts the line above on all devices.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.instances import Instance
from swap_pipeline.launch import run_on_all_devices
from swap_pipeline.params import Params, read_params
from swap_pipeline.ranks import run_stage
from swap_pipeline.scratch import JobFolder


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    instance = Instance(method="averaged")
    run_on_all_devices(instance, be_a_rank=lambda folder: average_each_epoch(params, instance, folder))


def models_after(epoch: int, *, seeds: tuple[int, ...], epochs: int, cycles: int) -> dict[Path, Instance]:
    """What would be averaged if phase 2 ended after `epoch`: of each worker its model, and those of its past cycles."""
    cycle = epochs // cycles
    ended = [f"cycle_{k}.safetensors" for k in range(1, (epoch - 1) // cycle + 1)]
    if epoch == epochs:
        last = "model.safetensors"
    elif epoch % cycle == 0:
        last = f"cycle_{epoch // cycle}.safetensors"
    else:
        last = f"epoch_{epoch}.safetensors"
    workers = [Instance(method="phase2", seed=seed) for seed in sorted(seeds)]
    return {worker.checkpoints / name: worker for worker in workers for name in (*ended, last)}


def average_each_epoch(params: Params, instance: Instance, folder: JobFolder) -> None:
    """Be one of the ranks."""
    from swap_pipeline.averaging import check_origin
    from swap_pipeline.averaging_job import run_averages_job
    from swap_pipeline.distributed import process_group
    from swap_pipeline.setting import setting_of

    epochs, cycles, wanted = params.phase2.epochs, params.phase2.cycles, params.phase2.keep_epochs
    kept = [epoch for epoch in range(1, epochs + 1) if wanted == "all" or epoch in wanted or epoch == epochs]
    models = {
        f"epoch_{epoch}": models_after(epoch, seeds=params.workers.seeds, epochs=epochs, cycles=cycles)
        for epoch in kept
    }
    with process_group() as group:
        for path, worker in {path: worker for files in models.values() for path, worker in files.items()}.items():
            check_origin(path, worker.origin)
        run_averages_job(
            {label: list(files) for label, files in models.items()},
            name=instance.name,
            setting=setting_of(params),
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
