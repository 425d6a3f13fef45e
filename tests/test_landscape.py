"""Landscapes: the right errors at the right places, with any number of ranks, killed or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Clock, Project, processes_in, wait_until
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from swap_pipeline.analysis.landscape import Chart, Errors, as_json, charts_of
from swap_pipeline.analysis.landscape_job import cost
from swap_pipeline.analysis.planes import Plane
from swap_pipeline.analysis.sample import chosen
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.epochs import draw_epoch
from swap_pipeline.engine.results import read_point, write_point
from swap_pipeline.models.networks import load_model
from swap_pipeline.runtime.progress import time_left
from swap_pipeline.storage.tensor_files import read_tensors

# Of 240 and 120: many enough to tell models apart.
TRAIN, TEST = 200, 110
SEED = derive_seed("phase3", 0)  # of passes for statistics, where `seed` is 0


def run(project: Project, **environment: str) -> tuple[Any, str]:
    """The record, and what was said."""
    done = project.stage("landscape", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return project.json("analysis/landscape.json"), done.stdout


@pytest.fixture(scope="module")
def landscape(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Any, str]:
    """Without a margin, so that the grid has its corners at marked points."""
    project = finished_project.copy_to(tmp_path_factory.mktemp("landscape") / "project")
    project.set_analysis({"margin": 0.0, "train_images": TRAIN, "test_images": TEST})
    return (project, *run(project))


def plane(record: Any, name: str) -> Any:
    (found,) = (entry for entry in record["planes"] if entry["name"] == name)
    return found


def mark(record: Any, of: str, name: str) -> Any:
    (found,) = (entry for entry in plane(record, of)["marks"] if entry["name"] == name)
    return found


def sampled(project: Project, split: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised by hand."""
    tensors, _ = read_tensors(project.root / f"data/prepared/{split}.safetensors")
    meta = project.json("data/prepared/meta.json")
    indices = chosen(len(tensors["labels"]), count, seed=SEED, split=split)
    assert indices is not None and len(indices) == count
    pixels = tensors["images"][indices].double() / 255
    return ((pixels - meta["mean"][0]) / meta["std"][0]).float(), tensors["labels"][indices]


def error_of(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Any:
    """In percent, give or take the images between whose first two classes rounding decides."""
    logits = network(images)
    first, second = logits.topk(2, dim=1).values.unbind(dim=1)
    tolerance = 100 * (first - second < 1e-4).double().mean().item() + 1e-4
    assert tolerance < 3
    return pytest.approx(100 * (logits.argmax(dim=1) != labels).double().mean().item(), abs=tolerance)


def own_errors(project: Project, path: str) -> tuple[Any, Any]:
    """Train and test error of a model: statistics from all that its layers see in batches of 50, put together."""
    network = load_model(project.root / path)
    images, labels = sampled(project, "train", TRAIN)
    order = draw_epoch(seed=SEED, epoch=0, num_images=TRAIN, image_size=(28, 28)).order
    layers = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    seen: dict[nn.Module, list[torch.Tensor]] = {layer: [] for layer in layers}
    hooks = [layer.register_forward_pre_hook(lambda layer, inputs: seen[layer].append(inputs[0])) for layer in layers]
    with torch.no_grad():
        network.train()
        for part in order.split(50):
            network(images[part])
        for hook in hooks:
            hook.remove()
        for layer, inputs in seen.items():
            values = torch.cat(inputs).double().transpose(0, 1).flatten(1)
            layer.running_mean.copy_(values.mean(dim=1))  # type: ignore[operator, union-attr]
            layer.running_var.copy_(values.var(dim=1))  # type: ignore[operator, union-attr]
        network.eval()
        return error_of(network, images, labels), error_of(network, *sampled(project, "test", TEST))


@pytest.mark.parametrize(
    ("of", "name", "path"),
    [
        ("phases", "LB", "checkpoints/phase1"),
        ("phases", "SGD", "checkpoints/phase2/seed_0"),
        ("phases", "SWAP", "checkpoints/phase3"),
        ("workers", "worker 0", "checkpoints/phase2/seed_0"),
        ("workers", "worker 1", "checkpoints/phase2/seed_1"),
        ("workers", "worker 2", "checkpoints/phase2/seed_2"),
        ("workers", "SWAP", "checkpoints/phase3"),
    ],
)
def test_a_marked_model_has_the_errors_that_it_has_by_itself(
    landscape: tuple[Project, Any, str], of: str, name: str, path: str
) -> None:
    project, record, _ = landscape
    found = mark(record, of, name)
    train, test = own_errors(project, f"{path}/model.safetensors")
    assert found["train_error"] == train
    assert found["test_error"] == test


def test_the_marked_models_differ_so_that_these_tests_can_tell_them_apart(landscape: tuple[Project, Any, str]) -> None:
    _, record, _ = landscape
    marks = [mark(record, "phases", name) for name in ("LB", "SGD", "SWAP")]
    assert len({(found["train_error"], found["test_error"]) for found in marks}) == 3


def test_grid_points_that_coincide_with_marked_models_have_their_errors(landscape: tuple[Project, Any, str]) -> None:
    _, record, _ = landscape
    phases = plane(record, "phases")
    lb, sgd, swap = phases["marks"]
    assert lb["position"] == [0.0, 0.0] and sgd["position"][1] == pytest.approx(0, abs=1e-9)
    assert 0 < swap["position"][0] < sgd["position"][0]
    assert phases["u_range"] == pytest.approx([0.0, sgd["position"][0]])
    assert phases["v_range"] == pytest.approx([0.0, swap["position"][1]])
    for kind in ("train_error", "test_error"):
        rows = phases[kind]
        assert len(rows) == 3 and all(len(row) == 3 for row in rows)
        assert rows[0][0] == lb[kind]  # rows follow v, columns u
        assert rows[0][2] == sgd[kind]
        assert rows[2][2] != rows[0][0]


def test_best_is_the_lowest_test_error_of_the_grid(landscape: tuple[Project, Any, str]) -> None:
    _, record, _ = landscape
    workers, best = plane(record, "workers"), mark(record, "workers", "BEST")
    assert best["test_error"] == min(min(row) for row in workers["test_error"])
    (a0, a1), (b0, b1) = workers["u_range"], workers["v_range"]
    column = round(2 * (best["position"][0] - a0) / (a1 - a0))
    row = round(2 * (best["position"][1] - b0) / (b1 - b0))
    assert workers["test_error"][row][column] == best["test_error"]
    assert workers["train_error"][row][column] == best["train_error"]


def test_swap_is_projected_onto_the_plane_of_the_workers(landscape: tuple[Project, Any, str]) -> None:
    _, record, _ = landscape
    one, two, three, swap, _ = plane(record, "workers")["marks"]
    assert swap["projected"] and "projected" not in one
    # The mean of three workers lies in their plane, in the middle of them.
    assert swap["distance"] == pytest.approx(0, abs=1e-4)
    for side in (0, 1):
        middle = (one["position"][side] + two["position"][side] + three["position"][side]) / 3
        assert swap["position"][side] == pytest.approx(middle, abs=1e-4)


def test_the_cost_is_told_before_the_work_and_the_time_on_the_way(landscape: tuple[Project, Any, str]) -> None:
    _, record, said = landscape
    assert "landscape: 23 points × 3 passes" in said.splitlines()[0]
    assert record["train_images"] == TRAIN and record["test_images"] == TEST
    assert cost(345, 2000, 1000, 2).endswith("1,725,000 images forward, shared by 2 ranks")


def test_the_time_that_is_left_follows_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("swap_pipeline.runtime.progress.time", clock)
    clock.advance(50)
    assert [time_left(0, done, 4) for done in (1, 2, 4)] == [", about 0:02:30 left", ", about 0:00:50 left", ""]


@pytest.mark.long
def test_with_all_images_swap_has_phase_3s_own_test_error_and_two_ranks_find_what_one_finds(
    finished_project: Project, tmp_path: Path
) -> None:
    project = finished_project.copy_to(tmp_path / "project")
    project.set_analysis({"grid": 2, "train_images": "all", "test_images": 10_000})
    one, _ = run(project)
    project.set_params({"phase1.shards": 2})
    two, said = run(project, SWAP_NPROC="2")

    assert one["test_images"] == 120
    accuracy = project.json("metrics/phase3.json")["test_accuracy"]
    assert mark(one, "phases", "SWAP")["test_error"] == pytest.approx(100 - accuracy)
    assert "shared by 2 ranks" in said and two["devices"] == "2 × cpu"
    for name in ("phases", "workers"):
        for kind in ("train_error", "test_error"):
            assert plane(two, name)[kind] == plane(one, name)[kind]
        for a, b in zip(plane(one, name)["marks"], plane(two, name)["marks"], strict=True):
            assert a["position"] == pytest.approx(b["position"], abs=1e-9)
            assert (a["name"], a["train_error"], a["test_error"]) == (b["name"], b["train_error"], b["test_error"])


@pytest.mark.long
def test_a_killed_landscape_goes_on_and_ends_with_the_same_record(finished_project: Project, tmp_path: Path) -> None:
    undisturbed, project = (finished_project.copy_to(tmp_path / name) for name in ("undisturbed", "project"))
    for copy in (undisturbed, project):
        copy.environment = {"SWAP_NPROC": "2"}
        copy.set_params({"phase1.shards": 2})
        copy.set_analysis({"grid": 25})
    expected, _ = run(undisturbed)

    def pieces() -> list[Path]:
        return sorted((project.root / ".swap" / "landscape").glob("*/kept/points_*.json"))

    process = subprocess.Popen(
        [sys.executable, "-m", "stages.landscape"],
        cwd=project.root,
        env=project.full_environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: len(pieces()) >= 2 or process.poll() is not None)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: processes_in(project.root) == [], seconds=10)
    before = {key: row for path in pieces() for key, row in (read_point(path) or {}).items()}
    # A point that is computed again does not remember that it once took an hour.
    path = pieces()[0]
    write_point(path, {key: [*row[:2], 3600.0] for key, row in (read_point(path) or {}).items()})

    record, said = run(project)

    assert 0 < len(before) < 1255
    assert f"resuming after {len(before)} of 1255 points" in said
    assert record["seconds"] > 1800 > expected["seconds"]
    assert {**record, "seconds": 0} == {**expected, "seconds": 0}


def vectors(workers: int) -> dict[str, torch.Tensor]:
    names = ["LB", *(f"worker {seed}" for seed in range(workers)), "SWAP"]
    return {name: torch.eye(8, dtype=torch.float64)[i] for i, name in enumerate(names)}


def test_a_plane_that_cannot_be_had_is_left_out_with_the_reason() -> None:
    charts, left_out = charts_of(vectors(1), seeds=[0], grid=3, margin=0.1)
    assert charts == []
    assert [entry["name"] for entry in left_out] == ["phases", "workers"]
    assert "with one worker, SWAP is that worker" in left_out[0]["why"]
    assert "there is only 1" in left_out[1]["why"]

    charts, left_out = charts_of(vectors(2), seeds=[0, 1], grid=3, margin=0.1)
    assert [chart.name for chart in charts] == ["phases"]
    assert "there are only 2" in left_out[0]["why"]

    straight = {**vectors(3), "worker 1": torch.zeros(8, dtype=torch.float64)}
    straight["worker 2"] = -straight["worker 0"]
    charts, left_out = charts_of(straight, seeds=[0, 1, 2], grid=3, margin=0.1)
    assert [chart.name for chart in charts] == ["phases"]
    assert left_out[0]["why"] == "no plane goes through worker 0, worker 1 and worker 2: they lie on one line"


def test_the_first_workers_are_those_that_params_list_first() -> None:
    models = vectors(4)
    (phases, workers), _ = charts_of(models, seeds=[2, 0, 3, 1], grid=5, margin=0.0)
    assert phases.seeds == (2,) and phases.marks[1].model == "worker 2"
    assert workers.seeds == (2, 0, 3)
    assert workers.marks[3].distance == pytest.approx((1 + 1 / 3) ** 0.5)  # from the middle of three unit vectors


def test_of_several_best_points_the_one_with_the_lowest_training_error_is_marked() -> None:
    unit = torch.eye(3, dtype=torch.float64)
    chart = Chart(
        name="workers",
        title="",
        seeds=(0, 1, 2),
        plane=Plane(origin=unit[0], u=unit[1], v=unit[2]),
        marks=(),
        along_u=[0.0, 1.0],
        along_v=[5.0, 7.0],
    )
    values = {"workers 0 0": (9, 3), "workers 0 1": (8, 2), "workers 1 0": (6, 2), "workers 1 1": (7, 2)}
    record = as_json(chart, {key: Errors(train=a, test=b, seconds=0) for key, (a, b) in values.items()})
    assert record["marks"] == [{"name": "BEST", "position": [0.0, 7.0], "train_error": 6, "test_error": 2}]
    assert record["train_error"] == [[9, 8], [6, 7]]
