"""`swap params`: every param with its value, default and meaning."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from swap_pipeline.config.params import Params

_WIDTH = 110


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A declared param and its value."""

    key: str
    value: str
    default: str | None
    """None: the file must set it"""
    doc: str


def entries(params: Params) -> list[Entry]:
    return list(_entries(params, ""))


def _entries(section: Any, prefix: str) -> Iterator[Entry]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _entries(value, f"{prefix}{field.name}.")
            continue
        default = None if field.default is dataclasses.MISSING else _text(field.default)
        yield Entry(key=f"{prefix}{field.name}", value=_text(value), default=default, doc=field.metadata["doc"])


def _text(value: Any) -> str:
    """As written in YAML."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def text_of(found: list[Entry]) -> str:
    """A line for each entry with its meaning below; `*` marks those that differ from their default."""
    widest = max(len(entry.key) for entry in found)
    lines = []
    for entry in found:
        is_set = entry.default != entry.value
        default = "" if entry.default is None or not is_set else f"  (default {entry.default})"
        lines.append(f"{'*' if is_set else ' '} {entry.key:{widest}}  {entry.value}{default}")
        lines += textwrap.wrap(entry.doc, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, "", "* differs from its default, or has none; –: not set"])
