"""The state of a run that is under way, as files: the newest two, so that a damaged one does no harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.errors import DamagedFileError, SwapError
from swap_pipeline.storage.tensor_files import UnreadableFileError, read_tensors, write_tensors

_SNAPSHOT = "snapshot_*.safetensors"


def write_snapshot(
    folder: Path, epoch: int, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], *, step: int = 0
) -> None:
    """Keep the state after `epoch` epochs and `step` steps, and the one before it, in case this file is damaged."""
    name = f"snapshot_{epoch:06d}_{step:09d}" if step else f"snapshot_{epoch:06d}"
    # Not forced to disk: after a power cut a torn file fails its digest and the one before it is taken.
    write_tensors(folder / f"{name}.safetensors", tensors, info, durable=False)
    for old in sorted(folder.glob(_SNAPSHOT))[:-2]:
        old.unlink()


def read_snapshot(
    folder: Path, misfit: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], str] = lambda tensors, info: ""
) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The newest whole snapshot, if there is one; a damaged one is set aside.

    So is one that is not this run's: `misfit` says why, or nothing.
    """
    for path in sorted(folder.glob(_SNAPSHOT), reverse=True):
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
    number = snapshot.stem.split("_")[1]
    return int(number) if number.isdecimal() else 0
