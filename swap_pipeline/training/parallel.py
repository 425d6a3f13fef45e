"""A network's forward pass on several ranks (DDP), compiled where that is wanted."""

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
    """What is compiled or spread over ranks is a wrapper: the network, and with it the names in checkpoints, stays."""

    logits: Callable[[torch.Tensor], torch.Tensor]
    without_exchange: Callable[[], AbstractContextManager[None]]
    """a block whose gradients stay on their rank; in any other, a backward pass leaves their mean over all ranks"""


def wrapped(
    network: nn.Module,
    image_shape: tuple[int, ...],
    *,
    compiled: bool | Literal["reduce-overhead"],
    group: Group,
) -> Forward:
    """One static graph for each image size, so that a resumed run computes like one that was never stopped."""
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
    A pass is spent on that now, so that a resumed run adds up in the same order as one that was never stopped.
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
    """DDP waits for the gradient of every parameter."""
    loss.backward()
    idle = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise SwapError(
            f"the network of params.yaml (model) has parameters that nothing depends on ({', '.join(idle[:3])}"
            f"{' …' if len(idle) > 3 else ''}), which several processes cannot train: remove them, or SWAP_NPROC=1"
        )
    network.zero_grad(set_to_none=True)
