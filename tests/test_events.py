"""SWAP_TENSORBOARD=1: the events that TensorBoard's own reader finds are the numbers of the records."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, assert_one_line

from swap_pipeline.runtime.progress import Reporter

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed: `pip install tensorboard`"
)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By name, the step and value of each event."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


@needs_tensorboard
@pytest.mark.long
def test_every_phase_and_worker_writes_what_its_record_has(project: Project) -> None:
    project.dvc("repro", "phase3", SWAP_TENSORBOARD="1")
    written = project.root / "tensorboard/workspace"
    assert sorted(path.name for path in written.iterdir()) == [
        "phase1",
        "phase2_seed_0",
        "phase2_seed_1",
        "phase2_seed_2",
        "phase3",
    ]
    records = {"phase1": "phase1", **{f"phase2_seed_{seed}": f"phase2/seed_{seed}" for seed in range(3)}}
    for folder, record in records.items():
        found, curve = events(written / folder), project.json(f"metrics/{record}.json")["curve"]
        numbers = {name for name, value in curve[0].items() if isinstance(value, float)}
        assert {"learning_rate", "train_loss", "train_accuracy", "accuracy"} <= numbers
        assert set(found) == numbers | {"images_per_second"}
        for name in numbers:
            assert found[name] == [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in curve]
        # 240 images: no batch of these sizes is short
        speeds = [(row["epoch"], pytest.approx(240 / row["seconds"], rel=1e-6)) for row in curve]
        assert found["images_per_second"] == speeds
    points = project.json("metrics/phase3.json")["points"]
    expected = [(number, pytest.approx(point["accuracy"])) for number, point in enumerate(points, start=1)]
    assert events(written / "phase3")["accuracy"] == expected
    assert project.run("git", "status", "--porcelain", "tensorboard").stdout == ""


@needs_tensorboard
def test_a_resumed_run_replaces_what_it_repeats_and_a_new_run_replaces_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWAP_TENSORBOARD", "1")
    monkeypatch.setenv("DVC_EXP_NAME", "gentle")

    def run(*losses: float, first: int) -> Any:
        reporter = Reporter(name="phase2 seed 3", total=4, folder=tmp_path, is_main=True)
        for step, loss in enumerate(losses, start=first):
            reporter.log(step, {"loss": loss, "epoch": step, "top5": None})
        return events(tmp_path / "tensorboard/gentle/phase2_seed_3")

    assert run(4.0, 3.0, 2.0, first=1) == {"loss": [(1, 4.0), (2, 3.0), (3, 2.0)]}
    assert run(2.5, 1.0, first=3) == {"loss": [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.0)]}
    assert run(5.0, first=1) == {"loss": [(1, 5.0)]}


@pytest.mark.long
def test_without_the_package_a_stage_ends_in_one_line(project: Project) -> None:
    project.stage("prepare")
    # Nothing is found under this name, wherever it is installed.
    (project.root / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *package: None if name == 'tensorboard' else find(name, *package)\n"
    )
    path = {"PYTHONPATH": str(project.root)}
    assert_one_line(project.stage("phase1", SWAP_TENSORBOARD="1", **path), "tensorboard is not installed", "pip")
    assert_one_line(project.stage("phase1", SWAP_TENSORBOARD="yes", **path), "SWAP_TENSORBOARD", "write 0 or 1")
    assert not (project.root / "tensorboard").exists()
