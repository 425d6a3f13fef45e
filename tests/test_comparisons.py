"""What SWAP is compared with: the baselines and SWA, alone and under real DVC."""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Project, made_once
from filelock import FileLock
from safetensors.numpy import load_file
from test_pipeline import ran
from test_recipe_runs import prepare_here, run_here
from test_resume import processes_in, snapshots, start_and_signal, wait_until

from stages.baseline import train_baseline
from stages.phase1 import train_phase1
from stages.swa import schedule_of, train_and_average
from swap_pipeline.averaging_job import JobFolder
from swap_pipeline.files import read_json
from swap_pipeline.instances import BASELINES, SWA_STARTS, Instance
from swap_pipeline.launch import this_machine
from swap_pipeline.params import Params

pytestmark = pytest.mark.long

COMPARISONS = "comparisons/dvc.yaml"
METHODS = (*BASELINES, *SWA_STARTS)
QUICK = {
    "phase1.max_epochs": 2,
    "phase2.epochs": 1,
    "workers.seeds": [0, 1],
    "small_batch.epochs": 2,
    "large_batch.epochs": 2,
}


def run_method(params: Params, method: str, repeat: int = 0) -> Instance:
    """A baseline or a variant of SWA, in this process."""
    instance, given = Instance(method=method, repeat=repeat), getattr(params, method)
    if method in BASELINES:
        run_here(train_baseline, params, instance, given)
    else:
        section, schedule, _ = schedule_of(method, params, given)
        run_here(train_and_average, params, instance, given, schedule, section)
    return instance


ONE_EPOCH: dict[str, dict[str, Any]] = {
    "cifar100": {
        "small_batch.epochs": 1,
        "small_batch.warmup_epochs": 0,
        "large_batch.epochs": 1,
        "large_batch.warmup_epochs": 0,
    },
    "imagenet": {
        "small_batch": {
            "batch_size": [[0, 8], [1, 2], [9, 512]],
            "lr_knots": [[0, 0.02], [2, 0]],
            "image_size": [[0, 32], [1, 48], [2, 96]],
            "min_scale": [[0, 0.08], [1, 0.5]],
            "epochs": 2,
            "gpus": 8,
        },
        "large_batch": {
            "batch_size": [[0, 9]],
            "lr_knots": [[0, 0.02], [1, 0]],
            "image_size": 32,
            "min_scale": 0.3,
            "epochs": 1,
            "gpus": 8,
        },
    },
}


@pytest.mark.parametrize("name", ONE_EPOCH)
def test_every_method_trains_and_swa_is_the_mean_of_its_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-100 has enough classes for top-5; ImageNet's images stay in files, and its lists end in other sizes."""
    swa = {f"{method}.{key}": value for method in SWA_STARTS for key, value in (("models", 3), ("cycle_epochs", 1))}
    params = prepare_here(name, {**ONE_EPOCH[name], **swa}, tmp_path, monkeypatch)
    monkeypatch.setattr(JobFolder, "remove", lambda self: None)  # the samples stay, to be averaged by hand
    run_here(train_phase1, params, Instance(method="phase1"))
    for method in METHODS:
        instance = run_method(params, method)
        record = read_json(instance.record)
        assert math.isfinite(record["test_loss"]) and record["seconds"] > 0
        assert ("test_top5" in record) == (name == "cifar100")
        if name == "cifar100":
            assert record["test_top5"] >= record["test_accuracy"]
        if method in SWA_STARTS:
            check_swa(instance, record, getattr(params, method).peak_lr)
    if name == "imagenet":
        sizes = {method: view_size(Instance(method=method)) for method in METHODS}
        assert sizes == {
            "small_batch": 48,
            "large_batch": 32,
            "swa_large_batch": 32,
            "swa_large_then_small": 64,
            "swa_small_batch": 48,
        }


def view_size(instance: Instance) -> int:
    from swap_pipeline.training_job import view_of_checkpoint

    view = view_of_checkpoint(instance.model)
    assert view is not None
    return view.size


def check_swa(instance: Instance, record: dict[str, Any], peak_lr: float) -> None:
    trained = Path("scratch") / instance.stage_name / "trained" / "result"
    samples = [load_file(trained / f"{name}.safetensors") for name in ("cycle_1", "cycle_2", "model")]
    average = load_file(instance.model)
    for key, tensor in average.items():
        if "running" not in key and tensor.dtype.kind == "f":
            by_hand = np.mean([sample[key].astype(np.float64) for sample in samples], axis=0)
            np.testing.assert_allclose(tensor, by_hand, rtol=1e-6, atol=1e-7)
    weight = next(key for key in average if key.endswith("weight") and average[key].ndim == 4)
    assert not np.array_equal(samples[0][weight], samples[1][weight])
    rows = read_json(trained / "record.json")["curve"]
    assert record["models"] == 3 and record["cycle_epochs"] == 1
    assert record["model_accuracies"] == [row["test_accuracy"] for row in rows]
    assert record["seconds"] > sum(row["seconds"] for row in rows)
    # Three equal cycles from the peak down: with few steps an epoch the last one's rate is well below the peak.
    assert len({row["learning_rate"] for row in rows}) == 1
    assert 0 < rows[0]["learning_rate"] < peak_lr


def test_a_repeat_starts_from_other_weights_and_the_baselines_from_those_of_phase_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate of almost nothing, what comes out is what went in."""
    still = {f"{section}.peak_lr": 1e-20 for section in ("phase1", "small_batch", "large_batch")}
    params = prepare_here("fashion-mini", {**still, "small_batch.epochs": 1, "large_batch.epochs": 1,
        "small_batch.warmup_epochs": 0, "large_batch.warmup_epochs": 0}, tmp_path, monkeypatch)  # fmt: skip
    weights = {}
    for repeat in (0, 1, 2):
        run_here(train_phase1, params, Instance(method="phase1", repeat=repeat))
        for method in BASELINES:
            run_method(params, method, repeat)
        for method in ("phase1", *BASELINES):
            instance = Instance(method=method, repeat=repeat)
            tensors = load_file(instance.model)
            weights[method, repeat] = tensors[next(key for key in tensors if tensors[key].ndim == 4)]
    for repeat in (0, 1, 2):
        for method in BASELINES:
            np.testing.assert_allclose(weights[method, repeat], weights["phase1", repeat], atol=1e-12)
        assert not np.allclose(weights["phase1", repeat], weights["phase1", (repeat + 1) % 3], atol=1e-3)


@pytest.fixture(scope="session")
def compared_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after `dvc repro` and then `dvc repro comparisons/dvc.yaml`; not to be changed."""
    project = made_once("compared", QUICK, tmp_path_factory)
    output = project.root.parent / "compared.txt"
    with FileLock(f"{output}.lock"):
        if not output.exists():
            text = project.dvc("repro", COMPARISONS)
            project.run("git", "add", "-A")
            project.run("git", "commit", "-qm", "comparisons")
            output.write_text(text)
    return project


@pytest.fixture
def compared(compared_project: Project, tmp_path: Path) -> Project:
    return compared_project.copy_to(tmp_path / "project")


def names(output: str) -> list[str]:
    return [name.removeprefix(f"{COMPARISONS}:") for name in ran(output)]


def both(method: str) -> list[str]:
    return [method, f"{method}_again@1"]


AGAIN = ["phase1_again@{0}", "phase2_again@{0}-0", "phase2_again@{0}-1", "phase3_again@{0}"]


def test_one_command_runs_every_method_and_repeat_and_nothing_of_the_plain_pipeline(compared_project: Project) -> None:
    output = (compared_project.root.parent / "compared.txt").read_text()
    assert names(output) == [
        *both("small_batch"),
        *both("large_batch"),
        *(name.format(1) for name in AGAIN),
        *both("swa_large_batch"),
        *both("swa_large_then_small"),
        *both("swa_small_batch"),
        "tables",
        "comparisons_page",
    ]
    assert "tables: comparisons/tables.md" in output
    assert "comparisons: comparisons/index.html" in output
    assert compared_project.run("git", "status", "--short").stdout == ""


def test_the_plain_pipeline_leaves_the_comparisons_alone(finished_project: Project) -> None:
    output = (finished_project.root.parent / "output.txt").read_text()
    assert not any(name.startswith("comparisons") for name in ran(output))
    assert not (finished_project.root / "comparisons" / "tables.md").exists()


def test_a_second_run_has_nothing_to_do(compared: Project) -> None:
    assert names(compared.dvc("repro", COMPARISONS)) == []


def test_what_is_asked_for_alone_trains_alone_and_needs_nothing_of_swap(project: Project) -> None:
    project.set_params({**QUICK, "repeats": [1, 2]})
    assert names(project.dvc("repro", f"{COMPARISONS}:small_batch")) == ["prepare", "small_batch"]
    assert not (project.root / ".swap" / "small_batch_again").exists()

    output = project.dvc("repro", f"{COMPARISONS}:small_batch_again")

    assert sorted(names(output)) == ["small_batch_again@1", "small_batch_again@2"]
    assert output.count(": trained before, taken from") == 1
    spans = [project.json(f"comparisons/metrics/repeat_{r}/small_batch.json")["ran"] for r in (1, 2)]
    if this_machine().cores > 1:
        assert max(begun for begun, _ in spans) < min(ended for _, ended in spans)


def test_swa_on_two_ranks(compared: Project) -> None:
    done = compared.stage("swa", "swa_large_batch", SWAP_NPROC="2")
    assert done.returncode == 0, done.stderr
    record = compared.json("comparisons/metrics/repeat_0/swa_large_batch.json")
    assert (record["devices"], record["models"], len(record["model_accuracies"])) == ("2 × cpu", 2, 2)
    assert not any((compared.root / ".swap" / "swa_large_batch").glob("*/trained"))


def recomputed(project: Project) -> dict[tuple[str, str, str], list[float]]:
    """Every figure of both tables, for repeats 0 and 1, straight from the records."""
    found: dict[tuple[str, str, str], list[float]] = {}

    def add(table: str, method: str, **quantities: float) -> None:
        for quantity, value in quantities.items():
            found.setdefault((table, method, quantity), []).append(value)

    for repeat, folder in ((0, "metrics"), (1, "comparisons/metrics/repeat_1")):
        others = f"comparisons/metrics/repeat_{repeat}"
        phase1, phase3 = project.json(f"{folder}/phase1.json"), project.json(f"{folder}/phase3.json")
        workers = [project.json(f"{folder}/phase2/seed_{seed}.json") for seed in (0, 1)]
        small, large = project.json(f"{others}/small_batch.json"), project.json(f"{others}/large_batch.json")
        for method, record in (("small_batch", small), ("large_batch", large)):
            cost = record["seconds"] * record["num_devices"]
            time, devices = record["seconds"], record["num_devices"]
            add("plain_training", method, test_accuracy=record["test_accuracy"], devices=devices, training_time=time,
                total_compute=cost)  # fmt: skip
        before = sum(worker["test_accuracy"] for worker in workers) / 2
        until = phase1["seconds"] + max(worker["seconds"] for worker in workers)
        cost = sum(part["seconds"] * part["num_devices"] for part in (phase1, *workers))
        cost_after = cost + phase3["seconds"] * phase3["num_devices"]
        devices = float(max(phase1["num_devices"], sum(w["num_devices"] for w in workers), phase3["num_devices"]))
        after = {"devices": devices, "training_time": until + phase3["seconds"], "total_compute": cost_after}
        add("plain_training", "swap_before", test_accuracy=before, devices=devices, training_time=until,
            total_compute=cost)  # fmt: skip
        add("plain_training", "swap_after", test_accuracy=phase3["test_accuracy"], **after)
        add("swa", "swap", before_averaging=before, after_averaging=phase3["test_accuracy"], **after)
        starts = {"swa_large_batch": large, "swa_large_then_small": phase1, "swa_small_batch": small}
        for method, start in starts.items():
            record = project.json(f"{others}/{method}.json")
            first, second = record["model_accuracies"]
            add(
                "swa",
                method,
                before_averaging=(first + second) / 2,
                after_averaging=record["test_accuracy"],
                devices=max(start["num_devices"], record["num_devices"]),
                training_time=start["seconds"] + record["seconds"],
                total_compute=start["seconds"] * start["num_devices"] + record["seconds"] * record["num_devices"],
            )
    return found


def test_the_tables_hold_what_can_be_recomputed_from_the_records(compared_project: Project) -> None:
    expected = recomputed(compared_project)
    told = compared_project.json("comparisons/tables.json")["tables"]
    quantities = {
        (table, method, quantity): figures
        for table, content in told.items()
        for method, row in content["rows"].items()
        for quantity, figures in row["quantities"].items()
    }
    assert set(quantities) == set(expected)
    for key, figures in quantities.items():
        assert list(figures["repeats"].values()) == pytest.approx(expected[key])
        assert figures["mean"] == pytest.approx(statistics.fmean(expected[key]))
        assert figures["std"] == pytest.approx(statistics.stdev(expected[key]))
    text = (compared_project.root / "comparisons" / "tables.md").read_text()
    accuracies = expected["plain_training", "small_batch", "test_accuracy"]
    shown = f"{statistics.fmean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}"
    row = next(line for line in text.splitlines() if line.startswith("| SGD (small-batch)"))
    assert row.split("|")[2].strip(" *") == shown
    lines = list(csv.DictReader((compared_project.root / "comparisons" / "tables.csv").open()))
    assert {(line["table"], line["method"], line["quantity"]) for line in lines} == set(expected)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"small_batch.peak_lr": 0.02}, [*both("small_batch"), *both("swa_small_batch")]),
        ({"large_batch.epochs": 3}, [*both("large_batch"), *both("swa_large_batch")]),
        ({"swa_small_batch.peak_lr": 0.02}, both("swa_small_batch")),
        ({"phase2.peak_lr": 0.02}, ["phase2@0", "phase2@1", "phase2_again@1-0", "phase2_again@1-1",
                                    *both("swa_large_then_small")]),
        ({"phase1.stop_accuracy": 99.0}, ["phase1", "phase1_again@1"]),
    ],
)  # fmt: skip
def test_a_change_concerns_only_what_reads_it(compared: Project, change: dict[str, Any], first: list[str]) -> None:
    compared.set_params(change)
    assert sorted(names(compared.dvc("repro", "--dry", COMPARISONS))) == sorted([*first, "comparisons_page"])


def test_a_changed_baseline_trains_again_and_its_swa_after_it_and_nothing_else(compared: Project) -> None:
    compared.set_params({"small_batch.peak_lr": 0.02})
    output = compared.dvc("repro", COMPARISONS)
    assert names(output) == [*both("small_batch"), *both("swa_small_batch"), "tables", "comparisons_page"]
    shutil.rmtree(compared.root / ".swap")
    compared.set_params({"small_batch.peak_lr": 0.1})
    assert names(compared.dvc("repro", COMPARISONS)) == [], "what was trained before comes from DVC's cache"


def test_another_repeat_trains_one_repeat(compared: Project) -> None:
    before = {path: path.stat().st_mtime_ns for path in (compared.root / "comparisons" / "checkpoints").rglob("*.*")}
    compared.set_params({"repeats": [1, 2]})
    output = compared.dvc("repro", COMPARISONS)
    assert sorted(names(output)) == sorted(
        [
            *(f"{method}_again@2" for method in METHODS),
            *(name.format(2) for name in AGAIN),
            "tables",
            "comparisons_page",
        ]
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "n = 3, repeats 0, 1 and 2" in (compared.root / "comparisons" / "tables.md").read_text()
    compared.set_params({"repeats": [1]})
    assert names(compared.dvc("repro", COMPARISONS)) == ["tables"]


def test_a_part_that_has_not_run_leaves_a_dash_and_a_note(finished: Project) -> None:
    finished.dvc("repro", "-s", f"{COMPARISONS}:tables")
    text = (finished.root / "comparisons" / "tables.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| SGD (small-batch)"))
    assert re.search(r"\| +– +\|", row)
    assert "small batch: not run yet (`dvc repro comparisons/dvc.yaml:small_batch " in text
    assert f"{finished.json('metrics/phase3.json')['test_accuracy']:.2f}" in text


def test_the_readme_s_grid_search_lists_its_winner_first(compared: Project) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (grid,) = re.findall(r"^dvc (exp run --queue .*:small_batch)$", readme, re.MULTILINE)
    (show,) = re.findall(r"^dvc (exp show .*--sort-by small_batch\.test_accuracy .*)$", readme, re.MULTILINE)
    compared.dvc(*shlex.split(grid))
    compared.dvc("exp", "run", "--run-all")

    table = compared.run("dvc", *shlex.split(show), COLUMNS="200").stdout
    lines = csv.DictReader(compared.run("dvc", *shlex.split(show), "--csv").stdout.splitlines())

    rows = [row for row in lines if row["Experiment"].startswith("small-")]
    assert sorted(float(row["small_batch.peak_lr"]) for row in rows) == [0.1, 0.2, 0.3]
    accuracies = [float(row["small_batch.test_accuracy"]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    assert max(map(len, table.splitlines())) <= 120


def test_a_baseline_killed_while_it_trains_goes_on_and_ends_in_the_same_bytes(project: Project, tmp_path: Path) -> None:
    stage = f"{COMPARISONS}:small_batch"
    project.set_params({"small_batch.epochs": 30})
    project.dvc("repro", "prepare")
    reference = project.copy_to(tmp_path / "reference")
    reference.dvc("repro", stage)
    start_and_signal(project, lambda: max(snapshots(project, "small_batch"), default=0) >= 3, signal.SIGKILL, stage)
    wait_until(lambda: processes_in(project.root) == [], seconds=10)

    output = project.dvc("repro", stage)

    assert "small_batch: going on after epoch" in output
    file = "comparisons/checkpoints/repeat_0/small_batch/model.safetensors"
    assert project.bytes_of(file) == reference.bytes_of(file)
    assert len(project.json("comparisons/metrics/repeat_0/small_batch.json")["curve"]) == 30


def test_swa_killed_while_it_trains_and_while_it_averages_ends_in_the_same_bytes(
    compared: Project, tmp_path: Path
) -> None:
    reference = compared.copy_to(tmp_path / "reference")
    stage = f"{COMPARISONS}:swa_small_batch"
    for project in (reference, compared):
        project.set_params({"repeats": [], "swa_small_batch.cycle_epochs": 6})
    reference.dvc("repro", "-s", stage)
    scratch = compared.root / ".swap" / "swa_small_batch"

    def newest_snapshot() -> int:
        found = [int(path.stem.split("_")[1]) for path in scratch.glob("*/trained/snapshot_*.safetensors")]
        return max(found, default=0)

    for moment in (lambda: newest_snapshot() >= 3, lambda: any(scratch.glob("*/mean.safetensors"))):
        process = subprocess.Popen(
            ["dvc", "repro", "-s", stage],
            cwd=compared.root,
            env=compared.full_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda moment=moment, process=process: moment() or process.poll() is not None)  # type: ignore[misc]
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: processes_in(compared.root) == [], seconds=10)

    assert "going on after epoch" not in (output := compared.dvc("repro", "-s", stage))
    assert "averaged 2 models" in output

    file = "comparisons/checkpoints/repeat_0/swa_small_batch/model.safetensors"
    assert compared.bytes_of(file) == reference.bytes_of(file)
    assert not any(scratch.glob("*/trained")), "the samples are no longer needed"


def test_a_section_that_was_left_out_is_asked_for(project: Project) -> None:
    done = project.stage("baseline", "small_batch", "--repeat", "7")
    assert "--repeat 7 is not in repeats [1]: add it there first" in done.stderr
    project.remove_section("small_batch")
    done = project.stage("baseline", "small_batch")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "swa_small_batch starts from small_batch, which is missing: add that section, or remove" in done.stderr
    project.remove_section("swa_small_batch")
    for arguments, missing in ((("baseline", "small_batch"), "small_batch"), (("swa", "swa_small_batch"), "swa_small")):
        assert f"params.yaml: {missing}" in (done := project.stage(*arguments)).stderr
        assert "is missing: add that section, or take it over from a file in recipes/" in done.stderr
    assert ran(project.dvc("repro", "prepare")) == ["prepare"]
