"""What a machine is taken to have, and what is left alone."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from swap_pipeline import environment, launch, ranks
from swap_pipeline.errors import SwapError
from swap_pipeline.instances import Instance
from swap_pipeline.jobs import Job
from swap_pipeline.launch import Machine, baseline_job, job_on_all_devices, this_machine, worker_job
from swap_pipeline.scratch import JobFolder, Lock

PHASE1 = Instance(method="phase1")


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: the one thing that is made up is the driver's answer, and that nothing is hashed."""
    for name in ("SWAP_DEVICE", "SWAP_NPROC", "SWAP_SLOTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "_gpus", lambda: tuple("01234567"))
    monkeypatch.setattr(environment, "num_cores", lambda: 64)
    monkeypatch.setattr(launch, "job_folder", lambda instance, **_: JobFolder(launch.Path(instance.stage)))


@pytest.mark.usefixtures("eight_gpus")
def test_phase_1_has_all_gpus_and_a_worker_has_its_own() -> None:
    assert this_machine() == Machine(device_type="cuda", devices=tuple("01234567"), cores=64)
    phase1, worker = (
        job_on_all_devices(PHASE1, batch_size=480),
        worker_job(Instance(method="phase2", seed=3), processes=2, batch_size=96),
    )
    assert (phase1.processes, phase1.threads, phase1.num_devices) == (8, 8, 8)
    assert (worker.processes, worker.threads, worker.num_devices) == (2, 8, 2)
    assert worker.instance.command == ("stages.phase2", "--seed", "3")


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(("gpus", "processes"), [(1, 1), (2, 2), (8, 8), (16, 8)])
def test_a_baseline_has_the_gpus_it_asks_for_as_far_as_there_are_any(gpus: int, processes: int) -> None:
    job = baseline_job(Instance(method="small_batch"), gpus=gpus, batch_size=512)
    assert (job.processes, job.num_devices, job.threads) == (processes, processes, 8)


@pytest.mark.usefixtures("eight_gpus")
def test_a_baseline_that_its_gpus_cannot_share_names_the_right_knob() -> None:
    with pytest.raises(SwapError, match=r"small_batch.batch_size is 512, .* 3 processes .* set small_batch.gpus to 2"):
        baseline_job(Instance(method="small_batch"), gpus=3, batch_size=512)
    with pytest.raises(SwapError, match=r"large_batch.batch_size is 500, .* 8 processes"):
        baseline_job(Instance(method="swa_large_batch"), section="large_batch", gpus=8, batch_size=500)


@pytest.mark.parametrize(("gpus", "processes", "threads"), [(1, 1, 1), (2, 2, 8), (8, 2, 8)])
def test_a_baseline_on_a_cpu_has_one_core_or_all(
    monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int, threads: int
) -> None:
    monkeypatch.setenv("SWAP_DEVICE", "cpu")
    monkeypatch.delenv("SWAP_NPROC", raising=False)
    monkeypatch.setattr(environment, "num_cores", lambda: 16)
    monkeypatch.setattr(launch, "job_folder", lambda instance, **_: JobFolder(launch.Path(instance.stage)))
    job = baseline_job(Instance(method="large_batch"), gpus=gpus, batch_size=1024)
    assert (job.processes, job.threads, job.num_devices) == (processes, threads, 1 if gpus == 1 else 16)


@pytest.mark.usefixtures("eight_gpus")
def test_a_limit_on_workers_leaves_phase_1_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAP_SLOTS", "2")
    assert job_on_all_devices(PHASE1, batch_size=480).processes == 8


@pytest.mark.usefixtures("eight_gpus")
def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAP_NPROC", "16")
    with pytest.raises(SwapError, match="SWAP_NPROC is 16, but there are 8 GPUs"):
        job_on_all_devices(PHASE1)


@pytest.mark.parametrize(("cores", "processes", "threads"), [(1, 1, 1), (2, 2, 1), (64, 2, 32)])
def test_on_a_cpu_two_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, threads: int
) -> None:
    monkeypatch.setenv("SWAP_DEVICE", "cpu")
    monkeypatch.delenv("SWAP_NPROC", raising=False)
    monkeypatch.setattr(environment, "num_cores", lambda: cores)
    monkeypatch.setattr(launch, "job_folder", lambda instance, **_: JobFolder(launch.Path(instance.stage)))
    phase1, worker = (
        job_on_all_devices(PHASE1),
        worker_job(Instance(method="phase2", seed=0), processes=1, batch_size=96),
    )
    assert (phase1.processes, phase1.threads, phase1.num_devices) == (processes, threads, cores)
    assert (worker.threads, worker.num_devices) == (1, 1)


def test_nohup_stays_in_force_and_other_signals_become_exceptions() -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ranks.signals_as_exceptions():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(ranks.Interrupted):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, old)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_lock_that_a_child_process_inherited_can_be_given_up(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    assert lock.try_acquire()
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        lock.release()
        assert Lock(tmp_path / "lock").try_acquire()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_launcher_whose_dvc_was_killed_starts_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(
        instance=PHASE1, device_type="cpu", processes=1, threads=1, num_devices=1, folder=JobFolder(Path("scratch"))
    )
    monkeypatch.setattr(ranks, "_STARTED_BY", -1)
    assert launch.run_jobs([job]) == {}
    assert not job.folder.path.exists()


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_collected_again_after_imports_also_failed_ones_if_it_was_before(was_on: bool) -> None:
    def fail() -> None:
        with ranks.quick_imports():
            assert not gc.isenabled()
            raise ImportError

    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
        gc.unfreeze()
