"""Imported by every Python process of a project under test that has this folder on its PYTHONPATH.

Does what `SWAP_CHAOS` (JSON) asks for, in ranks only: write slowly, die, or compute something that is not finite.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import sys
import time
from typing import Any

WANTED: dict[str, Any] = json.loads(os.environ.get("SWAP_CHAOS", "{}"))


class SlowFile(io.FileIO):
    """A file that is written in small pieces, with time to be killed between them."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), 2048):
            super().write(view[start : start + 2048])
            time.sleep(WANTED["slow_writes"])
        return len(view)


def write_slowly() -> None:
    plain = pathlib.Path.open

    def open_slowly(self: pathlib.Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if self.name.endswith(".tmp") and "w" in mode and "progress" not in self.name:
            return SlowFile(self, mode.replace("b", ""))
        return plain(self, mode, *arguments, **options)

    pathlib.Path.open = open_slowly  # type: ignore[method-assign]


def die(seed: int, *, times: int, counter: str) -> None:
    """The first `times` processes that train this seed end at once, without a word."""
    words = sys.orig_argv
    if "--seed" in words and words[words.index("--seed") + 1] == str(seed):
        with pathlib.Path(counter).open("a") as file:
            file.write(".")
            file.flush()
            if file.tell() <= times:
                os._exit(3)


def spoil(step: int) -> None:
    """From the given step on, the loss is not finite."""
    import torch
    from torch.nn import functional

    plain, calls = functional.cross_entropy, 0

    def cross_entropy(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        loss = plain(*arguments, **options)
        if torch.is_inference_mode_enabled():  # an evaluation
            return loss
        calls += 1
        return loss * float("inf") if calls > step else loss

    functional.cross_entropy = cross_entropy


if "RANK" in os.environ:
    if "slow_writes" in WANTED:
        write_slowly()
    if "die" in WANTED:
        die(**WANTED["die"])
    if WANTED.get("spoil", {}).get("rank") == int(os.environ["RANK"]):
        spoil(WANTED["spoil"]["step"])
