"""The rows, the file in which they are saved, and the table printed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import Sample, divided
from swap_pipeline.storage.files import read_json, write_json

RESULTS = Path(__file__).parent / "results.json"


@dataclass(frozen=True)
class Limit:
    """A limit for a ratio."""

    sign: Literal["≥", "≤", ">", "<"]
    value: float

    def __str__(self) -> str:
        return f"{self.sign} {self.value:g}"

    def is_kept_by(self, ratio: float) -> bool:
        if self.sign in "≥>":
            return ratio > self.value or (self.sign == "≥" and ratio == self.value)
        return ratio < self.value or (self.sign == "≤" and ratio == self.value)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: ours, the other, their ratio and its limit."""

    name: str
    """name of the row in the file: family/what"""
    what: str
    ours: str
    """what was measured, for the user"""
    other: str
    unit: str
    our_figures: Sample | None
    other_figures: Sample | None
    ratio: Sample | None
    limit: Limit | None
    note: str = ""
    also_reached: bool = True
    """whether the other conditions in the note hold"""
    more: Mapping[str, Any] = field(default_factory=dict)
    """further values, only in the file"""

    def as_json(self) -> dict[str, Any]:
        def figures(sample: Sample | None) -> dict[str, Any] | None:
            return None if sample is None else sample.as_json()

        limit, ratio = self.limit, self.ratio
        reached = None if limit is None or ratio is None else limit.is_kept_by(ratio.median) and self.also_reached
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "ours": {"what": self.ours, "figures": figures(self.our_figures)},
            "alternative": {"what": self.other, "figures": figures(self.other_figures)},
            "ratio": figures(self.ratio),
            "limit": None if limit is None else str(limit),
            "reached": reached,
            "note": self.note,
            **({"more": dict(self.more)} if self.more else {}),
        }


def compared(
    name: str,
    what: str,
    *,
    ours: tuple[str, Sample],
    other: tuple[str, Sample],
    unit: str,
    limit: Limit | None = None,
    note: str = "",
    more: Mapping[str, Any] | None = None,
) -> Row:
    """A row whose ratio is ours ÷ the other, round by round."""
    return Row(
        name=name,
        what=what,
        ours=ours[0],
        other=other[0],
        unit=unit,
        our_figures=ours[1],
        other_figures=other[1],
        ratio=divided(ours[1], other[1]),
        limit=limit,
        note=note,
        more=more or {},
    )


def left_out(name: str, what: str, *, other: str, unit: str, why: str, limit: Limit | None = None) -> Row:
    """A row that cannot be measured here: a dash and the reason."""
    return Row(
        name=name,
        what=what,
        ours="",
        other=other,
        unit=unit,
        our_figures=None,
        other_figures=None,
        ratio=None,
        limit=limit,
        note=why,
    )


def keep(path: Path, about: Mapping[str, Any], rows: Sequence[Row], *, order: Sequence[str]) -> None:
    """Add rows to the file, replacing those of the same name; `order` is that of the families."""
    known = {row["name"]: row for row in read(path)["rows"]} if path.exists() else {}
    known |= {row.name: {**row.as_json(), **about, "rounds": _rounds(row, about["rounds"])} for row in rows}
    families = {family: number for number, family in enumerate(order)}
    ranked = sorted(known.values(), key=lambda row: families.get(row["name"].partition("/")[0], len(families)))
    write_json(path, {"rows": ranked})


def _rounds(row: Row, asked: int) -> int:
    """Number of rounds; some rows take more than `--rounds`, and a single value, such as R², does not tell."""
    return max(asked, len(row.ratio.values) if row.ratio else 0)


def read(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = read_json(path)
    return tree


def table(tree: Mapping[str, Any]) -> str:
    """The file as markdown: rows, notes below them, then machine and versions."""
    head = ["what", "ours", "compared with", "ratio (low – high)", "to reach", ""]
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | --- | --- |"]
    notes: list[str] = []
    for row in tree["rows"]:
        mark = ""
        if row["note"]:
            notes.append(row["note"])
            mark = f" [{len(notes)}]"
        cells = [
            f"{row['what']}{mark}",
            _figure(row["ours"], row["unit"]),
            _figure(row["alternative"], row["unit"]),
            _ratio(row["ratio"]),
            row["limit"] or "",
            {True: "✓", False: "missed", None: ""}[row["reached"]],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"[{number}] {note}" for number, note in enumerate(notes, start=1))] if notes else []
    return "\n".join([*lines, "", *_where(tree["rows"])])


def _figure(side: Mapping[str, Any], unit: str) -> str:
    if side["figures"] is None:
        return f"{side['what']}: –" if side["what"] else "–"
    value = f"{number(side['figures']['median'])} {unit}".strip()
    return f"{side['what']}: {value}" if side["what"] else value


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "–"
    median, low, high = (number(ratio[key]) for key in ("median", "low", "high"))
    return f"**{median}** ({low} – {high})" if len(ratio["values"]) > 1 else f"**{median}**"


def number(value: float) -> str:
    """With three significant digits, never as a power of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _where(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Machine and versions; a line for each set of rows measured together."""
    sets: dict[str, list[str]] = {}
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        quick = "; sizes of a quick look, not to be reported" if row["quick"] else ""
        when = f"{row['date']}, commit {row['commit'] or 'unknown'}"
        line = f"{row['machine']}; {versions}; medians of {row['rounds']} interleaved rounds; {when}{quick}."
        sets.setdefault(line, []).append(row["what"])
    if len(sets) <= 1:
        return list(sets)
    return [f"{line} ({'; '.join(names)})" for line, names in sets.items()]
