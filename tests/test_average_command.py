"""`swap average`: means against numpy, statistics against one pass by hand, refusals in one line."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, Project
from PIL import Image
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from torchvision.models import resnet18

from swap_pipeline.cli.models.average import Wish, average
from swap_pipeline.errors import SwapError
from swap_pipeline.models.networks import load_model
from swap_pipeline.storage.tensor_files import TensorFile, digest_of, write_tensors

WORKERS = [f"checkpoints/phase2/seed_{seed}/model.safetensors" for seed in range(3)]
OWN = """
from torch import nn

def make(num_classes, channels, hidden=3):
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 3), nn.BatchNorm2d(hidden), nn.ReLU(),
        nn.Conv2d(hidden, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 16, num_classes),
    )
"""
MEAN, STD = 0.3, 0.2


def mean_by_hand(paths: list[Path]) -> dict[str, Any]:
    """In float64, each value rounded once."""
    arrays = [load_arrays(path) for path in paths]
    return {key: np.asarray(np.mean([each[key].astype(np.float64) for each in arrays], axis=0)) for key in arrays[0]}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "blocks.0.weight": torch.randn(7, 5, generator=generator),
        "norm.weight": torch.rand(5, generator=generator),
        "half": torch.randn(9, generator=generator).half(),
        "steps": torch.tensor(seed),
    }


def saved(folder: Path, states: list[dict[str, torch.Tensor]]) -> list[Path]:
    """Files without a header of ours."""
    paths = [folder / f"{number}.safetensors" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
    return paths


def resnets(num: int = 2, num_classes: int = 5) -> list[dict[str, torch.Tensor]]:
    states = []
    for seed in range(num):
        torch.manual_seed(seed)
        states.append(resnet18(num_classes=num_classes).state_dict())
    return states


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Checkpoints of an own network for grey images of 8×8 pixels, and `prepared`, 30 of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets_of_average", raising=False)
    (tmp_path / "nets_of_average.py").write_text(OWN)
    generator = torch.Generator().manual_seed(0)
    meta = {"kind": "memory", "classes": ["ant", "bee"], "shape": [1, 8, 8], "mean": [MEAN], "std": [STD]}
    pixels = torch.randint(0, 256, (30, 1, 8, 8), dtype=torch.uint8, generator=generator)
    for split in ("train", "test"):
        (tmp_path / "prepared").mkdir(exist_ok=True)
        tensors = {"images": pixels, "labels": torch.arange(30) % 2}
        write_tensors(tmp_path / f"prepared/{split}.safetensors", tensors, {"split": split, "meta": digest_of(meta)})
    (tmp_path / "prepared/meta.json").write_text(json.dumps(meta))
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        states.append(importlib.import_module("nets_of_average").make(2, 1).state_dict())
    return saved(tmp_path, states)


# --- the mean


@pytest.mark.parametrize("num_files", [1, 2, 5])
def test_the_mean_of_files_from_elsewhere_is_the_exact_one_rounded_once(tmp_path: Path, num_files: int) -> None:
    paths = saved(tmp_path, [weights(seed) for seed in range(num_files)])

    average(paths, tmp_path / "mean", Wish())

    found, exact = load_file(tmp_path / "mean"), mean_by_hand(paths)
    for key, tensor in weights(0).items():
        expected = torch.from_numpy(exact[key]).to(tensor.dtype) if key != "steps" else torch.tensor(0)
        assert torch.equal(found[key], expected), key


def test_statistics_are_averaged_only_if_asked(tmp_path: Path) -> None:
    paths = saved(tmp_path, [{"bn.running_mean": torch.full((2,), float(n)), "w": torch.ones(2)} for n in (1, 4)])

    with pytest.raises(SwapError, match=r"have batch norm.*--data.*--average-statistics"):
        average(paths, tmp_path / "mean", Wish())
    average(paths, tmp_path / "mean", Wish(average_statistics=True))

    assert load_file(tmp_path / "mean")["bn.running_mean"].tolist() == [2.5, 2.5]


def test_one_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, resnets(1))

    average([path], tmp_path / "copy", Wish())

    found = load_file(tmp_path / "copy")
    assert all(torch.equal(found[key], tensor) for key, tensor in load_file(path).items())


# --- statistics


def statistics(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over all images and pixels, the variance without bias as torch keeps it."""
    flat = inputs.transpose(0, 1).flatten(1)
    return flat.mean(1), flat.var(1, unbiased=True)


def test_statistics_from_prepared_images_are_those_of_one_pass_by_hand(own: list[Path], tmp_path: Path) -> None:
    average(own, tmp_path / "mean", Wish(data=tmp_path / "prepared", model="nets_of_average:make", batch_size=30))

    mean = {key: torch.from_numpy(value) for key, value in mean_by_hand(own).items()}
    pixels = TensorFile(tmp_path / "prepared/train.safetensors").read("images").double()
    first = F.conv2d((pixels / 255 - MEAN) / STD, mean["0.weight"], mean["0.bias"])
    mean1, var1 = statistics(first)
    biased = var1 * (first.numel() / 3 - 1) / (first.numel() / 3)
    normal = (first - mean1.view(1, -1, 1, 1)) / (biased.view(1, -1, 1, 1) + 1e-5).sqrt()
    normal = normal * mean["1.weight"].view(1, -1, 1, 1) + mean["1.bias"].view(1, -1, 1, 1)
    mean2, var2 = statistics(F.conv2d(normal.relu(), mean["3.weight"], mean["3.bias"]))
    found = {key: tensor.double() for key, tensor in load_file(tmp_path / "mean").items()}
    by_hand = {"1.running_mean": mean1, "1.running_var": var1, "4.running_mean": mean2, "4.running_var": var2}
    for key, expected in by_hand.items():
        torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-6, msg=key)
    assert torch.equal(found["6.weight"].float(), mean["6.weight"].float())


def test_statistics_from_image_files_count_every_image_of_uneven_batches_once(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = []
    for number in range(13):  # in batches of 4: the last would be one image, which has no variance
        folder = tmp_path / "images/train" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        images.append(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        Image.fromarray(images[-1]).resize((40, 32), Image.Resampling.NEAREST).save(folder / f"{number}.png")
    paths = saved(tmp_path, resnets())
    wish = Wish(data=tmp_path / "images", model="torchvision:resnet18", size=28, batch_size=4)

    line = average(paths, tmp_path / "mean", wish)

    # For 28 pixels the shorter side becomes 32, as it is, and the middle is cut out.
    seen = [np.asarray(Image.fromarray(each).resize((40, 32), Image.Resampling.NEAREST)) for each in images]
    batch = torch.from_numpy(np.stack(seen)[:, 2:30, 6:34].astype(np.float64)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    kernel = torch.from_numpy(mean_by_hand(paths)["conv1.weight"])
    mean1, var1 = statistics(F.conv2d((batch - mean) / std, kernel, stride=2, padding=3))
    found = load_file(tmp_path / "mean")
    torch.testing.assert_close(found["bn1.running_mean"].double(), mean1, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["bn1.running_var"].double(), var1, rtol=1e-4, atol=1e-5)
    assert line.endswith("statistics of 20 batch-norm layers from 13 images")
    assert TensorFile(tmp_path / "mean").info["model"] == {
        "name": "torchvision:resnet18",
        "channels": 3,
        "num_classes": 5,
    }


def test_checkpoints_of_this_pipeline_need_nothing_but_data(finished_project: Project, tmp_path: Path) -> None:
    out = tmp_path / "mean.safetensors"

    done = finished_project.swap("average", *WORKERS, "-o", str(out), "--data", "data/prepared")

    assert done.stdout == (f"{out}: the mean of 3 checkpoints; statistics of 8 batch-norm layers from 240 images\n"), (
        done.stderr
    )
    phase3 = finished_project.root / "checkpoints/phase3/model.safetensors"
    found, expected = load_file(out), load_file(phase3)
    for key, tensor in expected.items():
        if "running" not in key:
            assert torch.equal(found[key], tensor), key
    info = TensorFile(phase3).info
    pixels = TensorFile(finished_project.root / "data/prepared/train.safetensors").read("images").double()
    stem = F.conv2d((pixels / 255 - info["mean"][0]) / info["std"][0], expected["stem.0.weight"].double(), padding=1)
    mean, var = statistics(stem)
    torch.testing.assert_close(found["stem.1.running_mean"].double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["stem.1.running_var"].double(), var, rtol=1e-4, atol=1e-5)
    load_model(out)
    assert {key: TensorFile(out).info[key] for key in ("classes", "shape", "mean", "std")} == {
        key: info[key] for key in ("classes", "shape", "mean", "std")
    }


# --- what cannot work


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    paths = saved(tmp_path, [weights(0), weights(1)])
    before = paths[0].read_bytes()

    with pytest.raises(SwapError, match=r"0\.safetensors exists: remove it"):
        average(paths, paths[0], Wish())

    assert paths[0].read_bytes() == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": None}, "does not say which network it is of: name that with --model"),
        ({"model": "torchvision:resnet34"}, "belongs to another network (it has no tensor"),
        ({"model": "torchvision:resnet81"}, "--model: model.name is 'torchvision:resnet81'"),
        ({"model": "resnet9"}, "belongs to another network (it has no tensor 'stem.0.weight')"),
        ({"data": Path("nowhere")}, "--data is 'nowhere', which is not a folder"),
        ({"data": Path("empty")}, "has 0 images, too few for statistics"),
        ({"average_statistics": True}, "--average-statistics has no effect with --data"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "images"):
        (tmp_path / name).mkdir()
    for number in range(2):
        Image.new("RGB", (32, 32), (number, 0, 9)).save(tmp_path / f"images/{number}.png")
    paths = saved(tmp_path, resnets())
    wish = {"data": Path("images"), "model": "torchvision:resnet18", "size": 32, **change}

    with pytest.raises(SwapError) as caught:
        average(paths, Path("mean"), Wish(**wish))

    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("mean").exists()


def test_other_networks_other_data_and_idle_options_are_refused(own: list[Path], finished_project: Project) -> None:
    ours = finished_project.root / WORKERS[0]
    of_own = {"model": "nets_of_average:make"}

    for paths, wish, complaint in (
        ([ours, own[0]], {}, "only equal networks can be averaged"),
        ([ours], {"model": "resnet18", "data": Path("prepared")}, "--model is 'resnet18', but"),
        ([ours], {"size": 8, "data": Path("prepared")}, "--size has no effect"),
        ([ours], {"data": Path("prepared")}, "prepared has images of shape [1, 8, 8], but the network was trained on"),
        (own, {**of_own, "size": 8, "data": Path("prepared")}, "--size has no effect on images that were prepared"),
        (own, {**of_own, "data": Path()}, "how 'nets_of_average:make' wants its 1 channels normalised is not known"),
    ):
        with pytest.raises(SwapError) as caught:
            average(paths, Path("mean"), Wish(**wish))
        assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_torch_save_is_refused_with_a_way_to_convert_it(tmp_path: Path) -> None:
    torch.save(weights(0), tmp_path / "model.ckpt")

    with pytest.raises(SwapError, match=r"model\.ckpt is not a safetensors file .*save_file\(torch\.load\("):
        average([tmp_path / "model.ckpt"], tmp_path / "mean", Wish())
    with pytest.raises(SwapError, match=r"nowhere not found$"):
        average([tmp_path / "nowhere"], tmp_path / "mean", Wish())


def test_code_that_a_header_names_runs_only_if_the_user_names_it_too(own: list[Path], tmp_path: Path) -> None:
    header = {"model": {"name": "nets_of_average:make", "channels": 1, "num_classes": 2}, "classes": ["ant", "bee"]}
    header |= {"shape": [1, 8, 8], "mean": [MEAN], "std": [STD]}
    path = tmp_path / "described.safetensors"
    write_tensors(path, load_file(own[0]), header)
    data = tmp_path / "prepared"

    with pytest.raises(SwapError, match="code that is not part of this package"):
        average([path], tmp_path / "mean", Wish(data=data))
    average([path], tmp_path / "mean", Wish(data=data, own="nets_of_average:make"))
    average([path], tmp_path / "again", Wish(data=data, model="nets_of_average:make"))

    assert (tmp_path / "mean").read_bytes() == (tmp_path / "again").read_bytes()
    write_tensors(path, load_file(own[0]), header | {"shape": [1, 5, 5]})
    for number in range(2):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    with pytest.raises(SwapError, match="the network cannot take the images of"):
        average([path], tmp_path / "other", Wish(data=tmp_path, own="nets_of_average:make"))


# --- memory


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_checkpoints(tmp_path: Path) -> None:
    megabytes = 40
    state = {f"{n}": torch.ones(1 << 18) for n in range(megabytes)}
    paths = saved(tmp_path, [state] * 8)

    def peak(files: list[Path], out: str) -> float:
        command = [sys.executable, "-m", "swap_pipeline.cli", "average", *map(str, files), "-o", str(tmp_path / out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        assert status == 0
        return usage.ru_maxrss / 1024

    one, eight = peak(paths[:1], "one"), peak(paths, "eight")

    assert eight - one < megabytes / 4
