"""Snapshots of a run: everything the loop needs to resume as if it had never been stopped."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_pipeline.data.epochs import steps_per_epoch
from swap_pipeline.engine.distributed import Group
from swap_pipeline.errors import SwapError, printable, shown
from swap_pipeline.training.leaving.rules import ForkTest, first_end
from swap_pipeline.training.moving_mean import MovingMean
from swap_pipeline.training.optimizers.named import Named
from swap_pipeline.training.run import Epoch, Run
from swap_pipeline.training.sgd import Sgd
from swap_pipeline.training.shards import Shards
from swap_pipeline.training.snapshots import SnapshotWriter, drop_snapshots, read_snapshot

_Snapshot = tuple[dict[str, torch.Tensor], dict[str, Any]]
_PAUSE_SECONDS, _PAUSES = 5, 12


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Progress within an epoch, on this rank."""

    step: int
    sums: torch.Tensor
    """loss and hits so far"""
    squares: torch.Tensor
    """sums of gradients' squared norms so far: of shards, of whole batches"""
    seconds: float

    @classmethod
    def new(cls, group: Group) -> Begun:
        sums, squares = torch.zeros(2, 2, dtype=torch.float64, device=group.device)
        return cls(step=0, sums=sums, squares=squares, seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that training changes, on this rank."""

    network: nn.Module
    sgd: Sgd | Named
    shards: Shards
    mean: MovingMean | None
    group: Group

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of a snapshot at the end of an epoch, when all ranks and shards have the same."""
        return self._networks() | {f"optimizer.{key}": tensor for key, tensor in self.sgd.state().items()}

    def _networks(self) -> dict[str, torch.Tensor]:
        tensors = {f"network.{key}": tensor for key, tensor in self.network.state_dict().items()}
        if self.mean is not None:
            tensors |= {f"mean.{key}": tensor for key, tensor in self.mean.network.state_dict().items()}
        return tensors

    def tensors_within_epoch(self, begun: Begun) -> dict[str, torch.Tensor]:
        """What differs between shards or ranks within an epoch: running statistics, sums of the epoch."""
        shards = {f"shards.{key}": tensor for key, tensor in self.shards.stacked().items()}
        return shards | {key: self.group.gather(tensor) for key, tensor in self._own_of_rank(begun).items()}

    def _own_of_rank(self, begun: Begun) -> dict[str, torch.Tensor]:
        buffers = {} if self.mean is None else dict(self.mean.network.named_buffers())
        sums = {"sums.epoch": begun.sums, "sums.squares": begun.squares}
        return {**sums, **{f"mean_ranks.{key}": tensor for key, tensor in buffers.items()}}

    def layout(
        self, optimizer: Mapping[str, Any], *, within_epoch: bool
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Types and shapes of a snapshot's tensors, with the state that its `optimizer` must have."""
        tensors = {f"optimizer.{key}": each for key, each in optimizer.items() if isinstance(each, torch.Tensor)}
        expected = {key: (t.dtype, tuple(t.shape)) for key, t in {**self._networks(), **tensors}.items()}
        if within_epoch:
            own = self._own_of_rank(Begun.new(self.group))
            expected |= {f"shards.{key}": spec for key, spec in self.shards.layout().items()}
            expected |= {key: (t.dtype, (self.group.world_size, *t.shape)) for key, t in own.items()}
        return expected

    def load(self, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            part, _, name = key.partition(".")
            parts.setdefault(part, {})[name] = tensor
        self.network.load_state_dict(parts["network"])
        self.sgd.set_state(parts.get("optimizer", {}), info["optimizer"])
        self.sgd.scaler.set_state(info["scaler"])
        self.shards.start_from_network()
        if "shards" in parts:
            self.shards.load(parts["shards"])
        if self.mean is not None:
            self.mean.network.load_state_dict(parts["mean"])
            self.mean.steps = info["mean_steps"]
            for name, buffer in self.mean.network.named_buffers() if "begun" in info else ():
                buffer.copy_(parts["mean_ranks"][name][self.group.rank])


def keep(run: Run, writer: SnapshotWriter, state: State, curve: list[Epoch], begun: Begun | None = None) -> None:
    """Write a snapshot at the end of an epoch or, if the next one has `begun`, in the middle of that."""
    tensors = state.tensors()
    info: dict[str, Any] = {
        "run": [run.name, run.seed],
        "curve": [asdict(row) for row in curve],
        "precision": state.sgd.scaler.precision,
        "scaler": state.sgd.scaler.state(),
        "optimizer": state.sgd.numbers(),
        "hardware": state.group.hardware(),
    }
    if state.mean is not None:
        info["mean_steps"] = state.mean.steps
    if begun is not None:
        tensors |= state.tensors_within_epoch(begun)
        info["begun"] = {"step": begun.step, "seconds": begun.seconds}
    if state.group.is_main:
        writer.write(len(curve), tensors, info, step=begun.step if begun else 0)


def _misfit(
    run: Run, state: State, num_images: int, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]
) -> str:
    """Why a snapshot cannot be this run's; empty if it can."""
    numbers = info.get("optimizer")
    if not isinstance(numbers, dict):
        return "it does not say how far its optimizer was"
    own = [key.removeprefix("optimizer.") for key in tensors if key.startswith("optimizer.")]
    optimizer = state.sgd.layout([*own, *numbers])
    types = {key: type(value) for key, value in optimizer.items() if not isinstance(value, torch.Tensor)}
    if {key: type(value) for key, value in numbers.items()} != types:
        return "the numbers of its optimizer have another form"
    expected = state.layout(optimizer, within_epoch="begun" in info)
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
    may_lack = ("top5", "noise_scale")
    numbers = [value for row in curve for key, value in row.items() if not (key in may_lack and value is None)]
    if any(row.keys() != names for row in curve) or any(type(value) not in (int, float) for value in numbers):
        return "its curve has another form"
    if [row["epoch"] for row in curve] != list(range(1, len(curve) + 1)) or len(curve) > run.epochs:
        return "its curve has other epochs"
    if "begun" in info and not _is_beginning(info["begun"], run, len(curve), num_images):
        return "there is no such step"
    if state.mean is not None and (type(info.get("mean_steps")) is not int or info["mean_steps"] < 1):
        return "it lacks the number of steps in its mean"
    scaler, own_scaler = info.get("scaler"), state.sgd.scaler.state()
    if not isinstance(scaler, dict) or info.get("precision") not in ("fp32", "tf32", "bf16", "fp16"):
        return "it lacks its precision"
    if info["precision"] == state.sgd.scaler.precision and {key: type(value) for key, value in scaler.items()} != {
        key: type(value) for key, value in own_scaler.items()
    }:
        return "its gradient scale has another form"
    return "" if isinstance(info.get("hardware"), str) else "it lacks its hardware"


def _is_beginning(value: Any, run: Run, epoch: int, num_images: int) -> bool:
    """Whether this names a step of that epoch other than the last."""
    if not isinstance(value, dict) or value.keys() != {"step", "seconds"} or epoch >= run.epochs:
        return False
    step, steps = value["step"], steps_per_epoch(num_images, run.batch_size(epoch))
    is_step = type(step) is int and 0 < step < steps and run.is_in_sync(epoch, step - 1, steps)
    return is_step and type(value["seconds"]) is float


def _other_setting(state: State, info: Mapping[str, Any], *, deterministic: bool) -> str:
    """How the snapshot was trained, if it cannot be continued in the same way here; empty if it can."""
    precision, hardware = state.sgd.scaler.precision, state.group.hardware()
    if info["precision"] != precision:  # `auto` on another kind of GPU
        return f"in {info['precision']}, not {precision}"
    if deterministic and info["hardware"] != hardware:  # a requeued job
        return f"on {printable(info['hardware'])}, not {hardware} (compute.deterministic is true)"
    return ""


def _read_before_end(
    run: Run, folder: Path, misfit: Callable[..., str], tests: Sequence[ForkTest], after: int
) -> _Snapshot | None:
    """The newest snapshot, or if there are some beyond the run's end, the newest one up to it."""
    found = read_snapshot(folder, misfit, after=after)
    if found is None:
        return None
    end = first_end(run, [Epoch(**row) for row in found[1]["curve"]], tests)
    return found if end is None else read_snapshot(folder, misfit, not_after=end, after=after)


def _read_alike(read: Callable[[], _Snapshot | None], folder: Path, group: Group) -> _Snapshot | None:
    """The newest snapshot, which must be the same for all ranks: from different ones, they would average gradients of
    different weights. Every rank reads it itself, and another machine may see a new file late."""
    for pause in (0, *[_PAUSE_SECONDS] * _PAUSES):
        time.sleep(pause)
        found = read()
        info: Mapping[str, Any] = found[1] if found else {"curve": ()}
        own = torch.tensor([len(info["curve"]), info.get("begun", {}).get("step", 0)], device=group.device)
        of_ranks = group.gather(own).tolist()
        if all(row == of_ranks[0] for row in of_ranks):
            return found
    raise SwapError(
        f"the ranks do not see the same snapshots in {folder} (epoch and step by rank: {of_ranks}): "
        f"check that all nodes can read this folder, then run `dvc repro` again"
    )


def resume(
    run: Run,
    state: State,
    folder: Path,
    *,
    num_images: int,
    deterministic: bool,
    tests: Sequence[ForkTest] = (),
    after: int = -1,
) -> tuple[list[Epoch], Begun] | None:
    """Load the newest snapshot later than the epoch `after`, if there is one; returns the curve so far, and the
    progress within the next epoch.

    Not one of another precision nor, if bytes must be the same each time, of another kind of GPU.
    """
    group = state.group
    misfit = functools.partial(_misfit, run, state, num_images)
    found = _read_alike(lambda: _read_before_end(run, folder, misfit, tests, after), folder, group)
    if found is None:
        return None
    tensors, info = found
    if other := _other_setting(state, info, deterministic=deterministic):
        print(f"the snapshot was trained {other}: starting afresh", flush=True)
        group.wait()
        if group.is_main:
            drop_snapshots(folder)  # those of later epochs would be taken for newer than the first new ones
        return None
    state.load(tensors, info)
    curve = [Epoch(**row) for row in info["curve"]]
    if "begun" not in info:
        return curve, Begun.new(group)
    sums, squares = (tensors[f"sums.{name}"][group.rank].to(group.device) for name in ("epoch", "squares"))
    return curve, Begun(sums=sums, squares=squares, **info["begun"])
