"""ResNet-9 against a second implementation, and a trained network from its file alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import swap_pipeline
from swap_pipeline.checkpoint import write_tensors
from swap_pipeline.errors import SwapError
from swap_pipeline.models import ResNet9, describe_network, load_model, new_network


def used_network(*, width: int = 4, channels: int = 3, num_classes: int = 10) -> ResNet9:
    """With batch-norm weights and statistics as after training, so that each of them matters."""
    torch.manual_seed(0)
    network = ResNet9(width=width, channels=channels, num_classes=num_classes)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.5)
            module.running_mean.normal_(0, 0.5)
            module.running_var.uniform_(0.2, 2)
            module.num_batches_tracked.fill_(9)
    return network.eval()


def logits_by_hand(weights: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """The network of cifar10-fast in eval mode, from its weights alone, in float64."""
    weights = {key: tensor.double() for key, tensor in weights.items()}

    def conv_bn_relu(x: torch.Tensor, name: str) -> torch.Tensor:
        x = F.conv2d(x, weights[f"{name}.0.weight"], stride=1, padding=1)
        mean, var, gamma, beta = (
            weights[f"{name}.1.{part}"].view(1, -1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
        )
        return ((x - mean) / (var + 1e-5).sqrt() * gamma + beta).clamp(min=0)

    def halve(x: torch.Tensor) -> torch.Tensor:
        x = x[..., : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
        return torch.stack([x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(dim=0)

    def residual(x: torch.Tensor, name: str) -> torch.Tensor:
        return x + conv_bn_relu(conv_bn_relu(x, f"{name}.pair.0"), f"{name}.pair.1")

    x = conv_bn_relu(images.double(), "stem")
    x = residual(halve(conv_bn_relu(x, "stage1.0")), "stage1.2")
    x = halve(conv_bn_relu(x, "stage2.0"))
    x = residual(halve(conv_bn_relu(x, "stage3.0")), "stage3.2")
    return x.flatten(2).amax(dim=2) @ weights["head.weight"].T / 8


def test_the_papers_resnet9_has_6573120_parameters() -> None:
    with torch.device("meta"):
        network = ResNet9(width=64, channels=3, num_classes=10)

    assert sum(parameter.numel() for parameter in network.parameters()) == 6_573_120


@pytest.mark.parametrize("size", [28, 30, 32, 33])
@pytest.mark.parametrize(("width", "channels", "num_classes"), [(4, 3, 10), (6, 1, 7)])
def test_the_logits_are_those_of_a_second_implementation(
    size: int, width: int, channels: int, num_classes: int
) -> None:
    network = used_network(width=width, channels=channels, num_classes=num_classes)
    images = torch.randn(5, channels, size, size)

    logits = network(images)

    assert tuple(logits.shape) == (5, num_classes)
    by_hand = logits_by_hand(network.state_dict(), images)
    torch.testing.assert_close(logits.double(), by_hand, rtol=1e-4, atol=1e-5)


def test_the_file_of_a_network_is_all_it_takes_to_rebuild_it(tmp_path: Path) -> None:
    network = used_network(width=5, channels=1, num_classes=7)
    images = torch.randn(4, 1, 28, 28)
    description = describe_network(name="resnet9", width=5, channels=1, num_classes=7)
    write_tensors(tmp_path / "model.safetensors", network.state_dict(), {"model": description})

    loaded = swap_pipeline.load_model(str(tmp_path / "model.safetensors"))

    assert torch.equal(loaded(images), network(images))
    assert [module for module in loaded.modules() if module.training] == []
    assert {key: tensor.tolist() for key, tensor in loaded.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in network.state_dict().items()
    }


def test_a_loaded_network_does_not_change_with_its_file(tmp_path: Path) -> None:
    description = describe_network(name="resnet9", width=2, channels=1, num_classes=3)
    network = used_network(width=2, channels=1, num_classes=3)
    path = tmp_path / "model.safetensors"
    write_tensors(path, network.state_dict(), {"model": description})
    loaded = load_model(path)

    write_tensors(path, {key: 0 * tensor for key, tensor in network.state_dict().items()}, {"model": description})

    assert torch.equal(loaded.get_parameter("head.weight"), network.head.weight)


def test_loading_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    description = describe_network(name="resnet9", width=2, channels=1, num_classes=3)
    network = used_network(width=2, channels=1, num_classes=3)
    write_tensors(tmp_path / "model.safetensors", network.state_dict(), {"model": description})
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    load_model(tmp_path / "model.safetensors")

    assert torch.equal(torch.rand(3), expected)


def test_a_header_that_describes_another_width_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    description = describe_network(name="resnet9", width=3, channels=1, num_classes=3)
    network = used_network(width=2, channels=1, num_classes=3)
    write_tensors(tmp_path / "model.safetensors", network.state_dict(), {"model": description})

    with pytest.raises(SwapError, match=r"model\.safetensors belongs to another network .*'stem\.0\.weight'"):
        load_model(tmp_path / "model.safetensors")


def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    write_tensors(tmp_path / "train.safetensors", {"images": torch.zeros(2)}, {"split": "train"})

    with pytest.raises(SwapError, match=r"train\.safetensors is not a checkpoint of a network"):
        load_model(tmp_path / "train.safetensors")


def test_a_file_of_a_network_that_is_not_known_here_is_refused_by_name(tmp_path: Path) -> None:
    description = {"name": "resnet50", "num_classes": 1000}
    write_tensors(tmp_path / "model.safetensors", {"weight": torch.zeros(2)}, {"model": description})

    with pytest.raises(SwapError, match=r"model\.safetensors.*resnet50"):
        load_model(tmp_path / "model.safetensors")


def test_an_unknown_network_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(SwapError, match=r"model\.name is 'resnet8'.*resnet9"):
        describe_network(name="resnet8", width=8, channels=1, num_classes=10)


def test_the_seed_decides_the_initial_weights_and_the_global_generator_is_left_alone() -> None:
    description = describe_network(name="resnet9", width=2, channels=1, num_classes=3)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    first, again, other = (new_network(description, seed=seed) for seed in (4, 4, 5))

    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(first.get_parameter("stem.0.weight"), other.get_parameter("stem.0.weight"))
    assert not torch.equal(first.get_parameter("head.weight"), other.get_parameter("head.weight"))
