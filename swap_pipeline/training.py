"""The one SGD loop, and evaluation.

Phase 1, every worker of phase 2 and any baseline are calls of `train`; they differ in the `Run` they hand it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swap_pipeline.checkpoint import drop_snapshots, read_snapshot, write_snapshot, write_tensors
from swap_pipeline.data import Images, check_augment, derive_seed, draw_epoch, make_batch
from swap_pipeline.distributed import Group
from swap_pipeline.environment import eval_batch_size
from swap_pipeline.errors import SwapError
from swap_pipeline.files import write_json
from swap_pipeline.params import Augment, Compute, Optimizer, check_divisible
from swap_pipeline.progress import Reporter
from swap_pipeline.scratch import JobFolder


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one call of the loop does."""

    name: str
    """what people call it: `phase1`, `phase2 seed 3`"""
    section: str
    """its section in `params.yaml`"""
    seed: int
    """data order and augmentation"""
    batch_size: int
    """images per step over all ranks: B₁ or B₂ of Algorithm 1"""
    epochs: int
    learning_rate: Callable[[float], float]
    """of the fractional epoch at which a step begins: LR₁ or LR₂"""
    stop_accuracy: float = 100.0
    """τ in percent: the run ends with the first epoch whose training accuracy is above it"""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A row of the training curve."""

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a run when it is over; accuracies in percent, seconds of training alone."""

    curve: tuple[Epoch, ...]
    stopped_by: str
    """`accuracy` (τ was passed) or `epochs` (the maximum was reached)"""

    def as_json(self) -> dict[str, Any]:
        last = self.curve[-1]
        return {
            "curve": [asdict(row) for row in self.curve],
            "epochs": len(self.curve),
            "stopped_by": self.stopped_by,
            "train_accuracy": last.train_accuracy,
            "test_accuracy": last.test_accuracy,
            "test_loss": last.test_loss,
            "seconds": sum(row.seconds for row in self.curve),
        }


def train(
    run: Run,
    network: nn.Module,
    *,
    train_images: Images,
    test_images: Images,
    augment: Augment,
    optimizer: Optimizer,
    compute: Compute,
    group: Group,
    snapshots: Path,
    reporter: Reporter,
) -> Record:
    """Train `network` in place, from its present weights or from the newest snapshot in the folder `snapshots`."""
    per_rank, steps = _split(run, len(train_images), group)
    size = (train_images.pixels.shape[2], train_images.pixels.shape[3])
    check_augment(padding=augment.padding, cutout=augment.cutout, image_size=size)
    set_up(network, compute, group)
    parallel = _wrap(network, train_images.pixels.shape[1:], group)
    sgd = _Sgd(network, optimizer)
    curve = _resume(network, sgd, snapshots)
    if curve:
        reporter.done(len(curve), f"going on after epoch {len(curve)}")
    guard = _FiniteGuard(run.name, steps, group.device)

    while not (finished := reason_to_stop(run, curve)):
        epoch = len(curve)
        group.finish_queued_work()
        began = time.perf_counter()
        choices = draw_epoch(
            seed=run.seed,
            epoch=epoch,
            num_images=len(train_images),
            image_size=size,
            padding=augment.padding,
            flip=augment.flip,
            cutout=augment.cutout,
            device=group.device,
        )
        sums = torch.zeros(2, dtype=torch.float64, device=group.device)  # loss, hits
        rate = 0.0
        network.train()
        for step in range(steps):
            rate = run.learning_rate(epoch + step / steps)
            first = step * run.batch_size + group.rank * per_rank
            images, labels = make_batch(
                train_images,
                choices,
                slice(first, first + per_rank),
                padding=augment.padding,
                cutout=augment.cutout,
                channels_last=compute.channels_last,
            )
            # For dropout and the like: a function of the step, never of how often the process was started.
            torch.manual_seed(derive_seed("step", run.seed, epoch, step, group.rank))
            logits = parallel(images)
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=optimizer.label_smoothing)
            sgd.zero_grad()
            loss.backward()
            sgd.step(rate, skip_if=guard.look(epoch * steps + step, sgd.gradients()))
            with torch.no_grad():
                sums[0] += loss.detach() * per_rank
                sums[1] += (logits.argmax(dim=1) == labels).sum()
            reporter.step(epoch, step, steps)
        guard.check()
        loss_sum, hits = group.sum(sums).tolist()
        seconds = time.perf_counter() - began

        average_buffers(network, group)
        test_loss, test_accuracy = evaluate(network, test_images, group=group)
        seen = steps * run.batch_size
        row = Epoch(
            epoch=epoch + 1,
            learning_rate=rate,
            train_loss=loss_sum / seen,
            train_accuracy=100 * hits / seen,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            seconds=seconds,
        )
        curve.append(row)
        if group.is_main:
            _keep(snapshots, network, sgd, curve)
        reporter.done(row.epoch, _line(row, run))
    return Record(curve=tuple(curve), stopped_by=finished)


def _line(row: Epoch, run: Run) -> str:
    return (
        f"epoch {row.epoch}/{run.epochs}  test {row.test_accuracy:.2f} %  train {row.train_accuracy:.2f} %  "
        f"loss {row.train_loss:.4f}  lr {row.learning_rate:.4f}  {row.seconds:.1f} s"
    )


def reason_to_stop(run: Run, curve: Sequence[Epoch]) -> str:
    """Why the run is over, or an empty string: Algorithm 1's `while training accuracy ≤ τ`."""
    if curve and run.stop_accuracy < 100 and curve[-1].train_accuracy > run.stop_accuracy:
        return "accuracy"
    return "epochs" if len(curve) >= run.epochs else ""


def _split(run: Run, num_images: int, group: Group) -> tuple[int, int]:
    """Images per rank and step, and steps per epoch; the last, short batch is dropped."""
    key = f"{run.section}.batch_size"
    check_divisible(key, run.batch_size, group.world_size, remedy="set --nproc-per-node to")
    steps = num_images // run.batch_size
    if steps == 0:
        raise SwapError(f"params.yaml: {key} is {run.batch_size}, more than the {num_images} training images: lower it")
    return run.batch_size // group.world_size, steps


def set_up(network: nn.Module, compute: Compute, group: Group) -> None:
    """Bring the network to its device and layout, and torch to the wanted degree of repeatability."""
    if group.device.type == "cuda":
        torch.backends.cudnn.benchmark = not compute.deterministic
        torch.use_deterministic_algorithms(compute.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    network.to(group.device)
    if compute.channels_last:
        network.to(memory_format=torch.channels_last)


def _wrap(network: nn.Module, image_shape: torch.Size, group: Group) -> nn.Module:
    """DDP, with its gradient buckets in their final form.

    DDP regroups its buckets after the first backward pass, which changes the order of sums over more than two ranks.
    A pass is spent on that now, so that a resumed run adds up in the same order as one that was never stopped.
    """
    if group.world_size == 1:
        return network
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    parallel = DistributedDataParallel(
        network,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )
    network.train()
    parallel(torch.zeros(2, *image_shape, device=group.device)).sum().backward()
    parallel.zero_grad(set_to_none=True)
    network.load_state_dict(before)
    return parallel


class _Sgd:
    """torch's SGD with what the loop needs of it: a rate a step, and a step that can be called off on the device."""

    def __init__(self, network: nn.Module, optimizer: Optimizer) -> None:
        self._named = dict(network.named_parameters())
        self._sgd = torch.optim.SGD(
            self._named.values(),
            lr=0.0,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        self._sgd.zero_grad(set_to_none=True)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    def step(self, rate: float, *, skip_if: torch.Tensor) -> None:
        for settings in self._sgd.param_groups:
            settings["lr"] = rate
        # The flag that gradient scaling uses: the fused step reads it on the device, without waiting for it here.
        self._sgd.found_inf = skip_if  # type: ignore[attr-defined]
        self._sgd.step()

    def momentum(self) -> dict[str, torch.Tensor]:
        buffers = {name: self._sgd.state[p].get("momentum_buffer") for name, p in self._named.items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def set_momentum(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            parameter = self._named[name]
            # Laid out like the parameter: the fused step walks both side by side.
            self._sgd.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffer)


class _FiniteGuard:
    """Stops a run whose gradients are no longer finite, on all ranks together and before the step is applied.

    Gradients are already averaged over the ranks, so every rank sees the same thing. On a GPU the verdict is read
    only now and then: waiting for it at each step would hold up the queue.
    """

    _NEVER = 2**62

    def __init__(self, name: str, steps_per_epoch: int, device: torch.device) -> None:
        self._name = name
        self._steps_per_epoch = steps_per_epoch
        self._every = 1 if device.type == "cpu" else 50
        self._first = torch.full((), self._NEVER, dtype=torch.int64, device=device)

    def look(self, t: int, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Remember whether the gradients of step `t` of the run are finite; returns 1.0 where they are not."""
        finite = torch.isfinite(nn.utils.get_total_norm(gradients))
        self._first = torch.where(finite, self._first, self._first.clamp(max=t))
        if t % self._every == 0:
            self.check()
        return torch.where(finite, 0.0, 1.0)

    def check(self) -> None:
        first = int(self._first.item())
        if first != self._NEVER:
            epoch, step = divmod(first, self._steps_per_epoch)
            raise SwapError(
                f"{self._name}: loss or gradient is not finite at epoch {epoch + 1}, step {step + 1}; "
                f"the step was not taken and no checkpoint written: lower peak_lr (or lengthen the warm-up)"
            )


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


@torch.inference_mode()
def evaluate(network: nn.Module, images: Images, *, group: Group) -> tuple[float, float]:
    """Mean cross-entropy and accuracy in percent, over all ranks."""
    batch_size = eval_batch_size()
    network.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)
    for first in range(group.rank * batch_size, len(images), group.world_size * batch_size):
        part = slice(first, first + batch_size)
        labels = images.labels[part]
        logits = network(images.normalise(images.pixels[part]))
        sums[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
    loss_sum, hits = group.sum(sums).tolist()
    return loss_sum / len(images), 100 * hits / len(images)


def _keep(folder: Path, network: nn.Module, sgd: _Sgd, curve: list[Epoch]) -> None:
    tensors = {f"network.{key}": tensor for key, tensor in network.state_dict().items()}
    tensors |= {f"momentum.{key}": tensor for key, tensor in sgd.momentum().items()}
    write_snapshot(folder, len(curve), tensors, {"curve": [asdict(row) for row in curve]})


def _resume(network: nn.Module, sgd: _Sgd, folder: Path) -> list[Epoch]:
    """Take up the newest snapshot; returns the curve so far."""
    found = read_snapshot(folder)
    if found is None:
        return []
    tensors, info = found
    parts: dict[str, dict[str, torch.Tensor]] = {"network": {}, "momentum": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    network.load_state_dict(parts["network"])
    sgd.set_momentum(parts["momentum"])
    return [Epoch(**row) for row in info["curve"]]


def write_result(folder: JobFolder, network: nn.Module, info: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Complete a job: the network, with nothing in it that differs from run to run, and what is known of the run."""
    with folder.complete() as result:
        write_tensors(result / "model.safetensors", network.state_dict(), info)
        write_json(result / "record.json", record)
    drop_snapshots(folder.path)
