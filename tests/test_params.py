"""`params.yaml`: what is accepted, and what is said of the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, set_params
from ruamel.yaml import YAML

from swap_pipeline.cli.params_text import Entry, entries, text_of
from swap_pipeline.config.params import Augment, Compute, Model, Optimizer, Phase3
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.errors import SwapError


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
        ("phase1.stop_accuracy", 0.91, "phase1.stop_accuracy is 0.91, but is in percent: write 91"),
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
        ("phase1.stop", "qsr", "phase1.stop is qsr, but phase1.qsr_alpha is missing"),
        ("phase1.stop", "fork", "phase1.stop is fork, but phase1.fork_batch_size is missing: set it to phase 2's, 90"),
        ("phase1.stop", "never", "phase1.stop is 'never': choose one of accuracy, plateau, qsr, fork, epochs"),
        ("augment.flip", "yes", "augment.flip is 'yes', but must be true or false"),
        ("augment", 3, "augment must be a section with entries of its own, not 3"),
        ("data.augment", {}, "data.augment is not a known parameter"),
        ("optimizer.momentum", 0, "optimizer.nesterov is true but optimizer.momentum is 0"),
        ("workers.seeds", [], "workers.seeds is empty"),
        ("workers.seeds", [1, 2, 1], "workers.seeds lists 1 more than once"),
        ("workers.seeds", 4, "workers.seeds is 4: write a list"),
        ("workers.seeds", [0, -1], "workers.seeds[1] is -1, but must be at least 0"),
        ("data.train_images", "some", "data.train_images is 'some', but must be a whole number, or all"),
        ("data.train_images", 0, "data.train_images is 0, but must be at least 1"),
        ("model.width", 0, "model.width is 0, but must be at least 1"),
        ("model.options", 3, "model.options is 3, but must be a section with entries of its own"),
        ("compute.precision", "fp8", "compute.precision is 'fp8': choose one of auto, fp32, tf32, bf16, fp16"),
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
            "phase1.peak_lr and phase1.warmup_epochs have no effect with phase1.lr_knots",
        ),
        ("phase1.schedule", "poly", "phase1.schedule is 'poly': choose one of linear, cosine, constant"),
        (
            "phase2",
            {"batch_size": 90, "epochs": 8, "schedule": "cosine", "lr_knots": [[0, 1], [8, 0]]},
            "phase2.schedule has no effect with phase2.lr_knots",
        ),
        ("phase1.sync_steps", 0, "phase1.sync_steps is 0, but must be at least 1"),
        ("phase1.sync_steps", [[3, 16]], "phase1.sync_steps begins at epoch 3: begin at 0"),
        ("phase2.sync_steps", 4, "phase2.sync_steps is not a known parameter"),
        (
            "phase1",
            {"batch_size": 450, "peak_lr": 0.8, "max_epochs": 24, "sync_steps": [[0, 1], [20, 16]]},
            "phase1.sync_steps is 16, but phase1.shards is 1, which has no other shard to average with: raise",
        ),
        ("optimizer.clip_norm", 0, "optimizer.clip_norm is 0, but must be above 0"),
        ("phase1.min_scale", 0.5, "phase1.min_scale has no effect without phase1.image_size"),
        ("phase2.first_epoch", 5, "phase2.first_epoch has no effect if nothing is given by epoch"),
        ("small_batch", {}, "small_batch is not a known parameter"),
        ("method", 3, "method is 3, but must be text"),
        ("seed", -1, "seed is -1, but must be at least 0"),
        ("phase1.seed", 0, "phase1.seed is not a known parameter"),
        ("phase1.shards", 0, "phase1.shards is 0, but must be at least 1"),
        ("phase1.shards", 2.0, "phase1.shards is 2.0, but must be a whole number"),
        ("phase2.gpus_per_worker", 1, "phase2.gpus_per_worker is not a known parameter"),
        ("phase2.epochs", -1, "phase2.epochs is -1, but must be at least 0"),
        ("phase1.ema_decay", 0, "phase1.ema_decay is 0, but must be above 0"),
        ("phase2.ema_decay", 1, "phase2.ema_decay is 1, but must be at most"),
        (
            "phase1.shards",
            4,
            "phase1.batch_size is 450, which 4 shards cannot share equally: choose a multiple of 4, or",
        ),
        ("phase1.shards", 4, "or set phase1.shards to 3"),
        ("phase1.batch_size", [[0, 480], [4, 93]], "phase1.batch_size is 93, which 2 shards cannot share equally"),
        ("phase2.shards", 4, "phase2.batch_size is 90, which 4 shards cannot share equally"),
    ],
)
def test_a_bad_entry_is_named_with_its_value_and_the_way_out(dotted: str, value: Any, message: str) -> None:
    with pytest.raises(SwapError) as caught:
        parse_params(changed(dotted, value))
    assert str(caught.value).startswith("params.yaml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


FORK = {"stop": "fork", "fork_batch_size": 90, "fork_lr": 0.1, "warmup_epochs": 4, "max_epochs": 24}


@pytest.mark.parametrize(
    ("given", "images", "message"),
    [
        (FORK, 0, "phase1.stop is fork, which needs a validation set: set data.validation_images"),
        ({"stop": "plateau"}, 0, "phase1.stop is plateau, which needs a validation set: set data.validation_images"),
        (
            {"stop": "plateau", "patience": 24, "max_epochs": 24},
            100,
            "phase1.stop is plateau, but phase1.patience is 24 and phase1.max_epochs 24, so it never ends the phase: "
            "lower phase1.patience",
        ),
        (FORK | {"fork_every": 9}, 100, ""),  # after epochs 13 and 22
        (
            FORK | {"fork_every": 10},
            100,
            "phase1.stop is fork, which compares two tests, but there is time for 1 between the warm-up and "
            "phase1.max_epochs (24): lower phase1.fork_every (10)",
        ),
        (
            {"stop": "qsr", "qsr_alpha": 0.4, "qsr_steps": 16, "peak_lr": 0.2, "schedule": "constant"},
            0,
            "phase1.stop is qsr, but phase 1's learning rate never falls to qsr_alpha / √qsr_steps = 0.1: "
            "raise phase1.qsr_alpha, or let the rate fall",
        ),
        ({"stop": "qsr", "qsr_alpha": 0.8, "qsr_steps": 16, "peak_lr": 0.2, "schedule": "constant"}, 0, ""),
        ({"stop": "qsr", "qsr_alpha": 0.4, "qsr_steps": 16, "peak_lr": 0.2}, 0, ""),
        ({"stop": "epochs"}, 0, ""),
    ],
)
def test_a_rule_for_leaving_that_cannot_end_the_phase_is_refused(
    given: dict[str, Any], images: int, message: str
) -> None:
    params = tree()
    params["phase1"] |= given
    params["data"]["validation_images"] = images
    if not message:
        assert parse_params(params).phase1.stop == given["stop"]
        return
    with pytest.raises(SwapError) as caught:
        parse_params(params)
    assert str(caught.value) == f"params.yaml: {message}"


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
        ([[0, 0.1], [22, 0]], {"peak_lr": 0.1}, "phase2.peak_lr has no effect with phase2.lr_knots"),
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
    with pytest.raises(SwapError, match=r"peak_lr is missing: add it, or set the whole schedule as phase2\.lr_knots"):
        parse_params(incomplete)


@pytest.mark.parametrize("how", [True, False, "reduce-overhead"])
def test_compile_takes_true_false_and_reduce_overhead(how: bool | str) -> None:
    assert parse_params(changed("compute.compile", how)).compute.compile == how


def test_another_way_of_compiling_is_refused() -> None:
    with pytest.raises(SwapError, match=r"compute\.compile is 'max'.*true or false, or reduce-overhead"):
        parse_params(changed("compute.compile", "max"))


def test_what_is_rarely_tuned_has_a_default_and_may_be_left_out() -> None:
    short = tree() | {
        "augment": {},
        "model": {"name": "torchvision:resnet18"},
        "optimizer": {},
        "compute": {},
        "phase1": {"batch_size": 480, "peak_lr": 0.8, "max_epochs": 24},
        "phase2": {"batch_size": 96, "peak_lr": 0.1, "epochs": 8},
        "phase3": {},
    }
    del short["method"]
    params = parse_params(short)
    assert params.method == "swap"
    assert (params.data.train_images, params.data.max_gb_in_memory) == ("all", 2.0)
    assert params.augment == Augment(padding=0, flip=True, cutout=0, test_crop="square")
    assert params.model == Model(
        name="torchvision:resnet18", width=None, options=None, pretrained=False, zero_init_last_gamma=False
    )
    assert params.optimizer == Optimizer(
        momentum=0.9, nesterov=True, weight_decay=5e-4, decay_norms=True, decay_biases=True, label_smoothing=0.0
    )
    assert params.compute == Compute(precision="auto", channels_last=True, compile=False, deterministic=True)
    for phase in (params.phase1, params.phase2):
        assert (phase.shards, phase.warmup_epochs, phase.keep_epochs, phase.ema_decay) == (1, None, (), None)
    assert params.phase1.stop_accuracy == 100.0
    assert (params.phase2.cycles, params.phase2.first_epoch) == (1, 0)
    assert params.phase3 == Phase3(batch_size=500, augment=False)


@pytest.mark.parametrize("dotted", ["data.name", "model.name", "phase1.batch_size", "phase1.max_epochs", "seed"])
def test_what_a_run_is_about_has_no_default(dotted: str) -> None:
    without = tree()
    section, _, name = dotted.rpartition(".")
    del (without[section] if section else without)[name]
    with pytest.raises(SwapError, match=rf"params\.yaml: {dotted} is missing \(.+\): add it"):
        parse_params(without)


def test_a_run_without_phase_2_has_0_epochs_of_it_and_one_cycle() -> None:
    without = tree()
    without["phase2"] |= {"epochs": 0, "warmup_epochs": 3, "keep_epochs": "all"}
    assert parse_params(without).phase2.epochs == 0
    without["phase2"]["cycles"] = 2
    with pytest.raises(SwapError, match=r"phase2\.cycles is 2, but phase2\.epochs is 0: set cycles to 1"):
        parse_params(without)


def test_a_missing_entry_is_named_with_its_meaning() -> None:
    incomplete = tree()
    del incomplete["phase2"]["epochs"]
    with pytest.raises(
        SwapError, match=r"phase2\.epochs is missing \(length of the phase; 0: no phase 2, .*\): add it"
    ):
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
    set_params(path, {"seed": 7})
    assert read_params(path).seed == 7


def test_every_param_is_listed_with_value_default_and_meaning() -> None:
    found = {entry.key: entry for entry in entries(parse_params(changed("phase1.batch_size", [[0, 480], [4, 96]])))}
    assert found["phase1.batch_size"] == Entry(
        key="phase1.batch_size",
        value="[[0, 480], [4, 96]]",
        default=None,
        doc="images per step, over all devices of the run together",
    )
    assert (found["optimizer.nesterov"].value, found["optimizer.nesterov"].default) == ("true", "true")
    assert (found["model.width"].value, found["model.width"].default) == ("8", "–")
    assert (found["phase2.ema_decay"].value, found["optimizer.weight_decay"].value) == ("–", "0.0005")
    assert all(entry.doc for entry in found.values())
    nearly = [e for e in entries(parse_params(changed("phase1.stop_accuracy", 99.9999999))) if "stop_accuracy" in e.key]
    assert text_of(nearly).startswith("* phase1.stop_accuracy  99.9999999  (default 100)\n")

    text = text_of(list(found.values()))
    lines = {line[2:].split()[0]: " ".join(line.split()) for line in text.splitlines() if line[2:3].strip()}
    assert lines["phase1.shards"] == "* phase1.shards 2 (default 1)"
    assert lines["phase2.shards"] == "phase2.shards 1"
    assert lines["workers.seeds"] == "* workers.seeds [0, 1, 2, 3]"
    assert lines.keys() - {"differs"} == found.keys()
    assert max(map(len, text.splitlines())) <= 120
