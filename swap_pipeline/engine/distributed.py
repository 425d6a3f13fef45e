"""Rank, world size, device and backend from the environment. The only module that starts or ends a process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.environment import timeout_minutes
from swap_pipeline.runtime.gpus import device_type_of_rank, unfit


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of one job; a single process has no process group."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def describe(self) -> str:
        """For the user: `2 × cpu`, `8 × NVIDIA V100`."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return f"{self.world_size} × {name}"

    def hardware(self) -> str:
        """What can change bytes when all else is equal: the kind of GPU and its libraries."""
        if self.device.type == "cpu":
            return "cpu"
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return f"{torch.cuda.get_device_name(self.device)}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"

    def as_json(self) -> dict[str, Any]:
        """For records: a job's devices. On CPU a device is a core, so that times are comparable."""
        cores = self.world_size * torch.get_num_threads()
        return {
            "devices": self.describe(),
            "num_devices": self.world_size if self.device.type == "cuda" else cores,
        }

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up `tensor` over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The `tensor` of every rank, one row each."""
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(rows, tensor)
        else:
            rows = [tensor]
        return torch.stack(rows)

    def send(self, tensor: torch.Tensor, *, sender: int) -> torch.Tensor:
        """The tensor of the rank `sender`, on every rank's device; the others pass one of its shape and type."""
        tensor = tensor.to(self.device)
        if self.world_size > 1:
            dist.broadcast(tensor, src=sender)
        return tensor

    def number_of_main(self, number: int) -> int:
        """The main rank's number, on all ranks."""
        return int(self.sum(torch.tensor(number if self.is_main else 0, device=self.device)).item())

    def main_says(self, verdict: bool) -> bool:
        """The main rank's verdict, on all ranks."""
        answer = torch.tensor(float(verdict and self.is_main), device=self.device)
        return bool(self.sum(answer).item())

    def finish_queued_work(self) -> None:
        """Wait for this rank's GPU, before reading a clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def process_group(*, deterministic: bool = False) -> Iterator[Group]:
    """Join the job for which torchrun (or the launcher) started this process.

    NCCL checks only now whether sums must be deterministic, and if so does not use NVLink SHARP (NVLS).
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # set by the launcher, but not by torchrun
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    group = Group(rank=rank, world_size=world_size, device=device)
    if world_size == 1:
        with _explained(device):
            yield group
        return
    timeout = timedelta(minutes=timeout_minutes())
    with _explained(device):
        if device.type == "cuda":
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        yield group
        group.wait()  # ranks leave together, so the others notice one that hangs while writing the result
    # Not after an error: NCCL would wait for ranks that may be gone, and with gloo the others would report a lost
    # connection before this rank reports its error. The group then ends with the process.
    dist.destroy_process_group()


def _explained(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Report memory that runs out anywhere else: while placing the network, DDP or momentum, or starting NCCL or
    cuBLAS. Not on a CPU, where another process may be the cause and a second try may work."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return must_fit("this job", remedy="end other processes on the GPU, or take a smaller network or image_size")


def _device(local_rank: int) -> torch.device:
    if device_type_of_rank() == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise SwapError(
            f"rank {local_rank} has no GPU, only {torch.cuda.device_count()} are visible: "
            f"lower SWAP_NPROC, or set SWAP_DEVICE=cpu"
        )
    device = torch.device("cuda", local_rank)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if why := unfit(name, capability, torch.cuda.get_arch_list()):
        raise SwapError(f"{why}, or set SWAP_DEVICE=cpu")
    return device
