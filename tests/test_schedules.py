"""Learning rate and sizes by epoch, against lists that were worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from swap_pipeline.config.params import Schedule
from swap_pipeline.config.schedules import PiecewiseLinear, by_epoch, learning_rate_of, warmup_then_decay


def close(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def test_the_rate_rises_from_0_to_the_peak_and_falls_to_0_at_the_end() -> None:
    rate = warmup_then_decay(peak=0.4, warmup_epochs=2, epochs=6)

    rates = [rate(epoch) for epoch in (0, 0.5, 1, 1.5, 2, 3, 3.5, 4, 5, 5.75, 6)]

    assert rates == close([0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.25, 0.2, 0.1, 0.025, 0])


def test_the_rate_moves_at_every_step_of_an_epoch() -> None:
    rate = warmup_then_decay(peak=0.8, warmup_epochs=1, epochs=3)

    rates = [rate(epoch + step / 4) for epoch in range(3) for step in range(4)]

    assert rates == close([0, 0.2, 0.4, 0.6, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_the_papers_cifar_schedule_peaks_at_epoch_5_of_24() -> None:
    rate = warmup_then_decay(peak=0.4, warmup_epochs=5, epochs=24)

    rates = [rate(epoch) for epoch in (0, 2.5, 5, 14.5, 24)]

    assert rates == close([0, 0.2, 0.4, 0.2, 0])


def test_a_warm_up_may_end_within_an_epoch() -> None:
    rate = warmup_then_decay(peak=0.3, warmup_epochs=1.5, epochs=3)

    rates = [rate(epoch) for epoch in (0, 0.5, 1, 1.5, 2, 2.5, 3)]

    assert rates == close([0, 0.1, 0.2, 0.3, 0.2, 0.1, 0])


def test_without_warm_up_the_first_step_has_the_peak_rate() -> None:
    rate = warmup_then_decay(peak=0.1, warmup_epochs=0, epochs=4)

    rates = [rate(epoch) for epoch in (0, 1, 2, 3, 4)]

    assert rates == close([0.1, 0.075, 0.05, 0.025, 0])


def test_a_warm_up_over_the_whole_run_rises_until_its_last_step() -> None:
    rate = warmup_then_decay(peak=0.2, warmup_epochs=4, epochs=4)

    rates = [rate(epoch) for epoch in (0, 1, 2, 3, 3.75)]

    assert rates == close([0, 0.05, 0.1, 0.15, 0.1875])


def test_outside_its_knots_a_schedule_keeps_the_nearest_value() -> None:
    schedule = PiecewiseLinear((1, 2), (5, 3))

    values = [schedule(epoch) for epoch in (-10, 0, 1, 1.5, 2, 2.5, 100)]

    assert values == close([5, 5, 5, 4, 3, 3, 3])


def test_two_knots_at_one_epoch_make_a_jump_to_the_later_value() -> None:
    schedule = PiecewiseLinear((0, 7, 13, 13, 22), (1, 2, 0.25, 0.4375, 0.04375))

    values = [schedule(epoch) for epoch in (0, 3.5, 7, 10, 12, 13, 17.5, 22)]

    assert values == close([1, 1.5, 2, 1.125, 0.25 + 1.75 / 6, 0.4375, 0.240625, 0.04375])


def test_a_single_knot_is_a_constant() -> None:
    schedule = PiecewiseLinear((3,), (0.7,))

    values = [schedule(epoch) for epoch in (0, 3, 9)]

    assert values == [0.7, 0.7, 0.7]


@pytest.mark.parametrize(
    ("epochs", "values"), [((0, 2, 1), (0, 1, 2)), ((0, 1), (0, 1, 2)), ((), ())], ids=["unsorted", "uneven", "empty"]
)
def test_knots_that_make_no_schedule_are_a_programming_error(
    epochs: tuple[float, ...], values: tuple[float, ...]
) -> None:
    with pytest.raises(AssertionError):
        PiecewiseLinear(epochs, values)


def a_schedule(**entries: Any) -> Schedule:
    return Schedule(**{"batch_size": 8, **entries})


def test_each_cycle_goes_from_the_peak_down() -> None:
    """Two cycles of 20 epochs, as in the paper's longer CIFAR-100 run."""
    rate = learning_rate_of(a_schedule(peak_lr=0.05, warmup_epochs=0), epochs=40, cycles=2)
    assert [rate(epoch) for epoch in (0, 5, 10, 19, 20, 30, 39)] == pytest.approx(
        [0.05, 0.0375, 0.025, 0.0025, 0.05, 0.025, 0.0025]
    )


def test_each_cycle_warms_up_anew() -> None:
    rate = learning_rate_of(a_schedule(peak_lr=1.0, warmup_epochs=2), epochs=8, cycles=2)
    assert [rate(epoch) for epoch in range(8)] == pytest.approx([0, 0.5, 1, 0.5, 0, 0.5, 1, 0.5])


def test_after_the_warm_up_a_rate_may_fall_along_half_a_cosine_wave() -> None:
    rate = learning_rate_of(a_schedule(peak_lr=0.4, warmup_epochs=2, schedule="cosine"), epochs=8)
    root = 2**0.5 / 2  # cos 45°
    expected = [0, 0.2, 0.4, 0.2 * (1 + root), 0.2, 0.2 * (1 - root), 0]
    assert [rate(epoch) for epoch in (0, 1, 2, 3.5, 5, 6.5, 8)] == close(expected)


def test_each_cycle_falls_along_a_cosine_of_its_own_and_is_drawn_so() -> None:
    rate = learning_rate_of(a_schedule(peak_lr=1.0, schedule="cosine"), epochs=8, cycles=2)
    drawn = rate.drawn()
    assert [rate(epoch) for epoch in (0, 2, 4, 6)] == close([1, 0.5, 1, 0.5])
    assert [point for point in drawn if point[0] == 4] == [(4, 0), (4, 0), (4, 1)]
    assert [epoch for epoch, _ in drawn] == sorted(epoch for epoch, _ in drawn)
    assert max(abs(value - rate(epoch)) for epoch, value in drawn if 0 < epoch < 8 and epoch != 4) == 0


def test_after_the_warm_up_a_rate_may_stay_at_the_peak() -> None:
    rate = learning_rate_of(a_schedule(peak_lr=0.4, warmup_epochs=2, schedule="constant"), epochs=8)
    assert [rate(epoch) for epoch in (0, 1, 2, 5, 8)] == close([0, 0.2, 0.4, 0.4, 0.4])


def test_a_run_can_take_up_a_course_in_its_middle() -> None:
    given = a_schedule(lr_knots=((0, 1.0), (4, 2.0), (4, 0.5), (10, 0.2), (12, 0.0)))
    whole = learning_rate_of(given, epochs=12)
    later = learning_rate_of(given, epochs=6, first_epoch=6)
    assert [whole(epoch) for epoch in (0, 2, 3.5, 4, 7, 10, 11)] == pytest.approx([1, 1.5, 1.875, 0.5, 0.35, 0.2, 0.1])
    assert [later(epoch) for epoch in (0, 1, 4, 5)] == pytest.approx([whole(epoch) for epoch in (6, 7, 10, 11)])


def test_a_size_holds_from_its_epoch_on() -> None:
    size = by_epoch(((0, 128), (13, 224), (25, 288)))
    assert [size(epoch) for epoch in (0, 12, 12.9, 13, 24, 25, 100)] == [128, 128, 128, 224, 224, 288, 288]
    later = by_epoch(((0, 128), (13, 224), (25, 288)), first_epoch=22)
    assert [later(epoch) for epoch in (0, 2, 3, 5)] == [224, 224, 288, 288]
    assert [by_epoch(64)(epoch) for epoch in (0, 7)] == [64, 64]
