"""What happens beside the learning: snapshots, models that are kept, lines for people, a request to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch import nn

from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.runtime.stop_request import Stopped, StopRequest
from swap_pipeline.training.resuming import Begun, State, keep
from swap_pipeline.training.run import Epoch, Run, reason_to_stop


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Where a run leaves its state, and whom it tells how far it has come."""

    snapshots: Path
    """a folder; the run goes on from the newest one in it"""
    reporter: Reporter
    at_epoch_end: Callable[[int, nn.Module], None] = lambda epoch, network: None
    """called on the main rank with the network that would be the result after so many epochs, and once more for an
    epoch that is repeated after a kill"""


class Keeper:
    """Looks after a run that trains, on this rank."""

    def __init__(self, keeping: Keeping, run: Run, state: State, curve: list[Epoch], begun: Begun) -> None:
        self._keeping, self._run, self._state, self._curve = keeping, run, state, curve
        if curve or begun.step:
            after = f"epoch {len(curve)}" + (f" and {begun.step} steps" if begun.step else "")
            keeping.reporter.done(len(curve), f"resuming after {after}")
        self._stop = StopRequest(keeping.snapshots, of_main=state.group.number_of_main)

    def after_step(self, epoch: int, step: int, num_steps: int) -> bool:
        """Whether the run is to end here, in the middle of an epoch."""
        self._keeping.reporter.step(epoch, step, num_steps)
        return step + 1 < num_steps and self._stop.is_due()

    def end_within_epoch(self, begun: Begun) -> NoReturn:
        keep(self._run, self._keeping.snapshots, self._state, self._curve, begun)
        raise Stopped

    def after_epoch(self, result: nn.Module) -> None:
        """The curve has its row by now."""
        row = self._curve[-1]
        if self._state.group.is_main:
            self._keeping.at_epoch_end(row.epoch, result)
        keep(self._run, self._keeping.snapshots, self._state, self._curve)
        self._keeping.reporter.done(
            row.epoch,
            f"epoch {row.epoch}/{self._run.epochs}  test {row.test_accuracy:.2f} %  train {row.train_accuracy:.2f} %  "
            f"loss {row.train_loss:.4f}  lr {row.learning_rate:.4f}  {row.seconds:.1f} s",
        )
        # With all done, only the result is left to be written.
        if not reason_to_stop(self._run, self._curve) and self._stop.is_due():
            raise Stopped
