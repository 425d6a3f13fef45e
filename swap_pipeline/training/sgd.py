"""The optimizer: torch's fused SGD, and the guard that skips steps with gradients that are not finite."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swap_pipeline.config.params import Optimizer, Precision
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.training.run import Run

# Called by torch.optim.SGD(fused=True); if it is missing, that is used instead.
_FUSED_STEP = getattr(torch, "_fused_sgd_", None)


class Sgd:
    """SGD as the loop needs it: a learning rate per step, and a step that can be skipped on the device.

    The step is torch's fused one. torch.optim.SGD only calls it, but first imports the compiler, which takes as long as
    importing torch; so it is created only for gradient scaling, which needs such an object.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, scaler: Scaler) -> None:
        self._named = dict(network.named_parameters())
        self.scaler, self._clip_norm = scaler, optimizer.clip_norm
        self._settings: dict[str, Any] = {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
        spared = spared_from_decay(network, optimizer)
        # Laid out like the parameters: the fused step walks both side by side. Left to torch, it would take them from
        # uninitialised memory if it is called off the first time.
        with_momentum = self._named.items() if optimizer.momentum else ()
        self._momentum = {name: torch.zeros_like(parameter) for name, parameter in with_momentum}
        # By weight decay and type, since the fused step takes one of each.
        names: dict[tuple[float, torch.dtype], list[str]] = {}
        for name, parameter in self._named.items():
            decay = 0.0 if name in spared else optimizer.weight_decay
            names.setdefault((decay, parameter.dtype), []).append(name)
        self._groups = [
            _Alike(decay, [self._named[name] for name in own], [self._momentum[name] for name in own if self._momentum])
            for (decay, _), own in names.items()
        ]

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    @torch.no_grad()
    def step(self, rate: float, *, skip_if: torch.Tensor) -> None:
        if self._clip_norm is not None:
            if self.scaler.is_active:
                self.scaler.unscale(self._sgd_of_torch)
            nn.utils.clip_grad_norm_(self._named.values(), self._clip_norm)
        moved = [group.moved() for group in self._groups]
        if self.scaler.is_active or _FUSED_STEP is None:
            for settings in self._sgd_of_torch.param_groups:
                settings["lr"] = rate
            if self.scaler.is_active:
                self.scaler.step(self._sgd_of_torch)
            else:
                self._sgd_of_torch.found_inf = skip_if
                self._sgd_of_torch.step()
            return
        for group, (parameters, gradients, momentum) in zip(self._groups, moved, strict=True):
            _FUSED_STEP(
                parameters,
                gradients,
                momentum,
                lr=rate,
                weight_decay=group.decay,
                **self._settings,
                dampening=0.0,
                maximize=False,
                is_first_step=False,
                # Gradient scaling's flag, which is read on the device, without waiting here.
                found_inf=skip_if,
            )

    @functools.cached_property
    def _sgd_of_torch(self) -> Any:
        groups = [{"params": group.parameters, "weight_decay": group.decay} for group in self._groups]
        sgd = torch.optim.SGD(groups, lr=0.0, fused=True, **self._settings)
        for name, buffer in self._momentum.items():
            sgd.state[self._named[name]]["momentum_buffer"] = buffer
        return sgd

    def state(self) -> dict[str, torch.Tensor]:
        """The momentum itself, by parameter."""
        return dict(self._momentum)

    def numbers(self) -> dict[str, Any]:
        return {}

    def set_state(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        for name, buffer in tensors.items():
            self._momentum[name].copy_(buffer)

    def layout(self, saved: Collection[str] | None = None) -> dict[str, Any]:
        return self.state()


class _Alike:
    """Parameters of one fused step."""

    def __init__(self, decay: float, parameters: list[nn.Parameter], momentum: list[torch.Tensor]) -> None:
        """`momentum` is empty, or has a buffer for each parameter."""
        self.decay, self._momentum = decay, momentum
        self.parameters: list[torch.Tensor] = [*parameters]
        self._strides = [parameter.stride() for parameter in parameters]

    def moved(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Those that have a gradient, their gradients, and their momentum."""
        found = [parameter.grad for parameter in self.parameters]
        gradients = [
            g for g, stride in zip(found, self._strides, strict=True) if g is not None and g.stride() == stride
        ]
        if len(gradients) == len(found):  # the usual case
            return self.parameters, gradients, self._momentum
        for parameter, stride in zip(self.parameters, self._strides, strict=True):
            # With gradients laid out otherwise than their parameter, the fused step fails on a GPU and is wrong on a
            # CPU. Autograd lays them out alike, except if a dimension has size 1, and for some compiled networks.
            if (gradient := parameter.grad) is not None and gradient.stride() != stride:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        having = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        parameters = [self.parameters[number] for number in having]
        momentum = [self._momentum[number] for number in having if self._momentum]
        return parameters, [p.grad for p in parameters if p.grad is not None], momentum


_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def spared_from_decay(network: nn.Module, optimizer: Optimizer) -> set[str]:
    """Names of the parameters without weight decay: those of norm layers, and biases of all others."""
    norms, biases = not optimizer.decay_norms, not optimizer.decay_biases
    spared = set()
    for prefix, module in network.named_modules():
        is_norm = isinstance(module, _NORMS)
        for name, _ in module.named_parameters(recurse=False):
            if norms if is_norm else biases and name.endswith("bias"):
                spared.add(f"{prefix}.{name}" if prefix else name)
    return spared


# Gradient scaling's own, which divides by the scale and sets a flag to 1 if a value is NaN or Inf.
_CHECK = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)


class FiniteGuard:
    """Stops a run whose gradients are no longer finite, on all ranks together and before the step is applied.

    Gradients are already averaged over the ranks, so every rank sees the same. On a GPU the result is read only now and
    then: waiting for it at each step would stall the queue. Gradient scaling (fp16) lets single steps overflow on
    purpose; then only more than `tolerance` such steps in a row are an error.
    """

    def __init__(self, run: Run, device: torch.device, *, precision: Precision, tolerance: int) -> None:
        self._run, self._precision = run, precision
        self._tolerance = tolerance
        self._on_end: Counter[int] = Counter()
        """bad steps in a row, of each shard that takes its own"""
        # Of each step since the last look 1.0 if its gradients were not finite; they stay on the device until then.
        self._flags = torch.zeros(1 if device.type == "cpu" else 50, device=device)
        self._steps: list[tuple[int, int]] = []
        self._one = torch.ones((), device=device)

    def look(self, epoch: int, step: int, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Record whether the gradients of a step are finite; returns 1.0 if they are not."""
        flag = self._flags[len(self._steps)]
        self.mark(flag, gradients)
        self._steps.append((epoch, step))
        if len(self._steps) == len(self._flags):
            self.check()
        return flag

    def mark(self, flag: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        """Set the flag to 1.0 if these gradients are not finite."""
        if _CHECK is not None:
            _CHECK(gradients, flag, self._one)
        else:  # documented functions, which take several times as long
            largest = nn.utils.get_total_norm(gradients, math.inf)
            flag.copy_((largest - largest).ne(0))  # Inf less itself is NaN

    def check(self) -> None:
        steps, self._steps = self._steps, []
        flags = self._flags.tolist()
        if any(flags):
            self._flags = torch.zeros_like(self._flags)  # the old ones may still be in use
        for (epoch, step), is_bad in zip(steps, flags, strict=False):
            self._count(epoch, step, is_bad)

    def check_shards(self, epoch: int, first_step: int, flags: torch.Tensor) -> None:
        """The same for steps that each shard took alone: `flags` has a row for each step, with those of all shards."""
        for step, of_shards in enumerate(flags.tolist(), start=first_step):
            for shard, is_bad in enumerate(of_shards):
                self._count(epoch, step, is_bad, shard)

    def _count(self, epoch: int, step: int, is_bad: float, shard: int = 0) -> None:
        self._on_end[shard] = self._on_end[shard] + 1 if is_bad else 0
        if self._on_end[shard] > self._tolerance:
            raise self._error(f"loss or gradient is not finite at epoch {epoch + 1}, step {step + 1}; the step was")

    def check_loss(self, epoch: int, loss_sum: float) -> None:
        """An epoch's loss is finite even if gradients overflowed, unless the network itself has diverged."""
        if not math.isfinite(loss_sum):
            raise self._error(f"the loss is not finite in epoch {epoch + 1}; such steps were")

    def _error(self, what: str) -> SwapError:
        run, wider = self._run, {"fp16": "bf16 or fp32", "bf16": "fp32", "tf32": "fp32"}.get(self._precision)
        chance = f" ({run.chance})" if run.chance else ""
        return SwapError(
            f"{run.name}{chance}: {what} not taken and no checkpoint written: {run.if_not_finite}"
            + (f", or set compute.precision to {wider}" if wider else "")
        )
