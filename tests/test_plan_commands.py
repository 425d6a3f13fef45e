"""The commands for several nodes with ssh alone: right on paper, and tried with two agents on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, Project
from slurm_cluster import free_ports
from test_resume import undisturbed  # noqa: F401

from swap_pipeline.errors import SwapError
from swap_pipeline.launch import this_machine
from swap_pipeline.params import read_params
from swap_pipeline.plan_commands import commands_by_hand

PARAMS = read_params(ROOT / "recipes/fashion-mini.yaml")


def lines_of(*, gpus: int, nodes: int, gpus_per_worker: int = 1) -> dict[str, tuple[str, ...]]:
    params = replace(PARAMS, phase2=replace(PARAMS.phase2, gpus_per_worker=gpus_per_worker))
    return {part.where: part.lines for part in commands_by_hand(params, gpus=gpus, nodes=nodes)}


def test_every_worker_has_gpus_of_its_own_and_those_without_a_place_come_after_another() -> None:
    workers = lines_of(gpus=2, nodes=2)
    assert workers["on node 1"] == (
        "(export CUDA_VISIBLE_DEVICES=0; torchrun --standalone --nproc-per-node 1 -m stages.phase2 --seed 0; "
        "torchrun --standalone --nproc-per-node 1 -m stages.phase2 --seed 2) &",
        "wait",
    )
    assert [line.count("torchrun") for line in workers["on node 2"]] == [2, 0]


def test_a_worker_of_two_nodes_meets_on_the_first_of_them() -> None:
    workers = lines_of(gpus=8, nodes=4, gpus_per_worker=4)
    (first, last) = workers["on nodes 3 to 4, with FIRST_NODE the first of these"]
    assert first == (
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint $FIRST_NODE:29402 "
        "--rdzv-id phase2-1 -m stages.phase2 --seed 1"
    )
    assert last.endswith("--rdzv-id phase2-3 -m stages.phase2 --seed 3")


def test_gpus_that_the_nodes_cannot_share_are_refused() -> None:
    with pytest.raises(SwapError, match="--gpus is 3, which --nodes 2 cannot share"):
        lines_of(gpus=3, nodes=2)


@pytest.mark.long
def test_two_agents_that_follow_the_plan_give_the_bytes_of_one_machine(
    undisturbed: Project,  # noqa: F811
    tmp_path: Path,
) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    expected = project.bytes_of("checkpoints/phase1/model.safetensors")
    shutil.rmtree(project.root / ".swap")
    (project.root / "checkpoints/phase1/model.safetensors").unlink()
    plan = [sys.executable, "-m", "swap_pipeline.cli", "plan", "--gpus", "2", "--nodes", "2"]
    printed = project.run(*plan, "--images-per-second", "1").stdout
    (command,) = [line for line in printed.splitlines() if line.endswith("-m stages.phase1")]
    # Another port than torchrun's own, which some other test may use.
    command = command.replace(":29400", f":{free_ports(1)[0]}")

    environment = project.full_environment(
        {"FIRST_NODE": "127.0.0.1", "OMP_NUM_THREADS": str(max(1, this_machine().cores // 2))}
    )
    agents = [
        subprocess.Popen(
            command, shell=True, cwd=project.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=300)[0].decode() for agent in agents]

    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sum(output.count("phase1: epoch 30/30") for output in outputs) == 1
    assert project.bytes_of("checkpoints/phase1/model.safetensors") == expected
