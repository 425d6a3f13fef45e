"""`swap clean`: removes what no run needs, keeps what is needed or running."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Project

from swap_pipeline.cli.amounts import in_bytes
from swap_pipeline.cli.clean import freed_bytes, job_folders, look, remove
from swap_pipeline.cli.main import main
from swap_pipeline.launch.jobs import load, save
from swap_pipeline.runtime.inputs import fingerprint
from swap_pipeline.runtime.job_folder import JobFolder, facts_of
from swap_pipeline.runtime.locks import Lock


@pytest.fixture
def here(finished: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished project, as the present folder."""
    monkeypatch.chdir(finished.root)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return finished.root


def clean(*arguments: str, answer: str = "") -> str:
    done = CliRunner().invoke(main, ["clean", *arguments], input=answer, catch_exceptions=False)
    assert done.exit_code in (0, 1)
    return done.output


def stages_in_scratch() -> dict[str, int]:
    found: dict[str, int] = {}
    for path in job_folders(Path(".swap")):
        found[path.parent.name] = found.get(path.parent.name, 0) + 1
    return found


ALL_JOBS = {"phase1": 1, "phase2": 3, "phase3": 1}


@pytest.mark.usefixtures("here")
def test_after_a_run_all_of_its_scratch_is_needed() -> None:
    # Trained with SWAP_NPROC=1, which is not what this process would take.
    assert "nothing to remove" in clean("--yes")
    assert stages_in_scratch() == ALL_JOBS


def test_what_other_params_made_goes_and_the_rest_is_found_by_the_next_run(here: Path, finished: Project) -> None:
    stale = here / ".swap/phase2" / ("0" * 20)
    shutil.copytree(next((here / ".swap/phase2").iterdir()), stale)
    (stale / "large").write_bytes(bytes(3_000_000))

    said = clean("--yes")

    assert "removed 1 folders, 3" in said
    assert not stale.exists()
    assert stages_in_scratch() == ALL_JOBS
    again = finished.stage("phase1")
    assert "already trained, taken from" in again.stdout, again.stderr


def test_a_seed_that_is_no_longer_listed_is_stale_and_one_that_is_stays(here: Path, finished: Project) -> None:
    finished.set_params({"workers.seeds": [0, 2]})

    clean("--yes")

    # What was averaged with the third one is not asked for any more either.
    assert stages_in_scratch() == {"phase1": 1, "phase2": 2}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("arguments", "answer"), [(["--dry-run"], ""), ([], "n\n"), ([], "")])
def test_nothing_is_removed_on_a_dry_run_or_without_a_yes(arguments: list[str], answer: str) -> None:
    said = clean("--all", *arguments, answer=answer)

    assert "remove 5 of 5 folders" in said
    assert stages_in_scratch() == ALL_JOBS


@pytest.mark.usefixtures("here")
def test_a_yes_removes_all_and_says_how_much() -> None:
    expected = in_bytes(sum(freed_bytes(path) for path in job_folders(Path(".swap"))))

    said = clean("--all", answer="y\n")

    assert stages_in_scratch() == {}
    assert f"free {expected}?" in said
    assert f"removed 5 folders, {expected} are free" in said
    assert Path("checkpoints/phase3/model.safetensors").exists()


@pytest.mark.parametrize("lock", ["launcher.lock", "writer.lock"])
def test_a_job_at_work_is_never_touched(here: Path, lock: str) -> None:
    folder = next((here / ".swap/phase1").iterdir())
    handle = os.open(folder / lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)

    said = clean("--all", "--yes")

    os.close(handle)
    assert stages_in_scratch() == {"phase1": 1}
    assert "running" in said


def test_a_job_that_begins_after_the_question_is_not_touched_either(here: Path) -> None:
    entries = look(everything=True)
    folder = next((here / ".swap/phase1").iterdir())
    lock = Lock(folder / "launcher.lock")
    assert lock.try_acquire()

    removed = remove(entries)

    lock.release()
    assert folder not in [here / entry.path for entry in removed]
    assert stages_in_scratch() == {"phase1": 1}


def test_a_lock_in_a_folder_that_was_removed_meanwhile_is_not_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(tmp_path / "job")
    lock = Lock(folder.path / "launcher.lock")
    real = fcntl.flock

    def flock_after_removal(handle: int, how: int) -> None:
        folder.remove()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock_after_removal)
    assert not lock.try_acquire()
    monkeypatch.setattr(fcntl, "flock", real)
    assert lock.try_acquire()
    lock.release()


def test_what_a_larger_machine_or_cluster_trained_is_needed_too(here: Path) -> None:
    folder = next((here / ".swap/phase1").iterdir())
    job, _ = load(folder)
    large = replace(job, processes=48, threads=32, nodes=24)
    facts = facts_of(device_type=large.device_type, processes=large.processes, threads=large.threads)
    large = replace(large, folder=JobFolder(folder.with_name(fingerprint(job.instance, facts=facts))))
    large.folder.result.mkdir(parents=True)

    save(large)
    known = look()
    (large.folder.path / "job.json").unlink()  # as where torchrun was started by hand
    unknown = look()

    assert all(entry.is_needed for entry in (*known, *unknown))
    assert [entry.why for entry in unknown if "perhaps needed" in entry.why] == [
        "finished, perhaps needed (no description of its run)"
    ]


def test_what_slurm_said_goes_with_all_unless_a_job_is_in_its_queue(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (here / ".swap/slurm").mkdir()
    (here / ".swap/slurm/swap-phase1-1.log").write_text("slurmstepd: error")
    waiting = here / ".swap/phase1" / ("2" * 20)
    waiting.mkdir()
    (waiting / "slurm_job").write_text('{"name": "swap-phase1-1", "index": null}')
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\n[ -e gone ] || echo '12|swap-phase1-1|PENDING|main|None|N/A'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    clean("--all", "--yes")
    kept = (here / ".swap/slurm").exists() and waiting.exists()
    (here / "gone").touch()
    clean("--all", "--yes")

    assert kept
    assert not (here / ".swap/slurm").exists() and not waiting.exists()


def test_where_it_cannot_be_known_what_is_needed_it_is_kept(here: Path) -> None:
    shutil.rmtree(here / "checkpoints/phase1")

    said = clean("--yes")

    assert "perhaps needed (checkpoints/phase1/model.safetensors is missing)" in said
    assert stages_in_scratch() == ALL_JOBS


@pytest.mark.usefixtures("here")
def test_with_params_that_are_not_valid_nothing_is_removed_unless_all_is_to_go() -> None:
    Path("params.yaml").write_text("phase1: 3\n")

    done = CliRunner().invoke(main, ["clean", "--yes"])
    kept = stages_in_scratch()
    clean("--all", "--yes")

    assert done.exit_code == 1 and "params.yaml" in done.output
    assert kept == ALL_JOBS
    assert stages_in_scratch() == {}


def test_files_that_are_no_jobs_and_what_links_lead_to_stay(here: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    (here / ".swap/phase1" / ("1" * 20)).symlink_to(elsewhere)
    (here / ".swap/phase1/notes.txt").write_text("mine")
    (here / ".swap/mine").mkdir()
    (here / ".swap/downloads").mkdir()
    (here / ".swap/downloads/cifar.tar.gz").write_bytes(b"x")

    clean("--yes")
    assert (here / ".swap/downloads/cifar.tar.gz").exists()
    clean("--all", "--yes")

    assert (elsewhere / "precious").read_text() == "mine"
    assert not (here / ".swap/phase1" / ("1" * 20)).is_symlink()
    assert (here / ".swap/phase1/notes.txt").exists()
    assert (here / ".swap/mine").exists()
    assert not (here / ".swap/downloads").exists()


def test_only_blocks_without_another_name_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "own").write_bytes(os.urandom(40_960))
    (folder / "shared").write_bytes(os.urandom(81_920))
    os.link(folder / "own", folder / "own again")
    os.link(folder / "shared", tmp_path / "model")

    assert freed_bytes(folder) == 40_960


def test_a_project_without_scratch_has_nothing_to_clean(project: Project) -> None:
    done = project.run(sys.executable, "-m", "swap_pipeline.cli", "clean")

    assert done.stdout.strip() == "nothing to remove"
