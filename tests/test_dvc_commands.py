"""Plain DVC commands after a run, a commit and an experiment: all end well, and read well."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, Project, make_project
from filelock import FileLock

COMMANDS = (
    "dvc status",
    "dvc dag",
    "dvc exp apply gentle",
    "dvc checkout",
    "dvc push",
    "dvc pull",
    "dvc metrics show",
    "dvc metrics diff",
    "dvc params diff",
    "dvc plots show",
    "dvc plots diff",
    "dvc gc -w --all-experiments -f",  # after it, the files of the first run are gone: `gentle` is applied
)


@pytest.fixture(scope="session")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """With the recipe's own params where they are not about size, a remote, a first run and an experiment."""
    folder = tmp_path_factory.getbasetemp().parent / "branched"
    with FileLock(f"{folder}.lock"):
        if not (folder / "finished").exists():
            project = make_project(folder / "project")
            project.set_params({"workers.seeds": [0, 1, 2, 3]})  # as many as the recipe has
            project.dvc("remote", "add", "-d", "store", str(folder / "remote"))
            project.dvc("repro")
            project.run("git", "add", "-A")
            project.run("git", "commit", "-qm", "first run")
            project.dvc("exp", "run", "-n", "gentle", "-S", "phase2.peak_lr=0.02")
            project.run("git", "restore", ".")
            project.dvc("checkout")
            (folder / "finished").touch()
    return Project(folder / "project")


def test_every_plain_command_ends_well_and_without_warnings(branched: Project, tmp_path: Path) -> None:
    project = branched.copy_to(tmp_path / "project")
    said = {}
    for command in COMMANDS:
        # The layout of `dvc dag` depends on the order of sets: without a fixed one, about one in twelve is wider.
        done = project.run(*command.split(), check=False, PYTHONHASHSEED="0")
        # What `gc` says in any case is no warning of anything.
        said[command] = (done.stdout + done.stderr).replace("WARNING: This will remove all cache except", "")
        assert done.returncode == 0, f"{command}: {said[command]}"
        assert not re.search(r"warning|error|missing|not found|failed", said[command], re.IGNORECASE), said[command]
    assert "up to date" in said["dvc status"]
    assert max(len(line.rstrip()) for line in said["dvc dag"].splitlines()) <= 120
    assert re.search(r"phase2\.peak_lr +0\.05 +0\.02", said["dvc params diff"])
    assert "accuracy" in said["dvc metrics diff"]


@pytest.mark.long
def test_collecting_garbage_as_documented_keeps_the_committed_run_and_experiments(
    branched: Project, tmp_path: Path
) -> None:
    project = branched.copy_to(tmp_path / "project")
    shutil.rmtree(project.root / ".swap")
    (documented,) = re.findall(r"^dvc gc .*", (ROOT / "docs/experiments.md").read_text(), re.MULTILINE)

    project.dvc("exp", "apply", "gentle")
    project.run(*documented.split(), "-f")
    project.run("git", "restore", ".")
    project.dvc("checkout")

    assert "up to date" in project.dvc("status")
    project.dvc("exp", "apply", "gentle")
    assert "up to date" in project.dvc("status")


def test_an_edited_methods_file_makes_nothing_stale(branched: Project, tmp_path: Path) -> None:
    project = branched.copy_to(tmp_path / "project")
    file = project.root / "recipes/fashion-mini.methods.yaml"
    file.write_text(f"{file.read_text()}# edited\n")

    assert "up to date" in project.dvc("status")


def test_after_a_run_and_a_commit_nothing_is_left_to_do_or_to_commit(branched: Project) -> None:
    assert "up to date" in branched.dvc("status")
    assert branched.run("git", "status", "--porcelain").stdout == ""


def test_experiments_are_a_table_that_a_person_can_read(branched: Project) -> None:
    done = branched.run("dvc", "exp", "show", "--only-changed", "--drop", ".*/", "--no-pager", COLUMNS="120")
    header = next(line for line in done.stdout.splitlines() if "Experiment" in line)
    assert len(header.rstrip()) <= 120
    columns = header.split()
    assert columns == ["Experiment", "Created", "accuracy", "loss", "seconds", "workers", "phase2.peak_lr"]


def test_all_columns_are_few(branched: Project) -> None:
    done = branched.run("dvc", "exp", "show", "--csv")
    header = next(csv.reader(done.stdout.splitlines()))
    assert len([name for name in header if "/" not in name]) <= 45
