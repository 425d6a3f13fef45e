"""`dvc.yaml` tells the truth: each stage lists the code it runs and the params it reads, no more and no less."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from ruamel.yaml import YAML

# They decide where and how visibly a job runs, whose code makes the network, what an error says; not what is computed.
CANNOT_CHANGE_A_RESULT = {"environment", "errors", "launch", "own_network", "progress", "ranks", "scratch", "torchrun"}


def stages() -> dict[str, Any]:
    declared: dict[str, Any] = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
    return declared


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("swap_pipeline"):
            module = node.module.partition(".")[2]
            found |= {module} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("swap_pipeline.")}
    return found


def closure(script: Path) -> set[str]:
    """All modules of the package that running a script can reach."""
    reached: set[str] = set()
    frontier = imported_modules(script)
    while frontier:
        reached |= frontier
        frontier = {name for module in frontier for name in imported_modules(package_file(module))} - reached
    return reached


def package_file(module: str) -> Path:
    return ROOT / "swap_pipeline" / f"{module}.py"


def attributes_of(name: str, script: Path) -> set[str]:
    """Dotted keys after `<name>.` in a file."""
    keys = set()
    for node in ast.walk(ast.parse(script.read_text())):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id == name:
            keys.add(".".join(reversed(parts)))
    return keys


def params_read(script: Path) -> set[str]:
    """Dotted keys after `params.` in a script."""
    keys = attributes_of("params", script)
    # `params.phase1` is part of `params.phase1.batch_size`: keep the longest.
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def covers(declared: str, read: str) -> bool:
    return read == declared or read.startswith(f"{declared}.")


@pytest.mark.parametrize("name", stages())
def test_a_stage_depends_on_exactly_the_modules_it_imports(name: str) -> None:
    script = ROOT / "stages" / f"{name}.py"
    expected = {f"swap_pipeline/{module}.py" for module in closure(script) - CANNOT_CHANGE_A_RESULT}
    declared = {path for path in stages()[name]["deps"] if path.endswith(".py")}
    assert declared == expected | {f"stages/{name}.py"}


@pytest.mark.parametrize("name", stages())
def test_a_stage_declares_exactly_the_params_it_reads(name: str) -> None:
    read = params_read(ROOT / "stages" / f"{name}.py")
    if name == "phase2":
        read -= {"workers.seeds"}  # only to see which other instances could train beside this one
    if name == "prepare":  # passes the section on, of which a part is used
        read = (read - {"data"}) | {f"data.{key}" for key in attributes_of("data", package_file("datasets"))}
    if name.startswith("phase"):
        read -= {"data.root"}  # where image files are, not what is in them: that stands in data/prepared
    declared = set(stages()[name]["params"])
    assert {key for key in read if not any(covers(entry, key) for entry in declared)} == set()
    assert {entry for entry in declared if not any(covers(entry, key) for key in read)} == set()


def test_modules_that_no_stage_lists_import_nothing_that_computes() -> None:
    for module in CANNOT_CHANGE_A_RESULT:
        assert imported_modules(package_file(module)) <= CANNOT_CHANGE_A_RESULT | {"files", "params"}
