"""Every recipe trains: a few steps of each phase on a little data, through the stages' own functions."""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, pack, set_params
from PIL import Image
from safetensors.numpy import load_file

from stages.phase1 import train_phase1
from stages.phase2 import train_worker
from stages.phase3 import average_workers, models_after
from swap_pipeline.config.instances import PHASE1, PHASE3, Instance, worker
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.config.schedules import by_epoch
from swap_pipeline.data.epochs import steps_per_epoch
from swap_pipeline.datasets import arrays
from swap_pipeline.datasets.prepare import prepare
from swap_pipeline.launch.collecting import collect
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.storage.files import read_json
from swap_pipeline.storage.tensor_files import TensorFile

RANDOM = np.random.default_rng(0)


def records(count: int, label_bytes: int, classes: int) -> bytes:
    """Images of noise in CIFAR's binary layout, in all classes."""
    made = RANDOM.integers(0, 256, (count, label_bytes + 3072), dtype=np.uint8)
    made[:, label_bytes - 1] = np.arange(count) % classes
    made[:, : label_bytes - 1] = 0
    return made.tobytes()


def cifar10(num_train: int, patch: pytest.MonkeyPatch) -> None:
    members = {f"cifar-10-batches-bin/data_batch_{i}.bin": records(num_train // 5, 1, 10) for i in range(1, 6)}
    members["cifar-10-batches-bin/test_batch.bin"] = records(100, 1, 10)
    members["cifar-10-batches-bin/batches.meta.txt"] = "\n".join(f"class {i}" for i in range(10)).encode()
    patch.setattr(arrays, "CIFAR10_MD5", pack(Path("data/raw/cifar-10-binary.tar.gz"), members))


def cifar100(num_train: int, patch: pytest.MonkeyPatch) -> None:
    members = {
        "cifar-100-binary/train.bin": records(num_train, 2, 100),
        "cifar-100-binary/test.bin": records(200, 2, 100),
        "cifar-100-binary/fine_label_names.txt": "\n".join(f"class {i}" for i in range(100)).encode(),
    }
    patch.setattr(arrays, "CIFAR100_MD5", pack(Path("data/raw/cifar-100-binary.tar.gz"), members))


def fashion_mnist(num_train: int, patch: pytest.MonkeyPatch) -> None:
    sums = {}
    Path("data/raw").mkdir(parents=True)
    for split, count in (("train", num_train), ("t10k", 50)):
        images = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            path = Path(f"data/raw/{split}-{name}-ubyte.gz")
            path.write_bytes(gzip.compress(head + array.tobytes()))
            sums[path.name] = (hashlib.md5(path.read_bytes()).hexdigest(), "")
    patch.setattr(arrays, "FASHION_MNIST_MD5", sums)


def fashion_mini(num_train: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arrays, "FASHION_MINI", ROOT / "data" / "fashion-mini.safetensors")


def folder(
    root: str, *, classes: int, size: Callable[[], tuple[int, int]]
) -> Callable[[int, pytest.MonkeyPatch], None]:
    def make(num_train: int, patch: pytest.MonkeyPatch) -> None:
        for split, count in (("train", num_train), ("val", 2 * classes)):
            for i in range(count):
                path = Path(root) / split / f"n{i % classes}" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(RANDOM.integers(0, 256, (*size(), 3), dtype=np.uint8)).save(path)

    return make


SHORT = {
    "phase1.max_epochs": 1,
    "phase1.warmup_epochs": 0.5,
    "phase1.stop_accuracy": 100,
    "phase2.epochs": 1,
    "workers.seeds": [0, 1],
}
NARROW = {**SHORT, "model.width": 2}
# Images to train on, where they come from, what is made smaller. Batch sizes of CIFAR and Fashion-MNIST stay.
CASES: dict[str, tuple[int, Callable[[int, pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "fashion-mini": (960, fashion_mini, {**NARROW, "data.train_images": 960}),
    "fashion-mnist": (960, fashion_mnist, NARROW),
    "cifar10": (2 * 4096 + 8, cifar10, NARROW),
    "cifar10-lars": (2 * 4096, cifar10, {**NARROW, "phase1.batch_size": 4096}),
    "cifar100": (2 * 2048, cifar100, NARROW),
    "dawnbench": (2 * 2048 + 4, cifar10, NARROW),
    "cifar10-cpu": (
        150,
        folder("data/cifar10", classes=10, size=lambda: (32, 32)),
        {**NARROW, "data.train_images": 128, "data.validation_images": 20, "phase1.batch_size": 64},
    ),
    "tiny-imagenet-cpu": (
        150,
        folder("data/tiny-imagenet100", classes=10, size=lambda: (32, 32)),
        {**NARROW, "data.train_images": 128, "data.validation_images": 20, "phase1.batch_size": 64},
    ),
    "imagenet": (
        18,
        folder("data/imagenet", classes=3, size=lambda: (int(RANDOM.integers(40, 90)), int(RANDOM.integers(40, 90)))),
        {
            "phase1.batch_size": [[0, 8]],
            "phase1.shards": 4,
            "phase1.lr_knots": [[0, 0.02], [1, 0.04]],
            "phase1.image_size": [[0, 32]],
            "phase1.min_scale": [[0, 0.08]],
            "phase1.max_epochs": 1,
            "phase2.batch_size": [[0, 8], [1, 8], [2, 4]],
            "phase2.shards": 2,
            "phase2.lr_knots": [[0, 0.02], [1, 0.004], [2, 0.0004], [3, 0.0001]],
            "phase2.image_size": [[0, 32], [1, 48], [2, 64]],
            "phase2.min_scale": [[0, 0.08], [1, 0.087], [2, 0.5]],
            "phase2.first_epoch": 1,
            "phase2.epochs": 2,
            "phase3.batch_size": 9,
        },
    ),
}


def test_every_recipe_is_here() -> None:
    assert sorted(CASES) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if "." not in path.stem)


def prepare_here(name: str, changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A recipe with fewer images and epochs and `changes`, in a folder, with its data prepared."""
    num_train, make_data, smaller = CASES[name]
    monkeypatch.chdir(folder)
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "SWAP_DEVICE": "cpu", "SWAP_LOADERS": "1"}.items():
        monkeypatch.setenv(variable, value)
    Path("params.yaml").write_bytes((ROOT / "recipes" / f"{name}.yaml").read_bytes())
    set_params(Path("params.yaml"), {**smaller, **changes})
    params = read_params()
    make_data(num_train, monkeypatch)
    print(prepare(params.data, Path("data/prepared")))
    return params


def run_here(instance: Instance, run: Callable[[JobFolder], None]) -> None:
    """What a stage does, in this process."""
    folder = JobFolder(Path("scratch") / instance.stage_name)
    run(folder)
    collect(folder, instance)


def run_all(params: Params) -> None:
    run_here(PHASE1, lambda folder: train_phase1(params, folder))
    for seed in params.workers.seeds:
        run_here(worker(seed), lambda folder, seed=seed: train_worker(params, worker(seed), folder))  # type: ignore[misc]
    run_here(PHASE3, lambda folder: average_workers(params, folder))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_a_recipe_trains_in_every_phase(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_train = CASES[name][0]
    params = prepare_here(name, {}, tmp_path, monkeypatch)

    run_all(params)

    for given, epochs, first in (
        (params.phase1, params.phase1.max_epochs, 0),
        (params.phase2, params.phase2.epochs, params.phase2.first_epoch),
    ):
        batches = by_epoch(given.batch_size, first_epoch=first)
        assert all(steps_per_epoch(num_train, batches(epoch)) >= 2 for epoch in range(epochs))
    curves = [read_json(Path(f"metrics/{run}.json"))["curve"] for run in ("phase1", "phase2/seed_0", "phase2/seed_1")]
    assert [len(curve) for curve in curves] == [params.phase1.max_epochs] + [params.phase2.epochs] * 2
    assert all(math.isfinite(row["train_loss"]) and row["seconds"] > 0 for curve in curves for row in curve)
    assert math.isfinite(read_json(Path("metrics/phase3.json"))["test_loss"])
    epochs, cycles = params.phase2.epochs, params.phase2.cycles
    by_seed = models_after(epochs, seeds=params.workers.seeds, epochs=epochs, cycles=cycles)
    models = [load_file(path) for paths in by_seed.values() for path in paths]
    assert len(models) == 2 * cycles
    average = load_file("checkpoints/phase3/model.safetensors")
    weight = next(key for key in average if key.endswith("weight") and average[key].ndim == 4)
    assert not np.array_equal(models[0][weight], models[1][weight])
    by_hand = np.mean([model[weight].astype(np.float64) for model in models], axis=0)
    np.testing.assert_allclose(average[weight], by_hand, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [None, 0.5])
def test_without_phase_2_the_result_is_phase_1s_model_which_sees_images_as_it_did(
    decay: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phase 2 would have other image sizes, but it does not take place; only a mean of weights gets statistics."""
    changes: dict[str, Any] = {"model": {"name": "resnet9", "width": 2}, "phase2.epochs": 0, "workers.seeds": [3]}
    changes |= {"phase2.image_size": [[0, 64]], "phase2.batch_size": [[0, 2]], "phase2.shards": 1}
    params = prepare_here("imagenet", changes | ({"phase1.ema_decay": decay} if decay else {}), tmp_path, monkeypatch)
    run_all(params)

    phase1, worker3, final = (
        Path("checkpoints") / name / "model.safetensors" for name in ("phase1", "phase2/seed_3", "phase3")
    )
    views = [TensorFile(path).info["view"] for path in (phase1, worker3, final)]
    assert views == [{"size": 32, "min_scale": 0.08}] * 3
    record = read_json(Path("metrics/phase2/seed_3.json"))
    assert (record["curve"], record["epochs"], record["seconds"]) == ([], 0, 0)
    scores = [read_json(Path(f"metrics/{name}.json")) for name in ("phase1", "phase2/seed_3", "phase3")]
    same = {score["test_loss"] for score in scores[: 2 if decay else 3]}
    assert len(same) == 1
    weights = [load_file(path) for path in (phase1, worker3, final)]
    other = {key for key in weights[0] if not np.array_equal(weights[0][key], weights[2][key])}
    assert all(np.array_equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
    assert bool(other) == bool(decay)
    assert all(key.endswith(("running_mean", "running_var", "num_batches_tracked")) for key in other)
