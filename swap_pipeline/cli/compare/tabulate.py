"""`swap tables`: makes tables from experiments in git and records in DVC's cache, and writes them to files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from swap_pipeline.cli.compare.experiments import Experiment, differs, hashes, head, read_experiments
from swap_pipeline.cli.compare.methods import Methods, Tree, read_methods
from swap_pipeline.cli.compare.tables import Records, Tables, make_tables
from swap_pipeline.cli.compare.tables_text import as_csv, as_json, markdown
from swap_pipeline.cli.compare.wanted import code_of
from swap_pipeline.config.instances import PHASE1, PHASE3, worker
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.errors import SwapError
from swap_pipeline.report.provenance import read_sections
from swap_pipeline.storage.files import write_json, write_text


def tables_of_experiments(*, everything: bool) -> Tables:
    """For params.yaml's recipe; with `everything`, also from earlier commits, preferring the newest."""
    recipe = read_params().recipe
    methods, now = read_methods(recipe), head()
    experiments = [
        one
        for one in read_experiments(baseline=None if everything else now)
        if one.params.get("recipe") == recipe and one.params.get("method") in methods.settings
        if one.name == f"{one.params['method']}-{one.params['seed']}"
    ]
    found: dict[str, dict[int, Experiment]] = {method: {} for method in methods.settings}
    for one in sorted(experiments, key=lambda one: one.baseline == now):  # this commit's last, so that they win
        found[one.params["method"]][one.params["seed"]] = one
    chosen = [one for by_seed in found.values() for one in by_seed.values()]
    if not chosen:
        hint = "" if everything else ", or use --all for those of earlier commits"
        raise SwapError(f"no experiment of recipe {recipe} started from this commit: run `swap compare`{hint}")
    notes = [
        *(f"{one.name} is from commit {one.baseline[:7]}" for one in chosen if one.baseline != now),
        *_outdated(chosen, methods, now),
    ]
    return make_tables(recipe, list(methods.settings), found, records_of(chosen), notes)


def _outdated(chosen: Iterable[Experiment], methods: Methods, now: str) -> list[str]:
    workspace, code = read_sections(Path("params.yaml")), code_of(read_sections(Path("dvc.yaml"))["stages"])
    names = [
        one.name
        for one in chosen
        if one.baseline == now
        if not _same(one.params, methods.params(one.params["method"], one.params["seed"], workspace))
        or differs(one.commit, code)
    ]
    return (
        [f"older than the current params or code: {', '.join(names)} (`swap compare` runs them again)"] if names else []
    )


def _same(params: Tree, wanted: Tree) -> bool:
    """Whether params are equal, apart from the data's location."""
    return {**params, "data": {**params["data"], "root": None}} == {**wanted, "data": {**wanted["data"], "root": None}}


def records_of(experiments: Iterable[Experiment]) -> dict[str, Records]:
    """Records by commit, for experiments whose records are in DVC's cache."""
    from dvc.repo import Repo

    with Repo() as repo:
        cache = repo.cache.local
        found = {}
        for one in experiments:
            outs = hashes(one, "outs")
            made_by = (PHASE1, *map(worker, one.params["workers"]["seeds"]), PHASE3)
            names = [str(instance.record) for instance in made_by]
            paths = [Path(cache.oid_to_path(outs[name])) for name in names if name in outs]
            if len(paths) == len(names) and all(path.is_file() for path in paths):
                phase1, *workers, phase3 = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
                found[one.commit] = Records(phase1=phase1, workers=workers, phase3=phase3)
    return found


def write_tables(tables: Tables, folder: Path) -> None:
    """As Markdown, JSON, CSV, and as a page with figures."""
    from swap_pipeline.cli.compare.tables_page import draw_accuracy_against_time, tables_page
    from swap_pipeline.report import figures
    from swap_pipeline.report.figures_schedules import draw_samplings, sampling_of

    methods, workspace = read_methods(tables.recipe), read_sections(Path("params.yaml"))
    samplings = [
        sampling_of(parse_params(methods.params(row.key, 0, workspace)), method=row.key, title=row.title)
        for row in tables.tables[1].rows
    ]
    drawings = [draw_accuracy_against_time(tables), *([draw_samplings(samplings)] if samplings else [])]
    pictures = figures.save(drawings, folder / "figures")
    write_text(folder / "tables.md", markdown(tables))
    write_json(folder / "tables.json", as_json(tables))
    write_text(folder / "tables.csv", as_csv(tables))
    write_text(folder / "index.html", tables_page(tables, drawings, pictures))
