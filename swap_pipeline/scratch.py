"""Scratch: where a job trains, resumes, and leaves its result until it is collected.

DVC deletes a stage's outs before the stage runs, so what must survive a kill lives here, outside of them, in
`.swap/<stage>/<fingerprint>/`. The fingerprint covers all that can change the bytes of the result: a job that is
started again finds its own snapshots, and a job with any other setting gets another folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_pipeline.errors import SwapError
from swap_pipeline.instances import Instance
from swap_pipeline.own_network import source_file

RESULT = "result"


def scratch_root() -> Path:
    """`.swap` of the project; experiments in temporary folders share their parent project's (DVC_ROOT names it)."""
    return Path(os.environ.get("DVC_ROOT", ".")) / ".swap"


def job_folder(instance: Instance, *, device_type: str, processes: int, threads: int) -> JobFolder:
    """Where this job works: named after everything that can change its result."""
    facts = facts_of(device_type=device_type, processes=processes, threads=threads)
    return JobFolder(scratch_root() / instance.stage / fingerprint(instance, facts=facts))


def facts_of(*, device_type: str, processes: int, threads: int) -> dict[str, Any]:
    """What of the machine can change bytes: on a CPU also the threads, since they change the order of sums."""
    facts: dict[str, Any] = {"device": device_type, "processes": processes}
    return facts | {"threads": threads} if device_type == "cpu" else facts


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> Any:
    """YAML takes tenths of a second, and `swap clean` asks for dozens of instances of a few files."""
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


def declared_stage(instance: Instance) -> tuple[list[str], list[str]]:
    """What `dvc.yaml` lists for the instance: deps and params."""
    tree = _parsed(Path(instance.stage_file).read_text(encoding="utf-8"))
    declared = tree["stages"][instance.stage]

    def filled_in(text: str) -> str:
        for key, value in instance.item.items():
            text = text.replace(f"${{item.{key}}}", str(value))
        return text

    return [filled_in(path) for path in declared["deps"]], declared["params"]


def fingerprint(instance: Instance, *, facts: Mapping[str, Any]) -> str:
    """A hash of everything that `dvc.yaml` lists for the instance, of its matrix item and of further `facts`."""
    return next(iter(fingerprints(instance, [facts])))


def fingerprints(
    instance: Instance, choices: Iterable[Mapping[str, Any]], *, hash_path: Callable[[Path], Any] | None = None
) -> Iterator[str]:
    """The fingerprint under each of several sets of facts; what the instance depends on is read only once."""
    hash_path = hash_path or hash_of
    deps, keys = declared_stage(instance)
    params = _parsed(Path("params.yaml").read_text(encoding="utf-8"))
    content = {
        "stage": instance.stage,
        "item": instance.item,
        "deps": {path: hash_path(Path(path)) for path in (*deps, *unlisted_code(deps, params["model"]["name"]))},
        "params": {key: _lookup(params, key) for key in keys},
    }
    torch = importlib.metadata.version("torch")
    for facts in choices:
        content["facts"] = {**facts, "torch": torch}
        yield hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def unlisted_code(deps: Collection[str], network: str) -> list[str]:
    """The file of a user's own network, if a stage's deps in `dvc.yaml` leave it out.

    DVC then does not notice an edit, but scratch must: what was trained with other code is another job's.
    """
    file = source_file(network)
    covered = file is None or any(file == Path(dep) or Path(dep) in file.parents for dep in deps)
    return [] if covered or file is None else [str(file)]


def _lookup(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree[part]
    return tree


def hash_of(path: Path) -> Any:
    """A hash of a file, or of each file in a folder by name."""
    if path.is_dir():
        return {entry.name: hash_of(entry) for entry in sorted(path.iterdir())}
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise SwapError(f"{path} is missing: run `dvc repro`, or `dvc checkout` if it was made before") from None


@dataclass(frozen=True)
class JobFolder:
    """The scratch folder of one job."""

    path: Path

    @property
    def result(self) -> Path:
        """Exists once the job is complete, and then holds all that it made."""
        return self.path / RESULT

    @property
    def is_complete(self) -> bool:
        return self.result.is_dir()

    @property
    def kept(self) -> Path:
        """Files that are made on the way and belong to the result: they outlive a kill."""
        return self.path / "kept"

    @property
    def can_go_on(self) -> bool:
        """Whether a job that is started again has something to go on from: snapshots, or what is done piece by piece;
        in SWA also a training that is complete."""
        patterns = ("snapshot_*", "kept/*", f"*/{RESULT}", "*/snapshot_*", "*/kept/*")
        return any(True for pattern in patterns for _ in self.path.glob(pattern))

    @contextlib.contextmanager
    def complete(self) -> Iterator[Path]:
        """A folder to fill; when the block ends without an error it becomes the result, in one step."""
        partial = self.path / f"{RESULT}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in self.kept.glob("*.safetensors"):
            _link_or_copy(path, partial / path.name)
        yield partial
        partial.rename(self.result)
        shutil.rmtree(self.kept, ignore_errors=True)

    @contextlib.contextmanager
    def writer(self, *, is_main: bool) -> Iterator[None]:
        """Held by a job's main rank while it writes here; sweeps what killed writers left behind."""
        if not is_main:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.path / "writer.lock")
        deadline = time.monotonic() + 60
        while not lock.try_acquire():
            # An orphan of a killed launcher is about to end; anything that stays longer is not ours to end.
            if time.monotonic() > deadline:
                raise SwapError(f"process {lock.holder()} is still writing in {self.path}: end it, then start again")
            time.sleep(0.1)
        try:
            for leftover in self.path.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def collect(self, instance: Instance) -> None:
        """Put the result where DVC expects it: links where the file system allows, else copies, never moves.

        What a launcher that was killed here left behind goes.
        """
        for leftover in instance.record.parent.glob(f".{instance.record.name}.*.tmp"):
            leftover.unlink(missing_ok=True)
        if instance.has_models:
            made, checkpoints = sorted(self.result.glob("*.safetensors")), instance.checkpoints
            checkpoints.mkdir(parents=True, exist_ok=True)
            for stale in set(checkpoints.glob("*.safetensors")) - {checkpoints / path.name for path in made}:
                stale.unlink()
            for leftover in checkpoints.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            for path in made:
                _link_or_copy(path, checkpoints / path.name)
        _link_or_copy(self.result / "record.json", instance.record)


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
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return removed


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # replacing a file by another link to it leaves both names


class Lock:
    """An exclusive lock on a file, released by the kernel when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def try_acquire(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError as error:
            os.close(handle)
            raise SwapError(
                f"{self.path.parent} is on a file system without file locks ({error.strerror}): move the project"
            ) from None
        if not self._is_of(handle):  # the folder was removed between the two calls: `swap clean`
            os.close(handle)
            return False
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._handle = handle
        return True

    def _is_of(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._handle is not None:
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # closing is not enough where a child process has it too
            os.close(self._handle)
            self._handle = None

    def holder(self) -> str:
        """The process id of the one who has it, as far as is known."""
        try:
            return self.path.read_text(encoding="utf-8").strip() or "?"
        except OSError:
            return "?"
