"""Phase 1 on a CPU: two ranks that share the cores, against one process with all cores, for the same two shards.

The real stage, `python -m stages.phase1`, in a copy of this project, with SWAP_NPROC=2 and SWAP_NPROC=1; images per
second of the last epoch, from its record. One process computes the shards one after another. For the default recipe and
for a network and images four and five times as large.

It justifies the default: as many ranks as cores and shards allow (`devices.share_of_phase1`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import interleaved
from benchmarks.made_up import Project, write_prepared
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared, left_out
from swap_pipeline.storage.files import read_json

_LIMIT = Limit("≥", 0.95)


def measure(options: Options) -> Iterator[Row]:
    names = {ranks: _words(ranks, options.cores) for ranks in (1, 2)}
    cases = [
        ("default", 8, (1, 28, 28), 480, 4_800),
        ("width_16", 16, (3, 32, 32), 512, 2_048),
    ]
    for name, width, shape, batch_size, num_images in cases[: options.sized(2, 1)]:
        what = f"phase 1, ResNet-9 width {width}, {shape[1]} px, global batch {batch_size}"
        key = f"phase1/{name}"
        if options.cores < 2:
            yield left_out(key, what, other=names[1], unit="images/s", why="there is one core", limit=_LIMIT)
            continue
        params: dict[str, Any] = {"model.width": width, "phase1.max_epochs": 2, "phase1.stop_accuracy": 100.0}
        params |= {"phase1.batch_size": batch_size, "phase1.keep_epochs": [1], "phase1.peak_lr": 0.01}
        params |= {"phase1.warmup_epochs": 0, "phase1.shards": 2}
        project = Project.copy(options.scratch / f"phase1_{name}", params)
        num_images = options.sized(num_images, 2 * batch_size)
        write_prepared(project.root / "data" / "prepared", num_train=num_images, num_test=64, shape=shape)

        def images_per_second(project: Project, seen: int, ranks: int) -> float:
            project.forget_scratch("phase1")
            project.stage("phase1", SWAP_NPROC=str(ranks))
            record = read_json(project.root / "metrics" / "phase1.json")
            return seen / float(record["curve"][-1]["seconds"])

        found = interleaved(
            {
                name: functools.partial(images_per_second, project, num_images, ranks)
                for name, ranks in (("two", 2), ("one", 1))
            },
            rounds=options.rounds,
            warm_up=options.sized(1, 0),
            say=options.say,
        )
        yield compared(
            key, what, ours=(names[2], found["two"]), other=(names[1], found["one"]), unit="images/s", limit=_LIMIT
        )


def _words(ranks: int, cores: int) -> str:
    """The number of ranks, with the launcher's number of threads for each."""
    threads = max(1, cores // ranks)
    who = "1 process" if ranks == 1 else f"{ranks} ranks"
    return f"{who} × {threads} thread{'' if threads == 1 else 's'}"
