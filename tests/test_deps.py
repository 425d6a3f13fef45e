"""The rooms of the house: who may import whom, and that `dvc.yaml` tells the truth about what stages depend on."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project
from ruamel.yaml import YAML

from swap_pipeline.config.instances import ANALYSES, PHASE1, Instance, worker
from swap_pipeline.runtime.inputs import declared_stage

PACKAGE = ROOT / "swap_pipeline"
# The import rule: each room, and the rooms that it may import from beside itself. `errors` is for all. Shown in
# docs/how-it-works.md, and nowhere else.
BELOW_DATA = {"config", "storage", "runtime"}
BELOW_ENGINE = BELOW_DATA | {"data", "models"}
BELOW_TRAINING = BELOW_ENGINE | {"engine"}
MAY_IMPORT: dict[str, set[str]] = {
    "storage": set(),
    "config": {"storage"},
    "runtime": {"config", "storage"},
    "datasets": BELOW_DATA,
    "data": BELOW_DATA,
    "models": BELOW_DATA,
    "engine": BELOW_ENGINE,
    "training": BELOW_TRAINING,
    "averaging": BELOW_TRAINING,
    "analysis": BELOW_TRAINING | {"averaging", "training"},
    "report": {"config", "storage"},
    "launch": BELOW_DATA,
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
# They decide where and how visibly a job runs, whose code makes the network, what an error says; not what is computed.
CANNOT_CHANGE_A_RESULT = {"errors", "launch", "runtime"}
TRAINS = ("phase1", "phase2")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`config.params`, as it follows `swap_pipeline.` in an import; of a package the folder's."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def file_of_module(name: str) -> Path | None:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


def room_of(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "swap_pipeline":
            module = node.module.partition(".")[2]
            below = {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {each for each in below if file_of_module(each)} or {module} - {""}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("swap_pipeline.")}
    return frozenset(found)


def closure(script: Path) -> set[str]:
    """All modules of the package that a script's result can depend on."""
    reached: set[str] = set()
    frontier = set(imported_modules(script))
    while frontier := {name for name in frontier - reached if room_of(name) not in CANNOT_CHANGE_A_RESULT}:
        reached |= frontier
        paths = [path for path in map(file_of_module, frontier) if path]
        frontier = {name for path in paths for name in imported_modules(path)}
    return reached


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


def seen_from_root(name: str, path: str) -> str:
    """A path in the stage's `dvc.yaml`, as the root folder has it; the analysis has the package as a link."""
    seen = os.path.normpath(file_of(name).parent / path)
    return seen.removeprefix("analysis/") if seen.startswith("analysis/swap_pipeline/") else seen


def declared_rooms(name: str) -> set[str]:
    paths = [seen_from_root(name, dep) for dep in stages()[name]["deps"]]
    return {path.removeprefix("swap_pipeline/") for path in paths if path.startswith("swap_pipeline/")}


# --- the import rule


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_from_the_rooms_below_it(room: str) -> None:
    allowed = MAY_IMPORT[room] | {room, "errors"}

    found = {
        name_of(path): bad
        for path in (PACKAGE / room).rglob("*.py")
        if (bad := {module for module in imported_modules(path) if room_of(module) not in allowed})
    }

    assert found == {}


def test_the_rule_has_every_room_and_leads_downwards_only() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(MAY_IMPORT)
    built: set[str] = set()
    while ready := {room for room in MAY_IMPORT if room not in built and MAY_IMPORT[room] - {room} <= built}:
        built |= ready
    assert built == rooms


def test_nothing_in_the_package_imports_a_stage_and_errors_imports_nothing() -> None:
    assert imported_modules(PACKAGE / "errors.py") == set()
    assert [
        path for path in modules() if re.search(r"^\s*(from|import) stages\b", path.read_text(), re.MULTILINE)
    ] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = {name_of(path): set(imported_modules(path)) for path in modules() if path.name != "__init__.py"}
    while ready := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in ready:
            del left[name]

    assert left == {}


# --- the size of things


def test_the_init_files_of_rooms_are_empty_so_that_the_launcher_does_without_torch() -> None:
    inits = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]

    assert [path for path in inits if path.read_bytes()] == []
    folders = {path.parent for path in modules()} - {PACKAGE}
    assert folders == {path.parent for path in inits}


def functions() -> Iterator[tuple[str, int]]:
    """Each function of the package and of the stages, with its number of lines."""
    for path in [*modules(), *(ROOT / "stages").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                yield f"{path.name}: {node.name}", node.end_lineno - node.lineno + 1


def test_rooms_and_modules_stay_small() -> None:
    assert {name_of(path): lines for path in modules() if (lines := len(path.read_text().splitlines())) > 400} == {}
    folders = {path.parent for path in modules()} - {PACKAGE}
    assert {folder: count for folder in folders if (count := len(list(folder.glob("*.py")))) > 12} == {}
    assert len(list(PACKAGE.glob("*.py"))) <= 3
    assert [name for name, lines in functions() if lines > 60] == []
    assert len((ROOT / "dvc.yaml").read_text().splitlines()) <= 120


# --- stages and what they depend on


def dependency_files(rooms: set[str]) -> set[str]:
    files = (path for room in rooms for path in (PACKAGE / room).rglob("*.py"))
    return {name_of(path) for path in files if path.name != "__init__.py"}


@pytest.mark.parametrize("name", TRAINS)
def test_a_stage_that_trains_imports_every_file_of_its_rooms_and_none_of_others(name: str) -> None:
    assert dependency_files(declared_rooms(name)) == closure(script_of(name))


@pytest.mark.parametrize("name", stages())
def test_a_stage_depends_on_exactly_the_rooms_that_it_imports_from_and_on_its_script(name: str) -> None:
    script = script_of(name)

    assert declared_rooms(name) == {room_of(module) for module in closure(script)}
    files = [seen_from_root(name, dep) for dep in stages()[name]["deps"] if dep.endswith(".py")]
    assert files == [f"stages/{script.name}"]


@pytest.mark.parametrize("path", ["dvc.yaml", "analysis/dvc.yaml"])
def test_no_command_is_put_together_from_params(path: str) -> None:
    tree = YAML(typ="safe").load((ROOT / path).read_text())

    assert [stage["cmd"] for stage in tree["stages"].values() if "${" in str(stage["cmd"])] == []


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
    if "config.common_params" in imported_modules(script):
        keys |= attributes_of("params", PACKAGE / "config" / "common_params.py")
    # `params.phase1` is part of `params.phase1.batch_size`: keep the longest.
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def covers(declared: str, read: str) -> bool:
    return read == declared or read.startswith(f"{declared}.")


def declared_params(name: str) -> dict[str, set[str]]:
    """Keys by params file."""
    found: dict[str, set[str]] = {}
    for entry in stages()[name].get("params", []):
        for file, keys in (entry if isinstance(entry, dict) else {"params.yaml": [entry]}).items():
            found.setdefault(seen_from_root(name, file), set()).update(keys or ())
    return found


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
    if name not in TRAINS:
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


# --- what an edit makes stale, as DVC sees it

# By hand, not from dvc.yaml: which stages run again after an edit in a room. `report` is of the root, the rest of the
# analysis. A stage below one that is stale is not listed: what it depends on has not changed yet.
STALE_AFTER = {
    "config": {"check", "prepare", "phase1", "phase2@0", "phase2@1", "phase2@2", "phase3", "report"},
    "storage": {"check", "prepare", "phase1", "phase2@0", "phase2@1", "phase2@2", "phase3", "report"},
    "datasets": {"check", "prepare"},
    "data": {"phase1", "phase2@0", "phase2@1", "phase2@2", "phase3"},
    "models": {"phase1", "phase2@0", "phase2@1", "phase2@2", "phase3"},
    "engine": {"phase1", "phase2@0", "phase2@1", "phase2@2", "phase3"},
    "training": {"phase1", "phase2@0", "phase2@1", "phase2@2"},
    "averaging": {"phase3"},
    "analysis": set(),
    "report": {"report"},
    "runtime": set(),
    "launch": set(),
    "cli": set(),
}


def stale(project: Project) -> set[str]:
    return set(json.loads(project.run("dvc", "status", "--json").stdout))


def edited(project: Project) -> Iterator[tuple[str, Path]]:
    for room in MAY_IMPORT:
        file = next(
            path for path in sorted((project.root / "swap_pipeline" / room).glob("*.py")) if path.stat().st_size
        )
        text = file.read_text()
        file.write_text(f"{text}\n# edited\n")
        yield room, file
        file.write_text(text)


def test_an_edit_in_a_room_makes_exactly_the_stages_stale_that_depend_on_it(finished: Project) -> None:
    assert stale(finished) == set()

    assert {room: stale(finished) for room, _ in edited(finished)} == STALE_AFTER
    assert stale(finished) == set()


def test_what_python_writes_beside_code_makes_nothing_stale_and_leaves_scratch_its_name(
    finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swap_pipeline.runtime.inputs import Inputs, stamp_of

    monkeypatch.chdir(finished.root)
    of_phase1 = [Inputs.now(PHASE1).fingerprint({}), Inputs.now(PHASE1, stamp_of).deps["swap_pipeline/training"]]
    for room in MAY_IMPORT:
        folder = finished.root / "swap_pipeline" / room
        (folder / "__pycache__").mkdir(exist_ok=True)
        (folder / "__pycache__" / "made_up.cpython-311.pyc").write_bytes(b"as Python pleases")
        (folder / "made_up.pyc").write_bytes(b"as Python pleases")

    assert stale(finished) == set()
    again = [Inputs.now(PHASE1).fingerprint({}), Inputs.now(PHASE1, stamp_of).deps["swap_pipeline/training"]]
    assert again == of_phase1
