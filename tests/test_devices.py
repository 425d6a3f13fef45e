"""Which part of a machine a job gets: as many devices as share its shards equally."""

from __future__ import annotations

import pytest

from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import Share, share_of_phase1, share_of_worker
from swap_pipeline.launch.jobs import Machine


def gpus(count: int, *, nodes: int = 1, cores: int = 64) -> Machine:
    """So many on each node."""
    return Machine(device_type="cuda", devices=tuple(map(str, range(count))), cores=cores, nodes=nodes)


def cpu(cores: int, *, nodes: int = 1) -> Machine:
    return Machine(device_type="cpu", devices=tuple(map(str, range(cores))), cores=cores, nodes=nodes)


@pytest.mark.parametrize(
    ("shards", "count", "processes"),
    [
        *((8, count, processes) for count, processes in ((1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8))),
        *((16, count, processes) for count, processes in ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16))),
        *((6, count, processes) for count, processes in ((2, 2), (4, 3), (8, 6))),
        *((7, count, processes) for count, processes in ((4, 1), (8, 7))),
        *((1, count, 1) for count in (1, 2, 8)),
    ],
)
def test_as_many_gpus_are_taken_as_divide_the_shards(shards: int, count: int, processes: int) -> None:
    machine = gpus(count)
    expected = Share(processes=processes, nodes=1, threads=64 // count, num_devices=processes)
    assert share_of_phase1(machine, shards=shards) == share_of_worker(machine, shards=shards) == expected


@pytest.mark.parametrize(
    ("shards", "nodes", "processes", "on"),
    [(16, 2, 16, 2), (16, 4, 16, 2), (8, 2, 8, 1), (32, 2, 16, 2), (12, 2, 12, 2), (9, 2, 3, 1), (1, 2, 1, 1)],
)
def test_on_several_nodes_each_has_as_many_processes_as_the_others(
    shards: int, nodes: int, processes: int, on: int
) -> None:
    """Nodes of 8 GPUs; 9 processes would be 5 on one and 4 on the other."""
    machine = gpus(8, nodes=nodes)
    expected = Share(processes=processes, nodes=on, threads=8, num_devices=processes)
    assert share_of_phase1(machine, shards=shards) == share_of_worker(machine, shards=shards) == expected


@pytest.mark.parametrize(
    ("shards", "cores", "processes", "threads"),
    [(2, 2, 2, 1), (2, 8, 2, 4), (2, 1, 1, 1), (8, 8, 8, 1), (8, 6, 4, 1), (3, 8, 3, 2), (4, 3, 2, 1)],
)
def test_phase_1_on_a_cpu_has_all_cores_as_threads_of_its_processes(
    shards: int, cores: int, processes: int, threads: int
) -> None:
    share = share_of_phase1(cpu(cores), shards=shards)
    assert share == Share(processes=processes, nodes=1, threads=threads, num_devices=cores)


def test_on_a_cpu_a_worker_and_a_run_with_one_shard_have_a_core_for_each_process() -> None:
    """Threads change the bytes, so their number must not depend on what else runs."""
    alone = Share(processes=1, nodes=1, threads=1, num_devices=1)
    assert share_of_phase1(cpu(8), shards=1) == share_of_worker(cpu(8), shards=1) == alone
    assert share_of_worker(cpu(8), shards=4) == Share(processes=4, nodes=1, threads=1, num_devices=4)
    assert share_of_worker(cpu(3), shards=4) == Share(processes=2, nodes=1, threads=1, num_devices=2)


@pytest.mark.parametrize(
    ("shards", "nodes", "at_most", "processes", "on", "threads"),
    [
        (4, 2, None, 2, 2, 16),
        (2, 4, None, 2, 2, 16),
        (4, 3, None, 2, 2, 16),
        (8, 2, 8, 8, 2, 4),
        (8, 3, 4, 4, 2, 8),
        (4, 2, 1, 1, 1, 16),
    ],
)
def test_over_several_cpu_nodes_there_is_one_process_each_unless_more_are_asked_for(
    shards: int, nodes: int, at_most: int | None, processes: int, on: int, threads: int
) -> None:
    share = share_of_phase1(cpu(16, nodes=nodes), shards=shards, at_most=at_most)
    assert share == Share(processes=processes, nodes=on, threads=threads, num_devices=16 * on)


@pytest.mark.parametrize(("at_most", "processes"), [(1, 1), (2, 2), (3, 2), (5, 4), (8, 8)])
def test_a_limit_on_processes_is_kept(at_most: int, processes: int) -> None:
    share = share_of_phase1(gpus(8), shards=8, at_most=at_most)
    assert (share.processes, share.num_devices) == (processes, processes)
    share = share_of_phase1(cpu(8), shards=8, at_most=at_most)
    assert (share.processes, share.threads, share.num_devices) == (processes, 8 // processes, 8)


def test_on_a_cpu_more_processes_than_cores_may_be_asked_for_but_not_more_than_gpus() -> None:
    crowded = share_of_phase1(cpu(2), shards=4, at_most=4)
    assert crowded == Share(processes=4, nodes=1, threads=1, num_devices=2)
    with pytest.raises(SwapError, match="SWAP_NPROC is 4, but there are 2 GPUs: lower it"):
        share_of_phase1(gpus(2), shards=4, at_most=4)
