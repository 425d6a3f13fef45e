"""A stage's inputs: whether they are the same as before, and a fingerprint of them.

DVC records params and deps when a stage ends. If they changed while it ran, DVC would attribute the result to the new
ones: so they are compared with what they were at the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swap_pipeline.config import copies
from swap_pipeline.config.instances import PHASE1, Instance
from swap_pipeline.config.params import Leaving
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.runtime.user_code import source_file
from swap_pipeline.storage.files import open_plain, parse_yaml, read_plain

CODE_STAMP = "SWAP_CODE_STAMP"
"""the launcher's `code_stamp` when it started this rank"""


_START = "${phase1.start}"
_OF_EXIT = frozenset(field.name for field in dataclasses.fields(Leaving))

# Parsing YAML takes tenths of a second, and `swap clean` looks up dozens of instances in a few files.
_parsed = functools.lru_cache(maxsize=8)(parse_yaml)


def declared_stage(instance: Instance) -> tuple[list[str], dict[str, list[str]]]:
    """What the instance's `dvc.yaml` lists for it: deps, and params by file (`` is the whole file); paths from here."""
    file = Path(instance.stage_file)
    declared = _values(file)["stages"][instance.stage]

    def value_of(match: re.Match[str]) -> str:
        section, _, key = match[1].partition(".")
        return str(instance.item[key] if section == "item" else _lookup(_values("params.yaml"), match[1]))

    def from_here(path: str) -> str:
        return os.path.normpath(file.parent / re.sub(r"\$\{([\w.]+)\}", value_of, path))

    params: dict[str, list[str]] = {}
    for entry in declared["params"]:
        for name, keys in entry.items() if isinstance(entry, dict) else [("params.yaml", [entry])]:
            params.setdefault(from_here(name), []).extend(keys or [""])
    return [from_here(path) for path in declared["deps"]], params


def _values(file: str | Path) -> Any:
    return _parsed(read_plain(Path(file)), name=str(file))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of an instance at some time: everything that `dvc.yaml` lists for it."""

    instance: Instance
    deps: Mapping[str, Any]
    """a hash of each file, by path"""
    params: Mapping[str, Any]
    """by file and key"""
    hash_path: Callable[[Path], Any] = field(compare=False)

    @classmethod
    def now(cls, instance: Instance, hash_path: Callable[[Path], Any] | None = None) -> Inputs:
        hash_path = hash_path or hash_of
        deps, keys = declared_stage(instance)
        paths = (*deps, *unlisted_code(deps))
        return cls(
            instance=instance,
            deps={path: hash_path(Path(path)) for path in paths},
            params={file: {key: _lookup(_values(file), key) for key in of_file} for file, of_file in keys.items()},
            hash_path=hash_path,
        )

    def fingerprint(self, facts: Mapping[str, Any]) -> str:
        """A hash of all this, the matrix item, torch's version and further `facts`.

        For phase 1 it identifies the training run, which is the same whenever it ends.
        """
        content = {
            "stage": self.instance.stage,
            "item": self.instance.item,
            "deps": self.deps,
            "params": self.params if self._exit is None else _without_exit(self.params),
            "facts": {**facts, "torch": _torch_version()},
        }
        return _digest(content)[:20]

    @property
    def exit_name(self) -> str | None:
        """For phase 1, a name for its stop rule."""
        return None if self._exit is None else _digest(self._exit)[:10]

    @property
    def _exit(self) -> dict[str, Any] | None:
        if self.instance != PHASE1:
            return None
        return {key: value for key, value in self.params["params.yaml"]["phase1"].items() if key in _OF_EXIT}

    def change(self) -> str:
        """What has changed, as text; empty if nothing has. Only files that were written to are read again."""
        now = _inputs_if_any(self.instance, self.hash_path)
        if now is None:
            return "params.yaml, dvc.yaml or a dependency"
        if self.params != now.params:
            file, *key = _first_difference(self.params, now.params)
            return f"{file}: {'.'.join(filter(None, key))}"
        return "/".join(_first_difference(self.deps, now.deps))

    def check(self, *, when: str, remedy: str) -> None:
        """Raise an error if any input has changed."""
        if what := self.change():
            raise SwapError(f"{self.instance.name}: {what} changed {when}: {remedy}")

    def check_code_was_not_written_to(self, stamp: str | None) -> None:
        """Check the launcher's stamp, if it is on this machine: a rank may have read a short-lived version."""
        if stamp is not None and stamp != code_stamp(self.instance):
            raise SwapError(
                f"{self.instance.name}: code or params were written to while it started: run `dvc repro` again"
            )


def code_stamp(instance: Instance) -> str:
    """A stamp of all code and params that a rank of the instance reads; it changes when any of them is written to."""
    deps, params = declared_stage(instance)
    code = [dep for dep in deps if {"stages", "swap_pipeline"} & set(Path(dep).parts)]
    files = [*code, *params, *unlisted_code(deps)]
    return hashlib.sha256(json.dumps({file: stamp_of(Path(file)) for file in files}).encode()).hexdigest()


def check_trained_alike(instances: Sequence[Instance]) -> None:
    """Check that what DVC recorded for these instances was made with the current params and code.

    DVC runs them one after another. An edit between two of them would go unnoticed, since each is consistent by itself.
    For a stage run by hand, DVC's record may not match the files at all.
    """
    lock = Path("dvc.lock")
    if "DVC_STAGE" not in os.environ or not lock.exists():
        return
    entries = _values(lock).get("stages", {})
    recorded = {instance: entries[instance.stage_name] for instance in instances if instance.stage_name in entries}
    for instance, entry in recorded.items():
        _, declared = declared_stage(instance)
        for file, keys in declared.items():
            for key in keys:
                now = _lookup(_values(file), key)
                if (then := entry.get("params", {}).get(file, {}).get(key)) != now:
                    where = ".".join([key, *_first_difference(then, now)])
                    raise SwapError(f"{instance.name} was trained with a different {where}: run `dvc repro` again")
    made_from = {
        instance: {dep["path"]: dep.get("md5") for dep in entry["deps"]} for instance, entry in recorded.items()
    }
    for instance, deps in made_from.items():
        if path := "/".join(_first_difference(next(iter(made_from.values())), deps)):
            raise SwapError(f"{instance.name} was trained with a different {path}: run `dvc repro` again")


def _inputs_if_any(instance: Instance, hash_path: Callable[[Path], Any]) -> Inputs | None:
    """None if a file is missing or cannot be parsed: half written, perhaps."""
    try:
        return Inputs.now(instance, hash_path)
    except (OSError, LookupError, TypeError, ValueError):
        return None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _without_exit(params: Mapping[str, Any]) -> dict[str, Any]:
    ours = params["params.yaml"]
    course = {key: value for key, value in ours["phase1"].items() if key not in _OF_EXIT}
    return {**params, "params.yaml": {**ours, "phase1": course}}


@functools.cache
def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _first_difference(old: Any, new: Any) -> list[str]:
    """The keys that lead to it."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return [str(key), *_first_difference(old.get(key), new.get(key))]
    return []


def fingerprint(instance: Instance, *, facts: Mapping[str, Any]) -> str:
    """The name of the instance's folder, given these facts."""
    return Inputs.now(instance).fingerprint(facts)


@contextlib.contextmanager
def inputs_stay(stage: str) -> Iterator[None]:
    """For a stage without scratch: its inputs must be the same at its end as at its start.

    DVC records params and deps after the stage. Large data is not read for this: size and mtime are enough.
    """
    inputs = _inputs_if_any(Instance(stage=stage), stamp_of)
    yield
    if inputs is not None:  # else the stage itself has reported what is wrong
        inputs.check(when="while it ran", remedy="run `dvc repro` again")


def unlisted_code(deps: Collection[str]) -> list[str]:
    """The file of a user's own network, if it is not among a stage's deps in `dvc.yaml`.

    DVC then does not notice an edit, but scratch must: a model trained with other code belongs to another job.
    """
    file = source_file(_values("params.yaml")["model"]["name"])
    covered = file is None or any(file == Path(dep) or Path(dep) in file.parents for dep in deps)
    return [] if covered or file is None else [str(file)]


def check_dvc_sees_start(start: str | None) -> None:
    """That DVC notices when the file that phase 1 starts from changes.

    DVC cannot depend on a param that may be absent, so whoever sets `phase1.start` lists it as a dep.
    """
    deps = [dep for dep in _values("dvc.yaml")["stages"]["phase1"]["deps"] if isinstance(dep, str)]
    if start is None:
        if _START in deps:
            raise SwapError(f"dvc.yaml lists {_START} under the deps of phase1, but phase1.start is not set: remove it")
        return
    plain = [Path(dep) for dep in deps if "$" not in dep]
    if _START not in deps and not any(dep == Path(start) or dep in Path(start).parents for dep in plain):
        raise SwapError(
            f"phase1.start is {shown(start)}, but DVC would not notice when that file changes: add the line "
            f"`- {_START}` to the deps of phase1 in dvc.yaml"
        )


def _lookup(tree: Any, dotted: str) -> Any:
    for part in dotted.split(".") if dotted else ():
        tree = tree[part]
    return tree


def hash_of(path: Path) -> Any:
    """A hash of a file, or of each file in a folder by name; a file not written to since then is not read again."""
    if path.is_dir():
        return {entry.name: hash_of(entry) for entry in sorted(path.iterdir()) if not _is_covered(entry.name)}
    try:
        status = path.stat()
        return _hash_once(path.absolute(), (*_stamp(status), status.st_ctime_ns))
    except FileNotFoundError:
        raise SwapError(f"{path} is missing: run `dvc repro`, or `dvc checkout` if it was made before") from None


def _is_covered(name: str) -> bool:
    """Also copies of images, perhaps 100 GB: the index in the same folder has a digest of each."""
    return _is_bytecode(name) or name.endswith(copies.SUFFIX)


def _is_bytecode(name: str) -> bool:
    """Bytecode that Python writes next to imported code, also while a stage runs; `.dvcignore` hides it from DVC."""
    return name == "__pycache__" or name.endswith(".pyc")


def stamp_of(path: Path) -> Any:
    """Changes when a file, or one in a folder, is written to or replaced; reads no contents. None if it is missing."""
    try:
        return _stamp_of_folder(str(path)) if path.is_dir() else _stamp(path.stat())
    except FileNotFoundError:
        return None


def _stamp_of_folder(folder: str) -> str:
    """One stamp for all files in it; there may be millions."""
    digest = hashlib.sha256()
    with os.scandir(folder) as entries:
        for entry in sorted((each for each in entries if not _is_bytecode(each.name)), key=lambda entry: entry.name):
            is_folder = entry.is_dir(follow_symlinks=False)
            stamp = _stamp_of_folder(entry.path) if is_folder else _stamp(entry.stat(follow_symlinks=False))
            digest.update(f"{entry.name!r} {stamp}".encode())
    return digest.hexdigest()


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


@functools.cache
def _hash_once(path: Path, stamp: tuple[int, ...]) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
