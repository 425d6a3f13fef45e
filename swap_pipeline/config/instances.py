"""Which run this is (a stage and, for a worker, its seed) and the names and paths derived from that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swap_pipeline.config.kept_models import LAST_MODEL

PHASES = ("phase1", "phase2", "phase3")
ANALYSES = ("landscape", "cosine", "workers", "exits")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One run of a stage: what DVC calls an instance of it."""

    stage: str
    """a phase or an analysis"""
    seed: int | None = None
    """of a worker of phase 2"""

    @property
    def name(self) -> str:
        """Display name: `phase2 seed 3`."""
        return self.stage if self.seed is None else f"{self.stage} seed {self.seed}"

    @property
    def stage_file(self) -> str:
        """The `dvc.yaml` that declares the stage."""
        return "analysis/dvc.yaml" if self.stage in ANALYSES else "dvc.yaml"

    @property
    def item(self) -> dict[str, int]:
        """The entries of the stage's matrix."""
        return {} if self.seed is None else {"seed": self.seed}

    @property
    def stage_name(self) -> str:
        """As DVC lists it within its file: `phase2@3`."""
        return self.stage if self.seed is None else f"{self.stage}@{self.seed}"

    @property
    def command(self) -> tuple[str, ...]:
        """Module and arguments, as after `python -m`."""
        return (f"stages.{self.stage}", *(() if self.seed is None else ("--seed", str(self.seed))))

    @property
    def has_models(self) -> bool:
        """Whether it produces models; the analyses only read them."""
        return self.stage in PHASES

    @property
    def outs(self) -> tuple[Path, ...]:
        """Its outputs in DVC."""
        return (self.checkpoints, self.record) if self.has_models else (self.record,)

    @property
    def checkpoints(self) -> Path:
        """The folder of its models."""
        folder = Path("checkpoints") / self.stage
        return folder if self.seed is None else folder / f"seed_{self.seed}"

    @property
    def model(self) -> Path:
        return self.checkpoints / LAST_MODEL

    @property
    def record(self) -> Path:
        """The JSON file with the run's metrics."""
        folder = Path("analysis" if self.stage in ANALYSES else "metrics")
        return folder / f"{self.stage}.json" if self.seed is None else folder / self.stage / f"seed_{self.seed}.json"

    @property
    def origin(self) -> dict[str, str | int | None]:
        """The origin that the headers of its models must state."""
        return {"phase": self.stage, "seed": self.seed}


PHASE1 = Instance(stage="phase1")
PHASE3 = Instance(stage="phase3")


def worker(seed: int) -> Instance:
    return Instance(stage="phase2", seed=seed)
