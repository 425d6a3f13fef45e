"""python -m benchmarks.children MODULE:FUNCTION '{"argument": 1}'

Runs a function in a fresh process, with the threads and allocator settings that the launcher gives a rank: both must be
set before torch is imported. The function's result comes back as JSON.

Memory is also measured this way: a fresh process's peak, above what it had before.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swap_pipeline.launch.jobs import MALLOC

ROOT = Path(__file__).resolve().parents[1]
_MARK = "benchmark result: "
# A child must not take itself for a rank.
_FOREIGN = ("SWAP_", "DVC_", "PYTEST", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_", "MKL_")


def environment(
    *, threads: int | None = None, as_rank: bool = True, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A child's environment; `as_rank` adds a rank's allocator settings."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "SWAP_DEVICE": "cpu",
        "DVC_NO_ANALYTICS": "1",
        **(MALLOC if as_rank else {}),
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}),
        **(more or {}),
    }


def start(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    threads: int,
    cwd: Path | None = None,
    as_rank: bool = True,
    more: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a function of a module of this package; `result_of` waits for it."""
    name = f"{function.__module__}:{function.__qualname__}"
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.children", name, json.dumps(arguments)],
        cwd=cwd or ROOT,
        env=environment(threads=threads, as_rank=as_rank, more=more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def result_of(child: subprocess.Popen[str]) -> Any:
    output, _ = child.communicate()
    for line in output.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    raise RuntimeError(f"{str(child.args)[:200]} ended with code {child.returncode}:\n{output[-2000:]}")


def call(function: Callable[..., Any], *, threads: int, cwd: Path | None = None, **arguments: Any) -> Any:
    """The result of a function run in a fresh process."""
    return result_of(start(function, arguments, threads=threads, cwd=cwd))


def say(line: str) -> None:
    """Progress: a child's standard error is that of the benchmark."""
    print(f"    {line}", file=sys.stderr, flush=True)


class Memory:
    """This process's peak memory from now on, in bytes, including mapped files (Linux only)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
        self._start = _status("VmRSS")

    @property
    def peak(self) -> int:
        """Peak above the start; at least a page, so that it can be a divisor."""
        return max(os.sysconf("SC_PAGE_SIZE"), _status("VmHWM") - self._start)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    print(f"{_MARK}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
