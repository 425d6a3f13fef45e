"""Jobs of a Slurm cluster, submitted from a login node with `sbatch` and waited for.

Jobs of one shape form one array, whose tasks start as soon as there is room for them. A file in a job's folder has the
name under which it was submitted; a launcher that starts the same job again looks for it in the queue first.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from swap_pipeline.errors import SwapError
from swap_pipeline.launch.display import Display
from swap_pipeline.launch.jobs import Job, claim, forget_last_attempt, save
from swap_pipeline.launch.slurm.cluster import Cluster
from swap_pipeline.launch.slurm.controller import Patience, SilentControllerError, ask
from swap_pipeline.launch.slurm.queue import LAG_SECONDS, OVER, TICKET, Queue, State, Submitted, Ticket, ticket_in
from swap_pipeline.runtime import environment
from swap_pipeline.runtime.locks import Lock
from swap_pipeline.runtime.stage_process import Interrupted
from swap_pipeline.storage.files import write_json

_PLACE_SECONDS = 60
"""after which the place in the queue is looked up again"""
_OF_RANKS = ("DEBUG", "EVAL_BATCH", "KEEP_EPOCHS", "LOADERS", "SNAPSHOT_SECONDS", "TENSORBOARD", "TIMEOUT_MINUTES")
_PASSED_ON = ("DVC_ROOT", *(f"SWAP_{name}" for name in _OF_RANKS))
"""also where the site's sbatch does not hand on the environment (SBATCH_EXPORT)"""
_MAX_COMMENT = 1000
"""characters; Slurm refuses a job with more than 1,024"""


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
        """of which it is not yet known whether Slurm has accepted them"""
        self._said = ""
        self._waits, self._next_place = False, 0.0

    def start(self, jobs: Sequence[Job], *, room: int, display: Display) -> list[Submitted]:
        """Submit all jobs at once: Slurm decides when each of them runs.

        While Slurm does not answer, none is started. Jobs that it accepted nevertheless are found at the next attempt.
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
        """Those that an earlier launcher submitted and that are still pending or running."""
        tickets = {job: ticket for job, _ in claimed if (ticket := ticket_in(job.folder.path))}
        states = self._settled({ticket.name for ticket in tickets.values()}, display)
        alive = [
            Submitted(job, lock, tickets[job], self._queue, state.id)
            for job, lock in claimed
            if job in tickets and (state := states.get(tickets[job])) and state.word not in OVER
        ]
        for work in alive:
            state = states[work.ticket]
            display.say(f"{work.job.name}: Slurm job {state.id} is already {state.word.lower()}, waiting for it")
        self._queue.states |= states
        return alive

    def _settled(self, names: Collection[str], display: Display) -> dict[Ticket, State]:
        """States of jobs of these names; waits for those that are completing, since they may be requeued."""
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
            # Before it is submitted, so that the job can be found if the launcher is killed in between.
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
                f"{jobs[0].name} could not be submitted ({error}): check cluster.yaml and `sinfo`, "
                f"then run `dvc repro` again; nothing is lost"
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
        """Ctrl-C at a terminal asks whether to cancel the jobs; any other signal leaves them running."""
        numbers = [work.number for work in self._at_work if not work.released]
        unsure = ", ".join(job.name for job in self._starting if ticket_in(job.folder.path))
        perhaps = f"{unsure} may have been submitted, `dvc repro` finds it if so" if unsure else ""
        if not numbers:
            return f"interrupted: {perhaps or 'no Slurm job is running'}"
        return f"{self._interrupted(numbers, number, display)}{f'; {perhaps}' if perhaps else ''}"

    def _interrupted(self, numbers: Sequence[str], signal_number: int, display: Display) -> str:
        ids = ", ".join(numbers)
        try:
            wanted = signal_number == signal.SIGINT and display.agrees(f"Cancel the Slurm jobs {ids}?")
        except Interrupted:
            wanted = False
        if not wanted:
            return f"interrupted: Slurm jobs {ids} continue, `dvc repro` finds them again; `scancel` ends them"
        try:
            ask("scancel", *numbers)
        except SwapError as error:
            return f"interrupted, but not cancelled ({error}): Slurm jobs {ids} continue, `dvc repro` finds them again"
        return "interrupted, jobs cancelled: `dvc repro` submits them again and resumes from their last snapshots"


def _shape(job: Job) -> tuple[object, ...]:
    return job.instance.stage, job.nodes, job.processes, job.threads


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
            f"exec {shlex.quote(sys.executable)} -m swap_pipeline.launch.slurm.in_job "
            '"${folders[${SLURM_ARRAY_TASK_ID:-0}]}"',
            "",
        ]
    )
