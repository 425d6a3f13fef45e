"""Training speed of this machine, measured for a few seconds on synthetic images."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.cli.plan.plan import Plan, Size
from swap_pipeline.cli.plan.times import Throughput
from swap_pipeline.config.params import Compute, Model, Optimizer, Params
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.loss import training_loss
from swap_pipeline.engine.placement import set_up
from swap_pipeline.engine.precision import Scaler, autocast, resolve
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import local_machine
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.runtime.job_folder import scratch_root
from swap_pipeline.storage.files import read_json, write_json
from swap_pipeline.training.optimizers.named import new_optimizer

# The batch is doubled while a step takes less than this, which limits time and memory.
_STEP_SECONDS = 0.4
_TIMED_SECONDS = 2.0
_LARGEST_BATCH = 512


def measure_throughput(
    model: Model,
    *,
    channels: int,
    num_classes: int,
    image_size: Size,
    batch_size: int,
    optimizer: Optimizer,
    compute: Compute,
) -> Throughput:
    """Time real training steps on one device: a GPU, or a core of the CPU.

    Excludes reading and augmenting images, torch.compile, which would take minutes here, and communication of
    gradients.
    """
    device = torch.device(local_machine().device_type)
    precision = resolve(compute.precision, device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the launcher does, for deterministic sums
    network = new_network(describe_network(model, channels=channels, num_classes=num_classes), seed=0)
    set_up(network, compute, Group(rank=0, world_size=1, device=device))
    network.train()
    layout = torch.channels_last if compute.channels_last else torch.contiguous_format
    stepper, finite = new_optimizer(network, optimizer, Scaler("fp32", device)), torch.zeros((), device=device)

    # On a CPU, count this process's CPU time, not the time it waited for other programs.
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def steps_of(size: int) -> Callable[[], float]:
        images = torch.randn(size, channels, *image_size, device=device).to(memory_format=layout)
        labels = torch.arange(size, device=device) % num_classes

        def step() -> float:
            began = clock()
            with autocast(precision, device):
                loss = training_loss(network(images), labels, label_smoothing=optimizer.label_smoothing)
            stepper.zero_grad()
            loss.backward()
            stepper.step(1e-4, skip_if=finite)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return clock() - began

        return step

    with _one_thread(device):
        size, step = _largest_quick_batch(min(batch_size, _LARGEST_BATCH), steps_of)
        seconds = [step()]
        while sum(seconds) < _TIMED_SECONDS:
            seconds.append(step())
    on_gpu = device.type == "cuda"
    compiled = ", without torch.compile" if compute.compile else ""
    where = torch.cuda.get_device_name(device) if on_gpu else "one core of this CPU, 1 thread"
    return Throughput(
        images_per_second=size / statistics.median(seconds),
        image_size=image_size,
        source=f"measured here: {where}, {precision}, batches of {size}{compiled}",
        measured_on="GPU" if on_gpu else "CPU core",
    )


def keep_rate(params: Params, plan: Plan, images_per_second: float) -> None:
    """Save what `swap doctor --gpu` has measured for plans of these params."""
    key, rates = _key(params, plan), _rates()
    rates[key] = {"images_per_second": images_per_second, "gpu": torch.cuda.get_device_name()}
    write_json(_rates_file(), rates)


def kept_rate(params: Params, plan: Plan) -> Throughput | None:
    """A saved measurement, for a plan on GPUs."""
    found = _rates().get(_key(params, plan)) if plan.devices.kind == "GPU" else None
    if not isinstance(found, dict) or not isinstance(found.get("images_per_second"), float):
        return None
    return Throughput(
        images_per_second=found["images_per_second"],
        image_size=plan.phase1.stretches[0].image_size,
        source=f"measured by `swap doctor --gpu`: {found.get('gpu')}",
        measured_on="GPU",
    )


def _rates_file() -> Path:
    return scratch_root() / "images_per_second.json"


def _rates() -> dict[str, Any]:
    try:
        rates = read_json(_rates_file())
    except (OSError, SwapError):
        return {}
    return rates if isinstance(rates, dict) else {}


def _key(params: Params, plan: Plan) -> str:
    """Everything that the speed depends on, except the GPU."""
    first = plan.phase1.stretches[0]
    images = [plan.data.channels, *first.image_size, plan.data.num_classes, first.batch_per_shard]
    return json.dumps([asdict(params.model), asdict(params.compute), images], sort_keys=True)


def _largest_quick_batch(limit: int, steps_of: Callable[[int], Callable[[], float]]) -> tuple[int, Callable[[], float]]:
    """A batch size of at most `limit` whose step is quick, and that step, warmed up."""
    size, step = 2, steps_of(2)
    step()  # warm-up
    while step() < _STEP_SECONDS and size < limit:
        try:
            larger = steps_of(min(2 * size, limit))
            larger()
        except torch.OutOfMemoryError:
            break
        size, step = min(2 * size, limit), larger
    return size, step


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """As for a worker on a CPU."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
