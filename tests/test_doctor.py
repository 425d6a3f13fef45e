"""`swap doctor`: what is well, what to know, what would stop `dvc repro`; whatever is broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Project

from swap_pipeline.cli import doctor, doctor_gpu
from swap_pipeline.cli.doctor import examine, json_of, text_of
from swap_pipeline.cli.findings import Finding
from swap_pipeline.cli.plan.facts import devices_here, planned_devices
from swap_pipeline.cli.plan.forecast import make_forecast, plan_params
from swap_pipeline.cli.plan.throughput import keep_rate, kept_rate
from swap_pipeline.config.instances import PHASE1
from swap_pipeline.config.reading import read_params
from swap_pipeline.engine import precision
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.jobs import Job, Machine, save
from swap_pipeline.runtime.job_folder import JobFolder


@pytest.fixture
def here(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(project.root)
    for name in ("SWAP_NPROC", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWAP_DEVICE", "cpu")
    monkeypatch.setattr(precision, "check_cpu", lambda half: None)  # some seconds, and tried in test_precision
    return project


def found(topic: str, status: str = "") -> list[str]:
    return [each.text for each in examine() if each.topic == topic and status in each.status]


def problems() -> dict[str, str]:
    return {each.topic: each.text for each in examine() if each.status == "problem"}


@pytest.mark.long
def test_in_a_new_project_nothing_is_wrong_and_everything_is_looked_at(here: Project) -> None:
    def files() -> list[Path]:
        return sorted(path for path in here.root.rglob("*") if not {"__pycache__", ".dvc"} & set(path.parts))

    before = files()

    done = here.run(sys.executable, "-m", "swap_pipeline.cli", "doctor", check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    topics = {line.split()[1] for line in lines[:-2]}
    expected = (
        "python versions project params analysis devices backends threads precision data plan disk scratch DVC git"
    )
    assert topics == set(expected.split())
    assert {line.split()[0] for line in lines[:-2]} <= {"ok", "note"}
    assert lines[-1].startswith("`dvc repro` can run")
    assert files() == before
    assert not (here.root / ".dvc/cache").exists()


def test_json_says_the_same(here: Project) -> None:
    findings = [Finding(status="ok", topic="a", text="b"), Finding(status="problem", topic="c", text="d")]

    tree = json.loads(json_of(findings))

    assert tree == {
        "problems": 1,
        "findings": [{"status": "ok", "topic": "a", "text": "b"}, {"status": "problem", "topic": "c", "text": "d"}],
    }
    assert text_of(findings).splitlines()[-1].startswith("1 problem to fix before")


def test_broken_params_are_told_and_the_rest_is_still_looked_at(here: Project) -> None:
    here.set_params({"phase1.batch_size": "many"})

    done = here.run(sys.executable, "-m", "swap_pipeline.cli", "doctor", "--json", check=False)

    tree = json.loads(done.stdout)
    broken = [each for each in tree["findings"] if each["status"] == "problem"]
    assert done.returncode == 1 and tree["problems"] == 1
    assert "params.yaml: phase1.batch_size is 'many'" in broken[0]["text"]
    assert {"devices", "threads", "DVC", "git", "precision"} <= {each["topic"] for each in tree["findings"]}


def test_outside_of_a_project_it_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Project
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))

    told = problems()

    assert told.keys() == {"project", "params", "DVC", "git"}
    assert "run this from the project's root folder" in told["project"]
    assert found("devices") and found("versions")


@pytest.mark.parametrize(
    ("values", "topic", "words"),
    [
        ({"data.root": "nowhere"}, "params", "data.root is 'nowhere', which does not exist"),
        ({"data.name": "imagefolder"}, "data", "has no folder train"),
        ({"data.name": "fashion"}, "data", "data.name is 'fashion'"),
        ({"phase1.batch_size": 5000}, "plan and disk", "phase1.batch_size is 5000"),
        ({"model.name": "resnet8"}, "plan and disk", "model.name is 'resnet8'"),
    ],
)
def test_what_would_stop_a_run_is_a_problem(here: Project, values: dict[str, Any], topic: str, words: str) -> None:
    (here.root / "data/fashion-mini.safetensors").touch()
    here.set_params({**values, "data.train_images": 240} if "phase1.batch_size" in values else values)

    assert words in problems()[topic]


def test_a_wrong_variable_is_named(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAP_NPROC", "two")

    assert "SWAP_NPROC is 'two'" in problems()["threads"]


def test_processes_and_threads_follow_from_shards_and_devices(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(device_type="cpu", devices=tuple("01234567"), cores=8)
    monkeypatch.setattr(doctor, "this_machine", lambda: machine)
    here.set_params({"phase1.shards": 4, "phase2.shards": 4})

    assert found("threads") == [
        "8 cores",
        "phases 1 and 3: 4 processes with 2 threads each",
        "phase 2: 2 of 3 workers at once, 4 processes with 1 thread each",
    ]


def test_missing_data_is_told_with_what_will_happen(here: Project) -> None:
    (here.root / "data/fashion-mini.safetensors").unlink()
    assert "git checkout data/fashion-mini.safetensors" in problems()["data"]

    here.set_params({"data.name": "cifar10"})
    assert "cifar-10-binary.tar.gz will be downloaded" in found("data", "note")[0]

    (here.root / "data/raw/cifar-10-binary.tar.gz").write_bytes(b"x")
    assert "found its official files" in found("data", "ok")[0]


@pytest.mark.parametrize(("finished_before", "status"), [(False, "problem"), (True, "note")])
def test_a_disk_that_is_too_small_is_told_with_both_figures(
    here: Project, monkeypatch: pytest.MonkeyPatch, finished_before: bool, status: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    if finished_before:
        (here.root / "checkpoints/phase3").mkdir(parents=True)
        (here.root / "checkpoints/phase3/model.safetensors").touch()

    (told,) = found("disk", status)

    assert "1.00 kB free; a whole run writes up to 32.9 MB: " in told


def test_the_bytes_of_a_run_count_every_model_that_it_writes(here: Project) -> None:
    """Against what a run of this size really leaves, counted by hand from the layout of the network."""
    here.set_params({"phase2.keep_epochs": [1], "phase1.keep_epochs": [1, 2]})
    params = read_params()
    plan = plan_params(params, devices_here(params))
    models = 1 + 3 + 1 + 2 + 3  # phase 1, workers, average; kept by phase 1, kept by workers
    snapshots = (3 * plan.slots + params.phase1.max_epochs) * plan.snapshot_bytes  # phase 1's course stays
    images = 2 * 20_000 * (28 * 28 + 8)

    assert doctor.bytes_to_write(plan) == 3 * models * plan.checkpoint_bytes + snapshots + images


def test_half_precision_that_this_cpu_cannot_do_stops_only_who_asks_for_it(
    here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(half: str) -> None:
        raise SwapError(f"params.yaml: compute.precision is {half}, which this CPU cannot run (signal 4): take fp32")

    monkeypatch.setattr(precision, "check_cpu", cannot)
    assert problems() == {}
    assert found("precision", "note") == ["this CPU lacks bf16 (signal 4): leave compute.precision at auto or fp32"]

    here.set_params({"compute.precision": "bf16"})
    assert "which this CPU cannot run" in problems()["precision"]


def test_stale_scratch_is_told_with_its_size(here: Project) -> None:
    folder = here.root / ".swap/phase1" / ("0" * 20)
    folder.mkdir(parents=True)
    (here.root / "data/prepared").mkdir()  # without it nobody can say which of phase 1's folders are needed
    (folder / "snapshot_000001.safetensors").write_bytes(bytes(5_000_000))
    place = JobFolder(folder)
    save(Job(instance=PHASE1, device_type="cpu", processes=1, threads=1, num_devices=1, folder=place))

    (told,) = found("scratch", "note")

    assert "the current params do not use 1, `swap clean` frees 5.0" in told


def test_the_link_type_is_the_one_that_dvc_would_use(here: Project) -> None:
    here.dvc("config", "cache.type", "symlink")
    assert "checked out as symlink" in found("DVC", "ok")[0]

    here.dvc("config", "cache.type", "copy")
    assert "as copy" in found("DVC", "note")[0]


def test_git_is_told_as_it_is(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("git", "ok")[0].startswith("main at ")
    (here.root / "dvc.yaml").write_text((here.root / "dvc.yaml").read_text() + "\n")
    assert "1 uncommitted files (dvc.yaml)" in found("git", "note")[0]


def test_a_project_without_git_is_no_problem_if_dvc_was_told(here: Project) -> None:
    shutil.rmtree(here.root / ".git")
    assert "this is not a git repository" in problems()["git"]

    here.dvc("init", "--no-scm", "--force")
    assert "git" not in problems() and "there are no experiments" in found("git", "note")[0]


def test_a_path_in_which_dvc_runs_no_experiments_is_told(
    here: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("ASCII" in text for text in found("DVC"))
    here.root.rename(tmp_path / "projét")
    monkeypatch.chdir(tmp_path / "projét")
    done = Project(Path.cwd()).dvc("exp", "run", "--temp", "--dry", check=False)

    assert "'ascii' codec" in done  # this note goes when DVC can
    assert any("`swap compare` fail: rename" in text for text in found("DVC", "note"))


def test_a_check_that_breaks_does_not_end_the_others(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        raise RuntimeError("out of order")

    monkeypatch.setattr(doctor, "_dvc", broken)

    assert found("DVC", "note") == ["could not be checked (RuntimeError: out of order)"]
    assert found("git")


@pytest.mark.parametrize("obstacle", ["file", "dangling link"])
@pytest.mark.long
def test_what_stands_in_the_place_of_scratch_is_a_problem(finished: Project, obstacle: str) -> None:
    scratch = finished.root / ".swap"
    shutil.rmtree(scratch)
    if obstacle == "file":
        scratch.write_text("")
    else:
        scratch.symlink_to("nowhere")

    done = finished.run(sys.executable, "-m", "swap_pipeline.cli", "doctor", check=False)

    assert done.returncode == 1
    assert ".swap must be a folder, but is something else" in done.stdout


def test_where_there_is_no_gpu_a_trial_says_so(here: Project) -> None:
    (told,) = doctor_gpu.examine_gpus(Path("params.yaml"))
    assert (told.status, told.text) == (
        "problem",
        "no GPU to try (see devices above): run this on a machine with GPUs",
    )


@pytest.mark.long
def test_the_trial_of_gpus_gets_through_on_two_cores(here: Project) -> None:
    """The same ranks as on GPUs, over gloo and with tiny sizes."""
    done = here.swap("doctor", "--trial-on-cpu", "--json")

    tried = [each for each in json.loads(done.stdout)["findings"] if each["topic"].startswith("GPU")]
    assert {each["status"] for each in tried} == {"ok"}, tried
    names = "exchange repeat precision precision waiting speed rate"
    assert [each["topic"] for each in tried] == [f"GPU {name}" for name in names.split()]
    assert "2 × cpu: sums over ranks are exact" in tried[0]["text"]
    assert not (here.root / ".swap/images_per_second.json").exists()


def test_a_trial_that_fails_says_where_and_why_in_one_line(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "[rank1]: Traceback …\n[rank1]: torch.distributed.DistBackendError: NCCL error: unhandled\nmore\n"
    said = 'trial: {"what": "exchange", "ok": true, "text": "fine"}\n'
    failed = subprocess.CompletedProcess([], 1, stdout=said, stderr=log)
    monkeypatch.setattr(doctor_gpu.subprocess, "run", lambda *_, **__: failed)

    tried = list(doctor_gpu.try_gpus(read_params(), on_cpu=True))

    assert [each.status for each in tried] == ["ok", "problem"]
    expected = "the trial failed after exchange: torch.distributed.DistBackendError: NCCL error: unhandled"
    assert tried[1].text == expected


def test_what_a_trial_measured_is_what_plans_for_gpus_use(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    params = read_params()
    on_gpus, on_cpu = plan_params(params, planned_devices(params, 4)), plan_params(params, devices_here(params))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    keep_rate(params, on_gpus, 12345.0)

    forecast = make_forecast(params, file=Path("params.yaml"), num_gpus=4, images_per_second=None)

    assert forecast.throughput.images_per_second == 12345.0
    assert forecast.throughput.source == "measured by `swap doctor --gpu`: H100"
    assert kept_rate(params, on_cpu) is None
    other = replace(params, compute=replace(params.compute, precision="fp32"))
    assert kept_rate(other, on_gpus) is None
