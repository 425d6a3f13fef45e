"""What was measured of each method: its quantities, in each repeat, from the records of its runs.

Everything here is a function of records, which come by `Instance`; some may be missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swap_pipeline.instances import SWA_STARTS, Instance
from swap_pipeline.paper_figures import Figures, Paper

Record = Mapping[str, Any]
Values = Mapping[str, float | None]
"""Quantities of one run; None for one that cannot be told."""
Method = tuple[str, str, Mapping[int, Values]]
"""Its name in files, its name in the table, its values by repeat."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something that is measured once in each repeat."""

    title: str
    unit: str
    digits: int
    best: Callable[[Iterable[float]], float] | None


QUANTITIES = {
    "test_accuracy": Quantity(title="test accuracy (%)", unit="%", digits=2, best=max),
    "test_top5": Quantity(title="top-5 accuracy (%)", unit="%", digits=2, best=max),
    "before_averaging": Quantity(title="before averaging (%)", unit="%", digits=2, best=max),
    "after_averaging": Quantity(title="after averaging (%)", unit="%", digits=2, best=max),
    "devices": Quantity(title="devices", unit="devices", digits=0, best=None),
    "training_time": Quantity(title="training time (s)", unit="s", digits=1, best=min),
    "total_compute": Quantity(title="total compute (device-s)", unit="device-seconds", digits=1, best=min),
}


@dataclass(frozen=True)
class Measured:
    """A quantity's value in each repeat that has one."""

    values: Mapping[int, float]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation, which one value does not have."""
        return statistics.stdev(self.values.values()) if self.n > 1 else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one table."""

    method: str
    title: str
    repeats: tuple[int, ...]
    """that ran to their end"""
    measured: Mapping[str, Measured]
    """by quantity, all of the table"""
    paper: Figures


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with all that stands under it."""

    key: str
    title: str
    columns: tuple[str, ...]
    """the quantities that are shown"""
    rows: tuple[Row, ...]
    captions: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both tables."""

    recipe: str
    repeats: tuple[int, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What was recorded, and what the params ask for."""

    records: Mapping[Instance, Record]
    repeats: tuple[int, ...]
    """with 0, the plain pipeline"""
    seeds: tuple[int, ...]
    """of SWAP's workers"""
    epochs: int
    """of a worker"""
    cycles: int
    """of a worker, each of which ends with a model to average"""

    def parts(self, method: str, repeat: int) -> list[Instance]:
        return parts_of(method, repeat, self.seeds)

    def missing(self, method: str, repeat: int) -> list[Instance]:
        return [part for part in self.parts(method, repeat) if part not in self.records]

    def complete(self, method: str) -> dict[int, list[Record]]:
        """The records of a method's parts, for each repeat that has them all."""
        return {
            repeat: [self.records[part] for part in self.parts(method, repeat)]
            for repeat in self.repeats
            if not self.missing(method, repeat)
        }

    def recorded(self, method: str) -> list[Record]:
        """Of all repeats and, for `phase2`, of all workers."""
        return [self.records[part] for part in self.records if part.method == method]


def parts_of(method: str, repeat: int, seeds: Sequence[int]) -> list[Instance]:
    """All that a method consists of; SWAP's come in the order in which they run."""
    if method != "swap":
        return [Instance(method=method, repeat=repeat)]
    workers = [Instance(method="phase2", repeat=repeat, seed=seed) for seed in seeds]
    return [Instance(method="phase1", repeat=repeat), *workers, Instance(method="phase3", repeat=repeat)]


def of_plain(run: Record) -> Values:
    return {
        "test_accuracy": run["test_accuracy"],
        "test_top5": run.get("test_top5"),
        "devices": run.get("num_devices"),
        "training_time": run["seconds"],
        "total_compute": _device_seconds([run]),
    }


def of_workers(parts: Sequence[Record]) -> Values:
    """SWAP without its average."""
    phase1, *workers, _ = parts
    top5 = all_known(worker.get("test_top5") for worker in workers)
    return {
        "test_accuracy": statistics.fmean(worker["test_accuracy"] for worker in workers),
        "test_top5": None if top5 is None else statistics.fmean(top5),
        "devices": devices_of_swap(parts),
        "training_time": phase1["seconds"] + max(worker["seconds"] for worker in workers),
        "total_compute": _device_seconds([phase1, *workers]),
    }


def of_average(parts: Sequence[Record]) -> Values:
    """The whole of SWAP."""
    phase1, *workers, phase3 = parts
    return {
        "test_accuracy": phase3["test_accuracy"],
        "test_top5": phase3.get("test_top5"),
        "devices": devices_of_swap(parts),
        "training_time": phase1["seconds"] + max(worker["seconds"] for worker in workers) + phase3["seconds"],
        "total_compute": _device_seconds(parts),
    }


def of_swap(parts: Sequence[Record]) -> Values:
    before, after = of_workers(parts), of_average(parts)
    return {**after, "before_averaging": before["test_accuracy"], "after_averaging": after["test_accuracy"]}


def of_swa(runs: Runs, method: str) -> dict[int, Values]:
    """What SWA costs can be told only beside the run that it started from."""
    values: dict[int, Values] = {}
    for repeat, [swa] in runs.complete(method).items():
        start = runs.records.get(Instance(method=SWA_STARTS[method], repeat=repeat))
        values[repeat] = {
            "before_averaging": statistics.fmean(swa["model_accuracies"]),
            "after_averaging": swa["test_accuracy"],
            "devices": None if start is None else _most_devices(start, swa),
            "training_time": None if start is None else start["seconds"] + swa["seconds"],
            "total_compute": None if start is None else _device_seconds([start, swa]),
        }
    return values


def _device_seconds(parts: Sequence[Record]) -> float | None:
    counts = all_known(part.get("num_devices") for part in parts)
    if counts is None:
        return None
    return sum(float(part["seconds"] * count) for part, count in zip(parts, counts, strict=True))


def devices_of_swap(parts: Sequence[Record]) -> int | None:
    """As many as its time needs: the workers are side by side."""
    counts = all_known(part.get("num_devices") for part in parts)
    return None if counts is None else max(counts[0], sum(counts[1:-1]), counts[-1])


def _most_devices(*parts: Record) -> int | None:
    """Of parts that run one after another."""
    counts = all_known(part.get("num_devices") for part in parts)
    return None if counts is None else max(counts)


def all_known(values: Iterable[Any | None]) -> list[Any] | None:
    """All of them, or None if one is missing."""
    known = list(values)
    return None if None in known else known


def make_rows(measured: Iterable[Method], quantities: Iterable[str], paper: Paper) -> tuple[Row, ...]:
    return tuple(
        Row(
            method=method,
            title=title,
            repeats=tuple(runs),
            measured={key: _measured(key, runs) for key in quantities},
            paper=paper.rows.get(method, {}),
        )
        for method, title, runs in measured
    )


def _measured(key: str, runs: Mapping[int, Values]) -> Measured:
    return Measured({repeat: value for repeat, values in runs.items() if (value := values[key]) is not None})


def is_known(key: str, measured: Iterable[Method], paper: Paper) -> bool:
    found = any(values[key] is not None for _, _, runs in measured for values in runs.values())
    return found or any(key in figures for figures in paper.rows.values())


def by_method(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.method: row for row in rows}
