"""`swap export`: files that other programs run give what the network gives, and a card says what they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import Project
from huggingface_hub import ModelCard
from torch import nn

from swap_pipeline.cli.models import export as exporting
from swap_pipeline.cli.models.export import export
from swap_pipeline.errors import SwapError
from swap_pipeline.models.networks import load_model, new_network
from swap_pipeline.storage.tensor_files import TensorFile, write_tensors

MODEL = "checkpoints/phase3/model.safetensors"
ABOUT = {"classes": ["ant", "bee", "cat"], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}


@pytest.fixture(scope="module")
def exported(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("exported") / "export"
    done = finished_project.swap("export", "-o", str(folder), "--license", "mit")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def logits_by_hand(project: Project, pixels: torch.Tensor) -> torch.Tensor:
    """Of the network itself, with the normalisation that its header tells of."""
    path = project.root / MODEL
    info = TensorFile(path).info
    with torch.no_grad():
        logits: torch.Tensor = load_model(path)((pixels.float() / 255 - info["mean"][0]) / info["std"][0])
    return logits


@pytest.fixture
def pixels(finished_project: Project) -> torch.Tensor:
    return TensorFile(finished_project.root / "data/prepared/test.safetensors").read("images")


@pytest.mark.parametrize("num_images", [1, 3, 120])
def test_the_files_give_the_networks_logits_for_any_number_of_raw_images(
    exported: tuple[Path, str], finished_project: Project, pixels: torch.Tensor, num_images: int
) -> None:
    some = pixels[:num_images]
    expected = logits_by_hand(finished_project, some)
    session = onnxruntime.InferenceSession(exported[0] / "model.onnx", providers=["CPUExecutionProvider"])

    (of_onnx,) = session.run(None, {"images": some.numpy()})
    of_program = torch.export.load(exported[0] / "model.pt2").module()(some)

    np.testing.assert_allclose(of_onnx, expected.numpy(), atol=1e-4)
    torch.testing.assert_close(of_program.detach(), expected, rtol=0, atol=1e-4)


def test_onnx_finds_the_file_valid_and_names_what_goes_in_and_out(exported: tuple[Path, str]) -> None:
    model = onnx.load(exported[0] / "model.onnx")

    onnx.checker.check_model(model, full_check=True)
    (given,), (made,) = model.graph.input, model.graph.output
    assert (given.name, given.type.tensor_type.elem_type) == ("images", onnx.TensorProto.UINT8)
    assert [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim] == ["batch", 1, 28, 28]
    assert (made.name, [d.dim_param or d.dim_value for d in made.type.tensor_type.shape.dim]) == (
        "logits",
        ["batch", 10],
    )


def test_what_is_printed_and_the_card_have_the_comparison_and_the_accuracy(
    exported: tuple[Path, str], finished_project: Project, pixels: torch.Tensor
) -> None:
    folder, said = exported
    labels = TensorFile(finished_project.root / "data/prepared/test.safetensors").read("labels")
    accuracy = (logits_by_hand(finished_project, pixels).argmax(1) == labels).double().mean().item()

    card = ModelCard.load(folder / "README.md")

    for name in ("model.pt2", "model.onnx"):
        assert f"{folder / name}: the same class as the network for 120 of 120 test images, logits differ by at" in said
        assert f"| `{name}` | 120 of 120 |" in card.text
    assert card.data.license == "mit" and card.data.datasets == ["fashion-mini"] and card.data.metrics == ["accuracy"]
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type) == ("fashion-mini", "accuracy")
    assert result.metric_value == pytest.approx(accuracy, abs=1e-6)
    assert accuracy == pytest.approx(finished_project.json("metrics/phase3.json")["test_accuracy"] / 100)
    assert (finished_project.root / "params.yaml").read_text().strip() in card.text
    assert '"Ankle boot"' in card.text


# --- other networks


def checkpoint(path: Path, *, name: str = "resnet9", size: int = 8, **more: Any) -> Path:
    description = {"name": name, "channels": 3, "num_classes": 3, **({"width": 1} if name == "resnet9" else {})}
    network = new_network(description, seed=0)
    write_tensors(path, network.state_dict(), {**ABOUT, "model": description, "shape": [3, size, size], **more})
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a project."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("name", ["timm:test_vit", "torchvision:shufflenet_v2_x0_5"])
def test_networks_of_libraries_are_exported_and_compared_on_random_images_without_data(
    elsewhere: Path, name: str
) -> None:
    size = 160 if name.startswith("timm:") else 32
    path = checkpoint(elsewhere / "x.safetensors", name=name, size=size)

    found = export(path, elsewhere / "out")

    assert found.images == "random" and found.accuracy is None
    assert {each: one.num_images for each, one in found.comparisons.items()} == {"model.pt2": 64, "model.onnx": 64}
    assert all(one.difference < 1e-3 for one in found.comparisons.values())
    card = ModelCard.load(elsewhere / "out/README.md")
    assert card.data.license is None and card.data.datasets is None and card.data.eval_results is None


def test_names_from_a_header_cannot_break_out_of_the_card(elsewhere: Path) -> None:
    evil = ["```\n# Owned", "---\nlicense: evil", "\x1b[2J"]
    path = checkpoint(elsewhere / "x.safetensors", classes=evil)

    export(path, elsewhere / "out", names=("model.pt2",))

    text = (elsewhere / "out/README.md").read_text()
    assert "\n# Owned" not in text and "\nlicense" not in text and "\x1b" not in text


# --- what cannot work


def test_a_file_that_is_there_is_not_overwritten(elsewhere: Path) -> None:
    (elsewhere / "README.md").write_text("mine")

    with pytest.raises(SwapError, match=r"README\.md exists: remove it, or name another folder with -o"):
        export(checkpoint(elsewhere / "x.safetensors"), elsewhere, names=("model.pt2",))

    assert (elsewhere / "README.md").read_text() == "mine"


def test_without_onnx_one_line_says_what_to_install_and_pt2_works(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(elsewhere / "x.safetensors")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))

    with pytest.raises(SwapError, match=r"^ONNX needs onnxscript: run `pip install onnxscript`, or take --format pt2"):
        export(path, elsewhere / "out")
    export(path, elsewhere / "out", names=("model.pt2",))

    assert sorted(each.name for each in (elsewhere / "out").iterdir()) == ["README.md", "model.pt2"]


def test_a_network_that_cannot_be_traced_is_refused_in_one_line(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1)[:, : 3 if images.sum() > 9 else 2]

    monkeypatch.setattr(exporting, "load_model", lambda path, own: Odd())

    with pytest.raises(SwapError, match=r"^torch\.export cannot export 'resnet9' \(\w+: [^\n]+$"):
        export(checkpoint(elsewhere / "x.safetensors"), elsewhere / "out", names=("model.pt2",))

    assert list((elsewhere / "out").iterdir()) == []


def test_a_file_that_gives_other_classes_is_not_kept(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        exporting._READERS, "model.pt2", lambda path: lambda images: torch.eye(3).repeat(99, 1)[: len(images)]
    )

    with pytest.raises(SwapError, match=r"^model\.pt2 gives another class than the network for \d+ of 64 images"):
        export(checkpoint(elsewhere / "x.safetensors"), elsewhere / "out", names=("model.pt2",))

    assert list((elsewhere / "out").iterdir()) == []


def test_data_of_another_network_is_refused_if_it_was_asked_for(finished_project: Project, elsewhere: Path) -> None:
    path = checkpoint(elsewhere / "x.safetensors")

    with pytest.raises(SwapError, match=r"is not the data of this network: its classes is \['T-shirt/top'"):
        export(path, elsewhere / "out", data=finished_project.root / "data/prepared")
    with pytest.raises(SwapError, match=r"nowhere/meta\.json is missing"):
        export(path, elsewhere / "out", data=Path("nowhere"))


def test_fewer_images_are_the_first_ones(
    finished_project: Project, tmp_path: Path, pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished_project.root)
    labels = TensorFile(finished_project.root / "data/prepared/test.safetensors").read("labels")[:7]

    found = export(Path(MODEL), tmp_path / "out", names=("model.pt2",), num_images=7)

    assert found.comparisons["model.pt2"].num_images == 7
    hits = logits_by_hand(finished_project, pixels[:7]).argmax(1) == labels
    assert found.accuracy == pytest.approx(hits.double().mean().item())
