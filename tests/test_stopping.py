"""When phase 1 is left: the rules on crafted curves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swap_pipeline.config.params import Leaving
from swap_pipeline.config.schedules import by_epoch, end_of_warmup, warmup_then_decay
from swap_pipeline.training.leaving.rules import exit_now, exit_of_rule, first_end
from swap_pipeline.training.run import Epoch, Run


def a_run(leaving: Leaving, *, epochs: int = 10, warmup_epochs: float = 2) -> Run:
    return Run(
        name="phase1",
        section="phase1",
        seed=0,
        batch_size=by_epoch(12),
        epochs=epochs,
        learning_rate=warmup_then_decay(peak=0.8, warmup_epochs=warmup_epochs, epochs=epochs),
        leaving=leaving,
    )


def a_curve(
    *, accuracies: Sequence[float] = (), losses: Sequence[float] = (), rates: Sequence[float] = ()
) -> list[Epoch]:
    length = max(map(len, (accuracies, losses, rates)))

    def of(values: Sequence[float], epoch: int) -> float:
        return values[epoch] if values else 0.0

    return [
        Epoch(
            epoch=epoch + 1,
            learning_rate=of(rates, epoch),
            train_loss=0,
            train_accuracy=of(accuracies, epoch),
            loss=of(losses, epoch),
            accuracy=0,
            top5=None,
            seconds=0,
        )
        for epoch in range(length)
    ]


def by(run: Run, curve: Sequence[Epoch]) -> str:
    end = exit_now(run, curve)
    return end.by if end else ""


@pytest.mark.parametrize(
    ("accuracies", "tau", "rule"),
    [
        ([], 90.0, ""),
        ([50.0, 89.9], 90.0, ""),
        ([50.0, 90.0], 90.0, ""),  # Algorithm 1 continues while accuracy ≤ τ
        ([50.0, 90.1], 90.0, "accuracy"),
        ([50.0, 90.1, 80.0], 90.0, "epochs"),
        ([50.0, 60.0, 95.0], 90.0, "accuracy"),
        ([99.0, 100.0], 100.0, ""),  # 100 means never
        ([99.0, 100.0, 100.0], 100.0, "epochs"),
        ([0.5], 0.0, "accuracy"),
    ],
)
def test_the_phase_ends_once_training_accuracy_is_above_tau(accuracies: list[float], tau: float, rule: str) -> None:
    assert by(a_run(Leaving(stop_accuracy=tau), epochs=3), a_curve(accuracies=accuracies)) == rule


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], None),
        ([0.9, 0.5, 0.6, 0.6, 0.6, 0.1], 5),  # three epochs after the second, whatever comes later
        ([0.9, 0.5, 0.6, 0.6, 0.4, 0.5, 0.5], None),  # a lower one in time
        ([0.9, 0.5, 0.6, 0.6, 0.4, 0.5, 0.5, 0.41], 8),
        ([0.5, 0.5, 0.5, 0.5], 4),  # the same again is not lower
    ],
)
def test_plateau_ends_the_phase_when_the_loss_was_not_lower_for_so_many_epochs(
    losses: list[float], end: int | None
) -> None:
    run = a_run(Leaving(stop="plateau", patience=3), epochs=20)
    assert first_end(run, a_curve(losses=losses)) == end


def test_qsr_ends_the_phase_once_as_many_steps_may_go_without_an_exchange_as_phase_2_has() -> None:
    # (0.4 / η)² is 1 at 0.4, 4 at 0.2 and 16 at 0.1: of 9 steps, the first two are too few.
    run = a_run(Leaving(stop="qsr", qsr_alpha=0.4, qsr_steps=9))
    assert first_end(run, a_curve(rates=[0.4, 0.8, 0.6, 0.4, 0.2, 0.1])) == 6
    exactly = a_run(Leaving(stop="qsr", qsr_alpha=0.4, qsr_steps=4))
    assert first_end(exactly, a_curve(rates=[0.4, 0.8, 0.6, 0.4, 0.2, 0.1])) == 5


def test_qsr_does_not_take_the_low_rates_of_the_warm_up_for_those_of_the_end() -> None:
    run = a_run(Leaving(stop="qsr", qsr_alpha=1.0, qsr_steps=100))
    assert end_of_warmup(run.learning_rate, epochs=10) == 2
    assert first_end(run, a_curve(rates=[0.01, 0.05, 0.8, 0.7, 0.1])) == 5
    assert end_of_warmup(a_run(Leaving(), warmup_epochs=0).learning_rate, epochs=10) == 0


def test_a_phase_that_is_to_run_to_its_end_does_and_tau_is_still_known() -> None:
    run, curve = a_run(Leaving(stop="epochs", stop_accuracy=90), epochs=3), a_curve(accuracies=[50, 95, 96])
    assert [first_end(run, curve[:n]) for n in (1, 2, 3)] == [None, None, 3]
    assert by(run, curve) == "epochs"
    assert exit_of_rule("accuracy", run, curve, ()) == 2
    assert not run.leaving.may_end_early and not Leaving().may_end_early
    assert Leaving(stop_accuracy=90).may_end_early and Leaving(stop="plateau").may_end_early


def test_a_rate_of_0_allows_any_number_of_steps() -> None:
    end = exit_now(a_run(Leaving(stop="qsr", qsr_alpha=1.0, qsr_steps=10**9)), a_curve(rates=[0.4, 0.8, 0.0]))
    assert end is not None and "any number of steps" in end.because


def test_what_decides_is_said() -> None:
    curve = a_curve(accuracies=[80, 91.234], losses=[0.5, 0.51])
    reasons = [
        exit_now(a_run(leaving), curve) for leaving in (Leaving(stop_accuracy=91), Leaving(stop="plateau", patience=1))
    ]
    assert [end.because for end in reasons if end] == [
        "training accuracy 91.23 %, above 91 %",
        "validation loss 0.5000 after epoch 1, not lower in 1 epochs since",
    ]


def test_the_first_end_is_that_of_the_shortest_prefix_that_is_left() -> None:
    run = a_run(Leaving(stop_accuracy=90), epochs=6)
    assert first_end(run, a_curve(accuracies=[50, 95, 80, 96])) == 2
    assert first_end(run, a_curve(accuracies=[50, 80])) is None
    assert first_end(run, a_curve(accuracies=[50] * 6)) == 6
