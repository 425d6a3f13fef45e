"""torchrun --standalone --nproc-per-node 1 -m stages.phase2 --seed 3

Phase 2 of SWAP: a worker refines phase 1's model with small batches, in a data order of its own.

`python -m stages.phase2 --seed 3`, as DVC calls it, starts the line above, and beside it every other seed of
`workers.seeds` that DVC would have to train, in parallel over the devices; their turn then finds the work done.
"""

from __future__ import annotations

from pathlib import Path

import click

from swap_pipeline.errors import SwapError
from swap_pipeline.launch import pending_seeds, run_fan_out, worker_job
from swap_pipeline.params import Params, read_params
from swap_pipeline.ranks import collects, is_rank, job_of_rank, run_stage
from swap_pipeline.scratch import JobFolder


@click.command(help=__doc__)
@click.option("--seed", "text", required=True, help="which worker, one of workers.seeds")
def main(text: str) -> None:
    params = read_params()
    seed = chosen_seed(text, params.workers.seeds)
    if is_rank():
        folder = job_of_rank("phase2", seed=seed)
        train_worker(params, seed, folder)
    else:
        folder = run_fan_out(
            seed,
            others=lambda: pending_seeds("phase2", params.workers.seeds, asked=seed),
            job=lambda seed: worker_job(
                "phase2",
                seed=seed,
                processes=params.phase2.gpus_per_worker,
                batch_size=params.phase2.batch_size,
            ),
        )
    if collects():
        folder.collect(
            checkpoints=Path(f"checkpoints/phase2/seed_{seed}"), record=Path(f"metrics/phase2/seed_{seed}.json")
        )


def chosen_seed(text: str, listed: tuple[int, ...]) -> int:
    """One of `workers.seeds`; only those take part in the average, and only those are kept."""
    if text not in map(str, listed):
        raise SwapError(f"--seed {text} is not in workers.seeds {list(listed)}: add it there first")
    return int(text)


def train_worker(params: Params, seed: int, folder: JobFolder) -> None:
    """Algorithm 1, phase 2, for one w."""
    from swap_pipeline.data import derive_seed
    from swap_pipeline.training_job import make_run, run_training_job

    phase = params.phase2
    cycle = phase.epochs // phase.cycles
    run_training_job(
        make_run(
            phase,
            name=f"phase2 seed {seed}",
            section="phase2",
            seed=derive_seed("phase2", seed),
            epochs=phase.epochs,
            cycles=phase.cycles,
            first_epoch=phase.first_epoch or 0,
        ),
        start=Path("checkpoints/phase1/model.safetensors"),
        header={"phase": "phase2", "seed": seed},
        root=params.data.root,
        test_crop=params.data.test_crop,
        augment=params.data.augment,
        model=params.model,
        optimizer=params.optimizer,
        compute=params.compute,
        folder=folder,
        # The last cycle's model is the result itself.
        keep={cycle * k: f"cycle_{k}.safetensors" for k in range(1, phase.cycles)},
    )


if __name__ == "__main__":
    run_stage(main)
