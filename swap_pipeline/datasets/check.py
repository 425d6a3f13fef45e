"""Checks of `params.yaml` before DVC uses it: `swap check`, and the pipeline's first stage.

DVC puts values of `params.yaml` into paths before any code of this project runs: it deletes what `workers.seeds` names
as an output, and reads all of `data.root` and of earlier outputs. So all of this is checked here first, without torch
and in well under a second, unless an optimizer of torch or timm has to be looked up.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from swap_pipeline.config.optimizers import check_optimizers
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.runtime.inputs import check_dvc_sees_start

OUTS = ("checkpoints", "data/checked.txt", "data/prepared", "metrics", "plots", "report")
_NOT_DATA = (".dvc", ".git", ".swap", *OUTS)
# DVC would hang on these, or read forever.
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check(file: Path = Path("params.yaml")) -> Params:
    """Read a params file; a `SwapError` names the first thing that would make `dvc repro` fail."""
    params = read_params(file)
    try:
        _check_root(params.data.root)
        check_optimizers(params)
        _check_start(params.phase1.start)
    except SwapError as error:
        raise SwapError(f"{file}: {error}") from None
    for special in filter(None, map(_special_file, map(Path, OUTS))):
        raise SwapError(f"{special}, which DVC cannot read: remove it")
    return params


def _check_root(text: str) -> None:
    """Check that DVC can use `data.root` as a dependency: a local folder with nothing but files and folders."""
    what = f"data.root is {shown(text)}"
    if "://" in text:
        raise SwapError(f"{what}, an address: download the data, and name the folder that it is in")
    root = Path(text)
    if not text or "\0" in text or not root.is_dir():
        problem = "is not a folder" if text and "\0" not in text and os.path.lexists(root) else "does not exist"
        raise SwapError(f"{what}, which {problem}: create it, or name the right folder")
    for name in _NOT_DATA:
        other, place = Path(name).resolve(), root.resolve()
        if place == other or place in other.parents or other in place.parents:
            raise SwapError(f"{what}, which overlaps with {name} of this project: choose a separate folder")
    if special := _special_file(root):
        raise SwapError(f"{what}, but {special}, which DVC cannot read: remove it")


def _check_start(text: str | None) -> None:
    """That phase 1 starts from a file, and DVC depends on it."""
    if text is not None:
        what = f"phase1.start is {shown(text)}"
        if not text or "\0" in text or not Path(text).is_file():
            problem = "is not a file" if text and "\0" not in text and os.path.lexists(text) else "does not exist"
            raise SwapError(f"{what}, which {problem}: name a safetensors file")
        if out := next((name for name in OUTS if Path(name).resolve() in Path(text).resolve().parents), None):
            raise SwapError(f"{what}, which this pipeline makes itself ({out}): copy it to another folder")
    if Path("dvc.yaml").is_file():
        check_dvc_sees_start(text)


def _special_file(root: Path) -> str:
    """The first entry in a folder that is neither a file or folder nor a link to one; empty if there is none.

    Broken links do no harm here: reading the images reports them.
    """
    folders = [str(root)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif not entry.is_file() and not entry.is_dir() and Path(entry).exists():
                        kind = stat.S_IFMT(entry.stat().st_mode)
                        return f"{shown(entry.path)} is {_KINDS.get(kind, 'no file')}"
        except OSError:
            continue  # an unreadable folder: DVC reports it
    return ""
