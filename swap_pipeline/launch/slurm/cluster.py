"""A Slurm cluster's nodes: those of the allocation that this process is in, or those in `cluster.yaml`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swap_pipeline.config.instances import ANALYSES, PHASES
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.jobs import Machine
from swap_pipeline.launch.slurm.controller import ask
from swap_pipeline.runtime import environment
from swap_pipeline.storage.files import read_yaml

_STAGES = (*PHASES, *ANALYSES)
_KEYS = ("nodes", "gpus_per_node", "gpu_type", "cpus_per_node", "max_requeues", "signal_seconds", "sbatch")
_OURS = {
    "nodes": "write nodes beside sbatch, not in it",
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task"),
        "write gpus_per_node, and gpu_type if need be, beside sbatch",
    ),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "mincpus"), "write cpus_per_node beside sbatch"),
    "signal": "write signal_seconds beside sbatch",
    "clusters": "run `dvc repro` on a login node of that cluster",
    **dict.fromkeys(
        (
            *("array", "chdir", "comment", "dependency", "error", "input", "job-name", "kill-on-invalid-dep"),
            *("no-requeue", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "open-mode", "output", "parsable"),
            *("requeue", "wait", "wrap"),
        ),
        "remove it, the launcher sets it",
    ),
    **dict.fromkeys(("help", "test-only", "usage", "version"), "remove it, nothing would be submitted"),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`cluster.yaml`: what a job may use, and options of `sbatch`."""

    machine: Machine
    """the nodes that phases 1 and 3 use together"""
    gpu_type: str
    max_requeues: int
    signal_seconds: int
    options: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """of sbatch, by stage; `all` is for every stage; None for an option without a value, empty for one to leave out"""

    def options_of(self, stage: str) -> dict[str, str | None]:
        both = {**self.options.get("all", {}), **self.options.get(stage, {})}
        return {name: value for name, value in both.items() if value != ""}


def file() -> Path:
    """`cluster.yaml` of the project, also in experiments in temporary folders."""
    return environment.project_folder() / "cluster.yaml"


def read() -> Cluster:
    """Read and check `cluster.yaml`; errors name the entry and the fix."""
    try:
        return parse(read_yaml(file(), max_bytes=1 << 18))
    except FileNotFoundError:
        raise SwapError(
            f"SWAP_LAUNCHER is sbatch, but there is no {file()}: "
            f"copy cluster.example.yaml there and edit it for your cluster"
        ) from None
    except OSError as error:
        raise SwapError(f"{file()} cannot be read: {error.strerror or error}") from None


def parse(tree: Any) -> Cluster:
    if not isinstance(tree, dict):
        raise _wrong("it", tree, "write entries as in cluster.example.yaml")
    for key in tree:
        if key not in _KEYS:
            raise SwapError(f"cluster.yaml: there is no entry {key}: choose from {', '.join(_KEYS)}")
    gpus = _whole(tree, "gpus_per_node", least=0)
    if environment.wanted_device() == "cuda" and not gpus:
        raise SwapError("SWAP_DEVICE is cuda, but cluster.yaml has gpus_per_node: 0")
    device_type = environment.device_type(has_gpu=bool(gpus))
    cores = _whole(tree, "cpus_per_node")
    gpu_type = tree.get("gpu_type") or ""
    if not isinstance(gpu_type, str):
        raise _wrong("gpu_type", gpu_type, "write a name as shown by `sinfo -o %G`")
    return Cluster(
        machine=Machine(
            device_type=device_type,
            devices=tuple(map(str, range(gpus if device_type == "cuda" else cores))),
            cores=cores,
            nodes=_whole(tree, "nodes"),
        ),
        gpu_type=gpu_type,
        max_requeues=_whole(tree, "max_requeues", least=0, default=20),
        signal_seconds=_whole(tree, "signal_seconds", default=120),
        options=_options(tree.get("sbatch") or {}),
    )


def _options(sections: Any) -> dict[str, dict[str, str | None]]:
    if not isinstance(sections, dict):
        raise _wrong("sbatch", sections, "write sections: all, phase1, …")
    checked: dict[str, dict[str, str | None]] = {}
    for section, options in sections.items():
        if section not in ("all", *_STAGES):
            raise SwapError(f"cluster.yaml: there is no sbatch.{section}: choose from all, {', '.join(_STAGES)}")
        if not isinstance(options or {}, dict):
            raise _wrong(f"sbatch.{section}", options, "write options of sbatch, such as partition: gpu")
        checked[section] = dict(_option(section, *pair) for pair in (options or {}).items())
    return checked


def _option(section: str, key: Any, value: Any) -> tuple[str, str | None]:
    name = str(key).removeprefix("--").replace("_", "-")
    where = f"sbatch.{section}.{key}"
    if not re.fullmatch(r"[a-z][a-z-]+", name):
        raise SwapError(f"cluster.yaml: {where} is not a long option of sbatch: for example, write partition, not p")
    if name in _OURS:
        raise SwapError(f"cluster.yaml: {where} may not be set: {_OURS[name]}")
    if value is True or value is None:
        return name, None
    if value is False:
        return name, ""
    if name == "time" and isinstance(value, int):
        # Some YAML parsers read 12:00:00 without quotes as a number, which sbatch takes for minutes.
        raise _wrong(where, value, 'write it in quotes: "12:00:00"')
    if isinstance(value, list | dict) or "\n" in str(value):
        raise _wrong(where, value, "write one value")
    return name, str(value)


def _whole(tree: Mapping[str, Any], key: str, *, least: int = 1, default: int | None = None) -> int:
    value = tree.get(key, default)
    if value is None:
        raise SwapError(f"cluster.yaml: {key} is missing: add it, as in cluster.example.yaml")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(key, value, f"write a whole number, at least {least}")
    return value


def _wrong(key: str, value: Any, fix: str) -> SwapError:
    return SwapError(f"cluster.yaml: {key} is {value!r}: {fix}")


def num_allocated_nodes() -> int:
    text = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or "1"
    return int(text) if text.isdecimal() else 1


def allocation() -> Machine:
    """The nodes of the Slurm allocation that this process is in; if they differ, what all of them have."""
    if "SLURM_JOB_ID" not in os.environ:
        raise SwapError(
            "SWAP_LAUNCHER is srun, but this is not a Slurm job: start it with salloc or sbatch (docs/clusters.md)"
        )
    nodes, gpus = num_allocated_nodes(), 0 if environment.wanted_device() == "cpu" else _gpus_on_node()
    # `4(x2),2`: two nodes with 4 cores each and one with 2
    cores = min(int(part.partition("(")[0]) for part in _of_the_job("SLURM_JOB_CPUS_PER_NODE").split(","))
    device_type = environment.device_type(has_gpu=bool(gpus))
    count = gpus if device_type == "cuda" else cores
    return Machine(device_type=device_type, devices=tuple(map(str, range(count))), cores=cores, nodes=nodes)


def _of_the_job(name: str) -> str:
    if name not in os.environ:
        raise SwapError(f"SLURM_JOB_ID is set, but {name} is not: start this inside the job, with salloc or sbatch")
    return os.environ[name]


def is_on_allocated_node() -> bool:
    """Whether this process is on a node of its Slurm job; `salloc` runs its command where it was called."""
    return "SLURMD_NODENAME" in os.environ


def _gpus_on_node() -> int:
    """From Slurm's variables: a batch script has the number, a shell of `salloc` the request, in several forms. Only
    the controller knows about `--gres`."""
    nodes = num_allocated_nodes()
    if on_node := _number("SLURM_GPUS_ON_NODE") or _number("SLURM_GPUS_PER_NODE"):
        return on_node
    if total := _number("SLURM_GPUS") or _number("SLURM_GPUS_PER_TASK") * _number("SLURM_NTASKS"):
        return _on_each(total, nodes)
    try:
        description = ask("scontrol", "show", "job", "--oneliner", os.environ["SLURM_JOB_ID"])
    except SwapError as error:  # must not look like a job without GPUs, which would train on CPU
        raise SwapError(
            f"{error}: cannot tell whether this job has GPUs; run `dvc repro` again, "
            f"with SWAP_DEVICE=cpu if it has none"
        ) from None
    return gpus_in(description, nodes=nodes)


def _number(variable: str) -> int:
    """`8`, or `a100:8`; 0 if it is not set."""
    number = re.fullmatch(r"(?:.*[:=])?(\d+)", os.environ.get(variable, ""))
    return int(number[1]) if number else 0


def _on_each(total: int, nodes: int) -> int:
    if 0 < total < nodes:
        raise SwapError(f"this job has {nodes} nodes but {total} GPUs: request --gpus-per-node, or fewer nodes")
    return total // nodes


def gpus_in(description: str, *, nodes: int) -> int:
    """GPUs per node in the output of `scontrol show job`: requested per node, or the total divided by the nodes."""

    def number(key: str) -> int:
        found = re.search(rf"\b{key}=\S*?gpu(?::[\w.-]+)?[:=](\d+)(?![\w.:=-])", description, re.IGNORECASE)
        return int(found[1]) if found else 0

    if on_node := number("TresPerNode"):
        return on_node
    tasks = re.search(r"\bNumTasks=(\d+)", description)
    total = number("(?:Alloc)?TRES") or number("TresPerJob") or number("TresPerTask") * int(tasks[1] if tasks else 0)
    return _on_each(total, nodes)
