"""torchrun --standalone --nproc-per-node 2 -m stages.phase3

Phase 3 of SWAP: the mean of the workers' weights, with batch-norm statistics of its own.

`python -m stages.phase3`, as DVC calls it, checks the params and starts the line above on all devices.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from swap_pipeline.launch import job_on_all_devices, run_one
from swap_pipeline.params import Params, read_params
from swap_pipeline.ranks import collects, is_rank, job_of_rank, run_stage
from swap_pipeline.scratch import JobFolder, remove_unlisted


@click.command(help=__doc__)
def main() -> None:
    params = read_params()
    if is_rank():
        folder = job_of_rank("phase3")
        average_workers(params, folder)
    else:
        # DVC hashes the whole folder of workers: one that is no longer listed must not be in it.
        for path in remove_unlisted(Path("checkpoints/phase2"), Path("metrics/phase2"), seeds=params.workers.seeds):
            click.echo(f"removed {path}: its seed is not in workers.seeds")
        folder = run_one(job_on_all_devices("phase3"))
    if collects():
        folder.collect(checkpoints=Path("checkpoints/phase3"), record=Path("metrics/phase3.json"))


def model_files(seeds: tuple[int, ...], cycles: int) -> list[Path]:
    """All models to average: of each worker one for every cycle, the last of which is its final model."""
    names = [*(f"cycle_{k}.safetensors" for k in range(1, cycles)), "model.safetensors"]
    return [Path(f"checkpoints/phase2/seed_{seed}") / name for seed in sorted(seeds) for name in names]


def average_workers(params: Params, folder: JobFolder) -> None:
    """Algorithm 1, phase 3, as one of its ranks."""
    from swap_pipeline.averaging import average_files
    from swap_pipeline.batchnorm import batches_of_rank, recompute_statistics
    from swap_pipeline.checkpoint import load_weights
    from swap_pipeline.distributed import process_group
    from swap_pipeline.models import describe_network, new_network
    from swap_pipeline.precision import autocast
    from swap_pipeline.progress import Reporter
    from swap_pipeline.training import evaluate, set_up, write_result
    from swap_pipeline.training_job import describe_model, open_data, view_of_checkpoint

    phase, compute = params.phase3, params.compute
    seeds, models = sorted(params.workers.seeds), model_files(params.workers.seeds, params.phase2.cycles)
    with process_group() as group, folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        reporter = Reporter(name="phase3", total=3, folder=folder.path, is_main=group.is_main)
        meta, train_images, test_images = open_data(root=params.data.root, test_crop=params.data.test_crop, group=group)
        view = view_of_checkpoint(models[-1])
        description = describe_network(params.model, channels=meta.channels, num_classes=len(meta.classes))
        network = new_network(description, seed=0)
        shape = train_images.image_shape(view)
        header = describe_model(description, meta, image_shape=shape, view=view, test_crop=params.data.test_crop)
        mean = folder.path / "mean.safetensors"
        group.wait()
        began = time.perf_counter()
        if group.is_main:
            average_files(models, mean, {})
        group.wait()
        reporter.done(1, f"averaged {len(models)} models")
        load_weights(network, mean)
        set_up(network, compute, group)
        batches = batches_of_rank(
            train_images,
            batch_size=phase.batch_size,
            seed=phase.seed,
            augment=params.data.augment if phase.augment else None,
            view=view,
            group=group,
        )
        with autocast(compute.precision, group.device):
            layers = recompute_statistics(network, batches, variance=phase.variance, group=group)
        group.finish_queued_work()
        seconds = time.perf_counter() - began
        reporter.done(
            2, f"statistics of {layers} batch-norm layers" if layers else "no batch norm, so no statistics to compute"
        )
        loss, accuracy = evaluate(network, test_images, group=group, precision=compute.precision, view=view)
        reporter.done(3, f"test {accuracy:.2f} %  loss {loss:.4f}  {seconds:.1f} s")
        if group.is_main:
            mean.unlink()
            record = {
                "models": len(models),
                "test_accuracy": accuracy,
                "test_loss": loss,
                "seconds": seconds,
                "devices": group.describe(),
            }
            write_result(folder, network, {**header, "phase": "phase3", "seeds": seeds}, record)


if __name__ == "__main__":
    run_stage(main)
