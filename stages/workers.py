"""torchrun --standalone --nproc-per-node 2 -m stages.workers

Would more workers help? The accuracy of averages of 1, 2, … of the workers, and how far the workers are apart:
`analysis/workers.json`.

`python -m stages.workers`, as DVC calls it, checks the params and starts the line above on all devices.
"""

from __future__ import annotations

import click

from swap_pipeline.instances import Instance
from swap_pipeline.launch import run_on_all_devices
from swap_pipeline.params import Analysis, Params, read_params
from swap_pipeline.ranks import chosen_section, run_stage
from swap_pipeline.scratch import JobFolder


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    given: Analysis = chosen_section(params, "analysis")
    instance = Instance(method="workers")
    run_on_all_devices(instance, be_a_rank=lambda folder: average_some(params, given, instance, folder))


def average_some(params: Params, given: Analysis, instance: Instance, folder: JobFolder) -> None:
    """Be one of the ranks."""
    from swap_pipeline.distributed import process_group
    from swap_pipeline.schedules import models_of_cycles
    from swap_pipeline.setting import setting_of
    from swap_pipeline.subsets import run_subsets_job

    cycles = models_of_cycles(epochs=params.phase2.epochs, cycles=params.phase2.cycles)
    names = [*cycles.values(), "model.safetensors"]
    folders = {seed: Instance(method="phase2", seed=seed).checkpoints for seed in params.workers.seeds}
    with process_group() as group:
        run_subsets_job(
            {seed: [models / name for name in names] for seed, models in folders.items()},
            start=Instance(method="phase1").model,
            at_most=given.subsets,
            name=instance.name,
            setting=setting_of(params),
            statistics=params.phase3,
            group=group,
            folder=folder,
        )


if __name__ == "__main__":
    run_stage(main)
