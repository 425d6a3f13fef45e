"""`swap doctor --gpu`: tries the GPUs for about a minute, and keeps their training speed for `swap plan`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swap_pipeline.cli.doctor import safely
from swap_pipeline.cli.findings import Finding
from swap_pipeline.cli.gpu_trial import LINE
from swap_pipeline.cli.plan.facts import devices_here
from swap_pipeline.cli.plan.forecast import plan_params
from swap_pipeline.cli.plan.throughput import keep_rate
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import local_machine

# ResNet-9 with the batch sizes of the paper's phases; `steps` are timed, for the current params too.
_SIZES = {"width": 64, "batch_sizes": [512, 128], "steps": 60}
_TINY = {"width": 2, "batch_sizes": [8], "steps": 4}
"""on a CPU, where only the code is tested"""
_LARGEST = 1 << 30
"""bytes of synthetic images"""


def examine_gpus(file: Path, *, on_cpu: bool = False) -> list[Finding]:
    """A finding for each trial; `on_cpu` is for tests."""
    return list(safely("GPU", lambda: try_gpus(read_params(file), on_cpu=on_cpu)))


def try_gpus(params: Params, *, on_cpu: bool = False) -> Iterator[Finding]:
    machine = local_machine()
    if machine.device_type != "cuda" and not on_cpu:
        raise SwapError("no GPU to try (see devices above): run this on a machine with GPUs")
    plan = plan_params(params, devices_here(params))
    first = plan.phase1.stretches[0]
    sizes: dict[str, Any] = _TINY if on_cpu else _SIZES
    shape, batch_size = (plan.data.channels, *first.image_size), 8 if on_cpu else first.batch_per_shard
    fitting = _LARGEST // (batch_size * math.prod(shape))
    processes = 2 if on_cpu else len(machine.devices)
    given = {
        **sizes,
        "compute": dataclasses.asdict(params.compute),
        "rate": {
            "model": dataclasses.asdict(params.model),
            "shape": shape,
            "num_classes": plan.data.num_classes,
            "batch_size": batch_size,
            "steps": max(4, min(fitting, sizes["steps"])),
        },
    }
    command = [sys.executable, "-m", "swap_pipeline.launch.torchrun", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(processes), "-m", "swap_pipeline.cli.gpu_trial", json.dumps(given)],
        env={**os.environ, "SWAP_DEVICE": "cpu" if on_cpu else "cuda", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    said = [json.loads(line.removeprefix(LINE)) for line in done.stdout.splitlines() if line.startswith(LINE)]
    for tried in said:
        yield Finding(status="ok" if tried["ok"] else "problem", topic=f"GPU {tried['what']}", text=tried["text"])
        if tried["what"] == "rate" and not on_cpu:
            keep_rate(params, plan, tried["images_per_second"])
    if done.returncode:
        after = said[-1]["what"] if said else "nothing"
        yield Finding(status="problem", topic="GPU", text=f"the trial failed after {after}: {_error_in(done.stderr)}")


def _error_in(log: str) -> str:
    """The first exception that ended a rank, in one line."""
    found = re.search(r"^(?:\[rank\d+\]: )?((?:[\w.]*Error|[\w.]*Exception): .*)$", log, re.MULTILINE)
    return found[1] if found else " ".join(log.split()[-40:])
