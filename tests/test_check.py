"""What DVC makes of params.yaml before any code of ours runs: nothing in there may run, delete or hang."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from conftest import ROOT, Project, assert_one_line
from test_fuzz import BOMB

from swap_pipeline.config.reading import read_params

HOSTILE_SEEDS: dict[str, Any] = {
    "a command": "0; touch PWNED; true",
    "a substitution": "$(touch PWNED)",
    "a quote": "0'; touch PWNED; '",
    "lines": "0\ntouch PWNED\n",
    "a section": {"0; touch PWNED; true": 1},
    "a way out of the project": "0/../../../../outside",
    "a way to another folder": "0/../../../docs",
}
HOSTILE_ROOTS: dict[str, tuple[str, str]] = {
    "an address": ("http://127.0.0.1:9/x", "an address"),
    "a device": ("/dev/zero", "is not a folder"),
    "a file": ("params.yaml", "is not a folder"),
    "nothing": ("nowhere", "does not exist"),
    "lines": ("a\nb", "does not exist"),
}


@pytest.mark.parametrize("name", HOSTILE_SEEDS)
@pytest.mark.long
def test_a_seed_that_is_no_number_neither_runs_nor_deletes_anything_under_dvc(finished: Project, name: str) -> None:
    kept = [finished.root / "docs" / "kept.txt", finished.root.parent / "outside" / "kept.txt"]
    for path in kept:
        path.parent.mkdir()
        path.write_text("kept")
    finished.set_params({"workers.seeds": [HOSTILE_SEEDS[name], 1]})

    everything = finished.run("dvc", "repro", check=False)
    alone = finished.run("dvc", "repro", "--keep-going", "phase2", check=False)

    assert everything.returncode != 0 and alone.returncode != 0
    ours, of_dvc = "error: params.yaml: workers.seeds[0] is ", "Cannot interpolate data of type 'dict'"
    assert (of_dvc if name == "a section" else ours) in everything.stderr
    assert list(finished.root.rglob("PWNED")) == []
    assert [path.read_text() for path in kept] == ["kept", "kept"]


def test_a_command_in_a_seed_is_not_run_even_where_only_that_worker_is_asked_for(finished: Project) -> None:
    finished.set_params({"workers.seeds": ["0; touch PWNED; true", 1]})

    done = finished.run("dvc", "repro", "--single-item", "phase2@0; touch PWNED; true", check=False)

    assert "Running stage 'phase2@0; touch PWNED; true'" in done.stdout
    assert "error: params.yaml: workers.seeds[0] is " in done.stderr
    assert not (finished.root / "PWNED").exists()


@pytest.mark.parametrize("name", HOSTILE_ROOTS)
def test_a_data_root_that_is_no_folder_is_refused_before_dvc_reads_it(finished: Project, name: str) -> None:
    root, reason = HOSTILE_ROOTS[name]
    finished.set_params({"data.root": root})

    done = finished.run("dvc", "repro", check=False)

    assert done.returncode != 0
    assert "error: params.yaml: data.root is " in done.stderr and reason in done.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers.seeds": 3}, ["workers.seeds is 3: write a list"]),
        ({"workers.seeds": None}, ["workers.seeds is None: write a list"]),
        ({"data.root": None}, ["data.root is None, but must be text"]),
        ({"data.root": ""}, ["data.root is '', which does not exist"]),
        ({"data.root": "x\0y"}, ["data.root is 'x\\x00y', which does not exist"]),
        ({"data.root": "."}, ["data.root is '.', which overlaps with"]),
        ({"data.root": "data"}, ["data.root is 'data', which overlaps with data/"]),
        ({"data.root": "checkpoints/phase1"}, ["which overlaps with checkpoints"]),
    ],
)
def test_swap_check_says_in_one_line_what_dvc_would_not(
    finished: Project, values: dict[str, Any], words: list[str]
) -> None:
    finished.set_params(values)

    assert_one_line(finished.swap("check"), "params.yaml: ", *words)


def test_swap_check_refuses_a_params_file_on_which_dvc_would_hang(project: Project) -> None:
    (project.root / "params.yaml").write_text(f"{BOMB}data: *l\n")

    assert_one_line(project.swap("check"), "params.yaml: the file has more than 20,000 values")


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "link to a pipe"])
def test_swap_check_names_what_dvc_would_wait_for_in_the_folder_of_images(project: Project, kind: str) -> None:
    path = project.root / "data/raw/train/ant/1.png"
    path.parent.mkdir(parents=True)
    if kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(project.root / "pipe")
        path.symlink_to(project.root / "pipe")
    (path.parent / "0.png").symlink_to("nowhere")

    what = "a device" if kind == "link to a device" else "a pipe"
    assert_one_line(project.swap("check"), f"'data/raw/train/ant/1.png' is {what}")


def test_swap_check_names_what_dvc_would_wait_for_among_the_outputs(finished: Project) -> None:
    path = finished.root / "checkpoints/phase1/model.safetensors"
    path.unlink()
    os.mkfifo(path)

    assert_one_line(finished.swap("check"), "'checkpoints/phase1/model.safetensors' is a pipe, which DVC cannot read")


def test_swap_check_has_no_objection_to_any_recipe_and_needs_no_torch(project: Project) -> None:
    recipes = [path for path in sorted((ROOT / "recipes").glob("*.yaml")) if ".methods" not in path.name]
    assert recipes
    for recipe in recipes:
        (project.root / read_params(recipe).data.root).mkdir(exist_ok=True)
        done = project.swap("check", "--params", str(recipe))
        assert done.returncode == 0 and done.stdout.startswith(f"{recipe} is fine"), done.stderr
    code = "import sys; from swap_pipeline.datasets.check import check; check(); sys.exit('torch' in sys.modules)"
    assert project.run(sys.executable, "-c", code, check=False).returncode == 0


def test_params_that_change_without_harm_are_checked_anew_and_nothing_is_prepared_again(finished: Project) -> None:
    finished.set_params({"seed": 7})

    said = finished.dvc("repro", "prepare")

    assert "Running stage 'check'" in said
    assert "Stage 'prepare' didn't change" in said


@pytest.mark.long
def test_doctor_says_what_check_says(project: Project) -> None:
    project.set_params({"data.root": "data"})

    done = project.swap("doctor")

    assert done.returncode == 1
    assert "params.yaml: data.root is 'data', which overlaps with" in done.stdout


def test_make_run_checks_first() -> None:
    makefile = (ROOT / "Makefile").read_text()

    assert makefile.index("swap check") < makefile.index("dvc repro\n\n")


def test_a_worker_is_chosen_by_hand_or_by_the_name_that_dvc_gives(finished: Project) -> None:
    by_hand = finished.stage("phase2", "--seed", "1")
    under_dvc = finished.stage("phase2", DVC_STAGE="phase2@1", SWAP_FANOUT="0")
    from_elsewhere = finished.stage("phase2", DVC_STAGE="../dvc.yaml:phase2@1", SWAP_FANOUT="0")
    nowhere = finished.stage("phase2")

    taken = [
        done.stdout for done in (by_hand, under_dvc, from_elsewhere) if "phase2 seed 1: already trained" in done.stdout
    ]
    assert len(taken) == 3
    assert_one_line(nowhere, "--seed is missing")


def test_from_another_folder_dvc_trains_the_same_workers(finished: Project) -> None:
    finished.set_params({"workers.seeds": [0, 1, 2, 5]})

    finished.run("sh", "-c", "cd recipes && dvc repro ../dvc.yaml:phase2")

    assert (finished.root / "checkpoints/phase2/seed_5/model.safetensors").is_file()
