"""Names from params and files stay names: nothing outside is read, written, imported or connected to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Project
from PIL import Image

from swap_pipeline.averaging.mean import average_files
from swap_pipeline.cli.models.predict import predict
from swap_pipeline.cli.recipes import list_recipes, use_recipe
from swap_pipeline.config.params import Data
from swap_pipeline.data.loader import FileImages
from swap_pipeline.data.prepared import Meta
from swap_pipeline.datasets.image_folders import scan
from swap_pipeline.datasets.prepare import prepare
from swap_pipeline.engine.opening import view_of_checkpoint
from swap_pipeline.errors import SwapError
from swap_pipeline.models.networks import ResNet9, load_model
from swap_pipeline.storage.tensor_files import TensorFile, write_tensors
from swap_pipeline.storage.weights import load_weights

RECIPE = ROOT / "recipes" / "fashion-mini.yaml"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in a folder with things around it."""
    project = tmp_path / "project"
    (project / "recipes").mkdir(parents=True)
    shutil.copy(RECIPE, project / "recipes" / "mine.yaml")
    shutil.copy(RECIPE, tmp_path / "x.yaml")
    monkeypatch.chdir(project)
    return project


@pytest.mark.parametrize(
    "name", ["../x", "../../x", "../recipes/mine", "./mine", "mine.yaml", "", ".", "*", "{tmp}/x", "mine\0", "mine\n"]
)
def test_a_recipe_is_one_of_the_names_in_its_folder_and_never_a_path(inside: Path, tmp_path: Path, name: str) -> None:
    before = files_in(tmp_path)

    with pytest.raises(SwapError, match="there is no recipe"):
        use_recipe(name.format(tmp=tmp_path), force=True)

    assert files_in(tmp_path) == before


def test_a_recipe_that_is_a_link_out_of_the_project_is_refused(inside: Path, tmp_path: Path) -> None:
    (inside / "recipes" / "linked.yaml").symlink_to(tmp_path / "x.yaml")

    with pytest.raises(SwapError, match=r"recipes/linked\.yaml is a link to .* outside of this project"):
        list_recipes()

    assert not (inside / "params.yaml").exists()


def test_a_params_file_that_is_a_link_is_replaced_and_what_it_led_to_stays(inside: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (inside / "params.yaml").symlink_to(tmp_path / "precious")

    use_recipe("mine", force=True)

    assert (tmp_path / "precious").read_text() == "mine"
    assert (inside / "params.yaml").read_bytes() == RECIPE.read_bytes()
    assert not (inside / "params.yaml").is_symlink()


def data_named(name: str, root: Path) -> Data:
    return Data(name=name, root=str(root), train_images="all", max_gb_in_memory=1)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc", "imagefolder/../x", "fashion-mini/..", "~/x", "http://x/y.tar.gz", ""]
)
def test_a_data_set_is_one_of_the_known_names_and_never_a_path(inside: Path, tmp_path: Path, name: str) -> None:
    before = files_in(tmp_path)

    with pytest.raises(SwapError, match=r"data\.name is"):
        prepare(data_named(name, tmp_path), inside / "prepared")

    assert files_in(tmp_path) == before


def test_class_names_are_data_and_what_a_terminal_would_obey_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("..a", "<b>", "${HOME}", "$(touch x)"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("L", (8, 8), len(name)).save(tmp_path / split / name / "1.png")

    prepare(data_named("imagefolder", tmp_path), tmp_path / "prepared")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "test", "train"]
    (tmp_path / "train" / "a\x1b[2Jb").mkdir()
    with pytest.raises(SwapError, match=r"'a\\x1b\[2Jb', a name with control characters: rename it"):
        scan(tmp_path)


@pytest.mark.parametrize("path", ["../secret.png", "train/../../secret.png", "/etc/secret.png", "a\0b"])
def test_an_index_cannot_name_an_image_outside_of_the_data_sets_folder(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "secret.png")
    index = {
        "labels": torch.tensor([0]),
        "heights": torch.tensor([8], dtype=torch.int32),
        "widths": torch.tensor([8], dtype=torch.int32),
        "paths": torch.tensor(list(path.encode()), dtype=torch.uint8),
        "path_ends": torch.tensor([len(path)]),
    }
    meta = Meta(classes=("a",), shape=None, channels=1, mean=(0.5,), std=(0.5,), digest="x")
    write_tensors(tmp_path / "train.safetensors", index, {"split": "train", "meta": "x"})
    images = FileImages(tmp_path, "train", meta, root=root, test_crop="square", device=torch.device("cpu"))

    with pytest.raises(SwapError, match="names an image outside of"):
        images.start()


@pytest.mark.parametrize("name", ["evil:make", "evil.inner:make", "os:getcwd", "evil:", ":evil", "timm:hf-hub:a/b"])
def test_no_checkpoint_can_have_code_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("evil.py").write_text("from pathlib import Path\nPath('it ran').touch()\ndef make(**_): ...\n")
    Image.new("L", (8, 8)).save("image.png")
    network = ResNet9(width=1, channels=1, num_classes=2)
    model = {"name": name, "channels": 1, "num_classes": 2, "options": {}}
    info = {"model": model, "classes": ["a", "b"], "shape": [1, 8, 8], "mean": [0.5], "std": [0.5]}
    write_tensors(Path("x.safetensors"), network.state_dict(), info)

    TensorFile(Path("x.safetensors"))
    load_weights(network, Path("x.safetensors"))
    view_of_checkpoint(Path("x.safetensors"))
    average_files([Path("x.safetensors")] * 2, Path("mean.safetensors"), {})
    for own in (None, "networks:birdnet", "evil:other"):
        with pytest.raises(SwapError):
            load_model("x.safetensors", own=own)
        with pytest.raises(SwapError):
            list(predict([Path("image.png")], Path("x.safetensors"), own=own))

    assert not Path("it ran").exists()
    assert "evil" not in sys.modules


BLOCK = """
import os, sys
def refuse(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"):
        address = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[0]
        host = address[0] if isinstance(address, tuple) else address
        if isinstance(address, tuple) or event.startswith("socket.get"):
            with open(os.environ["CONNECTIONS"], "a") as log:
                log.write(f"{event} {host}\\n")
            raise OSError(f"no network here: {event} {host}")
sys.addaudithook(refuse)
"""


def without_network() -> list[str]:
    """A command before a command that takes the network away, where the kernel lets one do so."""
    if shutil.which("unshare") is None:
        return []
    tried = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    return ["unshare", "-rn"] if tried.returncode == 0 else []


@pytest.mark.long
def test_no_stage_uses_the_network(finished: Project, tmp_path: Path) -> None:
    shutil.rmtree(finished.root / ".swap")
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCK)
    python_path = os.pathsep.join([str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")])
    blocked = {"PYTHONPATH": python_path, "CONNECTIONS": str(tmp_path / "connections")}
    expected = finished.bytes_of("checkpoints/phase3/model.safetensors")
    command = [*without_network(), sys.executable, "-m"]

    for stage in ("prepare", "phase1", "phase2 --seed 0", "phase3", "report"):
        finished.run(*command, *f"stages.{stage}".split(), **blocked)
    tried = subprocess.run(
        [sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 80))"],
        env={**os.environ, **blocked},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "no network here" in tried.stderr, "the block does not work"
    assert (tmp_path / "connections").read_text().splitlines() == ["socket.getaddrinfo 192.0.2.1"]
    assert finished.bytes_of("checkpoints/phase3/model.safetensors") == expected
