"""Which devices there are, and which of them a job gets.

Nothing here changes the result beyond rounding: the params cut a batch into shards, however many devices share them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from swap_pipeline.errors import SwapError
from swap_pipeline.launch.jobs import Machine
from swap_pipeline.launch.slurm import cluster
from swap_pipeline.runtime import environment, gpus


def launcher_kind() -> str:
    """`local`, `srun` or `sbatch`: SWAP_LAUNCHER, or what this machine has.

    By default srun in a Slurm allocation, unless this machine is all of it; sbatch outside of one if there is a
    `cluster.yaml`; else local.
    """
    if (wanted := environment.launcher()) is not None:
        return wanted
    if "SLURM_JOB_ID" in os.environ:
        return "local" if cluster.num_allocated_nodes() == 1 and cluster.is_on_allocated_node() else "srun"
    return "sbatch" if cluster.file().exists() else "local"


def this_machine() -> Machine:
    """Where jobs run: this machine, the nodes of the allocation, or those that cluster.yaml describes."""
    kind = launcher_kind()
    if kind == "srun":
        return cluster.allocation()
    if kind == "sbatch":
        return cluster.read().machine
    return local_machine()


def local_machine() -> Machine:
    cores, seen = environment.num_cores(), gpus.look()
    device_type = environment.device_type(has_gpu=bool(seen.found), trouble=seen.trouble)
    if device_type == "cpu":
        return Machine(device_type="cpu", devices=tuple(str(core) for core in range(cores)), cores=cores)
    uuids = {gpu.name: gpu.uuid for gpu in seen.found}
    return Machine(device_type="cuda", devices=tuple(uuids), cores=cores, uuids=uuids)


def mps_runs() -> bool:
    """Whether CUDA MPS, which lets processes share a GPU at the same time, is running on this machine."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        process = int((folder / "nvidia-cuda-mps-control.pid").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return Path(f"/proc/{process}").is_dir()


_MAX_RANKS_A_CORE = 16
"""more than one is useful only in tests"""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A job's part of a machine."""

    processes: int
    nodes: int
    """over which the processes are spread evenly"""
    threads: int
    """per process"""
    num_devices: int
    """reserved for the job"""


def share_of_phase1(machine: Machine, *, shards: int, at_most: int | None = None) -> Share:
    """For phases 1 and 3 and analyses of their models: as many devices as divide phase 1's shards evenly.

    With one shard that is one device; the others are free for other experiments. On a CPU, several processes use all
    cores as threads. `at_most` limits the processes (SWAP_NPROC).
    """
    on_gpus = machine.device_type == "cuda"
    # On several CPU nodes the default is one process per node, whose threads use the other cores.
    limit = at_most or (machine.num_devices if on_gpus or machine.nodes == 1 else machine.nodes)
    if on_gpus and limit > machine.num_devices:
        raise SwapError(f"SWAP_NPROC is {limit}, but there are {machine.num_devices} GPUs: lower it")
    if limit > _MAX_RANKS_A_CORE * machine.nodes * machine.cores:
        raise SwapError(f"SWAP_NPROC is {limit}, but there are {machine.nodes * machine.cores} cores: lower it")
    if on_gpus or shards == 1:
        return _some_devices(machine, shards=shards, limit=limit)
    processes = _largest_divisor(shards, limit)
    nodes = _largest_divisor(processes, machine.nodes)
    threads = max(1, machine.cores // (processes // nodes))
    return Share(processes=processes, nodes=nodes, threads=threads, num_devices=nodes * len(machine.devices))


def share_of_worker(machine: Machine, *, shards: int) -> Share:
    """For a worker of phase 2, which has devices of its own."""
    return _some_devices(machine, shards=shards, limit=machine.num_devices)


def _some_devices(machine: Machine, *, shards: int, limit: int) -> Share:
    """On a CPU a device is a core and a process always has one thread: the number of threads changes the bytes, so it
    must not depend on the number of jobs."""
    per_node = len(machine.devices)
    fitting = [n for n in range(1, min(shards, limit) + 1) if shards % n == 0 and n % math.ceil(n / per_node) == 0]
    processes = max(fitting)
    threads = 1 if machine.device_type == "cpu" else max(1, machine.cores // per_node)
    nodes = math.ceil(processes / per_node)
    return Share(processes=processes, nodes=nodes, threads=threads, num_devices=processes)


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)
