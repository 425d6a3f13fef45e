"""The state of a run that is under way, as files: the newest two, so that a damaged one does no harm.

Of a course that may be left at other epochs, evenly spaced ones stay too.
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
    """Every how many epochs a snapshot stays, so that with the newest and the last written ones, two each, there are
    at most so many."""
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
    """Keep the state after `epoch` epochs and `step` steps, and the one before it, in case this file is damaged.

    Of all others, those at the end of an epoch that `stays`.
    """
    name = f"snapshot_{epoch:06d}_{step:09d}" if step else f"snapshot_{epoch:06d}"
    # Not forced to disk: after a power cut a torn file fails its digest and the one before it is taken.
    written = folder / f"{name}.safetensors"
    write_tensors(written, tensors, info, durable=False)
    there = sorted(folder.glob(_SNAPSHOT))
    last = {*there[-2:], *[path for path in there if path <= written][-2:]}
    for old in there:
        if old not in last and not (stays is not None and _step_of(old) == 0 and stays(_epoch_of(old))):
            old.unlink()


class SnapshotWriter:
    """Writes snapshots in a thread, from a copy, while training continues; an error reaches whoever asks next."""

    def __init__(self, folder: Path, stays: Callable[[int], bool] | None = None) -> None:
        self._folder, self._stays = folder, stays
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written: Future[None] | None = None

    def write(self, epoch: int, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], *, step: int = 0) -> None:
        """Begin to write this state, once the one before it is written."""
        self.wait()
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        self._written = self._thread.submit(
            write_snapshot, self._folder, epoch, copies, info, step=step, stays=self._stays
        )

    def is_busy(self) -> bool:
        """Whether one is being written; raises what went wrong with the last one."""
        if self._written is not None and self._written.done():
            self.wait()
        return self._written is not None

    def wait(self) -> None:
        """Until what was given is written."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """As `wait`, and there is nothing more to come."""
        self._thread.shutdown()
        self.wait()


def read_snapshot(
    folder: Path,
    misfit: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], str] = lambda tensors, info: "",
    *,
    after: int = -1,
    not_after: int | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The newest whole snapshot `after` so many epochs and `not_after` so many, if there is one; a damaged one is set
    aside.

    So is one that is not this run's: `misfit` says why, or nothing.
    """
    for path in sorted(folder.glob(_SNAPSHOT), reverse=True):
        if _epoch_of(path) <= after or (not_after is not None and (_epoch_of(path), _step_of(path)) > (not_after, 0)):
            continue
        try:
            tensors, info = read_tensors(path)
            reason = misfit(tensors, info)
        except UnreadableFileError:
            raise  # it is for people to mend the disk, and not to train again what stands on it
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
            f"warning: {path} cannot be used ({reason}): it is set aside as {aside.name}, and training goes on from "
            f"the snapshot before it, if there is one",
            flush=True,
        )
    return None


def epoch_of_newest_snapshot(folder: Path) -> int:
    """How many epochs it has behind it; 0 also where there is none."""
    return max((_epoch_of(path) for path in folder.glob(_SNAPSHOT)), default=0)


def drop_snapshots(folder: Path, *, from_epoch: int = 0) -> None:
    """Called when a run is complete and has nothing left to resume, or has to repeat that epoch and all after it."""
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
