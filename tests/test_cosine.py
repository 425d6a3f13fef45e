"""The direction of descent beside the direction to SWAP's output."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Project
from torch import nn

from swap_pipeline.analysis.gradient_direction import (
    direction,
    labelled_batches,
    mean_gradient,
    snapshots_of_phase1,
    snapshots_of_worker,
)
from swap_pipeline.analysis.sample import chosen
from swap_pipeline.config.params import Augment
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.epochs import draw_epoch
from swap_pipeline.data.images import Images
from swap_pipeline.engine.distributed import Group
from swap_pipeline.models.networks import load_model
from swap_pipeline.storage.tensor_files import read_tensors

CPU = torch.device("cpu")
ALONE = Group(rank=0, world_size=1, device=CPU)


def test_the_cosine_of_a_quadratic_is_the_one_of_the_closed_form() -> None:
    """Least squares: L(θ) = |Xθ − y|² / 2N has the gradient Xᵀ(Xθ − y) / N."""
    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(30, 4)), chance.normal(size=30)
    here, goal = chance.normal(size=4), chance.normal(size=4)
    gradient = x.T @ (x @ here - y) / 30
    way = goal - here
    expected = way @ -gradient / np.linalg.norm(way) / np.linalg.norm(gradient)

    network = nn.Linear(4, 1, bias=False).double()
    network.weight.data.copy_(torch.from_numpy(here)[None])
    batches = [(torch.from_numpy(x[part]), torch.from_numpy(y[part])) for part in (slice(0, 7), slice(7, 30))]
    found = mean_gradient(
        network,
        batches,
        summed_loss=lambda outputs, labels: ((outputs[:, 0] - labels) ** 2).sum() / 2,
        num_images=30,
        group=ALONE,
    )
    point = direction(found, here=torch.from_numpy(here), goal=torch.from_numpy(goal))

    assert found.numpy() == pytest.approx(gradient)
    assert point == {
        "cosine": pytest.approx(expected),
        "gradient_norm": pytest.approx(np.linalg.norm(gradient)),
        "distance": pytest.approx(np.linalg.norm(way)),
    }


def test_straight_down_the_bowl_the_cosine_is_1_and_uphill_it_is_minus_1() -> None:
    """|θ − θ*|² / 2 has the gradient θ − θ*."""
    here, goal = torch.tensor([3.0, 4.0]).double(), torch.zeros(2).double()
    downhill = direction(here - goal, here=here, goal=goal)
    uphill = direction(goal - here, here=here, goal=goal)
    assert downhill == {"cosine": 1.0, "gradient_norm": 5.0, "distance": 5.0}
    assert uphill is not None and uphill["cosine"] == -1.0


def test_where_swap_is_there_is_no_direction_to_it() -> None:
    here = torch.ones(3).double()
    assert direction(torch.ones(3).double(), here=here, goal=here.clone()) is None


def test_dropout_is_off_and_batch_norm_sees_the_batch() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    images, labels = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    loss = nn.CrossEntropyLoss(reduction="sum")
    found = mean_gradient(network, [(images, labels)], summed_loss=loss, num_images=8, group=ALONE)

    before, norm, _, after = network
    hidden = before(images)
    centred = (hidden - hidden.mean(dim=0)) / (hidden.var(dim=0, unbiased=False) + 1e-5).sqrt()
    output = after(centred * norm.weight + norm.bias)
    gradients = torch.autograd.grad(loss(output, labels) / 8, list(network.parameters()))
    assert found.numpy() == pytest.approx(torch.cat([g.reshape(-1) for g in gradients]).numpy(), abs=1e-6)


def images(number: int) -> Images:
    return Images(
        pixels=torch.arange(number * 16, dtype=torch.int64).remainder(251).to(torch.uint8).view(number, 1, 4, 4),
        labels=torch.arange(number),
        mean=torch.zeros(1, 1, 1, 1),
        std=torch.ones(1, 1, 1, 1),
    )


@pytest.mark.parametrize(("number", "sizes"), [(12, [4, 4, 4]), (14, [4, 5, 5]), (3, [3])])
@pytest.mark.parametrize("augment", [None, Augment(padding=1, flip=True, cutout=2)])
def test_ranks_share_the_batches_that_one_would_have(number: int, sizes: list[int], augment: Augment | None) -> None:
    def batches(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        group = Group(rank=rank, world_size=world_size, device=CPU)
        return list(labelled_batches(images(number), batch_size=4, seed=1, augment=augment, view=None, group=group))

    alone = batches(0, 1)
    shared = [batches(0, 2), batches(1, 2)]
    assert [len(labels) for _, labels in alone] == sizes
    assert sorted(torch.cat([labels for _, labels in alone]).tolist()) == list(range(number))
    for i, (pixels, labels) in enumerate(alone):
        assert torch.equal(shared[i % 2][i // 2][0], pixels)
        assert torch.equal(shared[i % 2][i // 2][1], labels)


def test_the_course_has_what_was_kept_and_the_ends_in_the_order_of_epochs() -> None:
    phase1 = snapshots_of_phase1(wanted=(2, 9), epochs=5)  # τ was passed before epoch 9
    assert [(s.run, s.epoch, str(s.path)) for s in phase1] == [
        ("phase1", 2, "checkpoints/phase1/epoch_2.safetensors"),
        ("phase1", 5, "checkpoints/phase1/model.safetensors"),
    ]
    worker = snapshots_of_worker(3, wanted="all", before=5, epochs=4, cycles=2)
    assert [(s.run, s.epoch, s.path.name) for s in worker] == [
        ("seed_3", 6, "epoch_1.safetensors"),
        ("seed_3", 7, "cycle_1.safetensors"),
        ("seed_3", 8, "epoch_3.safetensors"),
        ("seed_3", 9, "model.safetensors"),
    ]
    assert worker[0].path.parent == Path("checkpoints/phase2/seed_3")


def cosine_by_hand(project: Project, path: str) -> float:
    """Two batches of 50, in training mode, in float64."""
    network = load_model(project.root / path).double().train()
    tensors, _ = read_tensors(project.root / "data/prepared/train.safetensors")
    meta = project.json("data/prepared/meta.json")
    seed = derive_seed("phase3", 0)
    indices = chosen(240, 100, seed=seed, split="train")
    assert indices is not None
    pixels = (tensors["images"][indices].double() / 255 - meta["mean"][0]) / meta["std"][0]
    labels = tensors["labels"][indices]
    order = draw_epoch(seed=seed, epoch=0, num_images=100, image_size=(28, 28)).order
    losses = [nn.functional.cross_entropy(network(pixels[part]), labels[part]) for part in (order[:50], order[50:])]
    gradients = torch.autograd.grad(sum(losses) / 2, list(network.parameters()))  # type: ignore[arg-type]
    swap, _ = read_tensors(project.root / "checkpoints/phase3/model.safetensors")
    ways = [swap[name].double() - parameter for name, parameter in network.named_parameters()]
    g, way = (torch.cat([part.detach().reshape(-1) for part in parts]).numpy() for parts in (gradients, ways))
    return float(way @ -g / np.linalg.norm(way) / np.linalg.norm(g))


def test_the_stage_follows_the_course_of_training(finished: Project) -> None:
    done = finished.stage("cosine")
    assert done.returncode == 0, done.stderr
    record = finished.json("analysis/cosine.json")
    expected = [("phase1", 2), ("phase1", 3), *((f"seed_{seed}", epoch) for seed in (0, 1, 2) for epoch in (4, 5))]
    assert [(point["run"], point["epoch"]) for point in record["points"]] == expected
    assert record["images"] == 100
    assert done.stdout.splitlines()[0] == "cosine: 8 models × 100 images, forward and backward, on 1 × cpu"
    by_hand = {
        ("phase1", 2): "checkpoints/phase1/epoch_2.safetensors",
        ("phase1", 3): "checkpoints/phase1/model.safetensors",
        ("seed_1", 4): "checkpoints/phase2/seed_1/epoch_1.safetensors",
        ("seed_2", 5): "checkpoints/phase2/seed_2/model.safetensors",
    }
    found: dict[Any, float] = {(point["run"], point["epoch"]): point["cosine"] for point in record["points"]}
    for key, path in by_hand.items():
        assert found[key] == pytest.approx(cosine_by_hand(finished, path), abs=1e-4), key


def test_where_nothing_was_kept_the_stage_says_what_to_set_and_has_no_points(finished: Project) -> None:
    finished.set_params({"phase1.keep_epochs": [], "phase2.keep_epochs": []})
    done = finished.stage("cosine")
    assert done.returncode == 0, done.stderr
    assert "set phase1.keep_epochs and phase2.keep_epochs" in done.stdout
    assert finished.json("analysis/cosine.json")["points"] == []


def test_the_only_worker_is_swap_and_its_end_has_no_direction(finished: Project) -> None:
    finished.set_params({"workers.seeds": [0]})
    models = finished.root / "checkpoints"
    shutil.copy(models / "phase2/seed_0/model.safetensors", models / "phase3/model.safetensors")
    done = finished.stage("cosine")
    assert done.returncode == 0, done.stderr
    runs = [(point["run"], point["epoch"]) for point in finished.json("analysis/cosine.json")["points"]]
    assert runs == [("phase1", 2), ("phase1", 3), ("seed_0", 4)]
