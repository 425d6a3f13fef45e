"""Nothing to do: `dvc repro` when everything is up to date, against `dvc status dvc.yaml`, for the same stages.

Real DVC in a copy of this project after a run of the whole pipeline with a tiny network. Both load the pipeline and
check every dependency; `dvc repro` also takes a lock and visits the stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.harness import interleaved
from benchmarks.made_up import Project
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared
from swap_pipeline.storage.tensor_files import read_tensors, write_tensors

TINY = {
    "data.validation_images": 0,
    "model.width": 1,
    "phase1.batch_size": 24,
    "phase1.max_epochs": 1,
    "phase1.warmup_epochs": 0,
    "phase1.keep_epochs": [1],
    "phase2.batch_size": 24,
    "phase2.epochs": 1,
    "phase2.keep_epochs": [1],
    "phase3.batch_size": 60,
}


def measure(options: Options) -> Iterator[Row]:
    workers = options.sized(4, 1)
    project = Project.copy(options.scratch / "nothing", {**TINY, "workers.seeds": list(range(workers))})
    make_small(project)
    project.commit()
    options.say("running the pipeline once")
    project.dvc("repro", SWAP_NPROC="1")

    def seconds(*command: str) -> float:
        began = time.perf_counter()
        said = project.dvc(*command)
        took = time.perf_counter() - began
        if "up to date" not in said:
            raise RuntimeError(f"`dvc {' '.join(command)}` found something to do:\n{said}")
        return took

    found = interleaved(
        {
            "repro": lambda: seconds("repro"),
            "status": lambda: seconds("status", "dvc.yaml"),
        },
        rounds=options.rounds,
        warm_up=options.sized(1, 0),
        say=options.say,
    )
    yield compared(
        "nothing_to_do/repro",
        f"nothing to do, {5 + workers} stages",
        ours=("dvc repro", found["repro"]),
        other=("dvc status dvc.yaml", found["status"]),
        unit="s",
        limit=Limit("≤", 1.5),
    )


def make_small(project: Project) -> None:
    """240 training and 120 test images: times depend on the number of files, not on their contents."""
    path = project.root / "data" / "fashion-mini.safetensors"
    tensors, info = read_tensors(path)
    few = {"train": torch.arange(240) * 41, "test": torch.arange(120) * 83}
    small = {key: tensor[few[key.split("_")[0]]].clone() for key, tensor in tensors.items()}
    del tensors
    path.unlink()  # the old file may be linked or mapped
    write_tensors(path, small, info)
