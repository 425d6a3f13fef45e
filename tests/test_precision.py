"""Half precision, gradient scaling and `torch.compile`: the loop with them, beside the loop without."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_training import COMPUTE, PLAIN, a_run, random_images, small_network, train_here, weights_of
from torch import nn

from swap_pipeline.config.params import Precision
from swap_pipeline.data.images import Images
from swap_pipeline.engine import precision
from swap_pipeline.engine.distributed import Group, process_group
from swap_pipeline.engine.evaluation import evaluate
from swap_pipeline.engine.placement import set_up
from swap_pipeline.errors import SwapError
from swap_pipeline.training import keeping

CPU = torch.device("cpu")


def test_auto_is_fp32_on_a_cpu() -> None:
    assert precision.resolve("auto", CPU) == "fp32"


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(SwapError, match="tf32, which only GPUs have: set it to auto or fp32"):
        precision.resolve("tf32", CPU)


@pytest.mark.parametrize("wanted", ["fp32", "tf32", "bf16"])
def test_on_a_gpu_fp32_is_fp32_and_tf32_is_asked_for(
    wanted: Precision, monkeypatch: pytest.MonkeyPatch, restored_backends: None
) -> None:
    monkeypatch.setattr(nn.Module, "to", lambda self, *arguments, **options: self)
    gpu = Group(rank=0, world_size=1, device=torch.device("cuda", 0))

    set_up(nn.Linear(1, 1), replace(COMPUTE, precision=wanted), gpu)

    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert allowed == (wanted == "tf32",) * 2


@pytest.fixture
def restored_backends() -> Iterator[None]:
    """What `set_up` changes for the whole process."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    old = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = old[:3]
    torch.use_deterministic_algorithms(old[3])


@pytest.mark.parametrize("wanted", ["bf16", "fp16"])
def test_half_precision_computes_in_half_and_keeps_weights_whole(tmp_path: Path, wanted: Precision) -> None:
    network = small_network(batch_norm=True)
    seen = set()
    network[0].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))

    record = train_here(network, tmp_path, compute=replace(COMPUTE, precision=wanted))

    whole = small_network(batch_norm=True)
    (tmp_path / "whole").mkdir()
    reference = train_here(whole, tmp_path / "whole")
    assert seen == {{"bf16": torch.bfloat16, "fp16": torch.float16}[wanted]}
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in network.state_dict().values())
    moved = (weights_of(whole) - weights_of(small_network(batch_norm=True))).norm()
    assert 0 < (weights_of(network) - weights_of(whole)).norm() < 0.1 * moved
    assert record.curve[-1].train_loss == pytest.approx(reference.curve[-1].train_loss, rel=0.02)


def test_gradients_that_overflow_in_fp16_are_scaled_down_and_training_goes_on(tmp_path: Path) -> None:
    """The first scale, 65,536, is too much for gradients of this size: some steps are left out, then it fits."""
    network = small_network()
    with torch.no_grad():
        network[5].weight.mul_(40)
    before = weights_of(network).clone()

    record = train_here(network, tmp_path, a_run(epochs=6, peak=1e-3), PLAIN, replace(COMPUTE, precision="fp16"))

    assert torch.isfinite(weights_of(network)).all()
    assert not torch.equal(before, weights_of(network))
    assert record.curve[-1].train_loss < record.curve[0].train_loss


def test_a_loss_that_no_scale_can_mend_ends_an_fp16_run_with_the_remedy(tmp_path: Path) -> None:
    network = small_network()
    with torch.no_grad():
        network[5].weight.fill_(float("nan"))
    message = r"phase1: the loss is not finite in epoch 1; .* compute\.precision to bf16 or fp32"
    with pytest.raises(SwapError, match=message):
        train_here(network, tmp_path, compute=replace(COMPUTE, precision="fp16"))


def test_gradients_that_overflow_at_every_scale_end_an_fp16_run(tmp_path: Path) -> None:
    """The loss stays finite, its gradient does not: the 25th such step in a row ends the run."""
    network = small_network()
    network[5].weight.register_hook(lambda gradient: gradient + float("inf"))
    message = r"phase1: loss or gradient is not finite at epoch 9, step 1; .* compute\.precision to bf16 or fp32"
    with pytest.raises(SwapError, match=message):
        train_here(network, tmp_path, a_run(epochs=12), compute=replace(COMPUTE, precision="fp16"))


def test_an_fp16_run_taken_up_again_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """The scale is part of the snapshot: a fresh one would leave out other steps."""
    compute = replace(COMPUTE, precision="fp16")

    def fresh() -> torch.nn.Module:
        network = small_network(batch_norm=True, dropout=0.2)
        with torch.no_grad():
            network[5].weight.mul_(40)
        return network

    whole, resumed = fresh(), fresh()
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    reference = train_here(whole, tmp_path / "whole", a_run(epochs=4, peak=1e-3), compute=compute)
    train_here(fresh(), tmp_path / "stopped", replace(a_run(epochs=4, peak=1e-3), epochs=2), compute=compute)
    record = train_here(resumed, tmp_path / "stopped", a_run(epochs=4, peak=1e-3), compute=compute)

    assert torch.equal(weights_of(whole), weights_of(resumed))
    assert [row.train_loss for row in record.curve] == [row.train_loss for row in reference.curve]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_snapshot_of_another_kind_of_gpu_is_taken_up_only_if_bytes_may_differ(
    deterministic: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = replace(COMPUTE, deterministic=deterministic)
    monkeypatch.setattr(Group, "hardware", lambda group: "A100, cuDNN 9, NCCL 2")
    train_here(small_network(), tmp_path, replace(a_run(), epochs=2), compute=compute)
    monkeypatch.setattr(Group, "hardware", lambda group: "H100, cuDNN 9, NCCL 2")

    train_here(small_network(), tmp_path, a_run(), compute=compute)

    afresh = "the snapshot was trained on A100, cuDNN 9, NCCL 2, not H100, cuDNN 9, NCCL 2"
    assert (afresh in capsys.readouterr().out) == deterministic


@pytest.mark.parametrize(("crop", "tunes"), [("rectangle", False), ("square", True)])
def test_cudnn_tries_out_algorithms_in_a_test_only_if_all_images_have_one_shape(
    crop: str, tunes: bool, restored_backends: None
) -> None:
    seen, network = [], small_network()
    network.register_forward_pre_hook(lambda module, inputs: seen.append(torch.backends.cudnn.benchmark))
    torch.backends.cudnn.benchmark = True

    class Cropped(Images):
        has_many_test_shapes = crop == "rectangle"

    evaluate(network, Cropped(**vars(random_images())), group=Group(rank=0, world_size=1, device=CPU))

    assert seen == [tunes] and torch.backends.cudnn.benchmark


def test_torch_is_made_deterministic_before_nccl_starts(
    monkeypatch: pytest.MonkeyPatch, restored_backends: None
) -> None:
    was_deterministic = []
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SWAP_DEVICE": "cuda"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)

    def init(backend: str, **options: Any) -> None:
        was_deterministic.append((backend, torch.are_deterministic_algorithms_enabled()))

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    with process_group(deterministic=True):
        pass

    assert was_deterministic == [("nccl", True)]


def test_a_snapshot_of_another_precision_is_not_taken_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` may mean another one on another machine; half and half would be neither."""
    train_here(small_network(), tmp_path, replace(a_run(), epochs=3), compute=replace(COMPUTE, precision="bf16"))
    afresh, alone = small_network(), small_network()
    (tmp_path / "alone").mkdir()
    train_here(afresh, tmp_path)
    train_here(alone, tmp_path / "alone")
    assert "the snapshot was trained in bf16, not fp32: starting afresh" in capsys.readouterr().out
    assert torch.equal(weights_of(afresh), weights_of(alone))


def test_what_is_trained_afresh_can_be_gone_on_with_from_its_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_here(small_network(), tmp_path, compute=replace(COMPUTE, precision="bf16"))
    keep = keeping.keep

    def keep_and_die(*arguments: Any) -> None:
        keep(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(keeping, "keep", keep_and_die)
    with pytest.raises(KeyboardInterrupt):
        train_here(small_network(), tmp_path)
    assert [path.name for path in tmp_path.glob("snapshot_*")] == ["snapshot_000001.safetensors"]


def test_a_cpu_that_dies_of_half_precision_is_found_out_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that ends like one whose CPU met an illegal instruction stands in for such a machine."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nkill -ILL $$\n")
    broken.chmod(0o755)
    precision.check_cpu.cache_clear()
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(SwapError, match=r"compute\.precision is bf16, which this CPU cannot run \(signal 4\): .*fp32"):
        train_here(small_network(), tmp_path, compute=replace(COMPUTE, precision="bf16"))
    precision.check_cpu.cache_clear()


@pytest.mark.skipif(not os.access("/usr/bin/g++", os.X_OK), reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.long
@pytest.mark.parametrize("how", [True, "reduce-overhead"])
def test_a_compiled_network_trains_alike_and_keeps_its_names(
    how: bool | Literal["reduce-overhead"], tmp_path: Path
) -> None:
    plain, compiled = small_network(batch_norm=True), small_network(batch_norm=True)
    for name in ("plain", "compiled"):
        (tmp_path / name).mkdir()
    train_here(plain, tmp_path / "plain", a_run(epochs=1))
    train_here(compiled, tmp_path / "compiled", a_run(epochs=1), compute=replace(COMPUTE, compile=how))

    assert list(compiled.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(weights_of(compiled), weights_of(plain), rtol=1e-3, atol=1e-5)
    snapshots = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("plain", "compiled")]
    assert [path.name for path in snapshots[0]] == [path.name for path in snapshots[1]]
