"""Memory that ran out, in words that say what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from swap_pipeline.errors import SwapError


@contextlib.contextmanager
def must_fit(what: str, *, remedy: str) -> Iterator[None]:
    """An error for want of memory in this block, on a GPU or a CPU, becomes a line with `what` was too much and what
    to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise SwapError(f"{what} did not fit into memory: {remedy}") from None


# Of the allocators of CPU and GPU and of NCCL, of cuBLAS and cuDNN before version 9, of cuDNN since then.
_WORDS = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words.lower() in str(error).lower() for words in _WORDS)
