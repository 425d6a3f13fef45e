"""What only GPUs can show: `make test-gpu`. A test that needs more of them than there are is skipped and says so.

The bodies run on a CPU too: `SWAP_TEST_DEVICE=cpu pytest -m gpu tests/gpu` takes cores over gloo for GPUs, and leaves
out what is about CUDA alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import on_devices
import pytest
import torch
from conftest import Project, processes_in, wait_until
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("SWAP_TEST_DEVICE", "cuda")
COUNT = torch.cuda.device_count() if DEVICE == "cuda" else 8
ON_GPU = DEVICE == "cuda"


def has_bf16() -> bool:
    return not ON_GPU or (COUNT > 0 and torch.cuda.is_bf16_supported(including_emulation=False))


@pytest.fixture(autouse=True)
def enough(request: pytest.FixtureRequest) -> None:
    """As many GPUs as `@pytest.mark.parametrize("processes", …)` or the name of a test asks for."""
    called = getattr(request.node, "callspec", None)
    need = called.params.get("processes", 1) if called else 1
    need = max(need, 2 if "several" in request.node.name else 1)
    if need > COUNT:
        pytest.skip(f"needs {need} GPU{'s' if need > 1 else ''}, there {'is 1' if COUNT == 1 else f'are {COUNT}'}")
    if "cuda_alone" in request.fixturenames and not ON_GPU:
        pytest.skip("is about CUDA alone")


@pytest.fixture
def cuda_alone() -> None:
    """For tests that mean nothing on a CPU."""


def run(body: str, *, processes: int = 1, **arguments: Any) -> Any:
    return on_devices.run(body, processes=processes, device=DEVICE, **arguments)


def close(one: Path, other: Path, *, rtol: float, atol: float) -> None:
    first, second = load_file(one), load_file(other)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# --- ranks


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_sums_over_ranks_are_exact(processes: int) -> None:
    assert run("exchange", processes=processes) == []


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_any_number_of_ranks_ends_where_one_ends(processes: int, tmp_path: Path) -> None:
    for count in (1, processes):
        run("train", processes=count, shards=8, out=str(tmp_path / f"{count}.safetensors"))
    close(tmp_path / "1.safetensors", tmp_path / f"{processes}.safetensors", rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_statistics_are_those_of_one_rank(processes: int, tmp_path: Path) -> None:
    for count in (1, processes):
        run("statistics", processes=count, out=str(tmp_path / f"{count}.safetensors"))
    close(tmp_path / "1.safetensors", tmp_path / f"{processes}.safetensors", rtol=1e-6, atol=1e-6)


# --- the same bytes


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_deterministic_runs_end_in_the_same_bytes(processes: int, precision: str) -> None:
    if precision == "bf16" and not has_bf16():
        pytest.skip("this GPU has no bf16")
    digests = {run("train", processes=processes, shards=8, precision=precision)["digest"] for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize("processes", [2, 8])
def test_a_deterministic_run_does_without_nvlink_s_own_sums(processes: int, cuda_alone: None) -> None:
    done = on_devices.start(
        "exchange", processes=processes, device=DEVICE, variables={"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"}
    )
    assert done.returncode == 0, done.stderr
    assert "NCCL INFO" in done.stdout
    assert "Connected NVLS tree" not in done.stdout and "NVLS comm 0x" not in done.stdout


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("moment", [(1, 0), (1, 2)], ids=["after an epoch", "in the middle"])
def test_a_killed_run_ends_in_the_same_bytes(
    processes: int, precision: str, moment: tuple[int, int], tmp_path: Path
) -> None:
    """fp16's scale is in what is compared: with another one, gradients round otherwise."""
    arguments: dict[str, Any] = {"shards": 2, "precision": precision, "epochs": 3, "steps": 4}
    whole = run("train", processes=processes, **arguments)
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    killed = on_devices.start(
        "train",
        processes=processes,
        device=DEVICE,
        snapshots=str(snapshots),
        kill=[*moment, processes - 1],
        variables={"SWAP_SNAPSHOT_SECONDS": "0"},
        **arguments,
    )
    assert killed.returncode != 0
    assert list(snapshots.glob("snapshot_*")), "nothing to resume from"

    resumed = run("train", processes=processes, snapshots=str(snapshots), **arguments)

    assert (resumed["digest"], resumed["losses"]) == (whole["digest"], whole["losses"])


# --- values


@pytest.mark.parametrize("compiled", [False, True, "reduce-overhead"], ids=["plain", "compiled", "reduce-overhead"])
@pytest.mark.parametrize("channels_last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_learns(precision: str, channels_last: bool, compiled: bool | str) -> None:
    if precision == "bf16" and not has_bf16():
        pytest.skip("this GPU has no bf16")
    if not ON_GPU and (precision == "tf32" or compiled):
        pytest.skip("is about CUDA alone")
    losses = run("train", shards=2, learns=True, precision=precision, channels_last=channels_last, compiled=compiled)[
        "losses"
    ]
    assert losses[-1] < 0.9 * losses[0], losses


def test_fp32_is_near_the_cpu(tmp_path: Path, cuda_alone: None) -> None:
    on_devices.run("train", processes=1, device="cpu", shards=2, out=str(tmp_path / "cpu.safetensors"))
    run("train", shards=2, out=str(tmp_path / "gpu.safetensors"))
    close(tmp_path / "cpu.safetensors", tmp_path / "gpu.safetensors", rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("step", [1, 7])
def test_gradients_that_are_not_finite_leave_weights_and_momentum_and_are_named(step: int) -> None:
    found = run("not_finite", step=step)
    assert f"not finite at epoch 1, step {step + 1};" in found["said"]
    assert found["distance"] == 0
    assert found["untouched"]


# --- speed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_forty_steps_in_a_row_do_not_wait_for_the_gpu(precision: str) -> None:
    if precision != "fp32" and not ON_GPU:
        pytest.skip("is about CUDA alone")
    if precision == "bf16" and not has_bf16():
        pytest.skip("this GPU has no bf16")
    assert run("waiting", precision=precision)


@pytest.mark.parametrize(("batch_size", "share"), [(512, 0.95), (128, 0.85)])
def test_the_loop_is_nearly_as_fast_as_a_bare_one(batch_size: int, share: float) -> None:
    size = {"width": 64, "steps": 100} if ON_GPU else {"width": 2, "steps": 4}
    found = run("speed", batch_size=batch_size if ON_GPU else 16, precision="auto", **size)
    if ON_GPU:
        assert found["ours"] >= share * found["bare"], found


# --- what goes wrong


@pytest.mark.parametrize("processes", [1, 2])
def test_a_batch_that_does_not_fit_ends_in_its_line_and_leaves_no_process(processes: int, cuda_alone: None) -> None:
    done = on_devices.start("out_of_memory", processes=processes, device=DEVICE)
    assert done.returncode != 0
    assert "did not fit into memory: " in done.stderr
    left = subprocess.run(["pgrep", "-f", "on_devices.py out_of_memory"], capture_output=True, text=True).stdout
    assert left == ""


def gpu_project(project: Project, **values: Any) -> Project:
    project.environment = {"SWAP_DEVICE": DEVICE, "SWAP_NPROC": "2"}
    project.set_params(values)
    return project


def test_a_killed_rank_of_several_is_named(project: Project) -> None:
    gpu_project(project, **{"phase1.shards": 2, "phase1.max_epochs": 200, "phase1.keep_epochs": []})
    project.run("dvc", "repro", "prepare")
    stage = subprocess.Popen(
        [sys.executable, "-m", "stages.phase1"],
        cwd=project.root,
        env=project.full_environment({"SWAP_RETRIES": "0"}),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: list(project.root.glob(".swap/phase1/*/snapshot_*")), seconds=300)
        ranks = {rank: pid for pid in processes_in(project.root) if (rank := rank_of(pid)) is not None}
        os.kill(ranks["1"], signal.SIGKILL)
        _, said = stage.communicate(timeout=120)
    finally:
        stage.kill()
    assert "rank 1 was killed by signal 9" in said, said
    time.sleep(1)
    assert processes_in(project.root) == []


def rank_of(pid: int) -> str | None:
    try:
        variables = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
        )
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return None
    return variables.get("RANK") if "stages.phase1" in command and "LOCAL_RANK" in variables else None


def test_workers_on_several_gpus_end_in_the_bytes_of_workers_one_after_another(
    project: Project, tmp_path: Path
) -> None:
    gpu_project(project, **{"workers.seeds": [0, 1, 2, 3]})
    other = project.copy_to(tmp_path / "other")

    project.dvc("repro", "phase3")
    other.dvc("repro", "phase3", SWAP_SLOTS="1")

    for seed in range(4):
        path = f"checkpoints/phase2/seed_{seed}/model.safetensors"
        assert project.bytes_of(path) == other.bytes_of(path)
