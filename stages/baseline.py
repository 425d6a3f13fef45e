"""torchrun --standalone --nproc-per-node 1 -m stages.baseline small_batch

Plain training, to compare SWAP with: small or large batches from the beginning to the end.

`python -m stages.baseline small_batch`, as DVC calls it, starts the line above on as many devices as the section of
`params.yaml` asks for. With `--repeat 1`, the further repeats that DVC would have to train start beside it, where
there are devices left.
"""

from __future__ import annotations

import click

from swap_pipeline.headline import write_headline
from swap_pipeline.instances import BASELINES, Instance
from swap_pipeline.launch import baseline_job, run_fan_out
from swap_pipeline.params import Baseline, Params, read_params
from swap_pipeline.ranks import chosen_repeat, chosen_section, collects, is_rank, job_of_rank, run_stage
from swap_pipeline.scratch import JobFolder


@click.command(help=__doc__)
@click.argument("method", type=click.Choice(BASELINES))
@click.option("--repeat", default="0", help="one of repeats; 0 has the seeds of the plain pipeline")
def main(method: str, repeat: str) -> None:
    params = read_params()
    instance = Instance(method=method, repeat=chosen_repeat(repeat, params.repeats))
    given: Baseline = chosen_section(params, method)
    if is_rank():
        folder = job_of_rank(instance)
        train_baseline(params, given, instance, folder)
    else:
        folder = run_fan_out(
            instance,
            others=instance.siblings(params.repeats),
            job=lambda instance: baseline_job(instance, gpus=given.gpus, batch_size=given.batch_size),
        )
    if collects():
        folder.collect(instance)
        write_headline(instance)


def train_baseline(params: Params, given: Baseline, instance: Instance, folder: JobFolder) -> None:
    """Plain SGD, as one of its ranks; repeat 0 starts from the same weights as phase 1."""
    from swap_pipeline.data import derive_seed
    from swap_pipeline.distributed import process_group
    from swap_pipeline.setting import setting_of
    from swap_pipeline.training_job import make_run, run_training_job

    seed = params.phase1.seed
    with process_group() as group:
        run_training_job(
            make_run(
                given,
                name=instance.name,
                section=instance.method,
                seed=derive_seed(instance.method, seed, *instance.chance),
                epochs=given.epochs,
                chance=f"phase1.seed {seed}",
            ),
            start=derive_seed("initial weights", seed, *instance.chance),
            header={"phase": instance.method, "seed": seed, **instance.header},
            setting=setting_of(params),
            optimizer=params.optimizer,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
