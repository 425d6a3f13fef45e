"""A network's forward pass on several ranks (DDP), compiled if requested."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swap_pipeline.engine.distributed import Group
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.rank import quick_imports

# Each shard keeps its own running statistics. The keyword had another name before torch 2.15.
_KEYWORDS = inspect.signature(DistributedDataParallel.__init__).parameters
_OWN_STATISTICS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KEYWORDS else "broadcast_buffers": False
}


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Compilation and DDP wrap the network, which itself stays unchanged, and with it the names in checkpoints."""

    logits: Callable[[torch.Tensor], torch.Tensor]
    without_exchange: Callable[[], AbstractContextManager[None]]
    """a block in which gradients stay on their rank; elsewhere, a backward pass averages them over all ranks"""


def wrapped(
    network: nn.Module,
    image_shape: tuple[int, ...],
    *,
    compiled: bool | Literal["reduce-overhead"],
    group: Group,
) -> Forward:
    """One static graph per image size, so that a resumed run computes like an undisturbed one."""
    logits: Callable[[torch.Tensor], torch.Tensor] = network
    without_exchange: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    if group.world_size > 1:
        parallel = _parallel(network, image_shape, group)
        logits, without_exchange = parallel, parallel.no_sync
    if compiled:
        logits = torch.compile(logits, dynamic=False, mode=None if compiled is True else compiled)
    return Forward(logits=logits, without_exchange=without_exchange)


def _parallel(network: nn.Module, image_shape: tuple[int, ...], group: Group) -> DistributedDataParallel:
    """DDP, with its gradient buckets in their final form.

    DDP regroups its buckets after the first backward pass, which changes the order of sums over more than two ranks.
    An extra pass triggers that now, so that a resumed run sums in the same order as an undisturbed one.
    """
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    blank = torch.zeros(2, *image_shape, device=group.device)
    network.train()
    check_that_all_learn(network, network(blank).sum())
    with quick_imports():  # of torch's compiler, by DDP
        parallel = DistributedDataParallel(
            network,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **_OWN_STATISTICS,
        )
    parallel(blank).sum().backward()
    parallel.zero_grad(set_to_none=True)
    network.load_state_dict(before)
    return parallel


def check_that_all_learn(network: nn.Module, loss: torch.Tensor) -> None:
    """Reject networks with unused parameters: DDP would wait for their gradients."""
    loss.backward()
    idle = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise SwapError(
            f"the network of params.yaml (model) has unused parameters ({', '.join(idle[:3])}"
            f"{' …' if len(idle) > 3 else ''}), which several processes cannot train: remove them, or SWAP_NPROC=1"
        )
    network.zero_grad(set_to_none=True)
