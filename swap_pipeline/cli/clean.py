"""`swap clean`: lists and removes scratch that no run of the current params needs.

Those runs are the phases, with all workers, and the analysis. A folder belongs to one if its name is still the
fingerprint of the run's inputs. Running jobs, which hold a lock or are in Slurm's queue, are never touched.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swap_pipeline.cli.amounts import in_bytes
from swap_pipeline.config.instances import ANALYSES, PHASE1, Instance, worker
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.jobs import load
from swap_pipeline.launch.slurm.queue import LOGS, is_in_queue
from swap_pipeline.runtime.inputs import Inputs
from swap_pipeline.runtime.job_folder import LAUNCHER_LOCK, RESULT, WRITER_LOCK, facts_of, scratch_root
from swap_pipeline.runtime.locks import Lock

_JOB = re.compile(r"[0-9a-f]{20}")
# Folders that do not belong to a single job.
_SHARED = {
    "compiled": "code that was compiled",
    "downloads": "data sets that were downloaded",
    "copies": "copies of images that are not complete",
    "compare": "logs of `swap compare`",
    LOGS: "Slurm's logs of its jobs",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder in scratch."""

    path: Path
    num_bytes: int
    """freed by removing it: files with hard links elsewhere are not counted"""
    is_needed: bool
    is_running: bool
    why: str
    """for the user"""

    def __str__(self) -> str:
        return f"{self.path}  {in_bytes(self.num_bytes)}  {self.why}"


def look(*, everything: bool = False) -> list[Entry]:
    """All of scratch; needed is what the current params need, or with `everything`, nothing."""
    root = scratch_root()
    listed = None if everything else {instance: _inputs_of(instance) for instance in listed_instances(read_params())}
    jobs = [_job_entry(path, listed) for path in job_folders(root)]
    shared = [root / name for name in _SHARED if (root / name).is_dir()]
    return [*jobs, *(_shared_entry(path, is_needed=not everything) for path in shared)]


def remove(entries: Sequence[Entry]) -> list[Entry]:
    """Remove entries that are neither needed nor running; returns those."""
    return [entry for entry in entries if not entry.is_needed and not entry.is_running and _remove(entry.path)]


def job_folders(root: Path) -> list[Path]:
    """The folders of all jobs; other things in scratch are ignored."""
    stages = [path for path in sorted(root.glob("*")) if path.is_dir() and path.name not in (*_SHARED, "devices")]
    return [path for stage in stages for path in sorted(stage.iterdir()) if _JOB.fullmatch(path.name) and path.is_dir()]


def listed_instances(params: Params) -> list[Instance]:
    """All runs of the current params."""
    after = ("phase3", *ANALYSES)
    return [PHASE1, *map(worker, params.workers.seeds), *(Instance(stage=stage) for stage in after)]


def _inputs_of(instance: Instance) -> Inputs | str:
    """A run's current inputs, or why they cannot be determined."""
    try:
        return Inputs.now(instance)
    except (SwapError, OSError, KeyError) as error:
        return str(error).partition(":")[0]


def _job_entry(path: Path, listed: Mapping[Instance, Inputs | str] | None) -> Entry:
    is_running, (is_needed, whose) = _is_running(path), (False, "") if listed is None else _whose(path, listed)
    state = "finished" if any(RESULT in done.name and not done.suffix for done in path.iterdir()) else "unfinished"
    why = "running" if is_running else ", ".join(filter(None, (state, whose)))
    return Entry(path=path, num_bytes=freed_bytes(path), is_needed=is_needed, is_running=is_running, why=why)


def _whose(path: Path, listed: Mapping[Instance, Inputs | str]) -> tuple[bool, str]:
    """Whether the job in a folder may be needed, and why; its launcher described it there."""
    try:
        job, _ = load(path)
    except (SwapError, AttributeError, KeyError, TypeError):  # started by hand with torchrun, or damaged
        return True, "perhaps needed (no description of its run)"
    inputs = listed.get(job.instance)
    if isinstance(inputs, str):
        return True, f"perhaps needed ({inputs})"
    facts = facts_of(device_type=job.device_type, processes=job.processes, threads=job.threads)
    if inputs is not None and inputs.fingerprint(facts) == path.name:
        return True, "used by the current params"
    return False, "not used by the current params"


def _shared_entry(path: Path, *, is_needed: bool) -> Entry:
    num_bytes, why = freed_bytes(path), _SHARED[path.name]
    return Entry(path=path, num_bytes=num_bytes, is_needed=is_needed, is_running=_is_written_to(path), why=why)


def _is_written_to(shared: Path) -> bool:
    if shared.name in ("compare", "copies"):
        return _is_running(shared)
    return shared.name == LOGS and any(_is_running(path) for path in job_folders(shared.parent))


def _locks(folder: Path) -> list[Lock]:
    """Those of a job's launcher and of the rank that writes."""
    return [Lock(folder / name) for name in (LAUNCHER_LOCK, WRITER_LOCK) if os.path.lexists(folder / name)]


def _is_running(folder: Path) -> bool:
    return any(lock.is_held() for lock in _locks(folder)) or is_in_queue(folder)


def _remove(folder: Path) -> bool:
    """Remove a folder unless a job has started in it; of a symbolic link, only the link."""
    if folder.is_symlink():
        folder.unlink()
        return True
    if _is_written_to(folder):
        return False
    # Held until the folder is gone, so that no job starts in it meanwhile.
    locks = [*_locks(folder), *([] if folder.name in _SHARED else [Lock(folder / LAUNCHER_LOCK)])]
    held: list[Lock] = []
    try:
        for lock in {str(lock.path): lock for lock in locks}.values():
            if not lock.try_acquire():
                return False
            held.append(lock)
        shutil.rmtree(folder)
    except OSError as error:
        raise SwapError(f"{folder} cannot be removed: {error.strerror or error}") from None
    finally:
        for lock in held:
            lock.release()
    return True


def freed_bytes(folder: Path) -> int:
    """What removing a folder frees: blocks of files without hard links elsewhere."""
    inside: dict[tuple[int, int], list[os.stat_result]] = {}
    for status in _files(folder):
        inside.setdefault((status.st_dev, status.st_ino), []).append(status)
    return sum(names[0].st_blocks * 512 for names in inside.values() if len(names) == names[0].st_nlink)


def _files(folder: Path) -> Iterator[os.stat_result]:
    if folder.is_symlink():
        return
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(parent) / name).lstat()
            except FileNotFoundError:  # files of a running job come and go
                continue
