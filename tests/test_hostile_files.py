"""Files from elsewhere that were made to hurt: they are refused in one line, and nothing runs, grows or hangs."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Project, assert_one_line
from PIL import Image

from swap_pipeline.cli.models.average import Wish, average
from swap_pipeline.datasets.image_folders import EXTENSIONS
from swap_pipeline.errors import SwapError, printable
from swap_pipeline.models.networks import load_model
from swap_pipeline.storage.image_files import FORMATS, decode, shape_of
from swap_pipeline.storage.tensor_files import read_tensors, write_tensors

MODEL = "checkpoints/phase3/model.safetensors"
HOSTILE_NAME = "ant\x1b[2J\x07\r\n\u202etac.exe\u2028bee"


def swap(project: Project, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Ended after two minutes, with exit code 124: what hangs must not stop the other tests."""
    command = ("timeout", "120", sys.executable, "-m", "swap_pipeline.cli", *arguments)
    return project.run(*command, check=False, **environment)


def assert_one_bad_image(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 1, f"{done.returncode} {done.stdout} {done.stderr}"
    first, second = done.stderr.splitlines()
    assert first == "error: 1 of 5 images in data/raw cannot be read: repair or remove them"
    assert words in second


# --- images


def fake_ghostscript(folder: Path) -> Path:
    """A program `gs` that leaves a file behind; returns the folder that it is in."""
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {folder}/started\n")
    (folder / "gs").chmod(0o755)
    return folder


def eps(path: Path) -> Path:
    Image.new("RGB", (8, 8), "red").save(path, format="EPS")
    return path


def test_an_eps_that_is_called_png_starts_no_ghostscript_in_predict(finished: Project, tmp_path: Path) -> None:
    tools = fake_ghostscript(tmp_path / "tools")
    evil = eps(tmp_path / "evil.png")

    done = swap(finished, "predict", str(evil), PATH=f"{tools}:{os.environ['PATH']}")

    assert_one_line(done, "evil.png cannot be read as an image: its format is none of BMP, JPEG")
    assert not (tools / "started").exists()


def test_an_eps_that_is_called_png_starts_no_ghostscript_in_prepare(project: Project, tmp_path: Path) -> None:
    tools = fake_ghostscript(tmp_path / "tools")
    for split in ("train", "test"):
        for name in ("ant", "bee"):
            folder = project.root / "data/raw" / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / "1.png")
    eps(project.root / "data/raw/train/bee/evil.png")
    project.set_params({"data.name": "imagefolder"})

    done = project.stage("prepare", PATH=f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}")

    assert_one_bad_image(done, "evil.png cannot be read as an image: its format is none of")
    assert not (tools / "started").exists()


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_every_documented_type_is_read(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"image{extension}"
    Image.new("L" if extension == ".pgm" else "RGB", (9, 7), 200).save(path)

    assert decode(path, 3).size == (9, 7)
    assert shape_of(path)[1:] == (7, 9)


@pytest.mark.parametrize("name", ["GIF", "PDF", "ICO", "TGA", "SGI", "PCX", "EPS"])
def test_other_types_are_refused_whatever_they_are_called(tmp_path: Path, name: str) -> None:
    path = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(path, format=name)

    assert name not in FORMATS
    for read in (lambda: decode(path, 3), lambda: shape_of(path)):
        with pytest.raises(SwapError, match="its format is none of"):
            read()


@pytest.mark.long
def test_what_pillow_remarks_on_an_odd_file_is_not_printed(finished: Project, tmp_path: Path) -> None:
    odd = tmp_path / "odd.tiff"
    Image.new("L", (28, 28)).save(odd)
    content = bytearray(odd.read_bytes())
    tag = content.index((259).to_bytes(2, "little"))  # compression, with a value far beyond the end of the file
    content[tag + 4 : tag + 8] = (1 << 20).to_bytes(4, "little")
    odd.write_bytes(content)

    done = swap(finished, "predict", str(odd))

    assert (done.returncode, done.stderr) == (0, "") or done.stderr.count("\n") == 1, done.stderr
    assert "Warning" not in done.stderr


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link_to_pipe(path: Path) -> Path:
    path.symlink_to(pipe(path.with_name("pipe")))
    return path


def device(path: Path) -> Path:
    return Path("/dev/zero")


def link_to_device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


SPECIAL = [pipe, link_to_pipe, device, link_to_device]


@pytest.mark.parametrize("make", [link_to_pipe, device])
@pytest.mark.long
def test_a_pipe_or_a_device_is_refused_wherever_a_file_is_named(finished: Project, tmp_path: Path, make: Any) -> None:
    path, image = make(tmp_path / "special.png"), tmp_path / "image.png"
    Image.new("L", (28, 28)).save(image)

    for arguments in (
        ("predict", str(path)),
        ("predict", str(image), "--model", str(path)),
        ("average", str(path), "-o", str(tmp_path / "mean")),
        ("export", str(path), "-o", str(tmp_path / "export")),
        ("plan", "--params", str(path)),
        ("check", "--params", str(path)),
    ):
        assert_one_line(swap(finished, *arguments), f"{path} cannot be read", "it is a pipe or a device, not a file")


@pytest.mark.parametrize("make", SPECIAL)
@pytest.mark.long
def test_a_pipe_or_a_device_among_the_images_is_refused(project: Project, make: Any) -> None:
    for split in ("train", "test"):
        for name in ("ant", "bee"):
            folder = project.root / "data/raw" / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / "1.png")
    path = project.root / "data/raw/train/bee/2.png"
    if make in (pipe, device):
        path.symlink_to(make(project.root / "special.png"))  # a bare one is no image of a class, and skipped
    else:
        make(path)
    project.set_params({"data.name": "imagefolder"})

    command = ("timeout", "120", sys.executable, "-m", "stages.prepare")
    done = project.run(*command, check=False)
    assert_one_bad_image(done, "2.png cannot be read: it is a pipe or a device, not a file")


@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml", "dvc.lock", "checkpoints/phase1/model.safetensors"])
def test_nothing_waits_for_a_pipe_in_place_of_a_file_of_the_project(finished: Project, name: str) -> None:
    path = finished.root / name
    path.unlink()
    pipe(path)

    for command in (["stages.phase2", "--seed", "0"], ["swap_pipeline.cli", "clean", "--dry-run"]):
        done = finished.run("timeout", "120", sys.executable, "-m", *command, check=False)
        if done.returncode != 0:
            assert_one_line(done, name, "pipe")


# --- checkpoints


def checkpoint(path: Path, tensors: dict[str, torch.Tensor] | None = None, **info: Any) -> Path:
    """A small whole file with this header."""
    described = {"classes": ["ant", "bee"], "shape": [3, 8, 8], "mean": [0.5] * 3, "std": [0.2] * 3, **info}
    write_tensors(path, tensors or {f"tensor_{index}": torch.zeros(2, 2) for index in range(300)}, described)
    return path


def described(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "channels": 3, "num_classes": 2, **more}


HOSTILE_NETWORKS = {
    "width": described("resnet9", width=70_000_000),
    "width that the file could have": described("resnet9", width=1000),
    "classes": described("torchvision:resnet18") | {"num_classes": 10**12},
    "channels": described("resnet9", width=1) | {"channels": 10**9},
    "repeats": described("torchvision:mobilenet_v2", options={"inverted_residual_setting": [[1, 16, 10**8, 1]]}),
    "layers": described("torchvision:resnet18", options={"width_per_group": 10**9}),
    "computed with": described("torchvision:regnet_y_400mf", options={"stem_width": 10**9}),
    "window": described("torchvision:swin_t", options={"window_size": [10**5, 10**5]}),
}


@pytest.mark.parametrize("name", HOSTILE_NETWORKS)
def test_a_small_file_cannot_ask_for_a_large_network(tmp_path: Path, name: str) -> None:
    tensors = {"bn.running_mean": torch.zeros(2)} | {f"tensor_{index}": torch.zeros(2, 2) for index in range(300)}
    path = checkpoint(tmp_path / "model.safetensors", tensors, model=HOSTILE_NETWORKS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for use in (load_model, lambda path: average([path], tmp_path / "mean", Wish(data=tmp_path))):
        with pytest.raises(SwapError) as caught:
            use(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_an_own_network_that_cannot_be_made_without_values_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_net.py").write_text(
        "import torch\n"
        "def make(channels, num_classes, depth, width=1):\n"
        "    assert torch.ones(1).item() == 1\n"
        "    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])\n"
    )
    fine = dict(torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(3)]).state_dict())
    own = described("own_net:make", options={"depth": 3})

    loaded = load_model(checkpoint(tmp_path / "fine.safetensors", fine, model=own), own="own_net:make")
    assert loaded.state_dict().keys() == fine.keys()
    for hostile in ({**own, "options": {"depth": 10**9}}, {**own, "width": 10**6}):
        path = checkpoint(tmp_path / "evil.safetensors", fine, model=hostile)
        with pytest.raises(SwapError, match=r"evil\.safetensors"):
            load_model(path, own="own_net:make")


def test_a_network_that_computes_while_it_is_made_is_still_loaded(tmp_path: Path) -> None:
    from swap_pipeline.models.networks import new_network

    network = new_network(described("torchvision:regnet_y_400mf"), seed=1)
    path = checkpoint(
        tmp_path / "model.safetensors", dict(network.state_dict()), model=described("torchvision:regnet_y_400mf")
    )

    loaded = load_model(path).state_dict()

    assert all(torch.equal(tensor, loaded[key]) for key, tensor in network.state_dict().items())


@pytest.mark.long
def test_names_in_a_file_cannot_give_orders_to_the_terminal(finished: Project, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.new("L", (28, 28)).save(image)
    tensors, info = read_tensors(finished.root / MODEL)
    classes, named = tmp_path / "classes.safetensors", tmp_path / "named.safetensors"
    write_tensors(classes, tensors, info | {"classes": [f"{HOSTILE_NAME}{index}" for index in range(10)]})

    said = swap(finished, "predict", str(image), "--top", "10", "--model", str(classes))
    assert said.returncode == 0, said.stderr
    assert len(said.stdout.splitlines()) == 10
    assert "ant\\x1b[2J\\x07\\r\\n\\u202etac.exe\\u2028bee" in said.stdout
    outputs = [said.stdout]
    for name in (HOSTILE_NAME, f"evil.module:{HOSTILE_NAME}", f"torchvision:{HOSTILE_NAME}", f"timm:{HOSTILE_NAME}"):
        write_tensors(named, tensors, info | {"model": info["model"] | {"name": name}})
        done = swap(finished, "predict", str(image), "--model", str(named))
        assert_one_line(done, "named.safetensors")
        outputs.append(done.stderr)
    write_tensors(named, {**tensors, HOSTILE_NAME: torch.zeros(1)}, info)
    done = swap(finished, "predict", str(image), "--model", str(named))
    assert_one_line(done, "named.safetensors belongs to another network")
    mixed = swap(finished, "average", str(named), str(classes), "-o", str(tmp_path / "mean"))
    assert_one_line(mixed, "has no tensor 'ant\\x1b[2J")
    for text in (*outputs, done.stderr, mixed.stderr):
        assert not {"\x1b", "\x07", "\r", "\u202e", "\u2028"} & set(text)


@pytest.mark.long
def test_a_hostile_file_name_is_written_out_too(finished: Project, tmp_path: Path) -> None:
    image = tmp_path / "a\x1b[31m\u202egnp.png"
    Image.new("L", (28, 28)).save(image)
    missing = os.fsdecode(b"\xff\x1b.png")

    said = swap(finished, "predict", str(image))
    assert said.returncode == 0 and "a\\x1b[31m\\u202egnp.png\t" in said.stdout, said.stderr
    assert_one_line(swap(finished, "predict", missing), "\\udcff\\x1b.png not found")


def test_what_people_write_stays_as_it_is() -> None:
    for text in ("Katze", "고양이", "می‌خواهم", "👩‍👩‍👧", "é", "e\u0301", "a b"):
        assert printable(text) == text


@pytest.mark.long
def test_a_recipe_cannot_give_orders_to_the_terminal(project: Project) -> None:
    project.set_params({"recipe": f"mine{HOSTILE_NAME}"})

    for command in ("check", "doctor", "use"):
        said = swap(project, command).stdout
        assert said and not {"\x1b", "\x07", "\r", "\u202e", "\u2028"} & set(said)


def test_a_folder_in_the_place_of_a_file_is_said(finished: Project, tmp_path: Path) -> None:
    shutil.copytree(finished.root / "recipes", tmp_path / "folder.png")

    assert_one_line(swap(finished, "predict", str(tmp_path / "folder.png")), "cannot be read: Is a directory")
