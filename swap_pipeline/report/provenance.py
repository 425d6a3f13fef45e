"""A run's provenance: its params and their differences from the recipe, the code, the installed versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_pipeline.errors import SwapError
from swap_pipeline.report.git import changed_files, git
from swap_pipeline.storage.files import read_yaml

PACKAGES = ("swap-pipeline", "torch", "torchvision", "numpy", "dvc", "matplotlib")
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Change:
    """An entry that differs from the recipe's; None if missing."""

    key: str
    here: str | None
    recipe: str | None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The recipe that a params file names, and the changes to it."""

    recipe: str
    problem: str | None
    """why the two cannot be compared"""
    changes: tuple[Change, ...]


def read_sections(path: Path) -> dict[str, Any]:
    """A YAML file, unchecked; empty if it has no sections."""
    tree = read_yaml(path)
    return tree if isinstance(tree, dict) else {}


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections as dotted keys."""
    entries: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            entries |= {f"{name}.{key}": inner for key, inner in flat(value).items()}
        else:
            entries[str(name)] = value
    return entries


def shown(value: Any) -> str:
    """A value roughly as in YAML."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def origin_of(tree: Mapping[str, Any], *, recipes: Path = Path("recipes")) -> Origin:
    """Compare params with the recipe that they name."""
    name = str(tree.get("recipe"))
    path = next((path for path in sorted(recipes.glob("*.yaml")) if path.stem == name), None)
    if path is None:
        return Origin(recipe=name, problem=f"there is no {recipes}/{name}.yaml to compare with", changes=())
    try:
        original = read_sections(path)
    except (SwapError, OSError):
        return Origin(recipe=name, problem=f"{path} cannot be read", changes=())
    return Origin(recipe=name, problem=None, changes=tuple(changes_of(tree, original)))


def changes_of(tree: Mapping[str, Any], original: Mapping[str, Any]) -> list[Change]:
    here, there = flat(tree), flat(original)
    keys = [*here, *(key for key in there if key not in here)]

    def text(entries: Mapping[str, Any], key: str) -> str | None:
        return shown(entries[key]) if key in entries else None

    return [
        Change(key=key, here=text(here, key), recipe=text(there, key))
        for key in keys
        if here.get(key, _MISSING) != there.get(key, _MISSING)
    ]


def versions() -> dict[str, str]:
    """Installed versions of Python and of the packages that matter; imports nothing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def code_version() -> dict[str, Any]:
    """The commit, files that differ from it, and DVC's experiment; None if unknown."""
    commit = git("rev-parse", "HEAD")
    changed = None if commit is None else changed_files("-uno", "--", ".")
    return {
        "commit": commit,
        "changed": None if changed is None else [name for name in changed if not _is_written_by_dvc(name)],
        "experiment": os.environ.get("DVC_EXP_NAME") or None,
        "baseline": os.environ.get("DVC_EXP_BASELINE_REV") or None,
    }


def _is_written_by_dvc(name: str) -> bool:
    """Whether DVC writes this file in every run."""
    path = Path(name.strip('"'))
    return path.name == "dvc.lock" or (path.suffix == ".json" and path.parent.name == "metrics")


def environment() -> dict[str, Any]:
    return {"platform": platform.platform(), "versions": versions(), "code": code_version()}
