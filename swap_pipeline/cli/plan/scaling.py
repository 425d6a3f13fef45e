"""python -m swap_pipeline.cli.plan.scaling

What more GPUs and larger networks cost besides computing: the exchange of gradients, reading and hashing files. A model
on paper, with the assumptions of `Hardware`; the command prints the tables of docs/scaling.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BYTES = 4  # of a number in fp32: weights, gradients, momentum, checkpoints


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a cluster is taken to have."""

    link_bytes_per_second: float = 25e9
    """of each GPU to its neighbour in the ring: 200 Gbit/s"""
    latency_seconds: float = 5e-6
    """of each of the ring's 2(n−1) messages"""
    reader_bytes_per_second: float = 2e9
    """that one process gets from the shared file system"""
    files_bytes_per_second: float = 100e9
    """that all nodes together get from it"""
    hash_bytes_per_second: float = 0.6e9
    """of DVC's md5, in one process"""
    check_bytes_per_second: float = 1.5e9
    """of a rank's sha256"""
    gpus_per_node: int = 8


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What the numbers come to, in seconds and bytes."""

    compute_seconds: float
    """of a step of phase 1, on each GPU"""
    exchange_seconds: float
    """of its gradients, if nothing else went on"""
    step_seconds: float
    """of both: the exchange hides behind the backward pass, as far as that is long enough"""
    averaging_seconds: float
    """phase 3's main rank reads all models and writes one"""
    loading_seconds: float
    """then every node reads that one"""
    checking_seconds: float
    """before that, every rank makes sure by a hash that the workers' models are those it was started for"""
    hashing_seconds: float
    """DVC hashes the models of all workers, once"""
    worker_bytes: int
    """of the models of all workers"""

    @property
    def efficiency(self) -> float:
        """Share of a step of phase 1 that is computing."""
        return self.compute_seconds / self.step_seconds


def scaling(
    *,
    gradient_bytes: int,
    state_bytes: int,
    num_models: int,
    devices: int,
    compute_seconds: float,
    hardware: Hardware | None = None,
) -> Scaling:
    """`compute_seconds` is what a step takes without others; models are those that phase 3 averages."""
    hardware = hardware or Hardware()
    exchange = ring_seconds(gradient_bytes, devices, hardware)
    backward = compute_seconds * 2 / 3
    models, nodes = num_models * state_bytes, math.ceil(devices / hardware.gpus_per_node)
    return Scaling(
        compute_seconds=compute_seconds,
        exchange_seconds=exchange,
        step_seconds=compute_seconds + max(0.0, exchange - backward),
        averaging_seconds=(models + state_bytes) / hardware.reader_bytes_per_second,
        loading_seconds=max(
            state_bytes / hardware.reader_bytes_per_second, nodes * state_bytes / hardware.files_bytes_per_second
        ),
        checking_seconds=max(
            models / hardware.check_bytes_per_second, nodes * models / hardware.files_bytes_per_second
        ),
        hashing_seconds=models / hardware.hash_bytes_per_second,
        worker_bytes=models,
    )


def ring_seconds(num_bytes: int, devices: int, hardware: Hardware) -> float:
    """A ring all-reduce: everybody sends 2(n−1)/n of the bytes, in 2(n−1) messages."""
    sent = 2 * (devices - 1) / devices * num_bytes
    return sent / hardware.link_bytes_per_second + 2 * (devices - 1) * hardware.latency_seconds


PARAMETERS = (7_000_000, 70_000_000, 700_000_000, 7_000_000_000)
DEVICES = (8, 64, 256, 1024)
BATCH_SIZE = 8192
WORKERS = 8
FLOP_PER_PARAMETER = 1000
"""of an image in training; ResNet-50 at 224 pixels has 960"""
FLOP_PER_SECOND = 100e12
"""of a GPU, as sustained"""


def example(parameters: int, devices: int) -> Scaling:
    """One cell of the tables: a batch of phase 1 that does not grow with the number of GPUs."""
    compute = BATCH_SIZE / devices * FLOP_PER_PARAMETER * parameters / FLOP_PER_SECOND
    return scaling(
        gradient_bytes=BYTES * parameters,
        state_bytes=BYTES * parameters,
        num_models=WORKERS,
        devices=devices,
        compute_seconds=compute,
    )


def tables() -> str:
    """Markdown: phase 1 by size of the network and GPUs, then what depends on the size alone."""

    def cell(parameters: int, devices: int) -> str:
        one = example(parameters, devices)
        return f"{text_of_time(one.step_seconds)} ({100 * one.efficiency:.0f} %)"

    steps = [[_count(p), *(cell(p, n) for n in DEVICES)] for p in PARAMETERS]
    files = []
    for p in PARAMETERS:
        few, many = example(p, DEVICES[0]), example(p, DEVICES[-1])
        seconds = (few.averaging_seconds, many.loading_seconds, many.checking_seconds, few.hashing_seconds)
        files.append(
            [
                _count(p),
                f"{3 * BYTES * p / 1e9:.3g} GB",
                f"{few.worker_bytes / 1e9:.3g} GB",
                *map(text_of_time, seconds),
            ]
        )
    return "\n".join(
        [
            *_table(["parameters", *(f"{n:,} GPUs" for n in DEVICES)], steps),
            "",
            *_table(
                [
                    *("parameters", "memory a GPU", f"{WORKERS} checkpoints", "averaging"),
                    *("loading", "checking", "DVC's hashing"),
                ],
                files,
            ),
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---:' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _count(number: int) -> str:
    return f"{number // 10**9} billion" if number >= 10**9 else f"{number // 10**6} million"


def text_of_time(seconds: float) -> str:
    """`4.5 ms`, `12.6 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


if __name__ == "__main__":
    print(tables())
