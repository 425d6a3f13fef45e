"""The pipeline as its users run it: real DVC, real processes, tiny data."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Project

WORKERS = ["checkpoints/phase2/seed_0", "checkpoints/phase2/seed_1", "checkpoints/phase2/seed_2"]


def ran(output: str) -> list[str]:
    """Stages whose command DVC started, in order."""
    return re.findall(r"Running stage '(.*?)'", output)


def test_repro_runs_all_phases_and_ends_with_the_table(finished_project: Project) -> None:
    output = (finished_project.root.parent / "output.txt").read_text()
    order = ran(output)
    # DVC runs the instances of a matrix in any order, and stages that do not need each other.
    assert [*order[:3], *sorted(order[3:6]), *order[6:]] == [
        "check",
        "prepare",
        "phase1",
        "phase2@0",
        "phase2@1",
        "phase2@2",
        "phase3",
        "report",
    ]
    for words in (
        "phase 1 (3 epochs, maximum reached)",
        "worker, seed 2",
        "mean of 3 workers",
        "average of 3 workers",
        "critical path",
    ):
        assert words in output
    assert re.search(r"^trained: phase 1, workers 0, 1, 2$", output, re.M) and "reused:" not in output
    assert re.search(r"^report:  report/index.html$", output, re.M)


def test_metrics_are_what_the_phases_recorded(finished_project: Project) -> None:
    summary = finished_project.json("metrics/swap.json")
    phase1, phase3 = finished_project.json("metrics/phase1.json"), finished_project.json("metrics/phase3.json")
    workers = [finished_project.json(f"metrics/phase2/seed_{seed}.json") for seed in (0, 1, 2)]
    assert summary == pytest.approx(
        {
            "accuracy": phase3["test_accuracy"],
            "loss": phase3["test_loss"],
            "workers": sum(worker["test_accuracy"] for worker in workers) / 3,
            "phase1": phase1["curve"][-1]["accuracy"],
            "seconds": sum(row["seconds"] for row in phase1["curve"])
            + max(worker["seconds"] for worker in workers)
            + phase3["seconds"],
        }
    )


def test_curves_hold_every_epoch_of_every_run(finished_project: Project) -> None:
    rows = list(csv.DictReader((finished_project.root / "plots" / "curves.csv").open()))
    assert [(row["run"], row["epoch"]) for row in rows] == [
        *(("phase1", str(epoch)) for epoch in (1, 2, 3)),
        *((f"seed_{seed}", str(epoch)) for seed in (0, 1, 2) for epoch in (4, 5)),
    ]
    phase1 = finished_project.json("metrics/phase1.json")
    assert [float(row["accuracy"]) for row in rows[:3]] == [row["accuracy"] for row in phase1["curve"]]


def test_the_final_model_is_the_mean_of_the_workers(finished_project: Project) -> None:
    import torch

    from swap_pipeline import load_model

    networks = [load_model(finished_project.root / worker / "model.safetensors") for worker in WORKERS]
    final = load_model(finished_project.root / "checkpoints/phase3/model.safetensors")
    for name, parameter in final.named_parameters():
        mean = sum(dict(network.named_parameters())[name].double() for network in networks) / 3
        torch.testing.assert_close(parameter.double(), mean, rtol=0, atol=1e-7)
    assert not torch.equal(final.get_buffer("stem.1.running_mean"), networks[0].get_buffer("stem.1.running_mean"))


def test_nothing_to_do_the_second_time(finished: Project) -> None:
    output = finished.dvc("repro")
    assert ran(output) == []
    assert "Data and pipelines are up to date." in output


def test_checkpoints_hold_no_clock_host_or_path(finished_project: Project) -> None:
    from swap_pipeline.storage.tensor_files import TensorFile

    info = TensorFile(finished_project.root / WORKERS[1] / "model.safetensors").info
    assert set(info) == {"model", "classes", "shape", "mean", "std", "phase", "seed"}
    assert (info["phase"], info["seed"]) == ("phase2", 1)


def test_an_added_seed_trains_alone(finished: Project) -> None:
    before = {path: finished.bytes_of(f"{path}/model.safetensors") for path in ["checkpoints/phase1", *WORKERS]}
    # Listed first, so that its instance is the first to run and could fan out to the others.
    finished.set_params({"workers.seeds": [7, 0, 1, 2]})

    output = finished.dvc("repro")

    assert sorted(ran(output)) == ["check", "phase2@7", "phase3", "report"]
    assert finished.trained("phase2") == 4
    assert "phase2 seed 7: epoch 2/2" in output
    assert "phase2 seed 0" not in output
    assert "trained: worker 7\nreused:  phase 1, workers 0, 1, 2\n" in output
    assert {path: finished.bytes_of(f"{path}/model.safetensors") for path in before} == before


@pytest.mark.long
def test_a_clone_that_pulled_the_results_trains_only_the_added_seed(finished: Project, tmp_path: Path) -> None:
    finished.dvc("remote", "add", "--local", "-d", "store", str(tmp_path / "remote"))
    finished.dvc("push")
    clone = Project(tmp_path / "clone")
    finished.run("git", "clone", "-q", str(finished.root), str(clone.root))
    clone.dvc("remote", "add", "--local", "-d", "store", str(tmp_path / "remote"))
    clone.dvc("pull", "dvc.yaml")
    clone.set_params({"workers.seeds": [7, 0, 1, 2]})

    output = clone.dvc("repro")

    assert sorted(ran(output)) == ["check", "phase2@7", "phase3", "report"]
    assert clone.trained("phase2") == 1


@pytest.mark.long
def test_phase_2_params_leave_phase_1_alone_and_going_back_trains_nothing(finished: Project) -> None:
    phase1, final = (finished.bytes_of(f"checkpoints/{phase}/model.safetensors") for phase in ("phase1", "phase3"))
    finished.set_params({"phase2.peak_lr": 0.02})
    changed = finished.dvc("repro")
    assert sorted(ran(changed)) == ["check", "phase2@0", "phase2@1", "phase2@2", "phase3", "report"]
    assert finished.bytes_of("checkpoints/phase1/model.safetensors") == phase1
    assert finished.bytes_of("checkpoints/phase3/model.safetensors") != final
    # What is left for DVC's run cache, without help from scratch:
    shutil.rmtree(finished.root / ".swap")

    finished.set_params({"phase2.peak_lr": 0.05})
    back = finished.dvc("repro")

    assert ran(back) == []
    assert finished.bytes_of("checkpoints/phase3/model.safetensors") == final


def test_one_repro_trains_all_pending_workers_side_by_side(finished: Project) -> None:
    finished.set_params({"phase2.peak_lr": 0.03})
    finished.dvc("repro", "--single-item", "phase2@1")
    assert finished.trained("phase2") == 6
    assert "phase2 seed 0: epoch" not in finished.dvc("repro", "--single-item", "phase2@0")


def test_fan_out_can_be_switched_off(finished: Project) -> None:
    finished.set_params({"phase2.peak_lr": 0.03})
    finished.dvc("repro", "--single-item", "phase2@1", SWAP_FANOUT="0")
    assert finished.trained("phase2") == 4


@pytest.mark.long
def test_a_seed_that_is_no_longer_listed_leaves_the_average_and_comes_back_untrained(finished: Project) -> None:
    final = finished.bytes_of("checkpoints/phase3/model.safetensors")
    finished.set_params({"workers.seeds": [0, 2]})
    fewer = finished.dvc("repro")
    assert sorted(ran(fewer)) == ["check", "phase3", "report"]
    assert not (finished.root / WORKERS[1]).exists()
    accuracies = [finished.json(f"metrics/phase2/seed_{seed}.json")["test_accuracy"] for seed in (0, 2)]
    assert finished.json("metrics/swap.json")["workers"] == pytest.approx(sum(accuracies) / 2)
    shutil.rmtree(finished.root / ".swap")

    finished.set_params({"workers.seeds": [0, 1, 2]})
    output = finished.dvc("repro")

    assert "phase2@1" not in ran(output)
    assert finished.bytes_of("checkpoints/phase3/model.safetensors") == final


@pytest.mark.long
def test_phase_1_run_again_with_the_same_result_does_not_train_phase_2(finished: Project) -> None:
    shutil.rmtree(finished.root / ".swap")
    output = finished.dvc("repro", "--force", "--single-item", "phase1")
    assert "phase1: epoch 3/3" in output
    assert ran(finished.dvc("repro")) == ["report"]


def test_pictures_and_curves_are_dvc_plots(finished: Project) -> None:
    plots = json.loads(finished.run("dvc", "plots", "show", "--json").stdout)["data"]
    assert plots["report/figures/training.svg"][0]["type"] == "image"
    assert plots["report/figures/schedules.svg"][0]["type"] == "image"
    (average,) = plots["held-out accuracy beside the average's"]
    drawn = [row for row in average["content"]["data"]["values"] if row["run"] == "averaged"]
    points = finished.json("metrics/phase3.json")["points"]
    assert [float(row["accuracy"]) for row in drawn] == [point["accuracy"] for point in points]
    assert [row["epoch"] for row in drawn] == ["4", "5"]  # after phase 1's three


def test_an_edited_report_trains_nothing(finished: Project) -> None:
    with (finished.root / "swap_pipeline" / "report" / "page.py").open("a") as file:
        file.write("# edited\n")
    assert ran(finished.dvc("repro")) == ["report"]


@pytest.mark.long
def test_experiments_in_the_workspace_in_a_temporary_folder_and_from_the_queue(finished: Project) -> None:
    finished.dvc("exp", "run", "-n", "here", "-S", "phase2.peak_lr=0.02")
    finished.dvc("exp", "run", "-n", "aside", "--temp", "-S", "phase2.peak_lr=0.03")
    finished.dvc("exp", "run", "-n", "queued", "--queue", "-S", "+phase3.augment=true")
    finished.dvc("exp", "run", "--run-all")

    shown = json.loads(finished.dvc("exp", "show", "--json"))
    baseline = next(entry for entry in shown if entry["rev"] != "workspace")
    found = {}
    for experiment in baseline["experiments"]:
        data = experiment["revs"][0]["data"]
        params = data["params"]["params.yaml"]["data"]
        metrics = data["metrics"]["metrics/swap.json"]["data"]
        found[experiment["name"]] = (params["phase2"]["peak_lr"], params["phase3"].get("augment"), metrics)
    assert {name: values[:2] for name, values in found.items()} == {
        "here": (0.02, None),
        "aside": (0.03, None),
        "queued": (0.02, True),  # on top of the workspace, where "here" ran
    }
    accuracies = {values[2]["phase1"] for values in found.values()}
    assert len(accuracies) == 1
    # Scratch is the project's, also for experiments that run elsewhere; nothing was trained twice.
    assert finished.trained("phase1") == 1
    assert finished.trained("phase2") == 9


@pytest.mark.long
def test_the_flags_of_the_readme_give_a_narrow_table(finished: Project) -> None:
    finished.dvc("exp", "run", "-n", "slower", "-S", "phase2.peak_lr=0.5")
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    command = re.search(r"^dvc (exp show .*?)$", readme.replace("\\\n", " "), re.MULTILINE)
    assert command is not None
    import shlex

    output = finished.run("dvc", *shlex.split(command[1]), COLUMNS="200").stdout
    assert "slower" in output
    assert "phase2.peak_lr" in output
    assert "workers" in output
    assert max(len(line) for line in output.splitlines()) <= 120


@pytest.mark.long
def test_a_worker_that_fails_keeps_the_others_and_is_trained_alone_the_next_time(finished: Project) -> None:
    script = finished.root / "stages" / "phase2.py"
    fault = (
        "    import os\n"
        '    if instance.seed == 1 and os.path.exists("broken"):\n'
        '        raise RuntimeError("injected")\n'
    )
    marker = "    from swap_pipeline.config.common_params import setting_of\n"
    script.write_text(script.read_text().replace(marker, fault + marker))
    (finished.root / "broken").touch()

    first = finished.dvc("repro", "--single-item", "phase2@0")
    failed = finished.dvc("repro", check=False)

    assert "phase2 seed 1 failed; it will be tried again when its turn comes" in first
    assert "RuntimeError: injected" in failed
    assert "failed to reproduce 'phase2@1'" in failed
    assert finished.trained("phase2") == 5
    (finished.root / "broken").unlink()
    fixed = finished.dvc("repro")
    assert "phase2 seed 1: epoch 2/2" in fixed
    assert "phase2 seed 2: epoch" not in fixed


def test_an_unexpected_error_shows_the_rank_s_own_traceback(finished: Project) -> None:
    script = finished.root / "swap_pipeline" / "config" / "schedules.py"
    script.write_text(script.read_text().replace("right = bisect_right", "right = None + bisect_right"))
    finished.set_params({"phase1.shards": 2})
    done = finished.stage("phase1", SWAP_NPROC="2")
    assert done.returncode == 1
    assert "TypeError: unsupported operand" in done.stderr
    assert "ChildFailedError" not in done.stderr


def test_a_stage_run_again_by_hand_changes_nothing_and_says_where_the_result_is_from(finished: Project) -> None:
    for stage in (["phase1"], ["phase2", "--seed", "0"], ["phase1"]):
        done = finished.stage(*stage)
        assert "already trained, taken from" in done.stdout
    assert finished.run("git", "status", "--porcelain").stdout == ""
    assert "up to date" in finished.dvc("status", "dvc.yaml")


@pytest.mark.long
def test_a_worker_can_be_a_group_of_devices(finished: Project) -> None:
    finished.set_params({"phase2.shards": 2, "workers.seeds": [0]})
    finished.dvc("repro")
    assert finished.json("metrics/phase2/seed_0.json")["devices"] == "2 × cpu"


def test_a_terminal_shows_a_bar_for_each_worker(finished: Project) -> None:
    finished.set_params({"phase2.peak_lr": 0.07})
    command = f"{sys.executable} -m stages.phase2 --seed 1"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        cwd=finished.root,
        env=finished.full_environment({"DVC_STAGE": "phase2@1", "COLUMNS": "120", "TERM": "xterm"}),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout
    for seed in (0, 1, 2):
        assert re.search(rf"phase2 seed {seed} ━+ +100 %", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout))
