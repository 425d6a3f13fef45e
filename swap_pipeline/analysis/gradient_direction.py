"""Does SGD's direction lead to SWAP's output? Section 4.2 and Figure 4 of the paper, as a job.

At models kept during training: the cosine between the descent direction −g and the direction to SWAP's output,
θ_swap − θ. g is the gradient of the training loss, without weight decay, over a large sample of images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from swap_pipeline.analysis.planes import parameter_names, read_vector
from swap_pipeline.analysis.sample import SamePass, has_room, open_sample
from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.instances import PHASE1, worker
from swap_pipeline.config.kept_models import models_of_cycles, models_to_keep
from swap_pipeline.config.params import Augment, EpochList, Phase3
from swap_pipeline.data.images import Split
from swap_pipeline.data.prepared import View, read_meta
from swap_pipeline.engine.batchnorm import one_pass
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.loss import summed_loss
from swap_pipeline.engine.opening import PREPARED, view_of_checkpoint
from swap_pipeline.engine.placement import set_up
from swap_pipeline.engine.results import read_point, write_point
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.progress import Reporter, time_left
from swap_pipeline.storage.files import write_json
from swap_pipeline.storage.weights import load_weights

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A model kept during training."""

    run: str
    """`phase1`, or `seed_3` for a worker"""
    epoch: int
    """since the start of phase 1, for workers too"""
    path: Path


def snapshots_of_phase1(*, wanted: EpochList, epochs: int) -> list[Snapshot]:
    """Phase 1's kept models and its last one, after `epochs`."""
    phase1 = PHASE1
    names = {**models_to_keep(wanted, epochs=epochs), epochs: phase1.model.name}
    return [Snapshot(run="phase1", epoch=epoch, path=phase1.checkpoints / name) for epoch, name in names.items()]


def snapshots_of_worker(seed: int, *, wanted: EpochList, before: int, epochs: int, cycles: int) -> list[Snapshot]:
    """The same for a worker; phase 1 took `before` epochs."""
    own = worker(seed)
    names = {
        **models_to_keep(wanted, epochs=epochs),
        **models_of_cycles(epochs=epochs, cycles=cycles),
        epochs: own.model.name,
    }
    return [
        Snapshot(run=f"seed_{seed}", epoch=before + epoch, path=own.checkpoints / names[epoch])
        for epoch in sorted(names)
    ]


def labelled_batches(
    images: Split, *, batch_size: int, seed: int, augment: Augment | None, view: View | None, group: Group
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of one pass over all images, in a random order, in batches of at least `batch_size`.

    No batch is shorter: in training mode an image's gradient depends on the others in its batch.
    """
    num_batches = max(1, len(images) // batch_size)
    edges = [len(images) * i // num_batches for i in range(num_batches + 1)]
    return one_pass(images, edges, seed=seed, augment=augment, group=group, view=view)


def mean_gradient(
    network: nn.Module,
    batches: Batches,
    *,
    summed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    num_images: int,
    group: Group,
) -> torch.Tensor:
    """The gradient of the mean loss over the `num_images` of all ranks together, as a float64 vector.

    As in training, batch norm normalises by the batch. Dropout is off, so that the gradient is not random.
    """
    network.eval()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    network.zero_grad(set_to_none=True)
    for images, labels in batches:
        (summed_loss(network(images), labels) / num_images).backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
    gradient = torch.cat([part.double().reshape(-1) for part in parts])
    network.zero_grad(set_to_none=True)
    return group.sum(gradient)


def direction(gradient: torch.Tensor, *, here: torch.Tensor, goal: torch.Tensor) -> dict[str, float] | None:
    """⟨θ_swap − θ, −g⟩ / (‖θ_swap − θ‖ ‖g‖) and both norms; None if there is no direction."""
    way = goal - here
    distance, norm = float(way.norm()), float(gradient.norm())
    if distance == 0 or norm == 0:
        return None
    return {"cosine": -float(way @ gradient) / (distance * norm), "gradient_norm": norm, "distance": distance}


def run_cosine_job(
    snapshots: Sequence[Snapshot],
    *,
    swap: Path,
    gradient_images: int | Literal["all"],
    label_smoothing: float,
    name: str,
    setting: Setting,
    statistics: Phase3,
    group: Group,
    folder: JobFolder,
) -> None:
    """Run one rank of a job that computes the gradient at each snapshot; the ranks share the images.

    Batches, order and augmentation are those of phase 3's pass; precision is fp32. Finished snapshots are saved.
    """
    with folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        reporter = Reporter(name=name, total=max(1, len(snapshots)), folder=folder.path, is_main=group.is_main)
        meta, view = read_meta(PREPARED), view_of_checkpoint(swap)
        images = open_sample(
            "train", gradient_images, seed=setting.seed_of_statistics, setting=setting, group=group, scratch=folder.path
        )
        batches = SamePass(
            lambda: labelled_batches(
                images,
                batch_size=statistics.batch_size,
                seed=setting.seed_of_statistics,
                augment=setting.augment if statistics.augment else None,
                view=view,
                group=group,
            ),
            keep=bool(snapshots) and has_room([images], view=view, device=group.device),
        )
        network = new_network(
            describe_network(setting.model, channels=meta.channels, num_classes=len(meta.classes)), seed=0
        )
        set_up(network, setting.compute, group)
        folder.check_inputs()
        names = parameter_names(network)
        goal = read_vector(swap, names)
        loss = partial(summed_loss, label_smoothing=label_smoothing)
        if snapshots:
            reporter.done(
                0, f"{len(snapshots)} models × {len(images):,} images, forward and backward, on {group.describe()}"
            )

        def direction_at(path: Path) -> dict[str, float] | None:
            load_weights(network, path)
            gradient = mean_gradient(network, batches, summed_loss=loss, num_images=len(images), group=group)
            return direction(gradient.cpu(), here=read_vector(path, names), goal=goal) if group.is_main else None

        points = look_at_all(snapshots, direction_at, group=group, folder=folder, reporter=reporter)
        if not snapshots:
            reporter.done(1, "no models were kept: set phase1.keep_epochs and phase2.keep_epochs (to all)")
        if group.is_main:
            with folder.complete() as result:
                write_json(result / "record.json", {"points": points, "images": len(images), **group.as_json()})


def look_at_all(
    snapshots: Sequence[Snapshot],
    direction_at: Callable[[Path], dict[str, float] | None],
    *,
    group: Group,
    folder: JobFolder,
    reporter: Reporter,
) -> list[dict[str, Any]]:
    """The directions at all snapshots that have one, complete only on the main rank; saved ones are reused."""
    points: list[dict[str, Any]] = []
    began = time.monotonic()
    for number, snapshot in enumerate(snapshots, start=1):
        kept = folder.kept / f"{snapshot.run}_{snapshot.epoch}.json"
        point = read_point(kept) if group.is_main else None
        if not group.main_says(point is not None):
            point = {"run": snapshot.run, "epoch": snapshot.epoch, **(direction_at(snapshot.path) or {})}
            if group.is_main:
                write_point(kept, point)
        if group.is_main and point is not None:
            what = f"cosine {point['cosine']:+.4f}" if "cosine" in point else "no direction: this is SWAP's output"
            left = time_left(began, number, len(snapshots))
            reporter.done(number, f"{number}/{len(snapshots)}  {snapshot.run} epoch {snapshot.epoch}  {what}{left}")
            points += [point] if "cosine" in point else []
    return points
