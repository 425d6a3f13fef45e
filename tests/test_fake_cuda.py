"""The CUDA path without a GPU: the real code on CUDA tensors that have no memory (`fake_cuda.py`).

What can be seen so: that everything runs on one device, what the host reads from it, how many operations a step has,
that tensors are laid out as CUDA's kernels want them. What cannot: any value, and any time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_cuda import GPU, call, fake_cuda, training_step, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no fake CUDA: {why_not()}")

PRECISIONS = ("fp32", "bf16", "fp16")
BUDGET = {"fp32": 100, "bf16": 130, "fp16": 132}
"""operations in a step of ResNet-9, each of them at least one kernel launch"""
# All that the host may wait for. Reads in the course of an epoch are the guard's, once in 50 steps.
READS_OF_TRAINING = {
    "training/sgd.py: flags = self._flags.tolist()",
    "training/loop.py: loss_sum, hits, *squares = self._group.sum(torch.cat([tally.sums(), begun.squares])).tolist()",
    "engine/evaluation.py: loss_sum, hits, top5_hits = group.sum(sums).tolist()",
    "training/resuming.py: of_ranks = group.gather(own).tolist()",
}
READS_OF_SCALING = {"engine/precision.py: return self._scaler.state_dict()"}


def everything() -> dict[str, Any]:
    """In the process with the preload: all that the tests below look at."""
    os.environ["SWAP_SNAPSHOT_SECONDS"] = "0"  # one after the epoch, however quick it was
    found: dict[str, Any] = {}
    for precision, channels_last in itertools.product(PRECISIONS, (True, False)):
        key = f"{precision} {'channels last' if channels_last else 'channels first'}"
        found[f"train {key}"] = training_step(precision=precision, channels_last=channels_last, steps=17)
        found[f"look {key}"] = _passes(precision, channels_last)
    found["train auto"] = training_step(precision="auto", steps=4)
    found["train shards"] = training_step(precision="bf16", shards=4, steps=4)
    found["train mean"] = training_step(precision="bf16", ema_decay=0.99, steps=4)
    with fake_cuda(bf16=False):
        from swap_pipeline.engine.precision import resolve

        found["auto without bf16"] = resolve("auto", GPU)
    with fake_cuda():
        found["auto with bf16"] = resolve("auto", GPU)
    found["mixed"] = _mixed()
    return found


def _mixed() -> str:
    """What a tensor that was left on the host comes to."""
    try:
        with fake_cuda():
            torch.zeros(2, device=GPU) + torch.zeros(2)
    except Exception as error:
        return str(error)
    return ""


def _images(count: int = 64) -> Any:
    from swap_pipeline.data.images import Images

    pixels = torch.zeros(count, 3, 32, 32, dtype=torch.uint8, device=GPU)
    scale = torch.ones(1, 3, 1, 1, device=GPU)
    return Images(pixels=pixels, labels=torch.zeros(count, dtype=torch.int64, device=GPU), mean=scale, std=scale)


def _passes(precision: Any, channels_last: bool) -> dict[str, Any]:
    """What is read in an evaluation, a pass for statistics, a mean gradient, a landscape point, batches of files."""
    from swap_pipeline.analysis import landscape_job
    from swap_pipeline.analysis.gradient_direction import labelled_batches, mean_gradient
    from swap_pipeline.analysis.planes import Plane
    from swap_pipeline.config.common_params import Setting
    from swap_pipeline.config.params import Augment, Compute, Model, Phase3
    from swap_pipeline.data.epochs import draw_epoch
    from swap_pipeline.data.loader import FileImages, _Plan
    from swap_pipeline.data.prepared import View
    from swap_pipeline.engine.batchnorm import batches_of_rank, recompute_statistics
    from swap_pipeline.engine.distributed import Group
    from swap_pipeline.engine.evaluation import evaluate
    from swap_pipeline.engine.loss import summed_loss
    from swap_pipeline.engine.placement import set_up
    from swap_pipeline.engine.precision import autocast
    from swap_pipeline.models.networks import describe_network, new_network

    alone, augment = Group(rank=0, world_size=1, device=GPU), Augment(padding=4, flip=True, cutout=8)
    compute = Compute(precision=precision, channels_last=channels_last)

    class Decoded(FileImages):
        """What loader processes would hand over: uint8 on the host."""

        def __init__(self) -> None:
            self._channels, self._device, self._test_crop = 3, GPU, "square"
            self._heights = self._widths = np.full(64, 40)
            self._mean = self._std = torch.ones(1, 3, 1, 1, device=GPU)
            self._plan = _Plan()

        def _decoded(self) -> Iterator[Any]:
            for cuts in self._plan:
                pixels = torch.zeros(len(cuts), *cuts[0].size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
                yield pixels, torch.zeros(len(cuts), dtype=torch.int64)

    reads: dict[str, Any] = {}
    with fake_cuda() as seen:

        def note(name: str) -> None:
            reads[name] = sorted(set(seen.reads))
            seen.reads.clear()

        network = new_network(describe_network(Model(name="resnet9", width=8), channels=3, num_classes=100), seed=0)
        set_up(network, compute, alone)
        evaluate(network, _images(), group=alone, precision=precision)
        note("evaluation")
        with autocast(precision, GPU):
            batches = batches_of_rank(_images(), batch_size=16, seed=0, augment=augment, group=alone)
            recompute_statistics(network, batches, group=alone)
        note("statistics")
        labelled = labelled_batches(_images(), batch_size=16, seed=0, augment=augment, view=None, group=alone)
        gradient = mean_gradient(network, labelled, summed_loss=summed_loss, num_images=64, group=alone)
        note("mean gradient")
        setting = Setting(model=Model(name="resnet9"), augment=augment, compute=compute, root="", seed=0)
        with (
            mock.patch.object(landscape_job, "open_sample", return_value=_images()),
            mock.patch("torch.cuda.mem_get_info", return_value=(1 << 30, 1 << 30)),
        ):
            prober = landscape_job.Prober(
                network,
                statistics=Phase3(batch_size=16),
                setting=setting,
                view=None,
                train_images="all",
                test_images="all",
                group=alone,
                scratch=None,  # type: ignore[arg-type]
            )
            prober.errors(Plane(origin=gradient, u=gradient, v=gradient).at((0.1, 0.2)))
        note("landscape point")
        files, view = Decoded(), View(size=32, min_scale=0.5)
        choices = draw_epoch(seed=0, epoch=0, num_images=64, image_size=(32, 32), augment=augment, device=GPU)
        for images, labels in files.batches(choices, [slice(0, 16)], view=view, channels_last=channels_last):
            assert (images.device, labels.device, images.dtype) == (GPU, GPU, torch.float32)
            assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
        note("file batches")
        evaluate(network, files, group=alone, precision=precision, view=view)
        note("evaluation of files")
    return reads


@pytest.fixture(scope="module")
def found() -> Any:
    return call(everything)


TRAINED = [f"{p} {layout}" for p in PRECISIONS for layout in ("channels last", "channels first")]


@pytest.mark.parametrize("how", TRAINED)
def test_training_reads_from_the_device_only_where_it_is_known_to(found: Any, how: str) -> None:
    assert set(found[f"train {how}"]["reads"]) == READS_OF_TRAINING | (READS_OF_SCALING if "fp16" in how else set())


@pytest.mark.parametrize("how", TRAINED)
def test_a_step_reads_nothing_and_stays_within_its_budget_of_operations(found: Any, how: str) -> None:
    trained = found[f"train {how}"]
    assert trained["reads_within_steps"] == 0
    assert trained["operations"] <= BUDGET[how.split()[0]], trained["by_place"]


@pytest.mark.parametrize("how", [*TRAINED, "shards", "mean"])
def test_every_step_is_fused_and_can_be_called_off_on_the_device(found: Any, how: str) -> None:
    """`found_inf` and layouts are checked at each of them, where they are counted."""
    assert found[f"train {how}"]["fused_steps"] == (4 if how in ("shards", "mean") else 17)


def test_several_shards_and_a_mean_of_weights_read_no_more(found: Any) -> None:
    for how in ("shards", "mean"):
        assert set(found[f"train {how}"]["reads"]) == READS_OF_TRAINING
        assert found[f"train {how}"]["reads_within_steps"] == 0


def test_an_optimizer_by_name_reads_once_a_step_whether_to_take_it() -> None:
    """In a process of its own: what timm imports and fake tensors do not go together for long."""
    guard = "training/optimizers/named.py: elif not skip_if.item():"
    reads = call(training_step, precision="bf16", width=8, batch_size=64, steps=4, optimizer="timm:lars")["reads"]
    assert (set(reads), reads[guard]) == (READS_OF_TRAINING | {guard}, 4)


@pytest.mark.parametrize("how", TRAINED)
def test_in_a_step_nothing_is_copied_between_host_and_device(found: Any, how: str) -> None:
    """All of an epoch's random choices go there at once, at its beginning; a snapshot comes back at its end."""
    copies = found[f"train {how}"]["copies"]
    assert {place.partition(":")[0] for place in copies} == {
        "engine/placement.py",
        "training/resuming.py",
        "data/epochs.py",
        "training/snapshots.py",
    }
    assert sum(times for place, times in copies.items() if place.startswith("data/epochs.py")) == 6


@pytest.mark.parametrize("how", TRAINED)
def test_passes_over_images_read_their_results_alone(found: Any, how: str) -> None:
    evaluation = "engine/evaluation.py: loss_sum, hits, top5_hits = group.sum(sums).tolist()"
    assert found[f"look {how}"] == {
        "evaluation": [evaluation],
        "statistics": [],
        "mean gradient": [],
        "landscape point": ["analysis/landscape_job.py: return 100 * (num_images - int(hits)) / num_images"],
        "file batches": ["data/loader.py: order, size = choices.order.tolist(), (view.size, view.size)"],
        "evaluation of files": [evaluation],
    }


def test_auto_is_bf16_where_the_gpu_has_it_and_fp16_where_not(found: Any) -> None:
    assert (found["auto with bf16"], found["auto without bf16"]) == ("bf16", "fp16")


def test_what_auto_means_is_not_asked_again_in_each_step(found: Any) -> None:
    """It takes a look at the device's properties."""
    assert found["train auto"]["looks_within_steps"] == 0
    assert found["train auto"]["operations"] <= BUDGET["bf16"]


def test_a_tensor_that_was_left_on_the_host_would_be_noticed(found: Any) -> None:
    assert "all tensors to be on the same device" in found["mixed"]
