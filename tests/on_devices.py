"""What is tried on several devices, as ranks: GPUs in `make test-gpu`, CPU cores over gloo in `make test`.

`run(body, …)` starts the ranks; a body is one of the functions below, and what it returns on the main rank comes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_RESULT = "result of the main rank: "


def start(body: str, *, processes: int, device: str, variables: dict[str, str] | None = None, **arguments: Any) -> Any:
    """The ranks, once they have ended, whatever became of them."""
    command = [
        sys.executable,
        "-m",
        "swap_pipeline.launch.torchrun",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SWAP_", "TORCHELASTIC"))},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SWAP_DEVICE": device,
        **(variables or {}),
    }
    return subprocess.run(
        [*command, __file__, body, json.dumps(arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def run(body: str, *, processes: int, device: str, variables: dict[str, str] | None = None, **arguments: Any) -> Any:
    done = start(body, processes=processes, device=device, variables=variables, **arguments)
    results = [line.removeprefix(_RESULT) for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    assert done.returncode == 0 and results, f"{body} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(results[-1])


def exchange(group: Any) -> Any:
    from swap_pipeline.cli.gpu_trial import wrong_sums

    return wrong_sums(group)


def train(
    group: Any,
    *,
    shards: int,
    out: str = "",
    precision: Any = "fp32",
    channels_last: bool = True,
    compiled: Any = False,
    snapshots: str | None = None,
    kill: tuple[int, int, int] | None = None,
    epochs: int = 1,
    steps: int = 2,
    learns: bool = False,
) -> Any:
    """Losses by epoch, a digest of the weights, which go to the file `out`, and fp16's scale.

    `kill` is an epoch, a step and a rank that is killed after it.
    """
    from safetensors.torch import save_file

    from swap_pipeline.cli.gpu_trial import digest, learn, little
    from swap_pipeline.config.params import Compute
    from swap_pipeline.training.snapshots import epoch_of_newest_snapshot

    def after_step(epoch: int, step: int) -> None:
        if kill is not None and (epoch, step, group.rank) == tuple(kill):
            os.kill(os.getpid(), signal.SIGKILL)

    task = replace(little(shards), steps=steps, epochs=epochs)
    if learns:
        task = replace(task, steps=8, epochs=4, peak_lr=0.4)
    compute = Compute(precision=precision, channels_last=channels_last, compile=compiled, deterministic=True)
    folder = None if snapshots is None else Path(snapshots)
    record, network = learn(task, group, compute, snapshots=folder, after_step=after_step)
    if out and group.is_main:
        save_file({key: tensor.cpu().contiguous() for key, tensor in network.state_dict().items()}, out)
    return {
        "losses": [row.train_loss for row in record.curve],
        "test": record.score.accuracy,
        "digest": digest(network),
        "epochs": epoch_of_newest_snapshot(folder) if folder else None,
    }


def statistics(group: Any, *, out: str, batch_size: int = 16) -> Any:
    """Exact batch-norm statistics of a new network, to the file `out`."""
    from safetensors.torch import save_file

    from swap_pipeline.cli.gpu_trial import EXACT, little
    from swap_pipeline.config.params import Augment
    from swap_pipeline.engine.batchnorm import batches_of_rank, recompute_statistics
    from swap_pipeline.engine.evaluation import evaluate
    from swap_pipeline.engine.placement import set_up

    task = replace(little(1), steps=5)  # five batches: of eight ranks, three have none
    network, images = task.network(), task.images(group.device)
    set_up(network, EXACT, group)
    batches = batches_of_rank(images, batch_size=batch_size, seed=0, augment=Augment(), group=group)
    recompute_statistics(network, batches, group=group)
    if group.is_main:
        save_file({key: tensor.cpu().contiguous() for key, tensor in network.state_dict().items()}, out)
    score = evaluate(network, images, group=group)
    return {"loss": score.loss, "accuracy": score.accuracy}


def waiting(group: Any, *, precision: Any) -> Any:
    """40 steps in which nothing may wait for the GPU; an error if something does."""
    from swap_pipeline.cli.gpu_trial import learn, little, no_waiting
    from swap_pipeline.config.params import Compute

    with no_waiting(group.device) as after_step:
        learn(replace(little(1), steps=45), group, Compute(precision=precision), after_step=after_step)
    return True


def not_finite(group: Any, *, step: int) -> Any:
    """What is said of gradients that are NaN from a step on, and whether the weights are those of the step before."""
    import torch

    from swap_pipeline.cli.gpu_trial import EXACT, distance, learn, little
    from swap_pipeline.config.params import Optimizer
    from swap_pipeline.engine.precision import Scaler
    from swap_pipeline.errors import SwapError
    from swap_pipeline.training.sgd import Sgd

    task, network, seen = replace(little(1), steps=step + 4), little(1).network(), []

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return gradient if len(seen) <= step else gradient * float("nan")

    network.head.weight.register_hook(poison)  # type: ignore[union-attr]
    said = ""
    try:
        learn(task, group, EXACT, network=network)
    except SwapError as error:
        said = str(error)
    plain, counted = little(1).network(), []

    class EnoughError(Exception):
        pass

    def stop(epoch: int, number: int) -> None:
        counted.append(number)
        if len(counted) == step:
            raise EnoughError

    with contextlib.suppress(EnoughError):
        learn(task, group, EXACT, network=plain, after_step=stop)
    # Momentum too: a step that is called off on the device changes nothing.
    layer = torch.nn.Linear(3, 2).to(group.device)
    sgd = Sgd(layer, Optimizer(), Scaler("fp32", group.device))
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    sgd.step(0.1, skip_if=torch.zeros((), device=group.device))
    before = [t.clone() for t in (*layer.parameters(), *sgd.state().values())]
    sgd.step(0.1, skip_if=torch.ones((), device=group.device))
    after = [*layer.parameters(), *sgd.state().values()]
    untouched = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return {"said": said, "distance": distance(network, plain), "untouched": untouched}


def out_of_memory(group: Any) -> Any:
    """A network and its batch in a thousandth of the GPU's memory."""
    import torch

    from swap_pipeline.cli.gpu_trial import EXACT, learn, little
    from swap_pipeline.config.params import Model

    torch.cuda.set_per_process_memory_fraction(0.002, group.device)
    learn(replace(little(1), model=Model(name="resnet9", width=64), batch_size=512), group, EXACT)


def speed(group: Any, *, width: int, batch_size: int, steps: int, precision: Any) -> Any:
    """Of the loop and of a bare one, in turns."""
    from swap_pipeline.cli.gpu_trial import Task, bare_images_per_second, images_per_second
    from swap_pipeline.config.params import Compute, Model

    task = Task(model=Model(name="resnet9", width=width), batch_size=batch_size, steps=steps)
    compute = Compute(precision=precision, deterministic=False)
    rounds = [(images_per_second(task, group, compute), bare_images_per_second(task, group, compute)) for _ in range(3)]
    return {"ours": max(ours for ours, _ in rounds), "bare": max(bare for _, bare in rounds)}


def main() -> None:
    from swap_pipeline.engine.distributed import process_group
    from swap_pipeline.runtime.stage_process import run_stage

    body, arguments = sys.argv[1:]

    def be_a_rank() -> None:
        with process_group(deterministic=body != "speed") as group:
            result = globals()[body](group, **json.loads(arguments))
            if group.is_main:
                print(_RESULT + json.dumps(result), flush=True)

    run_stage(be_a_rank)


if __name__ == "__main__":
    main()
