"""Networks of every origin: ResNet-9 against a second implementation, the others against their libraries.

And a trained network from its file alone, which must not be able to run code.
"""

from __future__ import annotations

import copy
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import swap_pipeline
from swap_pipeline.config.params import Model
from swap_pipeline.errors import SwapError
from swap_pipeline.models.networks import ResNet9, describe_network, load_model, load_pretrained, new_network
from swap_pipeline.runtime.user_code import is_own, source_file
from swap_pipeline.storage.tensor_files import write_tensors

TORCHVISION = torchvision.models.list_models(module=torchvision.models)


def model(name: str, **settings: Any) -> Model:
    """The model section of params.yaml."""
    return Model(name=name, **{"pretrained": False, "zero_init_last_gamma": False, **settings})


def describe(name: str, *, channels: int = 3, num_classes: int = 7, **settings: Any) -> dict[str, Any]:
    return describe_network(model(name, **settings), channels=channels, num_classes=num_classes)


def build(name: str, *, seed: int = 0, **settings: Any) -> nn.Module:
    return new_network(describe(name, **settings), seed=seed)


def write_model(folder: Path, network: nn.Module, description: dict[str, Any]) -> Path:
    write_tensors(folder / "model.safetensors", network.state_dict(), {"model": description})
    return folder / "model.safetensors"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty project that the test is in. There is no network, and modules in it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


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
    description = describe("resnet9", width=5, channels=1, num_classes=7)
    write_tensors(tmp_path / "model.safetensors", network.state_dict(), {"model": description})

    loaded = swap_pipeline.load_model(str(tmp_path / "model.safetensors"))

    assert torch.equal(loaded(images), network(images))
    assert [module for module in loaded.modules() if module.training] == []
    assert {key: tensor.tolist() for key, tensor in loaded.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in network.state_dict().items()
    }


def test_a_loaded_network_does_not_change_with_its_file(tmp_path: Path) -> None:
    description = describe("resnet9", width=2, channels=1, num_classes=3)
    network = used_network(width=2, channels=1, num_classes=3)
    path = tmp_path / "model.safetensors"
    write_tensors(path, network.state_dict(), {"model": description})
    loaded = load_model(path)

    write_tensors(path, {key: 0 * tensor for key, tensor in network.state_dict().items()}, {"model": description})

    assert torch.equal(loaded.get_parameter("head.weight"), network.head.weight)


def test_loading_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    description = describe("resnet9", width=2, channels=1, num_classes=3)
    network = used_network(width=2, channels=1, num_classes=3)
    write_tensors(tmp_path / "model.safetensors", network.state_dict(), {"model": description})
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    load_model(tmp_path / "model.safetensors")

    assert torch.equal(torch.rand(3), expected)


def test_a_header_that_describes_another_width_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    description = describe("resnet9", width=3, channels=1, num_classes=3)
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


def test_the_seed_decides_the_initial_weights_and_the_global_generator_is_left_alone() -> None:
    description = describe("resnet9", width=2, channels=1, num_classes=3)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    first, again, other = (new_network(description, seed=seed) for seed in (4, 4, 5))

    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(first.get_parameter("stem.0.weight"), other.get_parameter("stem.0.weight"))
    assert not torch.equal(first.get_parameter("head.weight"), other.get_parameter("head.weight"))


# --- resnet9


def test_the_description_of_a_resnet9_is_what_older_checkpoints_hold() -> None:
    assert describe("resnet9", width=8, channels=1, num_classes=10) == {
        "name": "resnet9",
        "width": 8,
        "channels": 1,
        "num_classes": 10,
    }


@pytest.mark.parametrize("size", [(8, 8), (9, 31), (64, 8)])
def test_a_resnet9_takes_images_of_any_size_from_8_pixels_on(size: tuple[int, int]) -> None:
    assert ResNet9(width=2, channels=3, num_classes=5)(torch.randn(2, 3, *size)).shape == (2, 5)


@pytest.mark.parametrize("size", [(7, 8), (8, 7)])
def test_a_resnet9_refuses_images_that_are_too_small_to_be_halved_three_times(size: tuple[int, int]) -> None:
    with pytest.raises(SwapError, match=f"{size[0]}×{size[1]} pixels are too few, .* 8×8"):
        ResNet9(width=2, channels=3, num_classes=5)(torch.randn(2, 3, *size))


def test_a_resnet9_needs_a_width() -> None:
    with pytest.raises(SwapError, match=r"^params\.yaml: model\.width is missing: resnet9 needs one"):
        describe("resnet9")


def test_a_resnet9_has_no_options() -> None:
    with pytest.raises(SwapError, match=r"^params\.yaml: model\.options .* resnet9 has none: leave it out"):
        describe("resnet9", width=8, options={"depth": 9})


def test_branches_of_a_resnet9_that_start_from_zero_would_never_learn_and_are_refused() -> None:
    network = used_network()
    for stage in (network.stage1, network.stage3):
        norm = stage[2].pair[1][1]
        nn.init.zeros_(norm.weight)
        nn.init.zeros_(norm.bias)
    network.train()(torch.randn(4, 3, 16, 16)).square().sum().backward()
    moving = [key for key, parameter in network.named_parameters() if ".pair." in key and parameter.grad.any()]

    assert moving == []
    with pytest.raises(SwapError, match=r"^params\.yaml: model\.zero_init_last_gamma .* never learn: set it to false"):
        describe("resnet9", width=8, zero_init_last_gamma=True)


# --- names


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("resnet8", "resnet9"),
        ("ResNet9", "resnet9"),
        ("resnet50", "torchvision:resnet50"),
        ("vit_b16", "torchvision:vit_b_16"),
        ("torchvision:resnet51", "torchvision:resnet50"),
        ("torchvision:ResNet18", "torchvision:resnet18"),
        ("timm:resnet10", "timm:resnet10t"),
        ("timm:resnet50.a1_in1", "timm:resnet50.a1_in1k"),
        ("torchvison:resnet50", "torchvision"),
        ("zzzzzzzzz", "resnet9, torchvision:<name>, timm:<name> or your own, package.module:function"),
    ],
)
def test_an_unknown_network_is_refused_in_one_line_with_the_closest_names(name: str, suggestion: str) -> None:
    with pytest.raises(SwapError) as refused:
        describe(name, width=8)

    assert str(refused.value).startswith(f"params.yaml: model.name is {name!r}: ")
    assert re.search(rf"(mean|or|choose) {re.escape(suggestion)}\b", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "fcn_resnet50", "r3d_18", "quantized_resnet50"])
def test_networks_of_torchvision_that_do_not_classify_images_are_not_known(name: str) -> None:
    assert name in torchvision.models.list_models()
    with pytest.raises(SwapError, match=f"model.name is 'torchvision:{name}'"):
        describe(f"torchvision:{name}")


@pytest.mark.parametrize("name", ["timm:hf-hub:timm/resnet10t.c3_in1k", "timm:local-dir:/tmp", "timm:/tmp/resnet18"])
def test_addresses_that_timm_would_load_from_are_no_names(name: str) -> None:
    with pytest.raises(SwapError, match=r"model\.name is"):
        describe(name)


def test_without_timm_its_name_says_what_to_install_and_everything_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)  # what makes an import of it fail

    with pytest.raises(
        SwapError, match=r"model\.name is 'timm:resnet18', but timm is not installed: .*pip install timm"
    ):
        describe("timm:resnet18")
    with pytest.raises(SwapError, match=r"did you mean .*resnet9"):
        describe("resnet8")
    assert isinstance(build("torchvision:resnet18"), torchvision.models.ResNet)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:test_resnet"])
def test_a_width_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(SwapError, match=rf"^params\.yaml: model\.width is 64, but {name} has no width: leave it out"):
        describe(name, width=64)


# --- torchvision


@pytest.mark.parametrize("name", [name for name in TORCHVISION if "regnet" not in name])
def test_every_classification_network_of_torchvision_is_built_and_takes_plain_tensors(name: str) -> None:
    with torch.device("meta"):
        network = build(f"torchvision:{name}")

    assert list(network.parameters())[-1].shape[0] == 7
    network.load_state_dict(dict(network.state_dict()))  # as they come from a checkpoint, without torch's versions


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("densenet121", 3, 32),
        ("efficientnet_b0", 1, 32),
        ("googlenet", 3, 32),
        ("mnasnet0_5", 3, 32),
        ("mobilenet_v2", 1, 32),
        ("mobilenet_v3_small", 3, 32),
        ("regnet_x_400mf", 3, 32),
        ("regnet_y_400mf", 3, 40),
        ("resnet18", 1, 64),
        ("resnet18", 3, 28),
        ("shufflenet_v2_x0_5", 3, 32),
        ("squeezenet1_1", 1, 32),
    ],
)
def test_networks_of_torchvision_give_logits_in_training_and_survive_their_file(
    name: str, channels: int, size: int, tmp_path: Path
) -> None:
    description = describe(f"torchvision:{name}", channels=channels)
    network = new_network(description, seed=3)
    images = torch.randn(2, channels, size, size)
    logits = network.train()(images)
    path = write_model(tmp_path, network, description)

    loaded = load_model(path)

    assert logits.shape == (2, 7)
    assert torch.equal(loaded(images), network.eval()(images))


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("inception_v3", 299, None),
        ("vit_b_16", 32, {"image_size": 32}),
        ("swin_t", 64, None),
        ("convnext_tiny", 64, {"stochastic_depth_prob": 0.0}),
        ("maxvit_t", 224, None),
        ("vgg11_bn", 64, None),
    ],
)
def test_large_networks_of_torchvision_give_logits_in_training(
    name: str, size: int, options: dict[str, Any] | None
) -> None:
    with torch.device("meta"):
        network = build(f"torchvision:{name}", options=options)

        assert network.train()(torch.empty(2, 3, size, size)).shape == (2, 7)


def test_a_network_of_torchvision_starts_as_torchvision_starts_it() -> None:
    torch.manual_seed(5)
    by_hand = torchvision.models.resnet18(weights=None, num_classes=7).state_dict()

    network = build("torchvision:resnet18", seed=5)

    assert network.state_dict().keys() == by_hand.keys()
    assert all(torch.equal(tensor, by_hand[key]) for key, tensor in network.state_dict().items())


def test_grey_images_are_seen_three_times_by_a_network_of_torchvision_whose_tensors_stay_as_they_are() -> None:
    grey, colour = (build("torchvision:resnet18", channels=channels).eval() for channels in (1, 3))
    images = torch.randn(2, 1, 32, 32)

    assert torch.equal(grey(images), colour(torch.cat([images, images, images], dim=1)))
    assert torch.equal(copy.deepcopy(grey)(images), grey(images))
    assert {key: tensor.shape for key, tensor in grey.state_dict().items()} == {
        key: tensor.shape for key, tensor in colour.state_dict().items()
    }


def test_a_network_of_torchvision_takes_no_other_number_of_channels() -> None:
    with pytest.raises(
        SwapError, match=r"^params\.yaml: model\.name is 'torchvision:resnet18'.* 1 or 3 channels, not 4"
    ):
        describe("torchvision:resnet18", channels=4)


@pytest.mark.parametrize("zero", [False, True])
def test_the_last_scale_of_each_residual_block_of_torchvision_starts_from_zero_if_asked(zero: bool) -> None:
    network = build("torchvision:resnet18", zero_init_last_gamma=zero)

    blocks = [block for block in network.modules() if isinstance(block, torchvision.models.resnet.BasicBlock)]
    assert [(block.bn1.weight.unique().tolist(), block.bn2.weight.unique().tolist()) for block in blocks] == [
        ([1.0], [0.0 if zero else 1.0])
    ] * 8


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v3_small", "torchvision:vgg11_bn", "timm:test_vit"])
def test_a_network_without_that_setting_refuses_it(name: str) -> None:
    with pytest.raises(
        SwapError, match=rf"^params\.yaml: model\.zero_init_last_gamma is true, but {name} has no such .*false"
    ):
        build(name, zero_init_last_gamma=True)


def test_options_go_to_the_function_of_torchvision() -> None:
    narrow = build("torchvision:mobilenet_v3_small", options={"width_mult": 0.5, "dropout": 0.0})

    by_hand = torchvision.models.mobilenet_v3_small(num_classes=7, width_mult=0.5)
    assert {key: tensor.shape for key, tensor in narrow.state_dict().items()} == {
        key: tensor.shape for key, tensor in by_hand.state_dict().items()
    }
    assert narrow.classifier[2].p == 0.0


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("torchvision:resnet18", {"zzz": 1}, "options.zzz is not an option of torchvision:resnet18"),
        ("torchvision:vit_b_16", {"img_size": 32}, "options.img_size .* did you mean image_size"),
        ("torchvision:mobilenet_v3_small", {"width_mul": 1}, "options.width_mul .* did you mean width_mult"),
        ("torchvision:convnext_tiny", {"depth": 1}, "options.depth is not an option of torchvision:convnext_tiny"),
        ("torchvision:resnet18", {"layers": [1, 1, 1, 1]}, "options.layers is not an option"),
        ("torchvision:vit_b_16", {"image_size": 33}, "options do not fit torchvision:vit_b_16: .*patch size"),
        ("torchvision:resnet18", {"norm_layer": "x"}, "options do not fit torchvision:resnet18: .*not callable"),
        ("timm:test_vit", {"imgsize": 32}, "options.imgsize is not an option of timm:test_vit"),
        ("timm:test_resnet", {"norm_layer": "x"}, "options do not fit timm:test_resnet"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SwapError, match=rf"^params\.yaml: model\.{complaint}") as refused:
        build(name, options=options)

    assert "\n" not in str(refused.value)


LOADING = ["weights", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"]
OTHERWISE = ["num_classes", "in_chans", "features_only", "out_indices", "aux_logits"]
GAMMA = ["zero_init_residual", "zero_init_last"]


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:test_resnet"])
@pytest.mark.parametrize(
    ("key", "way_out"),
    [(key, "set model.pretrained") for key in LOADING]
    + [(key, "leave it out") for key in OTHERWISE]
    + [(key, "set model.zero_init_last_gamma") for key in GAMMA],
)
def test_options_that_load_something_or_are_set_elsewhere_are_refused(name: str, key: str, way_out: str) -> None:
    with pytest.raises(SwapError, match=rf"^params\.yaml: model\.options\.{key} is not an option .*{way_out}"):
        describe(name, options={key: True})


@pytest.mark.parametrize("value", [{"a": 1}, [[{"a": 1}]], float("nan"), float("inf"), object()])
def test_options_of_libraries_are_plain_values(value: Any) -> None:
    with pytest.raises(SwapError, match=r"^params\.yaml: model\.options\.block is .*options can be numbers"):
        describe("timm:test_resnet", options={"block": value})


# --- timm


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet_gn"])
def test_networks_of_timm_give_logits_and_survive_their_file(name: str, channels: int, tmp_path: Path) -> None:
    size = 160 if name == "test_vit" else 64
    description = describe(f"timm:{name}", channels=channels)
    network = new_network(description, seed=1)
    images = torch.randn(2, channels, size, size)
    logits = network.train()(images)
    path = write_model(tmp_path, network, description)

    loaded = load_model(path)

    assert logits.shape == (2, 7)
    assert torch.equal(loaded(images), network.eval()(images))


def test_a_tag_of_timm_names_the_same_network() -> None:
    assert build("timm:test_resnet.r160_in1k").state_dict().keys() == build("timm:test_resnet").state_dict().keys()


def test_options_go_to_timm() -> None:
    network = build("timm:test_vit", options={"img_size": [32, 48], "depth": 1})

    assert network.eval()(torch.zeros(1, 3, 32, 48)).shape == (1, 7)
    assert len(network.blocks) == 1


@pytest.mark.parametrize("zero", [False, True])
def test_the_last_scale_of_each_residual_block_of_timm_starts_from_zero_only_if_asked(zero: bool) -> None:
    network = build("timm:test_resnet", zero_init_last_gamma=zero)

    kinds = (timm.models.resnet.BasicBlock, timm.models.resnet.Bottleneck)
    blocks = [block for block in network.modules() if isinstance(block, kinds)]
    last = [block.bn3 if isinstance(block, kinds[1]) else block.bn2 for block in blocks]
    assert [norm.weight.unique().tolist() for norm in last] == [[0.0 if zero else 1.0]] * 4


def test_a_network_of_timm_that_sets_its_own_start_is_built_all_the_same() -> None:
    with torch.device("meta"):
        assert isinstance(build("timm:regnetz_005"), nn.Module)


def test_the_seed_decides_the_weights_of_timm_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    first, again, other = (build("timm:test_resnet", seed=seed).state_dict() for seed in (4, 4, 5))

    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
    assert not torch.equal(first["conv1.0.weight"], other["conv1.0.weight"])


# --- a user's own

OWN = """
import torch
from torch import nn

torch.rand(5)
scale = 3

def flat(*, num_classes, channels):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))

def deep(*, num_classes, channels, width, depth=1, zero_init_last_gamma=False, layout=None):
    layers = [nn.Conv2d(channels, width, 1)] + [nn.GroupNorm(1, width) for _ in range(depth)]
    if zero_init_last_gamma:
        nn.init.zeros_(layers[-1].weight)
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
    network.layout = layout
    return network

class Linear(nn.Linear):
    def __init__(self, num_classes, channels):
        super().__init__(channels, num_classes)

def wrong(**settings):
    return settings

def broken(**settings):
    raise KeyError("no\\nsuch layer")

def deeply_broken(num_classes, channels):
    return nn.Linear(channels, -num_classes)
"""


@pytest.fixture
def own(root: Path) -> Path:
    """A project with networks of its own."""
    (root / "nets").mkdir()
    (root / "nets" / "__init__.py").write_text("")
    (root / "nets" / "small.py").write_text(OWN)
    return root


def test_an_own_network_is_found_from_the_projects_root_and_gets_what_is_set(own: Path) -> None:
    flat = build("nets.small:flat", channels=1)
    deep = build(
        "nets.small:deep",
        width=4,
        options={"depth": 3, "layout": {"a": [1, None]}},
        zero_init_last_gamma=True,
    )

    assert flat(torch.zeros(2, 1, 5, 5)).shape == (2, 7)
    assert [type(layer).__name__ for layer in deep][:4] == ["Conv2d", "GroupNorm", "GroupNorm", "GroupNorm"]
    assert deep[0].weight.shape == (4, 3, 1, 1)
    assert deep[3].weight.tolist() == [0.0] * 4
    assert deep[2].weight.tolist() == [1.0] * 4
    assert deep.layout == {"a": [1, None]}
    assert isinstance(build("nets.small:Linear"), nn.Linear)


def test_an_own_network_is_described_by_what_is_set(own: Path) -> None:
    assert describe("nets.small:flat") == {"name": "nets.small:flat", "channels": 3, "num_classes": 7}
    full = describe("nets.small:deep", width=4, options={"depth": 2}, zero_init_last_gamma=True)
    assert json.loads(json.dumps(full)) == {
        "name": "nets.small:deep",
        "channels": 3,
        "num_classes": 7,
        "width": 4,
        "options": {"depth": 2},
        "zero_init_last_gamma": True,
    }


def test_the_seed_decides_the_weights_of_an_own_network_also_when_its_module_draws_numbers(own: Path) -> None:
    description = {"name": "nets.small:flat", "channels": 3, "num_classes": 7}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    first, again, other = (new_network(description, seed=seed)[2].weight for seed in (4, 4, 5))

    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("net.small:flat", r": no module net in .*did you mean nets\?"),
        ("nets.smal:flat", r": no module nets\.smal in .*did you mean nets\.small\?"),
        ("nets.small.more:flat", r": no module nets\.small\.more in "),
        ("nets.small:flatt", r": nets\.small has no flatt: did you mean nets\.small:flat\?"),
        ("nets.small:resnet", r": nets\.small has no resnet \(it has flat, deep, Linear, wrong"),
        ("nets.small:scale", r": scale is not a function but int"),
        ("nets/small.py:flat", r": write it as Python imports it, nets\.small:flat"),
        ("nets.small:", r": your own network is written package\.module:function"),
        ("nets.small:flat:1", r": your own network is written package\.module:function"),
        ("nets.small:wrong", ", which returned dict, not a torch.nn.Module"),
        ("nets.small:broken", r", which failed: KeyError: 'no\\nsuch layer' \(small\.py, line 27\)"),
        ("nets.small:deeply_broken", r", which failed: RuntimeError: .* \(small\.py, line 30\)"),
        ("nets.small:deep", r", which was called with .*: missing a required argument: 'width': set model\.width"),
    ],
)
def test_what_is_wrong_with_an_own_network_is_told_in_one_line(own: Path, name: str, complaint: str) -> None:
    with pytest.raises(SwapError, match=rf"^params\.yaml: model\.name is {name!r}{complaint}") as refused:
        build(name)

    assert "\n" not in str(refused.value)


def test_settings_that_an_own_network_does_not_take_are_named(own: Path) -> None:
    with pytest.raises(SwapError, match=r"nets\.small:flat', .* width=4.* unexpected keyword argument 'width'"):
        build("nets.small:flat", width=4)
    with pytest.raises(SwapError, match=r"nets\.small:flat', .* unexpected keyword argument 'depth'"):
        build("nets.small:flat", options={"depth": 4})
    with pytest.raises(SwapError, match=r"unexpected keyword argument 'zero_init_last_gamma'"):
        build("nets.small:flat", zero_init_last_gamma=True)


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("channels", "leave it out"),
        ("num_classes", "leave it out"),
        ("width", r"set model\.width"),
        ("zero_init_last_gamma", r"set model\.zero_init_last_gamma"),
    ],
)
def test_options_of_an_own_network_do_not_repeat_other_entries(own: Path, key: str, way_out: str) -> None:
    with pytest.raises(SwapError, match=rf"^params\.yaml: model\.options\.{key} is not an option: .*{way_out}"):
        describe("nets.small:deep", width=4, options={key: 1})


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import no_such_package", r"No module named 'no_such_package' \(bad\.py, line 1\)"),
        ("\n1 / 0", r"ZeroDivisionError: .* \(bad\.py, line 2\)"),
        ("def f(:", r"SyntaxError: .*\(bad\.py, line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_place(root: Path, code: str, complaint: str) -> None:
    (root / "bad.py").write_text(code)

    with pytest.raises(
        SwapError, match=rf"^params\.yaml: model\.name is 'bad:f': bad cannot be imported: .*{complaint}"
    ):
        describe("bad:f")


def test_the_file_of_an_own_network_is_found_without_importing_anything(root: Path) -> None:
    (root / "nets").mkdir()
    (root / "nets" / "__init__.py").write_text("raise RuntimeError('imported')")
    (root / "nets" / "small.py").write_text("raise RuntimeError('imported')")

    assert source_file("nets.small:flat") == Path("nets/small.py")
    assert source_file("nets:flat") == Path("nets/__init__.py")
    assert (
        source_file("swap_pipeline.models.networks:ResNet9")
        == Path(swap_pipeline.__file__).parent / "models/networks.py"
    )
    with pytest.raises(SwapError, match=r"^params\.yaml: .* no module nets\.smal in .*did you mean nets\.small"):
        source_file("nets.smal:flat")


@pytest.mark.parametrize("name", ["resnet9", "torchvision:resnet18", "timm:resnet18", "no_such_network"])
def test_networks_that_are_not_a_users_own_have_no_file(name: str) -> None:
    assert not is_own(name)
    assert source_file(name) is None


def test_the_launcher_can_ask_for_the_file_without_torch(root: Path) -> None:
    (root / "nets.py").write_text("import torch")
    code = (
        "import sys; from swap_pipeline.runtime.user_code import source_file; "
        "print(source_file('nets:f'), {'torch', 'torchvision', 'numpy'} & set(sys.modules))"
    )
    package = Path(swap_pipeline.__file__).parents[1]

    # -P: without the working directory on the path, as for the `swap` command.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(package)}, capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["nets.py", "set()"]


# --- files from elsewhere


def test_a_file_that_names_an_own_network_runs_it_only_if_the_caller_does_too(own: Path) -> None:
    description = describe("nets.small:flat")
    network = new_network(description, seed=1)
    path = write_model(own, network, description)
    for name in ("nets.small", "nets"):
        del sys.modules[name]

    with pytest.raises(SwapError, match=r"model\.safetensors .* nets\.small:flat.* pass own='nets\.small:flat'"):
        load_model(path)
    with pytest.raises(SwapError, match="pass own="):
        load_model(path, own="nets.small:deep")
    assert "nets.small" not in sys.modules
    loaded = load_model(path, own="nets.small:flat")

    assert torch.equal(loaded[2].weight, network[2].weight)
    assert not loaded.training


@pytest.mark.parametrize("name", ["os:system", "builtins:exec", "subprocess:call"])
def test_a_file_cannot_name_any_function(tmp_path: Path, name: str) -> None:
    description = {"name": name, "channels": 3, "num_classes": 7, "options": {"command": "touch gotcha"}}
    path = write_model(tmp_path, nn.Linear(1, 1), description)

    with pytest.raises(SwapError, match="not part of this package"):
        load_model(path)


@pytest.mark.parametrize(
    "description",
    [
        {"name": "torchvision:resnet18", "options": {"weights": "DEFAULT"}},
        {"name": "torchvision:resnet18", "options": {"pretrained": True}},
        {"name": "timm:test_resnet", "options": {"pretrained": True}},
        {"name": "timm:test_resnet", "options": {"checkpoint_path": "evil.pth"}},
        {"name": "timm:test_resnet", "options": {"pretrained_cfg": {"file": "evil.pth"}}},
        {"name": "timm:test_resnet", "options": {"block_args": {"a": 1}}},
        {"name": "timm:hf-hub:someone/evil"},
        {"name": "timm:local-dir:evil"},
        {"name": "torchvision:fasterrcnn_resnet50_fpn"},
        {"name": "torchvision:resnet18", "further": 1},
        {"name": "torchvision:resnet18", "num_classes": "7"},
        {"name": "torchvision:resnet18", "num_classes": True},
        {"name": "torchvision:resnet18", "num_classes": -1},
        {"name": "torchvision:resnet18", "options": [1]},
        {"name": ["resnet9"]},
        {"name": None},
        {},
    ],
)
def test_a_header_that_asks_for_more_than_a_network_is_refused_by_file(
    tmp_path: Path, description: dict[str, Any]
) -> None:
    path = write_model(tmp_path, nn.Linear(1, 1), {"channels": 3, "num_classes": 7, **description})

    with pytest.raises(SwapError, match=rf"^{path}"):
        load_model(path)


def test_a_header_without_classes_is_refused_by_file(tmp_path: Path) -> None:
    path = write_model(tmp_path, nn.Linear(1, 1), {"name": "resnet9", "width": 2, "channels": 1})

    with pytest.raises(SwapError, match=rf"^{path}.*classes"):
        load_model(path)


# --- published weights


def published(root: Path, file_name: str, tensors: dict[str, torch.Tensor]) -> None:
    """A file as if it had been downloaded."""
    file = root / ".swap" / "downloads" / file_name
    file.parent.mkdir(parents=True)
    if file.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, file)
    else:
        torch.save(tensors, file)


def tensors_of(network: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(77)
    return {key: torch.randn(tensor.shape).to(tensor.dtype) for key, tensor in network.state_dict().items()}


@pytest.mark.parametrize("channels", [1, 3])
def test_published_weights_of_torchvision_are_taken_but_for_the_classifier(
    root: Path, channels: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tensors_of(torchvision.models.squeezenet1_1())
    published(root, "squeezenet1_1-b8a52dc0.pth", tensors)
    description = describe("torchvision:squeezenet1_1", channels=channels, pretrained=True)
    network, before = (new_network(description, seed=0) for _ in range(2))

    load_pretrained(network, description)

    new = ["classifier.1.weight", "classifier.1.bias"]
    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[key] if key in new else tensors[key]), key
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"published weights of torchvision:squeezenet1_1: all but {', '.join(new)}, which start at random"


def test_published_weights_are_taken_whole_where_the_number_of_classes_is_theirs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tensors_of(torchvision.models.squeezenet1_1())
    published(root, "squeezenet1_1-b8a52dc0.pth", tensors)
    description = describe("torchvision:squeezenet1_1", num_classes=1000)
    network = new_network(description, seed=0)

    load_pretrained(network, description)

    assert all(torch.equal(tensor, tensors[key]) for key, tensor in network.state_dict().items())
    assert capsys.readouterr().out == "published weights of torchvision:squeezenet1_1: all\n"


def test_the_old_names_in_the_files_of_densenets_are_understood(root: Path) -> None:
    tensors = tensors_of(torchvision.models.densenet121())
    old = {re.sub(r"(denselayer\d+\.)(norm|conv)([12])", r"\1\2.\3", key): tensors[key] for key in tensors}
    published(root, "densenet121-a639ec97.pth", old)
    description = describe("torchvision:densenet121")
    network = new_network(description, seed=0)

    load_pretrained(network, description)

    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    new = [key for key, tensor in network.state_dict().items() if not torch.equal(tensor, tensors[key])]
    assert new == ["classifier.weight", "classifier.bias"]


def test_published_weights_of_mnasnet_are_taken(root: Path) -> None:
    tensors = tensors_of(torchvision.models.mnasnet0_5())
    published(root, "mnasnet0.5_top1_67.823-3ffadce67e.pth", tensors)
    description = describe("torchvision:mnasnet0_5")
    network = new_network(description, seed=0)

    load_pretrained(network, description)

    new = [key for key, tensor in network.state_dict().items() if not torch.equal(tensor, tensors[key])]
    assert new == ["classifier.1.weight", "classifier.1.bias"]


@pytest.mark.parametrize("channels", [1, 3])
def test_published_weights_of_timm_are_taken_but_for_the_classifier(
    root: Path, channels: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tensors_of(timm.create_model("test_resnet"))
    published(root, "test_resnet.r160_in1k.safetensors", tensors)
    description = describe("timm:test_resnet", channels=channels, pretrained=True)
    network, before = (new_network(description, seed=0) for _ in range(2))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    load_pretrained(network, description)

    assert torch.equal(torch.rand(3), expected)
    if channels == 1:  # what three equal channels amount to
        tensors["conv1.0.weight"] = tensors["conv1.0.weight"].sum(dim=1, keepdim=True)
    for key, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, before.state_dict()[key] if key.startswith("fc.") else tensors[key])
    assert "all but fc.weight, fc.bias, which start at random" in capsys.readouterr().out


def test_weights_are_downloaded_once_into_the_project(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(timm.create_model("test_resnet"))
    content = safetensors.torch.save(tensors)
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    description = describe("timm:test_resnet", num_classes=1000)
    networks = [new_network(description, seed=seed) for seed in (0, 1)]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for network in networks:
            load_pretrained(network, description)
        server.shutdown()

    assert asked == ["/timm/test_resnet.r160_in1k/resolve/main/model.safetensors"]
    assert (root / ".swap" / "downloads" / "test_resnet.r160_in1k.safetensors").read_bytes() == content
    for network in networks:
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    ("name", "file_name"),
    [
        ("torchvision:squeezenet1_1", "squeezenet1_1-b8a52dc0.pth"),
        ("timm:test_resnet", "test_resnet.r160_in1k.safetensors"),
        ("timm:vit_huge_patch16_gap_448.in1k_ijepa", "IN1K-vit.h.16-448px-300e.pth.tar"),
    ],
)
def test_weights_that_cannot_be_downloaded_are_told_in_one_line_with_what_to_do(
    root: Path, name: str, file_name: str
) -> None:
    description = describe(name, num_classes=7)

    with pytest.raises(SwapError) as refused:
        load_pretrained(nn.Linear(1, 1), description)

    line = str(refused.value)
    assert line.startswith(f"params.yaml: model.pretrained: the weights of {name} cannot be downloaded from https://")
    assert line.endswith(f": save them as .swap/downloads/{file_name}, or set model.pretrained: false")
    assert "\n" not in line
    assert [path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("name", "file_name"),
    [
        ("torchvision:squeezenet1_1", "squeezenet1_1-b8a52dc0.pth"),
        ("timm:test_resnet", "test_resnet.r160_in1k.safetensors"),
    ],
)
def test_a_damaged_file_of_weights_is_named(root: Path, name: str, file_name: str) -> None:
    published(root, file_name, {"a": torch.zeros(9)})
    file = root / ".swap" / "downloads" / file_name
    file.write_bytes(file.read_bytes()[:40])
    description = describe(name)

    with pytest.raises(SwapError, match=rf"^params\.yaml: .*{re.escape(file_name)} cannot be used .*: delete the file"):
        load_pretrained(new_network(description, seed=0), description)


def test_a_pickle_in_place_of_weights_is_not_run(root: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, tuple[Path]]:
            return Path.touch, (root / "gotcha",)

    published(root, "squeezenet1_1-b8a52dc0.pth", {"a": Touch()})
    description = describe("torchvision:squeezenet1_1")

    with pytest.raises(SwapError, match="cannot be used"):
        load_pretrained(new_network(description, seed=0), description)
    assert not (root / "gotcha").exists()


def test_weights_of_another_network_are_refused(root: Path) -> None:
    published(root, "squeezenet1_1-b8a52dc0.pth", {"a": torch.zeros(9)})
    description = describe("torchvision:squeezenet1_1")

    with pytest.raises(SwapError, match=r"^params\.yaml: .*none of the published weights of torchvision:squeezenet1_1"):
        load_pretrained(new_network(description, seed=0), description)


@pytest.mark.parametrize(("name", "width"), [("resnet9", 2), ("nets.small:flat", None), ("timm:botnet50ts_256", None)])
def test_a_network_without_published_weights_says_so(own: Path, name: str, width: int | None) -> None:
    complaint = rf"^params\.yaml: model\.pretrained is true, but {name} has no published weights: set .* false"

    with pytest.raises(SwapError, match=complaint):
        load_pretrained(nn.Linear(1, 1), describe(name, width=width))
    with pytest.raises(SwapError, match=complaint):
        describe(name, width=width, pretrained=True)


def test_a_header_cannot_make_us_build_what_its_tensors_do_not_fill(tmp_path: Path) -> None:
    """At this width the network would take 58 GB."""
    path = tmp_path / "model.safetensors"
    description = {"name": "resnet9", "width": 3000, "channels": 3, "num_classes": 10}
    write_tensors(path, {"stem.0.weight": torch.zeros(3000)}, {"model": description})

    with pytest.raises(SwapError, match="belongs to another network"):
        load_model(path)
