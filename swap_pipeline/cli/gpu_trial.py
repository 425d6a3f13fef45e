"""torchrun --standalone --nproc-per-node 8 -m swap_pipeline.cli.gpu_trial '{…}'

A rank of `swap doctor --gpu`: tries the real loop on synthetic images, and communication between ranks. Also runs on
CPUs, for tests. The main rank prints a line of JSON for each trial.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from swap_pipeline.config.params import Augment, Compute, Model, Optimizer, Precision
from swap_pipeline.data.images import Images
from swap_pipeline.engine.distributed import Group, process_group
from swap_pipeline.engine.loss import training_loss
from swap_pipeline.engine.placement import set_up
from swap_pipeline.engine.precision import autocast
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.training.keeping import Keeping
from swap_pipeline.training.loop import train
from swap_pipeline.training.run import Record, Run, TrainingData

LINE = "trial: "
OPTIMIZER = Optimizer(momentum=0.9, nesterov=True, weight_decay=5e-4, label_smoothing=0.1)
EXACT = Compute(precision="fp32", deterministic=True)
NEAR = 1e-3
"""how far weights may be from a CPU's after a few steps, relative to their norm"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train: network, batches and images."""

    model: Model
    batch_size: int
    steps: int
    epochs: int = 2
    shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    peak_lr: float = 0.05
    shards: int = 1

    def network(self) -> nn.Module:
        description = describe_network(self.model, channels=self.shape[0], num_classes=self.num_classes)
        return new_network(description, seed=0)

    def images(self, device: torch.device) -> Images:
        """Each image is half its class's pattern, half noise."""
        chance = torch.Generator().manual_seed(0)
        labels = torch.arange(self.steps * self.batch_size) % self.num_classes
        patterns = torch.randint(128, (self.num_classes, *self.shape), generator=chance, dtype=torch.uint8)
        pixels = torch.randint(128, (len(labels), *self.shape), generator=chance, dtype=torch.uint8)
        pixels += patterns[labels]
        scale = torch.full((1, self.shape[0], 1, 1), 127.0, device=device)
        return Images(pixels=pixels.to(device), labels=labels.to(device), mean=scale, std=scale / 2)


def little(shards: int) -> Task:
    """Two small steps: after a few more, rounding decides which pixel max pooling takes, and the weights diverge."""
    return Task(model=Model(name="resnet9", width=8), batch_size=16 * shards, steps=2, epochs=1, shards=shards)


class Steps(Reporter):
    """Calls a function after each step."""

    def __init__(self, after: Callable[[int, int], None]) -> None:
        super().__init__(name="", total=1, folder=None, is_main=False)
        self._after = after

    def step(self, epoch: int, step: int, steps: int) -> None:
        self._after(epoch, step)


def learn(
    task: Task,
    group: Group,
    compute: Compute,
    *,
    network: nn.Module | None = None,
    snapshots: Path | None = None,
    after_step: Callable[[int, int], None] = lambda epoch, step: None,
) -> tuple[Record, nn.Module]:
    """Train with the real loop; returns its record and the network."""
    network, images = network or task.network(), task.images(group.device)
    run = Run(
        name="trial",
        section="phase1",
        seed=0,
        batch_size=lambda epoch: task.batch_size,
        epochs=task.epochs,
        learning_rate=lambda epoch: task.peak_lr,
        shards=task.shards,
    )
    with contextlib.nullcontext(snapshots) if snapshots else _folder() as folder:
        record = train(
            run,
            network,
            TrainingData(train=images, held_out=images, augment=Augment(padding=4), num_classes=task.num_classes),
            optimizer=OPTIMIZER,
            compute=compute,
            group=group,
            keeping=Keeping(snapshots=folder, reporter=Steps(after_step)),
        )
    return record, network


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def digest(network: nn.Module) -> str:
    """Hash of all weights and statistics."""
    return xxhash.xxh3_128(
        b"".join(t.cpu().contiguous().numpy().tobytes() for t in network.state_dict().values())
    ).hexdigest()


def wrong_sums(group: Group) -> list[str]:
    """Which kinds of communication between ranks give wrong results, on numbers with exact sums."""
    ranks, wrong = group.world_size, []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for count in (1, 1000, 1 << 20):
            numbers = torch.arange(count, device=group.device).remainder(1000).to(dtype)
            if not torch.equal(group.sum(numbers * (group.rank + 1)), numbers * (ranks * (ranks + 1) // 2)):
                wrong.append(f"sum of {count} {dtype}")
    rows = group.gather(torch.full((3,), group.rank, device=group.device))
    if rows.tolist() != [[rank] * 3 for rank in range(ranks)]:
        wrong.append("gather")
    if group.number_of_main(41 + group.rank) != 41 or group.main_says(group.is_main) is not True:
        wrong.append("answers of the main rank")
    return wrong


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[Callable[[int, int], None]]:
    """A function to call after each step: from the third one on, anything that makes the host wait for the GPU is an
    error."""

    def after_step(epoch: int, step: int) -> None:
        if device.type == "cuda" and epoch == 0 and step in (2, 42):
            torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")

    try:
        yield after_step
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def distance(one: nn.Module, other: nn.Module) -> float:
    """Between two networks' weights, relative to their norm."""
    a, b = (torch.cat([p.detach().double().cpu().reshape(-1) for p in each.parameters()]) for each in (one, other))
    return float((a - b).norm() / b.norm())


def images_per_second(task: Task, group: Group, compute: Compute) -> float:
    """Speed of the real loop in its second epoch, without evaluation and snapshots."""
    record, _ = learn(replace(task, epochs=2), group, compute)
    return task.steps * task.batch_size / record.curve[-1].seconds


def bare_images_per_second(task: Task, group: Group, compute: Compute) -> float:
    """Speed of forward, backward and step on one fixed batch."""
    network, device = task.network(), group.device
    set_up(network, compute, group)
    network.train()
    sgd = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    layout = torch.channels_last if compute.channels_last else torch.contiguous_format
    images = torch.randn(task.batch_size, *task.shape, device=device).to(memory_format=layout)
    labels = torch.arange(task.batch_size, device=device) % task.num_classes
    for steps in (5, task.steps):  # the first few are slower
        group.finish_queued_work()
        began = time.perf_counter()
        for _ in range(steps):
            with autocast(compute.precision, device):
                loss = training_loss(network(images), labels, label_smoothing=0.1)
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
        group.finish_queued_work()
    return task.steps * task.batch_size / (time.perf_counter() - began)


def precisions(device: torch.device) -> list[Precision]:
    if device.type == "cpu":
        return ["fp32"]
    return ["fp32", "tf32", *(("bf16",) if torch.cuda.is_bf16_supported(including_emulation=False) else ()), "fp16"]


def run_trial(group: Group, *, rate: Task, compute: Compute, width: int, batch_sizes: list[int], steps: int) -> None:
    """All trials, one after another."""

    def say(what: str, ok: bool, text: str, **figures: Any) -> None:
        if group.is_main:
            print(LINE + json.dumps({"what": what, "ok": ok, "text": text, **figures}), flush=True)

    wrong = wrong_sums(group)
    say("exchange", not wrong, f"{group.describe()}: {', '.join(wrong) or 'sums over ranks are exact'}")
    few = little(group.world_size)
    first, again = (learn(few, group, EXACT)[1] for _ in range(2))
    same = digest(first) == digest(again)
    say("repeat", same, f"two deterministic runs {'give the same bytes' if same else 'differ'}")
    if group.is_main and group.device.type == "cuda":
        far = distance(first, learn(few, Group(rank=0, world_size=1, device=torch.device("cpu")), EXACT)[1])
        say("values", far < NEAR, f"fp32 weights differ from the CPU's by {far:.1e}", distance=far)
    group.wait()
    many = replace(few, steps=8, epochs=4, peak_lr=0.4)
    for precision in precisions(group.device):
        for channels_last in (True, False):
            given = Compute(precision=precision, channels_last=channels_last)
            losses = [row.train_loss for row in learn(many, group, given)[0].curve]
            text = f"{precision}{', channels last' if channels_last else ''}: loss {losses[0]:.3f} → {losses[-1]:.3f}"
            say("precision", losses[-1] < 0.9 * losses[0], text, losses=losses)
    if not group.is_main:
        return  # the rest is measured on one device
    alone = Group(rank=0, world_size=1, device=group.device)
    torch.use_deterministic_algorithms(compute.deterministic)
    with no_waiting(group.device) as after_step:
        learn(replace(few, shards=1, steps=45), alone, compute, after_step=after_step)
    say("waiting", True, "40 steps in a row do not wait for the GPU")
    for batch_size in batch_sizes:
        task = Task(model=Model(name="resnet9", width=width), batch_size=batch_size, steps=steps)
        ours, bare = images_per_second(task, alone, compute), bare_images_per_second(task, alone, compute)
        text = f"ResNet-9, batches of {batch_size}: {ours:,.0f} images/s, {ours / bare:.2f} of a bare loop"
        say("speed", True, text, batch_size=batch_size, images_per_second=ours, bare=bare)
    rates = images_per_second(rate, alone, compute)
    say("rate", True, f"these params: {rates:,.0f} images/s on one device, for `swap plan`", images_per_second=rates)


def main() -> None:
    given = json.loads(sys.argv[1])
    rate = given.pop("rate")
    model = Model(**rate.pop("model"))
    task = Task(model=model, shape=tuple(rate.pop("shape")), **rate)
    with process_group(deterministic=True) as group:
        run_trial(group, rate=task, compute=Compute(**given.pop("compute")), **given)


if __name__ == "__main__":
    main()
