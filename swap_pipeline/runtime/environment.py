"""Where and how a job runs: the project's folder, the cores, and the user's `SWAP_…` environment variables. Each is
read only here.

None of them change the result, except for rounding and for the number of processes, which decides how batch norm's
statistics are shared.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

from swap_pipeline.errors import SwapError, shown

JOB = "SWAP_JOB"
"""the scratch folder of the job that a rank belongs to; set by the launcher, never by the user"""
RESULT_NAME = "SWAP_RESULT"
"""the name of its result there; also set by the launcher"""


def project_folder() -> Path:
    """The project's root, with scratch and the files that git ignores; stages run there, or in a temporary copy.

    DVC passes it to its stages (DVC_ROOT), also in an experiment's temporary folder. For the analysis, which is a
    separate DVC project, DVC_ROOT is a folder inside the one where the stages run.
    """
    named = Path(os.environ.get("DVC_ROOT", ".")).resolve()
    return Path() if Path.cwd() in (named, *named.parents) else named


def wanted_device() -> str | None:
    """SWAP_DEVICE: `cpu` or `cuda`; None if not set."""
    wanted = os.environ.get("SWAP_DEVICE") or None
    if wanted not in (None, "cpu", "cuda"):
        raise SwapError(f"SWAP_DEVICE is {wanted!r}: choose cpu or cuda")
    return wanted


def device_type(*, has_gpu: bool, trouble: str = "") -> str:
    """The device to use; by default a GPU if there is one. `trouble` with a GPU never falls back to the CPU."""
    wanted = wanted_device() or ("cuda" if has_gpu or trouble else "cpu")
    if wanted == "cuda" and trouble:
        raise SwapError(f"{trouble}, or set SWAP_DEVICE=cpu")
    if wanted == "cuda" and not has_gpu:
        raise SwapError("SWAP_DEVICE is cuda, but no GPU is visible: check `nvidia-smi`, or set SWAP_DEVICE=cpu")
    return wanted


def launcher() -> str | None:
    """SWAP_LAUNCHER: `local`, `srun` or `sbatch`; None if not set."""
    wanted = os.environ.get("SWAP_LAUNCHER") or None
    if wanted not in (None, "local", "srun", "sbatch"):
        raise SwapError(f"SWAP_LAUNCHER is {wanted!r}: choose local, srun or sbatch")
    return wanted


def num_cores() -> int:
    """Cores that this process may use, also inside a container with a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or `max`: no quota
        return cores


def num_processes() -> int | None:
    """SWAP_NPROC: maximum number of processes in phases 1 and 3; None if not set."""
    return _count("SWAP_NPROC", 0) or None


def max_workers_at_once(default: int) -> int:
    """SWAP_SLOTS: workers of phase 2 that may run in parallel."""
    return _count("SWAP_SLOTS", default)


def workers_per_gpu() -> int:
    """SWAP_WORKERS_PER_GPU: workers of phase 2 that share a GPU of this machine."""
    return _count("SWAP_WORKERS_PER_GPU", 1, maximum=48)  # as many clients as MPS allows


def fan_out() -> bool:
    """SWAP_FANOUT: whether a phase-2 instance also trains the other seeds that are pending."""
    text = os.environ.get("SWAP_FANOUT") or "1"
    if text not in ("0", "1"):
        raise SwapError(f"SWAP_FANOUT is {text!r}: write 0 or 1")
    return text == "1"


def eval_batch_size() -> int:
    """SWAP_EVAL_BATCH: images in one forward pass of an evaluation, on each device."""
    return _count("SWAP_EVAL_BATCH", 500)


def num_loaders(default: int) -> int:
    """SWAP_LOADERS: processes that decode images for each rank, if images are read from their files."""
    return _count("SWAP_LOADERS", default, maximum=1024)


def timeout_minutes() -> float:
    """SWAP_TIMEOUT_MINUTES: how long a rank waits for the others, and a launcher for Slurm's controller."""
    text = os.environ.get("SWAP_TIMEOUT_MINUTES") or "30"
    if not 0 < (minutes := _number(text)) < 1e6:
        raise SwapError(f"SWAP_TIMEOUT_MINUTES is {shown(text)}: write a number of minutes above 0")
    return minutes


def num_kept_epochs() -> int:
    """SWAP_KEEP_EPOCHS: maximum number of phase 1's snapshots to keep, for other stop rules and values of τ."""
    return _count("SWAP_KEEP_EPOCHS", 40, minimum=5)


def snapshot_seconds() -> float:
    """SWAP_SNAPSHOT_SECONDS: minimum training time between two snapshots; 0: one at every epoch."""
    text = os.environ.get("SWAP_SNAPSHOT_SECONDS") or "5"
    if not 0 <= (seconds := _number(text)) < 1e9:
        raise SwapError(f"SWAP_SNAPSHOT_SECONDS is {shown(text)}: write a number of seconds, or 0")
    return seconds


def num_retries() -> int:
    """SWAP_RETRIES: how often a job that died without an error of its own (was killed, for example) is restarted."""
    return _count("SWAP_RETRIES", 1, minimum=0, maximum=1000)


def writes_tensorboard() -> bool:
    """SWAP_TENSORBOARD: whether ranks write events for TensorBoard."""
    text = os.environ.get("SWAP_TENSORBOARD") or "0"
    if text not in ("0", "1"):
        raise SwapError(f"SWAP_TENSORBOARD is {shown(text)}: write 0 or 1")
    if text == "1" and importlib.util.find_spec("tensorboard") is None:
        raise SwapError("SWAP_TENSORBOARD is 1, but tensorboard is not installed: run `pip install tensorboard`")
    return text == "1"


def is_debugging() -> bool:
    """SWAP_DEBUG: whether errors come with a traceback."""
    return os.environ.get("SWAP_DEBUG", "0") not in ("", "0")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _count(variable: str, default: int, *, minimum: int = 1, maximum: int = 100_000) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    if not text.isdecimal() or len(text) > 9 or not minimum <= int(text) <= maximum:
        raise SwapError(f"{variable} is {shown(text)}: write a whole number from {minimum} to {maximum:,}")
    return int(text)


def find_root(root: str) -> Path:
    """The folder that `data.root` names; an experiment in a temporary folder finds its parent project's.

    The default, `data/raw`, exists there too, but without the files that git ignores: use the one with images.
    """
    places = [Path(root), project_folder() / root]
    with_images = (path for path in places if (path / "train").is_dir())
    existing = (path for path in places if path.exists())
    return next(with_images, None) or next(existing, None) or places[0]
