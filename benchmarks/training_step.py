"""A training step: the overhead of data, augmentation, metrics, schedule, progress and the check for NaN.

`train` itself, over an epoch of random images of CIFAR's shape, prepared on disk, against a bare loop of forward,
backward and step on one fixed batch: the same network, batch size, threads, memory format and optimizer. Seconds are
those that `train` reports, without evaluation and snapshots. All cores, one process.

Also against what people would write: torchvision's dataset with its v2 transforms and a DataLoader around the same
loop; and Lightning's Trainer with its SWA callback on that DataLoader. Both with the best number of loader processes
from none to two.

Learned: with fused SGD, and with nothing read back in the loop except for the check for NaN, the overhead is a few
percent. Its largest part was an indexed read of every pixel of a batch, with arithmetic in runs of three channels:
3.7 ms for 128 images on one thread. Whole rows take half of that. torch.manual_seed at every step took 0.1 ms, the
generator's own 2 µs. The check for NaN took 0.12 to 0.19 ms at widths 8 and 16, then 0.09 to 0.13 ms with steps counted
on the host, and a third of that as one fused operation. A snapshot takes 2 ms at width 16 (3 MB) and 96 ms at width 64
(53 MB), which a thread writes during training; only the copy remains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import loops, made_up
from benchmarks.children import ROOT, call, environment, result_of, start
from benchmarks.harness import Sample
from benchmarks.machine import missing
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared, left_out

_UNIT = "images/s"


def measure(options: Options) -> Iterator[Row]:
    yield from _against_bare_and_peers(options)
    yield _host(options)
    yield _launches()
    if options.quick:
        return
    prepared = options.scratch / "prepared_256"
    made_up.write_prepared(prepared, num_train=2 * 256, num_test=16)
    # A step takes seconds: two per round, and more rounds.
    found = _in_turns(options, str(prepared), width=64, batch_size=256, contestants=["ours", "bare"], least=9)
    yield _share("training_step/width_64", "width 64, batch 256", found, Limit("≥", 0.98))
    arguments = {"prepared": str(prepared), "width": 64, "batch_size": 256, "rounds": max(options.rounds, 9)}
    every_epoch = {"SWAP_SNAPSHOT_SECONDS": "0"}
    found = result_of(start(loops.wall_of_epochs, arguments, threads=options.cores, more=every_epoch))
    yield compared(
        "training_step/epoch",
        "an epoch with its snapshot (53 MB), ResNet-9 width 64, 2 steps of 256 images",
        ours=("from end to end", Sample(tuple(found["wall"]))),
        other=("its training seconds", Sample(tuple(found["training"]))),
        unit="s",
        limit=Limit("≤", 1.02),
    )


def _host(options: Options) -> Row:
    """With a tiny network, only the overhead of calls is left: by how much the loop makes a step longer."""
    prepared = options.scratch / "prepared_8"
    steps = options.sized(400, 4)
    made_up.write_prepared(prepared, num_train=8 * steps, num_test=16)
    contestants = ["ours", "bare"]
    found = call(
        loops.in_turns,
        threads=1,
        prepared=str(prepared),
        width=2,
        batch_size=8,
        rounds=max(options.rounds, 9),
        contestants=contestants,
    )
    ours, bare = (Sample(tuple(8000 / speed for speed in found[name])) for name in contestants)
    return Row(
        name="training_step/host",
        what="host work in a step, ResNet-9 width 2, batch 8, 1 thread",
        ours="`train`",
        other="bare loop",
        unit="ms",
        our_figures=ours,
        other_figures=bare,
        ratio=Sample(tuple(a - b for a, b in zip(ours.values, bare.values, strict=True))),
        limit=Limit("≤", 0.12),
        note="Host work: the ratio is the difference, in ms a step.",
    )


def _launches() -> Row:
    """Counted, not timed: it uses no GPU (see tests/fake_cuda.py)."""
    key, what = "training_step/launches", "operations of a step on a GPU, bf16, ResNet-9 width 64, batch 512"
    limit = Limit("≤", 130)
    program = [sys.executable, str(ROOT / "tests" / "fake_cuda.py"), "--precision", "bf16"]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["?"])[-1][:200]
        return left_out(key, what, other="", unit="", why=f"no fake CUDA here: {why}", limit=limit)
    counted = json.loads(done.stdout)
    assert counted["reads_within_steps"] == 0
    figure = Sample((counted["operations"],))
    note = "Operations: counted on fake tensors, a mean over 32 steps, none of which reads from the device."
    return Row(
        name=key,
        what=what,
        ours="`train`",
        other="",
        unit="",
        our_figures=figure,
        other_figures=None,
        ratio=figure,
        limit=limit,
        note=note,
    )


def _against_bare_and_peers(options: Options) -> Iterator[Row]:
    width, batch_size = options.sized(16, 4), options.sized(128, 16)
    prepared = options.scratch / "prepared_128"
    made_up.write_prepared(prepared, num_train=options.sized(16, 2) * batch_size, num_test=16)
    peers = {"torchvision": "torchvision, v2, DataLoader", "lightning": "Lightning with SWA"}
    why_not = {name: missing(name) for name in peers}
    present = [name for name in peers if not why_not[name]]
    contestants = ["ours", "bare", *(f"{name}_{number}" for name in present for number in loops.LOADER_PROCESSES)]
    found = _in_turns(options, str(prepared), width=width, batch_size=batch_size, contestants=contestants)
    size = f"width {width}, batch {batch_size}"
    yield _share("training_step/width_16", size, found, Limit("≥", 0.95))
    for name, words in peers.items():
        what = f"training against {words}: {size}"
        key = f"training_step/{name}"
        if why_not[name]:
            yield left_out(key, what, other=words, unit=_UNIT, why=why_not[name], limit=Limit(">", 1))
            continue
        tried = {number: found[f"{name}_{number}"] for number in loops.LOADER_PROCESSES}
        best = max(tried, key=lambda number: tried[number].median)
        yield compared(
            key,
            what,
            ours=(f"`train`, {options.cores} threads", found["ours"]),
            other=(f"{words}, {best} loader process{'' if best == 1 else 'es'}", tried[best]),
            unit=_UNIT,
            limit=Limit(">", 1),
            more={"by_loader_processes": {str(number): sample.as_json() for number, sample in tried.items()}},
        )


def _in_turns(
    options: Options, prepared: str, *, width: int, batch_size: int, contestants: list[str], least: int = 0
) -> dict[str, Sample]:
    found = call(
        loops.in_turns,
        threads=options.cores,
        prepared=prepared,
        width=width,
        batch_size=batch_size,
        rounds=max(options.rounds, least),
        contestants=contestants,
    )
    return {name: Sample(tuple(values)) for name, values in found.items()}


def _share(name: str, size: str, found: dict[str, Sample], limit: Limit) -> Row:
    return compared(
        name,
        f"training step, ResNet-9 {size}",
        ours=("`train`", found["ours"]),
        other=("bare loop", found["bare"]),
        unit=_UNIT,
        limit=limit,
    )
