"""What the launcher on a login node makes of Slurm's answers, given by small scripts; tests/slurm has a real one."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path

import pytest

from swap_pipeline.config.instances import Instance
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.display import Display
from swap_pipeline.launch.jobs import CODE_FILE, Job, Machine
from swap_pipeline.launch.slurm import sbatch
from swap_pipeline.launch.slurm.cluster import Cluster
from swap_pipeline.launch.slurm.queue import Queue, Submitted
from swap_pipeline.launch.slurm.sbatch import Sbatch
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.stage_process import Interrupted

CLUSTER = Cluster(
    machine=Machine(device_type="cpu", devices=("0",), cores=1),
    gpu_type="",
    max_requeues=1,
    signal_seconds=30,
)
ACCEPTS = 'echo "$@" >> calls; env | grep SLURM_ >> calls; echo 12'
SILENT = 'echo "error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2; exit 1'


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with an odd name, and a place for programs."""
    folder = tmp_path / "50% of it"
    (folder / "bin").mkdir(parents=True)
    for name in os.environ:
        if name.startswith(("SLURM", "SWAP_", "DVC_ROOT")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    return folder


def program(name: str, script: str) -> None:
    path = Path("bin") / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def worker(seed: int) -> Job:
    folder = Path(".swap/phase2") / f"{seed:020x}"
    folder.mkdir(parents=True)
    return Job(
        instance=Instance(stage="phase2", seed=seed),
        device_type="cpu",
        processes=1,
        threads=1,
        num_devices=1,
        folder=JobFolder(folder),
    )


def display() -> Display:
    return Display(stream=io.StringIO())


def said(shown: Display) -> str:
    assert isinstance(shown.stream, io.StringIO)
    return shown.stream.getvalue()


def submitted(*seeds: int) -> tuple[Sbatch, list[Submitted]]:
    program("sbatch", ACCEPTS)
    place = Sbatch(CLUSTER)
    return place, place.start([worker(seed) for seed in seeds], room=1, display=display())


@pytest.mark.long
def test_an_array_of_many_workers_keeps_within_what_slurm_takes() -> None:
    _, works = submitted(*range(100))
    words = Path("calls").read_text()
    assert "--array=0-99%100" in words
    assert len(words.partition("--comment=")[2].split()[0]) <= 1024
    assert [works[0].number, works[99].number] == ["12_0", "12_99"]


def test_a_log_in_a_folder_with_a_per_cent_sign_is_where_slurm_will_put_it(project: Path) -> None:
    submitted(3)
    log = Path("calls").read_text().partition("--output=")[2].partition(" --open-mode")[0]
    assert log.startswith(f"{project.parent}/50%% of it/.swap/slurm/swap-phase2-") and log.endswith("-%a.log")


def test_a_launcher_inside_a_job_does_not_hand_that_job_s_variables_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "30")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    submitted(3)
    assert [line for line in Path("calls").read_text().splitlines() if line.startswith("SLURM_")] == [
        "SLURM_CONF=/etc/slurm/slurm.conf"
    ]


def test_what_ranks_read_reaches_them_also_where_sbatch_does_not_hand_the_environment_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"SWAP_SNAPSHOT_SECONDS": "60", "SWAP_KEEP_EPOCHS": "9", "SWAP_TENSORBOARD": "1", "SWAP_EVAL_BATCH": "50"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    script = sbatch._script([worker(3)], ["sbatch"]).splitlines()
    assert {line for line in script if line.startswith("export ")} == {f"export {k}={v}" for k, v in given.items()}


def test_a_bad_answer_of_squeue_is_waited_out() -> None:
    queue, shown = Queue(), display()
    program("squeue", 'echo "slurm_load_jobs error: Zero Bytes were transmitted or received" >&2; exit 1')
    assert not queue.refresh({"swap-1"}, shown)
    assert "squeue: Zero Bytes were transmitted or received: waiting for it; running jobs" in said(shown)
    program("squeue", 'echo "12|swap-1|RUNNING|main|None|N/A"')
    time.sleep(0.6)
    assert queue.refresh({"swap-1"}, shown)


def test_ctrl_c_cancels_also_what_has_not_been_seen_in_the_queue_and_says_if_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Display, "agrees", lambda self, question: "12_0, 12_1?" in question)
    place, _ = submitted(0, 1)
    program("scancel", 'echo "scancel: error: Unable to contact slurm controller (connect failure)" >&2; exit 1')
    answer = place.interrupted(signal.SIGINT, display())
    assert answer.startswith("interrupted, but not cancelled (scancel: Unable to contact slurm controller")
    program("scancel", 'echo "$@" > cancelled')
    assert place.interrupted(signal.SIGINT, display()).startswith("interrupted, jobs cancelled")
    assert Path("cancelled").read_text() == "12_0 12_1\n"


def test_a_failed_job_is_given_time_until_its_files_are_seen_and_only_logs_that_exist_are_named() -> None:
    place, (work,) = submitted(0)
    program("squeue", f'echo "12_0|{work.ticket.name}|FAILED|main|None|0"')
    place.watch(display())
    assert not work.is_over()
    (work.job.folder.path / CODE_FILE).write_text("1\n")
    assert work.is_over()
    (work.job.folder.path / "error_0.txt").write_text("no luck")
    failure = work.failure()
    assert failure is not None and failure.text == "phase2 seed 0: no luck\nlogs: none (Slurm job 12_0)"


def test_a_start_right_after_scancel_waits_for_the_end_and_submits_again() -> None:
    _, (first,) = submitted(0)
    first.release()
    name = first.ticket.name
    answer = f"12_0|{name}|$state|main|None|0"
    program("squeue", f'state=COMPLETING; [ -e asked ] && state=CANCELLED; touch asked; echo "{answer}"')
    shown = display()
    (second,) = Sbatch(CLUSTER).start([first.job], room=1, display=shown)
    assert "waiting for the end of Slurm job 12_0" in said(shown) and "submitted as Slurm job 12" in said(shown)
    assert second.ticket != first.ticket


def test_a_job_that_slurm_took_though_sbatch_failed_is_not_submitted_twice() -> None:
    job = worker(3)
    program("sbatch", 'echo "$@" >> calls; echo "sbatch: error: Unexpected message received" >&2; exit 1')
    with pytest.raises(SwapError, match=r"phase2 seed 3 could not be submitted \(sbatch: Unexpected message"):
        Sbatch(CLUSTER).start([job], room=1, display=display())
    name = Path("calls").read_text().partition("--job-name=")[2].split()[0]
    program("squeue", f'echo "12_0|{name}|RUNNING|main|None|0"')
    (work,) = Sbatch(CLUSTER).start([job], room=1, display=display())
    assert work.number == "12_0" and Path("calls").read_text().count("--job-name=") == 1


def test_a_controller_that_is_away_when_a_job_is_to_be_submitted_is_waited_for() -> None:
    place, shown, job = Sbatch(CLUSTER), display(), worker(3)
    program("squeue", "true")
    program("sbatch", SILENT)
    assert place.start([job], room=1, display=shown) == []
    assert "Unable to contact slurm controller (connect failure): waiting for it; running jobs" in said(shown)
    program("sbatch", ACCEPTS)
    assert place.start([job], room=1, display=shown) == []  # not asked again at once
    time.sleep(0.6)
    (work,) = place.start([job], room=1, display=shown)
    assert work.number == "12_0"
    assert len(said(shown).splitlines()) == 2


def test_a_controller_that_stays_away_is_told_in_a_line_and_its_jobs_are_left_to_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWAP_TIMEOUT_MINUTES", "0.005")
    place, shown, job = Sbatch(CLUSTER), display(), worker(3)
    program("squeue", "true")
    program("sbatch", SILENT)

    def try_for_ever() -> None:
        while True:
            assert place.start([job], room=1, display=shown) == []

    with pytest.raises(SwapError, match=r"^sbatch: .*controller.* for 0.005 minutes .*: nothing is lost; .*`dvc"):
        try_for_ever()
    program("sbatch", ACCEPTS)
    assert len(Sbatch(CLUSTER).start([job], room=1, display=shown)) == 1


def test_ctrl_c_while_a_job_is_being_submitted_says_that_it_may_be_in_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Sbatch(CLUSTER)
    assert place.interrupted(signal.SIGINT, display()) == "interrupted: no Slurm job is running"

    def ask(*command: str) -> str:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(sbatch, "ask", ask)
    with pytest.raises(Interrupted):
        place.start([worker(3)], room=1, display=display())
    assert place.interrupted(signal.SIGINT, display()) == (
        "interrupted: phase2 seed 3 may have been submitted, `dvc repro` finds it if so"
    )


def test_a_job_whose_time_ran_out_is_submitted_once_more_only_if_it_can_go_on_from_something() -> None:
    place, (work,) = submitted(0)
    program("squeue", f'echo "12_0|{work.ticket.name}|TIMEOUT|main|TimeLimit|0"')
    place.watch(display())
    assert work.is_over()
    failure = work.failure()
    assert failure is not None and not failure.may_pass and "raise sbatch.phase2.time" in failure.text
    (work.job.folder.path / "snapshot_0001.safetensors").touch()
    failure = work.failure()
    assert failure is not None and failure.may_pass


def test_a_job_that_ended_well_is_given_time_until_its_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    place, (work,) = submitted(0)
    program("squeue", f'echo "12_0|{work.ticket.name}|COMPLETED|main|None|0"')
    place.watch(display())
    (work.job.folder.path / CODE_FILE).write_text("0\n")
    assert not work.is_over()
    seen = iter([False, True])  # it comes into sight between two looks
    monkeypatch.setattr(JobFolder, "is_complete", property(lambda folder: next(seen)))
    assert work.failure() is None
