"""`swap compare`: which experiments a comparison consists of, and which of them have to run.

An experiment is up to date if code, params and data have not changed since it ran.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_pipeline.cli.compare.experiments import Experiment, differs, hashes, head, read_experiments
from swap_pipeline.cli.compare.leftovers import UNFINISHED
from swap_pipeline.cli.compare.methods import Methods, Tree, overrides, read_methods
from swap_pipeline.cli.recipes import RECIPES
from swap_pipeline.config.reading import read_params
from swap_pipeline.errors import SwapError, did_you_mean
from swap_pipeline.report.git import git
from swap_pipeline.report.provenance import read_sections
from swap_pipeline.runtime.user_code import source_file


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """An experiment of the comparison."""

    name: str
    params: Tree
    settings: tuple[str, ...]
    """for `dvc exp run -S`"""
    shared: Mapping[str, str]
    """by stage: two experiments with the same value share the stage's result"""

    def command(self, name: str) -> list[str]:
        return ["dvc", "exp", "run", "--temp", "-n", name, *(word for item in self.settings for word in ("-S", item))]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All experiments of a comparison."""

    wanted: tuple[Wanted, ...]
    waiting: tuple[Wanted, ...]
    """those that have to run"""
    replaced: frozenset[str]
    """names of experiments that exist but are out of date"""
    notes: tuple[str, ...]

    def plain_commands(self) -> list[str]:
        """Commands to run them by hand."""
        lines = []
        for wanted in self.waiting:
            new = f"{UNFINISHED}{wanted.name}" if wanted.name in self.replaced else wanted.name
            after = f" && dvc exp rename -f {new} {wanted.name}" if new != wanted.name else ""
            lines.append(shlex.join(wanted.command(new)) + after)
        return lines


def make_comparison(chosen: Sequence[str] | None, seeds: Sequence[int] | None) -> Comparison:
    """For params.yaml's recipe: all of its methods and the seed of params.yaml, unless others are chosen."""
    params = read_params()
    workspace, stages = read_sections(Path("params.yaml")), read_sections(Path("dvc.yaml"))["stages"]
    methods = read_methods(params.recipe)
    for name in chosen or ():
        if name not in methods.settings:
            raise SwapError(f"{methods.file} has no method {name!r}{did_you_mean(name, [*methods.settings])}")
    wanted = [
        _wanted(methods, method, seed, workspace, stages)
        for seed in seeds or [params.seed]
        for method in chosen or methods.settings
    ]
    code = code_of(stages)
    _refuse_untracked(code, params.model.name)
    found = {experiment.name: experiment for experiment in read_experiments(baseline=head())}
    data: dict[str, str | None] = {}
    current = {one.name for one in wanted if one.name in found and is_current(found[one.name], one, code, data)}
    edited = methods.edited(workspace, read_sections(RECIPES / f"{params.recipe}.yaml"))
    return Comparison(
        wanted=tuple(wanted),
        waiting=tuple(one for one in wanted if one.name not in current),
        replaced=frozenset(found) - current,
        notes=(f"ignored edits of params.yaml: {', '.join(edited)}; edit {methods.file} or the recipe instead",)
        if edited
        else (),
    )


def _wanted(methods: Methods, method: str, seed: int, workspace: Tree, stages: Tree) -> Wanted:
    params = methods.params(method, seed, workspace)
    params["data"]["root"] = _path_for_experiments("data.root", params["data"]["root"])
    if (start := params["phase1"].get("start")) is not None:
        params["phase1"]["start"] = _path_for_experiments("phase1.start", start)
    shared, before = {}, ""
    for stage, declared in stages.items():
        if all(isinstance(key, str) for key in declared.get("params", ())):
            before += repr([_lookup(params, key) for key in declared.get("params", ())])
            shared[stage] = before
    return Wanted(
        name=f"{method}-{seed}",
        params=params,
        settings=tuple(overrides(params, workspace)),
        shared=shared,
    )


def _lookup(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _path_for_experiments(key: str, path: str) -> str:
    """Experiments run in folders that have only what git has: all else is found by its whole path."""
    if not Path(path).exists():
        raise SwapError(f"params.yaml: {key} is {path}, which does not exist: put the data there, or fix the path")
    in_git = git("ls-files", "--", path) and git("ls-files", "--others", "--", path) == ""
    return path if in_git else str(Path(path).resolve())


def code_of(stages: Tree) -> list[str]:
    """The stages' deps in git. Recipes are not among them: they only tell what was edited."""
    deps = {dep for stage in stages.values() for dep in stage.get("deps", ()) if "${" not in dep}
    return ["dvc.yaml", *sorted(deps)]


def _refuse_untracked(code: Sequence[str], network: str) -> None:
    own = source_file(network)
    paths = [*code, *([str(own)] if own and not own.is_absolute() else [])]
    if untracked := git("ls-files", "--others", "--exclude-standard", "--", *paths):
        files = ", ".join(untracked.splitlines()[:5])
        raise SwapError(f"git does not track {files}, so experiments would run without it: `git add` it first")


def is_current(experiment: Experiment, wanted: Wanted, code: Sequence[str], data: dict[str, str | None]) -> bool:
    """Whether it would give the same result now; `data` caches hashes of folders."""
    if experiment.params != wanted.params or differs(experiment.commit, code):
        return False
    paths = {"prepare": wanted.params["data"]["root"], "phase1": wanted.params["phase1"].get("start")}
    for stage, path in paths.items():
        if path is not None and path not in data:
            data[path] = _hash_of(path, stage)
    made_from = hashes(experiment, "deps")
    return all(path is None or made_from.get(path) == data[path] for path in paths.values())


def _hash_of(path: str, stage_name: str) -> str | None:
    """As DVC hashes a dep of a stage, with DVC's memory of what it has hashed before."""
    from dvc.repo import Repo

    with Repo() as repo:
        stage = repo.stage.load_one(name=stage_name)
        for dep in stage.deps:
            if Path(dep.fs_path).resolve() == Path(path).resolve():
                dep.save()
                return str(dep.hash_info.value)
    return None
