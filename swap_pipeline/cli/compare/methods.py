"""Methods as changes to their recipe: `recipes/<recipe>.methods.yaml`, by method and section.

Methods change the recipe, not the workspace: entries that any method changes take this method's value, or else the
recipe's. So it does not matter what an earlier experiment left in `params.yaml`. A null entry means the default.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_pipeline.cli.recipes import RECIPES, methods_file
from swap_pipeline.config.reading import parse_params
from swap_pipeline.errors import SwapError
from swap_pipeline.report.provenance import flat, read_sections, shown

Tree = Mapping[str, Any]
_TAU, _RULE = "phase1.stop_accuracy", "phase1.stop"


@dataclass(frozen=True, kw_only=True)
class Methods:
    """The methods of a recipe, each with all entries that any of them changes."""

    file: Path
    settings: Mapping[str, Tree]
    """by name and dotted key"""

    def params(self, method: str, seed: int, workspace: Tree) -> dict[str, Any]:
        """The params of an experiment: the workspace's with this method and seed, checked."""
        tree = copy.deepcopy(dict(workspace))
        for key, value in {"method": method, "seed": seed, **self.settings[method]}.items():
            _put(tree, key, value)
        parse_params(tree, file=f"{self.file}, {method}")
        return tree

    def edited(self, workspace: Tree, recipe: Tree) -> list[str]:
        """Edits of the workspace that methods override."""
        touched = next(iter(self.settings.values()))
        here, there = flat(workspace), flat(recipe)
        return [
            f"{key} ({shown(here.get(key))}, recipe {shown(there.get(key))})"
            for key in touched
            if here.get(key) != there.get(key)
        ]


def read_methods(recipe: str) -> Methods:
    """Read and check the file; a mistake is a `SwapError` that names it."""
    path, file = RECIPES / f"{recipe}.yaml", methods_file(recipe)
    for needed in (path, file):
        if not needed.is_file():
            raise SwapError(
                f"params.yaml has recipe: {recipe}, but there is no {needed}: write it, or choose a recipe "
                "with `swap use`"
            )
    original, given = flat(read_sections(path)), read_sections(file)
    for name, sections in given.items():
        if not re.fullmatch(r"[a-z]\w*", str(name)):
            raise SwapError(f"{file}: {name!r} is not a valid name of a method: use letters, digits and _")
        if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
            raise SwapError(f"{file}: {name} must have sections with entries, such as phase1: {{peak_lr: 0.1}}")
    if not given:
        raise SwapError(f"{file} has no methods: list them by name, each with its changes to the recipe")
    changes = {name: flat(sections) for name, sections in given.items()}
    touched = dict.fromkeys(key for change in changes.values() for key in change)
    if _TAU in touched:  # it means nothing under another rule
        touched[_RULE] = None
        changes = {name: {_RULE: None, **change} if _TAU in change else change for name, change in changes.items()}
    settings = {name: {key: change.get(key, original.get(key)) for key in touched} for name, change in changes.items()}
    return Methods(file=file, settings=settings)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    if value is None:
        tree.pop(last, None)
    else:
        tree[last] = value


def overrides(params: Tree, workspace: Tree) -> list[str]:
    """Arguments for `dvc exp run -S`, in Hydra's syntax, that turn the workspace's params into these."""
    wanted, here = flat(params), flat(workspace)
    return [
        *(f"++{key}={_in_hydra(value)}" for key, value in wanted.items() if key not in here or here[key] != value),
        *(f"~{key}" for key in here if key not in wanted),
    ]


def _in_hydra(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value not in ("null", "true", "false"):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
