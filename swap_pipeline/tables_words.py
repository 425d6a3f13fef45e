"""What is said under the tables: captions, which tell what the figures mean, and notes on what is missing or uneven."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from swap_pipeline.comparison import QUANTITIES, Measured, Record, Row, Runs, all_known, devices_of_swap
from swap_pipeline.instances import BASELINES, PHASES, SWA_STARTS, Instance
from swap_pipeline.paper_figures import Figures, Paper

# In sentences.
NAMES = {
    "small_batch": "small batch",
    "large_batch": "large batch",
    "swap": "SWAP",
    "swap_before": "SWAP",
    "swap_after": "SWAP",
    "phase1": "phase 1",
    "phase2": "each worker",
    "phase3": "phase 3",
    "swa_large_batch": "large-batch SWA",
    "swa_large_then_small": "large-batch followed by small-batch SWA",
    "swa_small_batch": "small-batch SWA",
}


def shared_captions(runs: Runs, rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    return [
        _spread(rows),
        "Training time of SWAP: phase 1 + slowest worker + phase 3, that is with the workers side by side, whatever "
        "this machine could do; before averaging without phase 3. Its devices are as many as that takes"
        f"{_devices_of_phase1(runs)}.",
        *_side_by_side(runs),
        "Total compute: each part's seconds times its devices, all workers counted.",
        *_repeats_side_by_side(runs, methods),
        *_methods_side_by_side(runs, methods),
        *_ran_on(runs, methods),
        "The clocks exclude evaluation and start-up (not compiling, if that is on), for all methods alike.",
    ]


def _spread(rows: Sequence[Row]) -> str:
    found = {row.repeats for row in rows if row.repeats}
    if not found:
        return "Nothing has run to its end yet."
    if len(found) > 1:
        return "Mean ± sample standard deviation over each method's repeats, which differ: see the notes."
    repeats = found.pop()
    if len(repeats) == 1:
        return f"n = 1, {_listed_repeats(repeats)}: there is no spread to tell."
    return f"Mean ± sample standard deviation over n = {len(repeats)}, {_listed_repeats(repeats)}."


def _side_by_side(runs: Runs) -> list[str]:
    """How SWAP's workers really ran."""
    by_count: dict[int | None, list[int]] = {}
    for repeat, (_, *workers, _) in runs.complete("swap").items():
        by_count.setdefault(most_at_once([worker.get("ran") for worker in workers]), []).append(repeat)
    if not by_count:
        return []
    num_workers = len(runs.seeds)
    if num_workers == 1:
        return ["SWAP has one worker here, so nothing ran side by side."]
    if len(by_count) == 1:
        return [_how_workers_ran(next(iter(by_count)), num_workers)]
    counts = (
        f"{'not recorded' if count is None else count} ({_listed_repeats(repeats)})"
        for count, repeats in by_count.items()
    )
    return [f"Here, of {num_workers} workers, so many were at work at the same moment: {'; '.join(counts)}."]


def _devices_of_phase1(runs: Runs) -> str:
    """With more of them, SWAP would have been faster."""
    counts = {(parts[0].get("num_devices"), devices_of_swap(parts)) for parts in runs.complete("swap").values()}
    of_phase1, of_swap = counts.pop() if len(counts) == 1 else (None, None)
    return f"; phase 1 had {of_phase1} of these {of_swap}" if of_phase1 and of_swap and of_phase1 < of_swap else ""


def _repeats_side_by_side(runs: Runs, methods: Sequence[str]) -> list[str]:
    """Runs that share a machine may slow each other down, or not have it to themselves."""
    told = []
    for method in (method for method in methods if method not in PHASES):
        spans = [record.get("ran") for record in runs.recorded(method)]
        if len(spans) > 1:
            count = most_at_once(spans)
            how = {None: "not recorded", 1: "one after another"}.get(count, f"up to {count} side by side")
            told.append(f"{NAMES[method]}: {how}")
    return [f"Repeats here: {'; '.join(told)}."] if told else []


def _methods_side_by_side(runs: Runs, methods: Sequence[str]) -> list[str]:
    """Of two `dvc` on one machine, say: what else was at work beside a method of this table."""
    spans = {
        method: [record["ran"] for record in runs.recorded(method) if record.get("ran")]
        for method in (*BASELINES, *PHASES, *SWA_STARTS)
    }
    told = [
        f"{NAMES[one]} and {NAMES[other]}"
        for one, other in itertools.combinations(spans, 2)
        if one in methods or other in methods
        if any(begun < end and start < ended for begun, ended in spans[one] for start, end in spans[other])
    ]
    return [f"At the same time here: {'; '.join(told)}."] if told else []


def _how_workers_ran(at_once: int | None, num_workers: int) -> str:
    if at_once is None:
        return f"How many of the {num_workers} workers were at work at the same moment here: not recorded."
    if at_once == num_workers:
        return f"Here all {num_workers} workers of a repeat ran side by side."
    if at_once == 1:
        return f"Here the {num_workers} workers of a repeat ran one after another."
    return f"Here at most {at_once} of the {num_workers} workers of a repeat ran side by side, the others in sequence."


def most_at_once(intervals: Sequence[Sequence[float] | None]) -> int | None:
    """The largest number of runs at work at the same moment; None if one of them was not recorded."""
    known = all_known(intervals)
    if known is None:
        return None
    # It is reached when one of them begins; another that ends at that moment is not at work any more.
    counts: list[int] = [
        sum(begun <= moment < ended or moment == begun for begun, ended in known) for moment, _ in known
    ]
    return max(counts)


def _ran_on(runs: Runs, methods: Iterable[str]) -> list[str]:
    """`small batch: 1 × cpu`, and all kinds if there were several."""
    found = {NAMES[method]: dict.fromkeys(map(_devices_of, runs.recorded(method))) for method in methods}
    told = [f"{name}: {' or '.join(devices)}" for name, devices in found.items() if devices]
    return [f"Ran on: {'; '.join(told)}."] if told else []


def _devices_of(record: Record) -> str:
    text, num_devices = record.get("devices"), record.get("num_devices")
    if text is None:
        return "not recorded"
    if num_devices is None or text.startswith(f"{num_devices} ×"):
        return str(text)
    # On a CPU a device is a core, of which a process may have several.
    return f"{text} with {num_devices} cores in all"


def ratio(swap: Row, other: Row) -> list[str]:
    """SWAP on all its devices against what it is meant to replace, on few."""
    time, compute = (_quotient(swap, other, key) for key in ("training_time", "total_compute"))
    if time is None:
        return []
    cost = "" if compute is None else f" In total compute: {compute}."
    paper = _quotient_in_paper(swap.paper, other.paper)
    return [
        f"SWAP's time on {_count(swap)} ÷ that of {NAMES[other.method]} on {_count(other)}: {time}.{cost}"
        + ("" if paper is None else f" In the paper: {paper}.")
    ]


def _quotient(row: Row, other: Row, key: str) -> str | None:
    above, below = row.measured[key].mean, other.measured[key].mean
    if above is None or not below:
        return None
    unit, digits = QUANTITIES[key].unit.replace("device-seconds", "device-s"), QUANTITIES[key].digits
    return f"{above:.{digits}f} {unit} ÷ {below:.{digits}f} {unit} = {above / below:.2f}"


def _quotient_in_paper(swap: Figures, other: Figures) -> str | None:
    if "training_time" not in swap or "training_time" not in other:
        return None
    above, below = swap["training_time"], other["training_time"]
    quotient = f"{above.mean:g} {above.unit} ÷ {below.mean:g} {below.unit} = {above.mean / below.mean:.2f}"
    if "devices" not in swap or "devices" not in other:
        return quotient
    return f"{quotient}, on {swap['devices'].text} and {other['devices'].text} GPUs"


def _count(row: Row) -> str:
    counts = distinct(row.measured["devices"])
    return f"{counts} device{'' if counts == '1' else 's'}" if counts else "devices not recorded"


def source(paper: Paper) -> list[str]:
    return [f"*paper*: {paper.source}."] if paper.rows else []


def distinct(measured: Measured) -> str:
    return " or ".join(f"{value:g}" for value in sorted(set(measured.values.values())))


def missing_parts(runs: Runs, method: str) -> list[str]:
    lacking = {repeat: parts for repeat in runs.repeats if (parts := runs.missing(method, repeat))}
    if not lacking:
        return []
    # SWAP's last part takes all before it along.
    remedy = _command([runs.parts(method, repeat)[-1] for repeat in lacking])
    partly = {r: parts for r, parts in lacking.items() if len(parts) < len(runs.parts(method, r))}
    if len(lacking) == len(runs.repeats) and not partly:
        return [f"{NAMES[method]}: not run yet ({remedy})"]
    share = f"{len(runs.repeats) - len(lacking)} of {len(runs.repeats)} repeats; " if len(runs.repeats) > 1 else ""
    gone = [repeat for repeat in lacking if repeat not in partly]
    what = [f"{_listed_repeats(gone)} {'is' if len(gone) == 1 else 'are'} missing"] if gone else []
    what += [f"repeat {repeat} lacks {_listed(map(_part_name, parts))}" for repeat, parts in partly.items()]
    return [f"{NAMES[method]}: {share}{'; '.join(what)} ({remedy})"]


def missing_start(runs: Runs, method: str) -> list[str]:
    starts = [Instance(method=SWA_STARTS[method], repeat=repeat) for repeat in runs.complete(method)]
    gone = [start for start in starts if start not in runs.records]
    if not gone:
        return []
    name, where = NAMES[SWA_STARTS[method]], _listed_repeats([start.repeat for start in gone])
    return [
        f"{NAMES[method]}: no time without that of the run it started from; {name} of {where} is missing "
        f"({_command(gone)})"
    ]


def other_samples(runs: Runs, method: str) -> list[str]:
    """SWA is to average as many models as SWAP, with as many epochs a model (section 5.3)."""
    swap = (len(runs.seeds) * runs.cycles, runs.epochs // runs.cycles)
    found = dict.fromkeys((swa["models"], swa["cycle_epochs"]) for [swa] in runs.complete(method).values())
    return [
        f"{NAMES[method]} averaged {models} models, {epochs} epochs a model; SWAP averages {swap[0]}, {swap[1]} epochs "
        "a model"
        for models, epochs in found
        if (models, epochs) != swap
    ]


def not_recorded(rows: Iterable[Row], columns: Iterable[str]) -> list[str]:
    """Quantities that a finished run of an older version does not tell."""
    what = {"test_top5": "top-5 accuracy", "devices": "number of devices"}
    notes: dict[str, None] = {}
    for row in rows:
        for key in (key for key in columns if key in what):
            told = row.measured[key].values
            # A start that is missing has a note of its own.
            silent = [repeat for repeat in row.measured["training_time"].values if repeat not in told]
            if silent:
                notes[f"{NAMES[row.method]}: {what[key]} not recorded in {_listed_repeats(silent)}"] = None
    return list(notes)


def different_repeats(rows: Sequence[Row]) -> list[str]:
    by_name = {NAMES[row.method]: row.repeats for row in rows if row.repeats}
    if len(set(by_name.values())) < 2:
        return []
    counts = (f"{name} n = {len(repeats)} ({_listed_repeats(repeats)})" for name, repeats in by_name.items())
    return [f"the repeats differ: {'; '.join(counts)}"]


def _command(missing: Sequence[Instance]) -> str:
    """What to type to have them."""
    again = [instance for instance in missing if instance.repeat]
    targets = [_target(instance, instance.stage_name) for instance in missing if not instance.repeat]
    if again:
        # The name of the matrix stands for all of it; what is there already stays.
        targets.append(_target(again[0], again[0].stage_name if len(again) == 1 else again[0].stage))
    return f"`dvc repro {' '.join(targets)}`"


def _target(instance: Instance, name: str) -> str:
    return name if instance.stage_file == "dvc.yaml" else f"{instance.stage_file}:{name}"


def _part_name(part: Instance) -> str:
    return NAMES[part.method] if part.seed is None else f"worker {part.seed}"


def _listed(words: Iterable[object]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def _listed_repeats(repeats: Sequence[int]) -> str:
    return f"repeat{'' if len(repeats) == 1 else 's'} {_listed(repeats)}"
