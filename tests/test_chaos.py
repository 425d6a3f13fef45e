"""A short chaos run; `make chaos` makes a long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos import FAULTS, TooLateError, inject, make_reference, may_mount
from conftest import Project
from filelock import FileLock

SHORT = ("SIGKILL of one rank of phase 1", "SIGKILL while a worker writes", "disk full in phase 2")
LONGER = (
    "read-only scratch",
    "a worker that hangs",
    "a rank of phase 1 that hangs",
    "dvc repro: SIGKILL of dvc alone",
    "dvc repro: a worker that always dies",
)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.getbasetemp().parent / "chaos"
    with FileLock(f"{folder}.lock"):
        if (folder / "finished").exists():
            return Project(folder / "reference", {"SWAP_NPROC": "2"})
        project = make_reference(folder)
        (folder / "finished").touch()
        return project


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONGER)])
def test_after_a_fault_the_next_start_ends_in_the_same_bytes(name: str, reference: Project, tmp_path: Path) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    if ("disk full" in name or "read-only" in name) and not may_mount():
        pytest.skip("small disks cannot be mounted here")
    for attempt in range(20):
        try:
            assert inject(fault, reference, tmp_path / "struck", random.Random(f"{name} {attempt}")) == 0
            return
        except TooLateError:
            continue
    pytest.fail("the fault always came too late")
