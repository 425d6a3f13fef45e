"""Jobs of a Slurm cluster, submitted from a login node with `sbatch` and waited for.

Jobs of one shape go as one array, each task of which starts as soon as there is room for it. A file in a job's folder
says under which name it was submitted; whoever starts the same job again looks for it in the queue first.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swap_pipeline import environment
from swap_pipeline.cluster import Cluster
from swap_pipeline.errors import SwapError
from swap_pipeline.files import read_json, write_json
from swap_pipeline.jobs import (
    CODE_FILE,
    STDERR_FILE,
    Failure,
    Job,
    claim,
    forget_last_attempt,
    save,
    tail,
    why_incomplete,
)
from swap_pipeline.progress import Display
from swap_pipeline.ranks import Interrupted
from swap_pipeline.scratch import JobFolder, Lock, scratch_root
from swap_pipeline.slurm import Patience, SilentControllerError, ask

TICKET = "slurm_job"
LOGS = "slurm"
"""in scratch: what Slurm itself has to say of jobs"""
OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
LAG_SECONDS = 60
"""after which a finished job's files are to be seen here too; NFS may remember so long that there are none"""
_PLACE_SECONDS = 60
"""after which the place in the queue is looked up again"""
_PASSED_ON = ("DVC_ROOT", "SWAP_EVAL_BATCH", "SWAP_LOADERS", "SWAP_TIMEOUT_MINUTES")
_MAX_COMMENT = 1000
"""characters; Slurm refuses a job with more than 1,024"""


@dataclass(frozen=True)
class Ticket:
    """What a job was submitted as: a name like no other, and its place if that is an array."""

    name: str
    index: int | None

    @property
    def log(self) -> Path:
        """What Slurm itself has to say of the job."""
        place = "" if self.index is None else f"-{self.index}"
        return scratch_root() / LOGS / f"{self.name}{place}.log"


@dataclass(frozen=True)
class State:
    """Of a job in the queue."""

    id: str
    """`12`, or `12_1` in an array"""
    word: str
    reason: str
    partition: str


class Queue:
    """Slurm's queue, looked at now and then."""

    def __init__(self) -> None:
        self.states: dict[Ticket, State] = {}
        self.looked = 0.0
        self._pause, self._next = 0.5, 0.0
        self._patience = Patience()

    def look(self, names: Collection[str]) -> dict[Ticket, State]:
        """What has become of jobs of these names, as far as Slurm remembers."""
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
        """Look again if it is time to; whether anything changed. A controller that is down is waited for."""
        if not names or time.monotonic() < self._next:
            return False
        began = time.monotonic()
        try:
            found = self.look(names)
        except SwapError as error:  # whatever it is: nobody is to lose a night for one bad answer
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
        """Of the first of these jobs that wait, among all that wait for the same partition."""
        ids = [state.id for state in states]
        partition = next(iter(states)).partition
        line = ask("squeue", "-h", "-r", "-t", "PENDING", "-p", partition, "--sort=-p,i", "-o", "%i").split()
        places = [line.index(number) for number in ids if number in line]
        return f"place {min(places) + 1} of {len(line)} in {partition}" if places else partition


class Sbatch:
    """The launcher on a login node."""

    shares_devices = False

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._queue = Queue()
        self._patience = Patience()
        self._next_start = 0.0
        self._at_work: list[Submitted] = []
        self._starting: list[Job] = []
        """of which it is not known yet whether Slurm has them"""
        self._said = ""
        self._waits, self._next_place = False, 0.0

    def start(self, jobs: Sequence[Job], *, room: int, display: Display) -> list[Submitted]:
        """All of the jobs at once: it is for Slurm to say when each of them has its turn.

        None of them while Slurm does not answer. What it has taken all the same is found at the next try.
        """
        if time.monotonic() < self._next_start:
            return []
        claimed = [(job, lock) for job in jobs if (lock := claim(job, display))]
        self._starting = [job for job, _ in claimed]
        try:
            started = self._find(claimed, display)
            fresh = [pair for pair in claimed if pair[0] not in {work.job for work in started}]
            for _, group in itertools.groupby(fresh, key=lambda pair: _shape(pair[0])):
                started += self._submit(list(group), display)
        except SwapError as error:
            for _, lock in claimed:
                lock.release()
            if not isinstance(error, SilentControllerError):
                raise
            self._next_start = time.monotonic() + self._patience.seconds_to_wait(error, display)
            return []
        self._patience.renew()
        self._at_work += started
        self._starting = []
        return started

    def _find(self, claimed: Sequence[tuple[Job, Lock]], display: Display) -> list[Submitted]:
        """Those that an earlier launcher submitted and that are not over."""
        tickets = {job: ticket for job, _ in claimed if (ticket := ticket_in(job.folder.path))}
        states = self._settled({ticket.name for ticket in tickets.values()}, display)
        alive = [
            Submitted(job, lock, tickets[job], self._queue, state.id)
            for job, lock in claimed
            if job in tickets and (state := states.get(tickets[job])) and state.word not in OVER
        ]
        for work in alive:
            state = states[work.ticket]
            display.say(
                f"{work.job.name}: Slurm job {state.id} is at this already ({state.word.lower()}), waiting for it"
            )
        self._queue.states |= states
        return alive

    def _settled(self, names: Collection[str], display: Display) -> dict[Ticket, State]:
        """What has become of jobs of these names; of one that is ending, whether it comes back."""
        deadline = time.monotonic() + LAG_SECONDS
        while True:
            try:
                states = self._queue.look(names)
            except SilentControllerError:
                raise
            except SwapError as error:
                raise SwapError(f"{error}: nothing is lost, `dvc repro` finds the jobs when Slurm answers") from None
            ending = [state.id for state in states.values() if state.word == "COMPLETING"]
            if not ending or time.monotonic() > deadline:
                return states
            display.say_once(f"waiting for the end of Slurm job {', '.join(ending)}")
            time.sleep(1)

    def _submit(self, group: Sequence[tuple[Job, Lock]], display: Display) -> list[Submitted]:
        jobs = [job for job, _ in group]
        name = f"swap-{jobs[0].instance.stage}-{secrets.token_hex(6)}"
        is_array = len(jobs) > 1 or jobs[0].instance.seed is not None
        tickets = [Ticket(name, index if is_array else None) for index in range(len(jobs))]
        for job, ticket in zip(jobs, tickets, strict=True):
            forget_last_attempt(job)
            save(job, max_requeues=self._cluster.max_requeues)
            # Before it is submitted: a launcher that is killed in between leaves a job that can be found.
            write_json(job.folder.path / TICKET, {"name": ticket.name, "index": ticket.index})
        tickets[0].log.parent.mkdir(parents=True, exist_ok=True)
        command = self._command(jobs, tickets)
        script = jobs[0].folder.path / "slurm.sh"
        script.write_text(_script(jobs, command), encoding="utf-8")
        try:
            number = ask(*command, str(script.resolve())).strip().partition(";")[0]
        except SilentControllerError:
            raise
        except SwapError as error:
            raise SwapError(
                f"{jobs[0].name} could not be submitted ({error}): look at cluster.yaml and `sinfo`, "
                f"then `dvc repro` again; nothing is lost"
            ) from None
        what = jobs[0].name if len(jobs) == 1 else f"{len(jobs)} × {jobs[0].instance.stage}"
        display.say(f"{what}: submitted as Slurm job {number}")
        return [
            Submitted(job, lock, ticket, self._queue, number if ticket.index is None else f"{number}_{ticket.index}")
            for (job, lock), ticket in zip(group, tickets, strict=True)
        ]

    def _command(self, jobs: Sequence[Job], tickets: Sequence[Ticket]) -> list[str]:
        job, ticket, cluster = jobs[0], tickets[0], self._cluster
        log = str(ticket.log.resolve()).replace("%", "%%")
        command = ["sbatch", "--parsable", f"--job-name={ticket.name}", f"--chdir={Path.cwd()}", "--requeue"]
        command += [f"--nodes={job.nodes}", "--ntasks-per-node=1"]
        command += [f"--cpus-per-task={job.processes_per_node * job.threads}"]
        if job.device_type == "cuda":
            kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
            command += [f"--gpus-per-node={kind}{job.processes_per_node}"]
        if ticket.index is not None:
            at_once = environment.max_workers_at_once(default=len(jobs))
            command += [f"--array=0-{len(jobs) - 1}%{at_once}"]
            log = log.replace(f"{ticket.name}-0.log", f"{ticket.name}-%a.log")
        command += [f"--output={log}", "--open-mode=append", f"--signal=B:USR1@{cluster.signal_seconds}"]
        command += [f"--comment={','.join(job.folder.path.name for job in jobs)[:_MAX_COMMENT]}"]
        options = cluster.options_of(job.instance.stage)
        return command + [f"--{key}" if value is None else f"--{key}={value}" for key, value in options.items()]

    def watch(self, display: Display) -> None:
        self._at_work = [work for work in self._at_work if not work.released]
        changed = self._queue.refresh({work.ticket.name for work in self._at_work}, display)
        if not changed and not (self._waits and time.monotonic() > self._next_place):
            return
        words: dict[str, list[str]] = {}
        waiting = []
        for work in self._at_work:
            if state := work.state:
                words.setdefault(state.word.lower(), []).append(state.id)
                if state.word == "PENDING":
                    waiting.append(state)
                display.mark(work.job.name, f"{state.word.lower()} ({state.reason})")
        self._waits, self._next_place = bool(waiting), time.monotonic() + _PLACE_SECONDS
        line = ", ".join(f"{len(ids)} {word}" for word, ids in sorted(words.items(), reverse=True))
        if waiting:
            reasons = ", ".join(sorted({state.reason for state in waiting}))
            try:
                line += f" ({reasons}; {self._queue.place(waiting)})"
            except SwapError:
                line += f" ({reasons})"
        if line and line != self._said:
            self._said = line
            display.say(f"Slurm jobs of {self._at_work[0].job.instance.stage}: {line}")

    def interrupted(self, number: int, display: Display) -> str:
        """Ctrl-C at a terminal asks; whatever else ends the launcher leaves the jobs alone."""
        numbers = [work.number for work in self._at_work if not work.released]
        unsure = ", ".join(job.name for job in self._starting if ticket_in(job.folder.path))
        perhaps = f"{unsure} may have been submitted, `dvc repro` finds it if so" if unsure else ""
        if not numbers:
            return f"interrupted: {perhaps or 'no Slurm job is at work'}"
        return f"{self._interrupted(numbers, number, display)}{f'; {perhaps}' if perhaps else ''}"

    def _interrupted(self, numbers: Sequence[str], signal_number: int, display: Display) -> str:
        ids = ", ".join(numbers)
        try:
            wanted = signal_number == signal.SIGINT and display.agrees(f"Cancel the Slurm jobs {ids}?")
        except Interrupted:
            wanted = False
        if not wanted:
            return f"interrupted: Slurm jobs {ids} go on, `dvc repro` finds them again; `scancel` ends them"
        try:
            ask("scancel", *numbers)
        except SwapError as error:
            return f"interrupted, but not cancelled ({error}): Slurm jobs {ids} go on, `dvc repro` finds them again"
        return "interrupted, jobs cancelled: `dvc repro` submits them again and goes on from their last snapshots"


def _shape(job: Job) -> tuple[object, ...]:
    return job.instance.stage, job.nodes, job.processes, job.threads


def is_in_queue(folder: Path) -> bool:
    """Whether the job of this folder may be waiting or running: also if Slurm does not say."""
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


def _script(jobs: Sequence[Job], command: Sequence[str]) -> str:
    passed_on = [f"export {name}={shlex.quote(os.environ[name])}" for name in _PASSED_ON if name in os.environ]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Submitted with: {' '.join(shlex.join(command).split())}",
            "trap '' USR1 TERM  # until Python listens",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
            *passed_on,
            "folders=(",
            *(f"  {shlex.quote(str(job.folder.path.resolve()))}  # {job.name}" for job in jobs),
            ")",
            f'exec {shlex.quote(sys.executable)} -m swap_pipeline.batch "${{folders[${{SLURM_ARRAY_TASK_ID:-0}}]}}"',
            "",
        ]
    )


class Submitted:
    """A job in Slurm's hands."""

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
        """As last seen; None: not seen yet."""
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
        # Where several machines share files, one sees late what another has written: after code 0, the result.
        last_word = self._code or (now and now.word not in ("COMPLETED", "FAILED"))
        return bool(last_word) or time.monotonic() - self._over_since > LAG_SECONDS

    @property
    def _code(self) -> int | None:
        """Exit code of the ranks; None: not known here."""
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
            again = "`dvc repro` submits it again and goes on from its last snapshot"
            return Failure(f"{job.name}: its Slurm job {number} was cancelled: {again}", may_pass=False)
        if word == "OUT_OF_MEMORY":
            fix = f"raise sbatch.{job.instance.stage}.mem in cluster.yaml"
            return Failure(f"{job.name}: its Slurm job {number} ran out of memory: {fix}\n{logs}", may_pass=False)
        if word == "TIMEOUT":
            fix = f"raise sbatch.{job.instance.stage}.time, or signal_seconds, in cluster.yaml"
            text = f"{job.name}: the time of its Slurm job {number} ran out before it could stop: {fix}\n{logs}"
            # A job that stops nowhere in between would take as long again, and get no further.
            return Failure(text, may_pass=job.folder.can_go_on)
        code = self._code
        if code is None:
            first = f"{job.name}: its Slurm job {number} ended ({word.lower()}) without a word; {logs}"
            return Failure("\n".join([first, *tail(self.ticket.log)]), may_pass=True)
        failure = why_incomplete(job, code)
        if failure is None:  # the result has come into sight just now
            return None
        text = failure.text if failure.text.startswith(job.name) else f"{job.name}: {failure.text}"
        return Failure(f"{text}\n{logs} (Slurm job {number})", failure.may_pass)

    def ask_to_end(self) -> None:
        """It is for the user to say; see `Sbatch.interrupted`."""

    def end(self) -> None:
        self.release()

    def release(self) -> None:
        self.released = True
        self._lock.release()
