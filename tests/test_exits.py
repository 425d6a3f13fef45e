"""What other exits from phase 1 would have given: at its own exit, that is the run's own result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import Project
from test_stopping import a_curve, a_run

from swap_pipeline.analysis.exits import RULES, _exits_of_rules, exits_of
from swap_pipeline.config.params import Leaving


def test_exits_are_those_wanted_of_the_models_that_were_kept_and_the_last() -> None:
    assert list(exits_of([2, 4, 9], kept="all", epochs=6)) == [2, 4, 6]  # type: ignore[arg-type]
    assert list(exits_of("all", kept=(3, 5), epochs=6)) == [3, 5, 6]
    assert exits_of((2,), kept=(), epochs=6) == {6: Path("checkpoints/phase1/model.safetensors")}


def test_where_phase_1_ran_to_its_end_each_rule_has_its_exit_and_its_regret() -> None:
    """τ is passed after epoch 3, the loss is lowest after epoch 2; models were kept after 2, 4 and the last, 6."""
    given = Leaving(stop="epochs", stop_accuracy=80.0, patience=3)
    phase1 = a_run(given, epochs=6)
    curve = a_curve(accuracies=[50, 70, 85, 90, 91, 92], losses=[0.9, 0.4, 0.5, 0.6, 0.5, 0.5])
    exits = [{"epoch": epoch, "accuracy": accuracy} for epoch, accuracy in ((2, 80.0), (4, 86.0), (6, 85.0))]

    found = _exits_of_rules(RULES, phase1, {"curve": [asdict(row) for row in curve]}, exits)

    assert found == [
        {"rule": "accuracy", "epoch": 3, "nearest": 2, "regret": 6.0},  # of two that are as near, the earlier
        {"rule": "plateau", "epoch": 5, "nearest": 4, "regret": 0.0},
    ]


@pytest.fixture(scope="module")
def left_elsewhere(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = finished_project.copy_to(tmp_path_factory.mktemp("exits") / "project")
    project.set_analysis({"exit_workers": 3})
    project.dvc("--cd", "analysis", "repro", "exits", SWAP_NPROC="2")
    return project


def test_from_phase_1s_own_exit_the_average_is_that_of_phase_3(left_elsewhere: Project) -> None:
    record = left_elsewhere.json("analysis/exits.json")
    phase3, phase1 = left_elsewhere.json("metrics/phase3.json"), left_elsewhere.json("metrics/phase1.json")
    early, own = record["exits"]
    assert (early["epoch"], own["epoch"]) == (2, 3)
    assert own["test_accuracy"] == phase3["test_accuracy"]
    assert own["test_loss"] == pytest.approx(phase3["test_loss"], rel=1e-6)
    workers = [left_elsewhere.json(f"metrics/phase2/seed_{seed}.json")["test_accuracy"] for seed in (0, 1, 2)]
    assert own["workers"] == pytest.approx(sum(workers) / 3)
    assert early["test_loss"] != own["test_loss"]
    assert own["seconds"] > sum(row["seconds"] for row in phase1["curve"]) > 0
    assert record["rules"] == []  # τ is 100: no rule has left phase 1


def test_what_was_trained_is_not_trained_again(left_elsewhere: Project, tmp_path: Path) -> None:
    project = left_elsewhere.copy_to(tmp_path / "project")
    (job,) = (project.root / ".swap/exits").iterdir()
    for path in (job / "result", job / "epoch_2_seed_1" / "result"):
        project.run("rm", "-rf", str(path))

    done = project.stage("exits", SWAP_NPROC="2")

    assert done.returncode == 0, done.stderr
    trained = [line for line in done.stdout.splitlines() if "phase2 seed" in line and " epoch 2/2 " in line]
    assert len(trained) == 1 and "phase2 seed 1" in trained[0]
    assert [p["test_loss"] for p in project.json("analysis/exits.json")["exits"]] == [
        p["test_loss"] for p in left_elsewhere.json("analysis/exits.json")["exits"]
    ]
