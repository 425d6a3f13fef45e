"""Which run this is: the stage, the repeat, the worker's seed; and what follows from that.

The plain pipeline is repeat 0. The comparisons repeat it, and what it is compared with, under other seeds; there each
method has two stages in `comparisons/dvc.yaml`: `small_batch` for repeat 0 and the matrix `small_batch_again`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PHASES = ("phase1", "phase2", "phase3")
BASELINES = ("small_batch", "large_batch")
SWA_STARTS = {
    "swa_large_batch": "large_batch",
    "swa_large_then_small": "phase1",
    "swa_small_batch": "small_batch",
}
"""Each variant of SWA, with the method whose model it starts from."""
ANALYSES = ("landscape", "cosine", "workers")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One run of one method: what DVC calls an instance of a stage."""

    method: str
    """a phase, `averaged`, a baseline, a variant of SWA or an analysis"""
    repeat: int = 0
    seed: int | None = None
    """of a worker of phase 2"""

    @property
    def name(self) -> str:
        """What people call it: `phase2 seed 3`, `small_batch repeat 1`."""
        seed = "" if self.seed is None else f" seed {self.seed}"
        repeat = f" repeat {self.repeat}" if self.repeat else ""
        return f"{self.method}{seed}{repeat}"

    @property
    def stage_file(self) -> str:
        """The `dvc.yaml` that declares the stage."""
        if self.method in ANALYSES:
            return "analysis/dvc.yaml"
        return "dvc.yaml" if self._in_plain_pipeline else "comparisons/dvc.yaml"

    @property
    def stage(self) -> str:
        return f"{self.method}_again" if self.repeat else self.method

    @property
    def item(self) -> dict[str, int]:
        """The entries of the stage's matrix, in DVC's order."""
        repeat = {"repeat": self.repeat} if self.repeat else {}
        return repeat if self.seed is None else {**repeat, "seed": self.seed}

    @property
    def stage_name(self) -> str:
        """As DVC lists it within its file: `phase2_again@1-3`."""
        return f"{self.stage}@{'-'.join(map(str, self.item.values()))}" if self.item else self.stage

    @property
    def command(self) -> tuple[str, ...]:
        """Module and arguments, as after `python -m`."""
        if self.method in BASELINES:
            module: tuple[str, ...] = ("stages.baseline", self.method)
        elif self.method in SWA_STARTS:
            module = ("stages.swa", self.method)
        else:
            module = (f"stages.{self.method}",)
        options = {"seed": self.seed, "repeat": self.repeat or None}
        return (
            *module,
            *(word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))),
        )

    @property
    def has_models(self) -> bool:
        """Whether it leaves models; others only look at those of others."""
        return self.method not in ("averaged", *ANALYSES)

    @property
    def outs(self) -> tuple[Path, ...]:
        """What DVC keeps of it."""
        return (self.checkpoints, self.record) if self.has_models else (self.record,)

    @property
    def checkpoints(self) -> Path:
        """The folder of its models."""
        folder = self._place("checkpoints") / self.method
        return folder if self.seed is None else folder / f"seed_{self.seed}"

    @property
    def model(self) -> Path:
        return self.checkpoints / "model.safetensors"

    @property
    def record(self) -> Path:
        """The file with what is known of the run."""
        folder = Path("analysis") if self.method in ANALYSES else self._place("metrics")
        return folder / f"{self.method}.json" if self.seed is None else folder / self.method / f"seed_{self.seed}.json"

    @property
    def start(self) -> Instance | None:
        """The run whose model this one starts from, if any."""
        if self.method == "phase2":
            return Instance(method="phase1", repeat=self.repeat)
        if self.method in SWA_STARTS:
            return Instance(method=SWA_STARTS[self.method], repeat=self.repeat)
        return None

    @property
    def chance(self) -> tuple[str | int, ...]:
        """What to add to a seed, so that every repeat has chances of its own."""
        return ("repeat", self.repeat) if self.repeat else ()

    @property
    def header(self) -> dict[str, int]:
        """What a checkpoint says of the repeat."""
        return {"repeat": self.repeat} if self.repeat else {}

    @property
    def origin(self) -> dict[str, str | int | None]:
        """What the header of a worker's models must say of where they are from."""
        return {"phase": self.method, "seed": self.seed, "repeat": self.repeat or None}

    def siblings(self, repeats: Sequence[int]) -> list[Instance]:
        """The same method in the other repeats. Repeat 0 has none: who asks for it alone does not pay for the rest."""
        return [replace(self, repeat=repeat) for repeat in repeats if repeat != self.repeat] if self.repeat else []

    @property
    def _in_plain_pipeline(self) -> bool:
        return self.method in (*PHASES, "averaged") and self.repeat == 0

    def _place(self, kind: str) -> Path:
        return Path(kind) if self._in_plain_pipeline else Path("comparisons") / kind / f"repeat_{self.repeat}"
