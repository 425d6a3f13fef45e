"""Phase 3's mean of W weight files, read in pieces of tensors.

θ̂ = (1/W) Σ θ_w    (Algorithm 1, last lines)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.engine.distributed import Group
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.storage.tensor_files import Spec, TensorFile, write_in_pieces

# Tensors of up to this many elements are summed in float64; for larger ones float32 is exact enough, and faster.
_SMALL = 1 << 20
# Elements summed over all files before the next ones are read: few enough to stay in a core's caches, and many enough
# to keep Python's overhead small.
_PIECE = 1 << 18


def average_files(
    paths: Sequence[Path],
    out: Path,
    info: Mapping[str, Any],
    *,
    threads: int = 1,
    durable: bool = True,
    open_file: Callable[[Path], TensorFile] = TensorFile,
) -> None:
    """Write the element-wise mean of `paths` to `out`; `threads` as in `write_in_pieces`, `durable` in `atomic_write`.

    Floating-point tensors are averaged and keep their type. Integer tensors (batch norm's step counters) have no
    meaningful mean: the first file's are kept. Averaged batch-norm statistics make no sense; SWAP recomputes them.
    """
    assert paths
    files = [open_file(path) for path in paths]
    check_alike(files)
    write_in_pieces(out, files[0].layout, lambda key: _mean(files, key), info, threads=threads, durable=durable)


def average_on_ranks(
    paths: Sequence[Path], group: Group, *, open_file: Callable[[Path], TensorFile] = TensorFile
) -> dict[str, torch.Tensor]:
    """The same mean as tensors on every rank: each rank averages a part of them and sends it to the others.

    So every byte of the files is read only once, however many ranks and nodes there are.
    """
    assert paths
    files = [open_file(path) for path in paths]
    check_alike(files)
    layout = files[0].layout
    rank_of = share_out(layout, group.world_size)
    means = {key: _whole(_mean(files, key) if rank == group.rank else (), layout[key]) for key, rank in rank_of.items()}
    return {key: group.send(means[key], sender=rank_of[key]) for key in layout}


def share_out(layout: Mapping[str, Spec], num_ranks: int) -> dict[str, int]:
    """Which rank averages each tensor: largest first, each to the rank with the fewest bytes so far."""
    loads = [(0, rank) for rank in range(num_ranks)]
    rank_of = {}
    for key in sorted(layout, key=lambda key: (-layout[key].num_bytes, key)):
        load, rank_of[key] = loads[0]
        heapq.heapreplace(loads, (load + layout[key].num_bytes, rank_of[key]))
    return rank_of


def _whole(pieces: Iterable[torch.Tensor], spec: Spec) -> torch.Tensor:
    """A tensor from its pieces; without pieces, an uninitialised one."""
    flat, end = torch.empty(spec.num_elements, dtype=spec.dtype), 0
    for piece in pieces:
        start, end = end, end + piece.numel()
        flat[start:end] = piece.reshape(-1)
    return flat.reshape(spec.shape)


def _mean(files: Sequence[TensorFile], key: str) -> Iterator[torch.Tensor]:
    """The mean of one tensor, in pieces, each of which overwrites the previous one.

    Errors in the mean or the files are raised after the last piece.
    """
    spec = files[0].layout[key]
    if not spec.dtype.is_floating_point or not spec.num_elements:
        yield files[0].read(key)
        return
    is_small = spec.num_elements <= _SMALL
    wide = torch.float64 if is_small or spec.dtype == torch.float64 else torch.float32
    length = min(_PIECE, spec.num_elements)
    sums, piece = torch.empty(length, dtype=wide), torch.empty(length, dtype=spec.dtype)
    streams = [file.pieces(key, into=piece) for file in files]
    is_finite = True
    for first in range(0, spec.num_elements, length):
        total = sums[: spec.num_elements - first]
        total.copy_(next(streams[0]))
        for stream in streams[1:]:
            total += next(stream)
        mean = total.div_(len(files)).to(spec.dtype)
        is_finite &= all(math.isfinite(extreme.item()) for extreme in torch.aminmax(mean))
        yield mean
    for stream in streams:
        next(stream, None)  # past the end, to check the digest
    if not is_finite:
        raise _not_finite(files, key)


def _not_finite(files: Sequence[TensorFile], key: str) -> SwapError:
    """Find the cause: a file with NaN or Inf, or else values that are too large."""
    for file in files:
        if not torch.isfinite(file.read(key)).all():
            of_run = _of_run(file)
            remedy = "lower peak_lr and run `dvc repro`, or delete this file and .swap to train the same again"
            return SwapError(
                f"{file.path}: tensor {shown(key)} contains NaN or Inf{of_run}, so it cannot be averaged: "
                f"{remedy if of_run else 'leave it out'}"
            )
    dtype = _words(files[0].layout[key].dtype)
    return SwapError(f"the mean of tensor {shown(key)} is too large for {dtype}: these workers diverged")


def _of_run(file: TensorFile) -> str:
    """Whose weights these are, if the header has that."""
    phase, seed = file.info.get("phase"), file.info.get("seed")
    return f" ({shown(phase)[1:-1]}, seed {shown(seed)})" if isinstance(phase, str) and seed is not None else ""


def check_origin(path: Path, expected: Mapping[str, Any]) -> None:
    """Reject an intact file of another run, copied or restored by mistake."""
    info = TensorFile(path).info
    for key, value in expected.items():
        if info.get(key) != value:
            raise SwapError(
                f"{path} is not the file that belongs there (its header says {key} {shown(info.get(key))}, not "
                f"{shown(value)}): delete it and run `dvc repro` (or `dvc checkout`)"
            )


def check_alike(files: Sequence[TensorFile]) -> None:
    """All files hold the same keys, shapes and types."""
    first = files[0]
    for file in files[1:]:
        for key in sorted(first.layout.keys() ^ file.layout.keys()):
            has, lacks = (first, file) if key in first.layout else (file, first)
            raise SwapError(
                f"{lacks.path} has no tensor {shown(key)}, which {has.path} has: only equal networks can be averaged"
            )
        for key, spec in first.layout.items():
            other = file.layout[key]
            if other != spec:
                raise SwapError(
                    f"{file.path}: tensor {shown(key)} is {_words(other.dtype)} {list(other.shape)}, but in "
                    f"{first.path} it is {_words(spec.dtype)} {list(spec.shape)}: only equal networks can be averaged"
                )


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
