"""Training loops to compare: functions that train for some steps and return images per second.

They run in a child (see `children`), with a rank's threads and allocator settings.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.children import say
from benchmarks.harness import interleaved
from benchmarks.made_up import AUGMENT, COMPUTE, NUM_CLASSES, OPTIMIZER, resnet9
from swap_pipeline.config.params import Compute
from swap_pipeline.data.images import Images, read_images
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.placement import set_up
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.training.keeping import Keeping
from swap_pipeline.training.loop import train
from swap_pipeline.training.run import Run, TrainingData

ALONE = Group(rank=0, world_size=1, device=torch.device("cpu"))
Loop = Callable[[], float]
# Small, so that repeated training on noise hardly changes the network.
_RATE = 1e-3
# For a DataLoader: with few cores, none may be best, since the network needs the cores too.
LOADER_PROCESSES = (0, 1, 2)


def _run(batch_size: int) -> Run:
    return Run(
        name="benchmark",
        section="phase1",
        seed=0,
        batch_size=lambda epoch: batch_size,
        epochs=1,
        learning_rate=lambda epoch: _RATE * (1 - epoch / 1000),
    )


def ours(images: Images, test: Images, *, width: int, batch_size: int, compute: Compute = COMPUTE) -> Loop:
    """The real loop: an epoch over all images, with its own timing, which excludes evaluation and snapshots."""
    network = resnet9(width)
    steps = len(images) // batch_size
    # Compilation takes place in the first epoch.
    run = replace(_run(batch_size), epochs=2 if compute.compile else 1)

    def epoch() -> float:
        with tempfile.TemporaryDirectory() as folder:
            record = train(
                run,
                network,
                TrainingData(train=images, held_out=test, augment=AUGMENT, num_classes=NUM_CLASSES),
                optimizer=OPTIMIZER,
                compute=compute,
                group=ALONE,
                keeping=Keeping(
                    snapshots=Path(folder),
                    reporter=Reporter(name=run.name, total=run.epochs, folder=Path(folder), is_main=True),
                ),
            )
        return steps * batch_size / record.curve[-1].seconds

    return epoch


def bare(shape: Sequence[int], *, width: int, batch_size: int, steps: int) -> Loop:
    """Forward, backward and step on one fixed batch."""
    network = resnet9(width, channels=shape[0])
    set_up(network, COMPUTE, ALONE)
    sgd = _sgd(network)
    images = torch.randn(batch_size, *shape).to(memory_format=torch.channels_last)
    labels = torch.arange(batch_size) % 10

    def loop() -> float:
        network.train()
        began = time.perf_counter()
        for _ in range(steps):
            loss = nn.functional.cross_entropy(network(images), labels)
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
        return steps * batch_size / (time.perf_counter() - began)

    return loop


def _sgd(network: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(network.parameters(), lr=_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)


def _torchvision_loader(images: Images, *, batch_size: int, num_workers: int) -> torch.utils.data.DataLoader[Any]:
    """torchvision's CIFAR-10 with these pixels, its v2 transforms and a DataLoader."""
    from torchvision.datasets import CIFAR10, VisionDataset
    from torchvision.transforms import v2

    transforms = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomCrop(32, padding=4, padding_mode="reflect"),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
            # The square that our recipe blanks out.
            v2.RandomErasing(p=1.0, scale=(1 / 16, 1 / 16), ratio=(1.0, 1.0)),
        ]
    )

    class MadeUp(CIFAR10):  # type: ignore[misc]
        """Reads nothing from disk; torchvision's own method makes the items."""

        def __init__(self) -> None:
            VisionDataset.__init__(self, root=".", transform=transforms)
            self.data = images.pixels.permute(0, 2, 3, 1).numpy()
            self.targets = images.labels.tolist()

    return torch.utils.data.DataLoader(
        MadeUp(),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def torchvision_loop(images: Images, *, width: int, batch_size: int, num_workers: int) -> Loop:
    """As in a good tutorial, but with our optimizer and memory format."""
    network = resnet9(width)
    set_up(network, COMPUTE, ALONE)
    sgd = _sgd(network)
    loader = _torchvision_loader(images, batch_size=batch_size, num_workers=num_workers)

    def epoch() -> float:
        network.train()
        schedule = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.5, total_iters=len(loader))
        loss_sum = hits = seen = 0.0
        began = time.perf_counter()
        for batch, labels in loader:
            batch = batch.to(memory_format=torch.channels_last)
            logits = network(batch)
            loss = nn.functional.cross_entropy(logits, labels)
            sgd.zero_grad(set_to_none=True)
            loss.backward()
            sgd.step()
            schedule.step()
            loss_sum += loss.item() * len(labels)
            hits += (logits.argmax(dim=1) == labels).sum().item()
            seen += len(labels)
        return seen / (time.perf_counter() - began)

    return epoch


def lightning_loop(images: Images, *, width: int, batch_size: int, num_workers: int) -> Loop:
    """Lightning's Trainer with its SWA callback, on the same DataLoader; bar, log, checkpoints and summary are off.

    Two epochs, and the pass over the data that SWA adds for batch norm. The second epoch's training is what counts.
    """
    import logging
    import warnings

    import lightning
    from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    loader = _torchvision_loader(images, batch_size=batch_size, num_workers=num_workers)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = resnet9(width)
            set_up(self.network, COMPUTE, ALONE)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            pixels, labels = batch
            logits = self.network(pixels.to(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(logits, labels)
            hits = (logits.argmax(dim=1) == labels).float().mean()
            self.log_dict({"loss": loss, "accuracy": hits}, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _sgd(self.network)

    class Clock(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.began = 0.0

        def on_train_epoch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_train_epoch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    module = Module()

    def epochs() -> float:
        clock = Clock()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock, StochasticWeightAveraging(swa_lrs=_RATE, swa_epoch_start=1)],
        )
        trainer.fit(module, loader)
        return len(loader) * batch_size / clock.seconds[1]

    return epochs


def in_turns(
    *,
    prepared: str,
    width: int,
    batch_size: int,
    rounds: int,
    contestants: Sequence[str],
) -> dict[str, Any]:
    """In a child: images a second of some of the loops, interleaved; the values of each round.

    A peer's name ends with the number of its loader processes: `lightning_2`.
    """
    images, test = (read_images(Path(prepared), split, torch.device("cpu")) for split in ("train", "test"))
    shape, steps = images.image_shape(None), len(images) // batch_size
    of_ours = functools.partial(ours, images, test, width=width, batch_size=batch_size)
    loops: dict[str, Callable[[], Loop]] = {
        "ours": of_ours,
        "compiled": lambda: of_ours(compute=replace(COMPUTE, compile=True)),
        "bf16": lambda: of_ours(compute=replace(COMPUTE, precision="bf16")),
        "bare": lambda: bare(shape, width=width, batch_size=batch_size, steps=steps),
    }
    for number in LOADER_PROCESSES:
        peers = {"width": width, "batch_size": batch_size, "num_workers": number}
        loops[f"torchvision_{number}"] = functools.partial(torchvision_loop, images, **peers)
        loops[f"lightning_{number}"] = functools.partial(lightning_loop, images, **peers)
    made = {name: loops[name]() for name in contestants}
    found = interleaved(made, rounds=rounds, say=say)
    return {name: list(sample.values) for name, sample in found.items()}


def wall_of_epochs(*, prepared: str, width: int, batch_size: int, rounds: int) -> dict[str, list[float]]:
    """In a child: seconds from the end of an epoch to that of the next, a snapshot and a test of a few images in it;
    and the training seconds of that epoch."""
    images, test = (read_images(Path(prepared), split, torch.device("cpu")) for split in ("train", "test"))
    run = replace(_run(batch_size), epochs=rounds + 1)
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        keeping = Keeping(
            snapshots=Path(folder),
            reporter=Reporter(name=run.name, total=run.epochs, folder=Path(folder), is_main=True),
            at_epoch_end=lambda epoch, network: ends.append(time.perf_counter()),
        )
        data = TrainingData(train=images, held_out=test, augment=AUGMENT, num_classes=NUM_CLASSES)
        record = train(run, resnet9(width), data, optimizer=OPTIMIZER, compute=COMPUTE, group=ALONE, keeping=keeping)
    wall = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return {"wall": wall, "training": [row.seconds for row in record.curve[1:]]}


def bare_beside_others(*, shape: list[int], width: int, batch_size: int, steps: int, rounds: int) -> list[float]:
    """In one of several children that start together: seconds of the bare loop, each time a line says so."""
    loop = bare(shape, width=width, batch_size=batch_size, steps=steps)
    loop()
    seconds = []
    for _ in itertools.repeat(None, rounds):
        print("ready", flush=True)
        input()
        seconds.append(steps * batch_size / loop())
    return seconds
