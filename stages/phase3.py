"""torchrun --standalone --nproc-per-node 2 -m stages.phase3

Phase 3 of SWAP: the mean of the weights of all workers, or of those that `phase3.select` selects, with recomputed
batch-norm statistics. Also evaluates the mean after each of `phase2.keep_epochs`, as if phase 2 had ended there.

`python -m stages.phase3`, as in dvc.yaml, checks the params and runs the command above on as many devices as phase 1.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.config.instances import PHASE3, worker
from swap_pipeline.config.kept_models import models_if_ended
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.launch.collecting import remove_unlisted
from swap_pipeline.launch.stage_jobs import run_alone
from swap_pipeline.runtime.inputs import check_trained_alike
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.rank import is_rank
from swap_pipeline.runtime.stage_process import run_stage


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    if not is_rank():
        # DVC hashes the whole folder of workers, so those no longer listed must not be in it.
        first = worker(params.workers.seeds[0])
        for path in remove_unlisted(first.checkpoints.parent, first.record.parent, seeds=params.workers.seeds):
            click.echo(f"removed {path}: its seed is not in workers.seeds")
        check_trained_alike([worker(seed) for seed in params.workers.seeds])
    run_alone(PHASE3, shards=params.phase1.shards, be_a_rank=lambda folder: average_workers(params, folder))


def models_after(epoch: int, *, seeds: tuple[int, ...], epochs: int, cycles: int) -> dict[int, list[Path]]:
    """Models to average if phase 2 ends after `epoch`: each worker's model then, and those of its past cycles."""
    names = models_if_ended(epoch, epochs=epochs, cycles=cycles)
    return {seed: [worker(seed).checkpoints / name for name in names] for seed in sorted(seeds)}


def average_workers(params: Params, folder: JobFolder) -> None:
    """Algorithm 1, phase 3, as one of its ranks; also the averages at `phase2.keep_epochs`."""
    from swap_pipeline.averaging.job import run_averaging_job
    from swap_pipeline.averaging.mean import check_origin
    from swap_pipeline.config.common_params import setting_of
    from swap_pipeline.config.kept_models import label_of_epoch, models_to_keep
    from swap_pipeline.engine.distributed import process_group

    phase2, seeds = params.phase2, params.workers.seeds
    models = {
        epoch: models_after(epoch, seeds=seeds, epochs=phase2.epochs, cycles=phase2.cycles)
        for epoch in (*models_to_keep(phase2.keep_epochs, epochs=phase2.epochs), phase2.epochs)
    }
    with process_group(deterministic=params.compute.deterministic) as group:
        for path, seed in {
            path: seed for of in models.values() for seed, paths in of.items() for path in paths
        }.items():
            check_origin(path, worker(seed).origin)
        run_averaging_job(
            {label_of_epoch(epoch): of_workers for epoch, of_workers in models.items()},
            name=PHASE3.name,
            header={"phase": "phase3", "seed": params.seed},
            setting=setting_of(params),
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
