"""Jobs in Slurm's queue: the names under which they were submitted, and their states."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from swap_pipeline.errors import SwapError
from swap_pipeline.launch.display import Display
from swap_pipeline.launch.jobs import CODE_FILE, STDERR_FILE, Failure, Job, tail, why_incomplete
from swap_pipeline.launch.slurm.controller import Patience, ask
from swap_pipeline.runtime.job_folder import JobFolder, scratch_root
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.storage.files import read_json

TICKET = "slurm_job"
LOGS = "slurm"
"""in scratch: Slurm's own logs of jobs"""
OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
LAG_SECONDS = 60
"""how long a finished job's files may stay invisible here: NFS caches that a file does not exist"""


@dataclass(frozen=True)
class Ticket:
    """What a job was submitted as: a unique name, and its index in an array."""

    name: str
    index: int | None

    @property
    def log(self) -> Path:
        """Slurm's own log of the job."""
        place = "" if self.index is None else f"-{self.index}"
        return scratch_root() / LOGS / f"{self.name}{place}.log"


@dataclass(frozen=True)
class State:
    """A job's state in the queue."""

    id: str
    """`12`, or `12_1` in an array"""
    word: str
    reason: str
    partition: str


class Queue:
    """Slurm's queue, polled now and then."""

    def __init__(self) -> None:
        self.states: dict[Ticket, State] = {}
        self.looked = 0.0
        self._pause, self._next = 0.5, 0.0
        self._patience = Patience()

    def look(self, names: Collection[str]) -> dict[Ticket, State]:
        """States of jobs of these names, as far as Slurm remembers them."""
        if not names:
            return {}
        lines = ask("squeue", "-h", "-r", "-t", "all", "--name", ",".join(names), "-o", "%i|%j|%T|%P|%r|%K")
        found = {}
        for line in lines.splitlines():
            number, name, word, partition, reason, index = (part.strip() for part in line.split("|"))
            ticket = Ticket(name, int(index) if index.isdecimal() else None)
            found[ticket] = State(number, word, reason, partition)
        return found

    def refresh(self, names: Collection[str], display: Display) -> bool:
        """Poll if it is time to; returns whether anything changed. Waits for a controller that is down."""
        if not names or time.monotonic() < self._next:
            return False
        began = time.monotonic()
        try:
            found = self.look(names)
        except SwapError as error:  # whatever it is, one bad answer must not end a night's run
            self._next = time.monotonic() + self._patience.seconds_to_wait(error, display)
            return False
        self._patience.renew()
        self.looked = began
        changed = found != self.states
        self.states = found
        self._pause = 0.5 if changed else min(1.5 * self._pause, 10)
        self._next = time.monotonic() + self._pause
        return changed

    def place(self, states: Iterable[State]) -> str:
        """Place of the first of these pending jobs among all that are pending in its partition."""
        ids = [state.id for state in states]
        partition = next(iter(states)).partition
        line = ask("squeue", "-h", "-r", "-t", "PENDING", "-p", partition, "--sort=-p,i", "-o", "%i").split()
        places = [line.index(number) for number in ids if number in line]
        return f"place {min(places) + 1} of {len(line)} in {partition}" if places else partition


def is_in_queue(folder: Path) -> bool:
    """Whether the job of this folder may be pending or running; also true if Slurm does not answer."""
    ticket = ticket_in(folder)
    if ticket is None or JobFolder(folder).is_complete or shutil.which("squeue") is None:
        return False
    try:
        state = Queue().look({ticket.name}).get(ticket)
    except SwapError:
        return True
    return state is not None and state.word not in OVER


def ticket_in(folder: Path) -> Ticket | None:
    try:
        return Ticket(**read_json(folder / TICKET))
    except (SwapError, TypeError):
        return None


class Submitted:
    """A submitted job."""

    def __init__(self, job: Job, lock: Lock, ticket: Ticket, queue: Queue, number: str) -> None:
        self.job = job
        self.ticket = ticket
        self.number = number
        self.released = False
        self._lock = lock
        self._queue = queue
        self._began = time.monotonic()
        self._last: State | None = None
        self._over_since: float | None = None

    @property
    def state(self) -> State | None:
        """As last seen; None if not seen yet."""
        self._last = self._queue.states.get(self.ticket) or self._last
        return self._last

    def is_over(self) -> bool:
        if self.job.folder.is_complete:
            return True
        now = self._queue.states.get(self.ticket)
        if now.word not in OVER if now else self._queue.looked < self._began:
            self._over_since = None
            return False
        self._over_since = self._over_since or time.monotonic()
        # On a shared file system, what another machine has written shows up late: after code 0, the result may.
        last_word = self._code or (now and now.word not in ("COMPLETED", "FAILED"))
        return bool(last_word) or time.monotonic() - self._over_since > LAG_SECONDS

    @property
    def _code(self) -> int | None:
        """Exit code of the ranks; None if not known here yet."""
        try:
            return int((self.job.folder.path / CODE_FILE).read_text())
        except (OSError, ValueError):
            return None

    def failure(self) -> Failure | None:
        job, state = self.job, self.state
        if job.folder.is_complete:
            self.ticket.log.unlink(missing_ok=True)
            return None
        number, word = self.number, state.word if state else "forgotten"
        there = [str(log) for log in (job.folder.path / STDERR_FILE, self.ticket.log) if log.exists()]
        logs = f"logs: {' and '.join(there) or 'none'}"
        if word == "CANCELLED":
            again = "`dvc repro` submits it again and resumes from its last snapshot"
            return Failure(f"{job.name}: its Slurm job {number} was cancelled: {again}", may_pass=False)
        if word == "OUT_OF_MEMORY":
            fix = f"raise sbatch.{job.instance.stage}.mem in cluster.yaml"
            return Failure(f"{job.name}: its Slurm job {number} ran out of memory: {fix}\n{logs}", may_pass=False)
        if word == "TIMEOUT":
            fix = f"raise sbatch.{job.instance.stage}.time, or signal_seconds, in cluster.yaml"
            text = f"{job.name}: its Slurm job {number} hit its time limit before it could stop: {fix}\n{logs}"
            # A job without snapshots would take as long again and get no further.
            return Failure(text, may_pass=job.folder.can_go_on)
        code = self._code
        if code is None:
            first = f"{job.name}: its Slurm job {number} ended ({word.lower()}) without an error message; {logs}"
            return Failure("\n".join([first, *tail(self.ticket.log)]), may_pass=True)
        failure = why_incomplete(job, code)
        if failure is None:  # the result has just become visible
            return None
        text = failure.text if failure.text.startswith(job.name) else f"{job.name}: {failure.text}"
        return Failure(f"{text}\n{logs} (Slurm job {number})", failure.may_pass)

    def ask_to_end(self) -> None:
        """Nothing: the user decides, see `Sbatch.interrupted`."""

    def end(self) -> None:
        self.release()

    def release(self) -> None:
        self.released = True
        self._lock.release()
