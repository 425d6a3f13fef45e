"""The optimizer: torch's fused SGD, and the guard that calls off steps with gradients that are not finite."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swap_pipeline.config.params import Optimizer, Precision
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.training.run import Run


class Sgd:
    """SGD with what the loop needs of it: a rate a step, and a step that can be called off on the device.

    The step is torch's fused one. torch.optim.SGD would do no more than call it, but imports the compiler first, which
    takes as long as to import torch; so it is made only for gradient scaling, which asks for such an object.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, scaler: Scaler) -> None:
        self._named = dict(network.named_parameters())
        self.scaler = scaler
        self._settings: dict[str, Any] = {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
        spared = _spared_from_decay(network, norms=not optimizer.decay_norms, biases=not optimizer.decay_biases)
        # By weight decay, and by type: the fused step takes one at a time.
        self._groups: dict[tuple[float, torch.dtype], list[nn.Parameter]] = {}
        for name, parameter in self._named.items():
            decay = 0.0 if name in spared else optimizer.weight_decay
            self._groups.setdefault((decay, parameter.dtype), []).append(parameter)
        # Laid out like the parameters: the fused step walks both side by side. Left to torch, it would take them from
        # uninitialised memory if it is called off the first time.
        with_momentum = self._named.values() if optimizer.momentum else ()
        self._momentum = {parameter: torch.zeros_like(parameter) for parameter in with_momentum}

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    @torch.no_grad()
    def step(self, rate: float, *, skip_if: torch.Tensor) -> None:
        self._lay_out_gradients()
        if self.scaler.is_active:
            for settings in self._sgd_for_scaler.param_groups:
                settings["lr"] = rate
            self.scaler.step(self._sgd_for_scaler)
            return
        for (decay, _), group in self._groups.items():
            moved = [(parameter, parameter.grad) for parameter in group if parameter.grad is not None]
            torch._fused_sgd_(
                [parameter for parameter, _ in moved],
                [gradient for _, gradient in moved],
                [self._momentum[parameter] for parameter, _ in moved] if self._momentum else [],
                lr=rate,
                weight_decay=decay,
                **self._settings,
                dampening=0.0,
                maximize=False,
                is_first_step=False,
                # The flag that gradient scaling uses: it is read on the device, without waiting for it here.
                found_inf=skip_if,
            )

    def _lay_out_gradients(self) -> None:
        """Like their parameters, as the fused step takes them to be: on a GPU it refuses others, on a CPU it errs.

        Autograd sees to it, but not where a dimension has size 1, nor for all compiled networks.
        """
        for parameter in self._named.values():
            if (gradient := parameter.grad) is not None and gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(gradient)

    @functools.cached_property
    def _sgd_for_scaler(self) -> torch.optim.SGD:
        groups = [{"params": group, "weight_decay": decay} for (decay, _), group in self._groups.items()]
        sgd = torch.optim.SGD(groups, lr=0.0, fused=True, **self._settings)
        for parameter, buffer in self._momentum.items():
            sgd.state[parameter]["momentum_buffer"] = buffer
        return sgd

    def momentum(self) -> dict[str, torch.Tensor]:
        return {name: self._momentum[p] for name, p in self._named.items() if p in self._momentum}

    def set_momentum(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            self._momentum[self._named[name]].copy_(buffer)


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

    def __init__(self, run: Run, device: torch.device, *, precision: Precision, tolerance: int) -> None:
        self._run, self._precision = run, precision
        self._tolerance = tolerance
        self._on_end = 0
        # Of each step since the last look 1.0 if its gradients were not finite; they stay on the device until then.
        self._flags = torch.zeros(1 if device.type == "cpu" else 50, device=device)
        self._steps: list[tuple[int, int]] = []

    def look(self, epoch: int, step: int, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Remember whether the gradients of a step are finite; returns 1.0 where they are not."""
        norm = nn.utils.get_total_norm(gradients)
        flag = self._flags[len(self._steps)]
        flag.copy_((norm - norm).ne(0))  # Inf less itself is NaN
        self._steps.append((epoch, step))
        if len(self._steps) == len(self._flags):
            self.check()
        return flag

    def check(self) -> None:
        steps, self._steps = self._steps, []
        for (epoch, step), is_bad in zip(steps, self._flags[: len(steps)].tolist(), strict=True):
            self._on_end = self._on_end + 1 if is_bad else 0
            if self._on_end > self._tolerance:
                raise self._error(f"loss or gradient is not finite at epoch {epoch + 1}, step {step + 1}; the step was")

    def check_loss(self, epoch: int, loss_sum: float) -> None:
        """An epoch's loss is finite even where gradients overflowed, unless the network itself is lost."""
        if not math.isfinite(loss_sum):
            raise self._error(f"the loss is not finite in epoch {epoch + 1}; such steps were")

    def _error(self, what: str) -> SwapError:
        run, wider = self._run, {"fp16": "bf16 or fp32", "bf16": "fp32", "tf32": "fp32"}.get(self._precision)
        chance = f" ({run.chance})" if run.chance else ""
        return SwapError(
            f"{run.name}{chance}: {what} not taken and no checkpoint written: "
            f"lower {run.section}.peak_lr (or lr_knots; or lengthen the warm-up)"
            + (f", or set compute.precision to {wider}" if wider else "")
        )
