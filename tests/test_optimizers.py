"""Optimizers of torch and timm by name: against the libraries' own, alone, with shards, over ranks, and resumed."""

from __future__ import annotations

import json
import math
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
import timm.optim
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_params import tree
from test_shards import by_hand
from test_training import ALONE, a_run, small_network, train_here, weights_of
from torch import nn

from swap_pipeline.config.optimizers import check_optimizers, class_of
from swap_pipeline.config.params import Optimizer
from swap_pipeline.config.reading import parse_params
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.stop_request import Stopped
from swap_pipeline.training.optimizers.named import Named, new_optimizer

FP32 = Scaler("fp32", ALONE.device)
DECAY = {"weight_decay": 5e-4, "label_smoothing": 0.1}
ADAMW = Optimizer(name="torch:AdamW", options={"betas": [0.8, 0.95]}, **DECAY)
LARS = Optimizer(name="timm:lars", options={"trust_coeff": 0.02}, **DECAY)
LAMB = Optimizer(name="timm:lamb", **DECAY)
NOVOGRAD = Optimizer(name="timm:novograd", options={"betas": [0.9, 0.25]}, **DECAY)
THEIRS: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw": (ADAMW, lambda p: torch.optim.AdamW(p, lr=1.0, betas=(0.8, 0.95), weight_decay=5e-4)),
    "lars": (LARS, lambda p: timm.optim.Lars(p, lr=1.0, momentum=0.9, trust_coeff=0.02, weight_decay=5e-4)),
    "lamb": (LAMB, lambda p: timm.optim.Lamb(p, lr=1.0, weight_decay=5e-4)),
    "novograd": (NOVOGRAD, lambda p: timm.optim.NvNovoGrad(p, lr=1.0, betas=(0.9, 0.25), weight_decay=5e-4)),
}
RANKS = """
import sys; sys.path.insert(0, {tests!r})
from dataclasses import replace
from pathlib import Path
from safetensors.torch import save_file
from test_optimizers import THEIRS
from test_training import COMPUTE, a_run, kept_in, random_data, small_network
from swap_pipeline.engine.distributed import process_group
from swap_pipeline.training.loop import train

def go(name, epochs):
    network, folder = small_network(batch_norm=True, dropout=0.3), Path({folder!r}) / name
    folder.mkdir(exist_ok=True)
    train(
        replace(a_run(epochs=2), epochs=epochs, shards=2), network, random_data(),
        optimizer=THEIRS[name][0], compute=COMPUTE, group=group, keeping=kept_in(folder))
    group.wait()
    return network

with process_group() as group:
    assert group.world_size == 2
    for name in THEIRS:
        go(name, epochs=1)  # and is taken up after the first epoch
        network = go(name, epochs=2)
        if group.is_main:
            tensors = {{key: t.contiguous() for key, t in network.state_dict().items()}}
            save_file(tensors, Path({folder!r}) / f"{{name}}.safetensors")
"""


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("shards", [1, 2])
def test_training_is_that_of_the_library_s_own_optimizer_in_a_loop_by_hand(
    name: str, shards: int, tmp_path: Path
) -> None:
    optimizer, theirs = THEIRS[name]
    network = small_network(batch_norm=True, dropout=0.3)

    train_here(network, tmp_path, replace(a_run(epochs=2), shards=shards), optimizer=optimizer)

    for key, tensor in by_hand(shards, optimizer=theirs).state_dict().items():
        torch.testing.assert_close(network.state_dict()[key], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_two_ranks_that_are_resumed_end_with_the_weights_of_the_loop_by_hand(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(RANKS.format(tests=str(ROOT / "tests"), folder=str(tmp_path))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "SWAP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    for name, (_, theirs) in THEIRS.items():
        found = load_file(tmp_path / f"{name}.safetensors")
        for key, tensor in by_hand(2, optimizer=theirs).state_dict().items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", THEIRS)
def test_a_run_that_is_stopped_after_every_step_and_epoch_ends_in_the_same_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clipping and a mean of the weights. A copy of each snapshot is all that the next process has."""
    optimizer, run = replace(THEIRS[name][0], clip_norm=1.0), replace(a_run(epochs=2), ema_decay=0.8)
    (tmp_path / "whole").mkdir()
    whole = small_network(batch_norm=True)
    train_here(whole, tmp_path / "whole", run, optimizer=optimizer)
    monkeypatch.setenv("SWAP_STOPPABLE", "1")
    before, stops, record = signal.getsignal(signal.SIGTERM), 0, None
    (tmp_path / "stop").touch()

    while record is None:
        network = small_network(batch_norm=True)
        try:
            record = train_here(network, tmp_path, run, optimizer=optimizer)
        except Stopped:
            stops += 1
    signal.signal(signal.SIGTERM, before)

    assert stops == 5  # of 6 steps
    assert all(torch.equal(network.state_dict()[key], tensor) for key, tensor in whole.state_dict().items())


def moved(optimizer: Optimizer, *, stop: int | None = None, steps: int = 5) -> torch.Tensor:
    """Weights after some steps, with all that a snapshot keeps carried over to a new network after `stop` of them."""

    def new() -> tuple[nn.Module, Any]:
        network = small_network(batch_norm=True).to(memory_format=torch.channels_last)
        return network, new_optimizer(network, optimizer, FP32)

    generator = torch.Generator().manual_seed(3)
    network, stepper = new()
    for step in range(steps):
        if step == stop:
            weights, tensors = network.state_dict(), {key: t.contiguous() for key, t in stepper.state().items()}
            numbers = json.loads(json.dumps(stepper.numbers()))
            network, stepper = new()
            network.load_state_dict(weights)
            stepper.set_state(tensors, numbers)
            layout = stepper.layout([*tensors, *numbers])
            assert layout.keys() == tensors.keys() | numbers.keys()
            assert all((t.dtype, t.shape) == (layout[key].dtype, layout[key].shape) for key, t in tensors.items())
            assert all(type(value) is type(layout[key]) for key, value in numbers.items())
        for name, parameter in network.named_parameters():
            parameter.grad = None if name == "1.bias" else torch.randn(parameter.shape, generator=generator)
        stepper.step(0.01 * step, skip_if=torch.tensor(0.0))
    return weights_of(network)


REFUSED = {
    "torch:LBFGS": "missing 1 required positional argument: 'closure'",
    "torch:Muon": "only supports 2D parameters",
    "torch:SparseAdam": "does not support dense gradients",
    "timm:adahessian": "does not require grad",
    "timm:radabelief": "buffer is a list",
    "timm:radamlegacy": "buffer is a list",
}
ALL = [
    *(f"torch:{each}" for each in torch.optim.__all__ if each[0].isupper() and each != "Optimizer"),
    *(f"timm:{each}" for each in timm.optim.list_optimizers(exclude_filters=["bnb*", "fused*", "kron*"])),
]


def test_every_optimizer_of_both_libraries_goes_on_bit_for_bit_or_is_refused_in_one_line() -> None:
    """timm's kron is left out: it compiles itself for a minute before it is refused."""
    refused = {}
    for name in ALL:
        optimizer = Optimizer(name=name, weight_decay=0.0 if name in ("torch:Rprop", *REFUSED) else 1e-2)
        try:
            whole = moved(optimizer)
            assert torch.isfinite(whole).all(), name
            assert all(torch.equal(whole, moved(optimizer, stop=stop)) for stop in (1, 4)), name
        except SwapError as error:
            refused[name] = str(error)
    corrected = {name for name in ALL if "did you mean" in refused.get(name, "")}
    assert {name: line for name, line in refused.items() if name not in corrected}.keys() == REFUSED.keys()
    assert all(part in refused[name] and "\n" not in refused[name] for name, part in REFUSED.items())
    assert corrected == {name for name in ALL if needs_a_peak(name)}
    assert len(ALL) - len(refused) > 60


def needs_a_peak(name: str) -> bool:
    short = name.removeprefix("timm:")
    info = timm.optim.get_optimizer_info(short) if short != name else None
    return bool(info and (info.defaults or {}).get("corrected_weight_decay"))


def test_lars_scales_a_layer_s_step_by_its_trust_ratio_and_leaves_alone_what_does_not_decay() -> None:
    """The first step, by hand: λ = c |w| / (|g| + β |w|); of w = (3, 4) and g = (0.6, 0.8), norms are 5 and 1."""
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
        layer.bias.fill_(2.0)
    settings = Optimizer(name="timm:lars", weight_decay=0.2, decay_biases=False, options={"trust_coeff": 0.01})
    lars = new_optimizer(layer, settings, FP32)
    layer.weight.grad, layer.bias.grad = torch.tensor([[0.6, 0.8]]), torch.tensor([0.5])

    lars.step(10.0, skip_if=torch.tensor(0.0))

    ratio = 0.01 * 5 / (1 + 0.2 * 5)
    expected = [3 - 10 * ratio * (0.6 + 0.2 * 3), 4 - 10 * ratio * (0.8 + 0.2 * 4)]
    assert layer.weight.tolist()[0] == pytest.approx(expected)
    assert layer.bias.item() == pytest.approx(2 - 10 * 0.5)


@pytest.mark.parametrize("name", ["torch:AdamW", "torch:SGD", "timm:lamb", "timm:sgdw"])
@pytest.mark.parametrize(("norms", "biases"), [(True, True), (False, True), (True, False)])
def test_weight_decay_is_left_off_norms_and_biases_as_asked(name: str, norms: bool, biases: bool) -> None:
    """Without a gradient, decay is all that moves a weight."""
    network = small_network(batch_norm=True)
    before = {key: parameter.detach().fill_(1.0).clone() for key, parameter in network.named_parameters()}
    stepper = new_optimizer(
        network, Optimizer(name=name, weight_decay=0.1, decay_norms=norms, decay_biases=biases), FP32
    )
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)

    stepper.step(0.1, skip_if=torch.tensor(0.0))

    decayed = {key for key, parameter in network.named_parameters() if not torch.equal(parameter, before[key])}
    assert decayed == {
        "0.weight",
        "5.weight",
        *(["1.weight", "1.bias"] if norms else []),
        *(["0.bias", "5.bias"] if biases else []),
    }


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", [ADAMW, LARS, NOVOGRAD], ids=["adamw", "lars", "novograd"])
def test_a_step_with_a_gradient_that_is_not_finite_is_not_taken(optimizer: Optimizer, precision: Any) -> None:
    """Steps before and after it are those of a run without it, also where fp16's gradients are scaled and clipped."""

    def weights(gradients: list[float], scaler: Scaler) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        stepper = new_optimizer(layer, replace(optimizer, clip_norm=0.5), scaler)
        for gradient in gradients:
            stepper.zero_grad()
            scaler.scale((layer.weight * gradient).sum() + layer.bias.sum()).backward()
            stepper.step(0.1, skip_if=torch.tensor(float(not math.isfinite(gradient))))
        return weights_of(layer), {**stepper.state(), **stepper.numbers()}

    found, state = weights([1.0, math.inf, 2.0, math.nan, 3.0], Scaler(precision, ALONE.device))
    expected, own = weights([1.0, 2.0, 3.0], FP32)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(state, own)


def test_a_run_whose_gradients_are_not_finite_ends_in_one_line(tmp_path: Path) -> None:
    network = small_network()
    network.register_forward_hook(lambda module, _, output: output * math.nan if module.training else None)
    with pytest.raises(SwapError, match=r"loss or gradient is not finite at epoch 1, step 1; the step was not taken"):
        train_here(network, tmp_path, optimizer=ADAMW)
    assert torch.equal(weights_of(network), weights_of(small_network()))


def test_parameters_that_nothing_depends_on_have_no_state_and_a_run_with_them_is_resumed(tmp_path: Path) -> None:
    def network() -> nn.Module:
        made = small_network()
        made.register_parameter("idle", nn.Parameter(torch.ones(3)))
        return made

    (tmp_path / "whole").mkdir()
    whole, resumed = network(), network()
    train_here(whole, tmp_path / "whole", optimizer=LAMB)
    train_here(network(), tmp_path, replace(a_run(), epochs=1), optimizer=LAMB)
    record = train_here(resumed, tmp_path, optimizer=LAMB)
    assert len(record.curve) == 3 and not list(tmp_path.glob("*.damaged"))
    assert torch.equal(weights_of(resumed), weights_of(whole))


def test_of_snapshots_with_another_state_training_takes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from swap_pipeline.storage.tensor_files import read_tensors, write_tensors

    train_here(small_network(), tmp_path, replace(a_run(), epochs=1), optimizer=NOVOGRAD)
    file = next(tmp_path.glob("snapshot_*"))
    tensors, info = read_tensors(file)
    numbers = info["optimizer"]
    lacking = {key: tensor for key, tensor in tensors.items() if key != "optimizer.exp_avg.0.weight"}
    for other in (
        (lacking, info),
        ({**tensors, "optimizer.extra.0.weight": torch.ones(3)}, info),
        (tensors, {**info, "optimizer": {**numbers, "step.0.weight": 3.0}}),
        (tensors, {**info, "optimizer": {**numbers, "extra.0.weight": 3}}),
        (tensors, {**info, "optimizer": {}}),
        (tensors, {**info, "optimizer": [3]}),
    ):
        for old in tmp_path.glob("snapshot_*"):
            old.unlink()
        write_tensors(file, *other)
        network, whole = small_network(), tmp_path / "whole"
        whole.mkdir(exist_ok=True)
        train_here(network, tmp_path, replace(a_run(), epochs=1), optimizer=NOVOGRAD)
        assert f"warning: {file}" in capsys.readouterr().out


def with_entries(**entries: Any) -> dict[str, Any]:
    found = tree()
    for section, changes in entries.items():
        for key, value in changes.items():
            found[section][key] = value
    return found


def test_a_phase_takes_over_what_its_optimizer_section_does_not_mention() -> None:
    own = {"name": "timm:lars", "decay_norms": False, "options": {"momentum": 0.9}}
    params = parse_params(
        with_entries(
            optimizer={"weight_decay": 1e-4, "clip_norm": 2.0, "label_smoothing": 0.1},
            phase1={"optimizer": own},
            phase2={"optimizer": {"momentum": 0.8, "weight_decay": 0}},
        )
    )
    common = {"clip_norm": 2.0, "label_smoothing": 0.1}
    assert params.optimizers == (
        Optimizer(**own, weight_decay=1e-4, **common),
        Optimizer(momentum=0.8, weight_decay=0.0, **common),
    )


def test_a_phase_with_another_optimizer_does_not_take_over_options() -> None:
    given = with_entries(phase1={"optimizer": {"clip_norm": 1.0}}, phase2={"optimizer": {"name": "sgd"}})
    given["optimizer"] = {"name": "timm:lars", "options": {"momentum": 0.8}}
    lars, sgd = parse_params(given).optimizers
    assert (lars.name, lars.options, lars.clip_norm) == ("timm:lars", {"momentum": 0.8}, 1.0)
    assert sgd == Optimizer()


@pytest.mark.parametrize(
    ("phase1", "message"),
    [
        ({"name": "lars"}, r"phase1\.optimizer\.name is 'lars': choose one of sgd, torch:<class>, timm:<name>$"),
        ({"name": "SGD"}, r"phase1\.optimizer\.name is 'SGD': did you mean sgd\?"),
        ({"name": "torhc:AdamW"}, r"did you mean torch:<class>\?"),
        ({"name": "torch:"}, r"did you mean torch:<class>\?"),
        ({"options": {"fused": True}}, r"phase1\.optimizer\.options is set, but sgd has none"),
        ({"momentum": 0}, r"phase1\.optimizer\.nesterov is true but phase1\.optimizer\.momentum is 0"),
        (
            {"name": "timm:lars", "momentum": 0.9},
            r"phase1\.optimizer\.momentum is for sgd and has no effect on timm:lars",
        ),
        ({"name": "torch:AdamW", "nesterov": True}, r"phase1\.optimizer\.nesterov is for sgd and has no effect on"),
        ({"nme": "sgd"}, r"phase1\.optimizer\.nme is not a known parameter: did you mean name\?"),
    ],
)
def test_a_contradiction_is_refused_in_one_line_that_names_it(phase1: dict[str, Any], message: str) -> None:
    with pytest.raises(SwapError, match=message) as raised:
        parse_params(with_entries(phase1={"optimizer": phase1}))
    assert "\n" not in str(raised.value)


def test_fork_tests_need_the_same_optimizer_in_both_phases() -> None:
    fork = {"stop": "fork", "fork_batch_size": 90, "fork_lr": 0.1}
    with pytest.raises(SwapError, match=r"phase1\.stop is fork, .* but phase 2 has another one"):
        parse_params(with_entries(phase1={**fork, "optimizer": {"name": "timm:lars"}}))


@pytest.mark.parametrize(
    ("phase2", "message"),
    [
        ({"name": "torch:AdmaW"}, r"phase2\.optimizer\.name is 'torch:AdmaW': did you mean torch:AdamW .*\?"),
        ({"name": "timm:novgrad"}, r"phase2\.optimizer\.name is 'timm:novgrad': did you mean timm:novograd"),
        ({"name": "timm:fusedlamb"}, r"phase2\.optimizer\.name is 'timm:fusedlamb'"),
        (
            {"name": "timm:lars", "options": {"trust_coef": 1}},
            r"optimizer\.options\.trust_coef is no .*did you mean trust_coeff",
        ),
        (
            {"name": "timm:lars", "options": {"lr": 1}},
            r"optimizer\.options\.lr is no option of timm:lars: the learning rate",
        ),
        (
            {"name": "timm:lars", "options": {"weight_decay": 1}},
            r"options\.weight_decay is no .*: set weight_decay beside",
        ),
        ({"name": "torch:Rprop"}, r"phase2\.optimizer\.weight_decay is 0\.0005, but torch:Rprop has none: set it to 0"),
    ],
)
def test_what_a_library_does_not_have_is_refused_before_phase_1(phase2: dict[str, Any], message: str) -> None:
    params = parse_params(with_entries(phase2={"optimizer": phase2}))
    with pytest.raises(SwapError, match=message) as raised:
        check_optimizers(params)
    assert "\n" not in str(raised.value)


def test_options_of_a_wrong_kind_are_refused_in_one_line() -> None:
    for options in ({"betas": [2.0, 0.9]}, {"betas": "many"}, {"eps": [1]}):
        with pytest.raises(
            SwapError, match=r"params\.yaml: optimizer\.options do not fit torch:AdamW: \w+Error"
        ) as raised:
            new_optimizer(nn.Linear(2, 2), Optimizer(name="torch:AdamW", options=options), FP32)
        assert "\n" not in str(raised.value)


def test_without_timm_its_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)  # what makes an import of it fail
    with pytest.raises(SwapError, match=r"optimizer\.name is 'timm:lars', but timm is not installed: run `pip install"):
        class_of("timm:lars")


def test_momentum_of_timm_s_optimizers_is_0_9_as_timm_itself_makes_them() -> None:
    ours, theirs = class_of("timm:nlars"), timm.optim.create_optimizer_v2(nn.Linear(2, 2), "nlars")
    made = ours(nn.Linear(2, 2).parameters())
    assert isinstance(new_optimizer(nn.Linear(2, 2), LARS, FP32), Named)
    assert (made.defaults["momentum"], made.defaults["nesterov"]) == (0.9, True)
    assert (theirs.defaults["momentum"], theirs.defaults["nesterov"]) == (0.9, True)
