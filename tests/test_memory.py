"""Memory that ran out, in words."""

from __future__ import annotations

import pytest
import torch

from swap_pipeline.engine import distributed
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
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("NCCL error: ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["allocator", "cuBLAS", "cuDNN 8", "cuDNN 9", "NCCL", "driver"],
)
def test_so_is_one_on_a_gpu(error: Exception) -> None:
    with pytest.raises(SwapError, match="lower it"), must_fit("it", remedy="lower it"):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), must_fit("it", remedy="lower it"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_on_a_gpu_it_is_so_wherever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing the network, wrapping it, momentum: all of a job is inside its process group."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "_device", lambda local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(SwapError, match="this job did not fit into memory: end other"), distributed.process_group():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
