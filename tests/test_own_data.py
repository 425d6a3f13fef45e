"""A user's own images and network, through the whole pipeline: files of any size, several cycles, no batch norm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Project, made_once, make_project, processes_in, wait_until
from PIL import Image
from safetensors.numpy import load_file

from swap_pipeline.storage.tensor_files import TensorFile

pytestmark = pytest.mark.long

NETWORK = '''
from torch import nn


def tiny(*, num_classes, channels, hidden=4):
    """Group norm instead of batch norm; any image size."""
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 3, stride=2), nn.GroupNorm(2, hidden), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * hidden, num_classes),
    )
'''
OWN = {
    "data.name": "imagefolder",
    "augment.padding": 0,
    "augment.cutout": 3,
    "model": {
        "name": "networks:tiny",
        "options": {"hidden": 6},
        "pretrained": False,
        "zero_init_last_gamma": False,
    },
    "phase1.batch_size": [[0, 8], [1, 6]],
    "phase1.shards": 2,
    "phase1.image_size": [[0, 16], [2, 24]],
    "phase1.min_scale": 0.3,
    "phase1.max_epochs": 3,
    "phase2.batch_size": 4,
    "phase2.image_size": [[0, 20], [2, 24]],
    "phase2.min_scale": [[0, 0.3], [2, 0.6]],
    "phase2.epochs": 4,
    "phase2.cycles": 2,
    "workers.seeds": [0, 1],
    "phase3.batch_size": 7,
}


def make_photos(root: Path) -> None:
    """24 training and 9 test images of three classes, of different sizes."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("cat", "dog", "owl")):
            for i in range(count):
                height, width = generator.integers(28, 60, 2)
                pixels = generator.integers(0, 120, (height, width, 3), dtype=np.uint8)
                pixels[..., label] += 100
                path = root / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)


def with_own_data(project: Project) -> None:
    photos = project.root.parent / "photos"
    make_photos(photos)
    (project.root / "networks.py").write_text(NETWORK)
    project.set_params({**OWN, "data.root": str(photos)})


@pytest.fixture(scope="session")
def own_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with its own images and network after `dvc repro`, phase 1 over two ranks; not to be changed."""
    return made_once("own", with_own_data, tmp_path_factory, SWAP_NPROC="2")


@pytest.fixture
def own(own_project: Project, tmp_path: Path) -> Project:
    """A copy of it, including the photos, to work on."""
    shutil.copytree(own_project.root.parent / "photos", tmp_path / "photos")
    shutil.copy(own_project.root.parent / "output.txt", tmp_path / "output.txt")
    copy = own_project.copy_to(tmp_path / "project")
    copy.set_params({"data.root": str(tmp_path / "photos")})
    return copy


def test_images_stay_in_their_files_and_all_phases_train_on_them(own_project: Project) -> None:
    output = (own_project.root.parent / "output.txt").read_text()
    meta = own_project.json("data/prepared/meta.json")
    assert meta["kind"] == "files" and meta["classes"] == ["cat", "dog", "owl"]
    assert own_project.json("metrics/phase1.json")["devices"] == "2 × cpu"
    assert "no batch norm, so no statistics" in output
    assert own_project.json("metrics/swap.json")["accuracy"] > 50  # a third by chance


def test_the_average_takes_a_model_from_every_cycle_of_every_worker(own_project: Project) -> None:
    folders = [own_project.root / f"checkpoints/phase2/seed_{seed}" for seed in (0, 1)]
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [
        ["cycle_1.safetensors", "epoch_1.safetensors", "model.safetensors"]
    ] * 2
    models = [load_file(folder / f"{name}.safetensors") for folder in folders for name in ("cycle_1", "model")]
    average = load_file(own_project.root / "checkpoints/phase3/model.safetensors")
    assert len(models) == 4
    for key, tensor in average.items():
        by_hand = np.mean([model[key].astype(np.float64) for model in models], axis=0)
        np.testing.assert_allclose(tensor, by_hand, rtol=1e-6, atol=1e-7)
    assert not np.array_equal(models[0]["0.weight"], models[1]["0.weight"])


def test_a_checkpoint_tells_how_its_network_saw_images_last(own_project: Project) -> None:
    folder = own_project.root / "checkpoints"
    views = {
        name: TensorFile(folder / f"{name}.safetensors").info["view"]
        for name in ("phase1/model", "phase2/seed_0/cycle_1", "phase2/seed_0/model", "phase3/model")
    }
    assert views == {
        "phase1/model": {"size": 24, "min_scale": 0.3},
        "phase2/seed_0/cycle_1": {"size": 20, "min_scale": 0.3},
        "phase2/seed_0/model": {"size": 24, "min_scale": 0.6},
        "phase3/model": {"size": 24, "min_scale": 0.6},
    }


def test_a_cycle_begins_at_the_peak_and_its_rate_falls(own_project: Project) -> None:
    rates = [row["learning_rate"] for row in own_project.json("metrics/phase2/seed_0.json")["curve"]]
    assert rates == pytest.approx([0.05 * (1 - 5 / 12), 0.05 * (1 - 11 / 12)] * 2)


def test_the_network_is_rebuilt_by_predict_from_the_file_and_the_users_code(own: Project) -> None:
    image = own.root.parent / "photos/val/cat/0.png"
    done = own.run("swap", "predict", str(image))
    assert done.stdout.split("\t")[1] in ("cat", "dog", "owl")
    own.set_params({"model.name": "resnet9", "model.width": 2, "model.options": {}})
    done = own.run("swap", "predict", str(image), check=False)
    assert done.returncode == 1 and "networks:tiny" in done.stderr and len(done.stderr.splitlines()) == 1
    assert own.run("swap", "predict", "--own", "networks:tiny", str(image)).stdout


def test_an_edit_to_the_network_that_dvc_does_not_know_of_is_still_another_job(own: Project) -> None:
    """The project's dvc.yaml does not list networks.py, which is said; scratch must not mix old and new code."""
    output = (own.root.parent / "output.txt").read_text()
    assert "note: DVC does not know that networks.py defines the network" in output
    before = own.bytes_of("checkpoints/phase2/seed_0/model.safetensors")
    text = (own.root / "networks.py").read_text()
    (own.root / "networks.py").write_text(text.replace("nn.Dropout(0.1)", "nn.Dropout(0.5)"))
    done = own.stage("phase2", "--seed", "0")
    assert done.returncode == 0 and "already trained" not in done.stdout
    assert own.bytes_of("checkpoints/phase2/seed_0/model.safetensors") != before
    listed = (
        (own.root / "dvc.yaml")
        .read_text()
        .replace("      - data/prepared\n", "      - data/prepared\n      - networks.py\n")
    )
    (own.root / "dvc.yaml").write_text(listed)
    assert "note: networks.py" not in own.stage("phase1").stdout


@pytest.mark.parametrize("change", ["added", "removed", "changed"])
def test_a_photo_that_is_added_removed_or_changed_is_noticed(own: Project, change: str) -> None:
    photos = own.root.parent / "photos"
    own.dvc("repro", "prepare")  # the photos have moved, no more
    before = own.bytes_of("data/prepared/train.safetensors")
    first = photos / "train/cat/0.png"
    if change == "added":
        shutil.copy(first, photos / "train/cat/new.png")
    elif change == "removed":
        first.unlink()
    else:
        pixels = np.asarray(Image.open(first)).copy()
        pixels[0, 0] ^= 1
        Image.fromarray(pixels).save(first)
    assert "prepare" in own.dvc("status")
    own.dvc("repro", "prepare")
    assert own.bytes_of("data/prepared/train.safetensors") != before
    assert "phase1" in own.dvc("status")


def test_photos_that_were_moved_train_nothing_again(own: Project) -> None:
    output = own.dvc("repro")
    assert "Running stage 'prepare'" in output
    assert "Running stage 'phase" not in output


def test_a_killed_worker_that_reads_files_ends_in_the_same_bytes(own: Project) -> None:
    """Killed in the first epoch of its second cycle: the model of the first cycle is there, and stays."""
    expected = [own.bytes_of(f"checkpoints/phase2/seed_0/{name}.safetensors") for name in ("cycle_1", "model")]
    shutil.rmtree(own.root / ".swap")
    shutil.rmtree(own.root / "checkpoints/phase2/seed_0")
    command = [sys.executable, "-m", "stages.phase2", "--seed", "0"]
    launcher = subprocess.Popen(
        command, cwd=own.root, env=own.full_environment(), stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list((own.root / ".swap/phase2").glob("*/snapshot_000002.safetensors")):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.005)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert not list((own.root / ".swap/phase2").glob("*/result"))

    done = own.stage("phase2", "--seed", "0")

    assert "resuming after epoch" in done.stdout
    assert [own.bytes_of(f"checkpoints/phase2/seed_0/{name}.safetensors") for name in ("cycle_1", "model")] == expected


def test_loaders_of_a_killed_rank_end_too(own: Project) -> None:
    shutil.rmtree(own.root / ".swap")
    own.set_params({"phase2.epochs": 400, "phase2.cycles": 1})
    launcher = subprocess.Popen(
        [sys.executable, "-m", "stages.phase2", "--seed", "0"],
        cwd=own.root,
        env={**own.full_environment(), "SWAP_LOADERS": "2"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: list((own.root / ".swap/phase2").glob("*/snapshot_*.safetensors")), seconds=120)
    assert len(processes_in(own.root)) >= 4  # launcher, rank, loaders
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: not processes_in(own.root), seconds=60)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"phase1.image_size": None}, "phase1.image_size is missing: images come from files of any size"),
        ({"phase1.image_size": 2}, "augment.cutout is 3, larger than the images (2 pixels): lower it"),
        ({"model.name": "networks:tinny"}, "tiny"),
        ({"phase1.batch_size": [[0, 8], [1, 5]]}, "phase1.batch_size is 5, which 2 shards cannot share equally"),
    ],
)
def test_what_does_not_fit_the_images_is_one_line(own: Project, params: dict[str, object], message: str) -> None:
    for key in [key for key, value in params.items() if value is None]:
        own.remove_param(key)
        own.remove_param("phase1.min_scale")
    own.set_params({key: value for key, value in params.items() if value is not None})
    done = own.stage("phase1")
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_sizes_and_crops_are_refused_for_images_in_memory(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    project.set_params({"phase1.image_size": 28})
    project.dvc("repro", "prepare")
    done = project.stage("phase1")
    assert done.returncode == 1
    assert "phase1.image_size has no effect on images that were prepared in memory, 28×28 pixels" in done.stderr
