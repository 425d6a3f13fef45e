"""Rules for leaving phase 1: pure functions of its record.

So another rule can be applied to a phase 1 that has been trained, and take the epoch at which it would have ended it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from swap_pipeline.config.schedules import end_of_warmup
from swap_pipeline.training.run import Epoch, Run


@dataclass(frozen=True)
class ForkTest:
    """The result of trying phase 2 from the weights after an epoch, as mean validation losses."""

    epoch: int
    barrier: float
    """loss of the forks' average − mean loss of the forks"""
    barrier_error: float
    """standard error over images, like `value_error`"""
    value: float
    """loss of the forks' average"""
    value_error: float
    seconds: float

    def __str__(self) -> str:
        barrier = f"barrier {self.barrier:.4f} ± {self.barrier_error:.4f}"
        return f"{barrier}, loss of the average {self.value:.4f} ± {self.value_error:.4f}".replace("-", "−")


@dataclass(frozen=True)
class Exit:
    """Why a run is over."""

    by: str
    """the rule, as in `phase1.stop`, or `epochs` if the maximum was reached first"""
    because: str
    """for the user"""

    def after(self, epoch: int) -> str:
        """`left after epoch 32 by fork: barrier …`"""
        return f"left after epoch {epoch}" + (", the last" if self.by == "epochs" else f" by {self.by}: {self.because}")


def exit_now(run: Run, curve: Sequence[Epoch], tests: Sequence[ForkTest] = ()) -> Exit | None:
    """Whether the run ends after the last epoch of the curve: Algorithm 1's `while training accuracy ≤ τ`."""
    rules = {"accuracy": _accuracy, "plateau": _plateau, "qsr": _qsr, "fork": lambda run, curve: _fork(curve, tests)}
    stop = run.leaving.stop
    if curve and stop != "epochs" and (because := rules[stop](run, curve)):
        return Exit(stop, because)
    return Exit("epochs", "") if len(curve) >= run.epochs else None


def lacks_test(run: Run, epoch: int, tests: Sequence[ForkTest]) -> bool:
    """Whether a fork test is due after so many epochs, and has not been made."""
    if run.leaving.stop != "fork" or epoch >= run.epochs:
        return False
    since = epoch - end_of_warmup(run.learning_rate, epochs=run.epochs)
    return since > 0 and since % run.leaving.fork_every == 0 and all(test.epoch != epoch for test in tests)


def first_end(run: Run, curve: Sequence[Epoch], tests: Sequence[ForkTest] = ()) -> int | None:
    """The first epoch after which the run ends or a fork test is missing, if the curve reaches that far."""
    epochs = range(len(curve) + 1)
    return next((n for n in epochs if exit_now(run, curve[:n], tests) or lacks_test(run, n, tests)), None)


def exit_of_rule(rule: Any, run: Run, curve: Sequence[Epoch], tests: Sequence[ForkTest]) -> int | None:
    """The epoch after which this rule would have ended the run; None if it would not, or lacks its params."""
    leaving = replace(run.leaving, stop=rule)
    if rule == "qsr" and None in (leaving.qsr_alpha, leaving.qsr_steps):
        return None
    other = replace(run, leaving=leaving)
    ends = ((epoch, exit_now(other, curve[:epoch], tests)) for epoch in range(1, len(curve) + 1))
    return next((epoch for epoch, end in ends if end and end.by == rule), None)


def _fork(curve: Sequence[Epoch], tests: Sequence[ForkTest]) -> str:
    """Ends if the forks' average is no worse than the forks, and hardly better than in the previous test."""
    known = [test for test in tests if test.epoch <= len(curve)][-2:]
    if len(known) < 2 or known[1].epoch != len(curve):
        return ""
    before, now = known
    gain = before.value - now.value
    if now.barrier > 0 or gain >= now.value_error:
        return ""
    return f"{now}, {gain:.4f} lower than after epoch {before.epoch}".replace("-", "−")


def _accuracy(run: Run, curve: Sequence[Epoch]) -> str:
    """The paper's τ."""
    found, threshold = curve[-1].train_accuracy, run.leaving.stop_accuracy
    return f"training accuracy {found:.2f} %, above {threshold:g} %" if threshold < 100 and found > threshold else ""


def _plateau(run: Run, curve: Sequence[Epoch]) -> str:
    losses = [row.score.loss for row in curve]
    best = losses.index(min(losses))
    since = len(losses) - 1 - best
    if since < run.leaving.patience:
        return ""
    return f"validation loss {losses[best]:.4f} after epoch {best + 1}, not lower in {since} epochs since"


def _qsr(run: Run, curve: Sequence[Epoch]) -> str:
    """The quadratic synchronisation rule of local SGD, H = (α/η)² (Gu et al. 2023): phase 2 is one interval of H steps
    without communication, so it begins once η is low enough for an interval of that length."""
    alpha, wanted, rate = run.leaving.qsr_alpha, run.leaving.qsr_steps, curve[-1].learning_rate
    assert alpha is not None and wanted is not None
    if len(curve) <= end_of_warmup(run.learning_rate, epochs=run.epochs) or rate > alpha / math.sqrt(wanted):
        return ""
    allowed = f"{(alpha / rate) ** 2:.0f}" if rate else "any number of"
    return f"learning rate {rate:.4g}, at which {allowed} steps may go without an exchange (wanted: {wanted})"
