"""The SGD loop: against plain torch, over ranks, across restarts."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Clock
from torch import nn

from swap_pipeline.config.params import Augment, Compute, Leaving, Optimizer
from swap_pipeline.config.schedules import by_epoch, warmup_then_decay
from swap_pipeline.data.images import Images
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.evaluation import evaluate
from swap_pipeline.engine.loss import Tally, training_loss
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.runtime.stop_request import Stopped
from swap_pipeline.storage.tensor_files import read_tensors, write_tensors
from swap_pipeline.training import resuming, sgd, shards, snapshots
from swap_pipeline.training.keeping import Keeping
from swap_pipeline.training.loop import train
from swap_pipeline.training.run import Record, Run, TrainingData
from swap_pipeline.training.sgd import FiniteGuard, Sgd
from swap_pipeline.training.snapshots import SnapshotWriter

ALONE = Group(rank=0, world_size=1, device=torch.device("cpu"))
PLAIN = Augment(padding=0, flip=False, cutout=0)
NESTEROV = Optimizer(
    momentum=0.9, nesterov=True, weight_decay=5e-4, decay_norms=True, decay_biases=True, label_smoothing=0.1
)
COMPUTE = Compute(precision="fp32", channels_last=True, compile=False, deterministic=True)


def random_images(count: int = 40, seed: int = 0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    return Images(
        pixels=torch.randint(256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8),
        labels=torch.randint(4, (count,), generator=generator),
        mean=torch.full((1, 1, 1, 1), 127.0),
        std=torch.full((1, 1, 1, 1), 70.0),
    )


def small_network(*, batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4) if batch_norm else nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(256, 4),
    )


def wide_network() -> nn.Module:
    """Large enough for DDP to make several gradient buckets of it."""
    torch.manual_seed(2)
    middle = [nn.Linear(64, 700), nn.BatchNorm1d(700), nn.ReLU(), nn.Linear(700, 900), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *middle, nn.Linear(900, 4))


def a_run(*, seed: int = 5, epochs: int = 3, peak: float = 0.1, stop_accuracy: float = 100.0) -> Run:
    schedule = warmup_then_decay(peak=peak, warmup_epochs=1, epochs=epochs)
    return Run(
        name="phase1",
        section="phase1",
        seed=seed,
        batch_size=by_epoch(12),
        epochs=epochs,
        learning_rate=schedule,
        leaving=Leaving(stop_accuracy=stop_accuracy),
    )


def random_data(augment: Augment = PLAIN, *, num_classes: int = 4) -> TrainingData:
    test = random_images(20, seed=9)
    return TrainingData(train=random_images(), held_out=test, augment=augment, num_classes=num_classes)


def kept_in(folder: Path) -> Keeping:
    return Keeping(snapshots=folder, reporter=Reporter(name="test", total=3, folder=None, is_main=False))


def train_here(
    network: nn.Module,
    folder: Path,
    run: Run | None = None,
    augment: Augment = PLAIN,
    compute: Compute = COMPUTE,
    optimizer: Optimizer = NESTEROV,
    at_epoch_end: Callable[[int, nn.Module], None] = lambda epoch, network: None,
    num_classes: int = 4,
) -> Record:
    return train(
        run or a_run(),
        network,
        random_data(augment, num_classes=num_classes),
        optimizer=optimizer,
        compute=compute,
        group=ALONE,
        keeping=replace(kept_in(folder), at_epoch_end=at_epoch_end),
    )


def weights_of(network: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])


def test_the_clock_runs_over_the_steps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step takes 1 s here, any other pass 100 s, and keeping a model 1000 s."""
    clock, network = Clock(), small_network()
    monkeypatch.setattr("swap_pipeline.training.loop.time", clock)
    network.register_forward_pre_hook(lambda module, _: clock.advance(1 if module.training else 100))

    record = train_here(network, tmp_path, at_epoch_end=lambda epoch, network: clock.advance(1000))

    assert [row.seconds for row in record.curve] == [3, 3, 3]
    assert record.as_json()["seconds"] == 9
    assert clock.now >= 9 + 3 * 100 + 3 * 1000


def test_the_loop_equals_one_written_out_with_plain_torch(tmp_path: Path) -> None:
    """Without augmentation: order from the seed, Nesterov momentum, decay, smoothing, a rate for every step."""
    from swap_pipeline.data.epochs import draw_epoch

    data, oracle = random_images(), small_network()
    sgd = torch.optim.SGD(oracle.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    rates = [[0.0, 1 / 30, 2 / 30], [0.1, 0.1 * 5 / 6, 0.1 * 4 / 6], [0.05, 0.05 * 2 / 3, 0.05 / 3]]
    for epoch in range(3):
        order = draw_epoch(seed=5, epoch=epoch, num_images=40, image_size=(8, 8)).order
        for step in range(3):
            chosen = order[12 * step : 12 * step + 12]
            sgd.param_groups[0]["lr"] = rates[epoch][step]
            sgd.zero_grad()
            loss_function(oracle((data.pixels[chosen].float() - 127) / 70), data.labels[chosen]).backward()
            sgd.step()

    network = small_network()
    record = train_here(network, tmp_path)

    torch.testing.assert_close(weights_of(network), weights_of(oracle), rtol=1e-4, atol=1e-6)
    assert [row.learning_rate for row in record.curve] == pytest.approx([2 / 30, 0.1 * 4 / 6, 0.05 / 3])


@pytest.mark.parametrize(("decay_norms", "decay_biases"), [(False, True), (True, False), (False, False)])
def test_weight_decay_spares_norm_layers_or_biases_and_nothing_else(
    tmp_path: Path, decay_norms: bool, decay_biases: bool
) -> None:
    """With a gradient of almost nothing beside a huge decay, what is spared stays as it was."""
    network = small_network(batch_norm=True)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(1.0)
    optimizer = replace(
        NESTEROV, momentum=0.0, nesterov=False, weight_decay=1e4, decay_norms=decay_norms, decay_biases=decay_biases
    )
    run = replace(a_run(epochs=1), learning_rate=lambda epoch: 1e-5, batch_size=by_epoch(40))

    train_here(network, tmp_path, run, optimizer=optimizer)

    ends = {name: round(parameter.mean().item(), 2) for name, parameter in network.named_parameters()}
    norms, biases = (0.9 if decay_norms else 1.0), (0.9 if decay_biases else 1.0)
    assert ends == {
        "0.weight": 0.9,
        "0.bias": biases,
        "1.weight": norms,
        "1.bias": norms,
        "5.weight": 0.9,
        "5.bias": biases,
    }


@pytest.mark.parametrize(
    "settings",
    [NESTEROV, replace(NESTEROV, nesterov=False), replace(NESTEROV, momentum=0.0, nesterov=False, decay_norms=False)],
    ids=["nesterov", "momentum", "plain"],
)
def test_a_step_is_that_of_torch_s_optimizer_bit_for_bit(settings: Optimizer) -> None:
    """Also of parameters of another type, and with one that has no gradient; a step that is called off does nothing."""
    ours, theirs = ({"net": small_network(), "idle": nn.Linear(2, 2), "wide": nn.Linear(3, 2).double()} for _ in "ab")
    ours, theirs = nn.ModuleDict(ours), nn.ModuleDict(theirs)
    theirs.load_state_dict(ours.state_dict())
    sgd = Sgd(ours, settings, Scaler("fp32", ALONE.device))
    spared = [] if settings.decay_norms else [*theirs["net"][1].parameters()]
    decayed = [p for p in theirs.parameters() if not any(p is other for other in spared)]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    own = {"momentum": settings.momentum, "nesterov": settings.nesterov, "weight_decay": settings.weight_decay}
    reference = torch.optim.SGD([group for group in groups if group["params"]], lr=0.1, fused=True, **own)
    generator = torch.Generator().manual_seed(0)

    for step in range(4):
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if not name.startswith("idle"):
                one.grad = torch.randn(one.shape, generator=generator, dtype=one.dtype)
                other.grad = one.grad.clone()
        called_off = step == 2
        sgd.step(0.1 / (step + 1), skip_if=torch.tensor(float(called_off)))
        for group in reference.param_groups:
            group["lr"] = 0.1 / (step + 1)
        if not called_off:
            reference.step()

    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_without_torch_s_private_functions_steps_and_copies_have_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may go in a later release."""

    def moved() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        sgd = Sgd(layer, NESTEROV, Scaler("fp32", torch.device("cpu")))
        for skip in (0.0, 1.0, 0.0):
            for parameter in layer.parameters():
                parameter.grad = torch.randn_like(parameter)
            sgd.step(0.1, skip_if=torch.tensor(skip))
        copies = [torch.zeros(2, 3), torch.zeros(2)]
        shards.copy_all([parameter.detach() for parameter in layer.parameters()], to=copies)
        return [*(p.detach() for p in layer.parameters()), *sgd.state().values(), *copies]

    usual = moved()
    monkeypatch.setattr("swap_pipeline.training.sgd._FUSED_STEP", None)
    monkeypatch.setattr(shards, "_COPY_ALL", None)

    assert all(torch.equal(one, other) for one, other in zip(usual, moved(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("norm", [0.5, 50.0])
def test_a_gradient_longer_than_clip_norm_is_scaled_down_to_it(norm: float, precision: Any) -> None:
    """By its true length, whatever fp16 scales it by: (3, 4) has 5, so a clip at 0.5 leaves a tenth."""
    layer = nn.Linear(2, 1, bias=False)
    before, gradient = layer.weight.detach().clone(), torch.tensor([[3.0, 4.0]])
    plain = Optimizer(momentum=0.0, nesterov=False, weight_decay=0.0, clip_norm=norm)
    scaler = Scaler(precision, torch.device("cpu"))
    sgd = Sgd(layer, plain, scaler)

    scaler.scale((layer.weight * gradient).sum()).backward()
    sgd.step(0.1, skip_if=torch.tensor(0.0))

    torch.testing.assert_close(layer.weight.detach(), before - 0.1 * gradient * min(1, norm / 5))


def test_clipping_does_not_take_a_step_that_is_called_off() -> None:
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    sgd = Sgd(layer, replace(NESTEROV, clip_norm=1.0), Scaler("fp32", torch.device("cpu")))
    layer.weight.grad = torch.tensor([[math.inf, 1.0]])

    sgd.step(0.1, skip_if=torch.tensor(1.0))

    assert torch.equal(layer.weight.detach(), before)


def test_gradients_that_are_laid_out_otherwise_than_their_parameter_move_it_the_same_way() -> None:
    layer = nn.Linear(3, 2, bias=False)
    before, gradient = layer.weight.detach().clone(), torch.randn(3, 2).t()
    sgd = Sgd(layer, replace(NESTEROV, weight_decay=0.0), Scaler("fp32", torch.device("cpu")))
    layer.weight.grad = gradient

    sgd.step(0.1, skip_if=torch.tensor(0.0))

    torch.testing.assert_close(layer.weight.detach(), before - 0.1 * (1 + NESTEROV.momentum) * gradient)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    ],
    ids=["CUDA", "cuDNN", "cuBLAS"],
)
def test_an_error_of_the_gpu_is_not_taken_for_one_of_the_network(error: Exception, tmp_path: Path) -> None:
    network = small_network()

    def fail(*arguments: object) -> None:
        raise error

    network.register_forward_hook(fail)
    with pytest.raises(RuntimeError) as raised:
        train_here(network, tmp_path)
    assert raised.value is error


def test_training_in_one_process_does_not_import_the_compiler(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from test_training import small_network, train_here
        train_here(small_network(batch_norm=True), Path(sys.argv[2]))
        print("torch._dynamo" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(ROOT / "tests"), str(tmp_path)]

    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["False"]), done.stderr


def test_batch_size_and_learning_rate_change_at_their_epochs(tmp_path: Path) -> None:
    from swap_pipeline.config.schedules import PiecewiseLinear
    from swap_pipeline.data.epochs import draw_epoch

    data, oracle = random_images(), small_network()
    sgd = torch.optim.SGD(oracle.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    # Epoch 0: 3 steps of 12 rising from 0.1; epoch 1: after a jump, 8 steps of 5 falling from 0.05.
    rates = [[0.1 + 0.1 * step / 3 for step in range(3)], [0.05 - 0.04 * step / 8 for step in range(8)]]
    for epoch, batch in ((0, 12), (1, 5)):
        order = draw_epoch(seed=5, epoch=epoch, num_images=40, image_size=(8, 8)).order
        for step, rate in enumerate(rates[epoch]):
            chosen = order[batch * step : batch * step + batch]
            sgd.param_groups[0]["lr"] = rate
            sgd.zero_grad()
            loss_function(oracle((data.pixels[chosen].float() - 127) / 70), data.labels[chosen]).backward()
            sgd.step()

    network = small_network()
    run = replace(
        a_run(epochs=2),
        batch_size=by_epoch(((0, 12), (1, 5))),
        learning_rate=PiecewiseLinear((0, 1, 1, 2), (0.1, 0.2, 0.05, 0.01)),
    )
    train_here(network, tmp_path, run)

    torch.testing.assert_close(weights_of(network), weights_of(oracle), rtol=1e-4, atol=1e-6)


def test_a_batch_that_is_too_large_only_in_a_later_epoch_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"phase1\.batch_size is 64, more than the 40 training images"):
        train_here(small_network(), tmp_path, replace(a_run(), batch_size=by_epoch(((0, 12), (2, 64)))))
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_take_the_images_is_refused_before_it_trains(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(100, 4))
    with pytest.raises(SwapError, match=r"cannot take images of 8×8 pixels \(RuntimeError: .*: change image_size"):
        train_here(network, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_network_with_another_number_of_outputs_than_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"returns 4 values for each image, but the data has 3 classes"):
        train_here(small_network(), tmp_path, num_classes=3)


def test_trying_a_network_out_leaves_no_trace_in_it(tmp_path: Path) -> None:
    network = small_network(batch_norm=True)
    train_here(network, tmp_path, replace(a_run(epochs=1), learning_rate=lambda epoch: 0.0))
    assert int(network[1].num_batches_tracked) == 3


def test_parameters_that_nothing_depends_on_are_named_for_several_ranks() -> None:
    from swap_pipeline.training.parallel import check_that_all_learn

    network = small_network()
    network.add_module("spare", nn.Linear(2, 2))
    used = nn.Sequential(*list(network)[:-1])
    with pytest.raises(SwapError, match=r"unused parameters \(spare\.weight, spare\.bias\), .* SWAP_NPROC=1"):
        check_that_all_learn(network, used(torch.zeros(2, 1, 8, 8)).sum())


def test_models_on_the_way_are_those_of_a_run_that_ended_there(tmp_path: Path) -> None:
    network, seen = small_network(batch_norm=True), {}

    def remember(epoch: int, network: nn.Module) -> None:
        seen[epoch] = weights_of(network).clone()

    train_here(network, tmp_path, at_epoch_end=remember)

    assert sorted(seen) == [1, 2, 3]
    for epochs in (1, 2, 3):
        (tmp_path / str(epochs)).mkdir()
        shorter = small_network(batch_norm=True)
        train_here(shorter, tmp_path / str(epochs), replace(a_run(), epochs=epochs))
        assert torch.equal(seen[epochs], weights_of(shorter))


def test_training_accuracy_counts_every_image_of_the_epoch(tmp_path: Path) -> None:
    """With a rate of almost nothing the network stays as it is, so the epoch's accuracy can be counted by hand."""
    from swap_pipeline.data.epochs import draw_epoch

    data, network = random_images(), small_network()
    order = draw_epoch(seed=5, epoch=0, num_images=40, image_size=(8, 8)).order[:36]
    with torch.no_grad():
        hits = (network((data.pixels[order].float() - 127) / 70).argmax(1) == data.labels[order]).sum().item()

    record = train_here(network, tmp_path, a_run(epochs=1, peak=1e-12))

    assert record.curve[0].train_accuracy == pytest.approx(100 * hits / 36)


def test_evaluation_in_short_batches_equals_one_pass_over_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAP_EVAL_BATCH", "7")
    data, network = random_images(23), small_network(batch_norm=True, dropout=0.5).eval()
    with torch.no_grad():
        logits = network((data.pixels.float() - 127) / 70)
    score = evaluate(network, data, group=ALONE)
    assert score.loss == pytest.approx(nn.functional.cross_entropy(logits, data.labels).item(), rel=1e-6)
    assert score.accuracy == pytest.approx(100 * (logits.argmax(1) == data.labels).double().mean().item())
    assert score.top5 is None


@pytest.mark.parametrize(("classes", "has_top5"), [(99, False), (100, True), (130, True)])
def test_from_100_classes_up_the_first_five_guesses_count_too(
    monkeypatch: pytest.MonkeyPatch, classes: int, has_top5: bool
) -> None:
    monkeypatch.setenv("SWAP_EVAL_BATCH", "7")
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).eval()
    pixels = torch.randint(256, (60, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        ranked = network((pixels.float() - 127) / 70).argsort(dim=1, descending=True)
    # The class of image i is guess number i mod 12: one in twelve is right, five are among the first five.
    labels = ranked[torch.arange(60), torch.arange(60) % 12]
    score = evaluate(network, replace(random_images(), pixels=pixels, labels=labels), group=ALONE)
    assert score.accuracy == pytest.approx(100 / 12)
    assert score.top5 == (pytest.approx(500 / 12) if has_top5 else None)
    assert ("test_top5" in score.as_json("test_")) == has_top5


def test_a_run_ends_at_the_epoch_that_passes_tau_and_says_so(tmp_path: Path) -> None:
    record = train_here(small_network(), tmp_path, a_run(epochs=50, stop_accuracy=60.0))
    assert record.stopped_by == "accuracy"
    assert record.curve[-1].train_accuracy > 60
    assert all(earlier.train_accuracy <= 60 for earlier in record.curve[:-1])
    assert len(record.curve) < 50


def test_equal_seeds_give_equal_bytes_and_other_seeds_other_ones(tmp_path: Path) -> None:
    augment = Augment(padding=1, flip=True, cutout=2)
    ends = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        network = small_network(batch_norm=True, dropout=0.3)
        (tmp_path / name).mkdir()
        train_here(network, tmp_path / name, a_run(seed=seed), augment)
        ends.append(weights_of(network))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_run_taken_up_at_any_epoch_ends_in_the_same_bytes(tmp_path: Path) -> None:
    augment = Augment(padding=1, flip=True, cutout=2)
    whole = small_network(batch_norm=True, dropout=0.3)
    (tmp_path / "whole").mkdir()
    reference = train_here(whole, tmp_path / "whole", augment=augment)
    for stop in (1, 2):
        folder = tmp_path / f"stopped_{stop}"
        folder.mkdir()
        run = a_run()
        train_here(small_network(batch_norm=True, dropout=0.3), folder, replace(run, epochs=stop), augment)
        network = small_network(batch_norm=True, dropout=0.3)
        resumed = train_here(network, folder, run, augment)
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), network.state_dict().values(), strict=True)
        )
        assert [r.train_loss for r in resumed.curve] == [r.train_loss for r in reference.curve]


@pytest.mark.parametrize(("tolerance", "told"), [(0, 2), (1, 6), (2, 7), (3, None)])
@pytest.mark.parametrize("at_a_time", [1, 3, 50])
@pytest.mark.parametrize("is_fused", [True, False])
def test_the_first_step_of_too_many_bad_ones_is_told_however_seldom_it_is_looked(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch, at_a_time: int, tolerance: int, told: int | None
) -> None:
    if not is_fused:
        monkeypatch.setattr(sgd, "_CHECK", None)  # as in a torch that does not have this private function
    guard = FiniteGuard(a_run(), torch.device("cpu"), precision="fp32", tolerance=tolerance)
    guard._flags = torch.zeros(at_a_time)  # on a GPU they are read many at a time
    bad = {2: math.inf, 5: math.nan, 6: -math.inf, 7: math.nan}
    flags = []

    def all_steps() -> None:
        for step in range(10):
            gradients = [torch.ones(3), torch.tensor([[bad.get(step, 1.0)]])]
            flags.append(guard.look(4, step, gradients).item())
        guard.check()

    if told is None:
        all_steps()
        assert flags == [float(step in bad) for step in range(10)]
    else:
        with pytest.raises(SwapError, match=f"not finite at epoch 5, step {told + 1};"):
            all_steps()
        assert flags == [float(step in bad) for step in range(len(flags))]


def test_a_loss_that_is_not_finite_stops_before_the_step_and_leaves_the_last_snapshot(tmp_path: Path) -> None:
    run = replace(a_run(), learning_rate=lambda epoch: 0.05 if epoch < 1 else 1e30)
    network = small_network()
    run = replace(run, chance="seed 4")
    message = r"phase1 \(seed 4\): loss or gradient is not finite at epoch 2, step [23]; .*peak_lr"
    with pytest.raises(SwapError, match=message):
        train_here(network, tmp_path, run)
    assert [path.name for path in tmp_path.glob("snapshot_*")] == ["snapshot_000001.safetensors"]
    assert torch.isfinite(weights_of(network)).all()


def test_ranks_that_see_different_snapshots_do_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(small_network(), tmp_path, replace(a_run(), epochs=2))
    monkeypatch.setattr(resuming, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(Group, "gather", lambda group, own: torch.stack([own, own - torch.tensor([1, 0])]))
    with pytest.raises(SwapError, match=r"do not see the same snapshots in .*\[\[2, 0\], \[1, 0\]\]"):
        train_here(small_network(), tmp_path)


def test_the_guard_leaves_gradients_as_they_are() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-45, 38, 0.083)[:1000]
    gradients = [values.clone(), values.view(10, 100).clone(), -values.double()]

    flag = FiniteGuard(a_run(), torch.device("cpu"), precision="fp32", tolerance=0).look(0, 0, gradients)

    assert flag.item() == 0
    assert torch.equal(gradients[0], values) and torch.equal(gradients[1].view(-1), values)
    assert torch.equal(gradients[2], -values.double())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 10), (512, 10), (7, 3), (128, 100)])
def test_the_loss_is_torch_s_cross_entropy_bit_for_bit(
    shape: tuple[int, int], half: torch.dtype | None, label_smoothing: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(shape, generator=generator)).to(half or torch.float32)
    labels = torch.randint(shape[1], shape[:1], generator=generator)
    found = []
    for loss_of in (training_loss, torch.nn.functional.cross_entropy):
        logits = values.clone().requires_grad_()
        with torch.autocast("cpu", dtype=half, enabled=half is not None):
            loss = loss_of(logits, labels, label_smoothing=label_smoothing)
        loss.backward()
        found.append((loss.detach(), logits.grad))

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_tally_counts_every_batch_and_continues_from_what_there_was() -> None:
    tally, before = Tally(torch.tensor([5.0, 7.0], dtype=torch.float64)), torch.tensor([5.0, 7.0], dtype=torch.float64)
    for number in range(37):
        logits, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(number)), torch.arange(6) % 4
        loss = torch.tensor(number / 3)
        tally.add(loss, logits, labels)
        before[0] += (loss * 6).double()
        before[1] += sum(int(logits[i].argmax()) == i % 4 for i in range(6))

    assert torch.equal(tally.sums(), before) and torch.equal(tally.sums(), before)


def snapshots_in(folder: Path) -> list[str]:
    return sorted(path.stem.removeprefix("snapshot_") for path in folder.glob("snapshot_*.safetensors"))


def test_snapshots_are_left_only_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch takes 4 s here, and snapshots are 10 s apart: after epochs 3 and 6."""
    clock = Clock()
    monkeypatch.setattr("swap_pipeline.training.keeping.time", clock)
    monkeypatch.setattr(SnapshotWriter, "is_busy", lambda self: bool(self.wait()))  # a disk that is fast enough
    monkeypatch.setenv("SWAP_SNAPSHOT_SECONDS", "10")

    train_here(small_network(), tmp_path, a_run(epochs=8), at_epoch_end=lambda epoch, network: clock.advance(4))

    assert snapshots_in(tmp_path) == ["000003", "000006"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_run_that_is_asked_to_stop_leaves_a_snapshot_however_young_the_last_is(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWAP_SNAPSHOT_SECONDS", "1000")
    monkeypatch.setenv("SWAP_STOPPABLE", "1")
    monkeypatch.setattr("swap_pipeline.runtime.stop_request._SECONDS", 0)  # looks after each step
    before = signal.getsignal(signal.SIGTERM)
    asked = tmp_path / "stop"
    if at_once:
        asked.touch()
    with pytest.raises(Stopped):
        train_here(small_network(), tmp_path, at_epoch_end=lambda epoch, network: asked.touch())
    signal.signal(signal.SIGTERM, before)
    monkeypatch.delenv("SWAP_STOPPABLE")

    assert snapshots_in(tmp_path) == ["000000_000000001" if at_once else "000001"]
    resumed, whole = small_network(), small_network()
    (tmp_path / "whole").mkdir()
    train_here(resumed, tmp_path)
    train_here(whole, tmp_path / "whole")
    assert torch.equal(weights_of(resumed), weights_of(whole))


def test_a_snapshot_holds_its_own_epoch_although_training_continues_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, written = {}, threading.Event()

    def slowly(path: Path, *arguments: Any, **options: Any) -> None:
        assert written.wait(timeout=60)  # until training is three epochs ahead
        write_tensors(path, *arguments, **options)

    def remember(epoch: int, network: nn.Module) -> None:
        weights[epoch] = weights_of(network).clone()
        if epoch == 4:
            written.set()

    monkeypatch.setattr(snapshots, "write_tensors", slowly)
    monkeypatch.setenv("SWAP_SNAPSHOT_SECONDS", "1e-9")
    train_here(small_network(), tmp_path, a_run(epochs=4), at_epoch_end=remember)

    tensors, info = read_tensors(tmp_path / "snapshot_000001.safetensors")
    names = [name for name, _ in small_network().named_parameters()]
    kept = torch.cat([tensors[f"network.{name}"].reshape(-1) for name in names])
    assert torch.equal(kept, weights[1]) and not torch.equal(kept, weights[4])
    assert len(info["curve"]) == 1


def test_an_error_of_the_thread_that_writes_snapshots_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshots, "write_tensors", fail)
    for epochs in (1, 3):  # at the end of the run, and on its way
        with pytest.raises(OSError, match="No space left"):
            train_here(small_network(), tmp_path, a_run(epochs=epochs))


def test_a_batch_that_does_not_fit_is_named_as_it_is_in_that_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(loss: torch.Tensor, *_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "backward", fail)
    run = replace(a_run(), batch_size=lambda epoch: 5 if epoch < 1 else 10)
    with pytest.raises(SwapError, match=r"5 images at a time on each device did not fit .* raise phase1\.shards"):
        train_here(small_network(), tmp_path, run)


def test_the_memory_layout_changes_nothing_but_rounding(tmp_path: Path) -> None:
    ends = []
    for channels_last in (True, False):
        network = small_network(batch_norm=True)
        folder = tmp_path / str(channels_last)
        folder.mkdir()
        train_here(network, folder, compute=replace(COMPUTE, channels_last=channels_last))
        assert network[0].weight.is_contiguous(memory_format=torch.channels_last) or not channels_last
        ends.append(weights_of(network))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-5)


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"phase1\.batch_size is 64, more than the 40 training images"):
        train_here(small_network(), tmp_path, replace(a_run(), batch_size=by_epoch(64)))


TWO_RANKS = """
import sys; sys.path.insert(0, {tests!r})
import json, os
from dataclasses import replace
from pathlib import Path
import torch
from test_training import COMPUTE, NESTEROV, a_run, kept_in, random_data, small_network, weights_of, wide_network
from swap_pipeline.engine.distributed import process_group
from swap_pipeline.config.params import Augment
from swap_pipeline.runtime.stop_request import Stopped
from swap_pipeline.training.loop import train

def go(network, folder, epochs=3, ema_decay=0.8):
    folder.mkdir(exist_ok=True)
    return train(
        replace(a_run(), epochs=epochs, shards=6, ema_decay=ema_decay), network,
        random_data(Augment(padding=1, flip=True, cutout=2)),
        optimizer=NESTEROV, compute=COMPUTE, group=group, keeping=kept_in(folder))

with process_group() as group:
    root = Path({folder!r}) / str(group.world_size)
    root.mkdir(exist_ok=True)
    network = small_network()
    record = go(network, root / "plain", ema_decay=None)
    normed = wide_network()
    reference = go(normed, root / "whole")
    go(wide_network(), root / "stopped", epochs=1)
    group.wait()
    resumed = wide_network()
    go(resumed, root / "stopped")
    same = all(torch.equal(a, b) for a, b in zip(normed.state_dict().values(), resumed.state_dict().values()))
    os.environ["SWAP_STOPPABLE"] = "1"
    (root / "struck").mkdir(exist_ok=True)
    (root / "struck" / "stop").touch()
    stops, struck_record = 0, None
    while struck_record is None:
        struck = wide_network()
        group.wait()
        try:
            struck_record = go(struck, root / "struck")
        except Stopped:
            stops += 1
    losses = [[(r.train_loss, r.noise_scale) for r in one.curve] for one in (reference, struck_record)]
    struck_same = losses[0] == losses[1] and all(
        torch.equal(a, b) for a, b in zip(normed.state_dict().values(), struck.state_dict().values()))
    if group.is_main:
        print(json.dumps({{
            "weights": weights_of(network).tolist(),
            "curve": [[r.train_loss, r.train_accuracy, r.loss, r.accuracy] for r in record.curve],
            "resumed_is_the_same": same,
            "stops": stops,
            "stopped_is_the_same": struck_same,
        }}))
"""


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, object]]:
    """The same training, in six shards, as one process and as two and three gloo ranks, started by torchrun.

    What is resumed or stopped has an exponential mean of the weights too.
    """
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "job.py"
    script.write_text(textwrap.dedent(TWO_RANKS.format(tests=str(ROOT / "tests"), folder=str(folder))))
    results = {}
    for world_size in (1, 2, 3):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world_size), str(script)]
        environment = {**os.environ, "SWAP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        results[world_size] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_two_ranks_equal_one_process_with_the_same_global_batch(by_world_size: dict[int, dict[str, object]]) -> None:
    one, two = by_world_size[1], by_world_size[2]
    torch.testing.assert_close(torch.tensor(two["weights"]), torch.tensor(one["weights"]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.tensor(two["curve"]), torch.tensor(one["curve"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_that_are_resumed_end_in_the_same_bytes(
    by_world_size: dict[int, dict[str, object]], world_size: int
) -> None:
    """Over three ranks the order of sums counts: gradient buckets must be regrouped before the state is loaded."""
    assert by_world_size[world_size]["resumed_is_the_same"] is True


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_that_are_asked_to_end_after_every_step_end_in_the_same_bytes(
    by_world_size: dict[int, dict[str, object]], world_size: int
) -> None:
    """In the middle of an epoch each shard has batch-norm statistics, and each rank sums, of its own."""
    assert by_world_size[world_size]["stops"] == 8  # of 9 steps: after the last one only the result is left to write
    assert by_world_size[world_size]["stopped_is_the_same"] is True
