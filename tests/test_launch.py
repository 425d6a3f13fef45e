"""What a machine is taken to have, and what is left alone."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from swap_pipeline.config.instances import PHASE1, Instance, worker
from swap_pipeline.errors import SwapError
from swap_pipeline.launch import stage_jobs
from swap_pipeline.launch.devices import mps_runs, share_of_phase1, share_of_worker, this_machine
from swap_pipeline.launch.jobs import Job, Machine
from swap_pipeline.launch.local import Local
from swap_pipeline.launch.stage_jobs import job_with
from swap_pipeline.runtime import environment, gpus, rank, stage_process
from swap_pipeline.runtime.gpus import Gpu, Gpus
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.locks import Lock


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: the one thing that is made up is the driver's answer, and that nothing is hashed."""
    for name in ("SWAP_DEVICE", "SWAP_NPROC", "SWAP_SLOTS"):
        monkeypatch.delenv(name, raising=False)
    found = tuple(Gpu(name=name, uuid=name, model="H100", capability=(9, 0)) for name in "01234567")
    monkeypatch.setattr(gpus, "look", lambda: Gpus(found=found))
    monkeypatch.setattr(environment, "num_cores", lambda: 64)
    monkeypatch.setattr(stage_jobs, "job_folder", lambda instance, **_: JobFolder(Path(instance.stage)))


@pytest.mark.usefixtures("eight_gpus")
def test_phase_1_has_all_gpus_and_a_worker_has_its_own() -> None:
    machine = this_machine()
    assert (machine.device_type, machine.devices, machine.cores) == ("cuda", tuple("01234567"), 64)
    phase1 = job_with(PHASE1, share_of_phase1(machine, shards=8))
    own = job_with(worker(3), share_of_worker(machine, shards=2))
    assert (phase1.processes, phase1.threads, phase1.num_devices) == (8, 8, 8)
    assert (own.processes, own.threads, own.num_devices) == (2, 8, 2)
    assert own.instance.command == ("stages.phase2", "--seed", "3")


@pytest.mark.usefixtures("eight_gpus")
def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(SwapError, match="SWAP_NPROC is 16, but there are 8 GPUs"):
        share_of_phase1(this_machine(), shards=8, at_most=16)


def a_job(instance: Instance, folder: Path, num_devices: int = 1) -> Job:
    place = JobFolder(folder / instance.name.replace(" ", "_"))
    place.path.mkdir(parents=True, exist_ok=True)
    return Job(instance=instance, device_type="cuda", processes=1, threads=1, num_devices=num_devices, folder=place)


@pytest.mark.parametrize(
    ("places", "expected"),
    [("1", ["0", "1"]), ("2", ["0", "1", "0", "1"]), ("3", ["0", "1", "0", "1", "0", "1"])],
)
def test_workers_share_gpus_of_which_each_gets_its_first_before_any_gets_a_second(
    places: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWAP_WORKERS_PER_GPU", places)
    machine = Machine(device_type="cuda", devices=("0", "1"), cores=4)
    # Each has its own launcher, as two experiments have.
    held = [Local(machine)._free_devices(a_job(worker(seed), tmp_path)) for seed in range(7)]

    assert [device for devices, _ in held for device in devices] == expected
    phase1 = a_job(PHASE1, tmp_path)
    assert Local(machine)._free_devices(phase1) == ([], []), "phase 1 has its GPUs for itself"
    for _, locks in held[1::2]:  # those on the second GPU
        for lock in locks:
            lock.release()
    assert Local(machine)._free_devices(phase1)[0] == ["1"]
    assert Local(machine)._free_devices(a_job(worker(9), tmp_path))[0] == []


def test_a_worker_that_needs_two_gpus_never_gets_one_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWAP_WORKERS_PER_GPU", "2")
    place = Local(Machine(device_type="cuda", devices=("0", "1"), cores=4))
    held = [place._free_devices(a_job(worker(seed), tmp_path, num_devices=2)) for seed in range(3)]
    assert [devices for devices, _ in held] == [["0", "1"], ["0", "1"], []]


def test_mps_runs_if_its_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert mps_runs()
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("999999999\n")
    assert not mps_runs()


def test_nohup_stays_in_force_and_other_signals_become_exceptions() -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stage_process.signals_as_exceptions():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(stage_process.Interrupted):
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
    monkeypatch.setattr(stage_process, "_STARTED_BY", -1)
    assert stage_jobs.run_jobs([job]) == {}
    assert not job.folder.path.exists()


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_collected_again_after_imports_also_failed_ones_if_it_was_before(was_on: bool) -> None:
    def fail() -> None:
        with rank.quick_imports():
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
