"""How job steps end, with a small script in place of `srun`; tests/slurm has a real one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from swap_pipeline.config.instances import worker
from swap_pipeline.launch.display import Display
from swap_pipeline.launch.jobs import Job, load
from swap_pipeline.launch.slurm import srun
from swap_pipeline.launch.slurm.srun import Srun, Step
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.progress import PROGRESS_FILE


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Step]:
    """Three, which would take a minute."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.chdir(tmp_path)
    jobs = [
        Job(
            instance=worker(seed),
            device_type="cpu",
            processes=1,
            threads=1,
            num_devices=1,
            folder=JobFolder(tmp_path / f"{seed:020x}"),
        )
        for seed in range(3)
    ]
    return Srun(devices_per_node=4).start(jobs, room=3, display=Display())


def seconds_to_end(steps: list[Step]) -> float:
    began = time.monotonic()
    for step in steps:
        step.ask_to_end()
    for step in steps:
        step.end()
    return time.monotonic() - began


def test_steps_that_have_not_begun_end_at_once(steps: list[Step]) -> None:
    assert seconds_to_end(steps) < 5


def test_steps_that_have_begun_are_given_time_together(steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun, "_PATIENCE_SECONDS", 2)
    for step in steps:
        (step.job.folder.path / PROGRESS_FILE).touch()
    assert 2 <= seconds_to_end(steps) < 4


def test_a_step_leaves_word_of_what_it_is(steps: list[Step]) -> None:
    seconds_to_end(steps)
    assert [load(step.job.folder.path) for step in steps] == [(step.job, {}) for step in steps]
