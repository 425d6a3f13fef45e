"""GPUs as a driver tells of them: which of them jobs get, and the one line where they cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project, assert_one_line
from stand_in_driver import driver  # noqa: F401

from swap_pipeline.errors import SwapError
from swap_pipeline.runtime import gpus
from swap_pipeline.runtime.environment import device_type
from swap_pipeline.runtime.gpus import Built, built_for, unfit

# Of a CPU build the drivers' lines say only that.
needs_cuda_build = pytest.mark.skipif(not built_for().cuda, reason="torch is a CPU build")
UUID = "ab000000-0000-0000-0000-0000000000{:02x}"
KERNELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def machine(driver: dict[str, str], tmp_path: Path) -> Any:  # noqa: F811
    """`machine(code, variable=value)`: what code prints in a process that has the stand-in driver, read as JSON."""

    def run(code: str, **variables: str) -> Any:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SWAP_", "CUDA_", "DVC_", "SLURM_"))}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": str(ROOT), **driver, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


MACHINE = """
import json, sys
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import local_machine
try:
    machine = local_machine()
    print(json.dumps([machine.device_type, list(machine.devices), dict(machine.uuids), "torch" in sys.modules]))
except SwapError as error:
    print(json.dumps(str(error)))
"""


@needs_cuda_build
@pytest.mark.parametrize(
    ("visible", "names", "which"),
    [
        (None, [*"01234567"], range(8)),
        ("3,1", ["3", "1"], (3, 1)),
        (
            f"GPU-{UUID.format(5)}, GPU-{UUID.format(2)}".replace(" ", ""),
            [f"GPU-{UUID.format(n)}" for n in (5, 2)],
            (5, 2),
        ),
    ],
    ids=["all", "by index", "by UUID"],
)
def test_the_gpus_that_a_process_may_use_are_found_without_torch(
    machine: Any, visible: str | None, names: list[str], which: Any
) -> None:
    found = machine(MACHINE, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))

    uuids = {name: UUID.format(number) for name, number in zip(names, which, strict=True)}
    assert found == ["cuda", names, uuids, False]


@pytest.mark.parametrize("variables", [{"STAND_IN_GPUS": "0"}, {"CUDA_VISIBLE_DEVICES": ""}, {"STAND_IN_ERROR": "34"}])
def test_without_any_the_cpu_is_used(machine: Any, variables: dict[str, str]) -> None:
    assert machine(MACHINE, **variables)[0] == "cpu"


@needs_cuda_build
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"STAND_IN_CUDA": "11040"},
            "the GPU driver supports CUDA 11.4, but torch {torch} needs CUDA {cuda}: update the driver to {driver} or "
            "newer, or install a torch for CUDA 11, see docs/gpus.md, or set SWAP_DEVICE=cpu",
        ),
        (
            {"STAND_IN_ERROR": "803"},
            "the GPU driver does not start (CUDA error 803): check `nvidia-smi`, restart the machine, "
            "or set SWAP_DEVICE=cpu",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1,9,2"},
            "CUDA_VISIBLE_DEVICES names 4 GPUs, but the driver sees only the first 2: remove 9, 2, "
            "or set SWAP_DEVICE=cpu",
        ),
        (
            {"STAND_IN_MIG": "1", "CUDA_VISIBLE_DEVICES": f"MIG-{UUID.format(0)},MIG-{UUID.format(1)}"},
            f"CUDA_VISIBLE_DEVICES names 2 MIG instances, but CUDA lets a process use only one: "
            f"set it to MIG-{UUID.format(0)}, or set SWAP_DEVICE=cpu",
        ),
    ],
    ids=["old driver", "broken driver", "GPUs that are not there", "MIG"],
)
def test_what_keeps_gpus_from_being_used_is_one_line_and_not_a_reason_for_the_cpu(
    machine: Any, variables: dict[str, str], line: str
) -> None:
    cuda = built_for().cuda.partition(".")[0]
    oldest = {"12": 525, "13": 580}.get(cuda)
    assert machine(MACHINE, **variables) == line.format(torch=built_for().torch, cuda=cuda, driver=oldest)
    assert machine(MACHINE, SWAP_DEVICE="cpu", **variables)[0] == "cpu"


@needs_cuda_build
def test_a_mig_instance_is_a_gpu(machine: Any) -> None:
    name = f"MIG-{UUID.format(3)}"
    found = machine(MACHINE, STAND_IN_MIG="1", CUDA_VISIBLE_DEVICES=name)
    assert found[:3] == ["cuda", [name], {name: UUID.format(3)}]


def test_torch_for_rocm_is_refused_and_torch_for_cpus_only_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SWAP_DEVICE", raising=False)
    monkeypatch.setattr(gpus, "built_for", lambda: Built(torch="2.15.0", cuda="", hip="7.1"))
    trouble = gpus.look().trouble
    with pytest.raises(SwapError, match=r"^this torch is built for ROCm 7.1, and AMD GPUs are not supported: .*=cpu$"):
        device_type(has_gpu=False, trouble=trouble)

    monkeypatch.setattr(gpus, "built_for", lambda: Built(torch="2.15.0+cpu", cuda="", hip=""))
    assert gpus.look().trouble == ""
    assert "this torch (2.15.0+cpu) is for CPUs only" in gpus._too_old((13, 0), gpus.built_for())


def test_what_torch_was_made_for_is_read_without_importing_it() -> None:
    import torch

    assert built_for() == Built(
        torch=str(torch.__version__), cuda=torch.version.cuda or "", hip=torch.version.hip or ""
    )


@pytest.mark.parametrize(("cuda", "fits"), [((12, 9), False), ((13, 0), True), ((13, 2), True), ((14, 0), True)])
def test_a_driver_runs_what_is_made_for_its_major_version_or_an_older_one(cuda: tuple[int, int], fits: bool) -> None:
    assert (gpus._too_old(cuda, Built(torch="2.15.0", cuda="13.2", hip="")) == "") == fits


@pytest.mark.parametrize(
    ("capability", "kernels", "fits"),
    [
        ((7, 0), KERNELS, False),
        ((7, 5), KERNELS, True),
        ((8, 9), KERNELS, True),
        ((9, 0), ["sm_90a"], True),
        ((8, 0), ["sm_86"], False),
        ((10, 3), KERNELS, True),
        ((11, 0), KERNELS, False),
        ((12, 1), ["sm_80", "compute_80"], True),
        ((7, 0), ["sm_80", "compute_80"], False),
        ((7, 0), [], True),  # not known
    ],
)
def test_kernels_run_on_their_generation_from_their_minor_version_on(
    capability: tuple[int, int], kernels: list[str], fits: bool
) -> None:
    assert (unfit("Tesla V100", capability, kernels) == "") == fits


FAN_OUT = """
import json, sys, time
from pathlib import Path
from swap_pipeline.config.instances import worker
from swap_pipeline.launch import local
from swap_pipeline.launch.devices import local_machine, share_of_worker
from swap_pipeline.launch.jobs import Job
from swap_pipeline.launch.stage_jobs import run_jobs
from swap_pipeline.runtime.job_folder import JobFolder

write = '''
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
held = sorted(path.name for path in Path(".swap/devices").iterdir())
time.sleep(0.5)
(folder / "result").mkdir()
(folder / "seen.json").write_text(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SWAP_DEVICE"], held]))
'''

def command(job, *, parent):
    import os
    return [sys.executable, "-c", write, str(job.folder.path)], {**os.environ, "SWAP_DEVICE": job.device_type}

local.for_one_node, local.code_stamp = command, lambda instance: ""
share = share_of_worker(local_machine(), shards=SHARDS)
jobs = []
for seed in range(10):
    folder = Path(f"job_{seed}")
    folder.mkdir()
    jobs.append(Job(instance=worker(seed), device_type="cuda", processes=share.processes, threads=share.threads,
                    num_devices=share.num_devices, folder=JobFolder(folder)))
began = time.monotonic()
assert run_jobs(jobs) == {}
print(json.dumps([json.loads((job.folder.path / "seen.json").read_text()) for job in jobs]))
"""


@needs_cuda_build
@pytest.mark.parametrize("shards", [1, 2])
def test_workers_fan_out_over_eight_gpus_each_with_its_own(machine: Any, shards: int) -> None:
    seen = machine(FAN_OUT.replace("SHARDS", str(shards)))

    given = [visible for visible, _, _ in seen]
    at_once = 8 // shards
    assert len(set(given[:at_once])) == at_once
    assert sorted(",".join(given[:at_once]).split(",")) == [*"01234567"]
    assert {kind for _, kind, _ in seen} == {"cuda"}
    assert set(seen[-1][2]) >= {f"cuda_{UUID.format(n)}.lock" for n in range(8)}


@needs_cuda_build
def test_by_index_and_by_uuid_a_gpu_has_one_lock(machine: Any) -> None:
    def locks(visible: str) -> Any:
        code = FAN_OUT.replace("SHARDS", "1").replace("range(10)", "range(1)").replace("job_{", f"{visible[:1]}job_{{")
        return machine(code, CUDA_VISIBLE_DEVICES=visible)[0][2]

    assert locks("6") == locks(f"GPU-{UUID.format(6)}") == [f"cuda_{UUID.format(6)}.lock"]


# --- what people see


@needs_cuda_build
def test_a_stage_says_the_same_line_as_doctor(project: Project, driver: dict[str, str]) -> None:  # noqa: F811
    old = {**driver, "STAND_IN_CUDA": "11040", "SWAP_DEVICE": ""}

    stage = project.stage("phase1", **old)
    by_hand = project.stage("phase1", **old, TORCHELASTIC_RUN_ID="x", RANK="0", WORLD_SIZE="1")
    told = json.loads(project.swap("doctor", "--json", **old).stdout)["findings"]

    assert_one_line(stage, "the GPU driver supports CUDA 11.4")
    assert by_hand.stderr.splitlines()[-1] == stage.stderr.strip()
    problems = [each["text"] for each in told if each["status"] == "problem"]
    assert problems == [stage.stderr.strip().removeprefix("error: ")]


@needs_cuda_build
@pytest.mark.long
def test_doctor_names_gpus_that_this_torch_has_no_kernels_for(project: Project, driver: dict[str, str]) -> None:  # noqa: F811
    old = {**driver, "STAND_IN_MODEL": "Tesla K80", "STAND_IN_CAPABILITY": "37", "STAND_IN_GPUS": "2"}

    told = json.loads(project.swap("doctor", "--json", **old, SWAP_DEVICE="cuda").stdout)["findings"]

    devices = {each["text"]: each["status"] for each in told if each["topic"] == "devices"}
    assert devices.pop("2 GPUs: Tesla K80, Tesla K80") == "ok"
    (problem,) = [text for text, status in devices.items() if status == "problem"]
    assert problem.startswith("torch ") and "has no kernels for Tesla K80 (sm_37), only for sm_7" in problem
    assert "docs/gpus.md" in problem
