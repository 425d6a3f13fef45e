"""Whatever a user gets wrong: one line on standard error, exit code 1, nothing half-written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, assert_one_line

from swap_pipeline.storage.tensor_files import read_tensors, write_tensors


def outs(project: Project, stage: str) -> list[str]:
    """Files that a stage left where DVC looks for them."""
    return sorted(str(path) for path in (project.root / "checkpoints" / stage).rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("values", "environment", "words"),
    [
        ({"phase1.batchsize": 4}, {}, ["params.yaml: phase1.batchsize", "did you mean batch_size or fork_batch_size?"]),
        ({"phase1.batch_size": "24"}, {}, ["params.yaml: phase1.batch_size", "whole number"]),
        ({"phase1.peak_lr": -1.0}, {}, ["params.yaml: phase1.peak_lr", "above 0"]),
        ({"workers.seeds": [3, 3]}, {}, ["params.yaml: workers.seeds", "more than once"]),
        ({"workers.seeds": []}, {}, ["params.yaml: workers.seeds", "empty"]),
        (
            {"phase1.batch_size": 25, "phase1.shards": 2},
            {},
            ["phase1.batch_size is 25, which 2 shards", "set phase1.shards to 1"],
        ),
        ({"phase1.stop_accuracy": 0.9}, {}, ["phase1.stop_accuracy is 0.9", "write 90"]),
        ({}, {"SWAP_NPROC": "two"}, ["SWAP_NPROC is 'two'", "whole number"]),
        (
            {"seed": 5},
            {"SWAP_NPROC": "2", "SWAP_TIMEOUT_MINUTES": "soon"},
            ["SWAP_TIMEOUT_MINUTES is 'soon'", "number of minutes"],
        ),
        ({}, {"SWAP_NPROC": "1000000000"}, ["SWAP_NPROC is '1000000000'", "from 1 to 100,000"]),
        ({}, {"SWAP_NPROC": "99999"}, ["SWAP_NPROC is 99999, but there are", "cores: lower it"]),
        ({}, {"SWAP_NPROC": "9" * 5000}, ["SWAP_NPROC is '9999", "from 1 to 100,000"]),
        ({"seed": 5}, {"SWAP_SNAPSHOT_SECONDS": "often"}, ["SWAP_SNAPSHOT_SECONDS is 'often'", "number of seconds"]),
        ({"seed": 5}, {"SWAP_RETRIES": "9" * 5000}, ["SWAP_RETRIES is '9999", "from 0 to 1,000"]),
        ({}, {"SWAP_DEVICE": "gpu"}, ["SWAP_DEVICE is 'gpu'", "choose cpu or cuda"]),
    ],
)
def test_bad_settings_end_phase_1_before_anything_starts(
    finished: Project, values: dict[str, Any], environment: dict[str, str], words: list[str]
) -> None:
    before = outs(finished, "phase1")
    finished.set_params(values)
    assert_one_line(finished.stage("phase1", **environment), *words)
    assert outs(finished, "phase1") == before
    assert finished.trained("phase1") == 1


def test_a_missing_key_is_named(finished: Project) -> None:
    path = finished.root / "params.yaml"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "max_epochs" not in line))
    assert_one_line(finished.stage("phase1"), "phase1.max_epochs is missing")


def test_under_dvc_the_line_is_shown_and_the_stage_fails(finished: Project) -> None:
    finished.set_params({"phase2.peak_lr": "fast"})
    done = finished.run("dvc", "repro", check=False)
    assert done.returncode != 0
    assert "error: params.yaml: phase2.peak_lr is 'fast', but must be a number" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_an_unknown_data_set_or_network_lists_the_known_ones(finished: Project) -> None:
    finished.set_params({"data.name": "fashion-minni"})
    assert_one_line(finished.stage("prepare"), "data.name is 'fashion-minni'", "fashion-mini")
    finished.set_params({"data.name": "fashion-mini", "model.name": "resnet99"})
    assert_one_line(finished.stage("phase1"), "model.name is 'resnet99'", "resnet9")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("stage", "file", "damages"),
    [
        ("prepare", "data/fashion-mini.safetensors", [flip_a_bit, cut, Path.unlink]),
        ("phase1", "data/prepared/train.safetensors", [flip_a_bit, cut, Path.unlink]),
        ("phase1", "data/prepared/meta.json", [cut, Path.unlink]),
        ("phase3", "checkpoints/phase2/seed_1/model.safetensors", [flip_a_bit, cut, Path.unlink]),
    ],
)
@pytest.mark.long
def test_a_missing_or_damaged_file_is_named(
    finished: Project, stage: str, file: str, damages: list[Callable[[Path], object]]
) -> None:
    path = finished.root / file
    path.chmod(0o644)
    before = [out for out in outs(finished, stage) if out != str(path)]
    for damage in damages:
        damage(path)
        assert_one_line(finished.stage(stage), file)
    assert [out for out in outs(finished, stage) if out != str(path)] == before


def test_a_checkpoint_of_another_network_is_named_with_the_tensor_that_differs(finished: Project) -> None:
    finished.set_params({"model.width": 3})
    done = finished.stage("phase2", "--seed", "0")
    assert_one_line(done, "checkpoints/phase1/model.safetensors belongs to another network", "stem.0.weight")


def test_a_worker_of_another_network_does_not_enter_the_average(finished: Project) -> None:
    path = finished.root / "checkpoints/phase2/seed_1/model.safetensors"
    tensors, info = read_tensors(path)
    write_tensors(path, {key: tensor for key, tensor in tensors.items() if key != "head.weight"}, info)
    assert_one_line(finished.stage("phase3"), "seed_1/model.safetensors has no tensor 'head.weight'")


def test_a_worker_with_nan_does_not_enter_the_average(finished: Project) -> None:
    path = finished.root / "checkpoints/phase2/seed_1/model.safetensors"
    tensors, info = read_tensors(path)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    tensors["head.weight"][0, 0] = float("nan")
    write_tensors(path, tensors, info)
    finished.set_params({"phase1.shards": 2})
    done = finished.stage("phase3", SWAP_NPROC="2")  # the rank that finds it must be heard before the one that waits
    assert_one_line(done, "seed_1/model.safetensors: tensor 'head.weight' contains NaN or Inf (phase2, seed 1)")


def test_a_diverging_phase_says_where_and_what_to_do(finished: Project) -> None:
    finished.set_params({"phase1.peak_lr": 1e30})
    before = outs(finished, "phase1")
    assert_one_line(
        finished.stage("phase1"),
        "phase1 (seed 0): loss or gradient is not finite at epoch 1, step",
        "phase1.peak_lr",
    )
    assert outs(finished, "phase1") == before


def test_a_seed_that_is_not_listed_is_not_trained(finished: Project) -> None:
    assert_one_line(finished.stage("phase2", "--seed", "99"), "--seed '99' is not in workers.seeds [0, 1, 2]")


def test_a_python_without_the_packages_is_told_to_activate_the_environment(finished: Project) -> None:
    done = finished.run(sys.executable, "-S", "-m", "stages.phase1", check=False)
    assert_one_line(done, "has no package 'click'", "activate")


@pytest.mark.parametrize(
    ("source", "word"), [("phase2/seed_0", "seed 0, not 1"), ("phase1", "phase 'phase1', not 'phase2'")]
)
def test_phase_3_refuses_a_file_that_is_whole_but_not_this_workers(finished: Project, source: str, word: str) -> None:
    target = finished.root / "checkpoints/phase2/seed_1/model.safetensors"
    target.unlink()
    target.write_bytes(finished.bytes_of(f"checkpoints/{source}/model.safetensors"))

    assert_one_line(finished.stage("phase3"), "phase2/seed_1/model.safetensors", "not the file that belongs", word)


def test_training_refuses_test_images_in_the_place_of_training_images(finished: Project) -> None:
    target = finished.root / "data/prepared/train.safetensors"
    content = finished.bytes_of("data/prepared/test.safetensors")
    target.unlink()
    target.write_bytes(content)

    assert_one_line(finished.stage("phase1"), "data/prepared/train.safetensors does not belong to")


def test_training_refuses_images_that_were_prepared_with_another_normalisation(finished: Project) -> None:
    path = finished.root / "data/prepared/meta.json"
    tree = finished.json("data/prepared/meta.json")
    path.unlink()
    path.write_text(json.dumps({**tree, "mean": [tree["mean"][0] + 0.01]}))

    assert_one_line(finished.stage("phase1"), "data/prepared/train.safetensors does not belong to")
