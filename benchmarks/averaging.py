"""Averaging: seconds and memory for 8 weight files of 400 MB, against just reading them, and against peers.

`average_files` with two threads, each time in a fresh process with a rank's allocator settings and torch threads
(peers: all cores and the default allocator), timed inside it after its imports. The files have just been written and
are read again in the warm-up round, so they are in the page cache for all; on a cold disk, reading takes most of the
time and the ratio is nearer to 1. Reading uses plain reads into one buffer that stays in the core's cache, which is the
fastest way. No result is forced to disk.

Memory is the peak resident size above that at the start, including pages of mapped files; without those (the system can
reclaim them at any time) it is `private` in the file, sampled every millisecond in the warm-up round. Its growth with W
is a row: 32 files against one.

Peers: timm's `avg_checkpoints` (the script is not in timm's package, so its steps are followed here with timm's own
loader: sums in float64, clamped, cast); mergekit's linear merge (`mergekit-pytorch`); a loop of safetensors'
`load_file`.

Learned: the first version mapped each tensor, hashed it, checked it for NaN and added it up, each in a pass over
memory, which took 5 to 9 times as long as reading alone; and the mapped pages of all files, 3.2 GB, counted as its
memory. Now it reads, hashes and adds a megabyte at a time while that is in the caches, and checks only the mean for
NaN. The mean is also hashed and written in such pieces, so that no whole tensor is held. With one thread that took 4.2
times as long as reading, half of it what one core can add, hash and write. Two threads, with a tensor each, take 0.6 of
one's time. Pieces of 256 KB, 512 KB, 1 MB and 2 MB with two threads: 0.60, 0.46, 0.39 and 0.36 s (medians of 4
interleaved runs, where reading took 0.29 s); a megabyte saves memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Memory, result_of, start
from benchmarks.harness import Sample, interleaved
from benchmarks.machine import missing
from benchmarks.made_up import largest_tensor, write_models
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared, left_out

_MB = 1_000_000
_THREADS = 2  # of a phase 3 with two ranks
_ALLOWED_BESIDE_TENSORS = 64 * _MB
_PEERS = {
    "timm": "timm's avg_checkpoints",
    "mergekit": "mergekit's linear merge",
    "load_file": "a loop of load_file",
}


def measure(options: Options) -> Iterator[Row]:
    number, num_bytes = options.sized(8, 4), options.sized(400, 2) * _MB
    folder = options.scratch / "models"
    options.say(f"writing {number} files of {num_bytes // _MB} MB")
    paths = write_models(folder, number=number, num_bytes=num_bytes)
    why_not = {name: missing(name) for name in ("timm", "mergekit")}
    names = ["ours", "read", "read_by_threads", *(name for name in _PEERS if not why_not.get(name))]
    memory: dict[str, list[float]] = {name: [] for name in names}
    private: dict[str, float] = {}

    def seconds_of(name: str) -> float:
        found = fresh(name, paths, cores=options.cores, sample=name not in private)
        memory[name].append(found["peak"] / _MB)
        private.setdefault(name, found["private"] / _MB)
        return float(found["seconds"])

    measures = {name: functools.partial(seconds_of, name) for name in names}
    found = interleaved(measures, rounds=options.rounds, say=options.say)
    peaks = {name: Sample(tuple(values[1:])) for name, values in memory.items()}
    size = f"{number} files of {num_bytes // _MB} MB"
    yield compared(
        "averaging/reading",
        f"averaging {size}",
        ours=("average_files", found["ours"]),
        other=("reading the bytes", found["read"]),
        unit="s",
        limit=Limit("≤", 2.0),
        note="Averaging: all files are in the page cache, for ours and for those it is compared with.",
    )
    yield compared(
        "averaging/reading_by_threads",
        f"averaging {size}, against reading by as many threads",
        ours=("average_files", found["ours"]),
        other=(f"reading the bytes, {_THREADS} threads", found["read_by_threads"]),
        unit="s",
    )
    allowed = (2 * largest_tensor(num_bytes) + _ALLOWED_BESIDE_TENSORS) / _MB
    yield compared(
        "averaging/memory",
        f"averaging {size}, peak memory above start",
        ours=("average_files", peaks["ours"]),
        other=("2 × the largest tensor + 64 MB", Sample((allowed,) * options.rounds)),
        unit="MB",
        limit=Limit("≤", 1.0),
        more={"private_mb": private},
    )
    many = [path for _ in range(4) for path in paths]

    def peak_of(files: Sequence[Path]) -> float:
        return float(fresh("ours", files, cores=options.cores)["peak"]) / _MB

    flat = interleaved(
        {"many": lambda: peak_of(many), "one": lambda: peak_of(paths[:1])},
        rounds=options.rounds,
        warm_up=0,
        say=options.say,
    )
    added = (max(0.0, (m - o) / (len(many) - 1)) for m, o in zip(flat["many"].values, flat["one"].values, strict=True))
    yield compared(
        "averaging/memory_of_many",
        f"averaging {len(many)} files instead of 1, memory that each further one adds",
        ours=("average_files", Sample(tuple(added))),
        other=("a hundredth of its size", Sample((num_bytes / 100 / _MB,) * options.rounds)),
        unit="MB",
        limit=Limit("≤", 1.0),
        more={"peak_mb": {name: sample.as_json() for name, sample in flat.items()}},
    )
    for name, words in _PEERS.items():
        for kind, unit, limit in (("seconds", "s", Limit("<", 1)), ("memory", "MB", Limit("≤", 0.25))):
            key, what = f"averaging/{name}_{kind}", f"averaging against {words}, {kind}"
            if why := why_not.get(name):
                yield left_out(key, what, other=words, unit=unit, why=why, limit=limit)
                continue
            figures = found if kind == "seconds" else peaks
            ours, other = ("average_files", figures["ours"]), (words, figures[name])
            yield compared(key, what, ours=ours, other=other, unit=unit, limit=limit)
    shutil.rmtree(folder)


def fresh(name: str, paths: Sequence[Path], *, cores: int, sample: bool = False) -> dict[str, Any]:
    """Seconds and memory of one way to average, in a process of its own; `sample` also looks for `private` memory."""
    out = paths[0].parent / f"mean_{name}"
    arguments = {"name": name, "paths": [str(path) for path in paths], "out": str(out), "sample": sample}
    as_rank = name not in _PEERS
    threads = max(1, cores // 2) if as_rank else cores  # phase 3 has two ranks, of which one averages
    found: dict[str, Any] = result_of(start(timed, arguments, threads=threads, as_rank=as_rank))
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
    return found


def timed(*, name: str, paths: list[str], out: str, sample: bool) -> dict[str, float]:
    """In a child."""
    work = _WAYS[name]([Path(path) for path in paths], Path(out))
    memory, private = Memory(), _PrivateMemory()
    with private if sample else contextlib.nullcontext():
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": memory.peak, "private": private.peak}


class _PrivateMemory:
    """The highest resident size without pages of mapped files, above that at the start; sampled."""

    def __init__(self) -> None:
        self._start = self._highest = self._now()

    def __enter__(self) -> _PrivateMemory:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        return self._highest - self._start

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self._highest = max(self._highest, self._now())

    @staticmethod
    def _now() -> int:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="utf-8").split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


Work = Callable[[], None]


def _ours(paths: Sequence[Path], out: Path) -> Work:
    from swap_pipeline.averaging.mean import average_files

    return lambda: average_files(paths, out, {}, threads=_THREADS, durable=False)


def _read(paths: Sequence[Path], out: Path) -> Work:
    def work() -> None:
        buffer = memoryview(bytearray(1 << 19))
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return work


def _read_by_threads(paths: Sequence[Path], out: Path) -> Work:
    shares = [_read(paths[first::_THREADS], out) for first in range(_THREADS)]

    def work() -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(share) for share in shares]:
                done.result()

    return work


def _load_file(paths: Sequence[Path], out: Path) -> Work:
    from safetensors.torch import load_file, save_file

    def work() -> None:
        total = {key: tensor.clone() for key, tensor in load_file(paths[0]).items()}
        for path in paths[1:]:
            for key, tensor in load_file(path).items():
                total[key] += tensor
        save_file({key: tensor / len(paths) for key, tensor in total.items()}, out)

    return work


def _timm(paths: Sequence[Path], out: Path) -> Work:
    from safetensors.torch import save_file
    from timm.models import load_state_dict

    def work() -> None:
        total: dict[str, torch.Tensor] = {}
        for path in paths:
            for key, tensor in load_state_dict(str(path)).items():
                if key in total:
                    total[key] += tensor.to(torch.float64)
                else:
                    total[key] = tensor.clone().to(torch.float64)
        bounds = torch.finfo(torch.float32)
        means = {key: tensor.div_(len(paths)).clamp(bounds.min, bounds.max).float() for key, tensor in total.items()}
        save_file(means, out)

    return work


def _mergekit(paths: Sequence[Path], out: Path) -> Work:
    from mergekit.scripts.merge_raw_pytorch import main

    config = out.with_suffix(".yaml")
    models = "".join(f"  - model: {path}\n    parameters: {{weight: 1.0}}\n" for path in paths)
    config.write_text(f"merge_method: linear\nmodels:\n{models}", encoding="utf-8")
    return lambda: main([str(config), str(out), "--quiet"], standalone_mode=False)


_WAYS: dict[str, Callable[[Sequence[Path], Path], Work]] = {
    "ours": _ours,
    "read": _read,
    "read_by_threads": _read_by_threads,
    "load_file": _load_file,
    "timm": _timm,
    "mergekit": _mergekit,
}
