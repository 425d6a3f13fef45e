"""Checks before training: settings that cannot work, networks that do not fit the images."""

from __future__ import annotations

import torch
from torch import nn

from swap_pipeline.config.params import Precision
from swap_pipeline.data.augmentation import check_augment
from swap_pipeline.data.epochs import steps_per_epoch
from swap_pipeline.data.prepared import Meta
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.out_of_memory import is_out_of_memory
from swap_pipeline.engine.precision import autocast
from swap_pipeline.errors import SwapError
from swap_pipeline.training.run import Run, TrainingData


def check_view(run: Run, meta: Meta) -> None:
    """Images from files need a size to resize them to; images in memory keep theirs."""
    view = run.view(0)
    key = f"params.yaml: {run.section}.image_size"
    if meta.shape is None and view is None:
        raise SwapError(f"{key} is missing: images come from files of any size, so set the size to resize them to")
    if meta.shape is not None and view is not None:
        raise SwapError(
            f"{key} has no effect on images that were prepared in memory, {meta.shape[1]}×{meta.shape[2]} pixels: "
            f"remove it (and min_scale), or set data.max_gb_in_memory: 0 to read them from files"
        )


def check_run(run: Run, data: TrainingData, group: Group) -> None:
    """Reject what would fail in one of the epochs."""
    if run.shards % group.world_size:
        raise SwapError(
            f"params.yaml: {run.section}.shards is {run.shards}, which {group.world_size} processes cannot share "
            f"equally: set --nproc-per-node to a number that divides it"
        )
    for epoch in range(run.epochs):
        batch_size = run.batch_size(epoch)
        if steps_per_epoch(len(data.train), batch_size) == 0:
            raise SwapError(
                f"params.yaml: {run.section}.batch_size is {batch_size}, more than the {len(data.train)} training "
                f"images: lower it"
            )
        check_augment(data.augment, data.train.image_shape(run.view(epoch))[1:])
    if run.leaving.stop == "fork" and (run.leaving.fork_batch_size or 0) > len(data.train):
        raise SwapError(
            f"params.yaml: phase1.fork_batch_size is {run.leaving.fork_batch_size}, more than the {len(data.train)} "
            f"training images: lower it"
        )


def try_out(network: nn.Module, run: Run, data: TrainingData, *, precision: Precision, group: Group) -> None:
    """Check with two blank images that the network takes the image sizes of all epochs and has the right outputs."""
    network.eval()
    for shape in sorted({data.train.image_shape(run.view(epoch)) for epoch in range(run.epochs)}):
        try:
            with torch.no_grad(), autocast(precision, group.device):
                output = network(torch.zeros(2, *shape, device=group.device))
        except Exception as error:
            if _is_of_gpu(error) and not is_out_of_memory(error):
                raise  # a driver, library or device error, not the network's
            raise _misfit(error, shape) from None
        if getattr(output, "shape", None) != (2, data.num_classes):
            found = f"{output.shape[1]} values" if getattr(output, "ndim", 0) == 2 else f"{type(output).__name__}"
            raise SwapError(
                f"the network of params.yaml (model) returns {found} for each image, but the data has "
                f"{data.num_classes} classes: it must return one value for each class"
            )


def _is_of_gpu(error: Exception) -> bool:
    """Whether CUDA or one of its libraries failed."""
    words = ("CUDA error", "CUDA driver", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "cuFFT error", "HIP error")
    return any(word in str(error) for word in words)


def _misfit(error: Exception, shape: tuple[int, ...]) -> SwapError:
    size, why = "×".join(map(str, shape[1:])), " ".join(str(error).split())
    if is_out_of_memory(error):
        return SwapError(
            f"two images of {size} pixels and the network of params.yaml (model) did not fit into memory: use "
            f"a smaller network or image_size, or end other processes on the device"
        )
    return SwapError(
        f"the network of params.yaml (model) cannot take images of {size} pixels ({type(error).__name__}: "
        f"{why}): change image_size or model.options, or use another one"
    )
