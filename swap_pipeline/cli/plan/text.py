"""A plan as text, 80 columns wide, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from swap_pipeline.cli.amounts import magnitude
from swap_pipeline.cli.plan.plan import PASSES, Plan, RunPlan, Size, counted
from swap_pipeline.cli.plan.times import Expected, Forecast, Throughput, Times
from swap_pipeline.config.copies import copy_for
from swap_pipeline.datasets.prepare import in_words
from swap_pipeline.report.durations import duration

_WIDTH = 80
_NO_BREAK = "\xa0"  # between a number and its unit, until lines are broken
_NAMES = {"phase1": "phase 1", "phase2": "phase 2"}


def json_of(forecast: Forecast) -> str:
    """All numbers, under their names in the code."""
    plan = forecast.plan
    network = {
        **_fields(plan.network),
        "flops": {_pixels(size): flops for size, flops in plan.network.flops.items()},
    }
    tree = {
        **{name: _plain(value) for name, value in _fields(plan).items() if name != "network"},
        "network": network,
        "flops": plan.flops,
        "throughput": _plain(forecast.throughput),
        "times": _plain(forecast.times),
    }
    return json.dumps(tree, indent=2, ensure_ascii=False)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def text_of(forecast: Forecast) -> str:
    """Facts, work, schedules and expected times."""
    plan = forecast.plan
    return "\n".join(
        [
            *_paragraph(f"{forecast.title}, on {_devices(plan)}"),
            "",
            *_facts(plan),
            "",
            *_aligned(_work(plan), left=1),
            "",
            *_aligned(_over_time(plan), left=1),
            "",
            *_paragraph(_speed(plan, forecast.throughput)),
            "",
            *_aligned(_time(plan, forecast.times), left=1),
            *([""] if plan.notes else []),
            *(line for note in plan.notes for line in _paragraph(f"- {note}", hang=2)),
        ]
    )


def _devices(plan: Plan) -> str:
    devices = plan.devices
    text = counted(devices.count, devices.kind)
    if devices.phase1.processes != devices.count:
        text += f" ({counted(devices.phase1.processes, 'rank')} in phases 1 and 3)"
    return text


def _facts(plan: Plan) -> Iterator[str]:
    data, network = plan.data, plan.network
    size = "in files" if data.size is None else f"of {data.channels}×{_pixels(data.size)} px"
    facts = {
        "data": f"{data.name}: {in_words(data.counts)} images {size}, "
        f"{data.num_classes:,} classes{f' ({data.source})' if data.source else ''}",
        "network": f"{network.name}: {network.num_parameters:,} parameters",
        "FLOP": "\n".join(
            f"{_si(flops)} forward, about {PASSES} times that in training, per image of {_pixels(size)} px"
            for size, flops in network.flops.items()
        ),
        "memory": f"{_bytes(plan.memory_bytes)} on each device for weights, gradients and the optimizer's state; "
        f"activations are not counted",
        "disk": f"{_bytes(plan.checkpoint_bytes)} per checkpoint, "
        f"{_bytes(plan.num_checkpoints * plan.checkpoint_bytes)} for all {plan.num_checkpoints}{_kept(plan)}; "
        f"{_bytes(plan.snapshot_bytes)} a snapshot: a running job keeps two, and phase 1's course at most "
        f"{plan.num_snapshots} (SWAP_KEEP_EPOCHS)",
    }
    if data.copies:
        facts["copies"] = f"about {_bytes(data.copies_bytes)}, and as much again in DVC's cache; {_what_is_read(plan)}"
    for name, text in facts.items():
        for index, line in enumerate(text.splitlines()):
            yield from _paragraph(f"{'' if index else name:<9}{line}", hang=9)


def _what_is_read(plan: Plan) -> str:
    """From which copies, or from the image files, by size of the images."""
    sizes = sorted({part.image_size[0] for run in (plan.phase1, plan.worker) for part in run.stretches})
    read = {size: copy_for(size, plan.data.copies) for size in sizes}
    parts = [f"those of {side} px are read for {size}" for size, side in read.items() if side is not None]
    parts += [f"the files themselves for {size}" for size, side in read.items() if side is None]
    unused = [f"those of {side} px are never read" for side in plan.data.copies if side not in read.values()]
    return ", ".join(parts + unused)


def _kept(plan: Plan) -> str:
    if not plan.num_kept:
        return ""
    return f" and {_bytes(plan.num_kept * plan.checkpoint_bytes)} for {plan.num_kept} kept during training"


def _work(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield "", "devices", "epochs", "steps", "samples", "FLOP"

    def row(name: str, run: RunPlan, *, epochs: str = "", times: int = 1, at_once: int = 1) -> tuple[str, ...]:
        return (
            name,
            f"{run.devices * at_once:,}",
            epochs or f"{run.epochs}",
            f"{run.steps * times:,}",
            f"{run.samples * times:,}",
            _si(run.flops * times),
        )

    phase3 = plan.phase3
    yield row("phase 1", plan.phase1, epochs=f"≤ {plan.phase1.epochs}" if plan.may_end_early else "")
    if (forks := plan.forks).tests:
        counts = (f"{forks.tests * each:,}" for each in (forks.steps, forks.images))
        yield (
            "phase 1, fork tests",
            f"{plan.phase1.devices:,}",
            f"≤ {forks.tests}",
            *counts,
            _si(forks.tests * forks.flops),
        )
    if plan.worker.epochs:
        yield row("phase 2, one worker", plan.worker)
        workers = counted(plan.num_workers, "worker")
        yield row(f"phase 2, {workers}", plan.worker, times=plan.num_workers, at_once=plan.slots)
    passes = f"≤ {phase3.passes}" if phase3.passes > 1 else f"{phase3.passes or '–'}"
    yield (
        f"phase 3, {counted(phase3.num_models, 'model')}",
        f"{phase3.devices:,}",
        passes,
        f"{phase3.batches:,}",
        f"{phase3.samples:,}",
        _si(phase3.flops),
    )
    yield "SWAP, all phases", f"{plan.devices.count:,}", "", "", "", _si(plan.flops)


def _over_time(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield "", "epochs", "learning rate", "batch", "shard", "image", "steps"
    for run in (plan.phase1, plan.worker):
        for index, part in enumerate(run.stretches):
            rates = dict.fromkeys((f"{part.first_rate:.4g}", f"{part.last_rate:.4g}"))
            yield (
                "" if index else _NAMES[run.section],
                f"{part.first_epoch:g}–{part.last_epoch:g}",
                " → ".join(rates),
                f"{part.batch_size:,}",
                f"{part.batch_per_shard:,}",
                _pixels(part.image_size),
                f"{part.steps:,}",
            )


def _speed(plan: Plan, throughput: Throughput) -> str:
    rate = throughput.images_per_second
    text = (
        f"Time of training alone, at {rate:,.{0 if rate >= 100 else 2}f} images/s per device at "
        f"{_pixels(throughput.image_size)} px ({throughput.source}). This assumes that n devices are n times as fast, "
        f"that time is proportional to FLOP, and that reading images keeps up."
    )
    if throughput.measured_on not in (None, plan.devices.kind):
        text += f" That was a {throughput.measured_on}, not a {plan.devices.kind}: pass --images-per-second for one."
    return text


def _time(plan: Plan, times: Times) -> Iterator[tuple[str, ...]]:
    yield "", "time", "devices × time"

    def row(name: str, expected: Expected) -> tuple[str, ...]:
        return name, duration(expected.seconds), duration(expected.device_seconds)

    yield row("phase 1, at most" if plan.may_end_early else "phase 1", times.phase1)
    if plan.worker.epochs:
        yield row("phase 2, one worker", times.worker)
    if plan.worker.epochs and plan.num_workers > 1:
        yield row(f"phase 2, {plan.num_workers} workers in {counted(plan.rounds, 'round')}", times.phase2)
    yield row("phase 3", times.phase3)
    yield row("SWAP on these devices", times.total)
    yield "critical path: devices for every worker", duration(times.critical_path), ""


def _si(number: float, unit: str = "") -> str:
    return magnitude(number, unit).replace(" ", _NO_BREAK)


def _bytes(number: float) -> str:
    return _si(number, "B")


def _pixels(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def _aligned(rows: Iterator[tuple[str, ...]], *, left: int) -> list[str]:
    """Aligned columns: the first `left` ones to the left, the others to the right."""
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip().replace(_NO_BREAK, " ")

    return [line(row) for row in table]


def _paragraph(text: str, *, hang: int = 0) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]
