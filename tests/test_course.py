"""Phase 1's course does not depend on when it is left: one course serves every τ."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import EVERY_EPOCH, Project, assert_one_line, made_once, processes_in, wait_until

from swap_pipeline.training.snapshots import spacing, write_snapshot

EPOCHS = 10
COURSE: dict[str, Any] = {"phase1.max_epochs": EPOCHS, "phase1.stop_accuracy": 100.0, "phase1.keep_epochs": [2, 5]}
MODEL = "checkpoints/phase1/model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after all epochs of phase 1."""
    return made_once("course", COURSE | {"phase2.epochs": 0, "workers.seeds": [0]}, tmp_path_factory)


def tau_for(project: Project, wanted: int) -> float:
    """A τ that ends phase 1 at this epoch, or at the next one that sets a record."""
    accuracies = [row["train_accuracy"] for row in project.json("metrics/phase1.json")["curve"]]
    records = [n for n, accuracy in enumerate(accuracies) if accuracy > max(accuracies[:n], default=-1)]
    epoch = next(n for n in records if n + 1 >= wanted)
    return float(max(accuracies[:epoch], default=0) + accuracies[epoch]) / 2


def epochs_trained(output: str) -> list[int]:
    return [int(found) for found in re.findall(rf"phase1: epoch (\d+)/{EPOCHS} ", output)]


def course_of(project: Project) -> Path:
    (folder,) = (project.root / ".swap/phase1").iterdir()
    return folder


def snapshots(project: Project) -> list[int]:
    return sorted(int(path.stem.split("_")[1]) for path in course_of(project).glob("snapshot_*.safetensors"))


def from_the_start(project: Project, target: Path, tau: float) -> Project:
    """The same without anything in scratch."""
    fresh = project.copy_to(target)
    shutil.rmtree(fresh.root / ".swap")
    fresh.set_params({"phase1.stop_accuracy": tau})
    assert fresh.stage("phase1").returncode == 0
    return fresh


def models(project: Project) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (project.root / "checkpoints/phase1").iterdir()}


def without_clocks(record: dict[str, Any]) -> dict[str, Any]:
    curve = [{**row, "seconds": 0} for row in record["curve"]]
    return {**record, "curve": curve, "seconds": 0, "ran": []}


def test_a_lower_tau_takes_its_model_from_the_course_and_trains_nothing(whole: Project, tmp_path: Path) -> None:
    project, tau = whole.copy_to(tmp_path / "project"), tau_for(whole, 6)
    fresh = from_the_start(whole, tmp_path / "fresh", tau)
    project.set_params({"phase1.stop_accuracy": tau})

    done = project.stage("phase1")

    assert done.returncode == 0 and epochs_trained(done.stdout) == [], done.stdout + done.stderr
    assert models(project) == models(fresh) != models(whole)
    record = project.json("metrics/phase1.json")
    assert without_clocks(record) == without_clocks(fresh.json("metrics/phase1.json"))
    assert record["stopped_by"] == "accuracy" and 6 <= record["epochs"] < EPOCHS
    assert record["left"].startswith(f"left after epoch {record['epochs']} by accuracy: training accuracy ")
    assert snapshots(project) == list(range(1, EPOCHS + 1))


@pytest.mark.long
def test_a_higher_tau_resumes_where_the_course_ends(whole: Project, tmp_path: Path) -> None:
    low, high = tau_for(whole, 3), tau_for(whole, 6)
    project = from_the_start(whole, tmp_path / "project", low)
    reached = project.json("metrics/phase1.json")["epochs"]
    project.set_params({"phase1.stop_accuracy": high})

    done = project.stage("phase1")

    end = project.json("metrics/phase1.json")["epochs"]
    assert epochs_trained(done.stdout) == list(range(reached + 1, end + 1)) != []
    project.set_params({"phase1.stop_accuracy": 100.0})
    assert epochs_trained(project.stage("phase1").stdout) == list(range(end + 1, EPOCHS + 1))
    assert models(project) == models(whole)


@pytest.mark.long
def test_a_search_over_four_values_of_tau_costs_one_phase_1(whole: Project, tmp_path: Path) -> None:
    project = whole.copy_to(tmp_path / "project")
    shutil.rmtree(project.root / ".swap")
    values = [tau_for(whole, 4), tau_for(whole, 2), tau_for(whole, 6), 100.0]
    output = ""
    for number, tau in enumerate(values):
        output += project.dvc("exp", "run", "-f", "-n", f"tau{number}", "-S", f"phase1.stop_accuracy={tau!r}", "phase1")

    assert sorted(epochs_trained(output)) == list(range(1, EPOCHS + 1))  # each of them once
    assert project.trained("phase1") == len(set(values))
    assert models(project) == models(whole)


@pytest.mark.long
def test_few_snapshots_stay_and_the_epochs_between_are_repeated(whole: Project, tmp_path: Path) -> None:
    tau = tau_for(whole, 5)
    fresh = from_the_start(whole, tmp_path / "fresh", tau)
    end = fresh.json("metrics/phase1.json")["epochs"]
    project = whole.copy_to(tmp_path / "project")
    shutil.rmtree(project.root / ".swap")
    project.environment = {**EVERY_EPOCH, "SWAP_KEEP_EPOCHS": "6"}
    project.stage("phase1")
    kept = snapshots(project)
    assert kept == [5, 9, 10]  # of 10 epochs every fifth, and the last two
    project.set_params({"phase1.stop_accuracy": tau})

    done = project.stage("phase1")

    assert epochs_trained(done.stdout) == list(range(max(n for n in (0, *kept) if n <= end) + 1, end + 1))
    assert models(project) == models(fresh)
    assert len(snapshots(project)) <= 6


@pytest.mark.long
def test_a_damaged_snapshot_of_the_course_costs_the_epochs_since_the_one_before(whole: Project, tmp_path: Path) -> None:
    tau = tau_for(whole, 6)
    fresh = from_the_start(whole, tmp_path / "fresh", tau)
    end = fresh.json("metrics/phase1.json")["epochs"]
    project = whole.copy_to(tmp_path / "project")
    victim = course_of(project) / f"snapshot_{end:06d}.safetensors"
    victim.write_bytes(victim.read_bytes()[:-100])
    project.set_params({"phase1.stop_accuracy": tau})

    done = project.stage("phase1")

    assert f"{victim.name} cannot be used" in done.stdout
    assert epochs_trained(done.stdout) == [end]
    assert models(project) == models(fresh)


@pytest.mark.long
def test_a_damaged_result_of_one_tau_is_made_again_and_the_other_is_left_alone(whole: Project, tmp_path: Path) -> None:
    project = whole.copy_to(tmp_path / "project")
    (other,) = course_of(project).glob("result-*")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    project.set_params({"phase1.stop_accuracy": tau_for(whole, 6)})
    project.stage("phase1")
    expected = models(project)
    (own,) = set(course_of(project).glob("result-*")) - {other}
    (own / "model.safetensors").write_bytes(b"damaged")

    done = project.stage("phase1")

    assert f"{own.name} is damaged" in done.stdout and epochs_trained(done.stdout) == []
    assert models(project) == expected
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before


@pytest.mark.long
def test_two_launchers_with_different_tau_take_turns_and_train_each_epoch_once(whole: Project, tmp_path: Path) -> None:
    first = whole.copy_to(tmp_path / "first")
    shutil.rmtree(first.root / ".swap")
    second = first.copy_to(tmp_path / "second")
    second.set_params({"phase1.stop_accuracy": tau_for(whole, 6)})

    def start(project: Project) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "stages.phase1"],
            cwd=project.root,
            env=project.full_environment({"DVC_ROOT": str(first.root)}),  # as DVC says to experiments
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    launchers = [start(first), start(second)]
    outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]

    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert sorted(epochs_trained("".join(outputs))) == list(range(1, EPOCHS + 1))
    assert models(first) == models(whole)
    assert second.json("metrics/phase1.json")["stopped_by"] == "accuracy"


@pytest.mark.long
def test_a_killed_job_with_a_new_tau_resumes_and_ends_in_the_same_bytes(whole: Project, tmp_path: Path) -> None:
    project = from_the_start(whole, tmp_path / "project", tau_for(whole, 2))
    project.set_params({"phase1.stop_accuracy": 100.0})
    begun = max(snapshots(project))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "stages.phase1"], cwd=project.root, env=project.full_environment(), text=True
    )
    wait_until(lambda: max(snapshots(project)) > begun)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: processes_in(project.root) == [], seconds=10)

    done = project.stage("phase1")

    assert min(epochs_trained(done.stdout), default=EPOCHS) > begun
    assert models(project) == models(whole)


@pytest.mark.parametrize("at_most", [5, 6, 9, 40])
@pytest.mark.parametrize("epochs", [1, 7, 40, 150])
def test_no_more_snapshots_stay_than_are_allowed_wherever_the_course_is_taken_up(
    at_most: int, epochs: int, tmp_path: Path
) -> None:
    every = spacing(epochs=epochs, at_most=at_most)
    for first in (1, max(1, epochs // 2), max(1, epochs // 3)):
        for epoch in range(first, min(epochs, first + 3 if first > 1 else epochs) + 1):
            write_snapshot(tmp_path, epoch, {}, {}, stays=lambda epoch: epoch % every == 0)
            assert len(list(tmp_path.iterdir())) <= at_most


def test_fewer_than_five_are_refused(whole: Project, tmp_path: Path) -> None:
    """The newest two and the last two that were written always stay."""
    project = whole.copy_to(tmp_path / "project")
    project.set_params({"phase1.peak_lr": 0.12})
    done = project.stage("phase1", SWAP_KEEP_EPOCHS="4")
    assert_one_line(done, "SWAP_KEEP_EPOCHS is '4': write a whole number from 5 to 100,000")


def test_clean_keeps_the_course_of_the_present_params_whatever_tau_is(whole: Project, tmp_path: Path) -> None:
    project = whole.copy_to(tmp_path / "project")
    project.set_params({"phase1.stop_accuracy": 12.5})
    project.swap("clean", "--yes")
    assert snapshots(project) == list(range(1, EPOCHS + 1))
    project.set_params({"phase1.peak_lr": 0.11})
    project.swap("clean", "--yes")
    assert not any((project.root / ".swap/phase1").iterdir())
