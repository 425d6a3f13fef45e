"""The paper's Tables 1 to 4 from existing experiments: each method's results over its seeds, compared with SWAP's.

Missing values become a dash and a note.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swap_pipeline.cli.compare.experiments import Experiment
from swap_pipeline.cli.compare.measured import Measured
from swap_pipeline.cli.compare.paper_numbers import PLAIN_IN_PAPER, SWA_IN_PAPER, Figures, Paper

Record = Mapping[str, Any]
Values = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something measured once per experiment."""

    title: str
    unit: str
    digits: int
    best: Callable[[Iterable[float]], float] | None


QUANTITIES = {
    "test_accuracy": Quantity(title="accuracy (%)", unit="%", digits=2, best=max),
    "test_top5": Quantity(title="top-5 (%)", unit="%", digits=2, best=max),
    "before_averaging": Quantity(title="before averaging (%)", unit="%", digits=2, best=max),
    "after_averaging": Quantity(title="after averaging (%)", unit="%", digits=2, best=max),
    "devices": Quantity(title="devices", unit="devices", digits=0, best=None),
    "training_time": Quantity(title="time (s)", unit="s", digits=1, best=min),
    "total_compute": Quantity(title="device-seconds", unit="device-seconds", digits=1, best=min),
}
_PLAIN_COLUMNS = ("test_accuracy", "test_top5", "devices", "training_time", "total_compute")
_SWA_COLUMNS = ("before_averaging", "after_averaging", "devices", "training_time", "total_compute")


@dataclass(frozen=True, kw_only=True)
class Records:
    """What the stages of an experiment recorded."""

    phase1: Record
    workers: Sequence[Record]
    phase3: Record


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one table."""

    key: str
    title: str
    measured: Mapping[str, Measured]
    minus_swap: Mapping[str, Measured]
    """the difference to SWAP, seed by seed; empty for SWAP itself"""
    paper: Figures


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; methods are compared by the column `accuracy`."""

    key: str
    title: str
    columns: tuple[str, ...]
    accuracy: str
    rows: tuple[Row, ...]
    source: str
    """of the paper's values"""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All tables of a recipe."""

    recipe: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for table in self.tables for row in table.rows for seed in _seeds(row)})


def _seeds(row: Row) -> set[int]:
    return {seed for measured in row.measured.values() for seed in measured.values}


Found = Mapping[str, Mapping[int, Experiment]]
"""Experiments by method and seed."""


def make_tables(
    recipe: str, methods: Sequence[str], found: Found, records: Mapping[str, Records], notes: Sequence[str] = ()
) -> Tables:
    """`records` are by the experiment's commit; those that are not in DVC's cache are missing."""
    swa = [method for method in _SWA_ROWS if method in methods]
    plain = [method for method in (*PLAIN_TITLES, *methods) if method in methods and method not in _SWA_ROWS]
    values = {
        method: {seed: measure(one, records.get(one.commit)) for seed, one in by_seed.items()}
        for method, by_seed in found.items()
    }
    before = {seed: measure_before(one, records.get(one.commit)) for seed, one in found.get("swap", {}).items()}
    plain_rows = [
        *((method, PLAIN_TITLES.get(method, method), values.get(method, {})) for method in dict.fromkeys(plain)),
        *([("swap_before", "SWAP (before averaging)", before)] if "swap" in methods else []),
        *([("swap_after", "SWAP (after averaging)", values.get("swap", {}))] if "swap" in methods else []),
    ]
    swa_rows = [(method, _swa_title(method, found.get(method, {})), values.get(method, {})) for method in swa]
    paper, paper_swa = PLAIN_IN_PAPER.get(recipe, Paper()), SWA_IN_PAPER.get(recipe, Paper())
    return Tables(
        recipe=recipe,
        tables=(
            _table("plain_training", "SWAP and plain training", _PLAIN_COLUMNS, plain_rows, "swap_after", paper),
            _table("swa", "SWAP and SWA", _SWA_COLUMNS, swa_rows, "swap", paper_swa),
        ),
        notes=(*notes, *missing(methods, found), *not_recorded(found, records), *_how_it_ran(found, records)),
    )


PLAIN_TITLES = {
    "small_batch": "SGD (small-batch)",
    "large_batch": "SGD (large-batch)",
    "small_batch_ema": "SGD (small-batch) with EMA",
    "large_batch_ema": "SGD (large-batch) with EMA",
}
SWA_TITLES = {
    "swa_large_batch": "large-batch SWA",
    "swa_large_then_small": "large-, then small-batch SWA",
    "swa_small_batch": "small-batch SWA",
}


_SWA_ROWS = (*SWA_TITLES, "swap", "swap_40")


def _swa_title(method: str, experiments: Mapping[int, Experiment]) -> str:
    if method in SWA_TITLES:
        return SWA_TITLES[method]
    epochs = {one.params["phase2"]["epochs"] for one in experiments.values()}
    return f"SWAP ({epochs.pop()} small-batch epochs)" if len(epochs) == 1 else "SWAP"


def _table(
    key: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, str, Mapping[int, Values]]],
    swap: str,
    paper: Paper,
) -> Table:
    measured = {
        row: {
            column: Measured({seed: value for seed, one in runs.items() if (value := one[column]) is not None})
            for column in columns
        }
        for row, _, runs in rows
    }
    known = [
        column
        for column in columns
        if column != "test_top5"
        or any(entry[column].n for entry in measured.values())
        or any(column in figures for figures in paper.rows.values())
    ]
    return Table(
        key=key,
        title=title,
        columns=tuple(known),
        accuracy="after_averaging" if "after_averaging" in columns else "test_accuracy",
        rows=tuple(
            Row(
                key=row,
                title=name,
                measured={column: measured[row][column] for column in known},
                minus_swap={
                    column: measured[row][column].minus(measured[swap][column])
                    for column in known
                    if row != swap and swap in measured
                },
                paper=paper.rows.get(row, {}),
            )
            for row, name, _ in rows
        ),
        source=paper.source if any(row in paper.rows for row, _, _ in rows) else "",
    )


def measure(experiment: Experiment, records: Records | None) -> Values:
    """All of an experiment's values in the tables."""
    metrics = experiment.metrics
    parts = [] if records is None else [records.phase1, *_trained(records), records.phase3]
    return {
        "test_accuracy": metrics["accuracy"],
        "test_top5": None if records is None else records.phase3.get("test_top5"),
        "before_averaging": metrics["workers"],
        "after_averaging": metrics["accuracy"],
        "devices": None if records is None else _devices(records),
        "training_time": metrics["seconds"],
        "total_compute": sum(part["seconds"] * part["num_devices"] for part in parts) if parts else None,
    }


def measure_before(experiment: Experiment, records: Records | None) -> Values:
    """The same for its workers without averaging."""
    whole = measure(experiment, records)
    before: dict[str, float | None] = {**whole, "test_accuracy": whole["before_averaging"]}
    if records is None:
        return {**before, "training_time": None}
    top5 = [worker.get("test_top5") for worker in records.workers]
    last, compute = records.phase3["seconds"], whole["total_compute"]
    return {
        **before,
        "test_top5": None if None in top5 else statistics.fmean(value for value in top5 if value is not None),
        "training_time": experiment.metrics["seconds"] - last,
        "total_compute": None if compute is None else compute - last * records.phase3["num_devices"],
    }


def _trained(records: Records) -> list[Record]:
    """The workers that trained at all."""
    return [worker for worker in records.workers if worker["curve"]]


def _devices(records: Records) -> int:
    """The number that its training time assumes: all workers at the same time."""
    return max(int(records.phase1["num_devices"]), sum(int(worker["num_devices"]) for worker in _trained(records)))


def missing(methods: Sequence[str], found: Found) -> list[str]:
    """Notes on seeds that a method lacks but another has."""
    seeds = sorted({seed for by_seed in found.values() for seed in by_seed})
    notes = []
    for method in methods:
        lacking = [seed for seed in seeds if seed not in found.get(method, {})]
        if not seeds or lacking:
            options = f" --methods {method}" + (f" --seeds {','.join(map(str, lacking))}" if lacking else "")
            what = "not run" if len(lacking) == len(seeds) else f"no seed {', '.join(map(str, lacking))}"
            notes.append(f"{method}: {what} (`swap compare{options}`)")
    return notes


def not_recorded(found: Found, records: Mapping[str, Records]) -> list[str]:
    names = [one.name for by_seed in found.values() for one in by_seed.values() if one.commit not in records]
    if not names:
        return []
    return [f"devices, compute and top-5 of {', '.join(names)}: their records are not in DVC's cache"]


def _how_it_ran(found: Found, records: Mapping[str, Records]) -> list[str]:
    """Notes on the devices, and on experiments that shared the machine, which may have slowed them down."""
    if not records:
        return []
    ran: dict[str, set[tuple[float, float]]] = {
        one.name: {(part["ran"][0], part["ran"][1]) for part in (read.phase1, *_trained(read), read.phase3)}
        for by_seed in found.values()
        for one in by_seed.values()
        if (read := records.get(one.commit))
    }
    devices = dict.fromkeys(part["devices"] for read in records.values() for part in (read.phase1, *_trained(read)))
    beside = [
        (one, other)
        for one, other in itertools.combinations(ran, 2)
        # Stages that they share ran once.
        if any(a[0] < b[1] and b[0] < a[1] for a in ran[one] - ran[other] for b in ran[other] - ran[one])
    ]
    names = sorted({name for pair in beside for name in pair})
    return [
        f"ran on {', '.join(devices)}",
        *([f"ran at the same time, which may have slowed them down: {', '.join(names)}"] if names else []),
    ]
