"""Copying results from scratch to where DVC expects them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from swap_pipeline.config.instances import Instance
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.job_folder import LAUNCHER_LOCK, RECORD, JobFolder
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.storage.files import copy_file


def remove_unlisted(*folders: Path, seeds: Collection[int]) -> list[Path]:
    """Remove `seed_<S>` and `seed_<S>.json` of seeds that are not listed; returns what was removed."""
    listed = {f"seed_{seed}" for seed in seeds}
    removed = [
        path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if re.fullmatch(r"seed_\d+", path.stem) and path.stem not in listed
    ]
    for path in removed:
        _remove(path)
    return removed


def _remove(path: Path) -> None:
    """Remove a file, link or folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside_damaged(folder: JobFolder) -> None:
    """Rename a complete job's result that is not as it was written, so that it is made again."""
    lock = Lock(folder.path / LAUNCHER_LOCK)
    if not os.path.lexists(folder.result) or not lock.try_acquire():
        return
    try:
        if reason := folder.damage() if folder.is_complete else "it is not a folder":
            aside = folder.path / f"{folder.result_name}.damaged"
            _remove(aside)
            folder.result.rename(aside)
            what = f"{folder.result} is damaged ({reason})"
            print(f"warning: {what}: renamed to {aside.name}; it will be made again", flush=True)
    finally:
        lock.release()


def collect(folder: JobFolder, instance: Instance) -> None:
    """Copy the result to where DVC expects it, if it is intact and its inputs have not changed.

    A copy, not a link: the workspace's file may share an inode with DVC's cache, and damage to that must not reach the
    result in scratch. Temporary files of a killed launcher are removed.
    """
    if reason := folder.damage():
        raise SwapError(f"{folder.result} is damaged ({reason}): run `dvc repro` to make it again")
    _check_current(folder)
    for leftover in instance.record.parent.glob(f".{instance.record.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    if instance.has_models:
        made = [folder.result / name for name in sorted(folder.digests()) if name.endswith(".safetensors")]
        checkpoints = instance.checkpoints
        checkpoints.mkdir(parents=True, exist_ok=True)
        for stale in set(checkpoints.glob("*.safetensors")) - {checkpoints / path.name for path in made}:
            stale.unlink()
        for leftover in checkpoints.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        for path in made:
            copy_file(path, checkpoints / path.name)
    copy_file(folder.result / RECORD, instance.record)
    _check_current(folder)  # again: copying takes time, and DVC records params and deps only after this


def _check_current(folder: JobFolder) -> None:
    if folder.inputs is not None:
        kept = f"its result stays in {folder.path}"
        folder.inputs.check(when="while it ran", remedy=f"{kept}; run `dvc repro` again")
