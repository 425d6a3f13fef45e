"""The optimizer of a run by its name: the fused SGD, or one of torch or timm with the same interface."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from swap_pipeline.config.optimizers import check_known, class_of
from swap_pipeline.config.params import Optimizer
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.rank import quick_imports
from swap_pipeline.runtime.user_code import in_words, said_of
from swap_pipeline.training.sgd import Sgd, spared_from_decay


def new_optimizer(network: nn.Module, optimizer: Optimizer, scaler: Scaler) -> Sgd | Named:
    return Sgd(network, optimizer, scaler) if optimizer.name == "sgd" else Named(network, optimizer, scaler)


class Named:
    """An optimizer of torch or timm.

    Its state goes by `<entry>.<parameter>`, or by `<number>.<entry>` where it belongs to a group of parameters. Which
    entries there are shows only after a step, so one is taken at the start, with copies of the parameters.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, scaler: Scaler) -> None:
        self._named = dict(network.named_parameters())
        self.scaler, self._clip_norm = scaler, optimizer.clip_norm
        spared = spared_from_decay(network, optimizer)
        names: dict[float, list[str]] = {}
        for name in self._named:
            names.setdefault(0.0 if name in spared else optimizer.weight_decay, []).append(name)
        copies = {name: _with_gradient(parameter) for name, parameter in self._named.items()}
        with quick_imports(), said_of("params.yaml"):  # of torch's compiler
            check_known(optimizer)
            make, options = class_of(optimizer.name), optimizer.options or {}
            try:
                self._optimizer, trial = (
                    make(
                        [{"params": [of[name] for name in own], "weight_decay": w} for w, own in names.items()],
                        lr=0.1,
                        **options,
                    )
                    for of in (self._named, copies)
                )
                self._settings = [{key: repr(value) for key, value in _of(group)} for group in trial.param_groups]
                trial.step()
            except Exception as error:
                raise _misfit(optimizer, error) from error
        entries = self._entries(trial, copies)
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor | int | float | None):
                raise SwapError(
                    f"params.yaml: optimizer.name is {optimizer.name!r}, whose state cannot be kept in a snapshot "
                    f"({key} is a {type(value).__name__}): take another one"
                )
        tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
        self._devices = {key: tensor.device for key, tensor in tensors.items()}
        self._layout = entries | {
            key: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            for key, tensor in tensors.items()
        }

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    @torch.no_grad()
    def step(self, rate: float, *, skip_if: torch.Tensor) -> None:
        """Whether to skip it is read from the device, which on a GPU waits for the backward pass."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self._clip_norm is not None:
            if self.scaler.is_active:
                self.scaler.unscale(self._optimizer)
            nn.utils.clip_grad_norm_(self._named.values(), self._clip_norm)
        if self.scaler.is_active:
            self.scaler.step(self._optimizer)
        elif not skip_if.item():
            self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors themselves; none before the first step."""
        found = self._entries(self._optimizer, self._named)
        return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}

    def numbers(self) -> dict[str, Any]:
        """The rest of the state."""
        found = self._entries(self._optimizer, self._named)
        return {key: value for key, value in found.items() if not isinstance(value, torch.Tensor)}

    def set_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        self._optimizer.state.clear()
        for key, value in {**tensors, **numbers}.items():
            if isinstance(value, torch.Tensor):
                # Laid out as it was, or sums over it are taken in another order.
                value = torch.empty_like(self._layout[key], device=self._devices[key]).copy_(value)
            first, _, rest = key.partition(".")
            if first.isdigit():
                self._optimizer.param_groups[int(first)][rest] = value
            else:
                self._optimizer.state[self._named[rest]][first] = value

    def layout(self, saved: Collection[str] | None = None) -> dict[str, Any]:
        """What its state consists of, or must consist of where this was `saved`: none of a parameter never moved."""
        moved = {_owner(key) for key in (self._layout if saved is None else saved)}
        return {key: value for key, value in self._layout.items() if _owner(key) in moved}

    def _entries(self, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        found = {
            f"{number}.{entry}": value
            for number, group in enumerate(optimizer.param_groups)
            for entry, value in _of(group)
            if self._settings[number].get(entry) != repr(value)
        }
        for name, parameter in named.items():
            found |= {f"{entry}.{name}": value for entry, value in optimizer.state.get(parameter, {}).items()}
        return found


def _misfit(optimizer: Optimizer, error: Exception) -> SwapError:
    """What goes wrong before training has begun is the fault of its options or, without any, of its kind."""
    if optimizer.options:
        return SwapError(f"optimizer.options do not fit {optimizer.name}: {in_words(error)}")
    return SwapError(f"optimizer.name is {optimizer.name!r}, which cannot train this network: {in_words(error)}")


def _with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    copy = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    copy.grad = torch.ones_like(copy) if parameter.requires_grad else None
    return copy


def _of(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What may change in a group besides its learning rate."""
    return [(entry, value) for entry, value in group.items() if entry not in ("params", "lr")]


def _owner(key: str) -> str:
    """The parameter, or the number of the group, whose state it is."""
    first, _, rest = key.partition(".")
    return first if first.isdigit() else rest
