"""torchrun --standalone --nproc-per-node 1 -m stages.phase2 --seed 3

Phase 2 of SWAP: a worker refines phase 1's model with small batches, in a data order of its own.

`python -m stages.phase2 --seed 3` runs the command above and, in parallel over the devices, every other seed of
`workers.seeds` that DVC would have to train, so that their instances find the work done. dvc.yaml leaves `--seed` out:
DVC names the worker in the variable DVC_STAGE, as in `phase2@3`.
"""

from __future__ import annotations

import os

import click

from swap_pipeline.config.instances import PHASE1, Instance, worker
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.launch.collecting import collect
from swap_pipeline.launch.devices import share_of_worker, this_machine
from swap_pipeline.launch.stage_jobs import job_with, run_fan_out
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.rank import is_rank, job_of_rank
from swap_pipeline.runtime.stage_process import collects, run_stage


@click.command(help=__doc__)
@click.option("--seed", "text", help="which worker, one of workers.seeds; by default the one that DVC runs")
def main(text: str | None) -> None:
    params = read_params()
    instance = worker(chosen_seed(seed_in_dvc() if text is None else text, params.workers.seeds))
    if is_rank():
        folder = job_of_rank(instance)
        train_worker(params, instance, folder)
    else:
        share = share_of_worker(this_machine(), shards=params.phase2.shards)
        folder = run_fan_out(
            instance,
            others=[worker(seed) for seed in params.workers.seeds if seed != instance.seed],
            job=lambda instance: job_with(instance, share),
        )
    if collects():
        collect(folder, instance)


def seed_in_dvc() -> str:
    """The 3 in `phase2@3`, or in `../dvc.yaml:phase2@3` if DVC was called from another folder.

    It is not part of the command, since a shell would then interpret text from a params file.
    """
    stage, _, seed = os.environ.get("DVC_STAGE", "").rpartition(":")[2].partition("@")
    if stage != "phase2":
        raise SwapError("--seed is missing: choose one of workers.seeds")
    return seed


def chosen_seed(text: str, listed: tuple[int, ...]) -> int:
    """One of `workers.seeds`; others would be neither averaged nor kept."""
    if text not in map(str, listed):
        raise SwapError(f"--seed {shown(text)} is not in workers.seeds {list(listed)}: add it there first")
    return int(text)


def train_worker(params: Params, instance: Instance, folder: JobFolder) -> None:
    """Algorithm 1, phase 2, for one w."""
    from swap_pipeline.config.common_params import setting_of
    from swap_pipeline.config.kept_models import models_of_cycles, models_to_keep
    from swap_pipeline.engine.distributed import process_group
    from swap_pipeline.training.job import run_of_worker, run_training_job

    phase = params.phase2
    ends_of_cycles = models_of_cycles(epochs=phase.epochs, cycles=phase.cycles)
    assert instance.seed is not None
    with process_group(deterministic=params.compute.deterministic) as group:
        run_training_job(
            run_of_worker(phase, worker=instance.seed, seed=params.seed),
            start=PHASE1.model,
            header={"phase": "phase2", "seed": instance.seed},
            setting=setting_of(params),
            optimizer=phase.optimizer or params.optimizer,
            group=group,
            folder=folder,
            keep={**models_to_keep(phase.keep_epochs, epochs=phase.epochs), **ends_of_cycles},
            averaged=ends_of_cycles,
        )


if __name__ == "__main__":
    run_stage(main)
