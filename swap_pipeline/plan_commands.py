"""The commands that train over several nodes by hand, with nothing but ssh and torchrun."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from swap_pipeline.errors import SwapError
from swap_pipeline.instances import Instance
from swap_pipeline.params import Params

_PORT = 29400  # torchrun's own default


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Lines of shell to run at one place, once the ones before are done."""

    where: str
    lines: tuple[str, ...]


def commands_by_hand(params: Params, *, gpus: int, nodes: int) -> tuple[Commands, ...]:
    """What to type on which of `nodes` nodes with `gpus` GPUs in all, in this order."""
    if gpus % nodes:
        raise SwapError(f"--gpus is {gpus}, which --nodes {nodes} cannot share: give a multiple of {nodes}")
    per_node = gpus // nodes
    everywhere = "on every node, at the same time" if nodes > 1 else "here"

    def on_all(instance: Instance, port: int = _PORT) -> str:
        return _torchrun(instance, processes=gpus, nodes=nodes, port=port)

    return (
        Commands(where="on the first node", lines=("dvc repro prepare",)),
        Commands(where=everywhere, lines=(on_all(Instance(method="phase1")),)),
        *_workers(params, per_node=per_node, nodes=nodes),
        Commands(
            where=everywhere,
            lines=(on_all(Instance(method="averaged")), on_all(Instance(method="phase3"), _PORT + 1)),
        ),
        Commands(where="on the first node", lines=("dvc commit --force phase1 phase2 averaged phase3", "dvc repro")),
    )


def _workers(params: Params, *, per_node: int, nodes: int) -> Iterator[Commands]:
    """Each worker on GPUs of its own, and after it the next one that has its turn there."""
    seeds, processes = params.workers.seeds, params.phase2.gpus_per_worker
    workers = [Instance(method="phase2", seed=seed) for seed in seeds]
    if processes > per_node:
        span = math.ceil(processes / per_node)
        if processes % span:
            raise SwapError(
                f"phase2.gpus_per_worker is {processes}, which {span} nodes with {per_node} GPUs cannot share evenly"
            )
        groups = max(1, nodes // span)
        for group in range(groups):
            names = f"{group * span + 1} to {(group + 1) * span}"
            mine = workers[group::groups]
            if mine:
                yield Commands(
                    where=f"on nodes {names}, with FIRST_NODE the first of these",
                    lines=tuple(_torchrun(one, processes=processes, nodes=span, port=_PORT + 2) for one in mine),
                )
        return
    places = per_node // processes
    slots = [(node, place) for place in range(places) for node in range(nodes)]
    for node in range(nodes):
        lines = []
        for index, (_, place) in [(i, slot) for i, slot in enumerate(slots) if slot[0] == node]:
            mine = workers[index :: len(slots)]
            devices = ",".join(str(place * processes + k) for k in range(processes))
            runs = "; ".join(_torchrun(one, processes=processes, nodes=1, port=0) for one in mine)
            if mine:
                lines.append(f"(export CUDA_VISIBLE_DEVICES={devices}; {runs}) &")
        if lines:
            where = f"on node {node + 1}" if nodes > 1 else "here"
            yield Commands(where=where, lines=(*lines, "wait"))


def _torchrun(instance: Instance, *, processes: int, nodes: int, port: int) -> str:
    command = " ".join(instance.command)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {processes} -m {command}"
    meeting = instance.stage_name.replace("@", "-")
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {processes // nodes} --rdzv-backend c10d "
        f"--rdzv-endpoint $FIRST_NODE:{port} --rdzv-id {meeting} -m {command}"
    )


def text_of_commands(commands: tuple[Commands, ...]) -> str:
    """For people, and for their clipboard: the lines are not broken."""
    head = [
        "By hand, with ssh alone (srun and sbatch do this by themselves, see README.md):",
        "in this folder on a file system that all nodes share, after `export FIRST_NODE=<host name>`",
    ]
    return "\n".join(
        [*head, *(line for part in commands for line in ("", f"# {part.where}", *part.lines))],
    )
