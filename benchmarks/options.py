"""What the command line asks for, as every benchmark gets it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to measure."""

    rounds: int
    quick: bool
    """tiny sizes: to see that it works, not how fast"""
    scratch: Path
    """for files that are made to be measured; removed afterwards"""
    cores: int
    cifar: Path | None = None
    """a folder with train/<class>/*.jpg and test/<class>/*.jpg of CIFAR-10, or a tar of one"""
    photos: Path | None = None
    """the same with photographs of 500 × 375 pixels or thereabouts"""

    def sized(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def say(self, line: str) -> None:
        print(f"    {line}", file=sys.stderr, flush=True)
