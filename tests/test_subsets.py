"""Averages of some of the workers, and how far these are apart."""

from __future__ import annotations

import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Project

from swap_pipeline.analysis.subsets import geometry, subsets_of
from swap_pipeline.storage.tensor_files import write_tensors


def test_all_choices_of_each_size_are_taken_where_they_are_few() -> None:
    assert subsets_of([2, 0, 1], at_most=10, seed=0) == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]


def test_of_many_choices_so_many_different_ones_are_drawn_and_always_the_same() -> None:
    found = subsets_of(range(8), at_most=10, seed=0)
    for size in range(1, 9):
        of_size = [subset for subset in found if len(subset) == size]
        assert len(of_size) == len(set(of_size)) == min(10, len(list(combinations(range(8), size))))
        assert all(subset == tuple(sorted(set(subset))) and set(subset) <= set(range(8)) for subset in of_size)
    assert found == subsets_of(range(8), at_most=10, seed=0) != subsets_of(range(8), at_most=10, seed=1)
    assert len(subsets_of(range(100), at_most=2, seed=0)) == 2 * 99 + 1


def test_distances_and_cosines_are_those_of_numpy(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    start = {"a": chance.normal(size=(3, 4)), "b": chance.normal(size=5), "buffer": chance.normal(size=2)}
    models = [start, *({key: value + chance.normal(size=value.shape) for key, value in start.items()} for _ in "123")]
    paths = [tmp_path / f"{i}.safetensors" for i in range(4)]
    for path, model in zip(paths, models, strict=True):
        write_tensors(path, {key: torch.from_numpy(value).float() for key, value in model.items()}, {})
    flat = [np.concatenate([model["a"].reshape(-1), model["b"]]) for model in models]
    ways = [vector - flat[0] for vector in flat[1:]]

    found = geometry(paths[0], paths[1:], ["a", "b"])

    for i, one in enumerate(ways):
        assert found["distance_from_phase1"][i] == pytest.approx(np.linalg.norm(one), rel=1e-6)
        for j, other in enumerate(ways):
            assert found["distance"][i][j] == pytest.approx(np.linalg.norm(one - other), rel=1e-6)
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert found["cosine"][i][j] == pytest.approx(cosine, abs=1e-6)
    assert found["norm_of_phase1"] == pytest.approx(np.linalg.norm(flat[0]), rel=1e-6)


def test_a_worker_that_never_moved_has_no_direction(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, value in zip(paths, (1.0, 1.0, 2.0), strict=True):
        write_tensors(path, {"a": torch.full((2,), value)}, {})
    assert geometry(paths[0], paths[1:], ["a"])["cosine"] == [[1, 0], [0, 1]]


@pytest.fixture(scope="module")
def averaged(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Any, str]:
    project = finished_project.copy_to(tmp_path_factory.mktemp("workers") / "project")
    done = project.stage("workers")
    assert done.returncode == 0, done.stderr
    return project, project.json("analysis/workers.json"), done.stdout


def test_the_average_of_all_workers_is_phase_3s_result(averaged: tuple[Project, Any, str]) -> None:
    project, record, said = averaged
    phase3 = project.json("metrics/phase3.json")
    assert [subset["size"] for subset in record["subsets"]] == [1, 1, 2, 2, 3]  # subsets is 2
    assert record["seeds"] == [0, 1, 2] == record["subsets"][-1]["seeds"]
    assert record["subsets"][-1]["accuracy"] == phase3["test_accuracy"]
    assert record["subsets"][-1]["loss"] == phase3["test_loss"]
    assert len({subset["loss"] for subset in record["subsets"]}) == 5
    assert said.startswith("workers: 5 averages × 2 passes (240 images for statistics, 120 test images)\n")


def test_one_worker_alone_is_its_own_model_as_phase_3_leaves_it(averaged: tuple[Project, Any, str]) -> None:
    project, record, _ = averaged
    alone = record["subsets"][0]
    (seed,) = alone["seeds"]
    project.set_params({"workers.seeds": [seed]})
    assert project.stage("phase3").returncode == 0
    assert alone["loss"] == project.json("metrics/phase3.json")["test_loss"]
    assert alone["loss"] == project.json(f"metrics/phase2/seed_{seed}.json")["test_loss"]


def test_with_cycles_a_worker_takes_part_with_all_its_models(finished: Project) -> None:
    finished.set_params({"phase2.cycles": 2})
    finished.set_analysis({"subsets": 1})
    for seed in (0, 1, 2):
        folder = finished.root / f"checkpoints/phase2/seed_{seed}"
        shutil.copy(folder / "epoch_1.safetensors", folder / "cycle_1.safetensors")
    for stage in ("phase3", "workers"):
        done = finished.stage(stage)
        assert done.returncode == 0, done.stderr
    phase3, last = finished.json("metrics/phase3.json"), finished.json("analysis/workers.json")["subsets"][-1]
    assert phase3["models"] == 6
    assert (last["size"], last["loss"]) == (3, phase3["test_loss"])
