"""torchrun --standalone --nproc-per-node 1 -m stages.swa swa_small_batch

SWA (Izmailov et al. 2018), to compare SWAP with: from a trained model on, one model after another, each at the end of a
cycle of the learning rate, and their average.

`python -m stages.swa swa_small_batch`, as DVC calls it, starts the line above on as many devices as trained the model
that it starts from. With `--repeat 1`, the further repeats that DVC would have to train start beside it, where there
are devices left.
"""

from __future__ import annotations

from typing import Any

import click

from swap_pipeline.headline import write_headline
from swap_pipeline.instances import SWA_STARTS, Instance
from swap_pipeline.launch import baseline_job, run_fan_out, worker_job
from swap_pipeline.params import Baseline, Params, Schedule, Swa, read_params
from swap_pipeline.ranks import chosen_repeat, chosen_section, collects, is_rank, job_of_rank, run_stage
from swap_pipeline.schedules import cyclic_after, models_of_cycles
from swap_pipeline.scratch import JobFolder


@click.command(help=__doc__)
@click.argument("method", type=click.Choice(tuple(SWA_STARTS)))
@click.option("--repeat", default="0", help="one of repeats; 0 has the seeds of the plain pipeline")
def main(method: str, repeat: str) -> None:
    params = read_params()
    instance = Instance(method=method, repeat=chosen_repeat(repeat, params.repeats))
    given: Swa = chosen_section(params, method)
    section, schedule, gpus = schedule_of(method, params, given)
    if is_rank():
        folder = job_of_rank(instance)
        train_and_average(params, given, schedule, section, instance, folder)
    else:
        folder = run_fan_out(
            instance,
            others=instance.siblings(params.repeats),
            job=lambda instance: (
                worker_job(instance, processes=gpus, batch_size=schedule.batch_size)
                if section == "phase2"
                else baseline_job(instance, section=section, gpus=gpus, batch_size=schedule.batch_size)
            ),
        )
    if collects():
        folder.collect(instance)
        samples_of(folder).remove()
        write_headline(instance)


def schedule_of(method: str, params: Params, given: Swa) -> tuple[str, Schedule, int]:
    """Batches, in which section they stand, and GPUs: as at the end of the run before, after phase 1 as in phase 2."""
    if method == "swa_large_then_small":
        phase = params.phase2
        end = (phase.first_epoch or 0) + phase.epochs - 1
        return "phase2", cyclic_after(phase, last_epoch=end, peak_lr=given.peak_lr), phase.gpus_per_worker
    section = SWA_STARTS[method]
    before: Baseline = chosen_section(params, section)
    return section, cyclic_after(before, last_epoch=before.epochs - 1, peak_lr=given.peak_lr), before.gpus


def train_and_average(
    params: Params, given: Swa, schedule: Schedule, section: str, instance: Instance, folder: JobFolder
) -> None:
    """SWA, as one of its ranks; its last cycle's model and the others become one."""
    from swap_pipeline.averaging_job import run_averaging_job
    from swap_pipeline.data import derive_seed
    from swap_pipeline.distributed import process_group
    from swap_pipeline.files import read_json
    from swap_pipeline.setting import setting_of
    from swap_pipeline.training_job import make_run, run_training_job

    models = given.models or len(params.workers.seeds) * params.phase2.cycles
    cycle = given.cycle_epochs or params.phase2.epochs // params.phase2.cycles
    seed = params.phase1.seed
    assert instance.start is not None
    shared: dict[str, Any] = {
        "header": {"phase": instance.method, "seed": seed, **instance.header},
        "setting": setting_of(params),
    }
    with process_group() as group:
        if group.main_says(folder.is_complete):
            return
        trained = samples_of(folder)
        samples = models_of_cycles(epochs=models * cycle, cycles=models)
        run_training_job(
            make_run(
                schedule,
                name=instance.name,
                section=section,
                seed=derive_seed(instance.method, seed, *instance.chance),
                epochs=models * cycle,
                cycles=models,
                chance=f"phase1.seed {seed}",
            ),
            start=instance.start.model,
            optimizer=params.optimizer,
            group=group,
            folder=trained,
            progress=folder.path,
            keep=samples,
            **shared,
        )
        group.wait()  # for the main rank to write the result
        run_averaging_job(
            [trained.result / name for name in (*samples.values(), "model.safetensors")],
            name=instance.name,
            statistics=params.phase3,
            group=group,
            folder=folder,
            before=of_samples(read_json(trained.result / "record.json"), cycle),
            **shared,
        )


def samples_of(folder: JobFolder) -> JobFolder:
    """Where the models to average are, until they are."""
    return JobFolder(folder.path / "trained")


def of_samples(record: dict[str, Any], cycle: int) -> dict[str, Any]:
    """What is known of the training of the models that are averaged: those at each cycle's end."""
    samples = record["curve"][cycle - 1 :: cycle]
    return {
        "curve": record["curve"],
        "cycle_epochs": cycle,
        "model_accuracies": [row["test_accuracy"] for row in samples],
        "seconds": record["seconds"],
        "ran": record["ran"],
    }


if __name__ == "__main__":
    run_stage(main)
