"""The gradient noise scale: against gradients of single images in closed form, and from norms by hand."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_shards import torchrun
from test_training import ALONE, COMPUTE, NESTEROV, PLAIN, a_run, kept_in, train_here
from torch import nn

from swap_pipeline.data.images import Images
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.noise import NoiseMeter, noise_scale
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.training.loop import train
from swap_pipeline.training.run import Record, Run, TrainingData

RANKS = """
import sys; sys.path.insert(0, {tests!r})
import json
from pathlib import Path
from test_noise import learn
from swap_pipeline.engine.distributed import process_group

with process_group() as group:
    for shards in (2, 4):
        folder = Path({folder!r}) / str(shards)
        folder.mkdir(exist_ok=True)
        record = learn(folder, shards=shards, group=group)
        if group.is_main:
            (folder / "noise.json").write_text(json.dumps([row.noise_scale for row in record.curve]))
"""


def two_kinds(count: int = 4096) -> Images:
    """Noise, a little brighter for one of two classes."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(2, (count,), generator=generator)
    pixels = torch.randn(count, 1, 4, 4, generator=generator) * 40 + 120 + 16 * labels.view(-1, 1, 1, 1)
    scale = torch.full((1, 1, 1, 1), 40.0)
    return Images(pixels=pixels.clamp(0, 255).to(torch.uint8), labels=labels, mean=3 * scale, std=scale)


def linear() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


def still(*, shards: int, epochs: int) -> Run:
    """Weights stay where they are."""
    return replace(a_run(epochs=epochs), shards=shards, batch_size=lambda epoch: 256, learning_rate=lambda epoch: 0.0)


def learn(folder: Path, *, shards: int, epochs: int = 3, group: Group = ALONE) -> Record:
    data = TrainingData(train=two_kinds(), held_out=two_kinds(64), augment=PLAIN, num_classes=2)
    optimizer = replace(NESTEROV, label_smoothing=0.0, weight_decay=0.1)
    network, keeping = linear(), kept_in(folder)
    return train(
        still(shards=shards, epochs=epochs),
        network,
        data,
        optimizer=optimizer,
        compute=COMPUTE,
        group=group,
        keeping=keeping,
    )


def known_scale() -> float:
    """An image's gradient is (p − y) xᵀ, with 1 beside x for the bias."""
    images, layer = two_kinds(), linear()[1]
    inputs = ((images.pixels.double() - 120) / 40).flatten(1)
    logits = inputs @ layer.weight.detach().double().T + layer.bias.detach().double()
    errors = logits.softmax(dim=1) - nn.functional.one_hot(images.labels, 2)
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    gradients = (errors[:, :, None] * inputs[:, None, :]).flatten(1)
    return float(gradients.var(dim=0).sum() / gradients.mean(dim=0).square().sum())


@pytest.mark.parametrize("shards", [2, 8])
def test_where_the_noise_is_known_the_scale_is_within_a_tenth_of_it(shards: int, tmp_path: Path) -> None:
    """In the mean over 30 epochs: eight steps of two shards alone leave a scatter of that size."""
    scales = [row.noise_scale or 0.0 for row in learn(tmp_path, shards=shards, epochs=30).curve]
    assert statistics.fmean(scales) == pytest.approx(known_scale(), rel=0.1)
    assert statistics.stdev(scales) < 0.3 * known_scale()


def test_with_one_shard_there_is_none(tmp_path: Path) -> None:
    assert [row.noise_scale for row in train_here(linear_of_eights(), tmp_path).curve] == [None] * 3


def linear_of_eights() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))


def test_one_and_two_ranks_find_the_same_scale(tmp_path: Path) -> None:
    """Of two ranks, each has two shards, or one whose gradient DDP exchanges at once."""
    torchrun(RANKS, tmp_path, 2)
    for shards in (2, 4):
        (tmp_path / f"alone_{shards}").mkdir()
        alone = [row.noise_scale for row in learn(tmp_path / f"alone_{shards}", shards=shards).curve]
        assert json.loads((tmp_path / str(shards) / "noise.json").read_text()) == pytest.approx(alone, rel=1e-4)


def test_norms_tell_noise_and_mean_apart() -> None:
    """|G|² = 4 and tr Σ = 600: a shard of 10 images has 4 + 60, a batch of 40 has 4 + 15."""
    assert noise_scale(64.0, 19.0, batch_size=40, num_shards=4) == pytest.approx(150)
    assert noise_scale(64.0, 16.0, batch_size=40, num_shards=4) is None  # all of it is noise
    assert noise_scale(64.0, 64.0, batch_size=40, num_shards=1) is None


def test_a_step_that_is_called_off_does_not_count() -> None:
    layer, sums = nn.Linear(2, 1, bias=False), torch.zeros(2, dtype=torch.float64)
    meter = NoiseMeter(layer, Scaler("fp32", torch.device("cpu")), num_shards=2, world_size=1)
    for bad in (0.0, 1.0):
        layer.zero_grad()
        with meter.listening(0, 1):
            for image in ([3.0, 0.0], [0.0, 1.0 / (1 - bad) if bad < 1 else torch.inf]):
                (layer(torch.tensor([image])) / 2).sum().backward()
        meter.add([layer.weight.grad], sums, unless=torch.tensor(bad))
    assert sums.tolist() == pytest.approx([10, 2.5])


def test_norms_are_taken_at_eight_steps_of_a_long_epoch_and_hooks_are_gone_afterwards() -> None:
    layer = nn.Linear(2, 1)
    meter = NoiseMeter(layer, Scaler("fp32", torch.device("cpu")), num_shards=2, world_size=1)
    heard = []
    for step in range(100):
        with meter.listening(step, 100):
            heard += [step] if layer.weight._backward_hooks else []
        assert not layer.weight._backward_hooks
    assert heard == [0, 13, 25, 38, 50, 63, 75, 88]
