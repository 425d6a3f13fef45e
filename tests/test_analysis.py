"""The analysis, a DVC project of its own inside the project, under real DVC."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Project, processes_in, wait_until

from swap_pipeline.cli.main import main

STAGES = {"landscape", "cosine", "workers", "exits", "analysis_page"}
OWN_FILES = ("landscape.json", "cosine.json", "workers.json", "exits.json", "figures", "index.html")


def analysis(project: Project, *arguments: str, check: bool = True, **environment: str) -> str:
    return project.dvc("--cd", "analysis", *arguments, check=check, **environment)


def ran(output: str) -> set[str]:
    return set(re.findall(r"Running stage '([^']+)'", output))


@pytest.fixture(scope="module")
def analysed_project(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished project, analysed and committed; not to be changed."""
    project = finished_project.copy_to(tmp_path_factory.mktemp("analysed") / "project")
    output = analysis(project, "repro")
    assert ran(output) == STAGES
    project.run("git", "add", "-A")
    project.run("git", "commit", "-qm", "analysis")
    return project


@pytest.fixture
def analysed(analysed_project: Project, tmp_path: Path) -> Project:
    return analysed_project.copy_to(tmp_path / "project")


@pytest.mark.long
def test_a_run_leaves_the_analysis_alone(finished_project: Project) -> None:
    assert not [name for name in OWN_FILES if (finished_project.root / "analysis" / name).exists()]


@pytest.mark.long
def test_the_analysis_leaves_its_results_beside_its_params_and_git_sees_only_the_lock(analysed: Project) -> None:
    for name in ("landscape", "cosine", "workers", "exits"):
        assert analysed.json(f"analysis/{name}.json")["num_devices"] > 0
    assert (analysed.root / "analysis/index.html").exists()
    committed = analysed.run("git", "show", "--name-only", "--format=").stdout.split()
    assert committed == ["analysis/dvc.lock"]
    assert analysed.run("git", "status", "--short").stdout == ""
    assert ran(analysis(analysed, "repro")) == set()


ROOT_COMMANDS = [
    ("status", "dvc.yaml"),
    ("dag",),
    ("stage", "list", "--all"),
    ("exp", "show", "--csv"),
    ("params", "diff"),
    ("metrics", "show"),
    ("checkout", "dvc.yaml"),
    ("plots", "show"),
    ("plots", "diff", "HEAD"),
]


@pytest.mark.parametrize("command", ROOT_COMMANDS, ids=" ".join)
def test_a_command_in_the_root_does_not_mention_the_analysis(analysed: Project, command: tuple[str, ...]) -> None:
    analysed.set_analysis({"grid": 4})
    (analysed.root / "analysis/landscape.json").unlink()

    output = analysed.dvc(*command)

    if command[0] == "plots":
        output += (analysed.root / "dvc_plots/index.html").read_text()
    assert not re.search(r"analysis/|landscape|cosine|grid", output.replace(str(analysed.root), "")), output


@pytest.mark.long
def test_a_remote_of_the_root_and_what_it_collects_as_garbage_know_nothing_of_the_analysis(
    analysed: Project, tmp_path: Path
) -> None:
    analysed.dvc("remote", "add", "--local", "-d", "store", str(tmp_path / "remote"))
    analysed.dvc("push", "dvc.yaml")
    pushed = {path.name for path in (tmp_path / "remote").rglob("*") if path.is_file()}
    analysed.dvc("gc", "-w", "-f")
    analysed.dvc("pull", "dvc.yaml")
    own = {path.name for path in (analysed.root / "analysis/.dvc/cache/files").rglob("*") if path.is_file()}
    assert own and pushed and not own & pushed
    for name in OWN_FILES:
        remove(analysed.root / "analysis" / name)

    analysis(analysed, "checkout")

    assert analysed.json("analysis/landscape.json")["planes"]
    assert "up to date" in analysis(analysed, "status")


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def stale(project: Project) -> set[str]:
    """Stages that `dvc status` calls changed."""
    return set(json.loads(project.run("dvc", "--cd", "analysis", "status", "--json").stdout))


def test_a_part_of_the_analysis_is_stale_if_its_own_param_changes(analysed: Project) -> None:
    for param, stages in (
        ("margin", {"landscape"}),
        ("gradient_images", {"cosine"}),
        ("subsets", {"workers"}),
        ("exit_workers", {"exits"}),
    ):
        old = analysed.bytes_of("analysis/params.yaml")
        analysed.set_analysis({param: 1 if param in ("subsets", "exit_workers") else 2})
        assert stale(analysed) == stages
        (analysed.root / "analysis/params.yaml").write_bytes(old)


def test_the_analysis_is_stale_if_code_or_params_of_the_root_change_that_it_depends_on_and_not_for_others(
    analysed: Project,
) -> None:
    assert stale(analysed) == set()
    for module in ("cli/doctor", "launch/stage_jobs", "cli/clean"):  # no room that it depends on
        edit(analysed.root / f"swap_pipeline/{module}.py")
    analysed.set_params({"recipe": "a name of my own", "data.root": "elsewhere"})
    assert stale(analysed) == set()

    edit(analysed.root / "swap_pipeline/analysis/gradient_direction.py")
    assert stale(analysed) == {"landscape", "cosine", "workers", "exits"}
    analysed.run("git", "checkout", "swap_pipeline")
    assert stale(analysed) == set()
    analysed.set_params({"compute.channels_last": False})
    assert stale(analysed) == {"landscape", "cosine", "workers", "exits"}


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n# edited\n")


@pytest.mark.long
def test_another_result_of_phase_3_makes_the_analysis_stale_and_going_back_in_the_root_does_too(
    analysed: Project,
) -> None:
    first = analysed.bytes_of("analysis/workers.json")
    analysed.set_params({"phase3.augment": True})
    assert "analysis" not in analysed.dvc("repro")
    assert stale(analysed) == {"landscape", "cosine", "workers", "exits"}
    assert ran(analysis(analysed, "repro")) == STAGES
    assert analysed.bytes_of("analysis/workers.json") != first
    assert stale(analysed) == set()

    analysed.run("git", "checkout", ".")
    analysed.dvc("checkout", "dvc.yaml")

    assert stale(analysed) == STAGES
    assert ran(analysis(analysed, "repro")) == set(), "its own cache has it all"
    assert analysed.bytes_of("analysis/workers.json") == first


def start_and_kill(project: Project, when: Callable[[], bool], *, only_dvc: bool) -> None:
    """Run the landscape under DVC, and kill DVC, or all that it started too, once `when` holds."""
    process = subprocess.Popen(
        ["dvc", "--cd", "analysis", "repro", "landscape"],
        cwd=project.root,
        env=project.full_environment({"SHELL": "/bin/sh"}),  # which forks for the last command, unless told `exec`
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: when() or process.poll() is not None)
    assert process.poll() is None
    if only_dvc:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: processes_in(project.root) == [], seconds=600)


def scratch_of_landscape(project: Project) -> list[Path]:
    return sorted((project.root / ".swap/landscape").iterdir())


@pytest.mark.long
def test_a_killed_analysis_resumes_under_dvc_in_the_projects_one_scratch(analysed: Project) -> None:
    analysed.set_analysis({"grid": 15})

    def pieces() -> list[Path]:
        return sorted((analysed.root / ".swap/landscape").glob("*/kept/points_*.json"))

    start_and_kill(analysed, lambda: bool(pieces()), only_dvc=False)
    output = analysis(analysed, "repro", "landscape")

    assert re.search(r"resuming after \d+ of 455 points", output), output
    assert len(scratch_of_landscape(analysed)) == 2
    assert not (analysed.root / "analysis/.swap").exists()
    assert stale(analysed) == {"analysis_page"}


@pytest.mark.long
def test_an_analysis_whose_dvc_was_killed_leaves_its_result_to_the_next(analysed: Project) -> None:
    analysed.set_analysis({"grid": 5})
    start_and_kill(analysed, lambda: len(scratch_of_landscape(analysed)) == 2, only_dvc=True)
    assert not (analysed.root / "analysis/landscape.json").exists(), "by now another dvc may have other plans"
    assert analysed.trained("landscape") == 2

    assert "already trained, taken from" in analysis(analysed, "repro", "landscape")

    assert len(analysed.json("analysis/landscape.json")["planes"][0]["test_error"]) == 5


def test_clean_removes_scratch_of_an_analysis_with_other_params_and_keeps_the_present_ones(
    analysed: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = scratch_of_landscape(analysed)
    analysed.set_analysis({"margin": 0.1})
    analysis(analysed, "repro", "landscape")
    (present,) = set(scratch_of_landscape(analysed)) - {before}
    others = {path for stage in ("cosine", "workers", "phase1") for path in (analysed.root / ".swap" / stage).iterdir()}
    monkeypatch.chdir(analysed.root)

    said = CliRunner().invoke(main, ["clean", "--yes"], catch_exceptions=False).output

    assert "removed 1 folders" in said
    assert scratch_of_landscape(analysed) == [present]
    assert all(path.exists() for path in others)


def test_the_analysis_draws_its_own_plots(analysed: Project) -> None:
    analysis(analysed, "plots", "show")

    page = (analysed.root / "analysis/dvc_plots/index.html").read_text()
    assert "landscape_phases.svg" in page
    assert '"color": {"field": "run"' in page, "the root's template"
    assert analysed.run("git", "status", "--short").stdout == ""


def test_a_mistake_in_its_params_is_one_line_that_names_the_file(analysed: Project) -> None:
    analysed.set_analysis({"grid": 1})

    done = analysed.stage("landscape")

    assert done.returncode == 1
    assert done.stderr == "error: analysis/params.yaml: grid is 1, but must be at least 2\n"
