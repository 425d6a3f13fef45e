"""Snapshots of a run: all that the loop needs to go on as if it had never been stopped."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_pipeline.checkpoint import drop_snapshots, read_snapshot, write_snapshot
from swap_pipeline.data import steps_per_epoch
from swap_pipeline.distributed import Group
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.runs import Epoch, Run
from swap_pipeline.sgd import Sgd

_Snapshot = tuple[dict[str, torch.Tensor], dict[str, Any]]
_PAUSE_SECONDS, _PAUSES = 5, 12


@dataclass(frozen=True, kw_only=True)
class Begun:
    """How far an epoch has come, on this rank."""

    step: int
    sums: torch.Tensor
    """loss and hits so far"""
    seconds: float

    @classmethod
    def new(cls, group: Group) -> Begun:
        return cls(step=0, sums=torch.zeros(2, dtype=torch.float64, device=group.device), seconds=0.0)


def _state(network: nn.Module, sgd: Sgd) -> dict[str, torch.Tensor]:
    """All tensors of a snapshot at the end of an epoch."""
    tensors = {f"network.{key}": tensor for key, tensor in network.state_dict().items()}
    return tensors | {f"momentum.{key}": tensor for key, tensor in sgd.momentum().items()}


def _state_of_ranks(network: nn.Module, sums: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each rank has of its own in the middle of an epoch: running statistics, and sums of loss and hits."""
    return {"sums.epoch": sums, **{f"ranks.{key}": tensor for key, tensor in network.named_buffers()}}


def keep(
    run: Run,
    folder: Path,
    network: nn.Module,
    sgd: Sgd,
    curve: list[Epoch],
    group: Group,
    begun: Begun | None = None,
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
    sgd: Sgd,
    group: Group,
    num_images: int,
    tensors: Mapping[str, torch.Tensor],
    info: Mapping[str, Any],
) -> str:
    """Why a snapshot cannot be this run's; empty if it can."""
    expected = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in _state(network, sgd).items()}
    if "begun" in info:
        own = _state_of_ranks(network, Begun.new(group).sums)
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
    if not isinstance(scaler, dict) or info.get("precision") not in ("fp32", "bf16", "fp16"):
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


def _read_alike(folder: Path, misfit: Callable[..., str], group: Group) -> _Snapshot | None:
    """The newest snapshot, which has to be the same for all ranks: from different ones, they would average gradients
    of different weights. Every rank reads for itself, and on another machine may see a new file late."""
    for pause in (0, *[_PAUSE_SECONDS] * _PAUSES):
        time.sleep(pause)
        found = read_snapshot(folder, misfit)
        info: Mapping[str, Any] = found[1] if found else {"curve": ()}
        own = torch.tensor([len(info["curve"]), info.get("begun", {}).get("step", 0)], device=group.device)
        of_ranks = group.gather(own).tolist()
        if all(row == of_ranks[0] for row in of_ranks):
            return found
    raise SwapError(
        f"the ranks do not see the same snapshots in {folder} (epoch and step by rank: {of_ranks}): "
        f"look whether all nodes can read this folder, then `dvc repro` again"
    )


def resume(
    run: Run, network: nn.Module, sgd: Sgd, folder: Path, group: Group, *, num_images: int
) -> tuple[list[Epoch], Begun]:
    """Take up the newest snapshot; returns the curve so far, and how far the epoch after it has come."""
    found = _read_alike(folder, functools.partial(_misfit, run, network, sgd, group, num_images), group)
    if found is None:
        return [], Begun.new(group)
    tensors, info = found
    if info["precision"] != sgd.scaler.precision:  # `auto` on another kind of GPU
        print(
            f"the snapshot was trained in {info['precision']}, not {sgd.scaler.precision}: starting afresh", flush=True
        )
        group.wait()
        if group.is_main:
            drop_snapshots(folder)  # of later epochs than the first new ones, which would be taken for older
        return [], Begun.new(group)
    parts: dict[str, dict[str, torch.Tensor]] = {"network": {}, "momentum": {}, "ranks": {}, "sums": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor
    network.load_state_dict(parts["network"])
    sgd.set_momentum(parts["momentum"])
    sgd.scaler.set_state(info["scaler"])
    curve = [Epoch(**row) for row in info["curve"]]
    if "begun" not in info:
        return curve, Begun.new(group)
    sums = parts["sums"]["epoch"][group.rank].to(group.device)
    for name, buffer in network.named_buffers():
        buffer.copy_(parts["ranks"][name][group.rank])
    return curve, Begun(sums=sums, **info["begun"])
