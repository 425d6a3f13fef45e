"""DVC's cache, where a file of it may be damaged."""

from __future__ import annotations

import contextlib
import filecmp
import os
from pathlib import Path


def distrust(damaged: Path) -> None:
    """Have DVC read those objects in its cache that are the same as a damaged file before it gives them out again.

    DVC takes an object that is read-only for whole, unread. Where its cache links files (`cache.type`) the damaged file
    is such an object, and else it may be a copy of one: to delete it and run `dvc repro` would bring it back. A
    writable object that was just touched is hashed, and removed by DVC if it does not match its name.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            objects = Path(repo.cache.local.path)
        size = damaged.stat().st_size
    except (DvcException, OSError):  # there is no DVC project, or no such file any more
        return
    for path in objects.glob("??/*"):
        with contextlib.suppress(OSError):  # another user's
            if path.stat().st_size == size and filecmp.cmp(path, damaged, shallow=False):
                path.chmod(0o644)
                os.utime(path)
