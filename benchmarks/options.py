"""Command-line options, as passed to every benchmark."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the measurements."""

    rounds: int
    quick: bool
    """tiny sizes: checks that it runs; timings are meaningless"""
    scratch: Path
    """for temporary files"""
    cores: int
    cifar: Path | None = None
    """a folder with train/<class>/*.jpg and test/<class>/*.jpg of CIFAR-10, or a tar of one"""
    photos: Path | None = None
    """the same with photographs of 500 × 375 pixels or thereabouts"""

    def sized(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def say(self, line: str) -> None:
        print(f"    {line}", file=sys.stderr, flush=True)
