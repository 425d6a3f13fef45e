"""Phase 3's mean against one computed by hand in float64."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from swap_pipeline.averaging import mean
from swap_pipeline.averaging.mean import average_files, share_out
from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import Spec, TensorFile, read_tensors, write_tensors

ROOT = Path(__file__).resolve().parents[1]
SIGNIFICANT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
Weights = dict[str, torch.Tensor]


def weights_of_worker(worker: int) -> Weights:
    """Mixed types; the values differ from worker to worker by much and by little, and are not round."""
    generator = torch.Generator().manual_seed(1000 + worker)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "conv.weight": normal(4, 3, 3, 3).float(),
        "near.weight": (1 + 1e-6 * normal(200)).float(),
        "half.weight": (1 + 0.3 * normal(300)).half(),
        "half.large": (60000 + 1000 * normal(50).clamp(-5, 5)).half(),
        "brain.weight": normal(301).bfloat16(),
        "double.weight": normal(7),
        "scalar": normal(1)[0].float(),
        "nothing": normal(0, 3).float(),
        "bn.num_batches_tracked": torch.tensor(100 + 7 * worker),
        "bytes": torch.tensor([worker, 255 - worker], dtype=torch.uint8),
        "mask": torch.tensor([worker % 2 == 0, True]),
    }


def write_workers(folder: Path, workers: list[Weights]) -> list[Path]:
    paths = [folder / f"seed_{number}" / "model.safetensors" for number in range(len(workers))]
    for path, weights in zip(paths, workers, strict=True):
        write_tensors(path, weights, {})
    return paths


def mean_by_hand(tensors: list[torch.Tensor]) -> NDArray[np.float64]:
    total = np.zeros(tuple(tensors[0].shape), dtype=np.float64)
    for tensor in tensors:
        total = total + tensor.to(torch.float64).numpy()
    return total / len(tensors)


def errors_in_last_place(found: torch.Tensor, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far `found` is from `exact`, in units of the last binary place of its type; 0.5 is the best rounding."""
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, exponent - SIGNIFICANT_BITS[found.dtype])
    return np.abs(found.to(torch.float64).numpy() - exact) / unit


@pytest.mark.parametrize("num_workers", range(1, 17))
def test_the_mean_of_w_files_is_the_exact_one_rounded_once(tmp_path: Path, num_workers: int) -> None:
    workers = [weights_of_worker(number) for number in range(num_workers)]
    paths = write_workers(tmp_path, workers)

    average_files(paths, tmp_path / "mean.safetensors", {})
    mean, _ = read_tensors(tmp_path / "mean.safetensors")

    assert {key: (tensor.dtype, tensor.shape) for key, tensor in mean.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in workers[0].items()
    }
    for key in ("conv.weight", "near.weight", "scalar", "half.weight", "half.large", "brain.weight"):
        errors = errors_in_last_place(mean[key], mean_by_hand([worker[key] for worker in workers]))
        assert errors.max() <= 0.5001, key
    by_hand = mean_by_hand([worker["double.weight"] for worker in workers])
    np.testing.assert_allclose(mean["double.weight"].numpy(), by_hand, rtol=1e-15, atol=1e-15)


def test_a_mean_worked_out_on_paper(tmp_path: Path) -> None:
    paths = write_workers(
        tmp_path, [{"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([2.0, 2.0])}, {"w": torch.tensor([6.0, -3.0])}]
    )

    average_files(paths, tmp_path / "mean.safetensors", {})

    assert read_tensors(tmp_path / "mean.safetensors")[0]["w"].tolist() == [3.0, -1.0]


@pytest.mark.parametrize("num_workers", [1, 3, 16])
def test_integer_and_boolean_buffers_are_those_of_the_first_file(tmp_path: Path, num_workers: int) -> None:
    paths = write_workers(tmp_path, [weights_of_worker(5 + number) for number in range(num_workers)])

    average_files(paths, tmp_path / "mean.safetensors", {})
    mean, _ = read_tensors(tmp_path / "mean.safetensors")

    assert mean["bn.num_batches_tracked"].item() == 135
    assert mean["bytes"].tolist() == [5, 250]
    assert mean["mask"].tolist() == [False, True]


def test_the_mean_of_one_file_is_its_tensors_bit_for_bit(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [weights_of_worker(3)])

    average_files(paths, tmp_path / "mean.safetensors", {})
    mean, _ = read_tensors(tmp_path / "mean.safetensors")

    assert [key for key, tensor in weights_of_worker(3).items() if not torch.equal(mean[key], tensor)] == []


def test_the_mean_of_equal_files_is_each_of_them_bit_for_bit(tmp_path: Path) -> None:
    weights = {key: tensor for key, tensor in weights_of_worker(3).items() if tensor.dtype != torch.float64}
    paths = write_workers(tmp_path, [weights] * 7)

    average_files(paths, tmp_path / "mean.safetensors", {})
    mean, _ = read_tensors(tmp_path / "mean.safetensors")

    assert [key for key, tensor in weights.items() if not torch.equal(mean[key], tensor)] == []


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 3.0), (torch.float16, 0.51), (torch.bfloat16, 0.51), (torch.float64, 3.0)]
)
def test_large_tensors_are_summed_in_float32_at_least(tmp_path: Path, dtype: torch.dtype, allowed: float) -> None:
    generator = torch.Generator().manual_seed(0)
    workers = [
        {"w": torch.rand((1 << 20) + 3, generator=generator, dtype=torch.float64).add(1).to(dtype)} for _ in range(5)
    ]
    paths = write_workers(tmp_path, workers)

    average_files(paths, tmp_path / "mean.safetensors", {})
    mean, _ = read_tensors(tmp_path / "mean.safetensors")

    errors = errors_in_last_place(mean["w"], mean_by_hand([worker["w"] for worker in workers]))
    assert errors.max() <= allowed


def test_the_result_carries_the_info_it_was_given(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [weights_of_worker(0), weights_of_worker(1)])

    average_files(paths, tmp_path / "mean.safetensors", {"phase": "phase3", "seeds": [0, 1]})

    assert read_tensors(tmp_path / "mean.safetensors")[1] == {"phase": "phase3", "seeds": [0, 1]}


@pytest.mark.parametrize("threads", [2, 7])
def test_the_bytes_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    paths = write_workers(tmp_path, [weights_of_worker(number) for number in range(3)])
    average_files(paths, tmp_path / "by one", {"phase": "phase3"})
    mean_of, begun, all_begun = mean._mean, [], threading.Event()

    def slow_mean(files: Sequence[TensorFile], key: str) -> Iterator[torch.Tensor]:
        begun.append(key)
        if len(begun) == threads:
            all_begun.set()
        assert all_begun.wait(timeout=60), "as many tensors as threads are to be at work at once"
        yield from mean_of(files, key)

    monkeypatch.setattr(mean, "_mean", slow_mean)

    average_files(paths, tmp_path / "by several", {"phase": "phase3"}, threads=threads)

    assert (tmp_path / "by several").read_bytes() == (tmp_path / "by one").read_bytes()


def test_zeros_keep_their_sign(tmp_path: Path) -> None:
    zeros = torch.tensor([0.0, -0.0])
    paths = write_workers(tmp_path, [{"w": zeros}] * 3)

    average_files(paths, tmp_path / "mean.safetensors", {})

    mean, _ = read_tensors(tmp_path / "mean.safetensors")
    assert mean["w"].signbit().tolist() == [False, True]


def test_averaging_again_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [weights_of_worker(number) for number in range(3)])

    for name in ("a", "b"):
        average_files(paths, tmp_path / name, {"phase": "phase3"})

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def with_change(weights: Weights, change: str) -> Weights:
    changed = dict(weights)
    if change == "missing":
        del changed["half.weight"]
    elif change == "extra":
        changed["another.weight"] = torch.ones(2)
    elif change == "shape":
        changed["half.weight"] = weights["half.weight"].reshape(3, 100)
    elif change == "dtype":
        changed["half.weight"] = weights["half.weight"].float()
    return changed


@pytest.mark.parametrize("odd_one", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "tensor", "details"),
    [
        ("missing", "half.weight", ["has no tensor"]),
        ("extra", "another.weight", ["has no tensor"]),
        ("shape", "half.weight", ["[300]", "[3, 100]"]),
        ("dtype", "half.weight", ["float16", "float32"]),
    ],
)
def test_files_that_do_not_match_are_refused_by_file_and_tensor(
    tmp_path: Path, change: str, tensor: str, details: list[str], odd_one: int
) -> None:
    workers = [weights_of_worker(number) for number in range(3)]
    workers[odd_one] = with_change(workers[odd_one], change)
    paths = write_workers(tmp_path, workers)

    with pytest.raises(SwapError) as caught:
        average_files(paths, tmp_path / "out" / "mean.safetensors", {})

    wanted = [str(paths[odd_one]), repr(tensor), *details]
    assert [words for words in wanted if words not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    assert list(tmp_path.glob("out/*")) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", ["conv.weight", "half.weight", "brain.weight", "double.weight", "scalar"])
def test_a_value_that_is_not_finite_is_refused_by_file_and_tensor(tmp_path: Path, key: str, value: float) -> None:
    workers = [weights_of_worker(number) for number in range(3)]
    workers[1][key].view(-1)[-1] = value
    paths = write_workers(tmp_path, workers)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mean.safetensors").write_bytes(b"the result of before")

    with pytest.raises(SwapError) as caught:
        average_files(paths, tmp_path / "out" / "mean.safetensors", {})

    named = [part for part in map(str, paths) if part in str(caught.value)]
    assert named == [str(paths[1])]
    assert f"tensor {key!r} contains NaN or Inf" in str(caught.value)
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [b"the result of before"]


def test_a_value_that_is_not_finite_early_in_a_large_tensor_leaves_nothing_behind(tmp_path: Path) -> None:
    workers = [{"w": torch.ones(1 << 19)} for _ in range(2)]
    workers[1]["w"][7] = float("nan")
    paths = write_workers(tmp_path, workers)

    with pytest.raises(SwapError, match=r"seed_1/model\.safetensors: tensor 'w' contains NaN or Inf"):
        average_files(paths, tmp_path / "out" / "mean.safetensors", {})

    assert list(tmp_path.glob("out/*")) == []


def test_damage_is_told_before_what_it_did_to_the_mean(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [{"w": torch.full((1 << 19,), float("nan"))}, {"w": torch.ones(1 << 19)}])
    damaged = bytearray(paths[1].read_bytes())
    damaged[-1] ^= 1
    paths[1].write_bytes(damaged)

    with pytest.raises(SwapError, match=r"seed_1/model\.safetensors is damaged"):
        average_files(paths, tmp_path / "out" / "mean.safetensors", {})

    assert list(tmp_path.glob("out/*")) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_many_pieces_is_what_a_plain_sum_gives_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = (3, (1 << 19) + 5)
    workers = [{"w": torch.randn(shape, generator=generator).to(dtype)} for _ in range(5)]
    paths = write_workers(tmp_path, workers)

    average_files(paths, tmp_path / "mean.safetensors", {})

    total = torch.zeros(shape)
    for worker in workers:
        total += worker["w"]
    assert torch.equal(read_tensors(tmp_path / "mean.safetensors")[0]["w"], (total / 5).to(dtype))


def test_a_single_worker_that_is_not_finite_is_refused_too(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [{"w": torch.tensor([1.0, float("nan")])}])

    with pytest.raises(SwapError, match=r"seed_0/model\.safetensors: tensor 'w' contains NaN or Inf"):
        average_files(paths, tmp_path / "mean.safetensors", {})


def test_infinities_that_would_cancel_are_refused(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [{"w": torch.tensor([sign * float("inf")])} for sign in (1, -1)])

    with pytest.raises(SwapError, match=r"seed_0/model\.safetensors: tensor 'w' contains NaN or Inf"):
        average_files(paths, tmp_path / "mean.safetensors", {})


def test_a_damaged_worker_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [{"w": torch.ones(10)}] * 3)
    damaged = bytearray(paths[2].read_bytes())
    damaged[-1] ^= 1
    paths[2].write_bytes(damaged)

    with pytest.raises(SwapError, match=r"seed_2/model\.safetensors is damaged"):
        average_files(paths, tmp_path / "out" / "mean.safetensors", {})

    assert list(tmp_path.glob("out/*")) == []


def test_the_result_opens_with_plain_safetensors(tmp_path: Path) -> None:
    paths = write_workers(tmp_path, [{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}])

    average_files(paths, tmp_path / "mean.safetensors", {})

    with safe_open(tmp_path / "mean.safetensors", framework="np") as file:
        assert file.get_tensor("w").tolist() == [2.5]


PEAK_MEMORY = """
import os, sys, threading, time
from pathlib import Path
from swap_pipeline.averaging.mean import average_files

def resident_bytes():  # pages of mapped files too
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], resident_bytes())
        time.sleep(0.0005)

folder, paths = Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]]
average_files(paths[:1], folder / "warm up", {})
before, peak, done = resident_bytes(), [0], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
average_files(paths, folder / "mean", {})
done.set()
watcher.join()
print(peak[0] - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
def test_averaging_holds_a_few_tensors_in_memory_and_never_a_whole_network(tmp_path: Path) -> None:
    num_tensors, megabyte = 40, 1 << 20
    workers = [{f"t{n:02d}": torch.full((megabyte // 4,), float(w)) for n in range(num_tensors)} for w in range(4)]
    paths = write_workers(tmp_path, workers)
    # With a fixed threshold, memory that is freed goes back to the system at once and is not counted again.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, **allocator, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY, str(tmp_path), *map(str, paths)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert int(done.stdout) < num_tensors * megabyte / 2
    assert read_tensors(tmp_path / "mean")[0]["t39"][0].item() == 1.5


RANKS = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from swap_pipeline.averaging.mean import average_on_ranks
from swap_pipeline.engine.distributed import Group
from swap_pipeline.storage.tensor_files import write_tensors

folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
paths = sorted(folder.glob("seed_*/model.safetensors"))
children = []
for rank in range(num_ranks):
    if not (child := os.fork()):
        group = Group(rank=rank, world_size=num_ranks, device=torch.device("cpu"))
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
        write_tensors(folder / f"rank_{rank}", average_on_ranks(paths, group), {})
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_the_tensors_all_have_the_mean_of_one_process(tmp_path: Path, num_ranks: int) -> None:
    paths = write_workers(tmp_path, [weights_of_worker(number) for number in range(3)])
    average_files(paths, tmp_path / "by one", {})

    subprocess.run([sys.executable, "-c", RANKS, str(tmp_path), str(num_ranks)], cwd=ROOT, check=True)

    for rank in range(num_ranks):
        assert (tmp_path / f"rank_{rank}").read_bytes() == (tmp_path / "by one").read_bytes()


def test_tensors_are_shared_out_evenly() -> None:
    layout = {f"t{size}": Spec(torch.float32, (size,)) for size in (0, 1, 7, 100, 101, 250, 251, 999, 1000, 3000)}

    rank_of = share_out(layout, 3)

    loads = [sum(layout[key].num_bytes for key, rank in rank_of.items() if rank == of) for of in range(3)]
    assert rank_of.keys() == layout.keys()
    assert sorted(loads) == [4 * (1 + 101 + 250 + 1000), 4 * (7 + 100 + 251 + 999), 4 * 3000]
