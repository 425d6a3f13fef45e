"""The machine and code that were measured."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from swap_pipeline.report.git import git
from swap_pipeline.runtime.environment import num_cores

_VERSIONS = ("torch", "torchvision", "numpy", "pillow", "safetensors", "dvc", "timm", "lightning", "mergekit")


def about() -> dict[str, Any]:
    return {"machine": machine(), "versions": versions(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit()}


def machine() -> str:
    """CPU, usable cores, memory and operating system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{num_cores()} cores of {_cpu()}, {memory:.0f} GiB of memory, {platform.system()} {platform.release()}"


def commit() -> str:
    """The commit that is measured, with a + if code differs from it; empty without git."""
    root = ("-C", str(Path(__file__).parents[1]))
    name = git(*root, "rev-parse", "--short", "HEAD") or ""
    return f"{name}+" if name and git(*root, "status", "--porcelain", "--", "*.py") else name


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def missing(module: str) -> str:
    """Why a peer cannot be measured; empty if it is installed."""
    if importlib.util.find_spec(module) is not None:
        return ""
    return f"{module} is not installed: pip install -c constraints.txt -e '.[bench]'"
