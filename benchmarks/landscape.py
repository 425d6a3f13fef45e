"""The landscape: grid points a minute, and the share of their time that is not forward passes.

Real points as in the analysis (`Prober` and the plane's weights; the default recipe's network, images and numbers of
images) against forward passes in eval mode over the same batches for statistics, training error and test error. The
difference is making the weights, the statistics, counting errors, and that batch norm costs more in training mode than
in eval mode. One thread, as for each of two ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import call, say
from benchmarks.harness import Sample, interleaved
from benchmarks.made_up import AUGMENT, COMPUTE, resnet9, write_prepared
from benchmarks.options import Options
from benchmarks.results import Limit, Row

_SHAPE = (1, 28, 28)


def measure(options: Options) -> Iterator[Row]:
    folder = options.scratch / "landscape"
    number = options.sized(2_000, 64)
    write_prepared(folder / "data" / "prepared", num_train=10 * number, num_test=10 * number, shape=_SHAPE)
    width, points = 8, options.sized(2, 1)
    found = call(in_turns, threads=1, cwd=folder, width=width, num_images=number, points=points, rounds=options.rounds)
    whole, forward = Sample(tuple(found["points"])), Sample(tuple(found["forward"]))
    rest = Sample(tuple(100 * (1 - f / w) for f, w in zip(forward.values, whole.values, strict=True)))
    per_minute = Sample(tuple(60 * points / seconds for seconds in whole.values))
    yield Row(
        name="landscape/points",
        what=f"landscape, ResNet-9 width {width}, {number:,} + {number:,} images a point, 1 thread",
        ours="points",
        other="forward passes alone",
        unit="points/min",
        our_figures=per_minute,
        other_figures=Sample(tuple(60 * points / seconds for seconds in forward.values)),
        ratio=rest,
        limit=Limit("≤", 10),
        note="Landscape: the ratio is the share of the time, in percent, that is not forward passes.",
    )


def in_turns(*, width: int, num_images: int, points: int, rounds: int) -> dict[str, Any]:
    """In a child, in a folder with prepared data: seconds of the points, and of their forward passes alone."""
    from benchmarks.loops import ALONE
    from swap_pipeline.analysis.landscape_job import Prober
    from swap_pipeline.analysis.planes import Plane
    from swap_pipeline.analysis.sample import open_sample
    from swap_pipeline.config.common_params import Setting
    from swap_pipeline.config.params import Model, Phase3
    from swap_pipeline.engine.batchnorm import batches_of_rank
    from swap_pipeline.engine.placement import set_up
    from swap_pipeline.runtime.environment import eval_batch_size

    networks = [resnet9(width, channels=_SHAPE[0], seed=seed) for seed in range(3)]
    vectors = [torch.cat([p.detach().double().reshape(-1) for p in network.parameters()]) for network in networks]
    plane = Plane.through(dict(zip("abc", vectors, strict=True)))
    network = networks[0]
    set_up(network, COMPUTE, ALONE)
    setting = Setting(
        seed=0, root="data/raw", augment=AUGMENT, model=Model(name="resnet9", width=width), compute=COMPUTE
    )
    prober = Prober(
        network,
        statistics=Phase3(),
        setting=setting,
        view=None,
        train_images=num_images,
        test_images=num_images,
        group=ALONE,
        scratch=Path(),
    )

    train, test = (
        open_sample(split, num_images, seed=0, setting=setting, group=ALONE, scratch=Path())
        for split in ("train", "test")
    )
    batches = list(batches_of_rank(train, batch_size=500, seed=0, augment=None, group=ALONE))
    for split in (train, test):
        plain = split.test_batches(batch_size=eval_batch_size(), rank=0, world_size=1, view=None)
        batches += [images for images, _ in plain]

    def probe() -> float:
        began = time.perf_counter()
        for number in range(points):
            prober.errors(plane.at((number / 10, number / 10)))
        return time.perf_counter() - began

    @torch.inference_mode()
    def forward() -> float:
        network.eval()
        began = time.perf_counter()
        for _ in range(points):
            for batch in batches:
                network(batch)
        return time.perf_counter() - began

    found = interleaved({"points": probe, "forward": forward}, rounds=rounds, say=say)
    return {name: list(sample.values) for name, sample in found.items()}
