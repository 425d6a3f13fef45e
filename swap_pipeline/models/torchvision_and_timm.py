"""Networks of torchvision and timm, `torchvision:<name>` and `timm:<name>`, and their published weights.

Either library is imported only when needed: torchvision takes a second, and timm need not be installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import time
import types
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_pipeline.errors import SwapError, did_you_mean
from swap_pipeline.runtime.job_folder import scratch_root
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.runtime.user_code import in_words

_WEIGHTS = "set model.pretrained instead"
_DATA = "the data decides that, leave it out"
_PLAIN = "only a plain classifier can be trained here, leave it out"
_GAMMA = "set model.zero_init_last_gamma instead"
NO_OPTIONS = {
    **dict.fromkeys(("weights", "progress", "checkpoint_path", "cache_dir"), _WEIGHTS),
    **dict.fromkeys(("num_classes", "in_chans", "channels"), _DATA),
    **dict.fromkeys(("aux_logits", "features_only", "feature_cfg", "feature_cls", "out_indices"), _PLAIN),
    **dict.fromkeys(("zero_init_residual", "zero_init_last"), _GAMMA),
}
"""Arguments of the libraries' functions that `model.options` must not set; some of them would load files."""


def check_known(name: str, *, ours: Collection[str]) -> None:
    """Check that `name` is a network of its library; else raise an error with the closest names, including `ours`."""
    library, _, short = name.partition(":")
    if library == "torchvision" and short in _torchvision_names():
        return
    if library == "timm":
        timm = _timm(name)
        model, _, tag = short.partition(".")
        # create_model would also accept Hugging Face hub addresses and folders, and load from there.
        if timm.is_model(model) and (not tag or timm.is_model_pretrained(short)):
            return
    raise SwapError(f"model.name is {name!r}{_closest(name, ours)}")


def check_option(name: str, key: str) -> None:
    """Reject an option that could load weights or build something other than a classifier."""
    reason = _WEIGHTS if key.startswith("pretrained") else NO_OPTIONS.get(key)
    if reason:
        raise SwapError(f"model.options.{key} is not an option of {name}: {reason}")


def library_network(description: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """A function that builds the described network; imports what it needs."""
    return _from_torchvision(description) if _is_torchvision(description["name"]) else _from_timm(description)


def has_published_weights(name: str) -> bool:
    library, _, short = name.partition(":")
    if library == "torchvision":
        return True
    return library == "timm" and bool(_timm(name).is_model_pretrained(short))


def published_weights(description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Published weights by tensor, downloaded into the project's scratch folder if they are not there yet."""
    read = _torchvision_weights if _is_torchvision(description["name"]) else _timm_weights
    return read(description)


def usual_images(name: str, network: nn.Module) -> tuple[int, tuple[float, ...], tuple[float, ...]] | None:
    """Side in pixels, mean and standard deviation of the images that a library trained the network on."""
    if _is_torchvision(name):
        from torchvision.models import get_model_weights

        preset = get_model_weights(name.removeprefix("torchvision:")).DEFAULT.transforms()
        return preset.crop_size[0], tuple(preset.mean), tuple(preset.std)
    config = getattr(network, "pretrained_cfg", None) if name.startswith("timm:") else None
    return (config["input_size"][-1], tuple(config["mean"]), tuple(config["std"])) if config else None


def _is_torchvision(name: str) -> bool:
    return name.startswith("torchvision:")


def _torchvision_names() -> list[str]:
    import torchvision

    # Detection, segmentation, video and quantized networks are in submodules.
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _timm(name: str) -> Any:
    try:
        return importlib.import_module("timm").models
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise SwapError(f"model.name is {name!r}, but timm is not installed: run `pip install timm`") from None


def _closest(name: str, ours: Collection[str]) -> str:
    library, colon, short = name.partition(":")
    meant = {} if colon else {each: each for each in ours}
    if library == "timm" or (not colon and importlib.util.find_spec("timm")):
        tagged = "." in short
        meant |= {each: f"timm:{each}" for each in _timm(name).list_models(pretrained=tagged)}
    if library == "torchvision" or not colon:
        meant |= {each: f"torchvision:{each}" for each in _torchvision_names()}
    ways = f"choose {', '.join(ours)}, torchvision:<name>, timm:<name> or your own, package.module:function"
    return did_you_mean(short if colon else name, meant, otherwise=f": {ways}")


def _from_torchvision(description: Mapping[str, Any]) -> Callable[[], nn.Module]:
    from torchvision.models import MNASNet, get_model_builder

    name, options = description["name"], description.get("options", {})
    short = name.removeprefix("torchvision:")
    function = get_model_builder(short)
    arguments = {"num_classes": description["num_classes"], **options}
    if short in ("googlenet", "inception_v3"):
        arguments = {"aux_logits": False, "init_weights": True, **arguments}
    accepted = _accepted(function)
    for key in options:
        if accepted and key not in accepted:
            raise _no_option(name, key, accepted - NO_OPTIONS.keys())
    if description.get("zero_init_last_gamma"):
        if "zero_init_residual" not in accepted:
            raise _no_gamma(name)
        arguments["zero_init_residual"] = True

    def build() -> nn.Module:
        with _blaming_options(name, options):
            network: nn.Module = function(weights=None, **arguments)
        if isinstance(network, MNASNet):
            # Its own loading needs a version that only torch's pickled files have.
            network._load_from_state_dict = types.MethodType(nn.Module._load_from_state_dict, network)
        if description["channels"] == 1:
            network.register_forward_pre_hook(_repeat_channel)
        return network

    return build


def _accepted(function: Callable[..., nn.Module]) -> set[str]:
    """Names of arguments that a function of torchvision accepts; empty if unknown.

    The functions pass on any argument, and some classes silently ignore unknown ones.
    """
    function = inspect.unwrap(function)
    made = inspect.signature(function).return_annotation
    if not inspect.isclass(made):
        return set()
    called = [function.__globals__.get(each) for each in function.__code__.co_names]
    parts: list[Callable[..., Any]] = [made]
    parts += [each for each in called if inspect.isfunction(each) and each.__module__ == function.__module__]
    parameters = [each for part in parts for each in inspect.signature(part).parameters.values()]
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}


def _repeat_channel(network: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Turn grey images into three channels, so that tensors keep their shapes and published weights fit."""
    images, *others = inputs
    return images.expand(-1, 3, -1, -1), *others


def _from_timm(description: Mapping[str, Any]) -> Callable[[], nn.Module]:
    name, options = description["name"], description.get("options", {})
    timm = _timm(name)
    zero = description.get("zero_init_last_gamma", False)
    arguments = {"num_classes": description["num_classes"], "in_chans": description["channels"], **options}

    def create(**further: Any) -> nn.Module:
        network: nn.Module = timm.create_model(name.removeprefix("timm:"), pretrained=False, **arguments, **further)
        return network

    def build() -> nn.Module:
        with _blaming_options(name, options):
            try:
                # Passed in either case, since the default of timm's ResNets is True.
                network = create(zero_init_last=zero)
            except TypeError as error:
                if "zero_init_last" not in str(error):
                    raise
                network = create()
            # Some silently ignore unknown arguments.
            if zero and "zero_init_last" not in inspect.signature(type(network)).parameters:
                raise _no_gamma(name)
            return network

    return build


def _no_gamma(name: str) -> SwapError:
    return SwapError(f"model.zero_init_last_gamma is true, but {name} has no such setting: set it to false")


def _no_option(name: str, key: str, known: Collection[str]) -> SwapError:
    hint = did_you_mean(key, known, otherwise=": leave it out")
    return SwapError(f"model.options.{key} is not an option of {name}{hint}")


@contextlib.contextmanager
def _blaming_options(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Blame errors on the options, in one line; without options an error is a bug and keeps its traceback."""
    try:
        yield
    except SwapError:
        raise
    except Exception as error:
        named = [key for key in options if f"'{key}'" in str(error)]
        if isinstance(error, TypeError) and named:
            raise _no_option(name, named[0], ()) from error
        if not options:
            raise
        raise SwapError(f"model.options do not fit {name}: {in_words(error)}") from error


def _torchvision_weights(description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from torchvision.models import get_model_weights

    name = description["name"]
    weights = get_model_weights(name.removeprefix("torchvision:")).DEFAULT
    with _downloads(name, weights.url, Path(urllib.parse.urlparse(weights.url).path).name) as file:
        found: dict[str, torch.Tensor] = weights.get_state_dict(
            model_dir=str(file.parent), map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    # DenseNets' files are older than torch's rule that module names contain no dots.
    return {re.sub(r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", key): found[key] for key in found}


def _timm_weights(description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """As adapted by timm to the channels and options, with the published classifier."""
    name, short = description["name"], description["name"].removeprefix("timm:")
    timm = _timm(name)
    config = timm.get_pretrained_cfg(short)
    if config.hf_hub_id:
        # Without the hub's library, which also writes to the user's home.
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        url = f"{hub}/{config.hf_hub_id}/resolve/main/model.safetensors"
        file_name = f"{config.hf_hub_id.rpartition('/')[2]}.safetensors"
    else:
        url, file_name = config.url, Path(urllib.parse.urlparse(config.url).path).name
    with _downloads(name, url, file_name) as file, torch.random.fork_rng(devices=[]):
        if not file.exists():
            torch.hub.download_url_to_file(url, str(file), progress=False)
        donor = timm.create_model(
            short,
            pretrained=True,
            pretrained_cfg_overlay={"file": str(file), "custom_load": False},
            in_chans=description["channels"],
            **description.get("options", {}),
        )
    state: dict[str, torch.Tensor] = donor.state_dict()
    return state


@contextlib.contextmanager
def _downloads(name: str, url: str, file_name: str) -> Iterator[Path]:
    """A file's path, for one process at a time, so that only one rank downloads it."""
    file = scratch_root() / "downloads" / file_name
    lock = Lock(file.with_name(f".{file_name}.lock"))
    while not lock.try_acquire():
        time.sleep(0.1)
    was_there = file.exists()
    try:
        yield file
    except Exception as error:
        if was_there or file.exists():
            what = f"the weights of {name} in {file} cannot be used ({in_words(error)}): delete the file"
        else:
            what = f"the weights of {name} cannot be downloaded from {url} ({in_words(error)}): save them as {file}"
        raise SwapError(f"model.pretrained: {what}, or set model.pretrained: false") from error
    finally:
        lock.release()
