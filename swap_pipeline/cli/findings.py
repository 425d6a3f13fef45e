"""What `swap doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: what was checked, its state, and what to do about a problem."""

    status: Status
    topic: str
    text: str


def ok(topic: str, text: str) -> Finding:
    return Finding(status="ok", topic=topic, text=text)


def note(topic: str, text: str) -> Finding:
    return Finding(status="note", topic=topic, text=text)


def problem(topic: str, text: str) -> Finding:
    return Finding(status="problem", topic=topic, text=text)
