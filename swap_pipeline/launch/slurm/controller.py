"""Running Slurm's commands, also while its controller does not answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

from swap_pipeline.errors import SwapError
from swap_pipeline.launch.display import Display
from swap_pipeline.runtime import environment

_SILENT = ("contact slurm controller", "timed out", "zero bytes", "connection failure", "connection refused")


class SilentControllerError(SwapError):
    """Slurm did not answer."""


def ask(*command: str) -> str:
    """What one of Slurm's commands prints; its error message becomes a `SwapError`."""
    if shutil.which(command[0]) is None:
        raise SwapError(
            f"{command[0]} is not on PATH: run this on a login node of the cluster or in one of its jobs, "
            f"or set SWAP_LAUNCHER=local"
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=_outside_of_jobs())
    except subprocess.TimeoutExpired:
        raise SilentControllerError(f"{command[0]}: Slurm did not answer for 60 seconds") from None
    if done.returncode == 0:
        return done.stdout
    lines = [line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines()]
    what = f"{command[0]}: {lines[-1] if lines else f'exit code {done.returncode}'}"
    silent = any(sign in line.lower() for line in lines for sign in _SILENT)
    raise SilentControllerError(what) if silent else SwapError(what)


def _outside_of_jobs() -> dict[str, str]:
    """The environment without variables of a Slurm job that this launcher may be in, which a new job would take for its
    own (number of restarts, array index), and without the user's default filters for squeue."""
    foreign = ("SLURM_", "SQUEUE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign) or name == "SLURM_CONF"}


class Patience:
    """How long to wait for a controller that does not answer: SWAP_TIMEOUT_MINUTES."""

    def __init__(self) -> None:
        self._silent_since: float | None = None
        self._pause = 0.5

    def renew(self) -> None:
        """To be called when it has answered."""
        self._silent_since, self._pause = None, 0.5

    def seconds_to_wait(self, error: SwapError, display: Display) -> float:
        """Until the next attempt; raises an error if it has been silent for too long."""
        now, minutes = time.monotonic(), environment.timeout_minutes()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > 60 * minutes:
            raise SwapError(
                f"{error}, for {minutes:g} minutes (SWAP_TIMEOUT_MINUTES): nothing is lost; when Slurm answers again, "
                f"`dvc repro` finds the submitted jobs"
            ) from None
        display.say_once(f"{error}: waiting for it; running jobs are not affected")
        pause, self._pause = self._pause, min(1.5 * self._pause, 10)
        return min(pause, 60 * minutes / 4)
