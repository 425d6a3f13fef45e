"""A DVC project like this one whose stages only write the files that are agreed on, in no time: for tests of what runs
experiments. The params are a real recipe's, the figures a function of them.

This file is also the stages' script: `python stand_in.py phase1`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

DVC_YAML = """
stages:
  prepare:
    cmd: python stand_in.py prepare
    deps: ["${data.root}", stand_in.py]
    params: [data]
    outs: [data/prepared]
  phase1:
    cmd: python stand_in.py phase1
    deps: [data/prepared, stand_in.py]
    params: [phase1, seed]
    outs: [checkpoints/phase1, metrics/phase1.json]
  phase2:
    matrix: {seed: "${workers.seeds}"}
    cmd: python stand_in.py phase2 ${item.seed}
    deps: [checkpoints/phase1, data/prepared, stand_in.py]
    params: [phase2, seed]
    outs: ["checkpoints/phase2/seed_${item.seed}", "metrics/phase2/seed_${item.seed}.json"]
  phase3:
    cmd: python stand_in.py phase3
    deps: [checkpoints/phase2, stand_in.py]
    params: [phase2, phase3, seed, workers.seeds]
    outs: [metrics/phase3.json]
  report:
    cmd: python stand_in.py report
    deps: [metrics/phase1.json, metrics/phase2, metrics/phase3.json, stand_in.py]
    params: ["params.yaml": ]
    metrics: [metrics/swap.json: {cache: false}]
"""
METHODS = """
swap: {}
small_batch:
  phase1: {batch_size: 96, shards: 1, peak_lr: 0.2, stop_accuracy: 100}
  phase2: {epochs: 0}
  workers: {seeds: [0]}
swa_large_then_small:
  phase2: {epochs: 16, cycles: 2}
  workers: {seeds: [0]}
"""
RUNS = ".swap/runs.txt"
"""a line for each stage that ran, in any folder"""


def make_stand_in(root: Path, recipe: str) -> None:
    for folder in ("recipes", "data/raw"):
        (root / folder).mkdir(parents=True)
    (root / "recipes/tiny.yaml").write_text(recipe)
    (root / "recipes/tiny.methods.yaml").write_text(METHODS)
    (root / "params.yaml").write_text(recipe)
    (root / "dvc.yaml").write_text(DVC_YAML)
    (root / "data/raw/images.txt").write_text("some images\n")
    (root / ".gitignore").write_text("/.swap/\n/checkpoints/\n/data/prepared/\n/metrics/phase*\n/tables/\n")
    shutil.copy(__file__, root / "stand_in.py")
    for command in ("git init -q -b main", "dvc init -q", "git add -A"):
        subprocess.run(command.split(), cwd=root, check=True, capture_output=True)
    subprocess.run(("git", "commit", "-qm", "start"), cwd=root, check=True, capture_output=True)


def main(stage: str, seed: str = "") -> None:
    from ruamel.yaml import YAML

    params = YAML(typ="safe", pure=True).load(Path("params.yaml").read_text())
    project = Path(os.environ["DVC_ROOT"])
    (project / ".swap").mkdir(exist_ok=True)
    with (project / RUNS).open("a") as file:
        file.write(f"{stage} {params['method']}-{params['seed']}\n")
    while (project / f".swap/wait-{stage}").exists():  # a test lets it go on
        time.sleep(0.05)
    if (project / f".swap/fail-{stage}-{params['method']}").exists():
        sys.exit("error: this stage was told to fail")
    if stage == "prepare":
        images = sorted(Path(params["data"]["root"]).iterdir())
        return write("data/prepared/meta.json", [path.read_text() for path in images])
    if stage == "phase1":
        write("checkpoints/phase1/model.json", [params["phase1"], params["seed"]])
        return write("metrics/phase1.json", record(["phase1", params["phase1"], params["seed"]], epochs=3, devices=2))
    phase2 = params["phase2"]
    if stage == "phase2":
        write(f"checkpoints/phase2/seed_{seed}/model.json", [params["phase1"], phase2, seed])
        facts = [params["phase1"], phase2, seed, params["seed"]]
        return write(f"metrics/phase2/seed_{seed}.json", record(facts, epochs=phase2["epochs"], devices=1))
    if stage == "phase3":
        facts = ["phase3", params["phase1"], phase2, params["workers"], params["seed"]]
        return write("metrics/phase3.json", {**record(facts, epochs=1, devices=1), "seconds": 0.5})
    records = [read("metrics/phase1.json"), *map(read, sorted(map(str, Path("metrics/phase2").iterdir())))]
    last = read("metrics/phase3.json")
    workers = records[1:] if phase2["epochs"] else records[:1]
    seconds = records[0]["seconds"] + max(one["seconds"] for one in records[1:]) + last["seconds"]
    figures = {"accuracy": last["test_accuracy"], "loss": last["test_loss"], "phase1": records[0]["test_accuracy"]}
    mean = sum(one["test_accuracy"] for one in workers) / len(workers)
    write("metrics/swap.json", {**figures, "workers": mean, "seconds": seconds})
    return None


def record(facts: Any, *, epochs: int, devices: int) -> dict[str, Any]:
    """With figures that depend on the facts."""
    chance = zlib.crc32(json.dumps(facts, sort_keys=True).encode()) / 2**32
    for epoch in range(epochs):
        print(f"phase1: epoch {epoch + 1}/{epochs}", flush=True)
    return {
        "curve": [{"epoch": epoch + 1} for epoch in range(epochs)],
        "test_accuracy": 90 + chance,
        "test_loss": 1 - chance,
        "seconds": epochs * (1 + chance),
        "devices": f"{devices} × cpu",
        "num_devices": devices,
        "ran": [time.time() - 0.01, time.time()],
    }


def write(path: str, value: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(value))


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
