"""The mean of several models as a job: weights averaged, batch-norm statistics of its own, tested."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swap_pipeline.averaging import average_files
from swap_pipeline.batchnorm import batches_of_rank, recompute_statistics
from swap_pipeline.checkpoint import load_weights
from swap_pipeline.distributed import Group
from swap_pipeline.models import describe_network, new_network
from swap_pipeline.params import Augment, Compute, Model, Phase3
from swap_pipeline.precision import autocast
from swap_pipeline.progress import Reporter
from swap_pipeline.scratch import JobFolder
from swap_pipeline.training import evaluate, set_up, write_result
from swap_pipeline.training_job import describe_model, open_data, view_of_checkpoint


def run_averaging_job(
    models: Sequence[Path],
    *,
    name: str,
    header: Mapping[str, Any],
    root: str,
    test_crop: str,
    augment: Augment,
    model: Model,
    compute: Compute,
    statistics: Phase3,
    group: Group,
    folder: JobFolder,
    before: Mapping[str, Any] | None = None,
) -> None:
    """Be one rank of a job that averages `models`.

    `before` is what is known of their training, for the record; its seconds are added to those of averaging.
    """
    with folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        started = time.time()
        reporter = Reporter(name=name, total=3, folder=folder.path, is_main=group.is_main)
        meta, train_images, test_images = open_data(root=root, test_crop=test_crop, group=group)
        view = view_of_checkpoint(models[-1])
        description = describe_network(model, channels=meta.channels, num_classes=len(meta.classes))
        network = new_network(description, seed=0)
        shape = train_images.image_shape(view)
        about = describe_model(description, meta, image_shape=shape, view=view, test_crop=test_crop)
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
            batch_size=statistics.batch_size,
            seed=statistics.seed,
            augment=augment if statistics.augment else None,
            view=view,
            group=group,
        )
        with autocast(compute.precision, group.device):
            layers = recompute_statistics(network, batches, variance=statistics.variance, group=group)
        group.finish_queued_work()
        seconds = time.perf_counter() - began
        reporter.done(
            2, f"statistics of {layers} batch-norm layers" if layers else "no batch norm, so no statistics to compute"
        )
        score = evaluate(network, test_images, group=group, precision=compute.precision, view=view)
        reporter.done(3, f"test {score.accuracy:.2f} %  loss {score.loss:.4f}  {seconds:.1f} s")
        if group.is_main:
            mean.unlink()
            record = {
                **(before or {}),
                "models": len(models),
                **score.as_json(),
                "seconds": seconds + (before["seconds"] if before else 0.0),
                **group.as_json(),
                "ran": [before["ran"][0] if before else started, time.time()],
            }
            write_result(folder, network, {**about, **header}, record)
