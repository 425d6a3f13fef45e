"""Everything around the training loop: snapshots, kept models, progress lines, requests to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from torch import nn

from swap_pipeline.data.epochs import steps_per_epoch
from swap_pipeline.runtime.environment import snapshot_seconds
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.runtime.stop_request import Stopped, StopRequest
from swap_pipeline.training.leaving.rules import exit_now, lacks_test
from swap_pipeline.training.resuming import Begun, State, keep
from swap_pipeline.training.run import Epoch, Run
from swap_pipeline.training.snapshots import SnapshotWriter


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Where a run saves its state and reports its progress."""

    snapshots: Path
    """a folder; the run resumes from the newest one in it"""
    reporter: Reporter
    stays: Callable[[int], bool] | None = None
    """for phase 1, which other runs may leave at other epochs: after which epochs snapshots stay"""
    held_out: str = "test"
    """for the user: the split on which the curve is measured"""
    at_epoch_end: Callable[[int, nn.Module], None] = lambda epoch, network: None
    """called on the main rank after each epoch with the network that would be the result; called again if the epoch
    is repeated after a kill"""


class Keeper:
    """Does all this for a run, on this rank."""

    def __init__(
        self, keeping: Keeping, run: Run, state: State, curve: list[Epoch], begun: Begun, *, num_images: int
    ) -> None:
        self._keeping, self._run, self._state, self._curve = keeping, run, state, curve
        self._num_images = num_images
        if curve or begun.step:
            after = f"epoch {len(curve)}" + (f" and {begun.step} steps" if begun.step else "")
            keeping.reporter.done(len(curve), f"resuming after {after}")
        self._stop = StopRequest(keeping.snapshots, of_main=state.group.number_of_main)
        self._writer = SnapshotWriter(keeping.snapshots, keeping.stays)
        self._seconds, self._kept_at = snapshot_seconds(), time.monotonic()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish writing."""
        try:
            self._writer.close()
        except Exception:
            if kind in (None, Stopped):  # else there was an earlier error
                raise

    def after_step(self, epoch: int, step: int, num_steps: int) -> bool:
        """Whether to stop here, in the middle of an epoch."""
        self._keeping.reporter.step(epoch, step, num_steps)
        self._writer.is_busy()  # or it has failed, and training with it
        return step + 1 < num_steps and self._run.is_in_sync(epoch, step, num_steps) and self._stop.is_due()

    def end_within_epoch(self, begun: Begun) -> NoReturn:
        keep(self._run, self._writer, self._state, self._curve, begun)
        raise Stopped

    def _images_per_second(self, row: Epoch) -> float:
        batch_size = self._run.batch_size(row.epoch - 1)
        return batch_size * steps_per_epoch(self._num_images, batch_size) / max(row.seconds, 1e-9)

    def after_epoch(self, result: nn.Module) -> None:
        """To be called when the curve has its row."""
        row = self._curve[-1]
        self._keeping.reporter.log(row.epoch, {**asdict(row), "images_per_second": self._images_per_second(row)})
        if self._state.group.is_main:
            self._keeping.at_epoch_end(row.epoch, result)
        # After the last epoch, the result is written instead.
        ends = exit_now(self._run, self._curve) is not None
        stops = not ends and self._stop.is_due()
        if stops or self._is_due(row.epoch, ends=ends):
            keep(self._run, self._writer, self._state, self._curve)
            self._kept_at = time.monotonic()
        self._keeping.reporter.done(
            row.epoch,
            f"epoch {row.epoch}/{self._run.epochs}  {self._keeping.held_out} {row.accuracy:.2f} %  train "
            f"{row.train_accuracy:.2f} %  loss {row.train_loss:.4f}  lr {row.learning_rate:.4f}  {row.seconds:.1f} s",
        )
        if stops:
            raise Stopped

    def settle(self) -> None:
        """Wait until all ranks see the same snapshots."""
        self._writer.wait()
        self._state.group.wait()

    def _is_due(self, epoch: int, *, ends: bool) -> bool:
        """Whether to write a snapshot now. Waits for a slow disk only if every epoch must have one.

        For phase 1, also where it may be resumed later, by another rule or for a fork test.
        """
        if not self._state.group.is_main:
            return False
        stays = self._keeping.stays
        if stays is not None and (ends or stays(epoch) or lacks_test(self._run, epoch, ())):
            return True
        if self._writer.is_busy() and self._seconds > 0:
            return False
        return time.monotonic() - self._kept_at >= self._seconds
