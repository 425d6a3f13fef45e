"""Where and how a network computes: device, memory layout, determinism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from swap_pipeline.config.params import Compute
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.precision import allow_tf32, check_cpu, resolve


def set_up(network: nn.Module, compute: Compute, group: Group) -> None:
    """Move the network to its device and layout, and set cuDNN's precision and choice of algorithms."""
    precision = resolve(compute.precision, group.device)
    if group.device.type == "cpu" and precision in ("bf16", "fp16"):
        check_cpu(precision)
    if group.device.type == "cuda":
        allow_tf32(precision == "tf32")
        torch.backends.cudnn.benchmark = not compute.deterministic
    network.to(group.device)
    if compute.channels_last:
        network.to(memory_format=torch.channels_last)


@contextlib.contextmanager
def no_tuning(*, wanted: bool) -> Iterator[None]:
    """A block without cuDNN's search for the fastest algorithm, which it would repeat for every new shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before and not wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def seed_torch(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the generators in use; that function itself records a stack trace on a machine without
    GPUs, which takes time."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
