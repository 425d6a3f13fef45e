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

from swap_pipeline.errors import SwapError, shown

Precision = Literal["auto", "fp32", "bf16", "fp16"]
IntByEpoch = int | tuple[tuple[int, int], ...]
"""One value, or `[[epoch, value], …]`: each value holds from its epoch on."""
FloatByEpoch = float | tuple[tuple[int, float], ...]
Knots = tuple[tuple[float, float], ...]
"""`[[epoch, value], …]`, with straight lines between them."""

# Far more than any params file has: what is beyond is a mistake, or somebody's bomb.
_MAX_BYTES = 1 << 18
_MAX_VALUES = 20_000
_MAX_DEPTH = 20


EpochList = tuple[int, ...] | Literal["all"]


def knob(doc: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None) -> Any:
    """Declare a parameter: what it means and which values make sense."""
    return field(metadata={"doc": doc, "minimum": minimum, "above": above, "maximum": maximum})


def optional(
    doc: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None
) -> Any:
    """Declare a parameter that may be left out, and is None then: not all apply to every network and schedule."""
    return field(default=None, metadata={"doc": doc, "minimum": minimum, "above": above, "maximum": maximum})


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
    root: str = knob("folder of your own images, or of a data set's official files where there is no network")
    train_images: int | Literal["all"] = knob("use only so many training images, of all classes alike", minimum=1)
    max_gb_in_memory: float = knob("images that take more are read from their files, batch by batch", minimum=0)
    test_crop: Literal["square", "rectangle"] = knob("what is seen of a test image that is read from its file")
    augment: Augment = knob("changes made to training images")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = knob("resnet9, torchvision:<name>, timm:<name> or package.module:function")
    width: int | None = optional("channels of the first layer; the paper's ResNet-9 has 64", minimum=1)
    options: dict[str, Any] | None = optional("further arguments for the function that makes the network")
    pretrained: bool = knob("start phase 1 from published weights")
    zero_init_last_gamma: bool = knob("each residual block starts as the identity: its last norm layer scales by 0")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """SGD, the same in both phases."""

    momentum: float = knob("momentum", minimum=0, maximum=1)
    nesterov: bool = knob("Nesterov's variant of momentum")
    weight_decay: float = knob("L2 penalty, added to the gradient", minimum=0)
    decay_norms: bool = knob("weight decay also on the scales and shifts of norm layers")
    decay_biases: bool = knob("weight decay also on the biases of other layers")
    label_smoothing: float = knob("probability mass moved from the true class to all classes", minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How numbers are computed, where that can change them."""

    precision: Precision = knob("of forward and backward passes; weights are fp32")
    channels_last: bool = knob("memory layout of images and weights; usually the faster one")
    compile: bool = knob("compile the network with torch.compile before training")
    deterministic: bool = knob("only algorithms that give the same bytes each time, also on GPUs, where it costs speed")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Batch size, learning rate and image size over the epochs of a run."""

    batch_size: IntByEpoch = knob("images per step, over all devices of the run together", minimum=1)
    peak_lr: float | None = optional("highest learning rate", above=0)
    warmup_epochs: float | None = optional("epochs of linear rise from 0 to the peak", minimum=0)
    lr_knots: Knots | None = optional("the learning rate by epoch, instead of peak_lr and warmup_epochs", minimum=0)
    image_size: IntByEpoch | None = optional("side in pixels to which images read from files are brought", minimum=1)
    min_scale: FloatByEpoch | None = optional(
        "images read from files: a random crop of at least this share of the area", above=0, maximum=1
    )


@dataclass(frozen=True, kw_only=True)
class Phase1(Schedule):
    """Large batches, all devices, one model."""

    max_epochs: int = knob("the learning rate falls to 0 at the end of this many epochs", minimum=1)
    stop_accuracy: float = knob(
        "training accuracy in percent that ends the phase once passed; 100 for never", minimum=0, maximum=100
    )
    seed: int = knob("initial weights, data order and augmentation", minimum=0, maximum=2**63 - 1)
    keep_epochs: EpochList = knob("epochs whose models are kept beside the last, as far as it gets; or all", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Phase2(Schedule):
    """Small batches, one independent worker a seed."""

    epochs: int = knob("length of the phase", minimum=1)
    cycles: int = knob(
        "equal parts of the phase, each ending in a model and, unless lr_knots say otherwise, from the peak down",
        minimum=1,
    )
    first_epoch: int | None = optional("what the knots call the first epoch of this phase; 0 if left out", minimum=0)
    gpus_per_worker: int = knob("GPUs that train one worker together", minimum=1)
    keep_epochs: EpochList = knob("epochs after which the workers' models are kept and averaged too; or all", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Baseline(Schedule):
    """Plain training, to compare with."""

    epochs: int = knob("length of the run", minimum=1)
    gpus: int = knob("GPUs that train it together, or as many as there are", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Swa:
    """SWA, to compare with: one model after another, each at the end of a cycle of the learning rate."""

    peak_lr: float = knob("learning rate at the beginning of a cycle, from which it falls to 0", above=0)
    models: int | None = optional("how many to sample and average; if left out, as many as SWAP averages", minimum=1)
    cycle_epochs: int | None = optional("epochs a model; if left out, as many as SWAP's workers take", minimum=1)


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
class Analysis:
    """What is computed of a finished run, and how finely."""

    grid: int = knob("points along each side of a landscape", minimum=2)
    margin: float = knob("how far a landscape reaches beyond its marked points, as a share of their extent", minimum=0)
    train_images: int | Literal["all"] = knob("for statistics and training error at each point", minimum=2)
    test_images: int | Literal["all"] = knob("for the test error at each point", minimum=1)
    gradient_images: int | Literal["all"] = knob("for the gradient whose direction is looked at", minimum=2)
    subsets: int = knob("at most so many choices of k workers are averaged and tested, for every k", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Params:
    """The whole of `params.yaml`."""

    recipe: str = knob("the file in recipes/ that this one came from; or a name of your own")
    data: Data
    model: Model
    optimizer: Optimizer
    compute: Compute
    phase1: Phase1
    phase2: Phase2
    workers: Workers
    phase3: Phase3
    repeats: tuple[int, ...] = knob(
        "the comparisons' further runs, each with other weights and another order of the data",
        minimum=0,
        maximum=2**63 - 1,
    )
    small_batch: Baseline | None = optional("plain training with small batches")
    large_batch: Baseline | None = optional("plain training with large batches")
    swa_large_batch: Swa | None = optional("SWA after and with large batches")
    swa_large_then_small: Swa | None = optional("SWA with small batches after phase 1")
    swa_small_batch: Swa | None = optional("SWA after and with small batches")
    analysis: Analysis | None = optional("landscapes, directions and choices of workers")


def read_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a params file; a `SwapError` tells everything that is wrong with the first bad entry."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise SwapError(f"{path} not found: run this from the project's root folder") from None
    except OSError as error:
        raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > _MAX_BYTES:
        raise SwapError(f"{path} has {len(content):,} bytes, too many for a params file: take one from recipes/")
    try:
        # YAML 1.2, as DVC reads it: PyYAML would make a string of `1e-3`.
        tree = YAML(typ="safe", pure=True).load(content.decode())
    except (YAMLError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise SwapError(f"{path} is not valid YAML: {what[:400]}") from None
    except Exception as error:  # the reader lets through what its parts raise: dates that are none, deep nesting
        what = " ".join(str(error).split())
        raise SwapError(f"{path} is not valid YAML: {type(error).__name__}: {what[:400]}") from None
    return parse_params(tree, file=str(path))


def parse_params(tree: Any, *, file: str = "params.yaml") -> Params:
    """Check a nested dict, as read from `file`, and give it its types."""
    try:
        _check_extent(tree)
        params = _parse(Params, tree, key="")
        _check_together(params)
    except SwapError as error:
        raise SwapError(f"{file}: {error}") from None
    assert isinstance(params, Params)
    return params


def _check_extent(tree: Any) -> None:
    """YAML's aliases can make a tree without end of a few lines: what no params file needs is refused."""
    num_values = 0
    layer = [tree]
    for _ in range(_MAX_DEPTH):
        parts = [[*part.keys(), *part.values()] if isinstance(part, dict) else part for part in layer]
        layer = [value for part in parts if isinstance(part, list) for value in part]
        num_values += len(layer)
        if not layer:
            return
        if num_values > _MAX_VALUES:
            raise SwapError(f"the file has more than {_MAX_VALUES:,} values: it cannot be a params file")
    raise SwapError(f"the file is nested more than {_MAX_DEPTH} deep, or an entry contains itself: write it flat")


def _check_together(params: Params) -> None:
    """Rules that involve more than one entry."""
    _check_schedule("phase1", params.phase1, epochs=params.phase1.max_epochs, length="max_epochs")
    _check_schedule("phase2", params.phase2, epochs=params.phase2.epochs, cycles=params.phase2.cycles)
    for name, baseline in (("small_batch", params.small_batch), ("large_batch", params.large_batch)):
        if baseline is not None:
            _check_schedule(name, baseline, epochs=baseline.epochs)
    for name, start in (("swa_large_batch", "large_batch"), ("swa_small_batch", "small_batch")):
        if getattr(params, name) is not None and getattr(params, start) is None:
            raise SwapError(f"{name} starts from {start}, which is missing: add that section, or remove this one too")
    if params.model.pretrained and params.model.zero_init_last_gamma:
        raise SwapError(
            "model.zero_init_last_gamma has no effect on published weights (model.pretrained): set it to false"
        )
    if 0 < params.phase1.stop_accuracy <= 1:
        meant = 100 * params.phase1.stop_accuracy
        raise SwapError(f"phase1.stop_accuracy is {params.phase1.stop_accuracy:g}, but in percent: write {meant:g}")
    if params.optimizer.nesterov and params.optimizer.momentum == 0:
        raise SwapError("optimizer.nesterov is true but optimizer.momentum is 0: set a momentum or nesterov: false")
    if not params.workers.seeds:
        raise SwapError("workers.seeds is empty: list at least one seed, for example [0, 1, 2, 3]")
    _check_distinct("workers.seeds", params.workers.seeds)
    _check_distinct("repeats", params.repeats)
    if 0 in params.repeats:
        raise SwapError("repeats lists 0, but that is the plain pipeline, which always takes part: leave it out")


def _check_distinct(key: str, seeds: tuple[int, ...]) -> None:
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise SwapError(
            f"{key} lists {', '.join(map(str, twice))} more than once: "
            f"equal seeds give equal models, so list each one once"
        )


_BY_EPOCH = ("lr_knots", "batch_size", "image_size", "min_scale")


def _check_schedule(name: str, given: Schedule, *, epochs: int, length: str = "epochs", cycles: int = 1) -> None:
    if given.lr_knots is None:
        for entry in ("peak_lr", "warmup_epochs"):
            if getattr(given, entry) is None:
                raise SwapError(f"{name}.{entry} is missing: add it, or the whole course as {name}.lr_knots")
    else:
        idle = [f"{name}.{entry}" for entry in ("peak_lr", "warmup_epochs") if getattr(given, entry) is not None]
        if idle:
            have = "has" if len(idle) == 1 else "have"
            raise SwapError(
                f"{' and '.join(idle)} {have} no effect beside {name}.lr_knots: remove the one or the other"
            )
    if epochs % cycles:
        raise SwapError(f"{name}.cycles is {cycles}, which does not divide {name}.{length} ({epochs}) into equal parts")
    if given.warmup_epochs is not None and given.warmup_epochs > epochs / cycles:
        of = f"{name}.{length} ({epochs})" if cycles == 1 else f"a cycle ({epochs // cycles} epochs)"
        raise SwapError(
            f"{name}.warmup_epochs is {given.warmup_epochs:g}, longer than {of}: lower the one or raise the other"
        )
    if given.min_scale is not None and given.image_size is None:
        raise SwapError(f"{name}.min_scale has no effect without {name}.image_size: add that, or remove it")
    by_epoch = [entry for entry in _BY_EPOCH if isinstance(getattr(given, entry), tuple)]
    first = given.first_epoch or 0 if isinstance(given, Phase2) else 0
    if first and not by_epoch:
        raise SwapError(f"{name}.first_epoch has no effect where nothing is given by epoch: remove it")
    for entry in by_epoch:
        _check_knots(f"{name}.{entry}", getattr(given, entry), jumps=entry == "lr_knots")
    if given.lr_knots is not None and given.lr_knots[-1][0] < first + epochs:
        raise SwapError(
            f"{name}.lr_knots ends at epoch {given.lr_knots[-1][0]:g}, the run at {first + epochs}: add a knot there"
        )


def _check_knots(key: str, knots: Knots, *, jumps: bool) -> None:
    if not knots:
        raise SwapError(f"{key} is empty: write it as [[epoch, value], …]")
    epochs = [epoch for epoch, _ in knots]
    if epochs[0] != 0:
        raise SwapError(f"{key} begins at epoch {epochs[0]:g}: begin at 0")
    if epochs != sorted(epochs) or (not jumps and len(set(epochs)) < len(epochs)):
        raise SwapError(f"{key} has epochs {', '.join(f'{epoch:g}' for epoch in epochs)}: list them in rising order")


def _parse(kind: Any, value: Any, *, key: str, limits: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Turn `value`, found at the dotted `key`, into `kind`."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _parse_union(typing.get_args(kind), value, key=key, limits=limits)
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise SwapError(f"{key} is {shown(value)}, but must be a section with entries of its own")
        return dict(value)
    if dataclasses.is_dataclass(kind):
        return _parse_section(kind, value, key=key)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise SwapError(f"{key} is {shown(value)}: choose one of {', '.join(choices)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise SwapError(f"{key} is {shown(value)}: write a list, for example {_example(kind)}")
        if typing.get_args(kind)[-1] is not Ellipsis:
            return _parse_pair(typing.get_args(kind), value, key=key, limits=limits)
        item_kind = typing.get_args(kind)[0]
        return tuple(_parse(item_kind, item, key=f"{key}[{i}]", limits=limits) for i, item in enumerate(value))
    return _parse_scalar(kind, value, key=key, limits=limits)


def _example(kind: Any) -> str:
    return "[0, 1, 2, 3]" if typing.get_args(kind)[0] is int else "[[0, 0.1], [10, 0.0]]"


def _parse_union(kinds: tuple[Any, ...], value: Any, *, key: str, limits: Mapping[str, Any]) -> Any:
    """Of the possible kinds, the one that the value looks like."""
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds:
        origin = typing.get_origin(kind)
        if (origin is tuple and isinstance(value, list)) or (origin is Literal and value in typing.get_args(kind)):
            return _parse(kind, value, key=key, limits=limits)
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    try:
        return _parse(kinds[0], value, key=key, limits=limits)
    except SwapError as error:
        if words and isinstance(value, str):
            raise SwapError(f"{error}, or {', '.join(words)}") from None
        raise


def _parse_pair(kinds: tuple[Any, ...], value: list[Any], *, key: str, limits: Mapping[str, Any]) -> Any:
    """An epoch and the value that belongs to it; the limits are the value's."""
    if len(value) != 2:
        raise SwapError(f"{key} is {shown(value)}: write a pair, [epoch, value]")
    epoch = _parse_scalar(kinds[0], value[0], key=f"{key}[0]", limits={"minimum": 0})
    return epoch, _parse(kinds[1], value[1], key=f"{key}[1]", limits=limits)


def _parse_section(kind: Any, value: Any, *, key: str) -> Any:
    where = f"{key}." if key else ""
    if not isinstance(value, dict):
        raise SwapError(f"{key or 'the file'} must be a section with entries of its own, not {shown(value)}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in fields:
            plain = isinstance(name, str) and name.isprintable() and len(name) <= 80
            raise SwapError(f"{where}{name if plain else shown(name)} is not a known parameter{_closest(name, fields)}")
    for name, declared in fields.items():
        if name not in value and declared.default is dataclasses.MISSING:
            doc = declared.metadata.get("doc")
            raise SwapError(f"{where}{name} is missing{f' ({doc})' if doc else ''}: add it")
    return kind(
        **{
            name: _parse(hints[name], value[name], key=f"{where}{name}", limits=declared.metadata)
            for name, declared in fields.items()
            if name in value
        }
    )


def _parse_scalar(kind: type, value: Any, *, key: str, limits: Mapping[str, Any]) -> Any:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    accepted = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}[kind]
    # bool is an int to Python, but `batch_size: true` is a slip.
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        hint = " (write it without quotes)" if kind in (int, float) and _is_number(value) else ""
        raise SwapError(f"{key} is {shown(value)}, but must be {names[kind]}{hint}")
    if kind is str or kind is bool:
        return value
    assert isinstance(value, int | float)
    if abs(value) > sys.float_info.max or math.isnan(value):
        raise SwapError(f"{key} is {shown(value)}, but must be finite")
    minimum, above, maximum = limits.get("minimum"), limits.get("above"), limits.get("maximum")
    if minimum is not None and value < minimum:
        raise SwapError(f"{key} is {shown(value)}, but must be at least {minimum}")
    if above is not None and value <= above:
        raise SwapError(f"{key} is {shown(value)}, but must be above {above}")
    if maximum is not None and value > maximum:
        raise SwapError(f"{key} is {shown(value)}, but must be at most {maximum}")
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


def check_divisible(key: str, batch_size: IntByEpoch, processes: int, *, remedy: str) -> None:
    """A global batch is shared equally by the processes; `remedy` tells what else could be changed."""
    sizes = [batch_size] if isinstance(batch_size, int) else [size for _, size in batch_size]
    for size in sizes:
        if size % processes == 0:
            continue
        best = max(n for n in range(1, processes + 1) if all(size % n == 0 for size in sizes))
        raise SwapError(
            f"params.yaml: {key} is {size}, which {processes} processes cannot share equally: "
            f"choose a multiple of {processes}, or {remedy} {best}"
        )
