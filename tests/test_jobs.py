"""What became of a job: what its ranks, its logs and its silence are taken to mean."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swap_pipeline.config.instances import PHASE1
from swap_pipeline.launch.jobs import STDERR_FILE, Job, why_incomplete
from swap_pipeline.launch.local import LocalRun
from swap_pipeline.launch.pulse import Pulse
from swap_pipeline.runtime import stage_process
from swap_pipeline.runtime.job_folder import JobFolder


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Of three ranks, whose limit is half an hour."""
    monkeypatch.delenv("SWAP_TIMEOUT_MINUTES", raising=False)
    folder = JobFolder(tmp_path)
    return Job(instance=PHASE1, device_type="cuda", processes=3, threads=1, num_devices=3, folder=folder)


def told_of(job: Job, code: int) -> tuple[str, bool]:
    failure = why_incomplete(job, code)
    assert failure is not None
    return failure.text, failure.may_pass


def test_where_nccl_ends_the_ranks_that_wait_the_one_they_waited_for_is_named(job: Job) -> None:
    log = "".join(
        f"[rank{rank}]:[E1117 10:00:00.0 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800085 milliseconds\n"
        for rank in (0, 2)
    )
    root_cause = "Root Cause (first observed failure):\n  rank      : 0 (local_rank: 0)\n  exitcode  : -6 (pid: 1)\n"
    (job.folder.path / STDERR_FILE).write_text(log + root_cause)

    text, may_pass = told_of(job, 1)

    assert text.startswith("phase1 was killed: rank 1 did not answer for 30 minutes (SWAP_TIMEOUT_MINUTES): ")
    assert "\n" not in text
    assert may_pass


@pytest.mark.parametrize(
    "words",
    [
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version "
        "2.28.9\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting early.",
        "NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.28.9\nncclSystemError: System call "
        "(e.g. socket, malloc) or external library call failed or device error.",
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but got error: Failed to recv, got 0 bytes. Connection was likely closed.",
        "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:41217",
    ],
    ids=["NCCL, remote", "NCCL, system", "store", "gloo"],
)
def test_a_rank_whose_peer_is_gone_leaves_it_to_others_to_say_why(
    words: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SWAP_JOB": str(job.folder.path), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stage_process.time, "sleep", lambda seconds: None)
    stage_process._tell_launcher(RuntimeError(words))
    assert [path.name for path in job.folder.path.iterdir()] == ["lost_0.txt"]
    report = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 1)\n"
    (job.folder.path / STDERR_FILE).write_text(report)

    assert told_of(job, 1)[0].startswith("phase1 failed: its rank 1 was killed by signal 9")


def test_a_rank_that_was_killed_is_told_in_one_line_with_the_way_out(job: Job) -> None:
    report = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 1)\n"
    (job.folder.path / STDERR_FILE).write_text(report)

    text, _ = told_of(job, 1)

    assert text.startswith("phase1 failed: its rank 1 was killed by signal 9, as the system does when memory runs out")
    assert "lower batch_size" in text and "`dvc repro` resumes" in text
    assert "\n" not in text


def test_any_other_end_shows_the_end_of_the_log(job: Job) -> None:
    (job.folder.path / STDERR_FILE).write_text("Fatal Python error: Segmentation fault\n")
    text, _ = told_of(job, -11)
    assert text.splitlines() == [
        f"phase1 was killed by signal 11; the end of {job.folder.path / STDERR_FILE}:",
        "Fatal Python error: Segmentation fault",
    ]


def test_an_error_that_found_no_room_on_the_disk_is_not_taken_for_one_without_words(job: Job) -> None:
    (job.folder.path / "error_0.txt").touch()
    (job.folder.path / "error_1.txt").write_text("no space left on the disk")
    assert told_of(job, 1) == ("no space left on the disk", False)


RANK_OF_ITS_OWN_SESSION = """
import pathlib, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path("rank").write_text(str(rank.pid))
rank.wait()
"""


@pytest.mark.parametrize("is_complete", [True, False])
def test_ranks_that_hang_are_killed_once_the_result_is_complete_and_not_before(
    job: Job, is_complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWAP_TIMEOUT_MINUTES", "0.01")
    monkeypatch.chdir(job.folder.path)
    if is_complete:
        job.folder.result.mkdir()
    run = LocalRun(job, [sys.executable, "-c", RANK_OF_ITS_OWN_SESSION], dict(os.environ), [])
    while not (job.folder.path / "rank").is_file() or not (job.folder.path / "rank").read_text():
        time.sleep(0.02)
    rank = psutil.Process(int((job.folder.path / "rank").read_text()))
    try:
        deadline = time.monotonic() + (30 if is_complete else 2)
        while time.monotonic() < deadline and not run.is_over():
            time.sleep(0.05)
        assert run.is_over() == is_complete
        if is_complete:
            assert run.failure() is None
            rank.wait(timeout=10)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        run.end()


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", request.param], start_new_session=True)
    time.sleep(0.3)
    yield process
    process.kill()
    process.wait()


def is_lost_within(pulse: Pulse, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if pulse.is_lost():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("child", ["import time; time.sleep(60)"], indirect=True)
def test_a_process_that_neither_computes_nor_writes_is_lost(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert is_lost_within(Pulse(child.pid, [tmp_path / "log"], limit_seconds=0.8), 10)


@pytest.mark.parametrize("child", ["while True: pass"], indirect=True)
def test_a_process_that_computes_is_not_lost(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert not is_lost_within(Pulse(child.pid, [tmp_path / "log"], limit_seconds=0.8), 3)


BUSY_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


@pytest.mark.parametrize("child", [BUSY_CHILD], indirect=True)
def test_nor_is_one_whose_helper_computes(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    try:
        assert not is_lost_within(Pulse(child.pid, [tmp_path / "log"], limit_seconds=0.8), 3)
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(child.pid)], check=True)


@pytest.mark.parametrize("child", ["import time; time.sleep(60)"], indirect=True)
def test_nor_is_one_that_writes(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    pulse = Pulse(child.pid, [tmp_path / "log"], limit_seconds=0.8)
    for number in range(30):
        (tmp_path / "log").write_text(str(number))
        assert not is_lost_within(pulse, 0.1)


def test_a_signal_before_any_job_is_at_work_ends_in_a_line_and_the_usual_code() -> None:
    code = """
from swap_pipeline.runtime.stage_process import Interrupted, run_stage
def main():
    raise Interrupted(2)
run_stage(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout == "interrupted: `dvc repro` resumes from here\n"
