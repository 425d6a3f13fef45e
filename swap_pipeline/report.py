"""What came out: the records of all phases as metrics, one table and one set of curves."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CURVE_COLUMNS = ("learning_rate", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")


def summarise(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The metrics of a whole run; accuracies in percent, seconds of training alone.

    The critical path is the time a run takes with a device for every worker.
    """
    accuracies = [worker["test_accuracy"] for worker in workers.values()]
    slowest = max(worker["seconds"] for worker in workers.values())
    return {
        "phase1": {key: phase1[key] for key in ("test_accuracy", "train_accuracy", "epochs", "stopped_by")},
        "workers": {
            "test_accuracy_mean": statistics.fmean(accuracies),
            "test_accuracy_std": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
            "test_accuracy_best": max(accuracies),
        },
        "swap": {"test_accuracy": phase3["test_accuracy"], "test_loss": phase3["test_loss"]},
        "time": {
            "phase1_seconds": phase1["seconds"],
            "phase2_seconds_max": slowest,
            "phase3_seconds": phase3["seconds"],
            "critical_path_seconds": phase1["seconds"] + slowest + phase3["seconds"],
        },
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
    """of SWAP itself"""

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
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]
) -> list[ResultRow]:
    """Phase 1, every worker, their mean, SWAP, and the time that it takes."""
    summary = summarise(phase1, workers, phase3)
    why = "τ passed" if phase1["stopped_by"] == "accuracy" else "maximum reached"
    epochs = "1 epoch" if phase1["epochs"] == 1 else f"{phase1['epochs']} epochs"
    of_what = "the workers" if phase3["models"] == len(workers) else f"{phase3['models']} models"
    return [
        _row(f"phase 1 ({epochs}, {why})", phase1),
        *(_row(f"worker, seed {seed}", worker) for seed, worker in workers.items()),
        ResultRow(
            name=f"mean of {len(workers)} workers",
            test_accuracy=summary["workers"]["test_accuracy_mean"],
            spread=summary["workers"]["test_accuracy_std"],
            test_loss=statistics.fmean(worker["test_loss"] for worker in workers.values()),
        ),
        _row(f"SWAP: average of {of_what}", phase3, is_result=True),
        ResultRow(name="critical path", seconds=summary["time"]["critical_path_seconds"]),
    ]


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
