"""`params.yaml`: what is accepted, and what is said of the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, set_params
from ruamel.yaml import YAML

from swap_pipeline.errors import SwapError
from swap_pipeline.params import Swa, parse_params, read_params


def tree() -> dict[str, Any]:
    """The default recipe, with fixed values where a test counts on one."""
    loaded: dict[str, Any] = YAML(typ="safe").load((ROOT / "recipes" / "fashion-mini.yaml").read_text())
    loaded["phase1"] |= {"warmup_epochs": 1, "max_epochs": 24}
    loaded["phase2"] |= {"warmup_epochs": 0, "epochs": 8}
    loaded["optimizer"] |= {"nesterov": True, "momentum": 0.9}
    return loaded


def changed(dotted: str, value: Any) -> dict[str, Any]:
    result = tree()
    *sections, last = dotted.split(".")
    node = result
    for section in sections:
        node = node[section]
    node[last] = value
    return result


def test_the_committed_file_is_valid_and_typed() -> None:
    params = read_params(ROOT / "params.yaml")
    assert all(isinstance(seed, int) for seed in params.workers.seeds)
    assert isinstance(params.phase1.warmup_epochs, float)


def test_exponents_without_a_dot_are_numbers_as_they_are_to_dvc(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        re.sub(r"weight_decay: .*", "weight_decay: 5e-4", (ROOT / "recipes" / "fashion-mini.yaml").read_text())
    )
    assert read_params(path).optimizer.weight_decay == 5e-4


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("phase2.peek_lr", 0.1, "phase2.peek_lr is not a known parameter: did you mean peak_lr?"),
        ("phase4", {}, "phase4 is not a known parameter: did you mean phase"),
        (
            "phase1.batch_size",
            "480",
            "phase1.batch_size is '480', but must be a whole number (write it without quotes)",
        ),
        ("phase1.batch_size", "many", "phase1.batch_size is 'many', but must be a whole number"),
        ("phase1.stop_accuracy", 0.91, "phase1.stop_accuracy is 0.91, but in percent: write 91"),
        ("phase1.batch_size", 1.5, "phase1.batch_size is 1.5, but must be a whole number"),
        ("phase1.batch_size", True, "phase1.batch_size is True, but must be a whole number"),
        ("phase1.batch_size", 0, "phase1.batch_size is 0, but must be at least 1"),
        ("phase1.peak_lr", 0, "phase1.peak_lr is 0, but must be above 0"),
        ("phase1.peak_lr", float("nan"), "phase1.peak_lr is nan, but must be finite"),
        ("phase1.peak_lr", 10**400, "but must be finite"),
        ("phase1.peak_lr", None, "phase1.peak_lr is None, but must be a number"),
        ("phase1.stop_accuracy", 100.5, "phase1.stop_accuracy is 100.5, but must be at most 100"),
        ("phase1.warmup_epochs", 25, "phase1.warmup_epochs is 25, longer than phase1.max_epochs (24)"),
        ("phase2.warmup_epochs", 9, "phase2.warmup_epochs is 9, longer than phase2.epochs (8)"),
        ("data.augment.flip", "yes", "data.augment.flip is 'yes', but must be true or false"),
        ("data.augment", 3, "data.augment must be a section with entries of its own, not 3"),
        ("optimizer.momentum", 0, "optimizer.nesterov is true but optimizer.momentum is 0"),
        ("phase3.variance", "pooled!", "phase3.variance is 'pooled!': choose one of pooled, batch_mean"),
        ("workers.seeds", [], "workers.seeds is empty"),
        ("workers.seeds", [1, 2, 1], "workers.seeds lists 1 more than once"),
        ("workers.seeds", 4, "workers.seeds is 4: write a list"),
        ("workers.seeds", [0, -1], "workers.seeds[1] is -1, but must be at least 0"),
        ("data.train_images", "some", "data.train_images is 'some', but must be a whole number, or all"),
        ("data.train_images", 0, "data.train_images is 0, but must be at least 1"),
        ("model.width", 0, "model.width is 0, but must be at least 1"),
        ("model.options", 3, "model.options is 3, but must be a section with entries of its own"),
        ("compute.precision", "fp8", "compute.precision is 'fp8': choose one of auto, fp32, bf16, fp16"),
        (
            "model",
            {"name": "torchvision:resnet18", "pretrained": True, "zero_init_last_gamma": True},
            "model.zero_init_last_gamma has no effect on published weights",
        ),
        ("phase2.cycles", 3, "phase2.cycles is 3, which does not divide phase2.epochs (8) into equal parts"),
        ("phase1.batch_size", [[0, 480], [4]], "phase1.batch_size[1] is [4]: write a pair, [epoch, value]"),
        ("phase1.batch_size", [[0, 480], [4, 0]], "phase1.batch_size[1][1] is 0, but must be at least 1"),
        ("phase1.batch_size", [[0, 480], [2.5, 96]], "phase1.batch_size[1][0] is 2.5, but must be a whole number"),
        ("phase1.batch_size", [], "phase1.batch_size is empty: write it as [[epoch, value], …]"),
        ("phase1.batch_size", [[1, 480]], "phase1.batch_size begins at epoch 1: begin at 0"),
        ("phase1.batch_size", [[0, 4], [0, 8]], "phase1.batch_size has epochs 0, 0: list them in rising order"),
        (
            "phase1.lr_knots",
            [[0, 1], [24, 0]],
            "phase1.peak_lr and phase1.warmup_epochs have no effect beside phase1.lr_knots",
        ),
        ("phase1.min_scale", 0.5, "phase1.min_scale has no effect without phase1.image_size"),
        ("phase2.first_epoch", 5, "phase2.first_epoch has no effect where nothing is given by epoch"),
        ("small_batch.warmup_epochs", 99, "small_batch.warmup_epochs is 99, longer than small_batch.epochs"),
        ("small_batch", None, "small_batch must be a section with entries of its own, not None"),
        ("small_batches", {}, "small_batches is not a known parameter: did you mean small_batch?"),
        ("repeats", [1, 2, 1], "repeats lists 1 more than once"),
        ("repeats", [1, 0], "repeats lists 0, but that is the plain pipeline, which always takes part: leave it out"),
        ("repeats", [1, -1], "repeats[1] is -1, but must be at least 0"),
        ("repeats", 3, "repeats is 3: write a list"),
        ("swa_small_batch.peak_lr", 0, "swa_small_batch.peak_lr is 0, but must be above 0"),
        ("swa_large_batch.models", 0, "swa_large_batch.models is 0, but must be at least 1"),
        ("swa_large_batch.cycle_epochs", 0, "swa_large_batch.cycle_epochs is 0, but must be at least 1"),
        ("swa_large_then_small.models", 1.5, "swa_large_then_small.models is 1.5, but must be a whole number"),
        ("swa_small_batch", {"models": 4}, "swa_small_batch.peak_lr is missing (learning rate at the beginning of a"),
        ("swa_small_batch.batch_size", 96, "swa_small_batch.batch_size is not a known parameter"),
    ],
)
def test_a_bad_entry_is_named_with_its_value_and_the_way_out(dotted: str, value: Any, message: str) -> None:
    with pytest.raises(SwapError) as caught:
        parse_params(changed(dotted, value))
    assert str(caught.value).startswith("params.yaml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def with_knots(section: str, knots: list[list[float]], **more: Any) -> dict[str, Any]:
    result = tree()
    del result[section]["peak_lr"], result[section]["warmup_epochs"]
    result[section] |= {"lr_knots": knots, **more}
    return result


def test_a_course_of_the_learning_rate_may_stand_in_for_peak_and_warm_up() -> None:
    phase = parse_params(with_knots("phase1", [[0, 0.1], [4, 0.8], [4, 0.2], [24, 0]])).phase1
    assert phase.lr_knots == ((0, 0.1), (4, 0.8), (4, 0.2), (24, 0))
    assert phase.peak_lr is None and phase.warmup_epochs is None


@pytest.mark.parametrize(
    ("knots", "more", "message"),
    [
        ([[0, 0.1], [20, 0]], {}, "phase2.lr_knots ends at epoch 20, the run at 22: add a knot there"),
        ([[2, 0.1], [22, 0]], {}, "phase2.lr_knots begins at epoch 2: begin at 0"),
        ([[0, 0.1], [9, 0.1], [5, 0.1], [22, 0]], {}, "phase2.lr_knots has epochs 0, 9, 5, 22: list them in rising"),
        ([[0, -0.1], [22, 0]], {}, "phase2.lr_knots[0][1] is -0.1, but must be at least 0"),
        ([], {}, "phase2.lr_knots is empty"),
        ([[0, 0.1], [22, 0]], {"peak_lr": 0.1}, "phase2.peak_lr has no effect beside phase2.lr_knots"),
    ],
)
def test_bad_knots_are_named(knots: list[list[float]], more: dict[str, Any], message: str) -> None:
    """Phase 2 takes up a course at epoch 14 and is 8 epochs long."""
    with pytest.raises(SwapError) as caught:
        parse_params(with_knots("phase2", knots, first_epoch=14, **more))
    assert message in str(caught.value)


def test_neither_peak_nor_course_is_refused_with_both_ways_out() -> None:
    incomplete = tree()
    del incomplete["phase2"]["peak_lr"]
    with pytest.raises(SwapError, match=r"phase2\.peak_lr is missing: add it, or the whole course as phase2\.lr_knots"):
        parse_params(incomplete)


def test_what_does_not_apply_may_be_left_out() -> None:
    without = tree()
    del without["model"]["width"]
    assert parse_params(without).model.width is None


@pytest.mark.parametrize("section", ["swa_large_batch", "swa_large_then_small", "swa_small_batch"])
def test_a_comparison_that_is_not_wanted_may_be_left_out(section: str) -> None:
    without = tree()
    del without[section]
    assert getattr(parse_params(without), section) is None
    assert getattr(parse_params(tree()), section) is not None


@pytest.mark.parametrize(("section", "after"), [("small_batch", "swa_small_batch"), ("large_batch", "swa_large_batch")])
def test_a_baseline_is_left_out_together_with_the_swa_that_starts_from_it(section: str, after: str) -> None:
    without = tree()
    del without[section]
    with pytest.raises(SwapError, match=f"params.yaml: {after} starts from {section}, which is missing"):
        parse_params(without)
    del without[after]
    assert getattr(parse_params(without), section) is None


def test_swa_samples_as_many_models_as_it_is_told_or_says_nothing() -> None:
    given = changed("swa_small_batch", {"peak_lr": 1, "models": 1, "cycle_epochs": 3})
    given["swa_large_batch"] = {"peak_lr": 0.5}
    params = parse_params(given)
    assert params.swa_small_batch == Swa(peak_lr=1.0, models=1, cycle_epochs=3)
    assert params.swa_large_batch == Swa(peak_lr=0.5, models=None, cycle_epochs=None)


def test_no_further_repeats_are_an_empty_list_and_must_be_said() -> None:
    assert parse_params(changed("repeats", [])).repeats == ()
    assert parse_params(changed("repeats", [7, 3])).repeats == (7, 3)
    without = tree()
    del without["repeats"]
    with pytest.raises(SwapError, match=r"repeats is missing \(the comparisons' further runs.*\): add it"):
        parse_params(without)


def test_a_missing_entry_is_named_with_its_meaning() -> None:
    incomplete = tree()
    del incomplete["phase2"]["epochs"]
    with pytest.raises(SwapError, match=r"phase2\.epochs is missing \(length of the phase\): add it"):
        parse_params(incomplete)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "the file must be a section"), ("a: [1", "is not valid YAML"), ("a: 1\na: 2\n", "is not valid YAML")],
)
def test_a_file_that_is_no_params_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(SwapError) as caught:
        read_params(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_where_to_be(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match="run this from the project's root folder"):
        read_params(tmp_path / "params.yaml")


def test_set_params_of_the_tests_changes_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    set_params(path, {"phase1.seed": 7})
    assert read_params(path).phase1.seed == 7
