"""The pipeline on a real Slurm: two emulated nodes on this machine, started and stopped here. `make test-slurm`."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from conftest import Project, make_project, processes_in, wait_until
from slurm_cluster import Cluster
from test_resume import snapshots

PARAMS = {"phase1.shards": 2, "phase1.max_epochs": 40, "phase2.epochs": 40, "workers.seeds": [0, 1]}
TWO_RANKS = {"SWAP_NPROC": "2"}
# A node with one core for each of two ranks; this machine may have other numbers.
TWO_CORES = ("taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:2])))
ALLOCATION = ("salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
CLUSTER = """
nodes: 2
gpus_per_node: 0
cpus_per_node: 1
signal_seconds: 30
sbatch:
  all:
    partition: main
    time: "1:00:00"
"""
PHASES = ("phase1", "phase2/seed_0", "phase2/seed_1", "phase3")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := slurm_cluster.missing():
        pytest.skip(why)
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """After `dvc repro` on this machine with two ranks."""
    project = make_project(tmp_path_factory.mktemp("reference") / "project")
    project.environment = TWO_RANKS
    project.set_params(PARAMS)
    project.run(*TWO_CORES, "dvc", "repro")
    return project


@pytest.fixture
def untrained(reference: Project, cluster: Cluster, tmp_path: Path) -> Project:
    """With the data prepared, and `sbatch` to train it."""
    project = reference.copy_to(tmp_path / "project")
    for name in (".swap", "checkpoints", "metrics", ".dvc/cache/runs", "dvc.lock"):
        place = project.root / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    project.environment = {**TWO_RANKS, **cluster.environment}
    (project.root / "cluster.yaml").write_text(CLUSTER)
    return project


@pytest.fixture
def with_phase1(reference: Project, untrained: Project) -> Project:
    """Phase 2 is to come."""
    shutil.copytree(reference.root / "checkpoints/phase1", untrained.root / "checkpoints/phase1")
    return untrained


def start(project: Project, *command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=project.root,
        env=project.full_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_stage(project: Project, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return start(project, sys.executable, "-m", *arguments, **environment)


def finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return output


def has_come_to(project: Project, stage: str, epoch: int) -> bool:
    return max(snapshots(project, stage), default=0) >= epoch


def job_ids(cluster: Cluster, *states: str) -> list[str]:
    return cluster.run("squeue", "-h", "-t", ",".join(states) or "all", "-o", "%A").split()


def model(project: Project, phase: str) -> bytes:
    return project.bytes_of(f"checkpoints/{phase}/model.safetensors")


def workers_overlap(project: Project) -> bool:
    """Whether all workers of phase 2 were running at the same time."""
    began, ended = zip(*(project.json(f"metrics/phase2/seed_{seed}.json")["ran"] for seed in (0, 1)), strict=True)
    return bool(max(began) < min(ended))


def rank_processes(project: Project, rank: int) -> list[int]:
    found = []
    for pid in processes_in(project.root):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and b"swap_pipeline.launch.torchrun" not in words:
            found.append(pid)
    return found


def test_srun_over_two_nodes_gives_the_bytes_of_a_local_run(reference: Project, untrained: Project) -> None:
    (untrained.root / "cluster.yaml").unlink()
    output = finish(start(untrained, *ALLOCATION, "dvc", "repro"))
    assert "phase1: epoch 40/40" in output
    assert workers_overlap(untrained)
    for phase in PHASES:
        assert model(untrained, phase) == model(reference, phase), phase


def test_sbatch_gives_the_bytes_of_a_local_run_and_an_added_seed_submits_one_task(
    reference: Project, untrained: Project, cluster: Cluster
) -> None:
    output = finish(start(untrained, "dvc", "repro"))
    assert "2 × phase2: submitted as Slurm job" in output
    assert output.count("submitted as Slurm job") == 3  # phase 1, phase 2, phase 3
    assert workers_overlap(untrained)
    for phase in PHASES:
        assert model(untrained, phase) == model(reference, phase), phase
    before = set(job_ids(cluster))

    untrained.set_params({"workers.seeds": [0, 1, 5]})
    output = finish(start(untrained, "dvc", "repro"))

    assert "phase2 seed 5: submitted as Slurm job" in output
    assert len(set(job_ids(cluster)) - before) == 2  # the seed, phase 3
    assert model(untrained, "phase2/seed_1") == model(reference, "phase2/seed_1")


def test_a_worker_over_two_nodes_tells_its_place_in_the_queue_and_gives_the_bytes_of_a_local_run(
    with_phase1: Project, cluster: Cluster
) -> None:
    with_phase1.set_params({"phase2.shards": 2, "phase2.epochs": 3})
    worker = (sys.executable, "-m", "stages.phase2", "--seed", "0")
    with_phase1.run(*TWO_CORES, *worker, SWAP_LAUNCHER="local")
    expected = model(with_phase1, "phase2/seed_0")
    for name in (".swap", "checkpoints/phase2"):
        shutil.rmtree(with_phase1.root / name)
    options = ("--parsable", "-N2", "--exclusive", "--output=/dev/null")
    busy = cluster.run("sbatch", *options, "--wrap", "sleep 600").strip()
    wait_until(lambda: busy in job_ids(cluster, "RUNNING"))

    launcher = start(with_phase1, *worker)
    assert launcher.stdout is not None
    queued = next(line for line in launcher.stdout if "pending" in line)
    nodes_asked_for = cluster.run("squeue", "-h", "-t", "PENDING", "-o", "%D").strip()
    cluster.run("scancel", busy)
    finish(launcher)

    assert "place 1 of 1 in main" in queued
    assert nodes_asked_for == "2"
    assert model(with_phase1, "phase2/seed_0") == expected


def test_a_rank_killed_on_one_node_ends_the_step_on_all_and_a_new_one_goes_on(
    reference: Project, untrained: Project
) -> None:
    launcher = start(untrained, *ALLOCATION, sys.executable, "-m", "stages.phase1")
    wait_until(lambda: has_come_to(untrained, "phase1", 2))
    (victim,) = rank_processes(untrained, 1)
    os.kill(victim, signal.SIGKILL)

    output = finish(launcher)

    assert "rank 1 was killed by signal 9" in output
    assert "phase1: restarting it" in output
    assert output.count("phase1: epoch 1/40") == 1
    assert model(untrained, "phase1") == model(reference, "phase1")


def test_phase_1_goes_on_where_it_was_when_it_is_requeued_and_when_its_time_is_nearly_up(
    reference: Project, untrained: Project, cluster: Cluster
) -> None:
    launcher = start_stage(untrained, "stages.phase1")
    wait_until(lambda: has_come_to(untrained, "phase1", 2))
    (job,) = job_ids(cluster, "RUNNING")
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: has_come_to(untrained, "phase1", 12))
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does some time before the end

    output = finish(launcher)

    assert "pending" in output
    assert output.count("phase1: resuming after epoch") == 2
    assert output.count("submitted as") == output.count("phase1: epoch 1/40") == 1
    assert model(untrained, "phase1") == model(reference, "phase1")


def test_a_worker_that_is_asked_to_go_leaves_the_others_of_its_array_alone(
    reference: Project, with_phase1: Project, cluster: Cluster
) -> None:
    launcher = start_stage(with_phase1, "stages.phase2", "--seed", "0", DVC_STAGE="phase2@0")
    wait_until(lambda: len({path.parent for path in with_phase1.root.glob(".swap/phase2/*/snapshot_*")}) == 2)
    tasks = [line.split() for line in cluster.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%A %F %i").splitlines()]
    (named_like_the_array,) = [task for number, array, task in tasks if number == array]
    cluster.run("scancel", "--batch", "--signal=TERM", named_like_the_array)  # as Slurm may do before it preempts

    output = finish(launcher)

    assert output.count("resuming after") == 1
    assert output.count("submitted as Slurm job") == 1  # it went back into the queue by itself
    finish(start_stage(with_phase1, "stages.phase2", "--seed", "1"))
    for phase in ("phase2/seed_0", "phase2/seed_1"):
        assert model(with_phase1, phase) == model(reference, phase), phase


def test_a_job_that_is_requeued_too_often_gives_up_and_says_so(untrained: Project, cluster: Cluster) -> None:
    (untrained.root / "cluster.yaml").write_text(f"max_requeues: 0\n{CLUSTER}")
    launcher = start_stage(untrained, "stages.phase1")
    wait_until(lambda: has_come_to(untrained, "phase1", 2))
    cluster.run("scancel", "--batch", "--signal=USR1", *job_ids(cluster, "RUNNING"))

    output = launcher.communicate(timeout=600)[0]

    assert launcher.returncode == 1
    assert "phase1: its Slurm job was requeued 0 times and is not done: raise sbatch.phase1.time" in output


def test_a_preempted_worker_goes_on_when_its_place_is_free_again(
    reference: Project, with_phase1: Project, cluster: Cluster
) -> None:
    launcher = start_stage(with_phase1, "stages.phase2", "--seed", "0")
    wait_until(lambda: has_come_to(with_phase1, "phase2", 2))
    options = ("--parsable", "-p", "urgent", "-N2", "--exclusive", "--output", "/dev/null")
    urgent = cluster.run("sbatch", *options, "--wrap", "sleep 1").strip()
    wait_until(lambda: urgent in job_ids(cluster, "COMPLETED"))

    output = finish(launcher)

    assert output.count("phase2 seed 0: resuming after") == 1
    assert output.count("phase2 seed 0: epoch 1/40") == 1
    assert model(with_phase1, "phase2/seed_0") == model(reference, "phase2/seed_0")


def test_a_worker_that_fails_keeps_the_others_and_is_named_with_its_log(with_phase1: Project) -> None:
    script = with_phase1.root / "stages/phase2.py"
    broken = '    if instance.seed == 1:\n        raise SwapError("no luck")\n    phase = params.phase2\n'
    script.write_text(script.read_text().replace("    phase = params.phase2\n", broken))

    good = with_phase1.stage("phase2", "--seed", "0", DVC_STAGE="phase2@0")
    bad = with_phase1.stage("phase2", "--seed", "1", DVC_STAGE="phase2@1")

    assert good.returncode == 0, good.stderr
    assert "2 × phase2: submitted as" in good.stdout
    assert "phase2 seed 1: no luck" in good.stdout
    assert bad.returncode == 1
    assert "error: phase2 seed 1: no luck\nlogs: " in bad.stderr
    log = Path(bad.stderr.partition("logs: ")[2].split()[0])
    assert "no luck" in (with_phase1.root / log).read_text()


def test_a_cancelled_job_says_so_and_the_next_start_goes_on(
    reference: Project, untrained: Project, cluster: Cluster
) -> None:
    launcher = start_stage(untrained, "stages.phase1")
    wait_until(lambda: has_come_to(untrained, "phase1", 2))
    cluster.run("scancel", *job_ids(cluster, "RUNNING"))
    output = launcher.communicate(timeout=600)[0]
    assert launcher.returncode == 1
    assert "was cancelled: `dvc repro` submits it again" in output
    assert "Traceback" not in output

    # An interrupted launcher leaves its job to the next one.
    second = start_stage(untrained, "stages.phase1")
    wait_until(lambda: len(job_ids(cluster, "RUNNING", "PENDING")) == 1)
    wait_until(lambda: has_come_to(untrained, "phase1", 10))
    os.kill(second.pid, signal.SIGTERM)
    left = second.communicate(timeout=600)[0]
    third = finish(start_stage(untrained, "stages.phase1"))

    assert "continue, `dvc repro` finds them again" in left
    assert "is already running, waiting for it" in third
    assert "submitted" not in third
    assert model(untrained, "phase1") == model(reference, "phase1")


@pytest.mark.parametrize("answer", ["y", "n"])
def test_ctrl_c_at_a_terminal_asks_whether_to_cancel(untrained: Project, cluster: Cluster, answer: str) -> None:
    master, slave = pty.openpty()

    def at_the_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where this test runs in the background

    launcher = subprocess.Popen(
        [sys.executable, "-m", "stages.phase1"],
        cwd=untrained.root,
        env=untrained.full_environment({"TERM": "xterm"}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=at_the_terminal,
    )
    os.close(slave)
    seen = ""

    def read_until(words: str) -> None:
        nonlocal seen
        while words not in seen:
            assert select.select([master], [], [], 120)[0], seen
            seen += os.read(master, 10000).decode(errors="replace")

    wait_until(lambda: has_come_to(untrained, "phase1", 2))
    (job,) = job_ids(cluster, "RUNNING")
    os.write(master, b"\x03")
    read_until(f"Cancel the Slurm jobs {job}? [y/N]")
    os.write(master, f"{answer}\n".encode())
    read_until("jobs cancelled" if answer == "y" else "continue, `dvc repro` finds them again")
    assert launcher.wait(timeout=60) == 130
    os.close(master)
    assert "Traceback" not in seen
    if answer == "y":
        wait_until(lambda: job in job_ids(cluster, "CANCELLED"))
    else:
        assert job in job_ids(cluster, "RUNNING", "COMPLETED")
        cluster.run("scancel", job)


def test_a_controller_that_is_down_is_told_in_a_line_and_nothing_is_lost(
    reference: Project, untrained: Project, cluster: Cluster
) -> None:
    second = untrained.copy_to(untrained.root.parent / "second")
    second.set_params({"seed": 3})
    launcher = start_stage(untrained, "stages.phase1")
    wait_until(lambda: has_come_to(untrained, "phase1", 2))
    cluster.end_controller()
    try:
        other = second.stage("phase1", SWAP_TIMEOUT_MINUTES="0.02")
    finally:
        cluster.start_controller()

    output = finish(launcher)

    assert other.returncode == 1
    (line,) = other.stderr.splitlines()
    assert "waiting for it; running jobs" in other.stdout
    assert "contact slurm controller" in line and "for 0.02 minutes" in line and "nothing is lost" in line
    assert output.count("submitted as") == 1
    assert model(untrained, "phase1") == model(reference, "phase1")
