"""The package as others install it: a wheel with all that it needs, one version, commands that answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

import swap_pipeline


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installer makes of the wheel: it is only unpacked."""
    source, dist, target = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "target"))
    for name in ("swap_pipeline", "stages"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(dist)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=60)
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(target)
    return target


def run(unpacked: Path, *arguments: str) -> str:
    code = "import swap_pipeline, sys; from swap_pipeline.cli.main import main; main(sys.argv[1:], prog_name='swap')"
    code = f"import sys; sys.path.insert(0, {str(unpacked)!r}); {code}"
    done = subprocess.run([sys.executable, "-I", "-c", code, *arguments], capture_output=True, text=True, cwd=unpacked)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_of_the_wheel_answer(unpacked: Path) -> None:
    assert "Usage: swap" in run(unpacked, "--help")
    assert run(unpacked, "--version") == f"swap, version {swap_pipeline.__version__}\n"


def test_the_wheel_has_every_file_of_the_package_and_its_version(unpacked: Path) -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "swap_pipeline").rglob("*") if path.is_file()}
    expected = {path for path in files if "__pycache__" not in path.parts}
    assert {path for path in expected if not (unpacked / path).is_file()} == set()
    assert (unpacked / f"swap_pipeline-{swap_pipeline.__version__}.dist-info").is_dir()


def test_every_make_target_is_in_make_help() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    rule = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY: run"))
    assert listed == set(rule.removeprefix(".PHONY: ").split())
