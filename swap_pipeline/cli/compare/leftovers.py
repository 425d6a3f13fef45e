"""Clearing up after a killed `swap compare`: processes, temporary folders, entries in DVC's queue, unnamed results.

All processes of a comparison have the project's path in their environment, and its experiments are named `new-<name>`
until they are complete, so nothing else is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from swap_pipeline.cli.compare.experiments import list_experiments, rename
from swap_pipeline.errors import SwapError
from swap_pipeline.report.git import git
from swap_pipeline.runtime.job_folder import scratch_root
from swap_pipeline.storage.files import read_json, write_json, write_text

MARK = "SWAP_COMPARE"
"""the environment variable that names the project; set by `swap compare`, never by the user"""
UNFINISHED = "new-"
"""prefix of an experiment's name until it is complete"""
_OURS = re.compile(rf"{UNFINISHED}[a-z]\w*-\d+")
_PATIENCE_SECONDS = 20
_EXPERIMENTS = Path(".dvc/tmp/exps")


def clear_leftovers() -> None:
    """End processes, name complete results and remove the rest; the caller must hold the lock of `swap compare`."""
    _end_processes()
    _release_locks()
    _check_workspace()
    _empty_queue()
    _remove_folders()
    for experiment in list_experiments():
        if _OURS.fullmatch(experiment.name):  # complete, but not renamed yet
            rename(experiment, experiment.name.removeprefix(UNFINISHED))


def _end_processes() -> None:
    """Interrupt first, so that stages end their ranks and DVC removes its folders; then kill."""
    processes = _marked()
    known = {process.pid for process in processes}
    tops = [process for process in processes if _parent(process) not in known]
    for group in {_group(process) for process in tops} - {None, os.getpgrp()}:
        assert group is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGINT)
    psutil.wait_procs(processes, timeout=_PATIENCE_SECONDS)
    while stubborn := _marked():
        for process in stubborn:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(stubborn, timeout=1)


def _marked() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(Path.cwd()) and process.pid != os.getpid():
                found.append(process)
    return found


def _parent(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return None


def _group(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid)
    return None


def _release_locks() -> None:
    """DVC keeps process ids in a file, and would wait for unrelated processes that have such an id now."""
    file = _EXPERIMENTS / "rwlock"
    with contextlib.suppress(OSError, ValueError):
        locks = json.loads(file.read_text(encoding="utf-8"))
        kept = {mode: {path: _of_others(holders) for path, holders in held.items()} for mode, held in locks.items()}
        kept = {mode: {path: holders for path, holders in held.items() if holders} for mode, held in kept.items()}
        if kept != locks:
            write_text(file, json.dumps(kept))


def _of_others(holders: Any) -> Any:
    """One holder, or a list of them, except ours."""
    if isinstance(holders, list):
        return [holder for holder in holders if _of_others(holder)]
    return None if _OURS.search(holders["cmd"]) else holders


def note_start() -> None:
    """To be called before DVC starts an experiment, for which it changes the workspace for a moment."""
    write_json(_start(), {"branch": _branch(), "stash": _stash()})


def forget_start() -> None:
    """To be called when DVC has restored the workspace."""
    _start().unlink(missing_ok=True)


def _start() -> Path:
    return scratch_root() / "compare" / "starting.json"


def _branch() -> str | None:
    return git("symbolic-ref", "--quiet", "--short", "HEAD")


def _stash() -> str | None:
    return git("rev-parse", "--verify", "--quiet", "refs/stash")


def _check_workspace() -> None:
    """If DVC was killed at that moment, HEAD is detached, params are the experiment's and edits are in git's stash."""
    if not _start().exists():
        return
    before = read_json(_start())
    lock = git("rev-parse", "--git-path", "index.lock")
    remedies = [
        *([f"rm {lock}"] if lock and Path(lock).exists() else []),
        *([f"git switch -f {before['branch']}"] if before["branch"] and _branch() is None else []),
        *(["git stash pop"] if _stash() not in (None, before["stash"]) else []),
    ]
    if remedies:
        raise SwapError(
            "DVC was killed while it was starting an experiment, and has left the workspace changed: restore yours "
            f"with `{' && '.join(remedies)}`, then run `swap compare` again"
        )
    forget_start()


def _empty_queue() -> None:
    """DVC queues each experiment before it starts it, and would run leftover entries together with the next one."""
    if git("rev-parse", "--verify", "--quiet", "refs/exps/stash") is None:
        return
    from dvc.repo import Repo

    with Repo() as repo, repo.lock:
        stash = repo.experiments.tempdir_queue.stash
        stash.remove_revs([entry for entry in stash.stash_revs.values() if _OURS.fullmatch(entry.name or "")])


def _remove_folders() -> None:
    """Each has a file that names its experiment; while the folder exists, DVC lists the experiment as running."""
    place = (_EXPERIMENTS / "standalone").resolve()
    known = set()
    for file in [*_EXPERIMENTS.glob("run/*/*.run"), *place.glob("run/*/*.run")]:
        with contextlib.suppress(OSError, ValueError):
            info = json.loads(file.read_text(encoding="utf-8"))
            folder = Path(info["root_dir"]).resolve()
            known.add(folder)
            if _OURS.fullmatch(info["name"] or "") and folder.is_relative_to(place):
                shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(file.parent, ignore_errors=True)
    for folder in place.glob("tmp*"):
        # Killed before its file was written.
        if folder not in known and time.time() - folder.stat().st_mtime > 60:
            shutil.rmtree(folder, ignore_errors=True)
