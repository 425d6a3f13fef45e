"""`swap compare` with the real pipeline, on a tiny data set: every row of Tables 1 to 4."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, make_project

pytestmark = pytest.mark.long

METHODS = """
swap: {}
swap_40:
  phase2: {epochs: 4, cycles: 2}
small_batch:
  phase1: &small {batch_size: 12, shards: 1, peak_lr: 0.1, keep_epochs: []}
  phase2: &none {epochs: 0, keep_epochs: []}
  workers: &one {seeds: [0]}
large_batch:
  phase1: &large {max_epochs: 4, keep_epochs: []}
  phase2: *none
  workers: *one
swa_large_batch:
  phase1: *large
  phase2: {batch_size: 24, peak_lr: 0.1, epochs: 6, cycles: 3, keep_epochs: []}
  workers: *one
swa_large_then_small:
  phase2: &cycles {epochs: 6, cycles: 3, keep_epochs: []}
  workers: *one
swa_small_batch:
  phase1: *small
  phase2: *cycles
  workers: *one
large_batch_ema:
  phase1: {<<: *large, ema_decay: 0.9}
  phase2: *none
  workers: *one
small_batch_ema:
  phase1: {<<: *small, ema_decay: 0.95}
  phase2: *none
  workers: *one
"""
NAMES = ("swap", "swap_40", "small_batch", "large_batch", "swa_large_batch", "swa_large_then_small", "swa_small_batch",
         "large_batch_ema", "small_batch_ema")  # fmt: skip


def swap(project: Project, *arguments: str) -> str:
    return project.run("python", "-m", "swap_pipeline.cli", *arguments).stdout


def content(project: Project, name: str, file: str) -> Any:
    commit = project.run("git", "for-each-ref", "--format=%(objectname)", f"refs/exps/**/{name}").stdout.strip()
    return json.loads(project.run("git", "show", f"{commit}:{file}").stdout)


def test_every_row_of_the_papers_tables_comes_out_of_the_experiments(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    project.set_params({"recipe": "tiny"})
    (project.root / "recipes/tiny.yaml").write_bytes(project.bytes_of("params.yaml"))
    (project.root / "recipes/tiny.methods.yaml").write_text(METHODS)
    project.run("git", "add", "-A")
    project.run("git", "commit", "-qm", "tiny")

    assert "0 of 9 experiments are up to date" in swap(project, "compare")
    # What methods share is trained once: phase 1 of SWAP is also that of swap_40 and of SWA after it, and that of a
    # baseline also that of SWA after it. Workers: 3 of SWAP, 3 of SWAP with more epochs, one of each other method.
    assert (project.trained("phase1"), project.trained("phase2"), project.trained("phase3")) == (5, 13, 9)

    metrics = {method: content(project, f"{method}-0", "metrics/swap.json") for method in NAMES}
    plain, swa = (
        {row["method"]: {key: entry["mean"] for key, entry in row["quantities"].items()} for row in table["rows"]}
        for table in project.json("tables/tables.json")["tables"]
    )
    for method in ("small_batch", "large_batch", "small_batch_ema", "large_batch_ema"):
        assert plain[method]["test_accuracy"] == metrics[method]["accuracy"]
        assert plain[method]["training_time"] == metrics[method]["seconds"]
    assert plain["swap_before"]["test_accuracy"] == metrics["swap"]["workers"]
    assert plain["swap_after"]["test_accuracy"] == metrics["swap"]["accuracy"]
    for method in ("swa_large_batch", "swa_large_then_small", "swa_small_batch", "swap", "swap_40"):
        assert swa[method]["before_averaging"] == metrics[method]["workers"]
        assert swa[method]["after_averaging"] == metrics[method]["accuracy"]
        assert swa[method]["training_time"] == metrics[method]["seconds"]
    assert set(plain) | set(swa) == {*NAMES, "swap_before", "swap_after"}

    project.run("dvc", "exp", "apply", "swap-0")
    phase1, phase3 = project.json("metrics/phase1.json"), project.json("metrics/phase3.json")
    workers = [project.json(f"metrics/phase2/seed_{seed}.json") for seed in (0, 1, 2)]
    assert metrics["swap"]["workers"] == pytest.approx(statistics.fmean(one["test_accuracy"] for one in workers))
    parts = [phase1, *workers, phase3]
    compute = sum(part["seconds"] * part["num_devices"] for part in parts)
    assert plain["swap_after"]["total_compute"] == pytest.approx(compute)
    slowest = phase1["seconds"] + max(one["seconds"] for one in workers)
    assert plain["swap_before"]["training_time"] == pytest.approx(slowest)
    assert plain["swap_after"]["training_time"] == pytest.approx(slowest + phase3["seconds"])
    assert plain["swap_after"]["devices"] == max(phase1["num_devices"], 3)

    trained = {stage: project.trained(stage) for stage in ("phase1", "phase2", "phase3")}
    assert "9 of 9 experiments are up to date" in swap(project, "compare")
    assert {stage: project.trained(stage) for stage in trained} == trained

    changed = METHODS.replace("ema_decay: 0.95", "ema_decay: 0.9")
    (project.root / "recipes/tiny.methods.yaml").write_text(changed)
    assert "8 of 9 experiments are up to date" in swap(project, "compare")
    assert {stage: project.trained(stage) - before for stage, before in trained.items()} == {
        "phase1": 1,
        "phase2": 1,
        "phase3": 1,
    }
