"""`dvc.yaml` tells the truth: each stage lists the code it runs and the params it reads, no more and no less."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from ruamel.yaml import YAML

from swap_pipeline.instances import ANALYSES, BASELINES, SWA_STARTS, Instance

# They decide where and how visibly a job runs, whose code makes the network, what an error says; not what is computed.
CANNOT_CHANGE_A_RESULT = {
    *("batch", "cluster", "environment", "errors", "jobs", "launch", "local", "own_network", "progress", "pulse"),
    *("ranks", "sbatch", "scratch", "slurm", "srun", "stopping", "torchrun"),
}


PIPELINES = ("dvc.yaml", "comparisons/dvc.yaml", "analysis/dvc.yaml")


def stages() -> dict[str, Any]:
    """All stages of all pipelines, by name."""
    trees = [YAML(typ="safe").load((ROOT / name).read_text())["stages"] for name in PIPELINES]
    declared: dict[str, Any] = {name: stage for tree in trees for name, stage in tree.items()}
    assert len(declared) == sum(map(len, trees))
    return declared


def script_of(name: str) -> Path:
    module = re.match(r"python -m stages\.(\w+)", stages()[name]["cmd"])
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


@pytest.mark.parametrize("name", stages())
def test_a_stage_depends_on_exactly_the_modules_it_imports(name: str) -> None:
    script = script_of(name)
    expected = {f"swap_pipeline/{module}.py" for module in closure(script)}
    declared = [path for path in stages()[name]["deps"] if path.endswith(".py")]
    assert sorted(declared) == sorted(expected | {f"stages/{script.name}"})


@pytest.mark.parametrize("name", stages())
def test_a_stage_declares_exactly_the_params_it_reads(name: str) -> None:
    script = script_of(name)
    read = params_read(script)
    method = name.removesuffix("_again")
    if script.stem != "tables":
        read -= {"repeats"}  # only to see whether this repeat is listed, and which others could train beside it
    if script.stem == "phase2":
        read -= {"workers.seeds"}  # the same with workers
    if script.stem == "prepare":  # passes the section on, of which a part is used
        read = (read - {"data"}) | {f"data.{key}" for key in attributes_of("data", package_file("datasets"))}
    if script.stem != "prepare":
        read -= {"data.root"}  # where image files are, not what is in them: that stands in data/prepared
    if script.stem in ("baseline", "swa"):
        read |= {method}  # by `chosen_section`
    if method in ANALYSES:
        read |= {f"analysis.{key}" for key in attributes_of("given", script)}  # by `chosen_section` too
    if method in ("swa_large_batch", "swa_small_batch"):
        read = {key for key in read if not key.startswith("phase2")} | {"phase2.cycles", "phase2.epochs"}
        read |= {SWA_STARTS[method]}
    entries = stages()[name].get("params", [])
    if entries == [{"params.yaml": None}]:
        return  # all of them, for a page that shows them
    declared = set(entries)
    assert {key for key in read if not any(covers(entry, key) for entry in declared)} == set()
    assert {entry for entry in declared if not any(covers(entry, key) for key in read)} == set()


def instances() -> list[Instance]:
    phases = [Instance(method="phase1"), Instance(method="phase2", seed=7), Instance(method="phase3")]
    others = [Instance(method=method) for method in (*BASELINES, *SWA_STARTS)]
    repeated = [again for one in (*phases, *others) for again in (one, replace(one, repeat=5))]
    return [*repeated, Instance(method="averaged"), *(Instance(method=method) for method in ANALYSES)]


@pytest.mark.parametrize("instance", instances(), ids=lambda instance: instance.stage_name)
def test_the_code_and_dvc_yaml_mean_the_same_command_and_files(instance: Instance) -> None:
    tree = YAML(typ="safe").load((ROOT / instance.stage_file).read_text())
    stage = tree["stages"][instance.stage]

    def filled_in(text: str) -> str:
        return text.replace("${item.repeat}", str(instance.repeat)).replace("${item.seed}", str(instance.seed))

    assert list(stage.get("matrix", {})) == list(instance.item)
    assert filled_in(stage["cmd"]) == " ".join(("python -m", *instance.command))
    assert [filled_in(out) for out in stage["outs"]] == [str(path) for path in instance.outs]
    deps = {filled_in(dep) for dep in stage["deps"]}
    assert (instance.start is None) or str(instance.start.model) in deps
    if instance.method not in ANALYSES:  # which look at models of all phases
        assert sum(dep.endswith(".safetensors") for dep in deps) == (instance.start is not None)


def test_a_repeat_differs_from_its_plain_stage_only_in_where_it_writes_and_what_it_starts_from() -> None:
    declared = stages()
    for name in declared:
        if not name.endswith("_again"):
            continue
        plain, again = declared[name.removesuffix("_again")], declared[name]
        assert again["params"] == plain["params"]
        assert [dep for dep in again["deps"] if "checkpoints" not in dep] == [
            dep for dep in plain["deps"] if "checkpoints" not in dep
        ]


def test_modules_that_no_stage_lists_import_nothing_that_computes() -> None:
    for module in CANNOT_CHANGE_A_RESULT:
        assert imported_modules(package_file(module)) <= CANNOT_CHANGE_A_RESULT | {"files", "instances", "params"}
