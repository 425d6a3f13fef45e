"""A run's result: metrics, a table and curves from the records of all phases."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CURVE_COLUMNS = ("learning_rate", "train_loss", "train_accuracy", "loss", "accuracy", "seconds")


def models_before_averaging(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Records of the models to average: one for every cycle of each worker, or phase 1's if there is no phase 2."""
    return [model for worker in workers.values() if worker["epochs"] for model in worker["models"]] or [phase1]


def summarise(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]
) -> dict[str, float]:
    """The metrics of a run; names are short, as columns of `dvc exp show`; accuracies are in percent, on test images.

    `validation` is the final model's accuracy on the validation set, if there is one, to choose by. `taken` is the
    number of averaged workers, if they are selected. `seconds` is the critical path: the training time with a device
    for every worker.
    """
    slowest = max(worker["seconds"] for worker in workers.values())
    return {
        "accuracy": phase3["test_accuracy"],
        "loss": phase3["test_loss"],
        **({"validation": phase3["validation_accuracy"]} if "validation_accuracy" in phase3 else {}),
        **({"taken": len(phase3["taken"])} if "taken" in phase3 else {}),
        "workers": _mean(models_before_averaging(phase1, workers), "test_accuracy"),
        "phase1": phase1["test_accuracy"],
        "seconds": phase1["seconds"] + slowest + phase3["seconds"],
    }


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """A row of the table of results; None if a value does not apply."""

    name: str
    test_accuracy: float | None = None
    spread: float | None = None
    """standard deviation over workers"""
    test_loss: float | None = None
    validation_accuracy: float | None = None
    seconds: float | None = None
    devices: str | None = None
    is_result: bool = False
    """whether it is the final model's"""

    @property
    def cells(self) -> tuple[str, ...]:
        """Text for `RESULT_COLUMNS`."""
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        return (
            self.name,
            "" if self.test_accuracy is None else f"{self.test_accuracy:.2f}{spread}",
            "" if self.test_loss is None else f"{self.test_loss:.4f}",
            "" if self.validation_accuracy is None else f"{self.validation_accuracy:.2f}",
            "" if self.seconds is None else f"{self.seconds:.1f}",
        )


RESULT_COLUMNS = ("", "test accuracy", "test loss", "validation accuracy", "seconds")


def result_rows(
    phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]], phase3: Mapping[str, Any]
) -> list[ResultRow]:
    """Phase 1, every worker, their mean, the final model, and the critical path."""
    summary = summarise(phase1, workers, phase3)
    by = phase1["stopped_by"]
    why = {"accuracy": "τ passed", "epochs": "maximum reached"}.get(by, f"left by {by}")
    epochs = "1 epoch" if phase1["epochs"] == 1 else f"{phase1['epochs']} epochs"
    trained = {seed: worker for seed, worker in workers.items() if worker["epochs"]}
    models = models_before_averaging(phase1, workers)
    what = f"{len(models)} models" if len(models) > len(workers) else f"{len(workers)} workers"
    mean = ResultRow(
        name=f"mean of {what}",
        test_accuracy=summary["workers"],
        spread=statistics.stdev(model["test_accuracy"] for model in models) if len(models) > 1 else None,
        test_loss=_mean(models, "test_loss"),
        validation_accuracy=_mean(models, "validation_accuracy") if "validation_accuracy" in models[0] else None,
    )
    return [
        _row(f"phase 1 ({epochs}, {why})", phase1),
        *(_row(f"worker, seed {seed}", worker) for seed, worker in trained.items()),
        *([mean] if len(models) > 1 else []),
        _row(_name_of_result(phase3, what, len(workers)), phase3, is_result=True),
        ResultRow(name="critical path", seconds=summary["seconds"]),
    ]


def _name_of_result(phase3: Mapping[str, Any], what: str, num_workers: int) -> str:
    taken = phase3.get("taken", ())
    if 1 < len(taken) < num_workers:
        return f"average of {len(taken)} of {num_workers} workers"
    if len(taken) == 1:
        return f"final model: worker, seed {taken[0]}"
    return f"average of {what}" if phase3["models"] > 1 else "final model"


def _mean(models: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.fmean(model[key] for model in models)


def _row(name: str, record: Mapping[str, Any], *, is_result: bool = False) -> ResultRow:
    return ResultRow(
        name=name,
        test_accuracy=record["test_accuracy"],
        test_loss=record["test_loss"],
        validation_accuracy=record.get("validation_accuracy"),
        seconds=record["seconds"],
        devices=record.get("devices"),
        is_result=is_result,
    )


def result_table(rows: Sequence[ResultRow]) -> str:
    """The rows as a Markdown table, readable as text."""
    return aligned(without_empty_columns([RESULT_COLUMNS, *(row.cells for row in rows)]))


def without_empty_columns(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without empty columns: not every run has a validation set."""
    kept = [any(column[1:]) for column in zip(*rows, strict=True)]
    return [tuple(cell for cell, keep in zip(row, kept, strict=True) if keep) for row in rows]


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = f"| {'-' * widths[0]} | {' | '.join('-' * (width - 1) + ':' for width in widths[1:])} |"
    return "\n".join([line(rows[0]), rule, *(line(row) for row in rows[1:])])


def curves_csv(phase1: Mapping[str, Any], workers: Mapping[int, Mapping[str, Any]]) -> str:
    """All curves in one table; a worker's epochs continue phase 1's."""
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


def closing_words(
    phase1: Mapping[str, Any],
    workers: Mapping[int, Mapping[str, Any]],
    summary: Mapping[str, float],
    *,
    since: float | None,
    experiment: str | None,
    is_temporary: bool,
) -> str:
    """The last lines of `dvc repro`: what was trained since it started, the result, where it is, what to do next.

    `is_temporary`: the experiment runs in a folder that DVC removes afterwards.
    """
    trained = {seed: worker for seed, worker in workers.items() if worker["epochs"]}
    lines = []
    if since is not None:
        new = [seed for seed, worker in trained.items() if worker["ran"][1] >= since]
        old = [seed for seed in trained if seed not in new]
        is_new = phase1["ran"][1] >= since
        lines += [("trained", _names(is_new, new)), ("reused", _names(not is_new, old))]
    gains = [("phase 1", summary["phase1"])] if trained else []
    gains += [("the workers' mean", summary["workers"])] if len(trained) > 1 else []
    differences = [(name, summary["accuracy"] - other) for name, other in gains]
    above = "".join(f", {abs(by):.2f} points {'below' if by < 0 else 'above'} {name}" for name, by in differences)
    lines.append(("result", f"{summary['accuracy']:.2f} % test accuracy{above}"))
    if is_temporary:
        lines.append(("report", f"run `dvc exp apply {experiment}`, then open report/index.html"))
    else:
        lines += [("model", "checkpoints/phase3/model.safetensors"), ("report", "report/index.html")]
    if len(trained) > 1 and summary["accuracy"] <= summary["workers"]:
        lines.append(("note", "the average is no better than its workers: see docs/choosing-tau.md"))
    if experiment:
        lines.append(("next", "dvc exp show --only-changed --drop '.*/'"))
    else:
        lines.append(("next", 'git add -A && git commit -m "A run to compare with"'))
        lines.append(("", "dvc exp run --temp -n NAME -S PARAM=VALUE  (`swap params` lists them)"))
    return "\n".join(f"{f'{name}:' if name else '':9}{text}" for name, text in lines if text)


def _names(phase1: bool, seeds: Sequence[int]) -> str:
    listed = f"{'worker' if len(seeds) == 1 else 'workers'} {', '.join(map(str, seeds))}" if seeds else ""
    return ", ".join(filter(None, ["phase 1" if phase1 else "", listed]))
