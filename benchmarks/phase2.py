"""Phase 2's fan-out: two workers on two cores against two bare loops side by side on the same two cores.

The workers are real ones, started together by the launcher in a copy of this project; the time is that of the slower
one's last epoch, from the records. The bare loops (see `loops.bare`) take as many steps on one fixed batch, in two
processes that start when both are ready; the time is the slower one's. Both warm up for an epoch's steps. So shared
memory bandwidth and the lack of a single core's turbo clock affect both sides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import loops
from benchmarks.children import result_of, start
from benchmarks.harness import interleaved
from benchmarks.made_up import Project, write_prepared
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared, left_out
from swap_pipeline.config.instances import worker
from swap_pipeline.launch.devices import share_of_worker, this_machine
from swap_pipeline.launch.stage_jobs import job_with, run_jobs
from swap_pipeline.storage.files import read_json

_LIMIT = Limit("≤", 1.05)
SHAPE = (3, 32, 32)
_EPOCHS = 2


def measure(options: Options) -> Iterator[Row]:
    width, batch_size, steps = options.sized(16, 4), options.sized(128, 16), options.sized(16, 2)
    what = f"phase 2, 2 workers on 2 cores, ResNet-9 width {width}, batch {batch_size}"
    if options.cores < 2:
        why = "there is one core"
        yield left_out("phase2/fan_out", what, other="2 bare loops", unit="s", why=why, limit=_LIMIT)
        return
    project = project_with_phase1(
        options.scratch / "phase2", width=width, batch_size=batch_size, num_images=steps * batch_size, workers=2
    )
    bare = {"shape": SHAPE, "width": width, "batch_size": batch_size, "steps": steps}
    found = interleaved(
        {
            "workers": lambda: max(fan_out(project, 2)["last_epochs"]),
            "bare": lambda: side_by_side(bare, number=2),
        },
        rounds=options.rounds,
        warm_up=options.sized(1, 0),
        say=options.say,
    )
    yield compared(
        "phase2/fan_out",
        what,
        ours=("an epoch of the slower worker", found["workers"]),
        other=("as many steps of the slower of 2 bare loops", found["bare"]),
        unit="s",
        limit=_LIMIT,
    )


def project_with_phase1(root: Path, *, width: int, batch_size: int, num_images: int, workers: int) -> Project:
    """A copy of this project in which that many workers can start."""
    params: dict[str, Any] = {"model.width": width, "phase2.batch_size": batch_size, "phase2.epochs": _EPOCHS}
    params |= {"phase2.peak_lr": 0.001, "phase2.keep_epochs": [1], "workers.seeds": list(range(workers))}
    project = Project.copy(root, params)
    write_prepared(project.root / "data" / "prepared", num_train=num_images, num_test=64, shape=SHAPE)
    project.write_phase1(width=width, channels=SHAPE[0])
    return project


def fan_out(project: Project, workers: int) -> dict[str, Any]:
    """Train that many workers; returns the seconds of their last epochs and the total."""
    project.forget_scratch("phase2")
    child = start(run_workers, {"workers": workers}, threads=1, cwd=project.root, as_rank=False)
    found: dict[str, Any] = result_of(child)
    return found


def run_workers(*, workers: int) -> dict[str, Any]:
    """In a child, in the project's folder: what `stages.phase2` does, without asking DVC which seeds are pending."""
    share = share_of_worker(this_machine(), shards=1)
    jobs = [job_with(worker(seed), share) for seed in range(workers)]
    began = time.perf_counter()
    if failures := run_jobs(jobs):
        raise RuntimeError("\n".join(failures.values()))
    seconds = time.perf_counter() - began
    records = [read_json(job.folder.result / "record.json") for job in jobs]
    return {"last_epochs": [record["curve"][-1]["seconds"] for record in records], "seconds": seconds}


def side_by_side(arguments: dict[str, Any], *, number: int) -> float:
    """Seconds of the slowest of that many bare loops, which start together."""
    children = [start(loops.bare_beside_others, {**arguments, "rounds": 1}, threads=1) for _ in range(number)]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    return max(float(seconds) for child in children for seconds in result_of(child))
