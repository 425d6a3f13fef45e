"""The recipes against the numbers that the paper prints, typed from it here once more; and `swap use`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from swap_pipeline.cli.compare.methods import read_methods
from swap_pipeline.config.params import Augment, Optimizer, Params, Phase1, Phase2, Schedule
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.config.schedules import by_epoch, learning_rate_of
from swap_pipeline.data.epochs import batch_share, draw_epoch, steps_per_epoch
from swap_pipeline.report.provenance import read_sections

NAMES = (
    "cifar10",
    "cifar10-cpu",
    "cifar10-lars",
    "cifar100",
    "dawnbench",
    "fashion-mini",
    "fashion-mnist",
    "imagenet",
    "tiny-imagenet-cpu",
)
BEFORE = 1e-9
"""Epochs: just before a jump."""


def recipe(name: str) -> Params:
    return read_params(ROOT / "recipes" / f"{name}.yaml")


def of_method(name: str, method: str) -> Params:
    """A recipe as one of its methods has it."""
    with contextlib.chdir(ROOT):
        return parse_params(read_methods(name).params(method, 0, read_sections(Path(f"recipes/{name}.yaml"))))


METHODS = {
    "swap",
    "small_batch",
    "large_batch",
    "swa_large_batch",
    "swa_large_then_small",
    "swa_small_batch",
    "small_batch_ema",
    "large_batch_ema",
}


# The files


def test_each_experiment_has_its_file() -> None:
    files = {file for name in NAMES for file in (f"{name}.yaml", f"{name}.methods.yaml")}
    assert {path.name for path in (ROOT / "recipes").iterdir()} == files


@pytest.mark.parametrize("name", NAMES)
def test_every_method_of_a_recipe_is_valid_and_swap_is_the_recipe_itself(name: str) -> None:
    with contextlib.chdir(ROOT):
        methods = set(read_methods(name).settings)
    assert methods == METHODS | ({"swap_40"} if name == "cifar100" else set())
    for method in methods:
        assert of_method(name, method).method == method
    assert of_method(name, "swap") == recipe(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads_and_bears_its_own_name(name: str) -> None:
    assert recipe(name).recipe == name


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_one_line_about_itself(name: str) -> None:
    first, second = (ROOT / "recipes" / f"{name}.yaml").read_text().splitlines()[:2]
    assert first.startswith("# ") and first.endswith(".") and 40 < len(first) < 100
    assert second == "#"


# Numbers of the paper: section 5.1 and Tables 5 and 6


CIFAR_OPTIMIZER = Optimizer(
    momentum=0.9, nesterov=True, weight_decay=5e-4, decay_norms=True, decay_biases=True, label_smoothing=0.0
)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "dawnbench"])
def test_the_cifar_recipes_share_network_optimizer_augmentation_and_8_workers(name: str) -> None:
    params = recipe(name)
    assert params.optimizer == CIFAR_OPTIMIZER
    assert (params.model.name, params.model.width, params.model.pretrained) == ("resnet9", 64, False)
    assert not params.model.zero_init_last_gamma
    assert params.augment == Augment(padding=4, flip=True, cutout=8)
    assert params.data.train_images == "all"
    assert params.workers.seeds == (0, 1, 2, 3, 4, 5, 6, 7)
    assert params.compute.precision == "auto"


def test_cifar10_has_the_numbers_of_table_5() -> None:
    params = recipe("cifar10")
    assert params.data.name == "cifar10"
    assert params.phase1 == Phase1(
        batch_size=4096, shards=8, peak_lr=1.2, warmup_epochs=30, max_epochs=150, stop_accuracy=98
    )
    assert params.phase2 == Phase2(batch_size=512, peak_lr=0.12, epochs=30, keep_epochs=(5, 10, 15, 20, 25))
    small, large = of_method("cifar10", "small_batch"), of_method("cifar10", "large_batch")
    assert small.phase1 == Phase1(batch_size=512, shards=2, peak_lr=0.3, warmup_epochs=30, max_epochs=100)
    assert large.phase1 == Phase1(batch_size=4096, shards=8, peak_lr=1.2, warmup_epochs=30, max_epochs=150)


def test_cifar100_has_the_numbers_of_table_6_but_the_ten_epochs_of_the_text() -> None:
    params = recipe("cifar100")
    assert params.data.name == "cifar100"
    assert params.phase1 == Phase1(
        batch_size=2048, shards=8, peak_lr=1.2, warmup_epochs=45, max_epochs=150, stop_accuracy=90
    )
    assert params.phase2 == Phase2(batch_size=128, peak_lr=0.05, epochs=10, keep_epochs=(2, 4, 6, 8))
    small, large = of_method("cifar100", "small_batch"), of_method("cifar100", "large_batch")
    assert small.phase1 == Phase1(batch_size=128, peak_lr=0.2, warmup_epochs=60, max_epochs=150)
    assert large.phase1 == Phase1(batch_size=2048, shards=8, peak_lr=1.2, warmup_epochs=45, max_epochs=150)


def test_swap_with_40_epochs_is_cifar100_with_two_cycles_of_20_and_16_models() -> None:
    params, short = of_method("cifar100", "swap_40"), recipe("cifar100")
    assert (params.phase2.epochs, params.phase2.cycles) == (40, 2)
    assert params.phase2.cycles * len(params.workers.seeds) == 16
    same_phase2 = dataclasses.replace(params.phase2, epochs=10, cycles=1, keep_epochs=short.phase2.keep_epochs)
    assert dataclasses.replace(params, method="swap", phase2=same_phase2) == short
    rate = learning_rate_of(params.phase2, epochs=40, cycles=2)
    rates = [rate(epoch) for epoch in (0, 10, 20 - BEFORE, 20, 30, 40)]
    assert rates == pytest.approx([0.05, 0.025, 0, 0.05, 0.025, 0], abs=1e-9)


def test_dawnbench_has_the_batch_sizes_and_epochs_of_the_text() -> None:
    params = recipe("dawnbench")
    assert params.data.name == "cifar10"
    assert (params.phase1.batch_size, params.phase1.max_epochs, params.phase1.stop_accuracy) == (2048, 28, 100)
    assert (params.phase2.batch_size, params.phase2.epochs, params.phase2.cycles) == (256, 1, 1)
    assert of_method("dawnbench", "large_batch").phase1 == params.phase1
    # What the paper leaves open comes from cifar10-fast.
    small = of_method("dawnbench", "small_batch").phase1
    assert small == Phase1(batch_size=512, peak_lr=0.4, warmup_epochs=5, max_epochs=24)


# ImageNet: section 5.2 and the published schedule for one machine with 8 GPUs


PUBLISHED_RATES: dict[float, float] = {
    0: 1.0,
    3.5: 1.5,
    7: 2.0,
    10: 1.125,
    13 - BEFORE: 0.25,
    13: 0.4375,
    17.5: 0.240625,
    22: 0.04375,
    23.5: 0.0240625,
    25 - BEFORE: 0.004375,
    25: 0.0025,
    26.5: 0.001375,
    28: 0.00025,
}
PUBLISHED_BATCHES: dict[float, float] = {0: 4096, 12: 4096, 13: 1792, 24: 1792, 25: 1024, 27: 1024}
PUBLISHED_SIZES: dict[float, float] = {0: 128, 12: 128, 13: 224, 24: 224, 25: 288, 27: 288}
PUBLISHED_SCALES: dict[float, float] = {0: 0.08, 12: 0.08, 13: 0.087, 24: 0.087, 25: 0.5, 27: 0.5}


def test_imagenet_has_the_settings_of_the_code_that_the_paper_takes() -> None:
    params = recipe("imagenet")
    assert params.data.name == "imagenet"
    assert params.augment == Augment(padding=0, flip=True, cutout=0, test_crop="rectangle")
    assert (params.model.name, params.model.width) == ("torchvision:resnet50", None)
    assert params.model.zero_init_last_gamma
    assert params.optimizer == Optimizer(
        momentum=0.9, nesterov=False, weight_decay=1e-4, decay_norms=False, decay_biases=True, label_smoothing=0.0
    )
    assert (params.phase1.max_epochs, params.phase1.stop_accuracy) == (22, 100)
    assert (params.phase2.first_epoch, params.phase2.epochs, params.phase2.cycles) == (22, 6, 1)
    assert (len(params.workers.seeds), params.phase1.shards, params.phase2.shards) == (2, 16, 8)
    for method, shards in (("small_batch", 8), ("large_batch", 16)):
        phase1 = of_method("imagenet", method).phase1
        assert (phase1.max_epochs, phase1.stop_accuracy, phase1.shards) == (28, 100, shards)


@dataclass(frozen=True)
class Part:
    """A stretch of the published schedule, as a run of the recipe follows it."""

    method: str
    phase: str
    start: int
    end: int
    times: int


PARTS = [
    Part("small_batch", "phase1", 0, 28, 1),
    Part("large_batch", "phase1", 0, 28, 2),
    Part("swap", "phase1", 0, 22, 2),
    Part("swap", "phase2", 22, 28, 1),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.method}-{part.phase}")
def test_imagenet_follows_the_published_schedule(part: Part) -> None:
    run = getattr(of_method("imagenet", part.method), part.phase)
    rate = learning_rate_of(run, epochs=part.end - part.start, first_epoch=part.start)
    batch, size, scale = (
        by_epoch(entry, first_epoch=part.start) for entry in (run.batch_size, run.image_size, run.min_scale)
    )

    def within(published: Mapping[float, float]) -> dict[float, float]:
        return {epoch - part.start: value for epoch, value in published.items() if part.start <= epoch < part.end}

    rates = within({**PUBLISHED_RATES, part.end - BEFORE: PUBLISHED_RATES[part.end]})
    assert {epoch: rate(epoch) for epoch in rates} == pytest.approx(
        {epoch: part.times * value for epoch, value in rates.items()}, rel=1e-6
    )
    batches = within(PUBLISHED_BATCHES)
    assert {epoch: batch(epoch) for epoch in batches} == {epoch: part.times * n for epoch, n in batches.items()}
    sizes = within(PUBLISHED_SIZES)
    assert {epoch: size(epoch) for epoch in sizes} == sizes
    scales = within(PUBLISHED_SCALES)
    assert {epoch: scale(epoch) for epoch in scales} == scales


def test_phase_2_of_imagenet_begins_and_ends_with_the_plain_rates() -> None:
    phase2 = recipe("imagenet").phase2
    rate = learning_rate_of(phase2, epochs=6, first_epoch=22)
    rates = [rate(epoch) for epoch in (0, 3 - BEFORE, 3, 6)]
    assert rates == pytest.approx([0.04375, 0.004375, 0.0025, 0.00025], rel=1e-6)


def test_an_imagenet_gpu_holds_512_then_224_then_128_images_in_every_run() -> None:
    params = recipe("imagenet")

    def per_shard(run: Schedule) -> list[float]:
        assert isinstance(run.batch_size, tuple)
        return [size / run.shards for _, size in run.batch_size]

    assert per_shard(of_method("imagenet", "small_batch").phase1) == [512, 224, 128]
    assert per_shard(of_method("imagenet", "large_batch").phase1) == [512, 224, 128]
    assert per_shard(params.phase1) == [512, 224]
    assert per_shard(params.phase2) == [512, 224, 128]


# What SWAP is compared with: baselines are phase 1 alone; SWA, section 5.3, is one worker with cycles


@pytest.mark.parametrize("method", ["small_batch", "large_batch", "small_batch_ema", "large_batch_ema"])
@pytest.mark.parametrize("name", NAMES)
def test_a_baseline_is_phase_1_to_the_end_and_nothing_after_it(name: str, method: str) -> None:
    params = of_method(name, method)
    assert (params.phase2.epochs, len(params.workers.seeds), params.phase1.stop_accuracy) == (0, 1, 100)
    plain = of_method(name, method.removesuffix("_ema")).phase1
    assert params.phase1 == dataclasses.replace(plain, ema_decay=params.phase1.ema_decay)
    assert (params.phase1.ema_decay is not None) == method.endswith("_ema")


@pytest.mark.parametrize("method", ["small_batch_ema", "large_batch_ema"])
@pytest.mark.parametrize("name", NAMES)
def test_an_exponential_mean_reaches_back_over_one_to_two_epochs(name: str, method: str) -> None:
    phase1 = of_method(name, method).phase1
    assert phase1.ema_decay is not None
    steps = steps_per_epoch(NUM_IMAGES[name], by_epoch(phase1.batch_size)(phase1.max_epochs - 1))
    assert 1 <= 1 / (1 - phase1.ema_decay) / steps <= 2


@pytest.mark.parametrize("name", NAMES)
def test_swa_starts_where_its_name_says_and_takes_as_many_models_as_swap_with_as_many_epochs(name: str) -> None:
    swap = recipe(name)
    starts = {"swa_large_batch": "large_batch", "swa_large_then_small": "swap", "swa_small_batch": "small_batch"}
    for method, start in starts.items():
        params = of_method(name, method)
        assert params.phase1 == of_method(name, start).phase1
        assert len(params.workers.seeds) == 1
        assert params.phase2.cycles == len(swap.workers.seeds) * swap.phase2.cycles
        assert params.phase2.epochs // params.phase2.cycles == swap.phase2.epochs
        first = of_method(name, start).phase1 if method != "swa_large_then_small" else swap.phase2
        last = 27 if name == "imagenet" else 0
        assert params.phase2.batch_size == by_epoch(first.batch_size)(last)
        assert params.phase2.shards == first.shards


@pytest.mark.parametrize("name", [name for name in NAMES if name != "imagenet"])
def test_swa_shares_its_peak_with_phase_2_and_lowers_that_of_large_batches_alike(name: str) -> None:
    params = recipe(name)
    small, large = (of_method(name, method).phase1.peak_lr for method in ("small_batch", "large_batch"))
    assert params.phase2.peak_lr and small and large
    peaks = {
        "swa_large_batch": large * params.phase2.peak_lr / small,
        "swa_large_then_small": params.phase2.peak_lr,
        "swa_small_batch": params.phase2.peak_lr,
    }
    assert {method: of_method(name, method).phase2.peak_lr for method in peaks} == pytest.approx(peaks)


def test_swa_on_imagenet_begins_its_cycles_where_the_last_line_of_the_rate_begins() -> None:
    for method, times in (("swa_small_batch", 1), ("swa_large_then_small", 1), ("swa_large_batch", 2)):
        phase2 = of_method("imagenet", method).phase2
        assert (phase2.peak_lr, phase2.lr_knots, phase2.first_epoch) == (times * PUBLISHED_RATES[25], None, 0)
        assert (phase2.image_size, phase2.min_scale) == (PUBLISHED_SIZES[27], PUBLISHED_SCALES[27])


# This project's own recipes


@pytest.mark.parametrize("method", ["swap", "large_batch", "small_batch", "swa_small_batch"])
def test_a_rule_for_leaving_in_params_yaml_ends_no_method_early(method: str) -> None:
    """Methods say when phase 1 ends by τ alone."""
    workspace: Any = read_sections(ROOT / "recipes/fashion-mini.yaml")
    workspace["phase1"] |= {"stop": "plateau", "patience": 1}
    with contextlib.chdir(ROOT):
        params = parse_params(read_methods("fashion-mini").params(method, 0, workspace))
    assert params.phase1.stop == "accuracy"
    assert params.phase1.stop_accuracy == (recipe("fashion-mini").phase1.stop_accuracy if method == "swap" else 100)


def test_a_method_may_have_a_rule_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/one.yaml").write_bytes((ROOT / "recipes/fashion-mini.yaml").read_bytes())
    methods = "swap: {}\nearly: {phase1: {stop: plateau, patience: 2}}\nwhole: {phase1: {stop_accuracy: 100}}\n"
    (tmp_path / "recipes/one.methods.yaml").write_text(methods)
    monkeypatch.chdir(tmp_path)
    found = read_methods("one")
    rules = {
        name: found.params(name, 0, read_sections(Path("recipes/one.yaml")))["phase1"].get("stop")
        for name in found.settings
    }
    assert rules == {"swap": None, "early": "plateau", "whole": None}


@pytest.mark.parametrize("name", ["cifar10-cpu", "tiny-imagenet-cpu"])
def test_the_cpu_recipes_read_ten_thousand_images_and_a_validation_set_from_a_folder(name: str) -> None:
    params = recipe(name)
    assert (params.data.name, params.data.train_images, params.data.validation_images) == ("imagefolder", 10_000, 5_000)
    assert (params.model.name, params.model.width) == ("resnet9", 16)


@pytest.mark.parametrize("name", ["fashion-mini", "cifar10-cpu", "tiny-imagenet-cpu"])
def test_no_method_of_a_small_recipe_drops_images(name: str) -> None:
    with contextlib.chdir(ROOT):
        methods = read_methods(name).settings
    for method in methods:
        params = of_method(name, method)
        for run in (params.phase1, params.phase2):
            assert isinstance(run.batch_size, int)
            assert (NUM_IMAGES[name] % run.batch_size, run.batch_size % run.shards) == (0, 0), method


# Shards, by arithmetic


NUM_IMAGES = {
    "cifar10": 50_000,
    "cifar10-cpu": 10_000,
    "cifar10-lars": 50_000,
    "cifar100": 50_000,
    "dawnbench": 50_000,
    "fashion-mini": 9_000,
    "fashion-mnist": 60_000,
    "imagenet": 1_281_167,
    "tiny-imagenet-cpu": 10_000,
}


@pytest.mark.parametrize(
    ("method", "phase"),
    [("swap", "phase1"), ("swap", "phase2"), ("small_batch", "phase1"), ("large_batch", "phase1")],
)
@pytest.mark.parametrize("name", NAMES)
def test_shards_split_an_epoch_without_overlap_and_without_loss(name: str, method: str, phase: str) -> None:
    params, num_images = of_method(name, method), NUM_IMAGES[name]
    run = getattr(params, phase)
    epochs, first_epoch = {
        "phase1": (params.phase1.max_epochs, 0),
        "phase2": (params.phase2.epochs, params.phase2.first_epoch),
    }[phase]
    size_at = by_epoch(run.batch_size, first_epoch=first_epoch)
    first_with_size = {size_at(epoch): epoch for epoch in reversed(range(epochs))}

    for batch_size, epoch in first_with_size.items():
        order = draw_epoch(seed=0, epoch=epoch, num_images=num_images, image_size=(32, 32)).order
        steps = steps_per_epoch(num_images, batch_size)
        shares = [
            order[batch_share(step, batch_size=batch_size, shard=shard, num_shards=run.shards)]
            for step in range(steps)
            for shard in range(run.shards)
        ]
        seen = torch.bincount(torch.cat(shares), minlength=num_images)

        assert {len(share) for share in shares} == {batch_size / run.shards}
        assert int(seen.max()) == 1
        assert 0 <= int((seen == 0).sum()) < batch_size
        assert int((seen == 0).sum()) == num_images % batch_size


def test_a_worker_of_imagenet_takes_5895_steps() -> None:
    phase2 = recipe("imagenet").phase2
    size_at = by_epoch(phase2.batch_size, first_epoch=22)
    steps = [steps_per_epoch(1_281_167, size_at(epoch)) for epoch in range(phase2.epochs)]
    assert steps == [714, 714, 714, 1251, 1251, 1251]


# swap use


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A project's recipes and params, without git."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "recipes", root / "recipes")
    shutil.copy(ROOT / "recipes" / "fashion-mini.yaml", root / "params.yaml")
    return root


@pytest.fixture
def committed(plain: Path) -> Path:
    """The same, committed."""
    git(plain, "init", "-q", "-b", "main")
    commit(plain)
    return plain


def run(folder: Path, *command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    # Git must not find a repository around the temporary folder, nor the settings of whoever runs the tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {
        "PYTHONPATH": str(ROOT),
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        **extra,
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def swap(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, "-m", "swap_pipeline.cli", *arguments)


def git(folder: Path, *arguments: str) -> None:
    done = run(folder, "git", "-c", "user.name=Test", "-c", "user.email=test@example.org", *arguments)
    assert done.returncode == 0, done.stderr


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "state")


def edit(folder: Path) -> bytes:
    path = folder / "params.yaml"
    path.write_text(path.read_text().replace("peak_lr: 0.8", "peak_lr: 0.7"))
    return path.read_bytes()


def is_one_error(done: subprocess.CompletedProcess[str]) -> bool:
    return (
        done.returncode == 1
        and done.stdout == ""
        and done.stderr.startswith("error: ")
        and len(done.stderr.splitlines()) == 1
    )


@pytest.mark.parametrize("name", NAMES)
def test_use_writes_the_recipe_byte_for_byte(plain: Path, name: str) -> None:
    done = swap(plain, "use", name)
    assert done.returncode == 0
    assert (plain / "params.yaml").read_bytes() == (ROOT / "recipes" / f"{name}.yaml").read_bytes()
    assert sorted(path.name for path in plain.iterdir()) == ["params.yaml", "recipes"]


def test_use_says_which_data_is_needed_and_what_comes_next(plain: Path) -> None:
    said = {name: swap(plain, "use", name).stdout for name in ("cifar10", "fashion-mini", "imagenet")}
    assert "cifar10, downloaded on the first run unless its official files are in data/raw" in said["cifar10"]
    assert "fashion-mini, in this repository" in said["fashion-mini"]
    assert (
        "your images, as data/imagenet/train/<class>/… and data/imagenet/test/<class>/… (or val/); not there"
        in said["imagenet"]
    )
    assert all("`swap plan`" in lines and "`dvc repro`" in lines for lines in said.values())


def test_use_does_not_miss_images_that_are_there(plain: Path) -> None:
    (plain / "data/imagenet/train").mkdir(parents=True)
    assert "not there yet" not in swap(plain, "use", "imagenet").stdout


def test_use_lists_every_recipe_in_one_line_and_marks_the_one_in_params_yaml(plain: Path) -> None:
    *lines, last = swap(plain, "use").stdout.splitlines()
    assert [line[2:].split()[0] for line in lines] == list(NAMES)
    assert [line for line in lines if line.startswith("* ")] == [
        "* fashion-mini       The default: a sixth of Fashion-MNIST, from this repository, "
        "in a few minutes on two CPU cores."
    ]
    assert last.startswith("params.yaml is fashion-mini;")


def test_use_marks_the_recipe_that_an_edited_params_yaml_came_from(plain: Path) -> None:
    swap(plain, "use", "cifar10")
    with (plain / "params.yaml").open("a") as file:
        file.write("# mine\n")
    lines = swap(plain, "use").stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("* ")] == ["cifar10"]
    assert lines[-1].startswith("params.yaml is cifar10, edited;")


@pytest.mark.parametrize(
    "content", ["recipe: my-own\n", "data: [1,\n", "", None], ids=["other", "broken", "empty", "none"]
)
def test_use_lists_recipes_whatever_params_yaml_is(plain: Path, content: str | None) -> None:
    (plain / "params.yaml").unlink()
    if content is not None:
        (plain / "params.yaml").write_text(content)
    lines = swap(plain, "use").stdout.splitlines()
    assert [line[0] for line in lines[:-1]] == [" "] * len(NAMES)
    assert lines[-1].startswith("params.yaml is none of these;")


def test_use_does_not_overwrite_edits_that_are_not_committed(committed: Path) -> None:
    edited = edit(committed)
    done = swap(committed, "use", "cifar10")
    assert is_one_error(done) and "--force" in done.stderr and "uncommitted edits" in done.stderr
    assert (committed / "params.yaml").read_bytes() == edited


def test_use_says_why_it_cannot_know_whether_edits_are_committed(committed: Path) -> None:
    edited = edit(committed)
    command = (sys.executable, "-m", "swap_pipeline.cli", "use", "cifar10")
    done = run(committed, *command, GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    assert is_one_error(done) and "--force" in done.stderr and "belongs to another user" in done.stderr
    assert (committed / "params.yaml").read_bytes() == edited


def test_staged_is_not_committed(committed: Path) -> None:
    edit(committed)
    git(committed, "add", "params.yaml")
    assert is_one_error(swap(committed, "use", "cifar10"))


def test_a_file_that_git_ignores_is_not_committed(committed: Path) -> None:
    git(committed, "rm", "-q", "--cached", "params.yaml")
    (committed / ".gitignore").write_text("params.yaml\n")
    commit(committed)
    edit(committed)
    assert is_one_error(swap(committed, "use", "cifar10"))


def test_use_with_force_overwrites_edits(committed: Path) -> None:
    edit(committed)
    assert swap(committed, "use", "cifar10", "--force").returncode == 0
    assert read_params(committed / "params.yaml").recipe == "cifar10"


def test_use_overwrites_edits_that_are_committed(committed: Path) -> None:
    edit(committed)
    commit(committed)
    assert swap(committed, "use", "cifar10").returncode == 0
    assert read_params(committed / "params.yaml").recipe == "cifar10"


def test_use_goes_from_recipe_to_recipe_without_a_commit_between(committed: Path) -> None:
    for name in ("cifar10", "imagenet", "fashion-mini"):
        assert swap(committed, "use", name).returncode == 0
    assert read_params(committed / "params.yaml").recipe == "fashion-mini"


def test_use_makes_a_params_yaml_that_is_missing(committed: Path) -> None:
    (committed / "params.yaml").unlink()
    assert swap(committed, "use", "cifar10").returncode == 0
    assert read_params(committed / "params.yaml").recipe == "cifar10"


def test_use_works_in_a_repository_without_commits(plain: Path) -> None:
    git(plain, "init", "-q")
    assert swap(plain, "use", "cifar10").returncode == 0
    (plain / "params.yaml").write_text("recipe: mine\n")
    assert is_one_error(swap(plain, "use", "cifar10"))


def test_use_works_in_a_project_that_is_a_folder_of_a_larger_repository(plain: Path) -> None:
    git(plain.parent, "init", "-q")
    edit(plain)
    commit(plain.parent)
    done = run(plain, sys.executable, "-m", "swap_pipeline.cli", "use", "cifar10", GIT_CEILING_DIRECTORIES="")
    assert done.returncode == 0
    assert read_params(plain / "params.yaml").recipe == "cifar10"


def test_use_works_without_git(committed: Path) -> None:
    use = (sys.executable, "-m", "swap_pipeline.cli", "use", "cifar10")
    assert run(committed, *use, PATH="").returncode == 0
    (committed / "params.yaml").write_text("recipe: mine\n")
    assert is_one_error(run(committed, *use, PATH=""))


def test_outside_of_git_anything_but_a_recipe_is_an_edit(plain: Path) -> None:
    edited = edit(plain)
    assert is_one_error(swap(plain, "use", "cifar10"))
    assert (plain / "params.yaml").read_bytes() == edited
    assert swap(plain, "use", "cifar10", "--force").returncode == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar", "did you mean cifar10 or cifar100"),
        ("CIFAR100", "did you mean cifar100"),
        ("recipes/imagenet.yaml", "did you mean imagenet or tiny-imagenet-cpu?"),
        ("fashion-minst", "did you mean fashion-mnist or fashion-mini?"),
        ("zzz", "known: cifar10, cifar10-cpu, cifar10-lars, cifar100, dawnbench, fashion-mini, fashion-mnist, im"),
        ("../params", "known: cifar10"),
        ("", "known: cifar10"),
    ],
)
def test_a_name_that_is_no_recipe_gets_the_closest_ones(plain: Path, name: str, words: str) -> None:
    before = (plain / "params.yaml").read_bytes()
    done = swap(plain, "use", name)
    assert is_one_error(done) and words in done.stderr
    assert (plain / "params.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [("data: {}\n", "is missing"), ("data: [1,\n", "is not valid YAML"), ("\xff\xfe", "is not valid YAML")],
)
def test_a_recipe_that_is_not_valid_is_named_and_not_written(plain: Path, content: str, words: str) -> None:
    (plain / "recipes" / "mine.yaml").write_bytes(content.encode("latin-1"))
    before = (plain / "params.yaml").read_bytes()
    done = swap(plain, "use", "mine")
    assert is_one_error(done) and "recipes/mine.yaml" in done.stderr and words in done.stderr
    assert (plain / "params.yaml").read_bytes() == before


def test_a_recipe_of_ones_own_is_listed_and_used_like_the_others(plain: Path) -> None:
    own = (plain / "recipes" / "cifar10.yaml").read_text().replace("recipe: cifar10", "recipe: mine")
    (plain / "recipes" / "mine.yaml").write_text("# My own.\n" + own)
    assert swap(plain, "use", "mine").returncode == 0
    assert "* mine               My own." in swap(plain, "use").stdout.splitlines()


@pytest.mark.parametrize("arguments", [(), ("cifar10",)])
def test_use_outside_of_the_projects_root_says_so(plain: Path, arguments: tuple[str, ...]) -> None:
    (plain / "stages").mkdir()
    done = swap(plain / "stages", "use", *arguments)
    assert is_one_error(done) and "root folder" in done.stderr
    assert list((plain / "stages").iterdir()) == []


def test_use_answers_without_torch(plain: Path) -> None:
    code = (
        "import sys; from swap_pipeline.cli.main import main; main(['use', 'cifar10'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert run(plain, sys.executable, "-c", code).returncode == 0
