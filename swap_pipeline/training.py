"""The one SGD loop, and evaluation.

Phase 1, every worker of phase 2 and any baseline are calls of `train`; they differ in the `Run` they hand it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from swap_pipeline.checkpoint import drop_snapshots, read_snapshot, write_snapshot, write_tensors
from swap_pipeline.data import Split, View, batch_share, check_augment, derive_seed, draw_epoch, steps_per_epoch
from swap_pipeline.distributed import Group
from swap_pipeline.environment import eval_batch_size
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.files import write_json
from swap_pipeline.memory import must_fit
from swap_pipeline.params import Augment, Compute, Optimizer, Precision, check_divisible
from swap_pipeline.precision import Scaler, autocast, check_cpu, resolve
from swap_pipeline.progress import Reporter
from swap_pipeline.scratch import JobFolder
from swap_pipeline.stopping import Stopped, StopRequest

CLASSES_FOR_TOP5 = 100
"""With fewer classes, five guesses say little."""


def as_prepared(epoch: float) -> None:
    """The view of images in memory."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one call of the loop does."""

    name: str
    """what people call it: `phase1`, `phase2 seed 3`"""
    section: str
    """its section in `params.yaml`"""
    seed: int
    """data order and augmentation"""
    batch_size: Callable[[float], int]
    """images per step over all ranks, by epoch: B₁ or B₂ of Algorithm 1"""
    epochs: int
    learning_rate: Callable[[float], float]
    """of the fractional epoch at which a step begins: LR₁ or LR₂"""
    view: Callable[[float], View | None] = as_prepared
    """how images that are read from their files are seen, by epoch"""
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
    test_top5: float | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a network does on the test images."""

    loss: float
    accuracy: float
    """in percent"""
    top5: float | None
    """share of images whose class is among the first five guesses, in percent; None below 100 classes"""

    def as_json(self) -> dict[str, float]:
        top5 = {} if self.top5 is None else {"test_top5": self.top5}
        return {"test_accuracy": self.accuracy, "test_loss": self.loss, **top5}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a run when it is over; accuracies in percent, seconds of training alone."""

    curve: tuple[Epoch, ...]
    stopped_by: str
    """`accuracy` (τ was passed) or `epochs` (the maximum was reached)"""

    def as_json(self) -> dict[str, Any]:
        last = self.curve[-1]
        score = Score(loss=last.test_loss, accuracy=last.test_accuracy, top5=last.test_top5)
        return {
            "curve": [asdict(row) for row in self.curve],
            "epochs": len(self.curve),
            "stopped_by": self.stopped_by,
            "train_accuracy": last.train_accuracy,
            **score.as_json(),
            "seconds": sum(row.seconds for row in self.curve),
        }


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
    sgd = _Sgd(network, optimizer, scaler)
    curve, begun = _resume(run, network, sgd, snapshots, group, num_images=len(train_images))
    if curve or begun.step:
        after = f"epoch {len(curve)}" + (f" and {begun.step} steps" if begun.step else "")
        reporter.done(len(curve), f"going on after {after}")
    guard = _FiniteGuard(run, group.device, tolerance=scaler.tolerance)
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
        for step, (images, labels) in enumerate(batches, start=begun.step):
            rate = run.learning_rate(epoch + step / steps)
            # For dropout and the like: a function of the step, never of how often the process was started.
            torch.manual_seed(derive_seed("step", run.seed, epoch, step, group.rank))
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
                _keep(run, snapshots, network, sgd, curve, group, _Begun(step=step + 1, sums=sums, seconds=seconds))
                raise Stopped
        guard.check()
        loss_sum, hits = group.sum(sums).tolist()
        guard.check_loss(epoch, loss_sum)
        seconds = begun.seconds + time.perf_counter() - began
        begun = _Begun.new(group)

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
        _keep(run, snapshots, network, sgd, curve, group)
        reporter.done(row.epoch, _line(row, run))
        if stop.is_due():
            raise Stopped
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


def set_up(network: nn.Module, compute: Compute, group: Group) -> None:
    """Bring the network to its device and layout, and torch to the wanted degree of repeatability."""
    if group.device.type == "cpu" and (precision := resolve(compute.precision, group.device)) != "fp32":
        check_cpu(precision)
    if group.device.type == "cuda":
        torch.backends.cudnn.benchmark = not compute.deterministic
        torch.use_deterministic_algorithms(compute.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    network.to(group.device)
    if compute.channels_last:
        network.to(memory_format=torch.channels_last)


def _try_out(network: nn.Module, image_shapes: Set[tuple[int, ...]], num_classes: int | None, group: Group) -> None:
    """Find out with two blank images, before training, whether the network takes these sizes and tells all classes."""
    for shape in sorted(image_shapes):
        network.eval()
        try:
            with torch.no_grad():
                output = network(torch.zeros(2, *shape, device=group.device))
        except Exception as error:
            size, why = "×".join(map(str, shape[1:])), " ".join(str(error).split())
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


class _Sgd:
    """torch's SGD with what the loop needs of it: a rate a step, and a step that can be called off on the device."""

    def __init__(self, network: nn.Module, optimizer: Optimizer, scaler: Scaler) -> None:
        self._named = dict(network.named_parameters())
        self.scaler = scaler
        spared = _spared_from_decay(network, norms=not optimizer.decay_norms, biases=not optimizer.decay_biases)
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in self._named.items() if name not in spared]},
            {"params": [p for name, p in self._named.items() if name in spared], "weight_decay": 0.0},
        ]
        self._sgd = torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=0.0,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        if optimizer.momentum:
            # Left to torch, the fused step takes them from uninitialised memory if it is called off the first time.
            self.set_momentum({name: torch.zeros_like(p) for name, p in self._named.items()})

    def zero_grad(self) -> None:
        self._sgd.zero_grad(set_to_none=True)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    def step(self, rate: float, *, skip_if: torch.Tensor) -> None:
        for settings in self._sgd.param_groups:
            settings["lr"] = rate
        if self.scaler.is_active:
            self.scaler.step(self._sgd)
            return
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


_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _spared_from_decay(network: nn.Module, *, norms: bool, biases: bool) -> set[str]:
    """Names of the parameters without weight decay: those of norm layers, and biases of all others."""
    spared = set()
    for prefix, module in network.named_modules():
        is_norm = isinstance(module, _NORMS)
        for name, _ in module.named_parameters(recurse=False):
            if norms if is_norm else biases and name.endswith("bias"):
                spared.add(f"{prefix}.{name}" if prefix else name)
    return spared


class _FiniteGuard:
    """Stops a run whose gradients are no longer finite, on all ranks together and before the step is applied.

    Gradients are already averaged over the ranks, so every rank sees the same thing. On a GPU the verdict is read
    only now and then: waiting for it at each step would hold up the queue. Gradient scaling (fp16) makes single steps
    overflow on purpose; then only more than `tolerance` such steps on end are an error.
    """

    _NEVER = 2**62
    _STEPS = 2**32  # more than any epoch has

    def __init__(self, run: Run, device: torch.device, *, tolerance: int) -> None:
        self._name, self._section = run.name, run.section
        self._tolerance = tolerance
        self._every = 1 if device.type == "cpu" else 50
        self._looked = 0
        self._first = torch.full((), self._NEVER, dtype=torch.int64, device=device)
        self._on_end = torch.zeros((), dtype=torch.int64, device=device)

    def look(self, epoch: int, step: int, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Remember whether the gradients of a step are finite; returns 1.0 where they are not."""
        finite = torch.isfinite(nn.utils.get_total_norm(gradients))
        self._on_end = torch.where(finite, 0, self._on_end + 1)
        too_many = self._on_end > self._tolerance
        self._first = torch.where(too_many, self._first.clamp(max=epoch * self._STEPS + step), self._first)
        self._looked += 1
        if self._looked % self._every == 0:
            self.check()
        return torch.where(finite, 0.0, 1.0)

    def check(self) -> None:
        first = int(self._first.item())
        if first != self._NEVER:
            epoch, step = divmod(first, self._STEPS)
            raise self._error(f"loss or gradient is not finite at epoch {epoch + 1}, step {step + 1}; the step was")

    def check_loss(self, epoch: int, loss_sum: float) -> None:
        """An epoch's loss is finite even where gradients overflowed, unless the network itself is lost."""
        if not math.isfinite(loss_sum):
            raise self._error(f"the loss is not finite in epoch {epoch + 1}; such steps were")

    def _error(self, what: str) -> SwapError:
        other = ", or set compute.precision to bf16 or fp32" if self._tolerance else ""
        return SwapError(
            f"{self._name}: {what} not taken and no checkpoint written: "
            f"lower {self._section}.peak_lr (or lengthen the warm-up){other}"
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
def evaluate(
    network: nn.Module, images: Split, *, group: Group, precision: Precision = "fp32", view: View | None = None
) -> Score:
    """Mean cross-entropy and accuracies, over all ranks."""
    network.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)  # loss, hits, hits of the first five
    top5 = False
    for batch, labels in images.test_batches(
        batch_size=eval_batch_size(), rank=group.rank, world_size=group.world_size, view=view
    ):
        too_much = must_fit(f"an evaluation's batch of {len(labels)} images", remedy="lower SWAP_EVAL_BATCH")
        with too_much, autocast(precision, group.device):
            logits = network(batch)
        top5 = logits.shape[1] >= CLASSES_FOR_TOP5
        sums[0] += nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        if top5:
            sums[2] += (logits.topk(5, dim=1).indices == labels[:, None]).sum()
    loss_sum, hits, hits_of_five = group.sum(sums).tolist()
    return Score(
        loss=loss_sum / len(images),
        accuracy=100 * hits / len(images),
        top5=100 * hits_of_five / len(images) if top5 else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """How far an epoch has come, on this rank."""

    step: int
    sums: torch.Tensor
    """loss and hits so far"""
    seconds: float

    @classmethod
    def new(cls, group: Group) -> _Begun:
        return cls(step=0, sums=torch.zeros(2, dtype=torch.float64, device=group.device), seconds=0.0)


def _state(network: nn.Module, sgd: _Sgd) -> dict[str, torch.Tensor]:
    """All tensors of a snapshot at the end of an epoch."""
    tensors = {f"network.{key}": tensor for key, tensor in network.state_dict().items()}
    return tensors | {f"momentum.{key}": tensor for key, tensor in sgd.momentum().items()}


def _state_of_ranks(network: nn.Module, sums: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each rank has of its own in the middle of an epoch: running statistics, and sums of loss and hits."""
    return {"sums.epoch": sums, **{f"ranks.{key}": tensor for key, tensor in network.named_buffers()}}


def _keep(
    run: Run,
    folder: Path,
    network: nn.Module,
    sgd: _Sgd,
    curve: list[Epoch],
    group: Group,
    begun: _Begun | None = None,
) -> None:
    """Leave a snapshot, at the end of an epoch or, where some of the next has `begun`, in the middle of that."""
    tensors = _state(network, sgd)
    info = {
        "run": [run.name, run.seed],
        "curve": [asdict(row) for row in curve],
        "precision": sgd.scaler.precision,
        "scaler": sgd.scaler.state(),
    }
    if begun is not None:
        tensors |= {key: group.gather(tensor) for key, tensor in _state_of_ranks(network, begun.sums).items()}
        info["begun"] = {"step": begun.step, "seconds": begun.seconds}
    if group.is_main:
        write_snapshot(folder, len(curve), tensors, info, step=begun.step if begun else 0)


def _misfit(
    run: Run,
    network: nn.Module,
    sgd: _Sgd,
    group: Group,
    num_images: int,
    tensors: Mapping[str, torch.Tensor],
    info: Mapping[str, Any],
) -> str:
    """Why a snapshot cannot be this run's; empty if it can."""
    expected = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in _state(network, sgd).items()}
    if "begun" in info:
        own = _state_of_ranks(network, _Begun.new(group).sums)
        expected |= {key: (tensor.dtype, (group.world_size, *tensor.shape)) for key, tensor in own.items()}
    for key in sorted(expected.keys() ^ tensors.keys()):
        return f"{'it lacks' if key in expected else 'it has'} a tensor {shown(key)}"
    for key, tensor in tensors.items():
        if (tensor.dtype, tuple(tensor.shape)) != expected[key]:
            return f"its tensor {shown(key)} has another type or shape"
    if info.get("run") != [run.name, run.seed]:
        return f"it is not of {run.name} with this seed"
    curve, names = info.get("curve"), Epoch.__dataclass_fields__.keys()
    if not isinstance(curve, list) or not (curve or "begun" in info) or not all(isinstance(row, dict) for row in curve):
        return "it has no curve"
    numbers = [value for row in curve for key, value in row.items() if (key, value) != ("test_top5", None)]
    if any(row.keys() != names for row in curve) or any(type(value) not in (int, float) for value in numbers):
        return "its curve has another form"
    if [row["epoch"] for row in curve] != list(range(1, len(curve) + 1)) or len(curve) > run.epochs:
        return "its curve has other epochs"
    if "begun" in info and not _is_beginning(info["begun"], run, len(curve), num_images):
        return "it is of no step that there is"
    scaler, own_scaler = info.get("scaler"), sgd.scaler.state()
    if not isinstance(scaler, dict) or not isinstance(info.get("precision"), str):
        return "it does not say in which precision it was trained"
    if info["precision"] == sgd.scaler.precision and {key: type(value) for key, value in scaler.items()} != {
        key: type(value) for key, value in own_scaler.items()
    }:
        return "its gradient scale has another form"
    return ""


def _is_beginning(value: Any, run: Run, epoch: int, num_images: int) -> bool:
    """Whether this says of a step of that epoch, but not of its last one, that it was the last to be taken."""
    if not isinstance(value, dict) or value.keys() != {"step", "seconds"} or epoch >= run.epochs:
        return False
    steps = steps_per_epoch(num_images, run.batch_size(epoch))
    return type(value["step"]) is int and 0 < value["step"] < steps and type(value["seconds"]) is float


def _resume(
    run: Run, network: nn.Module, sgd: _Sgd, folder: Path, group: Group, *, num_images: int
) -> tuple[list[Epoch], _Begun]:
    """Take up the newest snapshot; returns the curve so far, and how far the epoch after it has come."""
    found = read_snapshot(folder, functools.partial(_misfit, run, network, sgd, group, num_images))
    if found is None:
        return [], _Begun.new(group)
    tensors, info = found
    if info["precision"] != sgd.scaler.precision:  # `auto` on another kind of GPU
        print(
            f"the snapshot was trained in {info['precision']}, not {sgd.scaler.precision}: starting afresh", flush=True
        )
        return [], _Begun.new(group)
    parts: dict[str, dict[str, torch.Tensor]] = {"network": {}, "momentum": {}, "ranks": {}, "sums": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    network.load_state_dict(parts["network"])
    sgd.set_momentum(parts["momentum"])
    sgd.scaler.set_state(info["scaler"])
    curve = [Epoch(**row) for row in info["curve"]]
    if "begun" not in info:
        return curve, _Begun.new(group)
    sums = parts["sums"]["epoch"][group.rank].to(group.device)
    for name, buffer in network.named_buffers():
        buffer.copy_(parts["ranks"][name][group.rank])
    return curve, _Begun(sums=sums, **info["begun"])


def write_result(folder: JobFolder, network: nn.Module, info: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Complete a job: the network, with nothing in it that differs from run to run, and what is known of the run."""
    with folder.complete() as result:
        write_tensors(result / "model.safetensors", network.state_dict(), info)
        write_json(result / "record.json", record)
    drop_snapshots(folder.path)
