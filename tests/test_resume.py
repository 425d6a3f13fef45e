"""Killed at any moment, started again, the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Project, made_once, processes_in, wait_until

from swap_pipeline.launch.devices import this_machine
from swap_pipeline.storage.tensor_files import read_tensors, write_tensors

TWO_RANKS = {"SWAP_NPROC": "2"}
LONGER = {"phase1.shards": 2, "phase1.max_epochs": 30, "phase2.epochs": 30, "workers.seeds": [0, 1]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return made_once("undisturbed", LONGER, tmp_path_factory, **TWO_RANKS)


def start_and_signal(project: Project, when: Callable[[], bool], number: int, *arguments: str) -> int:
    """Run `dvc repro` in its own process group and signal the whole group once `when` holds."""
    with (project.root / "killed.log").open("w") as log:
        process = subprocess.Popen(
            ["dvc", "repro", *arguments],
            cwd=project.root,
            env=project.full_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it may be ignored
        )
        wait_until(lambda: when() or process.poll() is not None)
        assert process.poll() is None, (project.root / "killed.log").read_text()
        os.killpg(process.pid, number)
        return process.wait()


def snapshots(project: Project, stage: str) -> list[int]:
    """The epoch of each job's newest snapshot in scratch."""
    folders = (project.root / ".swap" / stage).iterdir() if (project.root / ".swap" / stage).exists() else ()
    names = [sorted(path.stem for path in folder.glob("snapshot_*.safetensors")) for folder in folders]
    return [int(of_job[-1].split("_")[1]) for of_job in names if of_job]


@pytest.mark.long
def test_a_pipeline_killed_again_and_again_goes_on_each_time_and_ends_in_the_same_bytes(
    undisturbed: Project, project: Project
) -> None:
    project.environment = TWO_RANKS
    project.set_params(LONGER)
    for stage, jobs, epoch in (("phase1", 1, 3), ("phase1", 1, 17), ("phase2", 2, 3), ("phase2", 2, 17)):

        def all_are_there(stage: str = stage, jobs: int = jobs, epoch: int = epoch) -> bool:
            reached = snapshots(project, stage)
            return len(reached) == jobs and min(reached) >= epoch

        start_and_signal(project, all_are_there, signal.SIGKILL)
        wait_until(lambda: processes_in(project.root) == [], seconds=10)
        log = (project.root / "killed.log").read_text()
        name = "phase1" if stage == "phase1" else "phase2 seed 0"
        assert (f"{name}: epoch 1/30" in log) == (epoch == 3), "it did not resume from its snapshot"

    project.dvc("repro")

    for path in ("phase1", "phase2/seed_0", "phase2/seed_1", "phase3"):
        file = f"checkpoints/{path}/model.safetensors"
        assert project.bytes_of(file) == undisturbed.bytes_of(file)


@pytest.mark.long
def test_phase_3_killed_while_it_works_ends_in_the_same_bytes(undisturbed: Project, tmp_path: Path) -> None:
    reference, project = (undisturbed.copy_to(tmp_path / name) for name in ("reference", "project"))
    for copy in (reference, project):
        copy.set_params({"phase3.batch_size": 40})
    reference.dvc("repro")
    before = set((project.root / ".swap/phase3").glob("*"))

    def has_measured() -> bool:
        return any(path.parents[1] not in before for path in (project.root / ".swap/phase3").glob("*/kept/*.json"))

    start_and_signal(project, has_measured, signal.SIGKILL)
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    assert project.trained("phase3") == 1  # the one before

    project.dvc("repro")

    file = "checkpoints/phase3/model.safetensors"
    assert project.bytes_of(file) == reference.bytes_of(file) != undisturbed.bytes_of(file)


def test_workers_train_at_the_same_time(undisturbed: Project) -> None:
    lines = (undisturbed.root.parent / "output.txt").read_text().splitlines()
    first = {
        seed: next(i for i, line in enumerate(lines) if f"phase2 seed {seed}: epoch 1/" in line) for seed in (0, 1)
    }
    last = {
        seed: next(i for i, line in enumerate(lines) if f"phase2 seed {seed}: epoch 30/" in line) for seed in (0, 1)
    }
    assert max(first.values()) < min(last.values())


@pytest.mark.long
def test_a_stage_under_torchrun_by_hand_gives_the_same_bytes(undisturbed: Project, tmp_path: Path) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    expected = project.bytes_of("checkpoints/phase1/model.safetensors")
    shutil.rmtree(project.root / ".swap")
    (project.root / "checkpoints/phase1/model.safetensors").unlink()
    command = "torchrun --standalone --nproc-per-node 2 -m stages.phase1"
    assert command in (project.root / "stages" / "phase1.py").read_text()

    threads = max(1, this_machine().cores // 2)
    done = project.run(*command.split(), OMP_NUM_THREADS=str(threads))

    assert "phase1: epoch 30/30" in done.stdout
    assert project.bytes_of("checkpoints/phase1/model.safetensors") == expected


def start(project: Project, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=project.root,
        env=project.full_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_no_rank_outlives_a_launcher_that_is_killed_alone(undisturbed: Project, tmp_path: Path) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    project.set_params({"seed": 9})
    launcher = start(project, "stages.phase1")
    wait_until(lambda: max(snapshots(project, "phase1"), default=0) >= 2)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: processes_in(project.root) == [], seconds=10)


@pytest.mark.long
def test_two_launchers_of_one_job_train_it_once(undisturbed: Project, tmp_path: Path) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    project.set_params({"seed": 9})
    launchers = [start(project, "stages.phase1") for _ in range(2)]
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert sum(output.count("phase1: epoch 1/30") for output in outputs) == 1
    assert project.trained("phase1") == 2


@pytest.mark.long
def test_a_worker_that_waited_while_params_changed_does_not_train_under_the_old_name(
    undisturbed: Project, tmp_path: Path
) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    project.set_params({"phase2.peak_lr": 0.07})
    launcher = start(project, "stages.phase2", "--seed", "0", DVC_STAGE="phase2@0", SWAP_SLOTS="1")
    wait_until(lambda: max(snapshots(project, "phase2"), default=0) >= 2)
    project.set_params({"phase2.peak_lr": 0.01})

    output = launcher.communicate(timeout=120)[0]

    assert "phase2 seed 0: epoch 30/30" in output
    assert "phase2 seed 1 failed" in output
    assert project.trained("phase2") == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_phase_leaves_with_a_short_message_and_no_process_behind(
    project: Project, number: signal.Signals
) -> None:
    project.environment = TWO_RANKS
    project.set_params(LONGER)
    code = start_and_signal(project, lambda: max(snapshots(project, "phase1"), default=0) >= 2, number)
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    log = (project.root / "killed.log").read_text()
    assert code != 0
    assert "Traceback" not in log
    assert "resumes from the last snapshot" in log
    assert not (project.root / "checkpoints" / "phase1" / "model.safetensors").exists()
    assert snapshots(project, "phase1") != []


def test_after_a_kill_a_damaged_snapshot_is_set_aside_and_the_one_before_it_leads_to_the_same_bytes(
    undisturbed: Project, tmp_path: Path
) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    model = "checkpoints/phase2/seed_0/model.safetensors"
    shutil.rmtree(project.root / ".swap")
    (project.root / model).unlink()
    launcher = start(project, "stages.phase2", "--seed", "0")
    wait_until(lambda: max(snapshots(project, "phase2"), default=0) >= 3)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    newest = max((project.root / ".swap/phase2").glob("*/snapshot_*.safetensors"))
    epoch = int(newest.stem.split("_")[1])
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 16
    newest.write_bytes(content)

    output = start(project, "stages.phase2", "--seed", "0").communicate(timeout=300)[0]

    assert f"{newest.name} cannot be used" in output and "warning: " in output
    assert f"phase2 seed 0: resuming after epoch {epoch - 1}" in output
    assert newest.with_suffix(".damaged").read_bytes() == content
    assert project.bytes_of(model) == undisturbed.bytes_of(model)


def kill_worker_after(project: Project, epoch: int) -> Path:
    """Train seed 0 of phase 2 again and kill it after `epoch`; returns its folder in scratch."""
    shutil.rmtree(project.root / ".swap")
    shutil.rmtree(project.root / "checkpoints/phase2/seed_0")
    launcher = start(project, "stages.phase2", "--seed", "0")
    wait_until(lambda: max(snapshots(project, "phase2"), default=0) >= epoch)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    (folder,) = (project.root / ".swap/phase2").iterdir()
    return folder


def flip_a_byte(path: Path) -> None:
    """In place, so that other names of the file see it too."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def exchange(path: Path) -> None:
    """Put a whole model of another seed in its place."""
    tensors, info = read_tensors(path)
    write_tensors(path, tensors, {**info, "seed": info["seed"] + 1})


@pytest.mark.parametrize("harm", [Path.unlink, flip_a_byte, exchange], ids=["lost", "damaged", "exchanged"])
@pytest.mark.long
def test_a_kept_model_that_was_harmed_before_the_resume_is_made_again(
    harm: Callable[[Path], None], undisturbed: Project, tmp_path: Path
) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    folder = kill_worker_after(project, 3)
    harm(folder / "kept" / "epoch_1.safetensors")

    output = start(project, "stages.phase2", "--seed", "0").communicate(timeout=300)[0]

    assert "kept/epoch_1.safetensors is " in output and "training is repeated from before epoch 1" in output
    assert "phase2 seed 0: epoch 1/30" in output
    for name in ("epoch_1", "model"):
        file = f"checkpoints/phase2/seed_0/{name}.safetensors"
        assert project.bytes_of(file) == undisturbed.bytes_of(file)


@pytest.mark.long
def test_a_model_kept_late_is_made_again_from_the_snapshot_before_it(undisturbed: Project, tmp_path: Path) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    project.set_params({"phase2.keep_epochs": "all"})
    folder = kill_worker_after(project, 4)
    newest = max(snapshots(project, "phase2"))
    (folder / "kept" / f"epoch_{newest}.safetensors").unlink()

    output = start(project, "stages.phase2", "--seed", "0").communicate(timeout=300)[0]

    assert f"phase2 seed 0: resuming after epoch {newest - 1}" in output
    assert len(list((project.root / "checkpoints/phase2/seed_0").iterdir())) == 30
    file = "checkpoints/phase2/seed_0/model.safetensors"
    assert project.bytes_of(file) == undisturbed.bytes_of(file)


@pytest.mark.long
def test_scratch_that_is_deleted_while_workers_train_costs_time_but_no_file(
    undisturbed: Project, tmp_path: Path
) -> None:
    project = undisturbed.copy_to(tmp_path / "project")
    shutil.rmtree(project.root / ".swap")
    shutil.rmtree(project.root / "checkpoints/phase2/seed_0")
    launcher = start(project, "stages.phase2", "--seed", "0")
    wait_until(lambda: max(snapshots(project, "phase2"), default=0) >= 3)
    shutil.rmtree(project.root / ".swap", ignore_errors=True)

    output = launcher.communicate(timeout=300)[0]

    assert launcher.returncode == 0 and "phase2 seed 0: restarting it" in output
    for name in ("epoch_1", "model"):
        file = f"checkpoints/phase2/seed_0/{name}.safetensors"
        assert project.bytes_of(file) == undisturbed.bytes_of(file)
