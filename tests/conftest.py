"""A tiny project with real DVC in a temporary folder: the repository's own files, a few images, small params."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from ruamel.yaml import YAML

# One test process a core: more threads than cores would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Epochs of tests take a fraction of a second: a snapshot at each, so that there is something to resume from.
EVERY_EPOCH = {"SWAP_SNAPSHOT_SECONDS": "0"}
os.environ.update(EVERY_EPOCH)

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    "data.validation_images": 0,
    "augment.padding": 2,
    "augment.cutout": 4,
    "model.width": 2,
    "phase1.batch_size": 24,
    "phase1.shards": 1,  # one process with one thread; two ranks only where a test is about them
    "phase1.peak_lr": 0.2,
    "phase1.warmup_epochs": 1,
    "phase1.max_epochs": 3,
    "phase1.stop_accuracy": 100.0,
    "phase1.keep_epochs": [2],
    "phase2.batch_size": 12,
    "phase2.peak_lr": 0.05,
    "phase2.epochs": 2,
    "phase2.keep_epochs": [1],
    "workers.seeds": [0, 1, 2],
    "phase3.batch_size": 50,
}
VALIDATED = {"data.validation_images": 40, "phase2.cycles": 2}
TINY_ANALYSIS = {
    "grid": 3,
    "train_images": 100,
    "test_images": 60,
    "gradient_images": 100,
    "subsets": 2,
    "exits": [2],
    "exit_workers": 2,
}


class Clock:
    """Stands in for the module `time`, and moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    time = monotonic = perf_counter


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, f"{done.returncode} {done.stdout} {done.stderr}"
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def wait_until(condition: Callable[[], Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def processes_in(folder: Path) -> list[int]:
    """Running processes of a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def pack(path: Path, files: Mapping[str, bytes]) -> str:
    """A tar.gz of these files; returns its md5."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


@dataclass
class Project:
    """A checkout that a test may do anything to."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.full_environment(environment),
            capture_output=True,
            text=True,
            timeout=900,  # a loaded machine takes many times as long as an idle one
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def full_environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        # A stage under test must not think that it is a rank of something.
        foreign = ("SWAP_", "DVC_", "PYTEST", "TORCHELASTIC", "RANK", "WORLD_SIZE", "OMP_", "MKL_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SWAP_DEVICE": "cpu",
            "SWAP_NPROC": "1",
            **EVERY_EPOCH,
            "DVC_SITE_CACHE_DIR": str(self.root / ".dvc" / "tmp" / "site"),
            **self.environment,
            **(extra or {}),
        }

    def dvc(self, *arguments: str, check: bool = True, **environment: str) -> str:
        done = self.run("dvc", *arguments, check=check, **environment)
        return done.stdout + done.stderr

    def stage(self, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", f"stages.{name}", *arguments, check=False, **environment)

    def swap(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "swap_pipeline.cli", *arguments, check=False, **environment)

    def set_params(self, values: Mapping[str, Any]) -> None:
        set_params(self.root / "params.yaml", values)

    def set_analysis(self, values: Mapping[str, Any]) -> None:
        set_params(self.root / "analysis/params.yaml", values)

    def remove_param(self, dotted: str) -> None:
        yaml = YAML(typ="safe", pure=True)
        path = self.root / "params.yaml"
        tree = yaml.load(path.read_text())
        section, _, name = dotted.rpartition(".")
        tree[section].pop(name, None)
        with path.open("w") as file:
            yaml.dump(tree, file)

    def bytes_of(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def json(self, path: str) -> Any:
        return json.loads((self.root / path).read_text())

    def trained(self, stage: str) -> int:
        """How many different jobs of a stage were completed here."""
        found = (self.root / ".swap" / stage).glob("*/result*")
        return sum(not path.suffix for path in found)  # neither .partial nor .damaged

    def copy_to(self, target: Path) -> Project:
        shutil.copytree(self.root, target, symlinks=True)
        return Project(target, self.environment)


def set_params(path: Path, values: Mapping[str, Any]) -> None:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    tree = yaml.load(path.read_text())
    for dotted, value in values.items():
        *sections, last = dotted.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[last] = value
    with path.open("w") as file:
        yaml.dump(tree, file)


def make_project(root: Path) -> Project:
    """The files of this repository with 240 training and 120 test images, committed to their own git repository."""
    import torch

    from swap_pipeline.storage.tensor_files import read_tensors, write_tensors

    root.mkdir(parents=True)
    for name in ("stages", "swap_pipeline"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "dvc.yaml",
        "analysis/dvc.yaml",
        "analysis/params.yaml",
        "analysis/.gitignore",
        "analysis/.dvcignore",
        "analysis/.dvc/config",
        "analysis/.dvc/.gitignore",
        ".gitignore",
        ".dvcignore",
        ".dvc/config",
        ".dvc/.gitignore",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "analysis" / "swap_pipeline").symlink_to("../swap_pipeline")
    shutil.copytree(ROOT / ".dvc" / "plots", root / ".dvc" / "plots")
    shutil.copytree(ROOT / "recipes", root / "recipes")
    shutil.copy(ROOT / "recipes" / "fashion-mini.yaml", root / "params.yaml")  # whatever the user has made of his own
    (root / "data" / "raw").mkdir(parents=True)
    shutil.copy(ROOT / "data" / "raw" / "README.md", root / "data" / "raw" / "README.md")
    tensors, info = read_tensors(ROOT / "data" / "fashion-mini.safetensors")
    few = {"train": torch.arange(0, 10000, 41)[:240], "test": torch.arange(0, 10000, 83)[:120]}
    small = {key: tensor[few[key.split("_")[0]]] for key, tensor in tensors.items()}
    write_tensors(root / "data" / "fashion-mini.safetensors", small, info)
    project = Project(root)
    project.set_params(TINY)
    project.set_analysis(TINY_ANALYSIS)
    for command in (
        ("git", "init", "-q", "-b", "main"),
        ("git", "config", "user.email", "test@example.org"),
        ("git", "config", "user.name", "Test"),
        ("git", "add", "-A"),
        ("git", "commit", "-qm", "start"),
    ):
        project.run(*command)
    return project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project in which nothing has run yet."""
    return make_project(tmp_path / "project")


def made_once(
    name: str,
    change: Mapping[str, Any] | Callable[[Project], None],
    tmp_path_factory: pytest.TempPathFactory,
    **environment: str,
) -> Project:
    """A project after a change and `dvc repro`, what that printed in `output.txt` beside it; for all test processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "output.txt").exists():
            project = make_project(folder / "project")
            project.environment = environment
            if callable(change):
                change(project)
            else:
                project.set_params(change)
            output = project.dvc("repro")
            project.run("git", "add", "-A")
            project.run("git", "commit", "-qm", "first run")
            (folder / "output.txt").write_text(output)
    return Project(folder / "project", environment)


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project after `dvc repro`; not to be changed."""
    return made_once("finished", {}, tmp_path_factory)


@pytest.fixture(scope="session")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a validation set, after `dvc repro`; not to be changed."""
    return made_once("validated", VALIDATED, tmp_path_factory)


@pytest.fixture
def finished(finished_project: Project, tmp_path: Path) -> Project:
    """A copy of the finished project to work on."""
    return finished_project.copy_to(tmp_path / "project")
