"""The `swap` command and the Python side of a finished model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Project
from PIL import Image

from swap_pipeline import load_model
from swap_pipeline.storage.tensor_files import TensorFile

MODEL = "checkpoints/phase3/model.safetensors"


@pytest.fixture(scope="module")
def pictures(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three test images as PNG."""
    pixels = TensorFile(finished_project.root / "data/prepared/test.safetensors").read("images")
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{index}.png" for index in range(3)]
    for index, path in enumerate(paths):
        Image.fromarray(pixels[index, 0].numpy()).save(path)
    return paths


def test_predict_prints_the_class_and_probability_of_each_image(
    finished_project: Project, pictures: list[Path]
) -> None:
    path = finished_project.root / MODEL
    info, network = TensorFile(path).info, load_model(path)
    pixels = TensorFile(finished_project.root / "data/prepared/test.safetensors").read("images")[:3]
    with torch.no_grad():
        logits = network((pixels.float() / 255 - info["mean"][0]) / info["std"][0])
    best = logits.softmax(1).max(1)
    expected = [
        f"{picture}\t{info['classes'][index]}\t{100 * probability:.2f} %"
        for picture, probability, index in zip(pictures, best.values.tolist(), best.indices.tolist(), strict=True)
    ]

    done = finished_project.swap("predict", *map(str, pictures))

    assert done.stdout.splitlines() == expected


def test_predict_takes_colour_images_of_any_size(
    finished_project: Project, pictures: list[Path], tmp_path: Path
) -> None:
    large = tmp_path / "large.png"
    Image.open(pictures[0]).convert("RGBA").resize((112, 112), Image.Resampling.NEAREST).save(large)
    done = finished_project.swap("predict", "--top", "10", str(large))
    assert len(done.stdout.splitlines()) == 10
    total = sum(float(line.split("\t")[2].removesuffix(" %")) for line in done.stdout.splitlines())
    assert total == pytest.approx(100, abs=0.1)


@pytest.mark.long
def test_predict_scales_sixteen_bits_to_eight(finished_project: Project, pictures: list[Path], tmp_path: Path) -> None:
    deep = tmp_path / "deep.png"
    Image.fromarray(np.asarray(Image.open(pictures[0])).astype(np.uint16) * 257).save(deep)
    plain, scaled = (finished_project.swap("predict", str(path)).stdout for path in (pictures[0], deep))
    assert scaled.split("\t")[1:] == plain.split("\t")[1:]


@pytest.mark.long
def test_predict_names_what_it_cannot_read(finished_project: Project, pictures: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(pictures[0].read_bytes()[:40])
    cases = {
        (str(tmp_path / "none.png"),): "none.png not found",
        (str(broken),): "broken.png cannot be read as an image",
        (str(pictures[0]), "--model", "nowhere.safetensors"): "nowhere.safetensors is missing",
        (str(pictures[0]), "--model", "data/prepared/test.safetensors"): "test.safetensors is not a checkpoint",
    }
    for arguments, words in cases.items():
        done = finished_project.swap("predict", *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_load_model_gives_the_network_in_eval_mode_from_the_file_alone(
    finished_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(finished_project.bytes_of(MODEL))
    monkeypatch.chdir(tmp_path)
    network = load_model("model.safetensors")
    assert not network.training
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_params_lists_those_of_the_project_or_of_a_recipe_without_torch(finished_project: Project) -> None:
    code = (
        "import sys; from swap_pipeline.cli.main import main; main(['params'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    here = finished_project.run(sys.executable, "-c", code)
    assert "* phase1.max_epochs           3\n" in here.stdout
    done = finished_project.swap("params", "recipes/cifar10.yaml", "--json")
    found = {entry["key"]: entry for entry in json.loads(done.stdout)}
    assert found["phase1.shards"] == {
        "key": "phase1.shards",
        "value": "8",
        "default": "1",
        "doc": "equal parts of a batch, each normalised separately (batch norm); "
        "at most this many devices share the run",
    }
    assert found["data.name"]["default"] is None


def test_params_of_a_bad_file_end_in_one_line(finished_project: Project, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("recipe: mine\nphase4: {}\n")
    done = finished_project.swap("params", str(tmp_path / "bad.yaml"))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path}/bad.yaml: phase4 is not a known parameter")
    assert len(done.stderr.splitlines()) == 1


def test_help_answers_without_torch(finished_project: Project) -> None:
    code = "import sys, swap_pipeline.cli.main, swap_pipeline.launch.stage_jobs; sys.exit('torch' in sys.modules)"
    assert finished_project.run(sys.executable, "-c", code, check=False).returncode == 0
    assert "predict" in finished_project.swap("--help").stdout
