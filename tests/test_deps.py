"""`dvc.yaml` tells the truth: each stage lists the code it runs and the params it reads, no more and no less."""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from ruamel.yaml import YAML

from swap_pipeline.config.instances import ANALYSES, PHASE1, Instance, worker
from swap_pipeline.runtime.inputs import declared_stage

# They decide where and how visibly a job runs, whose code makes the network, what an error says; not what is computed.
CANNOT_CHANGE_A_RESULT = {
    *("batch", "cluster", "devices", "dvc_cache", "environment", "errors", "inputs", "jobs", "last_resort", "launch"),
    *("local", "own_network", "progress", "pulse", "ranks", "sbatch", "scratch", "slurm", "srun", "stopping"),
    "torchrun",
}


@functools.cache
def pipelines() -> dict[str, dict[str, Any]]:
    """Stages by name, by file: of the project, and of the analysis, which is a project of its own."""
    files = ("dvc.yaml", "analysis/dvc.yaml")
    found = {file: YAML(typ="safe").load((ROOT / file).read_text())["stages"] for file in files}
    assert not set.intersection(*(set(declared) for declared in found.values()))
    return found


def stages() -> dict[str, Any]:
    return {name: stage for declared in pipelines().values() for name, stage in declared.items()}


def file_of(name: str) -> Path:
    """The `dvc.yaml` that declares a stage."""
    return next(Path(file) for file, declared in pipelines().items() if name in declared)


def script_of(name: str) -> Path:
    module = re.search(r"python -m stages\.(\w+)", stages()[name]["cmd"])
    assert module is not None
    return ROOT / "stages" / f"{module[1]}.py"


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
    """All modules of the package that a script's result can depend on."""
    reached: set[str] = set()
    frontier = imported_modules(script) - CANNOT_CHANGE_A_RESULT
    while frontier:
        reached |= frontier
        imported = {name for module in frontier for name in imported_modules(package_file(module))}
        frontier = imported - reached - CANNOT_CHANGE_A_RESULT
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
    if "setting" in imported_modules(script):
        keys |= attributes_of("params", package_file("setting"))
    # `params.phase1` is part of `params.phase1.batch_size`: keep the longest.
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def covers(declared: str, read: str) -> bool:
    return read == declared or read.startswith(f"{declared}.")


def seen_from_root(name: str, path: str) -> str:
    """A path in the stage's `dvc.yaml`, as the root folder has it."""
    return os.path.normpath(file_of(name).parent / path)


def declared_params(name: str) -> dict[str, set[str]]:
    """Keys by params file."""
    found: dict[str, set[str]] = {}
    for entry in stages()[name].get("params", []):
        for file, keys in (entry if isinstance(entry, dict) else {"params.yaml": [entry]}).items():
            found.setdefault(seen_from_root(name, file), set()).update(keys or ())
    return found


@pytest.mark.parametrize("name", stages())
def test_a_stage_depends_on_exactly_the_modules_it_imports(name: str) -> None:
    script = script_of(name)
    expected = {f"swap_pipeline/{module}.py" for module in closure(script)}
    declared = [seen_from_root(name, path) for path in stages()[name]["deps"] if path.endswith(".py")]
    assert sorted(declared) == sorted(expected | {f"stages/{script.name}"})


@pytest.mark.parametrize("path", ["dvc.yaml", "analysis/dvc.yaml"])
def test_no_command_is_put_together_from_params(path: str) -> None:
    tree = YAML(typ="safe").load((ROOT / path).read_text())

    assert [stage["cmd"] for stage in tree["stages"].values() if "${" in str(stage["cmd"])] == []


@pytest.mark.parametrize("name", stages())
def test_a_stage_declares_exactly_the_params_it_reads(name: str) -> None:
    if stages()[name].get("params") == [{"params.yaml": None}]:
        return  # all of them, for a page that shows them
    script = script_of(name)
    read = params_read(script)
    if name == "phase2":
        read -= {"workers.seeds"}  # only to see which others could train beside it
    if name != "prepare":
        read -= {"data.root"}  # where image files are, not what is in them: that stands in data/prepared
    if name not in ("phase1", "phase2"):
        read -= {"phase1.shards"}  # how many devices may share the work
    declared = declared_params(name)
    # A section that may leave entries out is declared as a whole: DVC refuses keys that are not in the file.
    of_root = declared.pop("params.yaml", set())
    assert {key for key in read if not any(covers(entry, key) for entry in of_root)} == set()
    assert {entry for entry in of_root if not any(covers(entry, key) for key in read)} == set()
    own = {"analysis/params.yaml": attributes_of("given", script)} if name in ANALYSES else {}
    assert declared == own


def instances() -> list[Instance]:
    others = (Instance(stage=stage) for stage in ("phase3", *ANALYSES))
    return [PHASE1, worker(7), *others]


@pytest.mark.parametrize("instance", instances(), ids=lambda instance: instance.stage_name)
def test_the_code_and_dvc_yaml_mean_the_same_command_and_files(instance: Instance) -> None:
    stage = stages()[instance.stage]

    def filled_in(text: str) -> str:
        return text.replace("${item.seed}", str(instance.seed))

    assert str(file_of(instance.stage)) == instance.stage_file
    assert list(stage.get("matrix", {})) == list(instance.item)
    to_root = "cd .. && exec " if instance.stage in ANALYSES else ""
    # A worker's seed is never part of a shell command: DVC says whose turn it is by the stage's name.
    assert stage["cmd"] == f"{to_root}python -m {instance.command[0]}"
    outs = [seen_from_root(instance.stage, filled_in(out)) for out in stage["outs"]]
    assert outs == [str(path) for path in instance.outs]


def test_scratch_is_named_after_what_dvc_yaml_lists_with_paths_as_the_root_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    for instance in instances():
        deps, params = declared_stage(instance)
        assert all(
            Path(dep).exists() for dep in deps if not dep.startswith(("checkpoints", "data/prepared", "metrics"))
        )
        assert {file: set(keys) for file, keys in params.items()} == declared_params(instance.stage)


def test_modules_that_no_stage_lists_import_nothing_that_computes() -> None:
    for module in CANNOT_CHANGE_A_RESULT:
        assert imported_modules(package_file(module)) <= CANNOT_CHANGE_A_RESULT | {"files", "instances", "params"}
