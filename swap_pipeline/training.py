"""The one SGD loop.

Phase 1, every worker of phase 2 and any baseline are calls of `train`; they differ in the `Run` they hand it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swap_pipeline.data import Split, batch_share, check_augment, derive_seed, draw_epoch, seed_torch, steps_per_epoch
from swap_pipeline.distributed import Group
from swap_pipeline.errors import SwapError
from swap_pipeline.evaluation import evaluate
from swap_pipeline.memory import is_out_of_memory, must_fit
from swap_pipeline.params import Augment, Compute, Optimizer, check_divisible
from swap_pipeline.placement import set_up
from swap_pipeline.precision import Scaler, autocast
from swap_pipeline.progress import Reporter
from swap_pipeline.ranks import quick_imports
from swap_pipeline.resuming import Begun, keep, resume
from swap_pipeline.runs import Epoch, Record, Run, reason_to_stop
from swap_pipeline.sgd import FiniteGuard, Sgd
from swap_pipeline.stopping import Stopped, StopRequest


def train(
    run: Run,
    network: nn.Module,
    *,
    train_images: Split,
    test_images: Split,
    augment: Augment,
    optimizer: Optimizer,
    compute: Compute,
    group: Group,
    snapshots: Path,
    reporter: Reporter,
    num_classes: int | None = None,
    at_epoch_end: Callable[[int], None] = lambda epoch: None,
) -> Record:
    """Train `network` in place, from its present weights or from the newest snapshot in the folder `snapshots`.

    `at_epoch_end(epoch)` is called on the main rank when the network is as it is after so many epochs, and once more
    for an epoch that is repeated after a kill.
    """
    _check(run, train_images, augment, group)
    set_up(network, compute, group)
    with autocast(compute.precision, group.device):
        shapes = {train_images.image_shape(run.view(epoch)) for epoch in range(run.epochs)}
        _try_out(network, shapes, num_classes, group)
    parallel: Callable[..., torch.Tensor] = _wrap(network, train_images.image_shape(run.view(0)), group)
    if compute.compile:
        # What is compiled is a wrapper: `network` itself, and with it the names in checkpoints, stay as they are.
        # One static graph for each image size, so that a resumed run computes like one that was never stopped.
        parallel = torch.compile(parallel, dynamic=False)
    scaler = Scaler(compute.precision, group.device)
    sgd = Sgd(network, optimizer, scaler)
    curve, begun = resume(run, network, sgd, snapshots, group, num_images=len(train_images))
    if curve or begun.step:
        after = f"epoch {len(curve)}" + (f" and {begun.step} steps" if begun.step else "")
        reporter.done(len(curve), f"going on after {after}")
    guard = FiniteGuard(run, group.device, precision=scaler.precision, tolerance=scaler.tolerance)
    stop = StopRequest(snapshots, of_main=group.number_of_main)

    while not (finished := reason_to_stop(run, curve)):
        epoch = len(curve)
        group.finish_queued_work()
        began = time.perf_counter()
        view, batch_size = run.view(epoch), run.batch_size(epoch)
        steps = steps_per_epoch(len(train_images), batch_size)
        choices = draw_epoch(
            seed=run.seed,
            epoch=epoch,
            num_images=len(train_images),
            image_size=train_images.image_shape(view)[1:],
            padding=augment.padding,
            flip=augment.flip,
            cutout=augment.cutout,
            device=group.device,
        )
        batches = train_images.batches(
            choices,
            [
                batch_share(step, batch_size=batch_size, rank=group.rank, world_size=group.world_size)
                for step in range(begun.step, steps)
            ],
            view=view,
            padding=augment.padding,
            cutout=augment.cutout,
            channels_last=compute.channels_last,
        )
        sums = begun.sums
        rate = 0.0
        network.train()
        too_much = must_fit(
            f"{run.name}: a batch of {batch_size // group.world_size} images on each device",
            remedy=f"lower {run.section}.batch_size",
        )
        with too_much:
            for step, (images, labels) in enumerate(batches, start=begun.step):
                rate = run.learning_rate(epoch + step / steps)
                # For dropout and the like: a function of the step, never of how often the process was started.
                seed_torch(derive_seed("step", run.seed, epoch, step, group.rank), group.device)
                with autocast(compute.precision, group.device):
                    logits = parallel(images)
                    loss = nn.functional.cross_entropy(logits, labels, label_smoothing=optimizer.label_smoothing)
                sgd.zero_grad()
                scaler.scale(loss).backward()
                sgd.step(rate, skip_if=guard.look(epoch, step, sgd.gradients()))
                with torch.no_grad():
                    sums[0] += loss.detach() * len(labels)
                    sums[1] += (logits.argmax(dim=1) == labels).sum()
                reporter.step(epoch, step, steps)
                if step + 1 < steps and stop.is_due():
                    guard.check()
                    group.finish_queued_work()
                    seconds = begun.seconds + time.perf_counter() - began
                    keep(run, snapshots, network, sgd, curve, group, Begun(step=step + 1, sums=sums, seconds=seconds))
                    raise Stopped
        guard.check()
        loss_sum, hits = group.sum(sums).tolist()
        guard.check_loss(epoch, loss_sum)
        seconds = begun.seconds + time.perf_counter() - began
        begun = Begun.new(group)

        average_buffers(network, group)
        test = evaluate(network, test_images, group=group, precision=compute.precision, view=view)
        seen = steps * batch_size
        row = Epoch(
            epoch=epoch + 1,
            learning_rate=rate,
            train_loss=loss_sum / seen,
            train_accuracy=100 * hits / seen,
            test_loss=test.loss,
            test_accuracy=test.accuracy,
            test_top5=test.top5,
            seconds=seconds,
        )
        curve.append(row)
        if group.is_main:
            at_epoch_end(row.epoch)
        keep(run, snapshots, network, sgd, curve, group)
        reporter.done(row.epoch, _line(row, run))
        if not reason_to_stop(run, curve) and stop.is_due():  # with all done, only the result is left to be written
            raise Stopped
    return Record(curve=tuple(curve), stopped_by=finished)


def _line(row: Epoch, run: Run) -> str:
    return (
        f"epoch {row.epoch}/{run.epochs}  test {row.test_accuracy:.2f} %  train {row.train_accuracy:.2f} %  "
        f"loss {row.train_loss:.4f}  lr {row.learning_rate:.4f}  {row.seconds:.1f} s"
    )


def _check(run: Run, train_images: Split, augment: Augment, group: Group) -> None:
    """Refuse, before anything is computed, what would fail in one of the epochs."""
    key = f"{run.section}.batch_size"
    for epoch in range(run.epochs):
        batch_size = run.batch_size(epoch)
        check_divisible(key, batch_size, group.world_size, remedy="set --nproc-per-node to")
        if steps_per_epoch(len(train_images), batch_size) == 0:
            raise SwapError(
                f"params.yaml: {key} is {batch_size}, more than the {len(train_images)} training images: lower it"
            )
        size = train_images.image_shape(run.view(epoch))[1:]
        check_augment(padding=augment.padding, cutout=augment.cutout, image_size=size)


def _try_out(network: nn.Module, image_shapes: Set[tuple[int, ...]], num_classes: int | None, group: Group) -> None:
    """Find out with two blank images, before training, whether the network takes these sizes and tells all classes."""
    for shape in sorted(image_shapes):
        network.eval()
        try:
            with torch.no_grad():
                output = network(torch.zeros(2, *shape, device=group.device))
        except Exception as error:
            size, why = "×".join(map(str, shape[1:])), " ".join(str(error).split())
            if is_out_of_memory(error):
                raise SwapError(
                    f"two images of {size} pixels and the network of params.yaml (model) did not fit into memory: take "
                    f"a smaller network or image_size, or free the device of other processes"
                ) from None
            raise SwapError(
                f"the network of params.yaml (model) cannot take images of {size} pixels ({type(error).__name__}: "
                f"{why}): change image_size or model.options, or take another one"
            ) from None
        if num_classes is not None and getattr(output, "shape", None) != (2, num_classes):
            found = f"{output.shape[1]} values" if getattr(output, "ndim", 0) == 2 else f"{type(output).__name__}"
            raise SwapError(
                f"the network of params.yaml (model) gives {found} for each image, but the data has {num_classes} "
                f"classes: let it give one value for each class"
            )


def _check_that_all_learn(network: nn.Module, loss: torch.Tensor) -> None:
    """DDP waits for the gradient of every parameter."""
    loss.backward()
    idle = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise SwapError(
            f"the network of params.yaml (model) has parameters that nothing depends on ({', '.join(idle[:3])}"
            f"{' …' if len(idle) > 3 else ''}), which several processes cannot train: remove them, or SWAP_NPROC=1"
        )
    network.zero_grad(set_to_none=True)


def _wrap(network: nn.Module, image_shape: tuple[int, ...], group: Group) -> nn.Module:
    """DDP, with its gradient buckets in their final form.

    DDP regroups its buckets after the first backward pass, which changes the order of sums over more than two ranks.
    A pass is spent on that now, so that a resumed run adds up in the same order as one that was never stopped.
    """
    if group.world_size == 1:
        return network
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    blank = torch.zeros(2, *image_shape, device=group.device)
    network.train()
    _check_that_all_learn(network, network(blank).sum())
    with quick_imports():  # of torch's compiler, by DDP
        parallel = DistributedDataParallel(
            network,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
    parallel(blank).sum().backward()
    parallel.zero_grad(set_to_none=True)
    network.load_state_dict(before)
    return parallel


def average_buffers(network: nn.Module, group: Group) -> None:
    """Give all ranks the mean of their running statistics, which DDP leaves to each rank."""
    if group.world_size == 1:
        return
    buffers = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    group.sum(flat).div_(group.world_size)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
