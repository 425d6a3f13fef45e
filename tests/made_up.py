"""Records as the stages write them, with made-up numbers, for what is drawn and written of them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import ROOT, set_params

from swap_pipeline.cli.compare.experiments import Experiment
from swap_pipeline.cli.compare.methods import read_methods
from swap_pipeline.cli.compare.tables import Records, Tables, make_tables
from swap_pipeline.cli.compare.tabulate import write_tables
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import parse_params
from swap_pipeline.report.provenance import read_sections
from swap_pipeline.storage.files import write_json

Json = dict[str, Any]


def training_record(
    accuracies: list[float],
    *,
    seconds: float,
    devices: str = "1 × cpu",
    start: Json | None = None,
    cycles: int = 1,
    split: str = "test",
) -> Json:
    """Without accuracies, of a run of 0 epochs: the model is that of `start`.

    With a validation set, final models have a point less on test images.
    """
    curve = [
        {
            "epoch": epoch,
            "learning_rate": 0.1 / epoch,
            "train_loss": 2 - accuracy / 60,
            "train_accuracy": accuracy + 1,
            "noise_scale": None,
            "loss": 1 - accuracy / 125,
            "accuracy": accuracy,
            "top5": None,
            "seconds": seconds / len(accuracies),
        }
        for epoch, accuracy in enumerate(accuracies, start=1)
    ]
    ends = curve[len(curve) // cycles - 1 :: len(curve) // cycles] if curve else []
    models = [final(row["accuracy"], row["loss"], split) for row in ends]
    if start is not None and not curve:
        models = start["models"]
    return {
        "curve": curve,
        "epochs": len(curve),
        "stopped_by": "accuracy" if curve else "epochs",
        "left": f"left after epoch {len(curve)} by accuracy: training accuracy 91.20 %, above 91 %",
        "train_accuracy": curve[-1]["train_accuracy"] if curve else None,
        **models[-1],
        "split": split,
        "models": models,
        "seconds": seconds,
        "devices": devices,
        "num_devices": int(devices.partition(" ")[0]),
        "ran": [1_700_000_000.0, 1_700_000_000.0 + seconds],
    }


def final(accuracy: float, loss: float, split: str) -> Json:
    """What a record says of a final model."""
    if split == "test":
        return {"test_accuracy": accuracy, "test_loss": loss}
    held_out = {"validation_accuracy": accuracy, "validation_loss": loss}
    return {"test_accuracy": accuracy - 1, "test_loss": loss + 0.01, **held_out}


def swap_records(
    *, seeds: tuple[int, ...] = (0, 1, 2, 3), phase1_epochs: int = 20, epochs: int = 8, split: str = "test"
) -> Json:
    """What the phases leave: `phase1`, `workers` by seed, `phase3`; `epochs` may be 0."""
    draw = random.Random(7)
    rising = [89 - 62 * math.exp(-epoch / 3) + draw.uniform(-2, 2) / epoch for epoch in range(1, phase1_epochs + 1)]

    def refined() -> list[float]:
        shares = [epoch / epochs for epoch in range(1, epochs + 1)]
        return [86.5 + 4 * share + draw.uniform(-1, 1) * (1.1 - share) for share in shares]

    phase1 = training_record(rising, seconds=63.6, devices="2 × cpu", split=split)
    for row in phase1["curve"]:
        row["noise_scale"] = 90.0 * 1.2 ** row["epoch"]
    workers = {
        seed: training_record(refined(), seconds=48 + seed % 10 / 3 if epochs else 0.0, start=phase1, split=split)
        for seed in seeds
    }
    points = [
        {
            "label": f"epoch_{epoch}",
            "models": len(seeds),
            "accuracy": 89.9 + math.log(epoch) / 2.3,
            "loss": 0.27 - epoch / 500,
        }
        for epoch in range(1, epochs + 1)
    ]
    last = points[-1] if points else phase1["curve"][-1]
    return {
        "phase1": phase1,
        "workers": workers,
        "phase3": {
            "models": len(seeds),
            **final(last["accuracy"], last["loss"], split),
            "split": split,
            "points": points,
            "data": {
                "classes": ["shirt", "shoe"],
                "shape": [1, 28, 28],
                "images": {"train": 9000, **({"validation": 1000} if split == "validation" else {}), "test": 10000},
            },
            "seconds": 1.2,
            "devices": "2 × cpu",
            "num_devices": 2,
        },
    }


def plane(name: str, *, size: int = 13) -> Json:
    """A bowl whose test minimum lies beside its training minimum."""
    u_range, v_range = (-2.0, 9.0), (-3.0, 5.0)
    us, vs = ([low + (high - low) * i / (size - 1) for i in range(size)] for low, high in (u_range, v_range))

    def error(u: float, v: float, at: tuple[float, float], lowest: float) -> float:
        return min(90.0, lowest + 0.4 * (u - at[0]) ** 2 + 0.9 * (v - at[1]) ** 2)

    def mark(label: str, u: float, v: float, **more: Any) -> Json:
        train, test = error(u, v, (4, 1), 2), error(u, v, (5, 1.5), 9)
        return {"name": label, "position": [u, v], "train_error": train, "test_error": test, **more}

    marks = {
        "phases": [mark("LB", 0, 0), mark("SGD", 7, 0), mark("SWAP", 4.4, 2.1)],
        "workers": [
            mark("worker 0", 0, 0),
            mark("worker 1", 7, 0),
            mark("worker 2", 3.1, 3.9),
            mark("SWAP", 3.6, 1.3, projected=True, distance=2.5),
            mark("BEST", us[size * 2 // 3], vs[size * 7 // 13]),
        ],
    }[name]
    return {
        "name": name,
        "title": {"phases": "LB, SGD and SWAP", "workers": "Three workers"}[name],
        "grid": size,
        "u_range": list(u_range),
        "v_range": list(v_range),
        "marks": marks,
        "train_error": [[error(u, v, (4, 1), 2) for u in us] for v in vs],
        "test_error": [[error(u, v, (5, 1.5), 9) for u in us] for v in vs],
        "seeds": [0],
    }


def landscape_record(*names: str) -> Json:
    return {
        "planes": [plane(name) for name in names or ("phases", "workers")],
        "left_out": [],
        "train_images": 2000,
        "test_images": 2000,
        "grid": 13,
        "margin": 0.3,
        "seconds": 95.0,
        "devices": "2 × cpu",
        "num_devices": 2,
    }


def exits_record(*, split: str = "validation") -> Json:
    exits = [
        {
            "epoch": epoch,
            "label": f"epoch_{epoch}",
            "models": 2,
            "accuracy": 91 - abs(epoch - 15) / 5,
            "loss": 0.3,
            "test_accuracy": 90.5 - abs(epoch - 15) / 5,
            "test_loss": 0.3,
            "workers": 90 - abs(epoch - 15) / 5,
            "seconds": 40.0 + 3 * epoch,
        }
        for epoch in (5, 10, 15, 20)
    ]
    rules = [
        {"rule": "accuracy", "epoch": 20, "nearest": 20, "regret": 1.0},
        {"rule": "plateau", "epoch": 14, "nearest": 15, "regret": 0.0},
    ]
    about = {"seeds": [0, 1], "split": split, "devices": "2 × cpu", "num_devices": 2}
    return {"exits": exits, "rules": rules, **about}


def cosine_record(*, seeds: tuple[int, ...] = (0, 1, 2, 3), phase1_epochs: int = 20, epochs: int = 8) -> Json:
    draw = random.Random(3)
    phase1 = [("phase1", epoch, 0.4 * math.exp(-epoch / 6)) for epoch in range(1, phase1_epochs + 1)]
    later = [
        (f"seed_{seed}", phase1_epochs + epoch, 0.06 * math.exp(-epoch / 4) + draw.uniform(-0.01, 0.01))
        for seed in seeds
        for epoch in range(1, epochs + 1)
    ]
    return {
        "points": [
            {"run": run, "epoch": epoch, "cosine": cosine, "gradient_norm": 0.5, "distance": 9 - epoch / 10}
            for run, epoch, cosine in (*phase1, *later)
        ],
        "images": 10000,
        "seconds": 31.0,
        "devices": "2 × cpu",
        "num_devices": 2,
    }


def workers_record(*, seeds: tuple[int, ...] = (0, 1, 2, 3), most: int = 10) -> Json:
    draw = random.Random(5)
    subsets = []
    for size in range(1, len(seeds) + 1):
        for chosen in itertools.islice(itertools.combinations(seeds, size), most):
            accuracy = 90.8 - 0.35 / size + draw.uniform(-0.12, 0.12) / size
            subsets.append({"seeds": list(chosen), "size": size, "accuracy": accuracy, "loss": 0.25})
    count = range(len(seeds))
    return {
        "subsets": subsets,
        "split": "test",
        "seeds": list(seeds),
        "distance": [[0.0 if i == j else 6 + (i + j) / 10 for j in count] for i in count],
        "cosine": [[1.0 if i == j else 0.2 + (i + j) / 100 for j in count] for i in count],
        "distance_from_phase1": [4.5 + i / 10 for i in count],
        "norm_of_phase1": 30.0,
        "seconds": 20.0,
        "devices": "2 × cpu",
        "num_devices": 2,
    }


METHODS: dict[str, tuple[float, float, int]] = {
    # Accuracy, seconds of phase 1, workers that were trained for 48 s each.
    "swap": (90.8, 64, 4),
    "small_batch": (91.0, 150, 0),
    "large_batch": (89.9, 80, 0),
    "swa_large_batch": (90.0, 80, 1),
    "swa_large_then_small": (90.7, 64, 1),
    "swa_small_batch": (91.2, 150, 1),
    "large_batch_ema": (90.1, 81, 0),
    "small_batch_ema": (91.1, 151, 0),
}


def experiment(method: str, seed: int, *, recipe: str = "fashion-mini") -> tuple[Experiment, Records]:
    """As `swap compare` leaves it; another seed makes it a tenth better and a second slower."""
    accuracy, seconds, num_workers = METHODS[method]
    phase1 = training_record([80.0, 89.0], seconds=seconds + seed, devices="2 × cpu")
    workers = [training_record([90.0, 90.4], seconds=48) for _ in range(num_workers)]
    phase3 = {"test_accuracy": accuracy + seed / 10, "seconds": 2.0, "devices": "2 × cpu", "num_devices": 2}
    ran = [1_700_000_000.0, 1_700_000_000.0]
    made = Experiment(
        name=f"{method}-{seed}",
        ref=f"refs/exps/aa/bb/{method}-{seed}",
        commit=f"{method}-{seed}",
        baseline="aabb",
        params={"recipe": recipe, "method": method, "seed": seed, "phase2": {"epochs": 8}},
        metrics={
            "accuracy": phase3["test_accuracy"],
            "loss": 0.3,
            "phase1": 89.0,
            "workers": 90.4 if num_workers else 89.0,
            "seconds": seconds + seed + 48 * bool(num_workers) + 2,
        },
        lock={},
    )
    idle = {**training_record([90.0], seconds=0), "curve": [], "epochs": 0}
    return made, Records(phase1=phase1, workers=workers or [idle], phase3={**phase3, "ran": ran})


def made_up_tables(
    *, recipe: str = "fashion-mini", seeds: tuple[int, ...] = (0, 1), without: tuple[str, ...] = ()
) -> Tables:
    """Of all methods but those in `without`."""
    made = {method: {seed: experiment(method, seed) for seed in seeds} for method in METHODS if method not in without}
    found = {method: {seed: one for seed, (one, _) in by_seed.items()} for method, by_seed in made.items()}
    records = {one.commit: read for by_seed in made.values() for one, read in by_seed.values()}
    return make_tables(recipe, list(METHODS), found, records)


def params_file(folder: Path, changes: Json | None = None, *, recipe: str = "fashion-mini") -> Path:
    """A params file made from a recipe."""
    path = folder / "params.yaml"
    path.write_text((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    set_params(path, changes or {})
    return path


def method_params(recipe: str, method: str) -> Params:
    """A recipe with what a method changes of it, as `swap compare` runs it."""
    with contextlib.chdir(ROOT):
        return parse_params(read_methods(recipe).params(method, 0, read_sections(Path(f"recipes/{recipe}.yaml"))))


def lay_out(
    folder: Path,
    *,
    changes: Json | None = None,
    seeds: tuple[int, ...] = (0, 1, 2, 3),
    epochs: int = 8,
    classes: tuple[str, ...] = (),
) -> Path:
    """A project folder in which everything has run, as far as pages are concerned."""
    folder.mkdir(parents=True, exist_ok=True)
    params_file(folder, {"workers.seeds": list(seeds), "phase2.epochs": epochs, **(changes or {})})
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    records = swap_records(seeds=seeds, epochs=epochs)
    if classes:
        records["phase3"]["data"]["classes"] = list(classes)
    files = {
        "metrics/phase1.json": records["phase1"],
        "metrics/phase3.json": records["phase3"],
        **{f"metrics/phase2/seed_{seed}.json": worker for seed, worker in records["workers"].items()},
        "analysis/landscape.json": landscape_record(),
        "analysis/cosine.json": cosine_record(seeds=seeds),
        "analysis/exits.json": exits_record(),
        "analysis/workers.json": workers_record(seeds=seeds),
    }
    for name, content in files.items():
        write_json(folder / name, content)
    return folder


PAGES = {"report": "report", "tables": None, "analysis": "analysis_page"}
"""Folders, each with the stage that writes its `index.html`, if it is a stage."""


def write_pages(folder: Path, *stages: str) -> str:
    """Run the stages there, as DVC would; what they print."""
    done = [
        subprocess.run(
            [sys.executable, "-m", f"stages.{stage}"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        for stage in stages or filter(None, PAGES.values())
    ]
    if not stages:
        with contextlib.chdir(folder):
            write_tables(made_up_tables(), folder / "tables")
    for one in done:
        assert one.returncode == 0, one.stderr
    return "".join(one.stdout for one in done)
