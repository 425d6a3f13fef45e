"""A validation set: which images are in it, and that test images are left to final models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, VALIDATED, Project, assert_one_line, made_once
from numpy.typing import NDArray
from PIL import Image

from swap_pipeline.config.params import Data
from swap_pipeline.config.reading import read_params
from swap_pipeline.data.prepared import read_meta
from swap_pipeline.datasets.parts import parts_of
from swap_pipeline.datasets.prepare import prepare
from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import read_tensors, write_tensors

# Where a class of ten has its images, by rank of a hash; worked out with b2sum, not with this code.
LOTS = {0: [7, 6, 9, 5, 0, 8, 2, 1, 3, 4], 1: [6, 0, 8, 5, 3, 1, 7, 2, 9, 4]}


def data(validation: int, *, train: Any = "all", name: str = "fashion-mini", **more: Any) -> Data:
    return Data(name=name, train_images=train, validation_images=validation, **{"root": "data/raw", **more})


def labels_of(*sizes: int) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(sizes)), sizes)


def test_the_last_lots_of_each_class_are_for_validation_and_the_first_for_training() -> None:
    labels = np.arange(20) % 2  # image i is the (i // 2)th of its class

    parts = parts_of(labels, ["even", "odd"], data(6, train=8))

    assert parts.validation.tolist() == sorted([2 * i for i in LOTS[0][-3:]] + [2 * i + 1 for i in LOTS[1][-3:]])
    assert parts.train.tolist() == sorted([2 * i for i in LOTS[0][:4]] + [2 * i + 1 for i in LOTS[1][:4]])
    assert parts.notes == ("note: 8 of 14 training images are used (data.train_images)",)


@pytest.mark.parametrize(
    ("sizes", "number", "expected"),
    [((100, 100, 100), 30, [10, 10, 10]), ((100, 12, 500), 31, [10, 10, 11]), ((9, 9, 9, 9), 2, [0, 0, 1, 1])],
)
def test_all_classes_give_the_same_number_whatever_their_size(
    sizes: tuple[int, ...], number: int, expected: list[int]
) -> None:
    labels = labels_of(*sizes)

    parts = parts_of(labels, [str(size) for size in sizes], data(number))

    assert np.bincount(labels[parts.validation], minlength=len(sizes)).tolist() == expected
    assert sorted([*parts.train, *parts.validation]) == list(range(len(labels)))
    assert [note.partition(": raise")[0] for note in parts.notes] == (
        ["warning: 2 of 4 classes have no validation image"] if 0 in expected else []
    )


def test_a_validation_set_leaves_the_same_part_to_train_on() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 500)

    with_it, without = (parts_of(labels, list("abcde"), data(number, train=200)) for number in (100, 0))

    assert with_it.train.tolist() == without.train.tolist()
    assert not without.validation.size


@pytest.mark.parametrize(
    ("sizes", "given", "words"),
    [
        ((9, 4, 9), data(12), "data.validation_images is 12, 4 of each class, but b has 4 training images: set it to "
                              "at most 9"),
        ((9, 4, 9), data(22), "data.validation_images is 22, but fashion-mini has 22 training images: lower it"),
        ((9, 9, 9), data(9, train=20), "data.train_images is 20, but fashion-mini has 18 beside 9 for validation: "
                                       "lower it, or set it to all"),
    ],
)  # fmt: skip
def test_more_than_the_classes_have_is_refused(sizes: tuple[int, ...], given: Data, words: str) -> None:
    with pytest.raises(SwapError) as caught:
        parts_of(labels_of(*sizes), list("abc"), given)

    assert str(caught.value) == f"params.yaml: {words}"


def test_prepare_writes_it_and_normalises_by_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    lines = [prepare(data(1000), tmp_path / name) for name in ("one", "two")]

    whole, _ = read_tensors(ROOT / "data/fashion-mini.safetensors")
    train, held_back = (read_tensors(tmp_path / f"one/{name}.safetensors")[0] for name in ("train", "validation"))
    assert lines[0] == (
        "fashion-mini: 9,000 training, 1,000 validation and 10,000 test images, 1×28×28, 10 classes, in memory"
    )
    assert torch.bincount(held_back["labels"]).tolist() == [100] * 10

    def pairs(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[bytes, int]]:
        return sorted((image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True))

    both = pairs(*(torch.cat([train[key], held_back[key]]) for key in ("images", "labels")))
    assert both == pairs(whole["train_images"], whole["train_labels"])
    assert read_meta(tmp_path / "one").num_validation == 1000
    assert read_meta(tmp_path / "one").mean == pytest.approx([train["images"].double().mean().item() / 255], rel=1e-12)
    first, second = ((tmp_path / name / "validation.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second


def test_without_it_no_old_one_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    prepare(data(1000), tmp_path)

    prepare(data(0), tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["meta.json", "test.safetensors", "train.safetensors"]
    assert "validation" not in json.loads((tmp_path / "meta.json").read_text())


def test_of_image_files_it_is_an_index(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for label, name in enumerate(("cat", "dog")):
        for split, count in (("train", 10), ("test", 1)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                shade = np.full((6, 6 + number, 3), 20 * number + label, np.uint8)
                Image.fromarray(shade).save(root / split / name / f"{number}.png")

    prepare(data(4, name="imagefolder", root=str(root)), tmp_path / "prepared")

    index, _ = read_tensors(tmp_path / "prepared/validation.safetensors")
    ends = index["path_ends"].tolist()
    blob = index["paths"].numpy().tobytes()
    paths = [blob[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
    assert paths == [f"train/{name}/{i}.png" for name, lots in zip(("cat", "dog"), LOTS.values(), strict=True)
                     for i in sorted(lots[-2:])]  # fmt: skip
    assert index["labels"].tolist() == [0, 0, 1, 1]
    assert len(read_tensors(tmp_path / "prepared/train.safetensors")[0]["labels"]) == 16


# --- whole runs


def wrong_test_labels(project: Project) -> None:
    project.set_params(VALIDATED)
    path = project.root / "data/fashion-mini.safetensors"
    tensors, info = read_tensors(path)
    write_tensors(path, {**tensors, "test_labels": tensors["test_labels"].roll(1)}, info)


@pytest.fixture(scope="session")
def mislabelled(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The same with other labels on the test images."""
    return made_once("mislabelled", wrong_test_labels, tmp_path_factory)


def accuracy_by_hand(project: Project, model: str, split: str) -> float:
    """Of a checkpoint, by the library's front door."""
    from swap_pipeline import load_model

    network = load_model(project.root / model)
    network.eval()
    tensors, _ = read_tensors(project.root / f"data/prepared/{split}.safetensors")
    meta = read_meta(project.root / "data/prepared")
    pixels = (tensors["images"] / 255 - meta.mean[0]) / meta.std[0]
    with torch.no_grad():
        return 100 * float((network(pixels).argmax(dim=1) == tensors["labels"]).double().mean())


def test_curves_are_of_validation_images_and_final_models_are_also_tested(validated: Project) -> None:
    phase1, worker = validated.json("metrics/phase1.json"), validated.json("metrics/phase2/seed_1.json")
    phase3 = validated.json("metrics/phase3.json")
    assert {record["split"] for record in (phase1, worker, phase3)} == {"validation"}
    folder = "checkpoints/phase2/seed_1"
    for model, split, found in (
        ("checkpoints/phase1/epoch_2.safetensors", "validation", phase1["curve"][1]["accuracy"]),
        ("checkpoints/phase1/model.safetensors", "validation", phase1["curve"][2]["accuracy"]),
        ("checkpoints/phase1/model.safetensors", "validation", phase1["validation_accuracy"]),
        ("checkpoints/phase1/model.safetensors", "test", phase1["test_accuracy"]),
        (f"{folder}/cycle_1.safetensors", "test", worker["models"][0]["test_accuracy"]),
        (f"{folder}/cycle_1.safetensors", "validation", worker["models"][0]["validation_accuracy"]),
        (f"{folder}/model.safetensors", "test", worker["models"][1]["test_accuracy"]),
        ("checkpoints/phase3/model.safetensors", "validation", phase3["points"][-1]["accuracy"]),
        ("checkpoints/phase3/model.safetensors", "test", phase3["test_accuracy"]),
    ):
        assert accuracy_by_hand(validated, model, split) == pytest.approx(found), (model, split)
    assert phase3["data"]["images"] == {"train": 200, "validation": 40, "test": 120}


def test_metrics_and_tables_are_of_test_images_with_validation_to_choose_by(validated: Project) -> None:
    metrics, phase3 = validated.json("metrics/swap.json"), validated.json("metrics/phase3.json")
    workers = [validated.json(f"metrics/phase2/seed_{seed}.json") for seed in (0, 1, 2)]
    tested = [model["test_accuracy"] for worker in workers for model in worker["models"]]
    assert set(metrics) == {"accuracy", "loss", "validation", "workers", "phase1", "seconds"}
    assert metrics["accuracy"] == phase3["test_accuracy"]
    assert metrics["validation"] == phase3["validation_accuracy"]
    assert metrics["workers"] == pytest.approx(sum(tested) / 6)
    table = (validated.root / "report/summary.md").read_text()
    assert "| test accuracy | test loss | validation accuracy | seconds |" in table
    page = " ".join((validated.root / "report/index.html").read_text().split())
    assert "use 40 validation images" in page and "200 training, 40 validation, 120 test" in page
    rows = (validated.root / "report/figures/training.csv").read_text().splitlines()
    assert rows[0] == "run,epoch,learning_rate,accuracy"


def digests(project: Project) -> dict[str, str]:
    files = sorted((project.root / "checkpoints").rglob("*.safetensors"))
    return {str(path.relative_to(project.root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without_test_and_times(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("test_accuracy", "test_loss", "seconds", "ran", "learning_rate")
        return {key: without_test_and_times(entry) for key, entry in value.items() if key not in left_out}
    return [without_test_and_times(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.long
def test_test_images_change_nothing_but_the_final_models_test_figures(validated: Project, mislabelled: Project) -> None:
    assert digests(validated) == digests(mislabelled)
    for name in ("phase1", "phase2/seed_0", "phase2/seed_1", "phase2/seed_2", "phase3"):
        one, other = (project.json(f"metrics/{name}.json") for project in (validated, mislabelled))
        assert without_test_and_times(one) == without_test_and_times(other)
        assert one["test_loss"] != other["test_loss"]
    one, other = (project.json("metrics/swap.json") for project in (validated, mislabelled))
    assert one["validation"] == other["validation"] and one["loss"] != other["loss"]


def test_a_repeat_shares_the_validation_set_and_prepares_nothing(validated: Project, tmp_path: Path) -> None:
    project = validated.copy_to(tmp_path / "project")
    project.set_params({"seed": 9})

    output = project.dvc("repro", "phase1", "--dry")

    assert "Stage 'prepare' didn't change" in output and "Running stage 'phase1'" in output


def test_a_validation_set_that_was_lost_is_not_replaced_by_test_images(validated: Project, tmp_path: Path) -> None:
    project = validated.copy_to(tmp_path / "project")
    project.set_params({"seed": 9})
    (project.root / "data/prepared/validation.safetensors").unlink()

    assert_one_line(project.stage("phase1"), "validation.safetensors")


def test_without_one_the_report_says_what_choices_were_made_on(finished_project: Project) -> None:
    page = " ".join((finished_project.root / "report/index.html").read_text().split())
    assert "There is no validation set" in page and "was chosen on the test images" in page
    assert "validation" not in finished_project.json("metrics/swap.json")
    assert "validation" not in (finished_project.root / "report/summary.md").read_text()


def test_every_recipe_of_the_paper_trains_on_all_images_and_the_default_holds_some_back() -> None:
    found: Callable[[str], int] = lambda name: read_params(ROOT / f"recipes/{name}.yaml").data.validation_images  # noqa: E731
    assert [found(name) for name in ("cifar10", "cifar100", "dawnbench", "imagenet", "fashion-mini")] == [
        0, 0, 0, 0, 1000,
    ]  # fmt: skip
