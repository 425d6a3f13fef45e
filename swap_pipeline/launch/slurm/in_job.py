"""python -m swap_pipeline.launch.slurm.in_job .swap/phase1/<fingerprint>

What a submitted Slurm job runs: the ranks of the job that its launcher described in that folder. Shortly before the
time limit, or when preempted, it has them write a snapshot and requeues itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from swap_pipeline.launch.display import STDOUT_FILE
from swap_pipeline.launch.jobs import CODE_FILE, STDERR_FILE, Job, for_one_node, forget_last_attempt, load
from swap_pipeline.launch.slurm.srun import step
from swap_pipeline.runtime.rank import SAID, STOPPED
from swap_pipeline.runtime.stop_request import STOP_FILE, STOPPABLE

_ATTEMPTS = 20
_PAUSE_SECONDS = 5


def main() -> None:
    signals: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    job, more = load(Path(sys.argv[1]))
    restarts, limit = int(os.environ.get("SLURM_RESTART_COUNT", "0")), more["max_requeues"]
    if job.folder.is_complete:
        return
    forget_last_attempt(job, logs=False)
    if restarts > limit:
        sys.exit(_give_up(job, limit))
    if restarts:
        print(f"restart {restarts} of at most {limit}", flush=True)
    code = _run(job, signals)
    was_stopped = any(job.folder.path.glob(f"{STOPPED}_*.txt"))
    if was_stopped and not job.folder.is_complete:
        if restarts == limit:
            sys.exit(_give_up(job, limit))
        if _requeue():
            time.sleep(60)  # Slurm ends this process
    (job.folder.path / CODE_FILE).write_text(f"{code}\n")
    sys.exit(0 if job.folder.is_complete else code % 256 or 1)


def _run(job: Job, signals: list[int]) -> int:
    """Start the ranks and wait for them; after a signal, ask them to stop."""
    folder = job.folder.path
    command, variables = for_one_node(job, parent=os.getpid()) if job.nodes == 1 else step(job)
    with (folder / STDOUT_FILE).open("ab") as out, (folder / STDERR_FILE).open("ab") as err:
        ranks = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**variables, STOPPABLE: "1"}
        )
    while ranks.poll() is None:
        if signals:
            (folder / STOP_FILE).touch()
        time.sleep(0.1)
    return ranks.returncode


def _requeue() -> bool:
    """Requeue this job, unless Slurm is already ending it: it was cancelled, or is being requeued."""
    number = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        # The last task's job id is that of the array: requeueing that would restart all tasks.
        number = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    for _ in range(_ATTEMPTS):  # the controller may be down for a moment
        state = _ask("squeue", "--noheader", "--jobs", number, "--format", "%T")
        if state is not None and state.strip() != "RUNNING":
            return False
        if state is not None and _ask("scontrol", "requeue", number) is not None:
            return True
        time.sleep(_PAUSE_SECONDS)
    return False


def _ask(*command: str) -> str | None:
    """Slurm's answer; None if it fails, with its error in the log."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {error}", flush=True)
        return None
    return done.stdout if done.returncode == 0 else None


def _give_up(job: Job, limit: int) -> int:
    """A job that makes no progress must not be requeued forever."""
    text = (
        f"{job.name}: its Slurm job was requeued {limit} times and is not done: raise "
        f"sbatch.{job.instance.stage}.time or max_requeues in cluster.yaml, then run `dvc repro`, which resumes it"
    )
    (job.folder.path / f"{SAID}_0.txt").write_text(text, encoding="utf-8")
    (job.folder.path / CODE_FILE).write_text("1\n")
    return 1


if __name__ == "__main__":
    main()
