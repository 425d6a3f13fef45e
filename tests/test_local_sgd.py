"""Local SGD: every shard takes steps of its own, then weights and momentum are averaged; against loops by hand."""

from __future__ import annotations

import copy
import json
import os
import signal
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
    NESTEROV,
    a_run,
    random_images,
    small_network,
    snapshots_in,
    train_here,
)
from torch import nn

from swap_pipeline.config.schedules import by_epoch
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.epochs import draw_epoch
from swap_pipeline.engine.noise import NoiseMeter
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.stop_request import Stopped
from swap_pipeline.training.resuming import _is_beginning
from swap_pipeline.training.run import Run
from swap_pipeline.training.sgd import FiniteGuard, Sgd
from swap_pipeline.training.shards import LocalSteps

EPOCHS, STEPS, BATCH = 3, 5, 8
POST_LOCAL = ((0, 1), (1, 2))  # the first epoch as usual; in the others exchanges after steps 2, 4 and 5


def a_local_run(sync_steps: int | tuple[tuple[int, int], ...] = POST_LOCAL, *, shards: int = 4) -> Run:
    run = a_run(epochs=EPOCHS)
    return replace(run, batch_size=by_epoch(BATCH), shards=shards, sync_steps=by_epoch(sync_steps))


def by_hand(
    sync_steps: Callable[[int], int],
    *,
    shards: int,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    dropout: float = 0.3,
) -> dict[str, torch.Tensor]:
    """Every shard has a network and an optimizer of plain torch; now and then all of them are given the mean."""
    data, size = random_images(), BATCH // shards
    first = small_network(batch_norm=True, dropout=dropout).to(memory_format=torch.channels_last)
    networks = [copy.deepcopy(first).train() for _ in range(shards)]
    optimizers = [
        torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
        for network in networks
    ]
    mean: dict[str, torch.Tensor] = {}

    def average(tensors: list[torch.Tensor]) -> None:
        value = torch.stack([tensor.detach() for tensor in tensors]).mean(dim=0)
        for tensor in tensors:
            tensor.data.copy_(value)

    for epoch in range(EPOCHS):
        order, alone = draw_epoch(seed=5, epoch=epoch, num_images=40, image_size=(8, 8)).order, 0
        for step in range(STEPS):
            time = epoch + step / STEPS
            for shard, (network, sgd) in enumerate(zip(networks, optimizers, strict=True)):
                begin = BATCH * step + size * shard
                chosen = order[begin : begin + size]
                torch.manual_seed(derive_seed("step", 5, epoch, step, shard))
                images = ((data.pixels[chosen].float() - 127) / 70).contiguous(memory_format=torch.channels_last)
                sgd.zero_grad()
                nn.functional.cross_entropy(network(images), data.labels[chosen], label_smoothing=0.1).backward()
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(network.parameters(), clip_norm)
                sgd.param_groups[0]["lr"] = 0.1 * (time if time < 1 else (EPOCHS - time) / (EPOCHS - 1))
                sgd.step()
            alone += 1
            if alone == sync_steps(epoch) or step == STEPS - 1:
                for parameters in zip(*(network.parameters() for network in networks), strict=True):
                    average(list(parameters))
                    average([o.state[p]["momentum_buffer"] for o, p in zip(optimizers, parameters, strict=True)])
                decay = 0 if ema_decay is None or not mean else ema_decay**alone
                for name, parameter in networks[0].named_parameters():
                    mean[name] = decay * mean.get(name, 0) + (1 - decay) * parameter.detach()
                alone = 0
        for name, buffer in networks[0].named_buffers():
            if buffer.is_floating_point():
                average([network.get_buffer(name) for network in networks])
    momentum = {f"optimizer.{n}": optimizers[0].state[p]["momentum_buffer"] for n, p in networks[0].named_parameters()}
    end = {f"network.{key}": tensor for key, tensor in networks[0].state_dict().items()}
    return {**end, **momentum, **({} if ema_decay is None else {f"mean.{key}": t for key, t in mean.items()})}


def last_snapshot(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max(folder.glob("snapshot_*.safetensors")))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(autouse=True)
def every_epoch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAP_SNAPSHOT_SECONDS", "0")


RANKS = """
import sys; sys.path.insert(0, {tests!r})
import json, os
from dataclasses import replace
from pathlib import Path
import torch
from test_local_sgd import a_local_run
from test_training import COMPUTE, NESTEROV, kept_in, random_data, small_network
from swap_pipeline.engine.distributed import process_group
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.stop_request import Stopped
from swap_pipeline.runtime import stop_request
from swap_pipeline.training.loop import train

stop_request._SECONDS = 0  # looks at every exchange

def go(name, network=None, **changes):
    folder = Path({folder!r}) / f"{{name}}_{{group.world_size}}"
    folder.mkdir(exist_ok=True)
    network = network or small_network(batch_norm=True, dropout=0.3)
    train(replace(a_local_run(), **changes), network, random_data(), optimizer=NESTEROV, compute=COMPUTE, group=group,
          keeping=kept_in(folder))
    return torch.cat([tensor.reshape(-1).double() for tensor in network.state_dict().values()])

with process_group() as group:
    found = {{}}
    go("end")
    whole = go("whole", ema_decay=0.8)
    go("taken_up", ema_decay=0.8, epochs=2)
    group.wait()
    found["resumed_is_the_same"] = torch.equal(go("taken_up", ema_decay=0.8), whole)
    os.environ["SWAP_STOPPABLE"] = "1"
    struck = Path({folder!r}) / f"struck_{{group.world_size}}"
    struck.mkdir(exist_ok=True)
    (struck / "stop").touch()
    found["stops"], end = 0, None
    while end is None:
        group.wait()
        try:
            end = go("struck", ema_decay=0.8)
        except Stopped:
            found["stops"] += 1
    found["stopped_is_the_same"] = torch.equal(end, whole)
    del os.environ["SWAP_STOPPABLE"]
    # The third batch that the last rank sees in the second epoch is too much for it.
    lost, seen = small_network(batch_norm=True), []
    def spoil(module, inputs, output):
        if module.training and group.rank == group.world_size - 1:
            seen.append(1)
            shards = 4 // group.world_size
            passes_before = (2 if group.world_size > 1 else 0) + 5 * shards + 2 * shards
            return output * torch.nan if len(seen) > passes_before else output
    lost[0].register_forward_hook(spoil)
    try:
        go("lost", lost)
    except SwapError as error:
        found["error"] = str(error)
    weights = torch.cat([p.detach().reshape(-1) for p in lost.parameters()])
    found["is_finite"] = bool(weights.isfinite().all())
    (Path({folder!r}) / f"{{group.world_size}}_{{group.rank}}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module", params=[2, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 4))])
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, int]:
    """The folder of runs in four shards, and the number of ranks that torchrun started for them; what each of them
    found is a file."""
    folder, processes = tmp_path_factory.mktemp("local_sgd"), int(request.param)
    script = folder / "job.py"
    script.write_text(textwrap.dedent(RANKS.format(tests=str(ROOT / "tests"), folder=str(folder))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    more = {"SWAP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SWAP_SNAPSHOT_SECONDS": "0"}
    done = subprocess.run(
        [*command, str(script)], env={**os.environ, **more}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder, processes


def found_by(ranks: tuple[Path, int]) -> list[dict[str, Any]]:
    """What each rank says."""
    folder, processes = ranks
    return [json.loads((folder / f"{processes}_{rank}.json").read_text()) for rank in range(processes)]


def test_any_number_of_ranks_computes_what_four_learners_by_hand_give(ranks: tuple[Path, int]) -> None:
    """Weights, momentum, batch-norm statistics; the first epoch with an exchange at every step."""
    folder, processes = ranks
    assert_same(last_snapshot(folder / f"end_{processes}"), by_hand(by_epoch(POST_LOCAL), shards=4))


def test_a_run_that_is_resumed_or_stopped_at_every_exchange_ends_in_the_same_bytes(ranks: tuple[Path, int]) -> None:
    for found in found_by(ranks):
        assert found["resumed_is_the_same"] is True
        assert found["stopped_is_the_same"] is True
        assert found["stops"] == 5 + 3 + 2  # exchanges of three epochs, but the last one


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_at_the_next_exchange(ranks: tuple[Path, int]) -> None:
    for found in found_by(ranks):
        assert "loss or gradient is not finite at epoch 2, step 3; the step was not taken" in found["error"]
        assert found["is_finite"] is True


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("sync_steps", [3, 1000])
def test_one_process_computes_what_learners_by_hand_give(tmp_path: Path, shards: int, sync_steps: int) -> None:
    """1000 is more than an epoch has, so that there is one exchange an epoch."""
    train_here(small_network(batch_norm=True, dropout=0.3), tmp_path, a_local_run(sync_steps, shards=shards))
    assert_same(last_snapshot(tmp_path), by_hand(lambda epoch: sync_steps, shards=shards))


def test_local_steps_do_change_the_maths() -> None:
    """Or the comparisons above would show nothing."""
    local, plain = (by_hand(lambda epoch, k=k: k, shards=4)["network.5.weight"] for k in (3, 1))
    assert not torch.allclose(local, plain, rtol=1e-3, atol=1e-3)


def test_an_average_after_every_step_is_the_plain_step_with_the_mean_gradient(tmp_path: Path) -> None:
    train_here(small_network(batch_norm=True, dropout=0.3), tmp_path, a_local_run(1))
    assert_same(last_snapshot(tmp_path), by_hand(lambda epoch: 1, shards=4))


def test_each_shard_clips_its_own_gradient_and_the_moving_mean_follows_the_average(tmp_path: Path) -> None:
    run = replace(a_local_run(2, shards=2), ema_decay=0.8)
    train_here(small_network(batch_norm=True), tmp_path, run, optimizer=replace(NESTEROV, clip_norm=0.5))
    expected = by_hand(lambda epoch: 2, shards=2, clip_norm=0.5, ema_decay=0.8, dropout=0.0)
    assert_same(last_snapshot(tmp_path), expected)


def test_the_noise_scale_is_unknown_where_shards_have_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(meter: NoiseMeter, sums: list[float], *, batch_size: int) -> float | None:
        return sums[0] if sums != [0, 0] else scale_of(meter, sums, batch_size=batch_size)

    scale_of = NoiseMeter.scale
    monkeypatch.setattr(NoiseMeter, "scale", first)
    record = train_here(small_network(), tmp_path, a_local_run(POST_LOCAL, shards=2))
    assert [row.noise_scale is None for row in record.curve] == [False, True, True]


def test_a_run_that_is_asked_to_stop_goes_on_to_the_next_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWAP_STOPPABLE", "1")
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "stop").touch()
    with pytest.raises(Stopped):
        train_here(small_network(), tmp_path, a_local_run(4))
    signal.signal(signal.SIGTERM, before)
    assert snapshots_in(tmp_path) == ["000000_000000004"]


def test_in_fp16_a_shard_that_overflows_skips_its_step_and_all_go_on_with_the_lowest_scale() -> None:
    layer = nn.Linear(2, 1, bias=False)
    start, guard_run = layer.weight.detach().clone(), a_run()
    scaler = Scaler("fp16", ALONE.device)
    sgd = Sgd(layer, replace(NESTEROV, momentum=0.0, nesterov=False, weight_decay=0.0), scaler)
    guard = FiniteGuard(guard_run, ALONE.device, precision="fp16", tolerance=24)
    local = LocalSteps(layer, sgd, 2, every=2, group=ALONE)
    scale = scaler.state()["scale"]
    gradients = {(0, 0): 1.0, (0, 1): torch.inf, (1, 0): 1.0, (1, 1): 3.0}
    for step in (0, 1):
        for shard in (0, 1):
            with local.as_in(shard):
                own = scaler.state()["scale"]
                assert own == (scale / 2 if (step, shard) == (1, 1) else scale)
                scaler.scale(torch.ones(()))  # as a loss would be
                layer.weight.grad = torch.full_like(layer.weight, gradients[step, shard]) * own
                flag = local.flag(step, shard)
                guard.mark(flag, sgd.gradients())
                sgd.step(0.1, skip_if=flag)

    assert local.exchange(0, 1, guard) == 2

    assert scaler.state()["scale"] == scale / 2
    torch.testing.assert_close(layer.weight.detach(), start - 0.1 * (2 * 1.0 + 3.0) / 2)


def test_more_overflows_in_a_row_than_are_tolerated_are_those_of_one_shard() -> None:
    guard = FiniteGuard(a_run(), ALONE.device, precision="fp16", tolerance=2)
    guard.check_shards(0, 0, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    with pytest.raises(SwapError, match="epoch 2, step 1; the step was not taken"):
        guard.check_shards(1, 0, torch.tensor([[0.0, 1.0]]))


def test_one_shard_a_rank_needs_no_copies() -> None:
    """A rank with one shard trains the network itself, as it does without local steps."""
    layer = nn.Linear(2, 2)
    sgd = Sgd(layer, NESTEROV, Scaler("fp32", ALONE.device))
    local = LocalSteps(layer, sgd, 2, every=2, group=replace(ALONE, world_size=2))
    before = layer.weight.data_ptr()
    with local.as_in(0):
        layer.weight.data.fill_(7.0)
    assert (layer.weight.data_ptr(), layer.weight.min().item()) == (before, 7.0)
    assert local._shards._sets == []


def test_a_network_with_frozen_parameters_keeps_them_as_they_are(tmp_path: Path) -> None:
    network = small_network(batch_norm=True)
    network[0].requires_grad_(False)
    before = network[0].weight.detach().clone()
    # A mean of three equal numbers may be rounded.
    train_here(network, tmp_path, replace(a_local_run(2, shards=3), batch_size=by_epoch(12)))
    assert torch.equal(network[0].weight, before)


def test_a_snapshot_between_exchanges_is_not_resumed() -> None:
    """There can be none, unless it is of a run with other sync_steps."""
    begun = {"step": 2, "seconds": 1.0}
    assert _is_beginning(begun, a_local_run(2), 0, 40)
    assert not _is_beginning({**begun, "step": 3}, a_local_run(2), 0, 40)
