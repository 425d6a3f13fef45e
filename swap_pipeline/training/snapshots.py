"""Snapshots of a running job: the newest two, in case one is damaged.

For phase 1, which other runs may leave at other epochs, evenly spaced ones stay too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.errors import DamagedFileError, SwapError
from swap_pipeline.storage.tensor_files import UnreadableFileError, read_tensors, write_tensors

_SNAPSHOT = "snapshot_*.safetensors"


def spacing(*, epochs: int, at_most: int) -> int:
    """Epochs between snapshots that stay, such that there are `at_most`, including the two newest and the two written
    last."""
    return max(1, math.ceil(epochs / max(1, at_most - 4)))


def write_snapshot(
    folder: Path,
    epoch: int,
    tensors: Mapping[str, torch.Tensor],
    info: Mapping[str, Any],
    *,
    step: int = 0,
    stays: Callable[[int], bool] | None = None,
) -> None:
    """Write the state after `epoch` epochs and `step` steps; keep the one before it, in case this file is damaged.

    Of the others, keep those at the end of an epoch that `stays`.
    """
    name = f"snapshot_{epoch:06d}_{step:09d}" if step else f"snapshot_{epoch:06d}"
    # No fsync: after a power cut a torn file fails its digest, and the one before it is used.
    written = folder / f"{name}.safetensors"
    write_tensors(written, tensors, info, durable=False)
    there = sorted(folder.glob(_SNAPSHOT))
    last = {*there[-2:], *[path for path in there if path <= written][-2:]}
    for old in there:
        if old not in last and not (stays is not None and _step_of(old) == 0 and stays(_epoch_of(old))):
            old.unlink()


class SnapshotWriter:
    """Writes snapshots in a thread, from a copy, while training continues; the next call raises any error."""

    def __init__(self, folder: Path, stays: Callable[[int], bool] | None = None) -> None:
        self._folder, self._stays = folder, stays
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written: Future[None] | None = None

    def write(self, epoch: int, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], *, step: int = 0) -> None:
        """Start writing this state, once the one before it is written."""
        self.wait()
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        self._written = self._thread.submit(
            write_snapshot, self._folder, epoch, copies, info, step=step, stays=self._stays
        )

    def is_busy(self) -> bool:
        """Whether a snapshot is being written; raises the last one's error."""
        if self._written is not None and self._written.done():
            self.wait()
        return self._written is not None

    def wait(self) -> None:
        """Wait until the snapshot is written."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Like `wait`, after the last snapshot."""
        self._thread.shutdown()
        self.wait()


def read_snapshot(
    folder: Path,
    misfit: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], str] = lambda tensors, info: "",
    *,
    after: int = -1,
    not_after: int | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The newest intact snapshot later than the epoch `after` and not later than `not_after`, if there is one.

    Damaged ones are renamed, and so are other runs': `misfit` returns why a snapshot is not this run's, or "".
    """
    for path in sorted(folder.glob(_SNAPSHOT), reverse=True):
        if _epoch_of(path) <= after or (not_after is not None and (_epoch_of(path), _step_of(path)) > (not_after, 0)):
            continue
        try:
            tensors, info = read_tensors(path)
            reason = misfit(tensors, info)
        except UnreadableFileError:
            raise  # the user has to fix the disk; do not train again what is on it
        except DamagedFileError as error:
            reason = error.reason
        except SwapError as error:
            reason = str(error)
        if not reason:
            return tensors, info
        aside = path.with_suffix(".damaged")
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            path.replace(aside)
        print(
            f"warning: {path} cannot be used ({reason}): renamed to {aside.name}; training resumes from "
            f"the snapshot before it, if there is one",
            flush=True,
        )
    return None


def epoch_of_newest_snapshot(folder: Path) -> int:
    """The number of epochs in it; 0 if there is none."""
    return max((_epoch_of(path) for path in folder.glob(_SNAPSHOT)), default=0)


def drop_snapshots(folder: Path, *, from_epoch: int = 0) -> None:
    """Called when a run is complete, or has to repeat `from_epoch` and all later epochs."""
    for path in folder.glob(_SNAPSHOT):
        if _epoch_of(path) >= from_epoch:
            path.unlink()


def _epoch_of(snapshot: Path) -> int:
    return _number_in(snapshot, 1)


def _step_of(snapshot: Path) -> int:
    """0 at the end of an epoch."""
    return _number_in(snapshot, 2)


def _number_in(snapshot: Path, place: int) -> int:
    """`snapshot_<epoch>` or, within an epoch, `snapshot_<epoch>_<step>`."""
    number = "".join(snapshot.stem.split("_")[place : place + 1])
    return int(number) if number.isdecimal() else 0
