"""Killed at any moment, started again, the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Project, make_project

LONGER = {"phase1.max_epochs": 30, "phase2.epochs": 30, "workers.seeds": [0, 1]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("undisturbed") / "project")
    project.set_params(LONGER)
    project.dvc("repro")
    return project


def processes_in(folder: Path) -> list[int]:
    """Living processes that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def start_and_signal(project: Project, when: Callable[[], bool], number: int) -> int:
    """Run `dvc repro` in a process group of its own and signal the whole group once `when` holds."""
    with (project.root / "killed.log").open("w") as log:
        process = subprocess.Popen(
            ["dvc", "repro"],
            cwd=project.root,
            env=project.full_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_until(lambda: when() or process.poll() is not None)
        assert process.poll() is None, (project.root / "killed.log").read_text()
        os.killpg(process.pid, number)
        return process.wait()


def snapshots(project: Project, stage: str) -> list[int]:
    """Epochs of the snapshots in scratch."""
    names = (project.root / ".swap" / stage).glob("*/snapshot_*.safetensors")
    return [int(name.stem.split("_")[1]) for name in names]


@pytest.mark.parametrize("stage", ["phase1", "phase2"])
@pytest.mark.parametrize("epoch", [3, 17])
def test_a_killed_phase_goes_on_from_its_snapshot_and_ends_in_the_same_bytes(
    undisturbed: Project, project: Project, stage: str, epoch: int
) -> None:
    project.set_params(LONGER)
    start_and_signal(project, lambda: max(snapshots(project, stage), default=0) >= epoch, signal.SIGKILL)
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    reached = max(snapshots(project, stage))

    output = project.dvc("repro")

    name = "phase1" if stage == "phase1" else "phase2 seed 0"
    assert f"{name}: epoch 1/30" not in output
    assert f"{name}: epoch 30/30" in output
    assert reached >= epoch
    for path in ("phase1", "phase2/seed_0", "phase2/seed_1", "phase3"):
        file = f"checkpoints/{path}/model.safetensors"
        assert project.bytes_of(file) == undisturbed.bytes_of(file)


def test_phase_3_killed_while_it_works_ends_in_the_same_bytes(undisturbed: Project, tmp_path: Path) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    project.set_params({"phase3.seed": 5})
    start_and_signal(project, lambda: any((project.root / ".swap/phase3").glob("*/mean.safetensors")), signal.SIGKILL)
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    project.set_params({"phase3.seed": 0})

    project.dvc("repro")

    assert project.bytes_of("checkpoints/phase3/model.safetensors") == undisturbed.bytes_of(
        "checkpoints/phase3/model.safetensors"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_phase_leaves_with_a_short_message_and_no_process_behind(
    project: Project, number: signal.Signals
) -> None:
    project.set_params(LONGER)
    code = start_and_signal(project, lambda: max(snapshots(project, "phase1"), default=0) >= 2, number)
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    log = (project.root / "killed.log").read_text()
    assert code != 0
    assert "Traceback" not in log
    assert "goes on from the last finished epoch" in log
    assert not (project.root / "checkpoints" / "phase1" / "model.safetensors").exists()
    assert snapshots(project, "phase1") != []
