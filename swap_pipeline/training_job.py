"""One run of the SGD loop as a job: from prepared data to a result in its scratch folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from swap_pipeline.checkpoint import load_weights
from swap_pipeline.data import Images, Meta, read_images, read_meta
from swap_pipeline.distributed import Group, process_group
from swap_pipeline.models import describe_network, new_network
from swap_pipeline.params import Augment, Compute, Model, Optimizer
from swap_pipeline.progress import Reporter
from swap_pipeline.scratch import JobFolder
from swap_pipeline.training import Run, train, write_result

PREPARED = Path("data/prepared")


def open_data(group: Group) -> tuple[Meta, Images, Images]:
    """The prepared data set on this rank's device: what is known of it, training and test images."""
    meta = read_meta(PREPARED)
    return meta, read_images(PREPARED, "train", group.device), read_images(PREPARED, "test", group.device)


def prepare_network(model: Model, meta: Meta, *, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A fresh network for this data, and the header from which it can be rebuilt and used."""
    description = describe_network(
        name=model.name, width=model.width, channels=meta.shape[0], num_classes=len(meta.classes)
    )
    header = {
        "model": description,
        "classes": list(meta.classes),
        "shape": list(meta.shape),
        "mean": list(meta.mean),
        "std": list(meta.std),
    }
    return new_network(description, seed=seed), header


def run_training_job(
    run: Run,
    *,
    start: int | Path,
    header: Mapping[str, Any],
    model: Model,
    augment: Augment,
    optimizer: Optimizer,
    compute: Compute,
    folder: JobFolder,
) -> None:
    """Be one rank of a training job that starts from a seed's weights or from a checkpoint's."""
    with process_group() as group, folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        meta, train_images, test_images = open_data(group)
        network, about = prepare_network(model, meta, seed=start if isinstance(start, int) else 0)
        if isinstance(start, Path):
            load_weights(network, start)
        record = train(
            run,
            network,
            train_images=train_images,
            test_images=test_images,
            augment=augment,
            optimizer=optimizer,
            compute=compute,
            group=group,
            snapshots=folder.path,
            reporter=Reporter(name=run.name, total=run.epochs, folder=folder.path, is_main=group.is_main),
        )
        if group.is_main:
            write_result(folder, network, {**about, **header}, {**record.as_json(), "devices": group.describe()})
