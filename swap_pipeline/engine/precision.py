"""Precision: autocast, and gradient scaling for fp16. Weights and averages stay fp32."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch

from swap_pipeline.config.params import Precision
from swap_pipeline.errors import SwapError

# fp16 starts with a scale of 65,536 and halves it at each overflow: after this many in a row, scale is not the problem.
_OVERFLOWS_IN_A_ROW = 24


def resolve(precision: Precision, device: torch.device) -> Literal["fp32", "tf32", "bf16", "fp16"]:
    """Resolve `auto`: bf16 on GPUs that have it, fp16 on older ones, fp32 on CPUs."""
    if precision == "tf32" and device.type == "cpu":
        raise SwapError("params.yaml: compute.precision is tf32, which only GPUs have: set it to auto or fp32")
    if precision != "auto":
        return precision
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A block whose forward pass runs in this precision; can be entered repeatedly."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(resolve(precision, device))
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def allow_tf32(allowed: bool) -> None:
    """For fp32 on a GPU. By default, torch allows it in convolutions but not in matrix products."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


_PROBE = """
import sys, torch
dtype = getattr(torch, sys.argv[1])
with torch.autocast("cpu", dtype=dtype):
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 8))
    layers.to(memory_format=torch.channels_last)(torch.randn(4, 3, 8, 8)).sum().backward()
"""


@functools.cache
def check_cpu(precision: Literal["bf16", "fp16"]) -> None:
    """Try half precision on this CPU in a separate process, which dies if the CPU does not support what it claims."""
    name = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    done = subprocess.run([sys.executable, "-c", _PROBE, name], capture_output=True, text=True)
    if done.returncode != 0:
        why = f"signal {-done.returncode}" if done.returncode < 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
        raise SwapError(
            f"params.yaml: compute.precision is {precision}, which this CPU cannot run ({why}): set it to fp32, "
            f"or try ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
        )


class Scaler:
    """Gradient scaling for fp16; does nothing in other precisions."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = resolve(precision, device)
        self.is_active = self.precision == "fp16"
        self.tolerance = _OVERFLOWS_IN_A_ROW if self.is_active else 0
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.is_active)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss)

    def unscale(self, sgd: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale before the step, for code that depends on their size."""
        self._scaler.unscale_(sgd)

    def step(self, sgd: torch.optim.Optimizer) -> None:
        """Take the step on unscaled gradients unless one of them overflowed, and adapt the scale."""
        self._scaler.step(sgd)
        self._scaler.update()

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        if self.is_active:
            self._scaler.load_state_dict(state)

    @contextlib.contextmanager
    def replaced_by(self, other: Scaler) -> Iterator[None]:
        """A block in which this one scales as the other does, and what it learns is learnt by the other."""
        own, self._scaler = self._scaler, other._scaler
        yield
        self._scaler = own
