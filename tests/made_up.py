"""Records as the stages write them, with made-up numbers, for what is drawn and written of them."""

from __future__ import annotations

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

from swap_pipeline.files import write_json
from swap_pipeline.instances import Instance
from swap_pipeline.tables import as_json, compare

Json = dict[str, Any]


def training_record(accuracies: list[float], *, seconds: float, devices: str = "1 × cpu") -> Json:
    curve = [
        {
            "epoch": epoch,
            "learning_rate": 0.1 / epoch,
            "train_loss": 2 - accuracy / 60,
            "train_accuracy": accuracy + 1,
            "test_loss": 1 - accuracy / 125,
            "test_accuracy": accuracy,
            "test_top5": None,
            "seconds": seconds / len(accuracies),
        }
        for epoch, accuracy in enumerate(accuracies, start=1)
    ]
    return {
        "curve": curve,
        "epochs": len(curve),
        "stopped_by": "accuracy",
        "train_accuracy": curve[-1]["train_accuracy"],
        "test_accuracy": curve[-1]["test_accuracy"],
        "test_loss": curve[-1]["test_loss"],
        "seconds": seconds,
        "devices": devices,
        "num_devices": int(devices.partition(" ")[0]),
        "ran": [1_700_000_000.0, 1_700_000_000.0 + seconds],
    }


def swap_records(*, seeds: tuple[int, ...] = (0, 1, 2, 3), phase1_epochs: int = 20, epochs: int = 8) -> Json:
    """What the phases leave: `phase1`, `workers` by seed, `phase3`, `averaged`."""
    draw = random.Random(7)
    rising = [89 - 62 * math.exp(-epoch / 3) + draw.uniform(-2, 2) / epoch for epoch in range(1, phase1_epochs + 1)]

    def refined() -> list[float]:
        shares = [epoch / epochs for epoch in range(1, epochs + 1)]
        return [86.5 + 4 * share + draw.uniform(-1, 1) * (1.1 - share) for share in shares]

    workers = {seed: training_record(refined(), seconds=48 + seed % 10 / 3) for seed in seeds}
    points = [
        {
            "label": f"epoch_{epoch}",
            "models": len(seeds),
            "test_accuracy": 89.9 + math.log(epoch) / 2.3,
            "test_loss": 0.27 - epoch / 500,
        }
        for epoch in range(1, epochs + 1)
    ]
    last = points[-1]
    return {
        "phase1": training_record(rising, seconds=63.6, devices="2 × cpu"),
        "workers": workers,
        "averaged": {"points": points, "devices": "2 × cpu", "num_devices": 2},
        "phase3": {
            "models": len(seeds),
            "test_accuracy": last["test_accuracy"],
            "test_loss": last["test_loss"],
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
            subsets.append({"seeds": list(chosen), "size": size, "test_accuracy": accuracy, "test_loss": 0.25})
    count = range(len(seeds))
    return {
        "subsets": subsets,
        "seeds": list(seeds),
        "distance": [[0.0 if i == j else 6 + (i + j) / 10 for j in count] for i in count],
        "cosine": [[1.0 if i == j else 0.2 + (i + j) / 100 for j in count] for i in count],
        "distance_from_phase1": [4.5 + i / 10 for i in count],
        "norm_of_phase1": 30.0,
        "seconds": 20.0,
        "devices": "2 × cpu",
        "num_devices": 2,
    }


def tables_record(*, recipe: str = "fashion-mini", without: tuple[str, ...] = ()) -> Json:
    """What the stage `tables` writes, of two repeats of everything but the methods in `without`."""
    seeds, records = (0, 1), {}

    def add(method: str, accuracy: float, seconds: float, **more: Any) -> None:
        for repeat in (0, 1):
            record = {"test_accuracy": accuracy + repeat / 10, "seconds": seconds + repeat, "num_devices": 1,
                      "devices": "1 × cpu", **more}  # fmt: skip
            for seed in seeds if method == "phase2" else (None,):
                if method not in without:
                    records[Instance(method=method, repeat=repeat, seed=seed)] = record

    swa = {"models": 2, "cycle_epochs": 8, "model_accuracies": [90.1, 90.3]}
    add("small_batch", 91.0, 150)
    add("large_batch", 89.9, 80)
    add("phase1", 89.0, 64)
    add("phase2", 90.4, 49)
    add("phase3", 90.8, 1.2)
    add("swa_large_batch", 90.0, 90, **swa)
    add("swa_large_then_small", 90.7, 95, **swa)
    add("swa_small_batch", 91.2, 99, **swa)
    return as_json(compare(records, seeds=seeds, repeats=(1,), epochs=8, cycles=1, recipe=recipe))


def params_file(folder: Path, changes: Json | None = None, *, recipe: str = "fashion-mini") -> Path:
    """A params file made from a recipe."""
    path = folder / "params.yaml"
    path.write_text((ROOT / "recipes" / f"{recipe}.yaml").read_text())
    set_params(path, changes or {})
    return path


def lay_out(
    folder: Path, *, changes: Json | None = None, seeds: tuple[int, ...] = (0, 1, 2, 3), classes: tuple[str, ...] = ()
) -> Path:
    """A project folder in which everything has run, as far as pages are concerned."""
    folder.mkdir(parents=True, exist_ok=True)
    params_file(folder, {"workers.seeds": list(seeds), **(changes or {})})
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    records = swap_records(seeds=seeds)
    files = {
        "data/prepared/meta.json": {"classes": list(classes or ("shirt", "shoe")), "shape": [1, 28, 28]},
        "metrics/phase1.json": records["phase1"],
        "metrics/phase3.json": records["phase3"],
        "metrics/averaged.json": records["averaged"],
        **{f"metrics/phase2/seed_{seed}.json": worker for seed, worker in records["workers"].items()},
        "comparisons/tables.json": tables_record(),
        "analysis/landscape.json": landscape_record(),
        "analysis/cosine.json": cosine_record(seeds=seeds),
        "analysis/workers.json": workers_record(seeds=seeds),
    }
    for name, content in files.items():
        write_json(folder / name, content)
    return folder


PAGES = {"report": "report", "comparisons": "comparisons_page", "analysis": "analysis_page"}
"""Folders, each with the stage that writes its `index.html`."""


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
        for stage in stages or PAGES.values()
    ]
    for one in done:
        assert one.returncode == 0, one.stderr
    return "".join(one.stdout for one in done)
