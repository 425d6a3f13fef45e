"""`swap plan`: numbers against those worked out by hand, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from ruamel.yaml import YAML

from swap_pipeline.cli.plan import facts
from swap_pipeline.cli.plan.facts import data_facts, devices_here, network_facts, optimizer_bytes, planned_devices
from swap_pipeline.cli.plan.forecast import plan_params
from swap_pipeline.cli.plan.plan import DataFacts, Devices, NetworkFacts, Plan, RunPlan, make_plan
from swap_pipeline.cli.plan.text import text_of
from swap_pipeline.cli.plan.throughput import measure_throughput
from swap_pipeline.cli.plan.times import Forecast, Throughput, Times, expected_times
from swap_pipeline.config.params import Compute, Data, Model, Params
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import share_of_phase1, share_of_worker
from swap_pipeline.launch.jobs import Machine
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.report.durations import duration
from swap_pipeline.storage.tensor_files import TensorFile, write_tensors

RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if "." not in path.stem)
SVG = "{http://www.w3.org/2000/svg}"

CIFAR10 = DataFacts(
    name="cifar10", num_train=50_000, num_test=10_000, num_classes=10, channels=3, size=(32, 32), source=None
)
# Of ResNet-9 at width 64, except that an image costs 100 forward and 300 in training.
NETWORK = NetworkFacts(
    name="resnet9",
    num_parameters=6_573_120,
    gradient_bytes=26_292_480,
    state_bytes=26_310_464,
    num_batch_norms=8,
    flops={(32, 32): 100},
)
# The paper's CIFAR-10 experiment: section 5.1 and Table 5.
PAPER_CIFAR10 = {
    "phase1": {
        "batch_size": 4096,
        "shards": 8,
        "peak_lr": 1.2,
        "warmup_epochs": 36,
        "max_epochs": 150,
        "stop_accuracy": 98.0,
    },
    "phase2": {
        "batch_size": 512,
        "peak_lr": 0.12,
        "epochs": 30,
        "keep_epochs": [5, 10, 15, 20, 25],
    },
    "workers": {"seeds": [0, 1, 2, 3, 4, 5, 6, 7]},
    "phase3.batch_size": 512,
}


def tree_of(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = YAML(typ="safe", pure=True).load(path.read_text())
    return tree


def params_with(values: Mapping[str, Any]) -> Params:
    """The default params with some of them changed."""
    tree = tree_of(ROOT / "recipes" / "fashion-mini.yaml")
    for dotted, value in values.items():
        *sections, last = dotted.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[last] = copy.deepcopy(value)
    return parse_params(tree)


def plan_of(
    values: Mapping[str, Any],
    *,
    gpus: int = 8,
    data: DataFacts = CIFAR10,
    network: NetworkFacts = NETWORK,
    devices: Devices | None = None,
) -> Plan:
    """The paper's CIFAR-10 experiment with some values changed."""
    params = params_with({**PAPER_CIFAR10, **values})
    devices, state = devices or planned_devices(params, gpus), optimizer_bytes(params.optimizer, network)
    return make_plan(params, data=data, network=network, devices=devices, optimizer_bytes=state)


def at(images_per_second: float, size: tuple[int, int] = (32, 32)) -> Throughput:
    return Throughput(images_per_second=images_per_second, image_size=size, source="test", measured_on=None)


def rows(run: RunPlan) -> list[tuple[Any, ...]]:
    return [
        (p.first_epoch, p.last_epoch, p.first_rate, p.last_rate, p.batch_size, p.batch_per_shard, p.steps, p.samples)
        for p in run.stretches
    ]


# --- steps, samples, FLOPs, bytes


def test_the_papers_cifar10_run_is_counted_as_by_hand() -> None:
    plan = plan_of({})

    # 50,000 images are 12 whole batches of 4,096 and 97 of 512.
    assert (plan.phase1.steps, plan.phase1.samples) == (1_800, 7_372_800)
    assert (plan.worker.steps, plan.worker.samples) == (2_910, 1_489_920)
    assert (plan.phase1.devices, plan.worker.devices) == (8, 1)
    assert (plan.num_workers, plan.slots, plan.rounds) == (8, 8, 1)
    # 98 batches, the last of them short; one of 8 processes has 13 of them.
    assert (plan.phase3.batches, plan.phase3.samples, plan.phase3.samples_of_busiest) == (98, 50_000, 6_656)
    assert plan.phase3.num_models == 8
    assert plan.phase1.flops == 2_211_840_000
    assert plan.worker.flops == 446_976_000
    assert plan.phase3.flops == 5_000_000
    assert plan.flops == 5_792_648_000


def test_learning_rate_and_batch_size_are_listed_by_straight_parts() -> None:
    plan = plan_of({})
    assert rows(plan.phase1) == [
        (0, 36, 0, 1.2, 4096, 512, 432, 1_769_472),
        (36, 150, 1.2, 0, 4096, 512, 1_368, 5_603_328),
    ]
    assert rows(plan.worker) == [(0, 30, 0.12, 0, 512, 512, 2_910, 1_489_920)]


def test_cycles_begin_anew_at_the_peak_and_each_leaves_a_model() -> None:
    plan = plan_of({"phase2.cycles": 2, "phase2.epochs": 40, "phase2.peak_lr": 0.05, "phase2.warmup_epochs": 5})
    assert [row[:4] for row in rows(plan.worker)] == [
        (0, 5, 0, 0.05),
        (5, 20, 0.05, 0),
        (20, 25, 0, 0.05),
        (25, 40, 0.05, 0),
    ]
    assert plan.phase3.num_models == 16
    assert plan.num_checkpoints == 18
    assert plan.num_kept == 8 * 4  # of 5, 10, 15, 20 and 25, the 20th ends a cycle


def test_batch_sizes_by_epoch_count_their_own_steps() -> None:
    small = DataFacts(**{**vars(CIFAR10), "num_train": 1_000})
    plan = plan_of(
        {
            "phase1.batch_size": [[0, 100], [2, 30]],
            "phase1.max_epochs": 5,
            "phase1.warmup_epochs": 1,
            "phase1.shards": 2,
            "phase2.batch_size": 64,
        },
        gpus=2,
        data=small,
    )
    # 10 steps an epoch, then 33
    assert [row[4:] for row in rows(plan.phase1)] == [
        (100, 50, 10, 1_000),
        (100, 50, 10, 1_000),
        (30, 15, 99, 2_970),
    ]
    assert [row[:2] for row in rows(plan.phase1)] == [(0, 1), (1, 2), (2, 5)]
    assert [row[3] for row in rows(plan.phase1)] == pytest.approx([1.2, 0.9, 0])
    assert (plan.phase1.steps, plan.phase1.samples) == (119, 4_970)


@pytest.mark.parametrize(("warmup", "steps"), [(2.5, 30), (0.3, 4), (0.25, 3), (1 / 3, 4)])
def test_a_step_belongs_to_the_part_in_which_it_begins(warmup: float, steps: int) -> None:
    plan = plan_of({"phase1.warmup_epochs": warmup})  # 12 steps an epoch
    assert [part.steps for part in plan.phase1.stretches] == [steps, 1_800 - steps]


def test_imagenet_on_16_gpus_is_counted_as_by_hand() -> None:
    params = read_params(ROOT / "recipes" / "imagenet.yaml")
    plan = plan_params(params, planned_devices(params, 16))

    # 1,281,167 images: 156 batches of 8,192, 357 of 3,584, 714 of 1,792, 1,251 of 1,024
    assert rows(plan.phase1) == [
        (0, 7, 2.0, 4.0, 8192, 512, 1_092, 8_945_664),
        (7, 13, 4.0, 0.5, 8192, 512, 936, 7_667_712),
        (13, 22, 0.875, 0.0875, 3584, 224, 3_213, 11_515_392),
    ]
    assert rows(plan.worker) == [
        (0, 3, 0.04375, 0.004375, 1792, 224, 2_142, 3_838_464),
        (3, 6, 0.0025, 0.00025, 1024, 128, 3_753, 3_843_072),
    ]
    assert [part.image_size for part in plan.worker.stretches] == [(224, 224), (288, 288)]
    assert (plan.worker.devices, plan.slots, plan.rounds) == (8, 2, 1)
    assert plan.phase3.image_size == (288, 288)
    # 10,009 whole batches of 128 and one of 15; 626 of them, at most, on one of 16 devices
    assert (plan.phase3.batches, plan.phase3.samples_of_busiest) == (10_010, 80_128)
    assert plan.network.num_parameters == 25_557_032
    # 4.1 billion multiplications with an addition each at 224 pixels; three times as much in training
    assert plan.network.flops[224, 224] == pytest.approx(8.2e9, rel=0.01)


def test_resnet9_has_the_parameters_flops_and_bytes_of_the_paper() -> None:
    model = Model(name="resnet9", width=64, pretrained=False, zero_init_last_gamma=False)
    facts = network_facts(model, channels=3, num_classes=10, sizes=[(32, 32)])

    assert facts.num_parameters == 6_573_120
    assert facts.gradient_bytes == 26_292_480
    # 8 batch norms with 2,240 channels: mean and variance in float32, a counter in int64
    assert facts.state_bytes == 26_292_480 + 2 * 4 * 2_240 + 8 * 8
    assert facts.num_batch_norms == 8
    # First layer 3·64·9·32², five times 64·128·9·32², linear layer 512·10; two operations each.
    assert facts.flops[32, 32] == 758_523_904


def test_a_checkpoint_and_a_snapshot_take_the_planned_bytes(tmp_path: Path) -> None:
    params = read_params(ROOT / "params.yaml")
    network = new_network(describe_network(params.model, channels=1, num_classes=10), seed=0)
    write_tensors(tmp_path / "model.safetensors", network.state_dict(), {})
    on_disk = sum(spec.num_bytes for spec in TensorFile(tmp_path / "model.safetensors").layout.values())

    plan = plan_params(params, planned_devices(params, 2))

    assert plan.checkpoint_bytes == on_disk
    assert plan.num_checkpoints == 1 + 4 + 1
    assert plan.snapshot_bytes == on_disk + 4 * sum(p.numel() for p in network.parameters())


def test_memory_is_weights_gradients_and_momentum() -> None:
    assert plan_of({}).memory_bytes == 78_895_424
    without = plan_of({"optimizer.momentum": 0.0, "optimizer.nesterov": False})
    assert without.memory_bytes == 52_602_944
    assert without.snapshot_bytes == 26_310_464
    of_mean = plan_of({"phase1.ema_decay": 0.99})
    assert of_mean.memory_bytes == 78_895_424 + 26_310_464
    assert of_mean.snapshot_bytes == 26_310_464 + 26_292_480 + 26_310_464


@pytest.mark.parametrize(
    ("gpus", "shards", "slots", "rounds"),
    [
        *((8, 1, 8, 1), (16, 1, 8, 1), (4, 1, 4, 2), (3, 1, 3, 3), (1, 1, 1, 8)),
        *((8, 4, 2, 4), (4, 4, 1, 8), (3, 4, 1, 8), (6, 4, 1, 8), (1, 4, 1, 8)),
    ],
)
def test_workers_without_a_slot_wait_for_the_next_round(gpus: int, shards: int, slots: int, rounds: int) -> None:
    plan = plan_of({"phase2.shards": shards}, gpus=gpus)
    assert (plan.slots, plan.rounds) == (slots, rounds)
    said = any(f"only {slots} of" in note and f"{rounds} round" in note for note in plan.notes)
    assert said == (rounds > 1)


# --- seconds


def test_seconds_follow_from_images_per_second() -> None:
    times = expected_times(plan_of({}), at(1_000))

    assert times.phase1.seconds == pytest.approx(921.6)
    assert times.phase1.device_seconds == pytest.approx(7_372.8)
    assert times.worker.seconds == times.phase2.seconds == pytest.approx(1_489.92)
    assert times.phase2.device_seconds == pytest.approx(11_919.36)
    # 6,656 images on the busiest device, forward only: a third
    assert times.phase3.seconds == pytest.approx(2.218_667)
    assert times.total.seconds == times.critical_path == pytest.approx(2_413.738_667)


def test_rounds_of_workers_take_their_time_one_after_another() -> None:
    times = expected_times(plan_of({}, gpus=4), at(1_000))
    assert times.phase2.seconds == pytest.approx(2 * 1_489.92)
    assert times.phase2.device_seconds == pytest.approx(8 * 1_489.92)
    assert times.total.seconds == pytest.approx(times.phase1.seconds + times.phase2.seconds + times.phase3.seconds)
    assert times.critical_path == pytest.approx(times.phase1.seconds + 1_489.92 + times.phase3.seconds)


def test_other_image_sizes_take_time_as_they_take_flops() -> None:
    files = DataFacts(**{**vars(CIFAR10), "size": None, "name": "imagefolder"})
    sizes = {"image_size": [[0, 32], [75, 64]]}
    network = NetworkFacts(
        **{
            **vars(NETWORK),
            "flops": {(32, 32): 100, (64, 64): 400},
        }
    )
    phase1 = {**PAPER_CIFAR10["phase1"], **sizes}
    plan = plan_of({"phase1": phase1, "phase2.image_size": 64}, data=files, network=network)

    times = expected_times(plan, at(1_000, (32, 32)))

    # 75 epochs of 12 · 4,096 images at full speed, 75 at a quarter of it, on 8 devices
    assert times.phase1.seconds == pytest.approx(460.8 + 4 * 460.8)
    assert times.worker.seconds == pytest.approx(4 * 1_489.92)
    assert times.phase3.seconds == pytest.approx(6_656 * 400 / 300 / 1_000)


def test_threads_of_a_cpu_share_the_work_of_their_process() -> None:
    machine = Machine(device_type="cpu", devices=tuple("01234567"), cores=8)
    cores = Devices(
        kind="CPU core",
        count=8,
        phase1=share_of_phase1(machine, shards=2),
        worker=share_of_worker(machine, shards=1),
        max_workers=None,
    )
    plan = plan_of({"phase1.shards": 2}, devices=cores)
    times = expected_times(plan, at(1_000))
    assert plan.phase1.stretches[0].batch_per_shard == 2_048
    assert (plan.phase1.processes, plan.phase1.devices) == (2, 8)
    assert times.phase1.seconds == pytest.approx(921.6)
    # 49 of 98 batches for each process, which has four cores
    assert times.phase3.seconds == pytest.approx(49 * 512 / 3 / 4 / 1_000)


@pytest.mark.parametrize(("gpus", "processes"), [(1, 1), (2, 2), (5, 4), (8, 8), (16, 8)])
def test_fewer_gpus_than_shards_compute_the_same_in_more_time(gpus: int, processes: int) -> None:
    plan = plan_of({}, gpus=gpus)
    assert (plan.phase1.processes, plan.phase1.devices, plan.phase3.processes) == (processes,) * 3
    assert rows(plan.phase1) == rows(plan_of({}).phase1)  # 512 images a shard
    times = expected_times(plan, at(1_000))
    assert times.phase1.seconds == pytest.approx(7_372.8 / processes)
    assert times.phase1.device_seconds == pytest.approx(7_372.8)


# --- no phase 2


NO_PHASE2 = {"phase2.epochs": 0, "workers.seeds": [0]}


def test_without_phase_2_there_is_phase_1_and_a_model_that_stays_as_it_is() -> None:
    plan = plan_of(NO_PHASE2)
    assert plan.phase1 == plan_of({}).phase1
    assert (plan.worker.epochs, plan.worker.steps, plan.worker.flops, plan.worker.stretches) == (0, 0, 0, ())
    assert (plan.phase3.num_models, plan.phase3.batches, plan.phase3.samples) == (1, 0, 0)
    assert (plan.num_checkpoints, plan.num_kept) == (3, 0)
    assert [note for note in plan.notes if "phase 2" in note] == []
    times = expected_times(plan, at(1_000))
    assert (times.worker.seconds, times.phase3.seconds) == (0, 0)
    assert times.total.seconds == times.critical_path == pytest.approx(921.6)


@pytest.mark.parametrize(
    ("values", "batches"),
    [
        ({**NO_PHASE2, "phase1.ema_decay": 0.99}, 98),
        ({**NO_PHASE2, "phase2.ema_decay": 0.99}, 0),  # which trains nothing
        ({"workers.seeds": [0]}, 0),
        ({"workers.seeds": [0], "phase2.ema_decay": 0.99}, 98),
        ({"workers.seeds": [0], "phase1.ema_decay": 0.99}, 0),  # where phase 2 starts
        ({"workers.seeds": [0], "phase2.cycles": 2}, 98),
    ],
)
def test_a_single_model_has_a_statistics_pass_only_if_it_is_a_mean(values: dict[str, Any], batches: int) -> None:
    assert plan_of(values).phase3.batches == batches


def test_selecting_workers_takes_a_statistics_pass_for_each() -> None:
    one, greedy = plan_of({}), plan_of({"phase3.select": "greedy"})
    assert (one.phase3.passes, greedy.phase3.passes) == (1, 8)
    assert greedy.phase3.samples == 8 * one.phase3.samples == 8 * 50_000
    assert greedy.phase3.batches == 8 * 98
    seconds = [expected_times(plan, at(1_000)).phase3.seconds for plan in (one, greedy)]
    assert seconds[1] == pytest.approx(8 * seconds[0])
    assert "phase 3, 8 models 8 ≤ 8 784 400,000" in re.sub(r" +", " ", text_of(forecast(greedy)))


def test_a_warm_up_of_a_phase_2_without_epochs_is_ignored() -> None:
    assert plan_of({**NO_PHASE2, "phase2.warmup_epochs": 3}).worker.steps == 0


def test_the_text_leaves_out_a_phase_2_that_there_is_not() -> None:
    plan = plan_of(NO_PHASE2)
    flat = re.sub(r" +", " ", text_of(forecast(plan)))
    assert "phase 2" not in flat
    assert "phase 3, 1 model 8 – 0 0 0" in flat


# --- more of seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (725, "12 min 05 s"),
        (3_599.6, "1 h 00 min"),
        (14_117, "3 h 55 min"),
        (3_600_000, "1,000 h 00 min"),
    ],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_measured_throughput_is_positive_and_says_what_was_measured() -> None:
    threads = torch.get_num_threads()
    params = read_params(ROOT / "params.yaml")
    measured = measure_throughput(
        Model(name="resnet9", width=2, pretrained=False, zero_init_last_gamma=False),
        channels=1,
        num_classes=10,
        image_size=(28, 28),
        batch_size=6,
        optimizer=params.optimizer,
        compute=Compute(precision="fp32", channels_last=True, compile=False, deterministic=True),
    )
    assert measured.images_per_second > 0
    assert measured.image_size == (28, 28)
    assert "batches of 6" in measured.source and "fp32" in measured.source
    assert measured.measured_on in ("GPU", "CPU core")
    assert torch.get_num_threads() == threads


# --- what is refused, and what is said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"phase1.batch_size": 50_400}, "phase1.batch_size is 50400, more than the 50,000 training images: lower it"),
        ({"phase2.batch_size": [[0, 512], [9, 60_000]]}, "phase2.batch_size is 60000, more than the 50,000"),
        ({"phase1.image_size": 32}, "phase1.image_size has no effect on images in memory, 32×32 pixels"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SwapError) as refused:
        plan_of(values)
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_batch_of_all_images_is_one_step() -> None:
    assert plan_of({"phase1.batch_size": 50_000}).phase1.steps == 150


def test_images_in_files_need_a_size() -> None:
    files = DataFacts(**{**vars(CIFAR10), "size": None})
    with pytest.raises(SwapError, match=r"phase1\.image_size is missing"):
        plan_of({}, data=files)


def test_few_images_a_shard_are_noted_where_there_is_batch_norm() -> None:
    few = {"phase2.batch_size": 64, "phase2.shards": 8, "workers.seeds": [0]}
    without = NetworkFacts(**{**vars(NETWORK), "num_batch_norms": 0})
    assert any("phase2: 8 images per shard" in note for note in plan_of(few, gpus=1).notes)
    assert not any("per shard" in note for note in plan_of({**few, "phase2.batch_size": 128}).notes)
    assert not any("per shard" in note for note in plan_of(few, network=without).notes)


POST_LOCAL = {"phase1.sync_steps": [[0, 1], [20, 4], [100, 1000]]}


def test_what_local_sgd_saves_is_counted_as_by_hand() -> None:
    """50,000 images are 12 batches of 4,096: 12, 3 or 1 exchanges an epoch."""
    plan = plan_of(POST_LOCAL)
    gradient, both = 26_292_480, 2 * 26_292_480
    assert [(part.first_epoch, part.last_epoch, part.steps, part.exchanges) for part in plan.local_epochs] == [
        (20, 100, 12, 3),
        (100, 150, 12, 1),
    ]
    assert [part.bytes_sent for part in plan.local_epochs] == [3 * both, both]
    assert [part.bytes_without for part in plan.local_epochs] == [12 * gradient] * 2
    assert (
        "phase 1, epochs 20–100: 3 exchanges an epoch instead of 12, of 158 MB instead of 316 MB from each rank"
        in plan.notes
    )
    plain = {**POST_LOCAL, "optimizer.momentum": 0, "optimizer.nesterov": False}
    assert [part.bytes_sent for part in plan_of(plain).local_epochs] == [3 * gradient, gradient]


def test_in_local_sgd_a_device_with_several_shards_has_weights_and_momentum_of_each() -> None:
    gradient = 26_292_480
    assert plan_of(POST_LOCAL, gpus=8).memory_bytes == plan_of({}, gpus=8).memory_bytes
    assert plan_of(POST_LOCAL, gpus=2).memory_bytes == plan_of({}, gpus=2).memory_bytes + 4 * 2 * gradient
    alone = plan_of(POST_LOCAL, gpus=1)
    assert "phase 1 has one rank, so local SGD (phase1.sync_steps) has no exchanges to save" in alone.notes
    assert not any("sync_steps" in note or "exchange" in note for note in plan_of({}, gpus=1).notes)


def test_without_batch_norm_phase_3_only_averages() -> None:
    plan = plan_of({}, network=NetworkFacts(**{**vars(NETWORK), "num_batch_norms": 0}))
    assert (plan.phase3.batches, plan.phase3.samples, plan.phase3.flops) == (0, 0, 0)
    assert expected_times(plan, at(1_000)).phase3.seconds == 0
    assert any("no batch norm: phase 3 only averages" in note for note in plan.notes)


def test_one_image_that_is_left_joins_the_batch_before_it() -> None:
    odd = DataFacts(**{**vars(CIFAR10), "num_train": 51_201})
    assert plan_of({}, data=odd).phase3.batches == 100


# --- networks, data and devices that are not there


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("torchvision:vit_b_16", 32, "torchvision:vit_b_16 cannot be trained on images of 3×32×32"),
        ("resnet9", 4, "resnet9 halves its images three times: 4×4 pixels are too few"),
    ],
)
def test_images_that_do_not_fit_the_network_are_refused(name: str, size: int, words: str) -> None:
    width = 2 if name == "resnet9" else None
    model = Model(name=name, width=width, pretrained=False, zero_init_last_gamma=False)
    with pytest.raises(SwapError) as refused:
        network_facts(model, channels=3, num_classes=10, sizes=[(size, size)])
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_network_that_needs_real_values_is_planned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_values.py").write_text(
        "import torch\n"
        "def make(num_classes, channels):\n"
        "    assert torch.linspace(0, 1, 3)[2].item() == 1\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * 64, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = Model(name="needs_values:make", pretrained=False, zero_init_last_gamma=False)
    facts = network_facts(model, channels=3, num_classes=10, sizes=[(8, 8)])
    assert facts.num_parameters == 1_930
    assert facts.flops[8, 8] == 3_840
    assert facts.num_batch_norms == 0


def make_folder(root: Path, *, train: int, test: int, classes: int, sizes: list[tuple[int, int]], mode: str) -> None:
    """So many images a class, all links to a few files."""
    root.mkdir(parents=True)
    for index, (height, width) in enumerate(sizes):
        shape = (height, width) if mode == "L" else (height, width, 3)
        Image.fromarray(np.full(shape, 7 * index, dtype=np.uint8)).save(root / f"{index}.png")
    for split, count in (("train", train), ("test", test)):
        for label in range(classes):
            folder = root / split / f"class_{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                os.link(root / f"{index % len(sizes)}.png", folder / f"{index}.png")


def folder_data(root: Path, **changes: Any) -> Data:
    data = params_with({"data.name": "imagefolder", "data.root": str(root), "data.validation_images": 0}).data
    return Data(**{**vars(data), **changes})


def test_a_folder_is_counted_and_looked_at(tmp_path: Path) -> None:
    make_folder(tmp_path / "grey", train=7, test=2, classes=3, sizes=[(20, 24)], mode="L")
    make_folder(tmp_path / "mixed", train=7, test=2, classes=3, sizes=[(20, 24), (20, 20)], mode="RGB")

    grey = data_facts(folder_data(tmp_path / "grey"))
    few = data_facts(folder_data(tmp_path / "grey", train_images=10))
    mixed = data_facts(folder_data(tmp_path / "mixed"))

    assert (grey.num_train, grey.num_test, grey.num_classes, grey.channels, grey.size) == (21, 6, 3, 1, (20, 24))
    assert (few.num_train, few.num_test) == (10, 6)
    assert (mixed.num_train, mixed.channels, mixed.size) == (21, 3, None)


def test_imagenets_folder_counts_where_it_is_there(tmp_path: Path) -> None:
    make_folder(tmp_path / "part", train=7, test=2, classes=3, sizes=[(20, 24), (20, 20)], mode="L")
    (tmp_path / "part" / "test").rename(tmp_path / "part" / "val")
    (tmp_path / "part" / "test").mkdir()
    (tmp_path / "part" / "0.png").rename(tmp_path / "part" / "test" / "0.png")  # as published: without classes
    part = data_facts(folder_data(tmp_path / "part", name="imagenet"))
    whole = data_facts(folder_data(tmp_path / "nowhere", name="imagenet"))
    assert (part.num_train, part.num_test, part.num_classes, part.channels, part.size) == (21, 6, 3, 3, None)
    assert (whole.num_train, whole.num_test, whole.num_classes) == (1_281_167, 50_000, 1_000)
    assert (whole.channels, whole.size) == (3, None)


def test_a_folder_of_too_many_bytes_is_read_from_its_files(tmp_path: Path) -> None:
    make_folder(tmp_path / "images", train=7, test=2, classes=3, sizes=[(20, 24)], mode="RGB")
    num_bytes = 27 * 3 * 20 * 24
    fits = data_facts(folder_data(tmp_path / "images", max_gb_in_memory=num_bytes / 1e9))
    above = data_facts(folder_data(tmp_path / "images", max_gb_in_memory=(num_bytes - 1) / 1e9))
    assert fits.size == (20, 24)
    assert above.size is None


def test_data_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    cases = {
        "nowhere' which does not exist": folder_data(Path("nowhere")),
        "did you mean cifar10": folder_data(tmp_path, name="cifar-10"),
        "data.train_images is 60000, but cifar10 has 50000": folder_data(tmp_path, name="cifar10", train_images=60_000),
    }
    for words, data in cases.items():
        with pytest.raises(SwapError) as refused:
            data_facts(data)
        assert words.split("' ")[-1] in str(refused.value)


@pytest.mark.parametrize(
    ("device_type", "num_devices", "cores", "environment", "expected"),
    [
        ("cuda", 4, 32, {}, ("GPU", 4, 4, 4, 4)),
        ("cuda", 4, 32, {"SWAP_NPROC": "2", "SWAP_SLOTS": "3"}, ("GPU", 4, 2, 2, 3)),
        ("cpu", 8, 8, {}, ("CPU core", 8, 8, 8, 8)),
        ("cpu", 8, 8, {"SWAP_NPROC": "3"}, ("CPU core", 8, 2, 8, 8)),
        ("cpu", 2, 2, {"SWAP_NPROC": "4"}, ("CPU core", 2, 4, 2, 2)),
        ("cpu", 1, 1, {}, ("CPU core", 1, 1, 1, 1)),
    ],
)
def test_this_machine_is_used_as_the_pipeline_would_use_it(
    device_type: str,
    num_devices: int,
    cores: int,
    environment: dict[str, str],
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SWAP_NPROC", "SWAP_SLOTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    machine = Machine(device_type=device_type, devices=tuple(map(str, range(num_devices))), cores=cores)
    monkeypatch.setattr(facts, "this_machine", lambda: machine)
    here = devices_here(params_with(PAPER_CIFAR10))
    assert (here.kind, here.count, here.phase1.processes, here.phase1.num_devices, here.max_workers) == expected
    assert here.worker.processes == 1


# --- every recipe


def value_at(given: Any, epoch: int) -> Any:
    """Of `[[epoch, value], …]`, the value of the last epoch that is not later."""
    return [value for first, value in given if first <= epoch][-1] if isinstance(given, list) else given


def steps_by_hand(section: dict[str, Any], epochs: int, num_train: int) -> int:
    first = section.get("first_epoch", 0)
    return sum(num_train // value_at(section["batch_size"], first + epoch) for epoch in range(epochs))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree, params = tree_of(path), read_params(path)
    if params.data.name == "imagefolder":
        make_folder(Path(params.data.root), train=1_500, test=1, classes=10, sizes=[(32, 32)], mode="RGB")

    plan = plan_params(params, planned_devices(params, tree["phase1"]["shards"]))
    times = expected_times(plan, at(1_000, plan.phase1.stretches[0].image_size))

    num_train = plan.data.num_train
    assert plan.phase1.steps == steps_by_hand(tree["phase1"], tree["phase1"]["max_epochs"], num_train)
    assert plan.worker.steps == steps_by_hand(tree["phase2"], tree["phase2"]["epochs"], num_train)
    assert plan.phase1.processes == tree["phase1"]["shards"]
    assert plan.phase3.num_models == len(tree["workers"]["seeds"]) * tree["phase2"].get("cycles", 1)
    for run in (plan.phase1, plan.worker):
        edges = [part.first_epoch for part in run.stretches] + [run.stretches[-1].last_epoch]
        assert edges == sorted(set(edges)) and (edges[0], edges[-1]) == (0, run.epochs)
    assert 0 < times.critical_path < float("inf")
    lines = text_of(Forecast(title=str(path.name), plan=plan, throughput=at(1_000), times=times)).splitlines()
    assert max(map(len, lines)) <= 80


# --- what people see


def forecast(plan: Plan, times: Times | None = None) -> Forecast:
    return Forecast(title="a plan", plan=plan, throughput=at(1_000), times=times or expected_times(plan, at(1_000)))


def test_the_text_shows_schedules_work_and_time_side_by_side() -> None:
    text = text_of(forecast(plan_of({}, gpus=4)))
    flat = re.sub(r" +", " ", text)
    for line in (
        "a plan, on 4 GPUs",
        "phase 1 4 ≤ 150 1,800 7,372,800 2.21 G",
        "phase 2, one worker 1 30 2,910 1,489,920 447 M",
        "phase 2, 8 workers 4 30 23,280 11,919,360 3.58 G",
        "phase 3, 8 models 4 1 98 50,000 5.00 M",
        "phase 1 0–36 0 → 1.2 4,096 512 32×32 432",
        "phase 2, 8 workers in 2 rounds 49 min 40 s 3 h 19 min",
        "network resnet9: 6,573,120 parameters",
        "disk 26.3 MB per checkpoint, 263 MB for all 10 and 1.05 GB for 40 kept",
    ):
        assert line in flat
    assert "\N{NO-BREAK SPACE}" not in text


def test_a_speed_that_was_measured_on_something_else_is_named_as_such() -> None:
    plan = plan_of({})
    core = Throughput(images_per_second=5.5, image_size=(32, 32), source="one core", measured_on="CPU core")
    text = text_of(Forecast(title="a plan", plan=plan, throughput=core, times=expected_times(plan, core)))
    assert "at 5.50 images/s per device at 32×32 px (one core)" in " ".join(text.split())
    assert "That was a CPU core, not a GPU: pass --images-per-second" in " ".join(text.split())
    assert "That was" not in text_of(forecast(plan))


def swap_plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    foreign = ("SWAP_", "DVC_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return subprocess.run(
        [sys.executable, "-m", "swap_pipeline.cli", "plan", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_swap_plan_needs_neither_data_nor_gpus(tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes" / "cifar10.yaml")
    done = swap_plan(tmp_path, "--params", recipe, "--gpus", "8", "--images-per-second", "5000", "--json")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["network"]["num_parameters"] == 6_573_120
    assert numbers["network"]["flops"]["32×32"] == 758_523_904
    assert numbers["phase1"]["steps"] == 12 * tree_of(Path(recipe))["phase1"]["max_epochs"]
    assert numbers["throughput"]["images_per_second"] == 5_000
    assert numbers["times"]["phase1"]["seconds"] == pytest.approx(numbers["phase1"]["samples"] / 40_000)


@pytest.mark.long
def test_swap_plan_measures_this_machine_and_fits_a_pipe(tmp_path: Path) -> None:
    done = swap_plan(tmp_path, "--params", str(ROOT / "recipes" / "fashion-mini.yaml"))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "measured here" in done.stdout
    assert "critical path" in done.stdout


def test_swap_plan_refuses_in_one_line(tmp_path: Path) -> None:
    done = swap_plan(tmp_path, "--params", "nowhere.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "nowhere.yaml not found" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


FORK = {
    "phase1.stop": "fork",
    "phase1.fork_every": 20,
    "phase1.forks": 4,
    "phase1.fork_steps": 20,
    "phase1.fork_batch_size": 500,
    "phase1.fork_lr": 0.1,
}


@pytest.mark.parametrize(("gpus", "forks_of_busiest"), [(1, 4), (2, 2), (8, 1)])
def test_fork_tests_are_counted_as_by_hand(gpus: int, forks_of_busiest: int) -> None:
    """150 epochs, 36 of them warm-up: tests after 56, 76, 96, 116 and 136, each of 4 forks with 20 steps of 500."""
    data = replace(CIFAR10, num_train=45_000, num_validation=5_000)
    plan, without = (plan_of({"data.validation_images": 5_000, **more}, gpus=gpus, data=data) for more in (FORK, {}))

    forks = plan.forks
    assert (forks.tests, forks.steps, forks.images) == (5, 80, 40_000)
    # Three passes for an image that is trained on, one for one of the statistics or of the 5,000 for validation.
    assert forks.flops == 100 * (4 * (30_000 + 5_000) + 10_000 + gpus * 5_000)
    busiest = forks_of_busiest * (30_000 + 5_000) + 10_000 // gpus + 5_000
    assert forks.flops_of_busiest == 100 * busiest
    more, less = (expected_times(each, at(1000)) for each in (plan, without))
    assert more.phase1.seconds - less.phase1.seconds == pytest.approx(5 * busiest / 3 / 1000)
    assert more.critical_path - less.critical_path == pytest.approx(5 * busiest / 3 / 1000)
    assert more.phase1.device_seconds - less.phase1.device_seconds == pytest.approx(gpus * 5 * busiest / 3 / 1000)
    assert plan.flops - without.flops == 5 * forks.flops
    lines = text_of(Forecast(title="a plan", plan=plan, throughput=at(1000), times=more)).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("phase 1, fork tests")]
    assert row[4:9] == [str(gpus), "≤", "5", "400", "200,000"]
    assert "fork tests" not in text_of(Forecast(title="", plan=without, throughput=at(1000), times=less))


def test_a_fork_trains_for_an_epoch_at_most() -> None:
    data = replace(CIFAR10, num_train=5_000, num_validation=1_000)
    plan = plan_of({"data.validation_images": 1_000, **FORK, "phase1.fork_steps": 200}, data=data)
    assert plan.forks.steps == 4 * 10
