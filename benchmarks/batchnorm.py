"""The batch-norm pass: statistics over all training images against a forward pass in eval mode over the same batches.

`recompute_statistics` on phase 3's batches (random order, normalised, without augmentation), which both sides make
themselves, with all cores. In training mode a batch-norm layer makes two more passes over its input than in eval mode,
where it is a multiplication and an addition: the ratio shows that, not the hooks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import call, say
from benchmarks.harness import Sample, interleaved
from benchmarks.made_up import COMPUTE, resnet9, write_prepared
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared


def measure(options: Options) -> Iterator[Row]:
    for width in (16, 64) if not options.quick else (4,):
        number = options.sized(4_000 if width == 16 else 1_000, 64)
        prepared = options.scratch / f"prepared_batchnorm_{width}"
        write_prepared(prepared, num_train=number, num_test=16)
        found = call(
            in_turns,
            threads=options.cores,
            prepared=str(prepared),
            width=width,
            batch_size=options.sized(500, 32),
            rounds=options.rounds,
        )
        yield compared(
            f"batchnorm/width_{width}",
            f"batch-norm pass, ResNet-9 width {width}, {number:,} images",
            ours=("recompute_statistics", Sample(tuple(found["statistics"]))),
            other=("forward pass in eval mode", Sample(tuple(found["forward"]))),
            unit="s",
            limit=Limit("≤", 1.15),
        )


def in_turns(*, prepared: str, width: int, batch_size: int, rounds: int) -> dict[str, Any]:
    """In a child: seconds of both passes."""
    from benchmarks.loops import ALONE
    from swap_pipeline.data.images import read_images
    from swap_pipeline.engine.batchnorm import batches_of_rank, recompute_statistics
    from swap_pipeline.engine.placement import set_up

    images = read_images(Path(prepared), "train", torch.device("cpu"))
    network = resnet9(width)
    set_up(network, COMPUTE, ALONE)

    def batches() -> Iterator[torch.Tensor]:
        return batches_of_rank(images, batch_size=batch_size, seed=0, augment=None, group=ALONE)

    def statistics() -> float:
        began = time.perf_counter()
        recompute_statistics(network, batches(), group=ALONE)
        return time.perf_counter() - began

    @torch.inference_mode()
    def forward() -> float:
        network.eval()
        began = time.perf_counter()
        for batch in batches():
            network(batch)
        return time.perf_counter() - began

    found = interleaved({"statistics": statistics, "forward": forward}, rounds=rounds, say=say)
    return {name: list(sample.values) for name, sample in found.items()}
