"""`params.yaml` as frozen, checked objects.

Every knob is declared here once: its name, type, range and meaning. The file holds the values; there are no defaults
in code, so that what DVC tracks is all there is. Each error names the dotted key, the value found and the way out.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from swap_pipeline.errors import SwapError


def knob(doc: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None) -> Any:
    """Declare a parameter: what it means and which values make sense."""
    return field(metadata={"doc": doc, "minimum": minimum, "above": above, "maximum": maximum})


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes made to every training batch."""

    padding: int = knob("pixels of reflection added on each side before a random crop of the old size", minimum=0)
    flip: bool = knob("mirror half of the images, left to right")
    cutout: int = knob("side of a square that is blanked out in every image; 0 for none", minimum=0)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is learned from."""

    name: str = knob("the data set")
    augment: Augment = knob("changes made to training images")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = knob("the architecture")
    width: int = knob("channels of the first layer; the paper's ResNet-9 has 64", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """SGD, the same in both phases."""

    momentum: float = knob("momentum", minimum=0, maximum=1)
    nesterov: bool = knob("Nesterov's variant of momentum")
    weight_decay: float = knob("L2 penalty, added to the gradient", minimum=0)
    label_smoothing: float = knob("probability mass moved from the true class to all classes", minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How numbers are computed, where that can change them."""

    channels_last: bool = knob("memory layout of images and weights; usually the faster one")
    deterministic: bool = knob("only algorithms that give the same bytes each time, also on GPUs, where it costs speed")


@dataclass(frozen=True, kw_only=True)
class Phase1:
    """Large batches, all devices, one model."""

    batch_size: int = knob("images per step, over all devices together", minimum=1)
    peak_lr: float = knob("highest learning rate", above=0)
    warmup_epochs: float = knob("epochs of linear rise from 0 to the peak", minimum=0)
    max_epochs: int = knob("the learning rate falls to 0 at the end of this many epochs", minimum=1)
    stop_accuracy: float = knob(
        "training accuracy in percent that ends the phase once passed; 100 for never", minimum=0, maximum=100
    )
    seed: int = knob("initial weights, data order and augmentation", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Phase2:
    """Small batches, one independent worker a seed."""

    batch_size: int = knob("images per step of one worker, over all of its devices together", minimum=1)
    peak_lr: float = knob("highest learning rate", above=0)
    warmup_epochs: float = knob("epochs of linear rise from 0 to the peak", minimum=0)
    epochs: int = knob("length of the phase; the learning rate falls to 0 at its end", minimum=1)
    gpus_per_worker: int = knob("GPUs that train one worker together", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who takes part in phase 2 and in the average."""

    seeds: tuple[int, ...] = knob("one worker for each of these seeds", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Phase3:
    """The average's batch-norm statistics."""

    batch_size: int = knob("images in one batch of the statistics pass, always on one device", minimum=2)
    augment: bool = knob("pass augmented images, as seen in training, instead of plain ones")
    variance: Literal["pooled", "batch_mean"] = knob("variance over all samples, or mean of the batches' variances")
    seed: int = knob("order and augmentation of the pass", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Params:
    """The whole of `params.yaml`."""

    data: Data
    model: Model
    optimizer: Optimizer
    compute: Compute
    phase1: Phase1
    phase2: Phase2
    workers: Workers
    phase3: Phase3


def read_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a params file; a `SwapError` tells everything that is wrong with the first bad entry."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        # YAML 1.2, as DVC reads it: PyYAML would make a string of `1e-3`.
        tree = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SwapError(f"{path} not found: run this from the project's root folder") from None
    except (YAMLError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise SwapError(f"{path} is not valid YAML: {what}") from None
    return parse_params(tree, file=str(path))


def parse_params(tree: Any, *, file: str = "params.yaml") -> Params:
    """Check a nested dict, as read from `file`, and give it its types."""
    try:
        params = _parse(Params, tree, key="")
        _check_together(params)
    except SwapError as error:
        raise SwapError(f"{file}: {error}") from None
    assert isinstance(params, Params)
    return params


def _check_together(params: Params) -> None:
    """Rules that involve more than one entry."""
    for name, phase, epochs in (
        ("phase1", params.phase1, params.phase1.max_epochs),
        ("phase2", params.phase2, params.phase2.epochs),
    ):
        length = "max_epochs" if name == "phase1" else "epochs"
        if phase.warmup_epochs > epochs:
            raise SwapError(
                f"{name}.warmup_epochs is {phase.warmup_epochs:g}, longer than {name}.{length} ({epochs}): "
                f"lower the one or raise the other"
            )
    if 0 < params.phase1.stop_accuracy <= 1:
        meant = 100 * params.phase1.stop_accuracy
        raise SwapError(f"phase1.stop_accuracy is {params.phase1.stop_accuracy:g}, but in percent: write {meant:g}")
    if params.optimizer.nesterov and params.optimizer.momentum == 0:
        raise SwapError("optimizer.nesterov is true but optimizer.momentum is 0: set a momentum or nesterov: false")
    seeds = params.workers.seeds
    if not seeds:
        raise SwapError("workers.seeds is empty: list at least one seed, for example [0, 1, 2, 3]")
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise SwapError(
            f"workers.seeds lists {', '.join(map(str, twice))} more than once: "
            f"equal seeds give equal models, so list each one once"
        )


def _parse(kind: Any, value: Any, *, key: str, limits: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Turn `value`, found at the dotted `key`, into `kind`."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _parse_section(kind, value, key=key)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise SwapError(f"{key} is {value!r}: choose one of {', '.join(choices)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise SwapError(f"{key} is {value!r}: write a list, for example [0, 1, 2, 3]")
        item_kind = typing.get_args(kind)[0]
        return tuple(_parse(item_kind, item, key=f"{key}[{i}]", limits=limits) for i, item in enumerate(value))
    return _parse_scalar(kind, value, key=key, limits=limits)


def _parse_section(kind: Any, value: Any, *, key: str) -> Any:
    where = f"{key}." if key else ""
    if not isinstance(value, dict):
        raise SwapError(f"{key or 'the file'} must be a section with entries of its own, not {value!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in fields:
            raise SwapError(f"{where}{name} is not a known parameter{_closest(name, fields)}")
    for name, declared in fields.items():
        if name not in value:
            doc = declared.metadata.get("doc")
            raise SwapError(f"{where}{name} is missing{f' ({doc})' if doc else ''}: add it")
    return kind(
        **{
            name: _parse(hints[name], value[name], key=f"{where}{name}", limits=declared.metadata)
            for name, declared in fields.items()
        }
    )


def _parse_scalar(kind: type, value: Any, *, key: str, limits: Mapping[str, Any]) -> Any:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    accepted = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}[kind]
    # bool is an int to Python, but `batch_size: true` is a slip.
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        hint = " (write it without quotes)" if kind in (int, float) and _is_number(value) else ""
        raise SwapError(f"{key} is {value!r}, but must be {names[kind]}{hint}")
    if kind is str or kind is bool:
        return value
    assert isinstance(value, int | float)
    if abs(value) > sys.float_info.max or math.isnan(value):
        raise SwapError(f"{key} is {value!r}, but must be finite")
    minimum, above, maximum = limits.get("minimum"), limits.get("above"), limits.get("maximum")
    if minimum is not None and value < minimum:
        raise SwapError(f"{key} is {value!r}, but must be at least {minimum}")
    if above is not None and value <= above:
        raise SwapError(f"{key} is {value!r}, but must be above {above}")
    if maximum is not None and value > maximum:
        raise SwapError(f"{key} is {value!r}, but must be at most {maximum}")
    return kind(value)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)


def _closest(name: Any, known: Any) -> str:
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return f": did you mean {matches[0]}?" if matches else f" (known: {', '.join(known)})"


def check_divisible(key: str, batch_size: int, processes: int, *, remedy: str) -> None:
    """A global batch is shared equally by the processes; `remedy` tells what else could be changed."""
    if batch_size % processes:
        best = max(n for n in range(1, processes + 1) if batch_size % n == 0)
        raise SwapError(
            f"params.yaml: {key} is {batch_size}, which {processes} processes cannot share equally: "
            f"choose a multiple of {processes}, or {remedy} {best}"
        )
