"""Synthetic inputs for benchmarks: prepared images, weight files and projects."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from benchmarks.children import ROOT, environment
from swap_pipeline.config.params import Augment, Compute, Model, Optimizer
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.storage.files import write_json
from swap_pipeline.storage.tensor_files import digest_of, write_tensors

CIFAR_SHAPE = (3, 32, 32)
NUM_CLASSES = 10
# As in the paper's CIFAR-10 recipe.
AUGMENT = Augment(padding=4, flip=True, cutout=8)
OPTIMIZER = Optimizer()
COMPUTE = Compute(precision="fp32")


def resnet9(width: int, *, channels: int = 3, seed: int = 0) -> torch.nn.Module:
    return new_network(description(width, channels=channels), seed=seed)


def description(width: int, *, channels: int = 3) -> dict[str, Any]:
    model = Model(name="resnet9", width=width)
    return describe_network(model, channels=channels, num_classes=NUM_CLASSES)


def write_prepared(folder: Path, *, num_train: int, num_test: int, shape: tuple[int, int, int] = CIFAR_SHAPE) -> None:
    """Random images as `prepare` would write them."""
    channels = shape[0]
    meta = {
        "kind": "memory",
        "classes": [str(number) for number in range(NUM_CLASSES)],
        "shape": list(shape),
        "mean": [0.5] * channels,
        "std": [0.25] * channels,
    }
    generator = torch.Generator().manual_seed(0)
    for split, number in (("train", num_train), ("test", num_test)):
        tensors = {
            "images": torch.randint(256, (number, *shape), dtype=torch.uint8, generator=generator),
            "labels": torch.arange(number) % NUM_CLASSES,
        }
        info = {"split": split, "meta": digest_of(meta)}
        write_tensors(folder / f"{split}.safetensors", tensors, info, durable=False)
    write_json(folder / "meta.json", meta)


def write_models(folder: Path, *, number: int, num_bytes: int) -> list[Path]:
    """Equal weight files: one large tensor (an eighth of the file), many of a fiftieth, and as many small ones."""
    elements = num_bytes // 4
    sizes = {"large": elements // 8} | {f"layer_{n}.weight": elements // 50 for n in range(43)}
    sizes |= {f"layer_{n}.bias": max(1, elements // 50_000) for n in range(43)}
    paths = [folder / f"model_{n}.safetensors" for n in range(number)]
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(size, generator=generator) for key, size in sizes.items()}
    for path in paths:
        for tensor in tensors.values():
            tensor.mul_(-0.9)
        write_tensors(path, tensors, {}, durable=False)
    return paths


def largest_tensor(num_bytes: int) -> int:
    """Size of a file of `write_models`, in bytes."""
    return num_bytes // 4 // 8 * 4


@dataclass(frozen=True)
class Project:
    """A copy of this checkout in its current state, to run stages in."""

    root: Path

    @classmethod
    def copy(cls, root: Path, params: Mapping[str, Any]) -> Project:
        """Everything that git tracks, but with these params."""
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / name)
        shutil.copy(root / "recipes" / "fashion-mini.yaml", root / "params.yaml")
        project = cls(root)
        project.set_params(params)
        return project

    def set_params(self, values: Mapping[str, Any]) -> None:
        yaml = YAML(typ="safe", pure=True)
        path = self.root / "params.yaml"
        tree = yaml.load(path.read_text(encoding="utf-8"))
        for dotted, value in values.items():
            *sections, last = dotted.split(".")
            node = tree
            for section in sections:
                node = node[section]
            node[last] = value
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(tree, file)

    def run(self, *command: str, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment for `dvc repro` here."""
        site = {"DVC_SITE_CACHE_DIR": str(self.root / ".dvc" / "tmp" / "site")}
        return {**environment(as_rank=False), **site, "PYTHONPATH": str(self.root), **variables}

    def stage(self, name: str, *arguments: str, **variables: str) -> str:
        return self.run(sys.executable, "-m", f"stages.{name}", *arguments, **variables)

    def dvc(self, *arguments: str, **variables: str) -> str:
        return self.run(sys.executable, "-m", "dvc", *arguments, **variables)

    def commit(self) -> None:
        """Make it a git repository, which DVC needs."""
        who = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@example.org")
        self.run("git", "init", "-q", "-b", "main")
        self.run("git", "add", "-A")
        self.run("git", *who, "commit", "-qm", "start")

    def forget_scratch(self, *stages: str) -> None:
        """Let the next run train again."""
        for stage in stages:
            shutil.rmtree(self.root / ".swap" / stage, ignore_errors=True)

    def write_phase1(self, *, width: int, channels: int, names: Sequence[str] = ("phase1",)) -> None:
        """Write a model with initial weights in place of phase 1's."""
        network = resnet9(width, channels=channels)
        for name in names:
            path = self.root / "checkpoints" / name / "model.safetensors"
            write_tensors(path, network.state_dict(), {"model": description(width, channels=channels)}, durable=False)
