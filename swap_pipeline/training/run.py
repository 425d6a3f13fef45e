"""The input and output of a run of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from swap_pipeline.config.params import Augment, Leaving
from swap_pipeline.data.images import Split
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.evaluation import Score


def as_prepared(epoch: float) -> None:
    """The view for images in memory."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one call of the loop does."""

    name: str
    """for the user: `phase1`, `phase2 seed 3`"""
    section: str
    """its section in `params.yaml`"""
    seed: int
    """data order and augmentation"""
    batch_size: Callable[[float], int]
    """images per step over all ranks, by epoch: B₁ or B₂ of Algorithm 1"""
    epochs: int
    max_steps: int | None = None
    """limit per epoch, if it has more"""
    learning_rate: Callable[[float], float]
    """of the fractional epoch at which a step begins: LR₁ or LR₂"""
    shards: int = 1
    """equal parts of a batch, each normalised on its own"""
    sync_steps: Callable[[float], int] = lambda epoch: 1
    """local SGD: each shard takes so many steps of its own between two averages of their weights, by epoch"""
    ema_decay: float | None = None
    """the result is an exponential mean of the weights"""
    view: Callable[[float], View | None] = as_prepared
    """by epoch, for images from files"""
    leaving: Leaving = Leaving()
    """by which rule it ends before its last epoch; by default, by none"""
    chance: str = ""
    """for people, where the name does not tell it: which seed of `params.yaml` it is"""
    is_fork: bool = False
    """a trial of phase 2, with params of its own"""

    @property
    def if_too_large(self) -> str:
        """For people: what to do if a batch does not fit into memory."""
        if self.is_fork:
            return f"lower {self.section}.fork_batch_size"
        return f"raise {self.section}.shards, or lower {self.section}.batch_size"

    @property
    def if_not_finite(self) -> str:
        if self.is_fork:
            return f"lower {self.section}.fork_lr"
        return f"lower {self.section}.peak_lr (or lr_knots; or lengthen the warm-up)"

    def is_in_sync(self, epoch: int, step: int, num_steps: int) -> bool:
        """Whether all shards have the same weights after this step of an epoch."""
        return step + 1 == num_steps or (step + 1) % self.sync_steps(epoch) == 0


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a run learns from, and what its curve is measured on."""

    train: Split
    held_out: Split
    """validation images, or test images where there are none"""
    augment: Augment
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A row of the training curve."""

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float
    noise_scale: float | None = None
    """of the gradient, in images; None where the batch is one shard"""
    loss: float
    """of held-out images, as accuracy and top5"""
    accuracy: float
    top5: float | None
    seconds: float

    @property
    def score(self) -> Score:
        return Score(loss=self.loss, accuracy=self.accuracy, top5=self.top5)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a run when it is over; accuracies in percent, seconds of training alone."""

    curve: tuple[Epoch, ...]
    stopped_by: str
    """the rule that ended it: `accuracy` (τ was passed), …; or `epochs` (the maximum was reached)"""
    left: str
    """the same for the user, with the reason"""
    score: Score
    """of the network that is the result, on held-out images"""
    forks: tuple[Mapping[str, float], ...] = ()
    """what fork tests found"""

    def as_json(self) -> dict[str, Any]:
        return {
            "curve": [asdict(row) for row in self.curve],
            "epochs": len(self.curve),
            "stopped_by": self.stopped_by,
            "left": self.left,
            "train_accuracy": self.curve[-1].train_accuracy if self.curve else None,
            **({"forks": self.forks} if self.forks else {}),
            "seconds": sum(row.seconds for row in self.curve) + sum(test["seconds"] for test in self.forks),
        }
