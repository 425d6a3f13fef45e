"""Fork tests: would phase 2 already work from here? (After the instability analysis of Frankle et al. 2020.)

From the current weights, several forks train for a few steps like workers of phase 2, each with its own data order,
spread over the ranks. Their average, with recomputed statistics, is then compared with them on validation images. All
of this uses copies, so the run itself is unaffected. Results are saved beside the snapshots.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path

import torch
from torch import nn

from swap_pipeline.config.params import Precision
from swap_pipeline.config.schedules import PiecewiseLinear, by_epoch
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.batchnorm import one_pass, recompute_statistics
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.evaluation import image_losses
from swap_pipeline.engine.precision import autocast
from swap_pipeline.engine.results import read_point, write_point
from swap_pipeline.training.leaving.rules import ForkTest
from swap_pipeline.training.run import Run, TrainingData

Refine = Callable[[Run, nn.Module], None]
"""trains a network in place, on this rank alone"""


class Forks:
    """The fork tests of a run, including those of earlier attempts."""

    def __init__(
        self, run: Run, data: TrainingData, folder: Path, refine: Refine, *, precision: Precision, group: Group
    ) -> None:
        self._run, self._data, self._refine, self._precision, self._group = run, data, refine, precision, group
        given = run.leaving
        settings = given.fork_every, given.forks, given.fork_steps, given.fork_batch_size, repr(given.fork_lr)
        self._path = folder / f"forks-{derive_seed('forks', *map(str, settings)):016x}.json"
        self.tests = _shared(_read(self._path), group) if given.stop == "fork" else []

    def test(self, epoch: int, network: nn.Module) -> ForkTest:
        """Test the network as it is after `epoch` epochs."""
        began, group, view = time.perf_counter(), self._group, self._run.view(epoch - 1)
        given = self._run.leaving
        sums = {key: torch.zeros_like(tensor, dtype=torch.float64) for key, tensor in _averaged(network).items()}
        losses = torch.zeros(len(self._data.held_out), dtype=torch.float64, device=group.device)
        for number in range(given.forks)[group.rank :: group.world_size]:
            fork = copy.deepcopy(network)
            self._refine(self._run_of_fork(epoch, number, view), fork)
            for key, tensor in _averaged(fork).items():
                sums[key] += tensor
            losses += self._losses(fork, view)
        average = copy.deepcopy(network)
        for key, tensor in _averaged(average).items():
            tensor.copy_(group.sum(sums[key]) / given.forks)
        self._give_statistics(average, epoch, view)
        # Use the main rank's losses, so that all ranks decide alike.
        value = group.sum(self._losses(average, view) * group.is_main)
        barrier = value - group.sum(losses) / given.forks
        found = ForkTest(epoch, *_mean(barrier), *_mean(value), seconds=time.perf_counter() - began)
        self.tests = sorted([test for test in self.tests if test.epoch != epoch] + [found], key=lambda test: test.epoch)
        if group.is_main:
            write_point(self._path, {"tests": [asdict(test) for test in self.tests]})
        return found

    def _run_of_fork(self, epoch: int, number: int, view: View | None) -> Run:
        given = self._run.leaving
        assert given.fork_batch_size is not None and given.fork_lr is not None
        return Run(
            name=f"{self._run.name}, fork {number} after epoch {epoch}",
            section=self._run.section,
            seed=derive_seed("fork", self._run.seed, epoch, number),
            batch_size=by_epoch(given.fork_batch_size),
            epochs=1,
            max_steps=given.fork_steps,
            learning_rate=PiecewiseLinear((0, 1), (given.fork_lr, 0)),
            view=lambda epoch: view,
            is_fork=True,
        )

    def _give_statistics(self, network: nn.Module, epoch: int, view: View | None) -> None:
        """Recompute batch-norm statistics, from as many images as a fork has seen."""
        images, size = self._data.train, self._run.leaving.fork_batch_size
        assert size is not None
        edges = range(0, len(images) + 1, size)[: self._run.leaving.fork_steps + 1]
        seed = derive_seed("fork statistics", self._run.seed, epoch)
        batches = (batch for batch, _ in one_pass(images, edges, seed=seed, augment=None, group=self._group, view=view))
        with autocast(self._precision, self._group.device):
            recompute_statistics(network, batches, group=self._group)

    def _losses(self, network: nn.Module, view: View | None) -> torch.Tensor:
        alone = replace(self._group, rank=0, world_size=1)
        return image_losses(network, self._data.held_out, group=alone, precision=self._precision, view=view)


def _averaged(network: nn.Module) -> dict[str, torch.Tensor]:
    """A network's tensors to average: all but counters."""
    return {key: tensor for key, tensor in network.state_dict().items() if tensor.is_floating_point()}


def _mean(values: torch.Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def _read(path: Path) -> list[ForkTest]:
    try:
        return [ForkTest(**test) for test in (read_point(path) or {"tests": []})["tests"]]
    except (KeyError, TypeError):
        return []


def _shared(tests: list[ForkTest], group: Group) -> list[ForkTest]:
    """The main rank's tests, on all ranks."""
    count = group.number_of_main(len(tests))
    width = len(ForkTest.__dataclass_fields__)
    table = torch.tensor([astuple(test) for test in tests], dtype=torch.float64).reshape(-1, width)
    rows = group.sum((table if group.is_main else torch.zeros(count, width, dtype=torch.float64)).to(group.device))
    return [ForkTest(int(epoch), *numbers) for epoch, *numbers in rows.tolist()]
