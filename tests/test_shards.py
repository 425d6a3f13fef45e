"""A batch in shards: the same maths on any number of devices, against loops written out by hand."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_training import (
    ALONE,
    COMPUTE,
    NESTEROV,
    a_run,
    kept_in,
    random_data,
    random_images,
    small_network,
    train_here,
)
from torch import nn

from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.epochs import draw_epoch
from swap_pipeline.errors import SwapError
from swap_pipeline.training.loop import train
from swap_pipeline.training.shards import Shards

RANKS = """
import sys; sys.path.insert(0, {tests!r})
from dataclasses import replace
from pathlib import Path
import torch
from safetensors.torch import save_file
from test_training import COMPUTE, NESTEROV, a_run, kept_in, random_data, small_network
from swap_pipeline.engine.distributed import process_group
from swap_pipeline.training.loop import train

with process_group() as group:
    folder = Path({folder!r}) / f"{{group.world_size}}"
    folder.mkdir(exist_ok=True)
    network = small_network(batch_norm=True, dropout=0.3)
    train(
        replace(a_run(epochs=2), shards={shards}), network, random_data(),
        optimizer=NESTEROV, compute=COMPUTE, group=group, keeping=kept_in(folder))
    if group.is_main:
        save_file({{k: t.contiguous() for k, t in network.state_dict().items()}}, folder / "end.safetensors")
"""

PLAIN_DDP = """
import sys; sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from test_training import random_images, small_network
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.epochs import draw_epoch

dist.init_process_group("gloo")
rank, data = dist.get_rank(), random_images()
network = small_network(batch_norm=True, dropout=0.3).to(memory_format=torch.channels_last)
parallel = DistributedDataParallel(network, broadcast_buffers=False)
sgd = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
for epoch in range(2):
    order = draw_epoch(seed=5, epoch=epoch, num_images=40, image_size=(8, 8)).order
    network.train()
    for step in range(3):
        chosen = order[12 * step + 6 * rank : 12 * step + 6 * rank + 6]
        sgd.param_groups[0]["lr"] = [[0.0, 1 / 30, 2 / 30], [0.1, 0.1 * 2 / 3, 0.1 / 3]][epoch][step]
        torch.manual_seed(derive_seed("step", 5, epoch, step, rank))
        sgd.zero_grad()
        images = ((data.pixels[chosen].float() - 127) / 70).contiguous(memory_format=torch.channels_last)
        nn.functional.cross_entropy(parallel(images), data.labels[chosen], label_smoothing=0.1).backward()
        sgd.step()
    for buffer in network.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
if rank == 0:
    save_file({{k: t.contiguous() for k, t in network.state_dict().items()}}, Path({folder!r}) / "ddp.safetensors")
"""


def torchrun(script: str, folder: Path, processes: int, *, shards: int = 4) -> None:
    path = folder / f"job_{processes}.py"
    path.write_text(textwrap.dedent(script.format(tests=str(ROOT / "tests"), folder=str(folder), shards=shards)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "SWAP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """Weights and running statistics after two epochs with four shards, by number of ranks."""
    folder = tmp_path_factory.mktemp("shards")
    for processes in (1, 2, 4):
        torchrun(RANKS, folder, processes)
    return {processes: load_file(folder / str(processes) / "end.safetensors") for processes in (1, 2, 4)}


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4)


def by_hand(
    num_shards: int, *, epochs: int = 2, optimizer: Callable[[Any], torch.optim.Optimizer] = nesterov
) -> nn.Module:
    """Every shard goes forward through a copy of the network, as on a device of its own; plain torch does the rest."""
    # In the memory layout that the loop has, since dropout draws its mask in the order of memory.
    data, oracle = random_images(), small_network(batch_norm=True, dropout=0.3).to(memory_format=torch.channels_last)
    sgd = optimizer(oracle.parameters())
    size = 12 // num_shards
    for epoch in range(epochs):
        order = draw_epoch(seed=5, epoch=epoch, num_images=40, image_size=(8, 8)).order
        for step in range(3):
            rates = [[0.0, 1 / 30, 2 / 30], [0.1, 0.1 * 2 / 3, 0.1 / 3]]
            for group in sgd.param_groups:
                group["lr"] = rates[epoch][step]
            copies = []
            for shard in range(num_shards):
                own = copy.deepcopy(oracle).train()
                chosen = order[12 * step + size * shard : 12 * step + size * (shard + 1)]
                torch.manual_seed(derive_seed("step", 5, epoch, step, shard))
                images = ((data.pixels[chosen].float() - 127) / 70).contiguous(memory_format=torch.channels_last)
                logits = own(images)
                nn.functional.cross_entropy(logits, data.labels[chosen], label_smoothing=0.1).backward()
                copies.append(own)
            for name, parameter in oracle.named_parameters():
                parameter.grad = sum(own.get_parameter(name).grad for own in copies) / num_shards
            for name, buffer in oracle.named_buffers():
                values = [own.get_buffer(name) for own in copies]
                buffer.copy_(sum(values) / num_shards if buffer.is_floating_point() else values[0])
            sgd.step()
    return oracle


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_ranks_computes_what_four_shards_by_hand_give(
    ends: dict[int, dict[str, torch.Tensor]], processes: int
) -> None:
    for name, tensor in by_hand(4).state_dict().items():
        torch.testing.assert_close(
            ends[processes][name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_number_of_shards_does_change_the_maths(ends: dict[int, dict[str, torch.Tensor]]) -> None:
    """Or the comparison above would show nothing: batch norm sees other batches."""
    other = by_hand(2).state_dict()
    assert not torch.allclose(ends[1]["1.running_var"], other["1.running_var"], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(ends[1]["5.weight"], other["5.weight"], rtol=1e-3, atol=1e-3)


def test_with_one_shard_a_rank_the_bytes_are_those_of_plain_ddp(tmp_path: Path) -> None:
    torchrun(RANKS, tmp_path, 2, shards=2)
    torchrun(PLAIN_DDP, tmp_path, 2)
    ours, plain = (load_file(tmp_path / name) for name in ("2/end.safetensors", "ddp.safetensors"))
    assert ours.keys() == plain.keys()
    assert [name for name in ours if not torch.equal(ours[name], plain[name])] == []


def test_one_step_has_the_mean_gradient_of_its_shards(tmp_path: Path) -> None:
    """Without momentum and decay, a step from the same weights differs by rate × mean gradient."""
    data, before = random_images(), small_network(batch_norm=True)
    order = draw_epoch(seed=5, epoch=0, num_images=40, image_size=(8, 8)).order
    gradients = []
    for shard in range(5):
        own = copy.deepcopy(before).train()
        chosen = order[8 * shard : 8 * (shard + 1)]
        nn.functional.cross_entropy(own((data.pixels[chosen].float() - 127) / 70), data.labels[chosen]).backward()
        gradients.append(own[5].weight.grad)
    optimizer = replace(NESTEROV, momentum=0.0, nesterov=False, weight_decay=0.0, label_smoothing=0.0)
    run = replace(a_run(epochs=1), batch_size=lambda epoch: 40, shards=5, learning_rate=lambda epoch: 0.5)
    network = copy.deepcopy(before)

    train_here(network, tmp_path, run, optimizer=optimizer)

    torch.testing.assert_close(
        network[5].weight, before[5].weight - 0.5 * torch.stack(gradients).mean(dim=0), rtol=1e-5, atol=1e-6
    )


def test_statistics_that_count_batches_themselves_are_kept_for_each_shard_too() -> None:
    """Batch norm without momentum averages over all batches so far, by a counter of its own."""
    layer = nn.BatchNorm1d(3, momentum=None)
    shards, batches = Shards(dict(layer.named_buffers()), 2, ALONE), [torch.randn(2, 8, 3) for _ in range(2)]
    for step in (0, 1):
        for shard in shards.numbers:
            with shards.as_in(shard):
                layer(batches[shard][step])
    shards.mean_over_all()
    oracle = torch.stack([torch.stack([batch.mean(dim=0) for batch in own]).mean(dim=0) for own in batches]).mean(dim=0)
    torch.testing.assert_close(layer.running_mean, oracle)
    assert layer.num_batches_tracked.item() == 2


def test_ranks_that_do_not_divide_the_shards_are_refused(tmp_path: Path) -> None:
    group = replace(ALONE, world_size=3)
    with pytest.raises(SwapError, match=r"phase1\.shards is 4, which 3 processes cannot share equally"):
        train(
            replace(a_run(), shards=4),
            small_network(),
            random_data(),
            optimizer=NESTEROV,
            compute=COMPUTE,
            group=group,
            keeping=kept_in(tmp_path),
        )
