"""What a cluster is taken to have: `cluster.yaml`, Slurm's variables, and which launcher is chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from conftest import ROOT
from ruamel.yaml import YAML

from swap_pipeline.config.instances import PHASE1, worker
from swap_pipeline.errors import SwapError
from swap_pipeline.launch import stage_jobs
from swap_pipeline.launch.devices import launcher_kind, share_of_phase1, share_of_worker, this_machine
from swap_pipeline.launch.jobs import MALLOC, Job, Machine, load, save
from swap_pipeline.launch.slurm import cluster
from swap_pipeline.launch.slurm.srun import step
from swap_pipeline.launch.stage_jobs import job_with
from swap_pipeline.launch.torchrun import PORT
from swap_pipeline.runtime import rank
from swap_pipeline.runtime.environment import JOB
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.runtime.rank import job_of_rank
from swap_pipeline.runtime.stop_request import STOPPABLE

WORKER = worker(3)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder without a project, outside of any Slurm job; nothing is hashed."""
    for name in os.environ:
        if name.startswith(("SLURM", "SWAP_", "DVC_ROOT")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stage_jobs, "job_folder", lambda instance, **_: JobFolder(tmp_path / instance.stage))


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a batch script on the first of two nodes with eight GPUs each."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "64(x2)")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "800000")
    monkeypatch.setenv("SLURM_NTASKS", "2")


def example() -> dict[str, Any]:
    tree: dict[str, Any] = YAML(typ="safe").load((ROOT / "cluster.example.yaml").read_text())
    return tree


def test_the_example_is_what_it_says() -> None:
    found = cluster.parse(example())
    assert found.machine == Machine(device_type="cuda", devices=tuple("01234567"), cores=64, nodes=2)
    assert found.options_of("phase1") == {"partition": "gpu", "time": "12:00:00"}
    assert found.options_of("phase2") == {"partition": "gpu", "time": "04:00:00"}


def test_a_stage_may_take_back_an_option_that_all_have() -> None:
    found = cluster.parse({**example(), "sbatch": {"all": {"exclusive": True}, "phase2": {"exclusive": False}}})
    assert found.options_of("phase1") == {"exclusive": None}
    assert found.options_of("phase2") == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node": 2}, "there is no entry node: choose from nodes, "),
        ({"nodes": 0}, "nodes is 0: write a whole number, at least 1"),
        ({"cpus_per_node": None}, "cpus_per_node is missing"),
        ({"gpu_type": 3}, "gpu_type is 3: write a name"),
        ({"sbatch": {"phase9": {}}}, "there is no sbatch.phase9"),
        ({"sbatch": {"all": {"gres": "gpu:8"}}}, "sbatch.all.gres may not be set: write gpus_per_node"),
        ({"sbatch": {"all": {"job_name": "x"}}}, "sbatch.all.job_name may not be set: remove it"),
        ({"sbatch": {"all": {"clusters": "b"}}}, "sbatch.all.clusters may not be set: run `dvc repro` on a login node"),
        ({"sbatch": {"all": {"test_only": True}}}, "sbatch.all.test_only may not be set: remove it, nothing would"),
        ({"sbatch": {"all": {"p": "gpu"}}}, "sbatch.all.p is not a long option of sbatch"),
        ({"sbatch": {"all": {"time": 720}}}, 'sbatch.all.time is 720: write it in quotes: "12:00:00"'),
        ({"sbatch": {"all": {"partition": ["a", "b"]}}}, "sbatch.all.partition is .*: write one value"),
        ({"sbatch": ["all"]}, "sbatch is .*: write sections"),
    ],
)
def test_a_mistake_in_cluster_yaml_is_named_with_the_way_out(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SwapError, match=f"cluster.yaml: {words}"):
        cluster.parse({**example(), **change})


def test_the_launcher_is_the_one_that_is_asked_for_or_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher_kind() == "local"
    Path("cluster.yaml").touch()
    assert launcher_kind() == "sbatch"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert launcher_kind() == "srun"  # `salloc --nodes=1 dvc repro`, which runs on the login node
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    assert launcher_kind() == "local"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launcher_kind() == "srun"
    monkeypatch.setenv("SWAP_LAUNCHER", "sbatch")
    assert launcher_kind() == "sbatch"
    monkeypatch.setenv("SWAP_LAUNCHER", "ssh")
    with pytest.raises(SwapError, match="SWAP_LAUNCHER is 'ssh': choose local, srun or sbatch"):
        launcher_kind()


def test_a_job_of_which_only_the_number_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    with pytest.raises(SwapError, match="SLURM_JOB_CPUS_PER_NODE is not: start this inside the job"):
        this_machine()


def test_a_launcher_that_there_is_no_place_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAP_LAUNCHER", "srun")
    with pytest.raises(SwapError, match="SWAP_LAUNCHER is srun, but this is not a Slurm job"):
        this_machine()
    monkeypatch.setenv("SWAP_LAUNCHER", "sbatch")
    with pytest.raises(SwapError, match=r"there is no cluster.yaml: copy cluster.example.yaml"):
        this_machine()


@pytest.mark.usefixtures("allocation")
def test_phase_1_has_the_gpus_of_all_nodes_and_a_worker_may_have_more_than_one_node() -> None:
    machine = this_machine()
    phase1 = share_of_phase1(machine, shards=16)
    assert (phase1.nodes, phase1.processes, phase1.threads) == (2, 16, 8)
    small, large = (share_of_worker(machine, shards=shards) for shards in (2, 16))
    assert (small.nodes, small.processes, small.threads) == (1, 2, 8)
    assert (large.nodes, large.processes) == (2, 16)


@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize(("shards", "nodes", "processes"), [(9, 1, 3), (15, 1, 5), (10, 2, 10), (32, 2, 16), (7, 1, 7)])
def test_as_many_gpus_share_the_shards_as_can_do_so_equally_and_spread_evenly_over_nodes(
    shards: int, nodes: int, processes: int
) -> None:
    share = share_of_worker(this_machine(), shards=shards)
    assert (share.nodes, share.processes) == (nodes, processes)


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS": "8"}, 4),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_NTASKS": "8"}, 8),
        ({}, 0),
    ],
)
@pytest.mark.usefixtures("allocation")
def test_gpus_are_counted_in_batch_scripts_and_in_shells_of_salloc(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], gpus: int
) -> None:
    monkeypatch.setattr(cluster, "ask", lambda *command: "JobId=77 NumNodes=2 TRES=cpu=128,node=2")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine = this_machine()
    assert machine.device_type == ("cuda" if gpus else "cpu")
    assert len(machine.devices) == (gpus or 64)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("TresPerNode=gres:gpu:2 MailUser=x", 2),
        ("TresPerNode=gres/gpu:a100:8", 8),
        ("TresPerNode=gres:license:1,gres:gpu:h100-80:4", 4),
        ("TresPerNode=gres:gpu:1", 1),
        ("TresPerNode=gres:gpu:3090:2", 2),
        ("TRES=cpu=4,mem=8G,node=2,gres/gpu=8,gres/gpu:a100=8", 4),
        ("ReqTRES=cpu=4,gres/gpu=9 AllocTRES=cpu=4,gres/gpu:h100=6", 3),
        ("TresPerJob=gres:gpu:4", 2),
        ("NumTasks=6 TresPerTask=gres:gpu:2", 6),
        ("NumCPUs=4 TRES=cpu=4,mem=8G,node=2", 0),
    ],
)
def test_gpus_that_were_asked_for_as_gres_are_found_in_the_job(words: str, gpus: int) -> None:
    assert cluster.gpus_in(f"JobId=7 {words} Power=", nodes=2) == gpus


@pytest.mark.usefixtures("allocation")
def test_a_job_of_which_slurm_does_not_say_whether_it_has_gpus_does_not_train_on_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    with pytest.raises(SwapError, match=r"scontrol: Unable to contact .* SWAP_DEVICE=cpu if it has none"):
        this_machine()
    monkeypatch.setenv("SWAP_DEVICE", "cpu")
    assert this_machine().device_type == "cpu"
    monkeypatch.setenv("SWAP_DEVICE", "cuda")
    monkeypatch.setenv("SLURM_GPUS", "1")
    with pytest.raises(SwapError, match="2 nodes but 1 GPUs: request --gpus-per-node"):
        this_machine()


def test_a_wish_for_gpus_that_the_cluster_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAP_DEVICE", "cuda")
    with pytest.raises(SwapError, match=r"SWAP_DEVICE is cuda, but .* has gpus_per_node: 0"):
        cluster.parse({**example(), "gpus_per_node": 0})
    monkeypatch.setenv("SWAP_DEVICE", "gpu")
    with pytest.raises(SwapError, match="SWAP_DEVICE is 'gpu': choose cpu or cuda"):
        cluster.parse(example())


@pytest.mark.usefixtures("allocation")
def test_a_step_says_what_it_needs_and_meets_at_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")  # of the shell that `salloc` gave, no good for others
    job = job_with(PHASE1, share_of_phase1(this_machine(), shards=16))
    (command, variables), (again, others) = step(job), step(job)
    text = " ".join(command)
    assert "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --exact --kill-on-bad-exit=1 --cpus-per-task 64" in text
    assert "--gpus-per-node 8" in text
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-id 77." in text
    assert text.endswith("--nproc-per-node 8 -m stages.phase1")
    assert command != again
    assert 20000 <= int(variables[PORT]) < 32000 and variables[PORT] != others[PORT]
    assert variables.keys().isdisjoint({"SLURM_NTASKS", "SLURM_CPU_BIND"}) and variables["SLURM_JOB_ID"] == "77"
    assert variables.items() >= MALLOC.items()

    worker, _ = step(job_with(WORKER, share_of_worker(this_machine(), shards=2)), memory_share=0.25)
    assert "--nodes 1 --ntasks 1" in " ".join(worker) and "--mem 200000" in " ".join(worker)
    assert "--standalone" in worker
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all that a node has
    assert "--mem" not in step(job, memory_share=0.25)[0]


def test_a_rank_on_another_machine_gives_files_the_time_to_be_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = iter([tmp_path / "old", tmp_path / "old", tmp_path / "new"])
    monkeypatch.setattr(rank, "job_folder", lambda instance, **_: JobFolder(next(seen)))
    monkeypatch.setattr(rank, "_PAUSE_SECONDS", 0)
    for name, value in {JOB: f"{tmp_path}/new", rank.RESULT_NAME: "result", rank.WORLD: "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SwapError, match="changed after the start"):
        job_of_rank(WORKER)
    monkeypatch.setenv(STOPPABLE, "1")
    assert job_of_rank(WORKER) == JobFolder(tmp_path / "new")


def test_a_job_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    job = Job(
        instance=WORKER,
        device_type="cpu",
        processes=2,
        threads=1,
        num_devices=2,
        folder=JobFolder(tmp_path / "folder"),
        nodes=2,
    )
    save(job, max_requeues=5)
    assert load(job.folder.path) == (job, {"max_requeues": 5})


def test_where_nodes_cannot_have_names_of_their_own_there_is_no_test_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in slurm_cluster.PROGRAMS:
        refuses = 'echo "unshare: unshare failed: Operation not permitted" >&2; exit 1' if name == "unshare" else "true"
        (tmp_path / name).write_text(f"#!/bin/sh\n{refuses}\n")
        (tmp_path / name).chmod(0o755)
    assert slurm_cluster.missing().endswith("not allowed here: unshare: unshare failed: Operation not permitted")
