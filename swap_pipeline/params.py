"""`params.yaml` as frozen, checked objects.

Every knob is declared here once: its name, type, range, meaning and, unless the file must say it, its default. A
params file holds what people tune; whatever else is declared here may be added to it. Each error names the dotted key,
the value found and the way out.
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
from typing import Any, Literal, TypeVar

from swap_pipeline.errors import SwapError, shown
from swap_pipeline.files import open_plain

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


Kind = TypeVar("Kind")
EpochList = tuple[int, ...] | Literal["all"]


def knob(
    doc: str,
    *,
    default: Any = dataclasses.MISSING,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare a parameter: what it means, which values make sense, and its value where the file does not mention it."""
    return field(default=default, metadata={"doc": doc, "minimum": minimum, "above": above, "maximum": maximum})


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is learned from."""

    name: str = knob("the data set")
    root: str = knob("folder of your own images, or of a data set's official files where there is no network")
    train_images: int | Literal["all"] = knob(
        "use only this many training images, the same number of each class", default="all", minimum=1
    )
    max_gb_in_memory: float = knob(
        "images that take more are read from their files, batch by batch", default=2.0, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Random changes made to every training batch, and how test images are cropped."""

    padding: int = knob(
        "pixels of reflection added on each side before a random crop of the old size", default=0, minimum=0
    )
    flip: bool = knob("mirror half of the images, left to right", default=True)
    cutout: int = knob("side of a square that is blanked out in every image; 0 for none", default=0, minimum=0)
    test_crop: Literal["square", "rectangle"] = knob(
        "test images read from files: a square from the middle, or a rectangle in the image's own shape",
        default="square",
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = knob("resnet9, torchvision:<name>, timm:<name> or package.module:function")
    width: int | None = knob("channels of the first layer; the paper's ResNet-9 has 64", default=None, minimum=1)
    options: dict[str, Any] | None = knob("further arguments for the function that makes the network", default=None)
    pretrained: bool = knob("start phase 1 from published weights", default=False)
    zero_init_last_gamma: bool = knob(
        "each residual block starts as the identity: its last norm layer scales by 0", default=False
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """SGD, the same in both phases."""

    momentum: float = knob("momentum", default=0.9, minimum=0, maximum=1)
    nesterov: bool = knob("Nesterov's variant of momentum", default=True)
    weight_decay: float = knob("L2 penalty, added to the gradient", default=5e-4, minimum=0)
    decay_norms: bool = knob("weight decay also on the scales and shifts of norm layers", default=True)
    decay_biases: bool = knob("weight decay also on the biases of other layers", default=True)
    label_smoothing: float = knob(
        "probability mass moved from the true class to all classes", default=0.0, minimum=0, maximum=1
    )


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How numbers are computed, where that can change them."""

    precision: Precision = knob(
        "of forward and backward passes (weights are fp32); auto: bf16 on GPUs that have it, fp16 on other GPUs, "
        "fp32 on CPU",
        default="auto",
    )
    channels_last: bool = knob("memory layout of images and weights; usually the faster one", default=True)
    compile: bool = knob("compile the network with torch.compile before training", default=False)
    deterministic: bool = knob(
        "only algorithms that give the same bytes each time, also on GPUs, where it costs speed", default=True
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Batch size, learning rate and image size over the epochs of a run."""

    batch_size: IntByEpoch = knob("images per step, over all devices of the run together", minimum=1)
    shards: int = knob(
        "equal parts of a batch, each normalised on its own (batch norm); at most this many devices share the run",
        default=1,
        minimum=1,
        maximum=1 << 16,
    )
    peak_lr: float | None = knob("highest learning rate", default=None, above=0)
    warmup_epochs: float | None = knob(
        "epochs of linear rise from 0 to the peak; none if left out", default=None, minimum=0
    )
    lr_knots: Knots | None = knob(
        "the learning rate by epoch, instead of peak_lr and warmup_epochs", default=None, minimum=0
    )
    image_size: IntByEpoch | None = knob(
        "side in pixels to which images read from files are resized", default=None, minimum=1
    )
    min_scale: FloatByEpoch | None = knob(
        "images read from files: a random crop of at least this share of the area", default=None, above=0, maximum=1
    )
    ema_decay: float | None = knob(
        "keep an exponential mean of the weights, by step, with this decay (0.99, for example); the mean is the result",
        default=None,
        above=0,
        maximum=1 - 1e-9,
    )


@dataclass(frozen=True, kw_only=True)
class Phase1(Schedule):
    """Large batches, all devices, one model."""

    max_epochs: int = knob("the learning rate falls to 0 at the end of this many epochs", minimum=1)
    stop_accuracy: float = knob(
        "training accuracy in percent that ends the phase once passed (τ); 100 for never",
        default=100.0,
        minimum=0,
        maximum=100,
    )
    keep_epochs: EpochList = knob(
        "epochs whose models are kept beside the last, for the analysis; a list, or all", default=(), minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class Phase2(Schedule):
    """Small batches, one independent worker for each seed."""

    epochs: int = knob("length of the phase; 0: no phase 2, the model is phase 1's", minimum=0)
    cycles: int = knob(
        "equal parts of the phase, each ending in a model and, unless lr_knots say otherwise, from the peak down",
        default=1,
        minimum=1,
    )
    first_epoch: int = knob("what the knots call the first epoch of this phase", default=0, minimum=0)
    keep_epochs: EpochList = knob(
        "epochs after which the workers' models are kept and their average tested; a list, or all",
        default=(),
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who takes part in phase 2 and in the average."""

    seeds: tuple[int, ...] = knob("one worker for each of these seeds", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Phase3:
    """The average's batch-norm statistics."""

    batch_size: int = knob(
        "images in one batch of the statistics pass; a batch is never split over devices", default=500, minimum=2
    )
    augment: bool = knob("pass augmented images, as seen in training, instead of plain ones", default=False)
    variance: Literal["pooled", "batch_mean"] = knob(
        "variance over all samples, or mean of the batches' variances", default="pooled"
    )


@dataclass(frozen=True, kw_only=True)
class Params:
    """The whole of `params.yaml`."""

    recipe: str = knob("the file in recipes/ that this one came from; or a name of your own")
    method: str = knob("a label for tables and reports: what kind of training this is", default="swap")
    seed: int = knob(
        "initial weights, data order and augmentation; another seed is another repeat", minimum=0, maximum=2**63 - 1
    )
    data: Data
    augment: Augment
    model: Model
    optimizer: Optimizer
    compute: Compute
    phase1: Phase1
    phase2: Phase2
    workers: Workers
    phase3: Phase3


def read_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a params file; a `SwapError` tells everything that is wrong with the first bad entry."""
    return parse_params(read_tree(path), file=str(path))


def read_tree(path: Path) -> Any:
    """What a params file says, not checked yet."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        with open_plain(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise SwapError(f"{path} not found: run this from the project's root folder") from None
    except OSError as error:
        raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > _MAX_BYTES:
        raise SwapError(
            f"{path} has more than {_MAX_BYTES:,} bytes, too many for a params file: take one from recipes/"
        )
    try:
        # YAML 1.2, as DVC reads it: PyYAML would make a string of `1e-3`.
        return YAML(typ="safe", pure=True).load(content.decode())
    except (YAMLError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise SwapError(f"{path} is not valid YAML: {what[:400]}") from None
    except Exception as error:  # the reader lets through what its parts raise: dates that are none, deep nesting
        what = " ".join(str(error).split())
        raise SwapError(f"{path} is not valid YAML: {type(error).__name__}: {what[:400]}") from None


def parse_params(tree: Any, *, file: str = "params.yaml") -> Params:
    """Check a nested dict, as read from `file`, and give it its types."""
    params = parse_as(Params, tree, file=file)
    try:
        _check_together(params)
    except SwapError as error:
        raise SwapError(f"{file}: {error}") from None
    return params


def parse_as(kind: type[Kind], tree: Any, *, file: str) -> Kind:
    """Check each entry of a nested dict, as read from `file`, by what `kind` declares."""
    try:
        _check_extent(tree)
        parsed = _parse(kind, tree, key="")
    except SwapError as error:
        raise SwapError(f"{file}: {error}") from None
    assert isinstance(parsed, kind)
    return parsed


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
    twice = sorted({seed for seed in params.workers.seeds if params.workers.seeds.count(seed) > 1})
    if twice:
        raise SwapError(
            f"workers.seeds lists {', '.join(map(str, twice))} more than once: "
            f"equal seeds give equal models, so list each one once"
        )


_BY_EPOCH = ("lr_knots", "batch_size", "image_size", "min_scale")


def _check_schedule(name: str, given: Schedule, *, epochs: int, length: str = "epochs", cycles: int = 1) -> None:
    if given.lr_knots is None:
        if given.peak_lr is None:
            raise SwapError(f"{name}.peak_lr is missing: add it, or the whole course as {name}.lr_knots")
    else:
        idle = [f"{name}.{entry}" for entry in ("peak_lr", "warmup_epochs") if getattr(given, entry) is not None]
        if idle:
            have = "has" if len(idle) == 1 else "have"
            raise SwapError(
                f"{' and '.join(idle)} {have} no effect beside {name}.lr_knots: remove the one or the other"
            )
    sizes = [given.batch_size] if isinstance(given.batch_size, int) else [size for _, size in given.batch_size]
    for size in sizes:
        if size % given.shards:
            best = max(n for n in range(1, given.shards + 1) if all(size % n == 0 for size in sizes))
            raise SwapError(
                f"{name}.batch_size is {size}, which {given.shards} shards cannot share equally: "
                f"choose a multiple of {given.shards}, or set {name}.shards to {best}"
            )
    if epochs == 0:
        if cycles > 1:
            raise SwapError(f"{name}.cycles is {cycles}, but {name}.epochs is 0: set cycles to 1")
        return
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
    first = given.first_epoch if isinstance(given, Phase2) else 0
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
