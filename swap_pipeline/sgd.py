"""The optimizer: torch's SGD, and the guard that calls off steps with gradients that are not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swap_pipeline.errors import SwapError
from swap_pipeline.params import Optimizer, Precision
from swap_pipeline.precision import Scaler
from swap_pipeline.runs import Run


class Sgd:
    """torch's SGD with what the loop needs of it: a rate a step, and a step that can be called off on the device."""

    def __init__(self, network: nn.Module, optimizer: Optimizer, scaler: Scaler) -> None:
        self._named = dict(network.named_parameters())
        self.scaler = scaler
        spared = _spared_from_decay(network, norms=not optimizer.decay_norms, biases=not optimizer.decay_biases)
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in self._named.items() if name not in spared]},
            {"params": [p for name, p in self._named.items() if name in spared], "weight_decay": 0.0},
        ]
        self._sgd = torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=0.0,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        if optimizer.momentum:
            # Left to torch, the fused step takes them from uninitialised memory if it is called off the first time.
            self.set_momentum({name: torch.zeros_like(p) for name, p in self._named.items()})

    def zero_grad(self) -> None:
        self._sgd.zero_grad(set_to_none=True)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    def step(self, rate: float, *, skip_if: torch.Tensor) -> None:
        for settings in self._sgd.param_groups:
            settings["lr"] = rate
        if self.scaler.is_active:
            self.scaler.step(self._sgd)
            return
        # The flag that gradient scaling uses: the fused step reads it on the device, without waiting for it here.
        self._sgd.found_inf = skip_if  # type: ignore[attr-defined]
        self._sgd.step()

    def momentum(self) -> dict[str, torch.Tensor]:
        buffers = {name: self._sgd.state[p].get("momentum_buffer") for name, p in self._named.items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def set_momentum(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            parameter = self._named[name]
            # Laid out like the parameter: the fused step walks both side by side.
            self._sgd.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffer)


_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _spared_from_decay(network: nn.Module, *, norms: bool, biases: bool) -> set[str]:
    """Names of the parameters without weight decay: those of norm layers, and biases of all others."""
    spared = set()
    for prefix, module in network.named_modules():
        is_norm = isinstance(module, _NORMS)
        for name, _ in module.named_parameters(recurse=False):
            if norms if is_norm else biases and name.endswith("bias"):
                spared.add(f"{prefix}.{name}" if prefix else name)
    return spared


class FiniteGuard:
    """Stops a run whose gradients are no longer finite, on all ranks together and before the step is applied.

    Gradients are already averaged over the ranks, so every rank sees the same thing. On a GPU the verdict is read
    only now and then: waiting for it at each step would hold up the queue. Gradient scaling (fp16) makes single steps
    overflow on purpose; then only more than `tolerance` such steps on end are an error.
    """

    _NEVER = 2**62
    _STEPS = 2**32  # more than any epoch has

    def __init__(self, run: Run, device: torch.device, *, precision: Precision, tolerance: int) -> None:
        self._run, self._precision = run, precision
        self._tolerance = tolerance
        self._every = 1 if device.type == "cpu" else 50
        self._looked = 0
        self._first = torch.full((), self._NEVER, dtype=torch.int64, device=device)
        self._on_end = torch.zeros((), dtype=torch.int64, device=device)

    def look(self, epoch: int, step: int, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Remember whether the gradients of a step are finite; returns 1.0 where they are not."""
        finite = torch.isfinite(nn.utils.get_total_norm(gradients))
        self._on_end = torch.where(finite, 0, self._on_end + 1)
        too_many = self._on_end > self._tolerance
        self._first = torch.where(too_many, self._first.clamp(max=epoch * self._STEPS + step), self._first)
        self._looked += 1
        if self._looked % self._every == 0:
            self.check()
        return torch.where(finite, 0.0, 1.0)

    def check(self) -> None:
        first = int(self._first.item())
        if first != self._NEVER:
            epoch, step = divmod(first, self._STEPS)
            raise self._error(f"loss or gradient is not finite at epoch {epoch + 1}, step {step + 1}; the step was")

    def check_loss(self, epoch: int, loss_sum: float) -> None:
        """An epoch's loss is finite even where gradients overflowed, unless the network itself is lost."""
        if not math.isfinite(loss_sum):
            raise self._error(f"the loss is not finite in epoch {epoch + 1}; such steps were")

    def _error(self, what: str) -> SwapError:
        run, wider = self._run, {"fp16": "bf16 or fp32", "bf16": "fp32"}.get(self._precision)
        chance = f" ({run.chance})" if run.chance else ""
        return SwapError(
            f"{run.name}{chance}: {what} not taken and no checkpoint written: "
            f"lower {run.section}.peak_lr (or lr_knots; or lengthen the warm-up)"
            + (f", or set compute.precision to {wider}" if wider else "")
        )
