"""What came out: the records of all phases as metrics, one table and one set of curves."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
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


def result_table(phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]) -> str:
    """The result for people, as a Markdown table that also reads well as it is."""
    summary = summarise(phase1, workers, phase3)
    why = "τ passed" if phase1["stopped_by"] == "accuracy" else "maximum reached"
    rows = [("", "test accuracy", "test loss", "seconds")]
    epochs = "1 epoch" if phase1["epochs"] == 1 else f"{phase1['epochs']} epochs"
    rows.append(_row(f"phase 1 ({epochs}, {why})", phase1))
    rows += [_row(f"worker, seed {seed}", worker) for seed, worker in workers.items()]
    spread = summary["workers"]["test_accuracy_std"]
    rows.append(
        (
            f"mean of {len(workers)} workers",
            f"{summary['workers']['test_accuracy_mean']:.2f}" + ("" if spread is None else f" ± {spread:.2f}"),
            f"{statistics.fmean(worker['test_loss'] for worker in workers.values()):.4f}",
            "",
        )
    )
    of_what = "the workers" if phase3["models"] == len(workers) else f"{phase3['models']} models"
    rows.append(_row(f"SWAP: average of {of_what}", phase3))
    rows.append(("critical path", "", "", f"{summary['time']['critical_path_seconds']:.1f}"))
    return aligned(rows)


def _row(name: str, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return name, f"{record['test_accuracy']:.2f}", f"{record['test_loss']:.4f}", f"{record['seconds']:.1f}"


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
