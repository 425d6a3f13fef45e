"""Phase 3 on torchvision's ResNet-50: the mean of three files and all 53 layers' statistics, against numbers by hand.

The oracle shares nothing with the code under test: means are numpy's, and the statistics come from a ResNet-50 in
float64 whose batch-norm layers were replaced by arithmetic that keeps what it is given.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import torchvision
from numpy.typing import NDArray
from torch import nn

from swap_pipeline.averaging.mean import average_files
from swap_pipeline.config.params import Model
from swap_pipeline.engine.batchnorm import recompute_statistics
from swap_pipeline.engine.distributed import Group
from swap_pipeline.models.networks import describe_network, load_model, new_network
from swap_pipeline.storage.tensor_files import write_tensors
from swap_pipeline.storage.weights import load_weights

RESNET50 = Model(name="torchvision:resnet50", pretrained=False, zero_init_last_gamma=False)
DESCRIPTION = describe_network(RESNET50, channels=3, num_classes=5)
ALONE = Group(rank=0, world_size=1, device=torch.device("cpu"))
SEEDS = (0, 1, 2)


def used_network(seed: int) -> nn.Module:
    """With scales, shifts, statistics and counters that differ from seed to seed, as after training."""
    network = new_network(DESCRIPTION, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(layer.bias, std=0.3, generator=generator)
            layer.running_mean.normal_(5, 2, generator=generator)
            layer.running_var.uniform_(3, 9, generator=generator)
            layer.num_batches_tracked.fill_(10 + seed)
    return network


def batches() -> list[torch.Tensor]:
    """6, 6 and 3 images, the last ones brighter."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, 0.0, 1.0), (6, 0.3, 0.8), (3, 2.0, 1.5))
    return [torch.randn(count, 3, 64, 64, generator=generator) * std + mean for count, mean, std in shapes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three networks' files, and their average; half a gigabyte that pytest would keep for days."""
    folder = tmp_path_factory.mktemp("resnet50")
    for seed in SEEDS:
        write_tensors(folder / f"seed_{seed}.safetensors", used_network(seed).state_dict(), {"model": DESCRIPTION})
    files = [folder / f"seed_{seed}.safetensors" for seed in SEEDS]
    average_files(files, folder / "average.safetensors", {"model": DESCRIPTION})
    yield folder
    shutil.rmtree(folder)


def test_the_average_of_resnet50s_is_the_mean_of_each_weight(folder: Path) -> None:
    workers = [safetensors.numpy.load_file(folder / f"seed_{seed}.safetensors") for seed in SEEDS]

    average = safetensors.numpy.load_file(folder / "average.safetensors")

    expected_keys = torchvision.models.resnet50(num_classes=5).state_dict().keys()
    assert average.keys() == expected_keys
    assert sum(average[key].size for key in average if "running" not in key and "num_batches" not in key) == 23_518_277
    for key, found in average.items():
        if key.endswith("num_batches_tracked"):
            assert found == 10, key  # the first file's
            continue
        mean = sum(worker[key].astype(np.float64) for worker in workers) / 3
        assert found.dtype == np.float32
        # Sums of more than a million elements are float32, all others exact to the last bit or nearly so.
        np.testing.assert_allclose(found, mean, rtol=2e-7, atol=1e-8, err_msg=key)
        assert not np.array_equal(found, workers[0][key]), key


class NormByHand(nn.Module):
    """Batch norm in training mode from its definition; keeps what it is given, batch by batch, as values × channels."""

    def __init__(self, scale: NDArray[np.float64], shift: NDArray[np.float64], epsilon: float) -> None:
        super().__init__()
        self.scale, self.shift, self.epsilon = scale, shift, epsilon
        self.given: list[NDArray[np.float64]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.permute(0, 2, 3, 1).numpy()
        self.given.append(values.reshape(-1, values.shape[-1]).copy())
        centred = values - values.mean(axis=(0, 1, 2))
        spread = np.sqrt((centred**2).mean(axis=(0, 1, 2)) + self.epsilon)
        return torch.from_numpy(centred / spread * self.scale + self.shift).permute(0, 3, 1, 2)


def replace_norms(module: nn.Module, prefix: str = "") -> dict[str, NormByHand]:
    """Put arithmetic in place of every batch-norm layer; returns them by the names that the layers had."""
    replaced = {}
    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            norm = NormByHand(child.weight.detach().numpy(), child.bias.detach().numpy(), child.eps)
            setattr(module, name, norm)
            replaced[f"{prefix}{name}"] = norm
        else:
            replaced |= replace_norms(child, f"{prefix}{name}.")
    return replaced


@pytest.fixture(scope="module")
def given(folder: Path) -> dict[str, list[NDArray[np.float64]]]:
    """What each layer of the averaged network is given, batch by batch."""
    network = torchvision.models.resnet50(num_classes=5)
    tensors = safetensors.numpy.load_file(folder / "average.safetensors")
    network.load_state_dict({key: torch.from_numpy(np.asarray(tensor)) for key, tensor in tensors.items()})
    network.double().eval()
    norms = replace_norms(network)
    with torch.no_grad():
        for batch in batches():
            network(batch.double())
    return {name: norm.given for name, norm in norms.items()}


def test_every_layer_of_the_averaged_resnet50_gets_the_statistics_of_what_it_is_given(
    folder: Path, given: dict[str, list[NDArray[np.float64]]]
) -> None:
    network = new_network(DESCRIPTION, seed=9)
    load_weights(network, folder / "average.safetensors")

    num_layers = recompute_statistics(network, batches(), group=ALONE)

    assert num_layers == len(given) == 53
    for name, parts in given.items():
        layer = network.get_submodule(name)
        values = np.concatenate(parts)
        spread = values.var(axis=0, ddof=1)
        np.testing.assert_allclose(layer.running_mean.numpy(), values.mean(axis=0), rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(layer.running_var.numpy(), spread, rtol=4e-4, err_msg=name)
        assert layer.num_batches_tracked == 10
    after, before = network.state_dict(), safetensors.numpy.load_file(folder / "average.safetensors")
    others = [key for key in before if "running_" not in key]
    assert [key for key in others if not np.array_equal(after[key].numpy(), before[key])] == []


def test_the_file_of_an_averaged_resnet50_gives_the_logits_of_its_statistics(folder: Path) -> None:
    network = new_network(DESCRIPTION, seed=9)
    load_weights(network, folder / "average.safetensors")
    recompute_statistics(network, batches(), group=ALONE)
    write_tensors(folder / "model.safetensors", network.state_dict(), {"model": DESCRIPTION})
    images = batches()[0]
    with torch.inference_mode():
        loaded = load_model(folder / "model.safetensors")(images)
        stale = load_model(folder / "average.safetensors")(images)
        expected = network.eval()(images)

    assert torch.equal(loaded, expected)
    assert not torch.allclose(loaded, stale, atol=1e-2)
