"""Optimizers of torch and timm by name: `torch:<class>` and `timm:<name>`.

Either library is imported only when a name asks for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from swap_pipeline.config.params import Optimizer, Params
from swap_pipeline.errors import SwapError, did_you_mean

_NO_OPTIONS = {
    "params": "the network decides that, leave it out",
    "lr": "the learning rate of the phase decides that, leave it out",
    "weight_decay": "set weight_decay beside options instead",
    "corrected_weight_decay": "it needs a peak of the learning rate that is not given to it, leave it out",
}


def check_optimizers(params: Params) -> None:
    """That both phases' optimizers exist and have these options; a `SwapError` names the closest otherwise."""
    check_known(params.optimizer)
    for name, phase in (("phase1", params.phase1), ("phase2", params.phase2)):
        if phase.optimizer is not None:
            check_known(phase.optimizer, key=f"{name}.optimizer")


def check_known(optimizer: Optimizer, *, key: str = "optimizer") -> None:
    name = optimizer.name
    if name == "sgd":
        return
    accepted = inspect.signature(class_of(name, key=key)).parameters
    for option in optimizer.options or {}:
        if option in _NO_OPTIONS:
            raise SwapError(f"{key}.options.{option} is no option of {name}: {_NO_OPTIONS[option]}")
        if option not in accepted:
            hint = did_you_mean(option, [each for each in accepted if each not in _NO_OPTIONS])
            raise SwapError(f"{key}.options.{option} is no option of {name}{hint}")
    if optimizer.weight_decay and "weight_decay" not in accepted:
        raise SwapError(f"{key}.weight_decay is {optimizer.weight_decay:g}, but {name} has none: set it to 0")


def class_of(name: str, *, key: str = "optimizer") -> Callable[..., Any]:
    """With the arguments that the name stands for."""
    library, _, short = name.partition(":")
    known = _of_torch() if library == "torch" else _of_timm(name, key)
    if short not in known:
        meant = {each: f"{library}:{each}" for each in known}
        raise SwapError(f"{key}.name is {name!r}{did_you_mean(short, meant)}")
    return known[short]


def _of_torch() -> Mapping[str, Callable[..., Any]]:
    optim = importlib.import_module("torch").optim
    classes = {name: each for name, each in vars(optim).items() if inspect.isclass(each)}
    return {name: each for name, each in classes.items() if issubclass(each, optim.Optimizer) and name != "Optimizer"}


def _of_timm(name: str, key: str) -> Mapping[str, Callable[..., Any]]:
    try:
        importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise SwapError(f"{key}.name is {name!r}, but timm is not installed: run `pip install timm`") from None
    optim, found = importlib.import_module("timm.optim"), dict[str, Callable[..., Any]]()
    for each in optim.list_optimizers():
        info = optim.get_optimizer_info(each)
        arguments = {**({"momentum": 0.9} if info.has_momentum else {}), **(info.defaults or {})}
        # Not those of other packages: timm has their classes as text.
        if inspect.isclass(info.opt_class) and not arguments.keys() & _NO_OPTIONS.keys():
            found[each] = partial(info.opt_class, **arguments)
    return found
