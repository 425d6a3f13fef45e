"""Scratch: where a job trains, resumes, and leaves its result until it is collected.

DVC deletes a stage's outs before the stage runs, so what must survive a kill lives here, outside of them, in
`.swap/<stage>/<fingerprint>/`. The fingerprint covers everything that can change the bytes of the result: a restarted
job finds its own snapshots, and a job with any other setting gets another folder. A result is used only if it is
undamaged and its inputs have not changed.

How phase 1 trains does not depend on when it ends, so its folder serves every τ: its snapshots stay, and each stop rule
has its own result there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from swap_pipeline.config.instances import Instance
from swap_pipeline.errors import DamagedFileError, SwapError
from swap_pipeline.runtime.environment import project_folder
from swap_pipeline.runtime.inputs import CODE_STAMP, Inputs
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.storage.files import link_or_copy, open_plain, read_json, write_json

RESULT = "result"
RECORD = "record.json"
_DIGESTS = "digests.json"
LAUNCHER_LOCK, WRITER_LOCK = "launcher.lock", "writer.lock"


def scratch_root() -> Path:
    """`.swap` of the project; experiments in temporary folders and the analysis share it."""
    return project_folder() / ".swap"


def job_folder(instance: Instance, *, device_type: str, processes: int, threads: int) -> JobFolder:
    """The job's folder, named after everything that can change its result."""
    facts = facts_of(device_type=device_type, processes=processes, threads=threads)
    inputs = Inputs.now(instance)
    name = RESULT if inputs.exit_name is None else f"{RESULT}-{inputs.exit_name}"
    return JobFolder(scratch_root() / instance.stage / inputs.fingerprint(facts), inputs, name)


def facts_of(*, device_type: str, processes: int, threads: int) -> dict[str, Any]:
    """Facts about the machine that can change bytes: on a CPU also the threads, which change the order of sums."""
    facts: dict[str, Any] = {"device": device_type, "processes": processes}
    return facts | {"threads": threads} if device_type == "cpu" else facts


@dataclass(frozen=True)
class JobFolder:
    """The scratch folder of one job."""

    path: Path
    inputs: Inputs | None = field(default=None, compare=False, repr=False)
    """what it was named after, if known"""
    result_name: str = RESULT

    @property
    def result(self) -> Path:
        """Exists once the job is complete; holds everything it made, and a digest of each file."""
        return self.path / self.result_name

    @property
    def has_course(self) -> bool:
        """Whether other results may be made from its snapshots."""
        return self.result_name != RESULT

    @property
    def is_complete(self) -> bool:
        return self.result.is_dir()

    @property
    def kept(self) -> Path:
        """Files made along the way that belong to the result: they survive a kill."""
        return self.path / "kept"

    @property
    def can_go_on(self) -> bool:
        """Whether a restarted job has something to resume from: snapshots, or parts of its work."""
        return any(True for pattern in ("snapshot_*", "kept/*") for _ in self.path.glob(pattern))

    @contextlib.contextmanager
    def complete(self, *, kept: Iterable[str] = ()) -> Iterator[Path]:
        """A folder to fill; when the block ends without an error, it atomically becomes the result.

        It includes the `kept` files made along the way, all of which must exist.
        """
        partial = self.path / f"{self.result_name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in kept:
            link_or_copy(self.kept / name, partial / name)
        yield partial
        write_json(partial / _DIGESTS, {path.name: _digest(path) for path in partial.iterdir()})
        partial.rename(self.result)
        if not self.has_course:
            shutil.rmtree(self.kept, ignore_errors=True)

    def digests(self) -> dict[str, str]:
        """Digests of the result's files as the job wrote them, by name."""
        digests = read_json(self.result / _DIGESTS)
        if not isinstance(digests, dict) or RECORD not in digests:
            raise DamagedFileError(self.result / _DIGESTS, "it is malformed")
        return digests

    def damage(self) -> str:
        """How the result differs from what the job wrote; empty if it does not."""
        path = self.result / _DIGESTS
        try:
            for name, digest in self.digests().items():
                path = self.result / name
                if _digest(path) != digest:
                    return f"{name} does not match its digest"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.EINVAL, errno.ELOOP):
                return f"{path.name} is not a file"
            raise SwapError(  # it may be intact: the user has to fix the disk
                f"{path} cannot be read ({error.strerror}): check the disk, then run `dvc repro` again"
            ) from None
        except SwapError:
            return f"{path.name} is missing or cannot be read"
        return ""

    def check_inputs(self) -> None:
        """Check that the params, code and data that a rank has read are those its folder was named after."""
        if self.inputs is not None:
            self.inputs.check(when="while it started", remedy="run `dvc repro` again")
            self.inputs.check_code_was_not_written_to(os.environ.get(CODE_STAMP))

    @contextlib.contextmanager
    def writer(self, *, is_main: bool) -> Iterator[None]:
        """Held by a job's main rank while it writes here; removes what killed writers left behind."""
        if not is_main:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.path / WRITER_LOCK)
        deadline = time.monotonic() + 60
        while not lock.try_acquire():
            # An orphan of a killed launcher is about to exit; anything that stays longer is not ours to kill.
            if time.monotonic() > deadline:
                raise SwapError(f"process {lock.holder()} is still writing in {self.path}: stop it, then start again")
            time.sleep(0.1)
        try:
            for leftover in self.path.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _digest(path: Path) -> str:
    """The digest of a whole file, at the speed of memory."""
    digest = xxhash.xxh3_128()
    with open_plain(path) as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
