"""The documentation says what is so: links lead somewhere, commands run, nothing is missing and nothing is stale."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from browser import CHROMIUM, browser
from conftest import ROOT, Project, make_project
from ruamel.yaml import YAML

from swap_pipeline.cli.main import main

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EVERYTHING = [*sorted(ROOT.glob("*.md")), *PAGES]
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: str) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text()))
    yield from (link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link)


@pytest.mark.parametrize("path", EVERYTHING, ids=named)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    dead = []
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_a_page_links_to_nothing_outside_of_docs_since_the_site_has_only_that(path: Path) -> None:
    assert [link for link in links(path) if not (path.parent / link).resolve().is_relative_to(DOCS)] == []


def test_pages_are_short_enough_to_be_read() -> None:
    lengths = {named(path): len(path.read_text().splitlines()) for path in EVERYTHING}
    assert lengths["README.md"] <= 200
    assert {name: length for name, length in lengths.items() if length > 250} == {}


def test_the_site_and_the_readme_have_every_page() -> None:
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(nav) == sorted(str(path.relative_to(DOCS)) for path in PAGES)
    linked = {(ROOT / link).resolve() for link in links(ROOT / "README.md")}
    assert [named(path) for path in PAGES if path not in linked and path.name != "tables.md"] == []


def test_environment_variables_are_those_of_the_code() -> None:
    variable = re.compile(r"\bSWAP_[A-Z_]*[A-Z]\b")
    code = [*(ROOT / "swap_pipeline").rglob("*.py"), *(ROOT / "stages").glob("*.py")]
    used = {name for path in code for name in variable.findall(path.read_text())}
    documented = re.findall(r"^\| `(SWAP_[A-Z_]+)` \|", (DOCS / "environment.md").read_text(), re.M)
    assert sorted(documented) == sorted(used)
    mentioned = {name for path in EVERYTHING for name in variable.findall(path.read_text())}
    assert mentioned <= used


def test_every_command_is_documented() -> None:
    text = "\n".join(path.read_text() for path in EVERYTHING)
    assert [name for name in main.commands if f"swap {name}" not in text] == []


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["params.md", "api.md"])
def test_generated_pages_are_current(generator: ModuleType, name: str) -> None:
    page = (DOCS / name).read_text()
    assert page == generator.with_generated(page, generator.PAGES[name]()), "run `python docs/generate.py`"


def test_every_param_is_in_the_table(generator: ModuleType) -> None:
    tables = generator.params_tables()
    for section, params in YAML(typ="safe").load((ROOT / "params.yaml").read_text()).items():
        part = tables.partition(f"## {section}\n")[2].partition("\n## ")[0] if isinstance(params, dict) else tables
        for param in params if isinstance(params, dict) else [section]:
            assert f"| `{param}` |" in part


# --- the commands


def run_commands(page: str, project: Project) -> str:
    """Run the shell blocks of a page, but for those under a comment `not run`; returns what they print."""
    blocks = re.findall(r"(<!-- not run: [^\n]+ -->\n)?^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.S | re.M)
    scripts = [f"set -eo pipefail\n{block}" for skipped, block in blocks if not skipped]
    return "".join(project.run("bash", "-c", script).stdout for script in scripts)


@pytest.fixture
def clone(tmp_path: Path) -> Project:
    """As a newcomer has it after a clone, with tiny params, and with the environment of this test as `.venv`."""
    project = make_project(tmp_path / "clone")
    project.set_params({"phase2.peak_lr": 0.1, "data.validation_images": 40})
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, project.root)
    (project.root / ".git/info/exclude").write_text("/.venv\n")
    (project.root / ".venv").symlink_to(sys.prefix)
    project.environment["MAKEFLAGS"] = f"VENV={sys.prefix}"
    project.run("git", "add", "-A")
    project.run("git", "commit", "-qm", "clone")
    return project


def experiments(project: Project) -> set[str]:
    return set(project.dvc("exp", "list", "--all-commits", "--name-only").split())


@pytest.mark.long
def test_the_quickstart_leads_to_an_experiment_that_is_committed(clone: Project) -> None:
    output = run_commands("index.md", clone)
    assert {"gentle", "six"} <= experiments(clone)
    assert re.search(r"\[gentle\].* 0\.05", output)
    assert clone.json("metrics/swap.json")["accuracy"] > 0
    assert len(list((clone.root / "checkpoints/phase2").iterdir())) == 6
    assert clone.trained("phase1") == 1 and clone.trained("phase2") == 9  # three, three gentle ones, three more
    assert clone.run("git", "status", "--porcelain").stdout == ""


@pytest.mark.long
def test_the_commands_about_experiments_run_one_after_another(clone: Project) -> None:
    clone.dvc("repro")
    clone.run("git", "add", "-A")
    clone.run("git", "commit", "-qm", "first run")
    output = run_commands("experiments.md", clone)
    assert {"six", "gentle", "early", "smooth", "greedy"} <= experiments(clone)
    assert len(experiments(clone)) == 9
    assert "up to date" in output
    assert re.search(r"phase2\.peak_lr +0\.1 +0\.05", output)  # dvc params diff
    assert YAML(typ="safe").load((clone.root / "params.yaml").read_text())["phase2"]["peak_lr"] == 0.05


# --- the site

SEARCH = """(async () => {
  const field = document.querySelector('[data-md-component=search-query]')
  field.focus()
  field.value = 'preemption'
  field.dispatchEvent(new Event('keyup', {bubbles: true}))
  for (let wait = 0; wait < 100; wait++) {
    const found = [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)
    if (found.length) return found
    await new Promise(done => setTimeout(done, 100))
  }
  return []
})()"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mkdocs") is None, reason="mkdocs is not installed: `make docs` installs it")
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_the_site_is_built_without_warnings_and_its_search_works_without_a_network(tmp_path: Path) -> None:
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0 and built.stderr == "", built.stderr
    with browser(tmp_path / "profile") as tab:
        for page in ("index.html", "results/cifar10-cpu/tables.html"):
            tab.open(tmp_path / "site" / page, width=1200, dark=False)
            assert any("clusters.html" in link for link in tab.evaluate(SEARCH))
            assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
