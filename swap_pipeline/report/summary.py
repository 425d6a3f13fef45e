"""What came out: the records of all phases as metrics, one table and one set of curves."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CURVE_COLUMNS = ("learning_rate", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")


def models_before_averaging(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], *, cycles: int
) -> list[Mapping[str, Any]]:
    """What is known of the models that are averaged: one of each worker for every cycle; with no phase 2, phase 1's."""
    found: list[Mapping[str, Any]] = []
    for worker in workers.values():
        if cycle := worker["epochs"] // cycles:
            found += worker["curve"][cycle - 1 :: cycle]
    return found or [phase1]


def summarise(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any], *, cycles: int
) -> dict[str, float]:
    """The metrics of a run, short since they are columns of `dvc exp show`; accuracies of test images in percent.

    `seconds` is the critical path: the time that training takes with a device for every worker.
    """
    slowest = max(worker["seconds"] for worker in workers.values())
    return {
        "accuracy": phase3["test_accuracy"],
        "loss": phase3["test_loss"],
        "workers": _mean(models_before_averaging(phase1, workers, cycles=cycles), "test_accuracy"),
        "phase1": phase1["test_accuracy"],
        "seconds": phase1["seconds"] + slowest + phase3["seconds"],
    }


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """A line of the table of results; None where something does not apply."""

    name: str
    test_accuracy: float | None = None
    spread: float | None = None
    """standard deviation over workers"""
    test_loss: float | None = None
    seconds: float | None = None
    devices: str | None = None
    is_result: bool = False
    """of the final model"""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, accuracy, loss and seconds, for people."""
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        return (
            self.name,
            "" if self.test_accuracy is None else f"{self.test_accuracy:.2f}{spread}",
            "" if self.test_loss is None else f"{self.test_loss:.4f}",
            "" if self.seconds is None else f"{self.seconds:.1f}",
        )


RESULT_COLUMNS = ("", "test accuracy", "test loss", "seconds")


def result_rows(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any], *, cycles: int
) -> list[ResultRow]:
    """Phase 1, every worker, their mean, the final model, and the time that it takes."""
    summary = summarise(phase1, workers, phase3, cycles=cycles)
    why = "τ passed" if phase1["stopped_by"] == "accuracy" else "maximum reached"
    epochs = "1 epoch" if phase1["epochs"] == 1 else f"{phase1['epochs']} epochs"
    trained = {seed: worker for seed, worker in workers.items() if worker["epochs"]}
    models = models_before_averaging(phase1, workers, cycles=cycles)
    what = f"{len(models)} models" if cycles > 1 else f"{len(workers)} workers"
    mean = ResultRow(
        name=f"mean of {what}",
        test_accuracy=summary["workers"],
        spread=statistics.stdev(model["test_accuracy"] for model in models) if len(models) > 1 else None,
        test_loss=_mean(models, "test_loss"),
    )
    return [
        _row(f"phase 1 ({epochs}, {why})", phase1),
        *(_row(f"worker, seed {seed}", worker) for seed, worker in trained.items()),
        *([mean] if len(models) > 1 else []),
        _row(f"average of {what}" if phase3["models"] > 1 else "final model", phase3, is_result=True),
        ResultRow(name="critical path", seconds=summary["seconds"]),
    ]


def _mean(models: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.fmean(model[key] for model in models)


def _row(name: str, record: Mapping[str, Any], *, is_result: bool = False) -> ResultRow:
    return ResultRow(
        name=name,
        test_accuracy=record["test_accuracy"],
        test_loss=record["test_loss"],
        seconds=record["seconds"],
        devices=record.get("devices"),
        is_result=is_result,
    )


def result_table(rows: Sequence[ResultRow]) -> str:
    """The result for people, as a Markdown table that also reads well as it is."""
    return aligned([RESULT_COLUMNS, *(row.cells for row in rows)])


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = f"| {'-' * widths[0]} | {' | '.join('-' * (width - 1) + ':' for width in widths[1:])} |"
    return "\n".join([line(rows[0]), rule, *(line(row) for row in rows[1:])])


def curves_csv(phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]]) -> str:
    """All curves in one table; a worker's epochs go on where phase 1 ended."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("run", "epoch", *CURVE_COLUMNS))
    for run, record, before in [
        ("phase1", phase1, 0),
        *((f"seed_{seed}", worker, phase1["epochs"]) for seed, worker in workers.items()),
    ]:
        for row in record["curve"]:
            writer.writerow((run, before + row["epoch"], *(row[column] for column in CURVE_COLUMNS)))
    return text.getvalue()
