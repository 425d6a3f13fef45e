"""`phase1.start`: phase 1 begins from a file of the user's, and DVC notices when that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Project, assert_one_line
from safetensors.torch import load_file, save_file
from torch import nn

from swap_pipeline.config.params import Model
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.errors import SwapError
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.models.starting import describe_file, load_start
from swap_pipeline.storage.files import read_yaml
from swap_pipeline.storage.tensor_files import open_any

DEP = "      - ${phase1.start}\n"
PARAMS_OF_PHASE1 = "    params: [augment, compute, model, optimizer, phase1, seed]\n"
LIBRARIES = {"torchvision:resnet18": ["fc.weight", "fc.bias"], "timm:test_resnet": ["fc.weight", "fc.bias"]}


def made(name: str, *, num_classes: int, seed: int, channels: int = 3) -> tuple[nn.Module, dict[str, Any]]:
    description = describe_network(Model(name=name), channels=channels, num_classes=num_classes)
    return new_network(description, seed=seed), description


def write(path: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
    return path


@pytest.mark.parametrize("name", LIBRARIES)
def test_all_weights_are_those_that_load_state_dict_gives(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "start.safetensors", made(name, num_classes=5, seed=1)[0].state_dict())
    network, description = made(name, num_classes=5, seed=2)
    by_hand, _ = made(name, num_classes=5, seed=3)
    by_hand.load_state_dict(load_file(path))

    load_start(network, description, path)

    assert all(torch.equal(tensor, by_hand.state_dict()[key]) for key, tensor in network.state_dict().items())
    assert capsys.readouterr().out == f"weights of {path}: all\n"


@pytest.mark.parametrize("without_head", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
def test_another_number_of_classes_gets_a_new_last_layer(
    name: str, without_head: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = LIBRARIES[name]
    state = made(name, num_classes=11, seed=1)[0].state_dict()
    start = {key: tensor for key, tensor in state.items() if not without_head or key not in head}
    network, description = made(name, num_classes=5, seed=2)
    fresh = {key: tensor.clone() for key, tensor in network.state_dict().items()}

    load_start(network, description, write(tmp_path / "start.safetensors", start))

    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, fresh[key] if key in head else state[key]), key
    said = capsys.readouterr().out
    assert said.endswith(f"all but {', '.join(head)}, which stay new for 5 classes\n")


def test_half_precision_is_widened_and_step_counters_may_be_missing(tmp_path: Path) -> None:
    state = made("torchvision:resnet18", num_classes=5, seed=1)[0].state_dict()
    start = {key: tensor.half() for key, tensor in state.items() if "num_batches" not in key}
    network, description = made("torchvision:resnet18", num_classes=5, seed=2)

    load_start(network, description, write(tmp_path / "start.safetensors", start))

    assert all(torch.equal(network.state_dict()[key], tensor.float()) for key, tensor in start.items())


def without(key: str) -> Any:
    return lambda state: state.pop(key)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (without("conv1.weight"), "it has no 'conv1.weight'"),
        (lambda s: s.update({"conv1.weight": torch.ones(64, 1, 7, 7)}), "is [64, 1, 7, 7] instead of [64, 3, 7, 7]"),
        (lambda s: s.update({"layer1.2.conv1.weight": torch.ones(1)}), "the network has no 'layer1.2.conv1.weight'"),
        (lambda s: s.update({"fc.weight": torch.ones(9, 100)}), "its 'fc.weight' is [9, 100] instead of [5, 512]"),
        (lambda s: s.update({"bn1.bias": torch.ones(64, dtype=torch.int8)}), "'bn1.bias' is torch.int8 instead of"),
        (lambda s: s["bn1.bias"].fill_(float("nan")), "tensor 'bn1.bias' contains NaN or Inf"),
        (lambda s: s.clear(), "it has no 'conv1.weight'; it has no 'bn1.weight'; it has no 'bn1.bias'; and 97 more"),
    ],
)
def test_another_network_is_refused_in_one_line_that_names_tensors(tmp_path: Path, change: Any, complaint: str) -> None:
    state = dict(made("torchvision:resnet18", num_classes=5, seed=1)[0].state_dict())
    change(state)
    network, description = made("torchvision:resnet18", num_classes=5, seed=2)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    path = write(tmp_path / "start.safetensors", state)

    with pytest.raises(SwapError) as caught:
        load_start(network, description, path)

    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"params.yaml: phase1.start: {path}")
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    ("name", "width", "channels"),
    [("resnet9", 3, 2), ("torchvision:resnet18", None, 3), ("timm:test_vit", None, 1)],
)
def test_channels_classes_and_width_are_read_from_the_tensors(
    tmp_path: Path, name: str, width: int | None, channels: int
) -> None:
    description = describe_network(Model(name=name, width=width), channels=channels, num_classes=7)
    path = write(tmp_path / "x.safetensors", new_network(description, seed=0).state_dict())

    assert describe_file(Model(name=name), open_any(path)) == description


@pytest.mark.parametrize("entry", ["pretrained", "zero_init_last_gamma"])
def test_other_initial_weights_beside_it_are_refused(entry: str) -> None:
    tree = read_yaml(Path(__file__).parents[1] / "recipes/fashion-mini.yaml")
    tree["phase1"]["start"] = "x.safetensors"
    tree["model"][entry] = True

    with pytest.raises(SwapError, match=rf"model\.{entry} has no effect with phase1\.start: set it to false"):
        parse_params(tree)


def test_a_changed_file_makes_phase_1_train_again(finished: Project) -> None:
    start, dvc_yaml = finished.root / "start.safetensors", finished.root / "dvc.yaml"
    trained = finished.trained("phase1")
    weights = load_file(finished.root / "checkpoints/phase3/model.safetensors")
    save_file(weights, start)
    # So slow that the weights stay as they were.
    finished.set_params({"phase1.start": "start.safetensors", "phase1.peak_lr": 1e-30, "phase1.max_epochs": 1})
    finished.set_params({"phase1.keep_epochs": []})
    assert_one_line(finished.swap("check"), "DVC would not notice", "add the line `- ${phase1.start}` to the deps")
    assert_one_line(finished.stage("phase1"), "DVC would not notice")
    dvc_yaml.write_text(dvc_yaml.read_text().replace(PARAMS_OF_PHASE1, DEP + PARAMS_OF_PHASE1))

    said = finished.dvc("repro", "phase1")

    assert "weights of start.safetensors: all" in said
    found = load_file(finished.root / "checkpoints/phase1/model.safetensors")
    assert all(torch.equal(found[key], weights[key]) for key in weights if key.endswith("weight"))
    assert "up to date" in finished.dvc("status", "phase1")
    save_file(weights | {"head.weight": weights["head.weight"] + 1}, start)
    assert "modified:           start.safetensors" in finished.dvc("status", "phase1")
    finished.dvc("repro", "phase1")
    assert finished.trained("phase1") == trained + 2  # scratch did not take the one for the other
    found = load_file(finished.root / "checkpoints/phase1/model.safetensors")
    assert torch.equal(found["head.weight"], weights["head.weight"] + 1)


@pytest.mark.long
def test_what_phase_1_cannot_start_from_is_refused_before_anything_runs(finished: Project) -> None:
    dvc_yaml = finished.root / "dvc.yaml"
    for start, complaint in (
        ("nowhere.safetensors", "phase1.start is 'nowhere.safetensors', which does not exist"),
        ("data", "phase1.start is 'data', which is not a file"),
        ("checkpoints/phase3/model.safetensors", "which this pipeline makes itself (checkpoints): copy it"),
    ):
        finished.set_params({"phase1.start": start})
        assert_one_line(finished.swap("check"), complaint)
    finished.remove_param("phase1.start")
    assert finished.swap("check").returncode == 0
    dvc_yaml.write_text(dvc_yaml.read_text().replace(PARAMS_OF_PHASE1, DEP + PARAMS_OF_PHASE1))
    assert_one_line(finished.swap("check"), "but phase1.start is not set: remove it")


def test_it_is_no_param_unless_it_is_set() -> None:
    root = Path(__file__).parents[1]

    assert read_params(root / "recipes/fashion-mini.yaml").phase1.start is None
    assert "start" not in read_yaml(root / "recipes/fashion-mini.yaml")["phase1"]
    assert "phase1.start" not in (root / "dvc.yaml").read_text()
