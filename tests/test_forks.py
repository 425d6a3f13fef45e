"""Fork tests against losses computed by hand, and without a trace in the course of training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_training import (
    ALONE,
    COMPUTE,
    NESTEROV,
    PLAIN,
    a_run,
    kept_in,
    random_data,
    small_network,
    train_here,
    weights_of,
)
from torch import nn

from swap_pipeline.config.params import Leaving, Optimizer
from swap_pipeline.config.schedules import by_epoch
from swap_pipeline.data.images import Images
from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import read_tensors
from swap_pipeline.training.leaving.forks import Forks
from swap_pipeline.training.leaving.rules import ForkTest, exit_now, first_end, lacks_test
from swap_pipeline.training.loop import train
from swap_pipeline.training.run import Record, Run, TrainingData

FORK = Leaving(stop="fork", fork_every=2, forks=2, fork_steps=3, fork_batch_size=6, fork_lr=0.05)


def forking(epochs: int = 9, leaving: Leaving = FORK) -> Run:
    return replace(a_run(epochs=epochs), leaving=leaving)


def a_test(epoch: int, barrier: float, value: float, error: float = 0.01) -> ForkTest:
    return ForkTest(epoch, barrier, 0.001, value, error, seconds=1.0)


# ---- the rule


@pytest.mark.parametrize(
    ("tests", "is_left"),
    [
        ([a_test(5, -0.1, 0.50)], False),  # one test says nothing of a gain
        ([a_test(3, -0.1, 0.52), a_test(5, -0.1, 0.50)], False),  # still gains more than the uncertainty
        ([a_test(3, -0.1, 0.505), a_test(5, -0.1, 0.50)], True),
        ([a_test(3, -0.1, 0.49), a_test(5, -0.1, 0.50)], True),  # has become worse
        ([a_test(3, -0.1, 0.505), a_test(5, 0.001, 0.50)], False),  # the average is worse than the forks
        ([a_test(3, 0.1, 0.505), a_test(5, 0.0, 0.50)], True),
        ([a_test(1, -0.1, 0.5), a_test(3, -0.1, 0.5)], False),  # not at this epoch
        ([a_test(3, -0.1, 0.505), a_test(5, -0.1, 0.50), a_test(7, 0.1, 0.9)], True),  # what comes later is not known
    ],
)
def test_the_phase_ends_when_the_average_is_no_worse_and_hardly_gains(tests: list[ForkTest], is_left: bool) -> None:
    curve = [None] * 5  # only its length counts
    end = exit_now(forking(), curve, tests)  # type: ignore[arg-type]
    assert (end is not None) == is_left
    if end:
        assert (
            end.by == "fork"
            and end.because.startswith("barrier ")
            and "loss of the average 0.5000 ± 0.0100" in str(end)
        )


def test_tests_are_due_every_so_many_epochs_after_the_warm_up_and_not_at_the_end() -> None:
    due = [epoch for epoch in range(10) if lacks_test(forking(), epoch, [])]
    assert due == [3, 5, 7]  # the rate is highest at epoch 1; the ninth is the last
    assert not lacks_test(forking(), 5, [a_test(5, 0, 1)])
    assert not any(lacks_test(a_run(epochs=9), epoch, []) for epoch in range(10))


def test_a_course_is_taken_up_where_the_first_test_is_missing() -> None:
    curve: Any = [None] * 8
    assert first_end(forking(), curve, []) == 3
    assert first_end(forking(), curve, [a_test(3, -1, 1.0), a_test(5, -1, 0.9)]) == 7


# ---- what is measured


class Product(nn.Module):
    """Logits ± a·b of everything: the same loss at (a, b) and (−a, −b), and a higher one between them."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logit = (self.a * self.b).expand(len(images))
        return torch.stack([logit, -logit], dim=1)


class Bias(nn.Module):
    """Logistic regression on nothing: convex."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.logit.expand(len(images)), torch.zeros(len(images))], dim=1)


def two_classes(labels: list[int]) -> TrainingData:
    images = Images(
        pixels=torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8),
        labels=torch.tensor(labels),
        mean=torch.zeros(1, 1, 1, 1),
        std=torch.ones(1, 1, 1, 1),
    )
    return TrainingData(train=images, held_out=images, augment=PLAIN, num_classes=2)


def found_by(network: nn.Module, places: list[dict[str, float]], labels: list[int], folder: Path) -> ForkTest:
    """The test of forks that end at these places."""

    def refine(run: Run, fork: nn.Module) -> None:
        place = places[int(run.name.split("fork ")[1].split()[0])]
        with torch.no_grad():
            for name, value in place.items():
                fork.get_parameter(name).fill_(value)

    run = forking(leaving=replace(FORK, forks=len(places)))
    return Forks(run, two_classes(labels), folder, refine, precision="fp32", group=ALONE).test(4, network)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_the_barrier_between_two_minima_is_the_height_of_what_lies_between(tmp_path: Path) -> None:
    network = Product(0.5, 0.5)
    found = found_by(network, [{"a": 1.0, "b": 1.0}, {"a": -1.0, "b": -1.0}], [0] * 6, tmp_path)
    assert found.value == pytest.approx(math.log(2), abs=1e-6)  # the average is (0, 0)
    assert found.barrier == pytest.approx(math.log(2) - softplus(-2), abs=1e-6)
    assert found.barrier_error == pytest.approx(0, abs=1e-6)  # the same for all images
    assert (network.a.item(), network.b.item()) == (0.5, 0.5)


def test_on_a_convex_problem_the_average_is_better_than_the_forks_by_what_jensen_says(tmp_path: Path) -> None:
    places, labels = [{"logit": 2.0}, {"logit": -1.0}, {"logit": 0.2}], [0, 0, 0, 1, 1]
    found = found_by(Bias(), places, labels, tmp_path)

    def losses(logit: float) -> torch.Tensor:
        return torch.tensor([softplus(-logit) if label == 0 else softplus(logit) for label in labels])

    value = losses(0.4)
    barrier = value - torch.stack([losses(place["logit"]) for place in places]).mean(dim=0)
    assert found.value == pytest.approx(value.mean().item(), abs=1e-6)
    assert found.value_error == pytest.approx(value.std().item() / math.sqrt(5), abs=1e-6)
    assert found.barrier == pytest.approx(barrier.mean().item(), abs=1e-6) and found.barrier < 0
    assert found.barrier_error == pytest.approx(barrier.std().item() / math.sqrt(5), abs=1e-6)


def test_what_was_found_is_there_for_the_next_attempt_and_only_for_the_same_trial(tmp_path: Path) -> None:
    found = found_by(Bias(), [{"logit": 2.0}, {"logit": -1.0}], [0, 1], tmp_path)

    def known(leaving: Leaving) -> list[ForkTest]:
        run = forking(leaving=leaving)
        return Forks(run, two_classes([0]), tmp_path, lambda run, fork: None, precision="fp32", group=ALONE).tests

    assert known(FORK) == [found]
    # Tests in between would change what the rule compares.
    for other in ({"fork_every": 7}, {"fork_lr": 0.04}, {"stop": "accuracy"}):
        assert known(replace(FORK, **other)) == []  # type: ignore[arg-type]
    (file,) = tmp_path.glob("forks-*.json")
    file.write_text(file.read_text().replace('"epoch": 4', '"epoch": 5'))
    assert known(FORK) == []


# ---- a quadratic problem: each image pulls w towards 1 or −1 by its class, so the optimum is 0


class Point(nn.Module):
    """Its first output is w, whatever the image."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.w.expand(len(images)), torch.zeros(len(images))], dim=1)


def square_losses(logits: torch.Tensor, labels: torch.Tensor, **_: object) -> torch.Tensor:
    return (logits[:, 0] - (1 - 2 * labels)).square() / 2


@pytest.fixture
def quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swap_pipeline.engine.evaluation.cross_entropies", square_losses)
    for where, reduce in (("training.loop.training_loss", torch.mean), ("engine.evaluation.summed_loss", torch.sum)):
        loss = lambda logits, labels, reduce=reduce, **_: reduce(square_losses(logits, labels))  # noqa: E731
        monkeypatch.setattr(f"swap_pipeline.{where}", loss)


def descend(folder: Path, leaving: Leaving, *, w: float, rate: float, epochs: int) -> Record:
    """One step an epoch, of gradient descent: w shrinks by 1 − rate."""
    run = replace(a_run(epochs=epochs), batch_size=by_epoch(8), learning_rate=lambda epoch: rate, leaving=leaving)
    return train(
        run,
        Point(w),
        two_classes([0, 1] * 4),
        optimizer=Optimizer(momentum=0.0, nesterov=False, weight_decay=0.0),
        compute=COMPUTE,
        group=ALONE,
        keeping=kept_in(folder),
    )


@pytest.mark.usefixtures("quadratic")
def test_on_a_quadratic_problem_forks_leave_at_the_epoch_that_the_closed_form_gives(tmp_path: Path) -> None:
    w, rate, images = 64.0, 0.5, 8  # powers of 2, so that nothing is rounded
    leaving = replace(FORK, fork_steps=1, fork_batch_size=images, fork_lr=0.5)

    def after(epoch: int) -> tuple[float, float]:
        """Loss of the average, and its standard error: each of (x ∓ 1)² / 2 is x away from the mean of both."""
        x = (1 - 0.5) * w * (1 - rate) ** epoch  # a fork takes one step
        return (x**2 + 1) / 2, x / math.sqrt(images - 1)

    tests = range(2, 30, 2)
    wanted = next(e for e in tests[1:] if after(e - 2)[0] - after(e)[0] < after(e)[1])
    assert wanted == 10

    record = descend(tmp_path, leaving, w=w, rate=rate, epochs=30)

    assert (record.stopped_by, len(record.curve)) == ("fork", wanted)
    assert [test["epoch"] for test in record.forks] == [e for e in tests if e <= wanted]
    for test in record.forks:
        assert (test["value"], test["value_error"]) == pytest.approx(after(int(test["epoch"])), rel=1e-5)
        assert test["barrier"] == 0  # all forks see all images, and so go the same way


@pytest.mark.usefixtures("quadratic")
@pytest.mark.parametrize(("rate", "left"), [(0.1, ("epochs", 20)), (2.5, ("plateau", 4))])
def test_on_a_quadratic_problem_plateau_leaves_if_the_rate_is_too_high(
    rate: float, left: tuple[str, int], tmp_path: Path
) -> None:
    """Below a rate of 2 the loss falls in every epoch, above it rises in every one: the first is the best."""
    record = descend(tmp_path, Leaving(stop="plateau", patience=3), w=8.0, rate=rate, epochs=20)
    assert (record.stopped_by, len(record.curve)) == left


# ---- what goes wrong in a fork


def test_a_fork_that_diverges_names_its_own_rate(tmp_path: Path) -> None:
    run = forking(leaving=replace(FORK, fork_lr=1e38))
    with pytest.raises(SwapError, match=r"^phase1, fork 0 after epoch 3: .* not finite .*: lower phase1\.fork_lr$"):
        train_here(small_network(), tmp_path, run)


def test_a_fork_that_does_not_fit_into_memory_names_its_own_batch(tmp_path: Path) -> None:
    network = small_network()

    def fill(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if module.training and len(inputs[0]) == FORK.fork_batch_size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    network.register_forward_pre_hook(fill)
    with pytest.raises(SwapError, match=r"^phase1, fork 0 after epoch 3: 6 images .*: lower phase1\.fork_batch_size$"):
        train_here(network, tmp_path, forking())


# ---- the course


def tensors_in(folder: Path) -> dict[str, bytes]:
    """Of all snapshots; their curves have clocks."""
    return {
        f"{path.name} {key}": tensor.numpy().tobytes()
        for path in folder.glob("snapshot_*")
        for key, tensor in read_tensors(path)[0].items()
    }


def without_clocks(record: Record) -> list[dict[str, float]]:
    return [{**test, "seconds": 0.0} for test in record.forks]


@pytest.fixture
def never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the tests come out."""
    monkeypatch.setattr("swap_pipeline.training.leaving.rules._fork", lambda curve, tests: "")


@pytest.mark.usefixtures("never_left")
@pytest.mark.parametrize("ema_decay", [None, 0.8])
def test_the_course_is_as_if_there_had_been_no_forks(tmp_path: Path, ema_decay: float | None) -> None:
    ends = []
    for name, leaving in (("with", FORK), ("without", Leaving())):
        network, folder = small_network(batch_norm=True, dropout=0.2), tmp_path / name
        folder.mkdir()
        run = replace(forking(leaving=leaving), ema_decay=ema_decay)
        record = train_here(network, folder, run)
        assert [test["epoch"] for test in record.forks] == ([3, 5, 7] if name == "with" else [])
        ends.append((weights_of(network).tolist(), [(row.train_loss, row.score) for row in record.curve]))
    assert ends[0] == ends[1]
    assert tensors_in(tmp_path / "with") == tensors_in(tmp_path / "without") != {}


@pytest.mark.usefixtures("never_left")
def test_a_run_that_is_killed_in_a_test_makes_that_test_again_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_here(small_network(batch_norm=True), tmp_path, forking())
    folder = tmp_path / "killed"
    folder.mkdir()
    made: list[int] = []
    real = Forks.test

    def test(self: Forks, epoch: int, network: nn.Module) -> ForkTest:
        made.append(epoch)
        if made == [3, 5]:
            raise KeyboardInterrupt
        return real(self, epoch, network)

    monkeypatch.setattr(Forks, "test", test)
    with pytest.raises(KeyboardInterrupt):
        train_here(small_network(batch_norm=True), folder, forking())

    network = small_network(batch_norm=True)
    record = train_here(network, folder, forking())

    assert made == [3, 5, 5, 7]
    assert without_clocks(record) == without_clocks(whole)


@pytest.mark.usefixtures("never_left")
def test_a_course_that_is_there_is_tested_and_not_trained_again(tmp_path: Path) -> None:
    trained: list[int] = []

    def go(name: str, leaving: Leaving) -> list[dict[str, float]]:
        (tmp_path / name).mkdir(exist_ok=True)
        keeping = replace(kept_in(tmp_path / name), stays=lambda epoch: True)
        keeping = replace(keeping, at_epoch_end=lambda epoch, network: trained.append(epoch))
        record = train(
            forking(leaving=leaving),
            small_network(),
            random_data(),
            optimizer=NESTEROV,
            compute=COMPUTE,
            group=ALONE,
            keeping=keeping,
        )
        return without_clocks(record)

    expected = go("with forks from the start", FORK)
    trained.clear()
    go("course", Leaving())
    assert trained == list(range(1, 10))

    found = go("course", FORK)

    assert trained == list(range(1, 10))
    assert found == expected != []


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import json
from pathlib import Path
from dataclasses import replace
from test_training import COMPUTE, NESTEROV, kept_in, random_data, small_network
from test_forks import FORK, forking
from swap_pipeline.engine.distributed import process_group
from swap_pipeline.training.loop import train

with process_group() as group:
    folder = Path({folder!r}) / str(group.world_size)
    folder.mkdir(exist_ok=True)
    run = replace(forking(epochs=6, leaving=replace(FORK, forks=3)), shards=2)
    record = train(run, small_network(batch_norm=True), random_data(), optimizer=NESTEROV, compute=COMPUTE,
                   group=group, keeping=kept_in(folder))
    if group.is_main:
        print(json.dumps([record.forks, record.left]))
"""


@pytest.mark.long
def test_two_ranks_find_what_one_finds(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tests=str(ROOT / "tests"), folder=str(tmp_path))))
    found = []
    for world_size in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world_size), str(script)]
        environment = {**os.environ, "SWAP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (one, left), (two, also_left) = found
    assert [test["epoch"] for test in one] == [test["epoch"] for test in two] != []
    for key in ("barrier", "barrier_error", "value", "value_error"):
        assert [test[key] for test in two] == pytest.approx([test[key] for test in one], rel=1e-3, abs=1e-5)
    assert left == also_left
