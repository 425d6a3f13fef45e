"""Out-of-memory errors with advice on what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from swap_pipeline.errors import SwapError


@contextlib.contextmanager
def must_fit(what: str, *, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error in this block, on GPU or CPU, into one line: `what` did not fit, and the remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise SwapError(f"{what} did not fit into memory: {remedy}") from None


# From the CPU's allocator; from the GPU's and NCCL; from cuBLAS and cuDNN before version 9; from later cuDNN.
_WORDS = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words.lower() in str(error).lower() for words in _WORDS)
