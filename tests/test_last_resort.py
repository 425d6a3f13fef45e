"""Unexpected errors: one line that names the operation, and a traceback with SWAP_DEBUG=1."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Project, assert_one_line

from swap_pipeline.runtime.last_resort import line_of

SABOTAGE = """
import errno, hashlib, os, pathlib, sys

def fail(*arguments, **options):
    raise {error}

if ("RANK" in os.environ) == {in_rank}:
    {target} = fail
"""


def sabotaged(project: Project, *, target: str, error: str, in_rank: bool) -> str:
    """A PYTHONPATH with which a function fails in every launcher, or in every rank."""
    folder = project.root.parent / "sabotage"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SABOTAGE.format(target=target, error=error, in_rank=in_rank))
    return f"{folder}:{project.root}"


def a_file(path: Path) -> None:
    path.write_text("in the way")


def a_broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("put", [a_file, a_broken_link])
@pytest.mark.parametrize("name", [".swap", "checkpoints", "metrics"])
def test_what_is_in_the_place_of_a_folder_is_named(finished: Project, name: str, put: object) -> None:
    path = finished.root / name
    path.rename(finished.root.parent / "aside")
    if name != ".swap":  # what was trained is there, and has to be put into its place
        assert (finished.root / ".swap").is_dir()
    assert callable(put)
    put(path)

    assert_one_line(finished.stage("phase1"), f"phase1: {name} must be a folder, but is something else")


@pytest.mark.parametrize("number", ["EIO", "ESTALE"])
def test_a_disk_that_fails_the_launcher_is_said_in_a_line(finished: Project, number: str) -> None:
    error = f"OSError(errno.{number}, os.strerror(errno.{number}), 'data/prepared/x')"
    path = sabotaged(finished, target="hashlib.file_digest", error=error, in_rank=False)

    plain = finished.stage("phase1", PYTHONPATH=path)
    debugged = finished.stage("phase1", PYTHONPATH=path, SWAP_DEBUG="1")

    said = os.strerror(getattr(errno, number))
    assert_one_line(plain, "phase1: ", said, "'data/prepared/x'", "check disk and network", "SWAP_DEBUG=1")
    assert "Traceback" in debugged.stderr and "in hash_of" in debugged.stderr
    assert debugged.stderr.splitlines()[-1] + "\n" == plain.stderr


def test_a_disk_that_fails_a_rank_is_said_in_a_line_after_a_second_try(finished: Project) -> None:
    finished.set_params({"seed": 5})
    error = "OSError(errno.EIO, os.strerror(errno.EIO), 'model.safetensors')"
    path = sabotaged(finished, target="os.fsync", error=error, in_rank=True)

    done = finished.stage("phase1", PYTHONPATH=path)

    assert "phase1: restarting it" in done.stdout
    assert_one_line(done, "unexpected error in rank 0: ", "Input/output error", "'model.safetensors'", "SWAP_DEBUG=1")
    (log,) = (log for log in (finished.root / ".swap/phase1").glob("*/stderr.log") if "Traceback" in log.read_text())
    assert "Input/output error" in log.read_text()


def test_a_bug_keeps_its_traceback(finished: Project) -> None:
    path = sabotaged(finished, target="hashlib.file_digest", error="TypeError('a bug')", in_rank=False)

    done = finished.stage("phase1", PYTHONPATH=path)

    assert "Traceback" in done.stderr and "TypeError: a bug" in done.stderr


@pytest.mark.parametrize("error", ["MemoryError()", "ValueError('digits')"])
def test_memory_and_values_are_said_in_a_line(finished: Project, error: str) -> None:
    path = sabotaged(finished, target="hashlib.file_digest", error=error, in_rank=False)

    words = "not enough memory" if "Memory" in error else "ValueError: digits"
    assert_one_line(finished.stage("phase1", PYTHONPATH=path), f"phase1: {words} (SWAP_DEBUG=1 shows where)")


def test_commands_say_it_in_a_line_too(finished: Project) -> None:
    path = sabotaged(finished, target="pathlib.Path.glob", error="OSError(errno.EIO, 'it broke')", in_rank=False)
    command = (sys.executable, "-m", "swap_pipeline.cli", "use")

    plain = finished.run(*command, check=False, PYTHONPATH=path)
    debugged = finished.run(*command, check=False, PYTHONPATH=path, SWAP_DEBUG="1")

    assert_one_line(plain, "swap use: [Errno 5] it broke: check disk and network", "SWAP_DEBUG=1")
    assert "Traceback" in debugged.stderr and "in list_recipes" in debugged.stderr


@pytest.mark.parametrize("limit", [6, 20, 100])
def test_too_few_open_files_are_said(finished: Project, limit: int) -> None:
    finished.set_params({"seed": 5})
    command = f"ulimit -n {limit}; exec {sys.executable} -m stages.phase1"

    assert_one_line(
        finished.run("sh", "-c", command, check=False, SWAP_NPROC="2"), "raise the limit (`ulimit -n 1024`)"
    )


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter(finished: Project, streams: str) -> None:
    finished.set_params({"seed": 5, "phase1.max_epochs": 1, "phase1.keep_epochs": []})
    python = sys.executable

    stage = finished.run("sh", "-c", f"exec {python} -m stages.phase1 {streams}", check=False)
    command = finished.run("sh", "-c", f"exec {python} -m swap_pipeline.cli check {streams}", check=False)

    assert (stage.returncode, command.returncode) == (0, 0), stage.stderr + command.stderr
    assert finished.json("metrics/phase1.json")["epochs"] == 1


@pytest.mark.parametrize("reader", ["2>&1 | true", "| head -c 5", "| (sleep 3; head -n 1)", "> /dev/full 2>&1"])
def test_a_reader_that_leaves_does_not_end_the_training(finished: Project, reader: str) -> None:
    finished.set_params({"seed": 5, "phase1.max_epochs": 1, "phase1.keep_epochs": []})

    command = f"set -o pipefail; {sys.executable} -m stages.phase1 {reader}"
    done = finished.run("bash", "-c", command, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert finished.json("metrics/phase1.json")["epochs"] == 1


def test_a_terminal_that_is_closed_does_not_end_the_training(finished: Project) -> None:
    finished.set_params({"seed": 5, "phase1.max_epochs": 1, "phase1.keep_epochs": []})
    ours, theirs = os.openpty()
    stage = subprocess.Popen(
        [sys.executable, "-m", "stages.phase1"],
        cwd=finished.root,
        env=finished.full_environment(),
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.close(ours)

    assert stage.wait(timeout=300) == 0
    assert finished.json("metrics/phase1.json")["epochs"] == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SWAP_JOB": "/gone"}, ["SWAP_JOB left over from another job", "unset SWAP_JOB"]),
        ({"TORCHELASTIC_RUN_ID": "none"}, ["TORCHELASTIC_RUN_ID left over from", "unset TORCHELASTIC_RUN_ID"]),
        ({"SWAP_JOB": "/gone", "RANK": "0"}, ["SWAP_JOB left over from another job", "without WORLD_SIZE"]),
        ({"SWAP_JOB": "/gone", "RANK": "9" * 5000, "WORLD_SIZE": "x"}, ["SWAP_JOB left over from another job"]),
        ({"SWAP_JOB": "/gone", "RANK": "0", "WORLD_SIZE": "1"}, ["without SWAP_WORLD_SIZE", "unset SWAP_JOB"]),
        ({"SWAP_JOB": "/gone", "SWAP_PARENT_PID": "1234567"}, ["SWAP_PARENT_PID is 1234567, a process that is gone"]),
    ],
)
def test_variables_that_another_job_left_behind_are_named(
    finished: Project, variables: dict[str, str], words: list[str]
) -> None:
    assert_one_line(finished.stage("phase1", **variables), *words)


def test_numbers_with_thousands_of_digits_are_refused_wherever_one_is_asked_for(finished: Project) -> None:
    digits = "9" * 5000
    for arguments in (
        ("plan", "--gpus", digits),
        ("plan", "--images-per-second", digits),
        ("predict", "x.png", "--top", digits),
    ):
        done = finished.run(sys.executable, "-m", "swap_pipeline.cli", *arguments, check=False)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert_one_line(finished.stage("phase2", "--seed", digits), "is not in workers.seeds")


@pytest.mark.long
def test_in_the_project_of_somebody_else_the_word_of_git_is_passed_on(finished: Project) -> None:
    for command in ("doctor", "compare"):
        done = finished.swap(command, GIT_TEST_ASSUME_DIFFERENT_OWNER="1")

        assert "this project belongs to another user" in done.stdout + done.stderr
        assert "git init" not in done.stdout and "Traceback" not in done.stderr


def test_in_the_project_of_somebody_else_the_rights_are_named() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/home/ann/project/.swap")

    said = line_of(error, doing="phase1")

    assert said.startswith("phase1: /home/ann/project/.swap cannot be used (Permission denied): give this user")
    assert said.endswith("then run `dvc repro` again; it resumes")
    assert line_of(error, doing="swap use").endswith("write permission, then try again")
