"""Memory that ran out, in words."""

from __future__ import annotations

import pytest
import torch

from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.errors import SwapError


def test_a_batch_that_does_not_fit_into_memory_is_named_with_the_way_out() -> None:
    with (
        pytest.raises(SwapError, match=r"^a batch of 9 images did not fit into memory: lower phase1\.batch_size$"),
        must_fit("a batch of 9 images", remedy="lower phase1.batch_size"),
    ):
        torch.empty(2**50)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["allocator", "cuBLAS", "cuDNN", "driver"],
)
def test_so_is_one_on_a_gpu(error: Exception) -> None:
    with pytest.raises(SwapError, match="lower it"), must_fit("it", remedy="lower it"):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), must_fit("it", remedy="lower it"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
