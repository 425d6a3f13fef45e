"""The exponential mean of weights, against one computed by hand from the weights after every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Project
from test_training import a_run, small_network, train_here, weights_of
from torch import nn

from swap_pipeline.config.params import Augment
from swap_pipeline.storage.tensor_files import read_tensors
from swap_pipeline.training.sgd import Sgd


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Weights after every step that is taken from here on."""
    seen: list[dict[str, torch.Tensor]] = []
    step = Sgd.step

    def remember(self: Sgd, rate: float, *, skip_if: torch.Tensor) -> None:
        step(self, rate, skip_if=skip_if)
        seen.append({name: parameter.detach().clone() for name, parameter in self._named.items()})

    monkeypatch.setattr(Sgd, "step", remember)
    return seen


def mean_by_hand(steps: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    mean = {name: tensor.double() for name, tensor in steps[0].items()}
    for weights in steps[1:]:
        mean = {name: decay * old + (1 - decay) * weights[name].double() for name, old in mean.items()}
    return mean


def test_the_result_is_the_mean_over_all_steps(steps: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    network = small_network(batch_norm=True)

    train_here(network, tmp_path, replace(a_run(), ema_decay=0.7))

    assert len(steps) == 9
    for name, tensor in mean_by_hand(steps, 0.7).items():
        torch.testing.assert_close(network.get_parameter(name).double(), tensor, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(network.get_parameter("5.weight"), steps[-1]["5.weight"], atol=1e-3)


def test_the_mean_of_each_epoch_is_tested_and_kept(steps: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    kept: dict[int, torch.Tensor] = {}

    def keep(epoch: int, network: nn.Module) -> None:
        kept[epoch] = weights_of(network).clone()

    network = small_network(batch_norm=True)
    record = train_here(network, tmp_path, replace(a_run(), ema_decay=0.7), at_epoch_end=keep)

    for epoch in (1, 2, 3):
        mean = mean_by_hand(steps[: 3 * epoch], 0.7)
        by_hand = torch.cat([tensor.reshape(-1) for tensor in mean.values()]).float()
        torch.testing.assert_close(kept[epoch], by_hand, rtol=1e-5, atol=1e-6)
    assert record.score == record.curve[-1].score


def test_training_itself_does_not_change(steps: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    for decay in (None, 0.9):
        (tmp_path / str(decay)).mkdir()
        train_here(small_network(batch_norm=True), tmp_path / str(decay), replace(a_run(), ema_decay=decay))
    for name in steps[8]:
        assert torch.equal(steps[8][name], steps[17][name])


def test_a_run_that_is_resumed_ends_in_the_same_bytes(tmp_path: Path) -> None:
    run, augment = replace(a_run(), ema_decay=0.8, shards=2), Augment(padding=1, flip=True, cutout=2)
    whole, resumed = small_network(batch_norm=True), small_network(batch_norm=True)
    for folder in ("whole", "resumed"):
        (tmp_path / folder).mkdir()
    train_here(whole, tmp_path / "whole", run, augment)

    train_here(small_network(batch_norm=True), tmp_path / "resumed", replace(run, epochs=2), augment)
    train_here(resumed, tmp_path / "resumed", run, augment)

    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.long
def test_phase_3_gives_a_single_mean_statistics_of_its_own_and_leaves_other_single_models_alone(
    project: Project,
) -> None:
    project.set_params({"phase1.max_epochs": 2, "phase2.epochs": 0, "workers.seeds": [4]})
    project.dvc("repro", "phase3")
    start, _ = read_tensors(project.root / "checkpoints/phase1/model.safetensors")
    final, _ = read_tensors(project.root / "checkpoints/phase3/model.safetensors")
    assert start.keys() == final.keys() and all(torch.equal(start[name], final[name]) for name in start)
    assert project.json("metrics/phase2/seed_4.json")["seconds"] == 0

    project.set_params({"phase1.ema_decay": 0.9})
    project.dvc("repro", "phase3")
    mean, info = read_tensors(project.root / "checkpoints/phase1/model.safetensors")
    worker, worker_info = read_tensors(project.root / "checkpoints/phase2/seed_4/model.safetensors")
    final, _ = read_tensors(project.root / "checkpoints/phase3/model.safetensors")
    assert info["ema_decay"] == worker_info["ema_decay"] == 0.9
    assert not torch.equal(start["stem.0.weight"], mean["stem.0.weight"])
    for name in mean:
        assert torch.equal(mean[name], worker[name]), name
        assert torch.equal(mean[name], final[name]) == ("running" not in name), name
