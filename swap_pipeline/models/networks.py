"""Networks by name, and trained networks from files.

`describe_network` turns the model section of `params.yaml` into a description, which every checkpoint contains;
`new_network` builds the network that it describes: one of this package (resnet9), of torchvision or timm, or of a
user's function.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from swap_pipeline.config.params import Model
from swap_pipeline.errors import SwapError, printable, shown
from swap_pipeline.models.torchvision_and_timm import (
    check_known,
    check_option,
    has_published_weights,
    library_network,
    published_weights,
)
from swap_pipeline.runtime.user_code import cause, import_function, in_words, is_own, said_of
from swap_pipeline.storage.tensor_files import TensorFile
from swap_pipeline.storage.weights import check_fits, load_weights


class ResNet9(nn.Module):
    """The network of the paper's CIFAR experiments: the DAWNBench entry of David Page (cifar10-fast).

    A stem, then three stages that each double the channels and halve the image, with a residual pair of convolutions
    after the first and third; global max pooling, a linear layer without bias, and logits scaled by 1/8. 6,573,120
    parameters at width 64 with 3 channels and 10 classes.
    """

    def __init__(self, *, width: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = _conv_bn_relu(channels, width)
        self.stage1 = nn.Sequential(_conv_bn_relu(width, 2 * width), nn.MaxPool2d(2), _Residual(2 * width))
        self.stage2 = nn.Sequential(_conv_bn_relu(2 * width, 4 * width), nn.MaxPool2d(2))
        self.stage3 = nn.Sequential(_conv_bn_relu(4 * width, 8 * width), nn.MaxPool2d(2), _Residual(8 * width))
        self.head = nn.Linear(8 * width, num_classes, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if min(images.shape[2:]) < 8:
            height, width = images.shape[2:]
            raise SwapError(
                f"resnet9 halves its images three times: {height}×{width} pixels are too few, it needs at least 8×8"
            )
        x = self.stage3(self.stage2(self.stage1(self.stem(images))))
        logits: torch.Tensor = self.head(x.amax(dim=(2, 3)))
        return logits * 0.125


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pair = nn.Sequential(_conv_bn_relu(channels, channels), _conv_bn_relu(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refined: torch.Tensor = self.pair(x)
        return x + refined


def _conv_bn_relu(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


NETWORKS: dict[str, Callable[..., nn.Module]] = {"resnet9": ResNet9}
"""Networks of this package by name; each takes a width and the data's channels and classes."""
# Keys of a description; all but the first three are optional.
_KEYS = {"name": str, "channels": int, "num_classes": int, "width": int, "options": dict, "zero_init_last_gamma": bool}


def describe_network(model: Model, *, channels: int, num_classes: int, where: str = "params.yaml") -> dict[str, Any]:
    """All that it takes to build the network again; stands in every checkpoint's header.

    `model.pretrained` is not included: it only decides where phase 1 starts.
    """
    description: dict[str, Any] = {"name": model.name, "channels": channels, "num_classes": num_classes}
    if model.width is not None:
        description["width"] = model.width
    if model.options:
        description["options"] = dict(model.options)
    if model.zero_init_last_gamma:
        description["zero_init_last_gamma"] = True
    with said_of(where):
        _check(description)
        if model.pretrained:
            _check_published(model.name)
    return description


def new_network(description: Mapping[str, Any], *, seed: int) -> nn.Module:
    """A network with the initial weights of `seed`; leaves torch's global generator unchanged."""
    with said_of("params.yaml"):
        return _build(description, seed=seed)


def load_pretrained(network: nn.Module, description: Mapping[str, Any]) -> None:
    """Load published weights into a new network: every tensor whose name and shape fit, usually all but the
    classifier."""
    name = description["name"]
    with said_of("params.yaml"):
        _check_published(name)
        published = published_weights(description)
    state = network.state_dict()
    fitting = {key: published[key] for key in state if key in published and published[key].shape == state[key].shape}
    weights = [key for key in state if not key.endswith("num_batches_tracked")]
    fresh = [key for key in weights if key not in fitting]
    if len(fresh) == len(weights):
        raise SwapError(f"params.yaml: model.pretrained: none of the published weights of {name} fit this network")
    state.update(fitting)
    network.load_state_dict(state)
    few = ", ".join(fresh[:6]) + (f" and {len(fresh) - 6} more" if len(fresh) > 6 else "")
    if os.environ.get("RANK", "0") == "0":
        print(f"published weights of {name}: {f'all but {few}, which start at random' if fresh else 'all'}", flush=True)


def load_model(path: str | Path, *, own: str | None = None) -> nn.Module:
    """The network of a checkpoint in eval mode, rebuilt from the file alone.

    Its input is a float batch, N×C×H×W, that the caller has normalised with the `mean` and `std` of the header
    (`swap_pipeline.storage.tensor_files.TensorFile(path).info`); `swap predict` does that for you.

    A file from elsewhere must not choose which code runs: a user's own network (`package.module:function`) is built
    only if `own` is exactly that name.
    """
    path = Path(path)
    network = network_of(TensorFile(path), own=own)
    load_weights(network, path)
    return network.eval()


def network_of(file: TensorFile, *, own: str | None) -> nn.Module:
    """The network that a checkpoint's header describes, with initial weights; `own` as for `load_model`."""
    path, description = file.path, file.info.get("model")
    if not isinstance(description, dict):
        raise SwapError(f"{path} is not a checkpoint of a network: its header does not describe one, take another file")
    name = description.get("name")
    if not isinstance(name, str) or any(not _is(description[key], _KEYS.get(key)) for key in description):
        raise SwapError(
            f"{path} holds a network {str(name)[:80]!r} in a form that this version does not know: "
            f"update swap-pipeline, or take another file"
        )
    if not {"channels", "num_classes"} <= description.keys():
        raise SwapError(
            f"{path} holds a network {name[:80]!r}, but its header does not say for which images and classes: "
            f"take the file as it was trained"
        )
    if is_own(name) and name != own:
        raise SwapError(
            f"{path} holds a network that is made by {printable(name)}, code that is not part of this package: "
            f"if you trust it, pass own={name!r} (swap predict --own {printable(name)})"
        )
    return network_for(description, file)


def network_for(description: Mapping[str, Any], file: TensorFile) -> nn.Module:
    """A network with initial weights, if the tensors of `file` are its own; nothing larger is ever built."""
    with said_of(file.path):
        _check(description)
        with _no_larger_than(file):
            _check_size(description, file)
            return _build(description, seed=0)


def _is(value: Any, kind: type | None) -> bool:
    if kind is int:
        return type(value) is int and value > 0  # not a bool
    return kind is not None and isinstance(value, kind)


def _check(description: Mapping[str, Any]) -> None:
    """Check a network's settings as far as possible without building it."""
    name, width, options = description["name"], description.get("width"), description.get("options", {})
    if is_own(name):
        import_function(name)
    elif name in NETWORKS:
        _check_ours(name, width=width, options=options, zero=description.get("zero_init_last_gamma", False))
    else:
        check_known(name, ours=NETWORKS)
        if width is not None:
            raise SwapError(f"model.width is {width}, but {name} has no width: leave it out")
        if name.startswith("torchvision:") and description["channels"] not in (1, 3):
            raise SwapError(f"model.name is {name!r}, which takes 1 or 3 channels, not {description['channels']}")
    for key, value in options.items():
        _check_option(name, key, value)


def _check_ours(name: str, *, width: int | None, options: Mapping[str, Any], zero: bool) -> None:
    if width is None:
        raise SwapError(f"model.width is missing: {name} needs one, the paper's ResNet-9 has 64")
    if options:
        raise SwapError(f"model.options is set, but {name} has none: leave it out")
    if zero:
        # The gradient of a ReLU is zero at zero, so no weight of such a branch would ever change.
        raise SwapError(
            f"model.zero_init_last_gamma is true, but the residual branches of {name} end in a ReLU and would "
            f"never learn: set it to false"
        )


def _check_option(name: str, key: str, value: Any) -> None:
    if is_own(name):
        if key in ("num_classes", "channels"):
            raise SwapError(f"model.options.{key} is not an option: the data decides that, leave it out")
        if key in ("width", "zero_init_last_gamma"):
            raise SwapError(f"model.options.{key} is not an option: set model.{key} instead")
    else:
        check_option(name, key)
    if not _is_plain(value, sections=is_own(name)):
        kinds = "numbers, text, true, false, lists" + (" and sections" if is_own(name) else "")
        raise SwapError(f"model.options.{key} is {value!r}: options can be {kinds}")


def _is_plain(value: Any, *, sections: bool) -> bool:
    """Whether JSON, which headers are, can hold it."""
    if isinstance(value, list):
        return all(_is_plain(item, sections=sections) for item in value)
    if isinstance(value, dict):
        return sections and all(isinstance(k, str) and _is_plain(v, sections=sections) for k, v in value.items())
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _check_published(name: str) -> None:
    if not has_published_weights(name):
        raise SwapError(f"model.pretrained is true, but {name} has no published weights: set model.pretrained: false")


def _check_size(description: Mapping[str, Any], file: TensorFile) -> None:
    """A header must not make us build what its tensors do not fill: compared without memory for either."""
    num_values = sum(spec.num_elements for spec in file.layout.values())
    for key in ("channels", "num_classes", "width"):
        if description.get(key, 0) > max(num_values, 3):  # torchvision's networks see three channels of a grey image
            raise SwapError(f"model.{key} is {shown(description[key])}, but the file has only {num_values:,} weights")
    if (outline := _outline(description)) is not None:
        check_fits(outline, file)


def shapes_of(description: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a network."""
    network = _outline(description) or _build(description, seed=0)
    return {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}


def _outline(description: Mapping[str, Any]) -> nn.Module | None:
    """The network without values; None for a user's own that cannot be built so."""
    modes: tuple[contextlib.AbstractContextManager[Any], ...] = (torch.device("meta"), _OnlyWeightsOnMeta())
    for mode in modes:
        try:
            with mode:
                return _build(description, seed=0)
        except (SwapError, RuntimeError) as error:
            # Some compute with tensors while they are built, as RegNets do for their widths.
            if "meta tensor" in f"{error} {error.__cause__}":
                continue
            if isinstance(error, SwapError):
                raise
            raise SwapError(f"model.name is {description['name']!r}, which failed: {in_words(error)}") from None
    if not is_own(description["name"]):
        raise SwapError(f"model.name is {description['name']!r}, whose size cannot be determined")
    return None


class _OnlyWeightsOnMeta(TorchFunctionMode):
    """Puts tensors that may be large on `meta`, others not."""

    _LARGE = (torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in self._LARGE and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


@contextlib.contextmanager
def _no_larger_than(file: TensorFile) -> Iterator[None]:
    """A network that is made in this block, with far more parts than the file has tensors, is not made to its end."""
    num_tensors = len(file.layout)
    # Some make more than they keep, or have ten layers without weights for one with; all are made up to three times.
    left = {"tensors": 10 * num_tensors + 200, "layers": 60 * num_tensors + 2000}

    def count(kind: str, module: nn.Module, name: str, part: object) -> None:
        left[kind] -= 1
        if left[kind] < 0:
            raise _TooManyError

    hooks = [
        register_module_parameter_registration_hook(partial(count, "tensors")),
        register_module_buffer_registration_hook(partial(count, "tensors")),
        register_module_module_registration_hook(partial(count, "layers")),
    ]
    try:
        yield
    except _TooManyError:
        raise SwapError("it describes a network with far more parts than the file has: take another one") from None
    finally:
        for hook in hooks:
            hook.remove()


class _TooManyError(BaseException):
    """Not an `Exception`, so that no code of a network or library catches it."""


def _build(description: Mapping[str, Any], *, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        build = _builder(description)  # imports code, which may draw random numbers
        torch.manual_seed(seed)
        return build()


def _builder(description: Mapping[str, Any]) -> Callable[[], nn.Module]:
    name = description["name"]
    if is_own(name):
        return _own_network(description)
    if name in NETWORKS:
        return partial(NETWORKS[name], **{key: description[key] for key in ("width", "channels", "num_classes")})
    return library_network(description)


def _own_network(description: Mapping[str, Any]) -> Callable[[], nn.Module]:
    name = description["name"]
    function = import_function(name)
    arguments = {key: description[key] for key in _KEYS if key in description and key not in ("name", "options")}
    arguments |= description.get("options", {})
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        hint = ": set model.width" if "'width'" in str(error) and "width" not in arguments else ""
        raise SwapError(f"model.name is {name!r}, which was called with {given}: {error}{hint}") from error
    except ValueError:
        pass  # a function without a signature, written in C

    def build() -> nn.Module:
        try:
            network = function(**arguments)
        except Exception as error:
            raise SwapError(f"model.name is {name!r}, which failed: {cause(error)}") from error
        if not isinstance(network, nn.Module):
            raise SwapError(f"model.name is {name!r}, which returned {type(network).__name__}, not a torch.nn.Module")
        return network

    return build
