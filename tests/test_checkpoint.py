"""Checkpoint files: the same bytes every time, whole or absent, and nothing damaged is believed."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from swap_pipeline.engine.results import read_point, write_point
from swap_pipeline.errors import SwapError
from swap_pipeline.storage import tensor_files
from swap_pipeline.storage.files import atomic_write, read_json, write_json
from swap_pipeline.storage.tensor_files import Spec, TensorFile, read_tensors, write_in_pieces, write_tensors
from swap_pipeline.storage.weights import load_weights
from swap_pipeline.training.snapshots import drop_snapshots, read_snapshot, write_snapshot

ROOT = Path(__file__).resolve().parents[1]
INFO = {"seed": 3, "phase": "phase2", "model": {"name": "resnet9", "width": 8}, "mean": [0.5, 0.25]}


def tensors_of_all_types() -> dict[str, torch.Tensor]:
    """Every type that a file can hold, and the shapes that are easily forgotten."""
    return {
        "weight": torch.linspace(-2, 2, 24).reshape(2, 3, 4),
        "double": torch.tensor([1 / 3, -1e300], dtype=torch.float64),
        "half": torch.tensor([[0.1], [65504.0]], dtype=torch.float16),
        "brain": torch.tensor([0.1, 3e38, -0.0], dtype=torch.bfloat16),
        "counter": torch.tensor(123456789012, dtype=torch.int64),
        "int32": torch.tensor([-5], dtype=torch.int32),
        "int16": torch.tensor([-300, 300], dtype=torch.int16),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "pixels": torch.arange(7, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "not_a_number": torch.tensor([float("nan"), float("inf")]),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert raw(found[key]) == raw(tensor), key


def small_file(path: Path) -> dict[str, torch.Tensor]:
    tensors = {"weight": torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "steps": torch.tensor(7)}
    write_tensors(path, tensors, {"model": "tiny", "seed": 5})
    return tensors


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_gives_back_every_type_and_shape_and_its_info(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", tensors_of_all_types(), INFO)

    tensors, info = read_tensors(tmp_path / "a.safetensors")

    assert_same_tensors(tensors, tensors_of_all_types())
    assert info == INFO


def test_a_file_opens_with_plain_safetensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", tensors_of_all_types(), INFO)

    tensors = load_file(tmp_path / "a.safetensors")

    assert_same_tensors(tensors, tensors_of_all_types())


def test_the_header_has_one_metadata_entry_and_aligned_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", tensors_of_all_types(), INFO)

    content = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])

    assert length % 8 == 0
    assert len(header["__metadata__"]) == 1
    starts = {key: header[key]["data_offsets"][0] for key in tensors_of_all_types()}
    assert {key: start % tensors_of_all_types()[key].itemsize for key, start in starts.items()} == dict.fromkeys(
        starts, 0
    )


def test_equal_contents_have_equal_bytes_whatever_the_order_they_are_handed_over_in(tmp_path: Path) -> None:
    tensors = tensors_of_all_types()

    write_tensors(tmp_path / "a.safetensors", tensors, INFO)
    write_tensors(tmp_path / "b.safetensors", dict(reversed(tensors.items())), dict(reversed(INFO.items())))

    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_equal_contents_have_equal_bytes_whatever_their_layout_in_memory(tmp_path: Path) -> None:
    plain = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    channels_last = plain.to(memory_format=torch.channels_last)
    slice_of_more = torch.cat([plain, plain + 1])[:2].requires_grad_()

    write_tensors(tmp_path / "a.safetensors", {"x": plain}, {})
    write_tensors(tmp_path / "b.safetensors", {"x": channels_last}, {})
    write_tensors(tmp_path / "c.safetensors", {"x": slice_of_more}, {})

    expected = (tmp_path / "a.safetensors").read_bytes()
    assert channels_last.stride() != plain.stride()
    assert (tmp_path / "b.safetensors").read_bytes() == expected
    assert (tmp_path / "c.safetensors").read_bytes() == expected


def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_checkpoint import INFO, tensors_of_all_types, write_tensors\n"
        "write_tensors(Path(sys.argv[1]), tensors_of_all_types(), INFO)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    write_tensors(tmp_path / "a.safetensors", tensors_of_all_types(), INFO)
    arguments = [sys.executable, "-c", code, str(tmp_path / "b.safetensors"), str(ROOT / "tests")]
    subprocess.run(arguments, env=environment, check=True, timeout=60)

    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("change", ["value", "sign of zero", "name", "info"])
def test_different_contents_have_different_bytes(tmp_path: Path, change: str) -> None:
    key = "y" if change == "name" else "x"
    value = {"value": 1.0, "sign of zero": -0.0}.get(change, 0.0)

    write_tensors(tmp_path / "a.safetensors", {"x": torch.tensor([0.0])}, {"seed": 1})
    write_tensors(tmp_path / "b.safetensors", {key: torch.tensor([value])}, {"seed": 2 if change == "info" else 1})

    assert (tmp_path / "a.safetensors").read_bytes() != (tmp_path / "b.safetensors").read_bytes()


def failing(key: str) -> Iterator[torch.Tensor]:
    yield torch.ones(500)
    if key == "b":
        raise RuntimeError("the disk is full")
    yield torch.ones(500)


def interrupted(key: str) -> Iterator[torch.Tensor]:
    yield torch.ones(1000)
    if key == "b":
        raise KeyboardInterrupt


def too_short(key: str) -> Iterator[torch.Tensor]:
    yield torch.ones(1000 if key == "a" else 999)


def too_long(key: str) -> Iterator[torch.Tensor]:
    yield torch.ones(1001)


TWO_TENSORS = {"a": Spec(torch.float32, (1000,)), "b": Spec(torch.float32, (1000,))}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("pieces_of", "error"),
    [
        (failing, RuntimeError),
        (interrupted, KeyboardInterrupt),
        (too_short, AssertionError),
        (too_long, AssertionError),
    ],
)
def test_a_writer_that_fails_midway_leaves_nothing_behind(
    tmp_path: Path, pieces_of: Callable[[str], Iterator[torch.Tensor]], error: type[BaseException], threads: int
) -> None:
    with pytest.raises(error):
        write_in_pieces(tmp_path / "x.safetensors", TWO_TENSORS, pieces_of, {}, threads=threads)

    assert names_in(tmp_path) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_a_writer_that_fails_midway_leaves_the_old_file_as_it_was(tmp_path: Path, threads: int) -> None:
    small_file(tmp_path / "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()

    with pytest.raises(RuntimeError):
        write_in_pieces(tmp_path / "x.safetensors", TWO_TENSORS, failing, {}, threads=threads)

    assert names_in(tmp_path) == ["x.safetensors"]
    assert (tmp_path / "x.safetensors").read_bytes() == before


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_tensors_in_pieces_by_any_number_of_threads_give_the_same_bytes_as_whole(tmp_path: Path, threads: int) -> None:
    tensors = {f"t{n:02d}": torch.arange(1000.0).reshape(10, 100) + n for n in range(20)}
    tensors |= {"b": torch.ones(3), "none": torch.ones(0, 2), "steps": torch.tensor(7)}
    layout = {key: Spec(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}

    def pieces_of(key: str) -> Iterator[torch.Tensor]:
        yield from tensors[key].reshape(-1).split(300)

    write_tensors(tmp_path / "whole", tensors, {"x": 1})
    write_in_pieces(tmp_path / "pieces", layout, pieces_of, {"x": 1}, threads=threads)

    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_disk_that_takes_and_gives_a_few_bytes_at_a_time_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.arange(100.0)}
    write_tensors(tmp_path / "at once", tensors, {})
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, place: pwrite(handle, data[:7], place))

    write_tensors(tmp_path / "bit by bit", tensors, {})

    assert (tmp_path / "bit by bit").read_bytes() == (tmp_path / "at once").read_bytes()
    part = bytearray(10)
    for content, whole in ((b"0123456789", True), (b"012345678", False)):
        (tmp_path / "x").write_bytes(content)
        with Stutterer(tmp_path / "x") as file:
            assert tensor_files._fill(memoryview(part), file) == whole
    assert part == b"0123456789"


class Stutterer(io.FileIO):
    """A file that gives three bytes at a time."""

    def readinto(self, part: Any) -> int:
        return super().readinto(memoryview(part)[:3])


def test_of_tensors_that_fail_in_several_threads_the_first_is_told(tmp_path: Path) -> None:
    second_failed = threading.Event()

    def both_fail(key: str) -> Iterator[torch.Tensor]:
        yield torch.ones(500)
        if key == "a":
            assert second_failed.wait(timeout=60)
        else:
            second_failed.set()
        raise RuntimeError(f"tensor {key}")

    with pytest.raises(RuntimeError, match="tensor a"):
        write_in_pieces(tmp_path / "x.safetensors", TWO_TENSORS, both_fail, {}, threads=2)

    assert names_in(tmp_path) == []


def test_a_file_is_not_there_under_its_name_until_it_is_whole(tmp_path: Path) -> None:
    seen = []

    def pieces_of(key: str) -> Iterator[torch.Tensor]:
        seen.append((tmp_path / "x.safetensors").exists())
        yield torch.ones(1000)
        seen.append((tmp_path / "x.safetensors").exists())

    write_in_pieces(tmp_path / "x.safetensors", TWO_TENSORS, pieces_of, {})

    assert seen == [False] * 4
    assert names_in(tmp_path) == ["x.safetensors"]


def test_a_writer_that_is_killed_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from swap_pipeline.storage.files import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half of the new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "x").write_bytes(b"old")

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=60,
    )

    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize("durable", [True, False])
def test_an_atomic_write_replaces_the_old_file_and_makes_missing_folders(tmp_path: Path, durable: bool) -> None:
    for content in (b"the old and longer", b"new"):
        with atomic_write(tmp_path / "a" / "b" / "x", durable=durable) as file:
            file.write(content)

    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"new"
    assert names_in(tmp_path / "a" / "b") == ["x"]


def test_json_is_written_sorted_and_comes_back(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"b": [1.5, None], "a": "é"})

    assert read_json(tmp_path / "x.json") == {"a": "é", "b": [1.5, None]}
    assert (tmp_path / "x.json").read_text().index('"a"') < (tmp_path / "x.json").read_text().index('"b"')


@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b""])
def test_damaged_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)

    with pytest.raises(SwapError) as caught:
        read_json(tmp_path / "x.json")

    assert str(tmp_path / "x.json") in str(caught.value)


def positions_in(content: bytes, where: str) -> list[int]:
    """The bytes of one part of a file; together, the parts are all of it."""
    header_end = 8 + int.from_bytes(content[:8], "little")
    metadata = range(content.index(b'"__metadata__"'), content.index(b'"}', 8) + 2)
    parts = {
        "length": range(8),
        "metadata": metadata,
        "header": [position for position in range(8, header_end) if position not in metadata],
        "data": range(header_end, len(content)),
    }
    return list(parts[where])


def complaint_about(path: Path) -> str:
    """What is said when all of a file is read; empty if it is believed."""
    try:
        read_tensors(path)
    except SwapError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ["length", "metadata", "header", "data"])
@pytest.mark.parametrize("flipped_bits", [0x01, 0x04, 0x0F, 0x20, 0x40, 0xFF])
def test_a_change_of_any_single_byte_is_refused_in_one_line_that_names_the_file(
    tmp_path: Path, where: str, flipped_bits: int
) -> None:
    path = tmp_path / "x.safetensors"
    small_file(path)
    content = path.read_bytes()

    complaints = {}
    for position in positions_in(content, where):
        damaged = bytearray(content)
        damaged[position] ^= flipped_bits
        path.write_bytes(damaged)
        complaints[position] = complaint_about(path)

    assert len(complaints) >= 8
    assert [position for position, words in complaints.items() if not words.startswith(str(path))] == []
    assert [position for position, words in complaints.items() if "\n" in words] == []


def test_a_file_cut_short_at_any_length_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    small_file(path)
    content = path.read_bytes()

    complaints = {}
    for length in range(len(content)):
        path.write_bytes(content[:length])
        complaints[length] = complaint_about(path)

    assert [length for length, words in complaints.items() if not words.startswith(f"{path} is damaged")] == []


def test_a_file_with_something_appended_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    small_file(path)
    path.write_bytes(path.read_bytes() + b"\0")

    with pytest.raises(SwapError, match="is damaged"):
        read_tensors(path)


def test_two_tensors_that_changed_places_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, {})
    content = path.read_bytes()
    path.write_bytes(content[:-8] + content[-4:] + content[-8:-4])

    with pytest.raises(SwapError, match="tensor 'a' does not match its digest"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"F32","shape":[2,2]', b'"I32","shape":[2,2]'), (b'"shape":[2,2]', b'"shape":[4,1]')]
)
def test_a_header_that_gives_a_tensor_another_type_or_shape_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "x.safetensors"
    small_file(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(old, new))

    with pytest.raises(SwapError, match="its header does not match its digest"):
        read_tensors(path)

    assert content.count(old) == 1
    assert load_file(path)["weight"].shape == ((4, 1) if b"[4,1]" in new else (2, 2))


def test_a_damaged_tensor_is_named_and_the_others_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = small_file(path)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)

    file = TensorFile(path)

    with pytest.raises(SwapError, match="tensor 'weight' does not match its digest"):
        file.read("weight")
    assert file.read("steps").item() == tensors["steps"].item()


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"nowhere\.safetensors is missing"):
        read_tensors(tmp_path / "nowhere.safetensors")


def test_safetensors_of_another_program_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})

    with pytest.raises(SwapError, match=r"x\.safetensors was not written by this pipeline"):
        read_tensors(tmp_path / "x.safetensors")


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "plain.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "it went off")))
    torch.save({"a": Bomb(tmp_path / "it went off")}, tmp_path / "torch.safetensors")

    for name in ("plain", "torch"):
        with pytest.raises(SwapError, match=rf"{name}\.safetensors is damaged"):
            read_tensors(tmp_path / f"{name}.safetensors")

    assert names_in(tmp_path) == ["plain.safetensors", "torch.safetensors"]


def test_no_module_can_unpickle() -> None:
    unpicklers = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    loaders = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("torch", "save")}

    found = []
    for path in [*(ROOT / "swap_pipeline").glob("*.py"), *(ROOT / "stages").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(path.name, name.name) for name in node.names if name.name.split(".")[0] in unpicklers]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in unpicklers:
                found.append((path.name, node.module))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found += [(path.name, node.attr) for pair in loaders if pair == (node.value.id, node.attr)]

    assert found == []


def tiny_network(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, width, 3, bias=False), nn.BatchNorm2d(width))


def test_weights_and_statistics_come_back_into_the_network(tmp_path: Path) -> None:
    trained, fresh = tiny_network(), tiny_network()
    trained[1].running_mean += 3
    trained[1].num_batches_tracked += 11
    write_tensors(tmp_path / "x.safetensors", trained.state_dict(), {})

    load_weights(fresh, tmp_path / "x.safetensors")

    assert_same_tensors(fresh.state_dict(), trained.state_dict())


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (tiny_network(width=4), ["'0.weight'", "[4, 1, 3, 3]", "[3, 1, 3, 3]"]),
        (tiny_network()[:1], ["'1.weight'"]),
        (nn.Sequential(*tiny_network(), nn.Linear(2, 2, bias=False)), ["'2.weight'"]),
    ],
    ids=["shape", "missing", "extra"],
)
def test_a_checkpoint_of_another_architecture_is_refused_by_file_and_tensor(
    tmp_path: Path, stored: nn.Module, words: list[str]
) -> None:
    network = tiny_network()
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    write_tensors(tmp_path / "x.safetensors", stored.state_dict(), {})

    with pytest.raises(SwapError) as caught:
        load_weights(network, tmp_path / "x.safetensors")

    assert [word for word in [str(tmp_path / "x.safetensors"), *words] if word not in str(caught.value)] == []
    assert_same_tensors(network.state_dict(), before)


def test_a_damaged_checkpoint_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    network = tiny_network()
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    write_tensors(tmp_path / "x.safetensors", tiny_network().state_dict(), {})
    damaged = bytearray((tmp_path / "x.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "x.safetensors").write_bytes(damaged)

    with pytest.raises(SwapError, match="is damaged"):
        load_weights(network, tmp_path / "x.safetensors")

    assert_same_tensors(network.state_dict(), before)


def write_snapshots(folder: Path, epochs: list[int]) -> None:
    for epoch in epochs:
        write_snapshot(folder, epoch, {"x": torch.full((50,), float(epoch))}, {"epoch": epoch})


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_there_is_no_snapshot_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path) is None
    assert read_snapshot(tmp_path / "missing") is None


def test_the_newest_snapshot_wins(tmp_path: Path) -> None:
    write_snapshots(tmp_path, [9, 10])

    found = read_snapshot(tmp_path)

    assert found is not None
    assert_same_tensors(found[0], {"x": torch.full((50,), 10.0)})
    assert found[1] == {"epoch": 10}


def test_the_two_newest_snapshots_are_kept(tmp_path: Path) -> None:
    write_snapshots(tmp_path, [8, 9, 10, 11])

    kept = [read_tensors(path)[1]["epoch"] for path in sorted(tmp_path.iterdir())]

    assert kept == [10, 11]


@pytest.mark.parametrize("harm", ["flipped", "cut", "emptied"])
def test_a_damaged_snapshot_is_set_aside_and_the_one_before_it_taken(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_snapshots(tmp_path, [4, 5])
    newest = max(tmp_path.iterdir())
    if harm == "flipped":
        damage(newest)
    else:
        newest.write_bytes(newest.read_bytes()[:-1] if harm == "cut" else b"")
    harmed = newest.read_bytes()

    found = read_snapshot(tmp_path)

    assert found is not None
    assert_same_tensors(found[0], {"x": torch.full((50,), 4.0)})
    assert found[1] == {"epoch": 4}
    assert not newest.exists()
    assert [path.read_bytes() for path in tmp_path.glob("*.damaged")] == [harmed]
    assert newest.name in capsys.readouterr().out


def test_a_snapshot_that_the_disk_does_not_give_out_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshots(tmp_path, [4, 5])

    def fail(*_: object, **__: object) -> object:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tensor_files, "safe_open", fail)
    with pytest.raises(SwapError, match=r"snapshot_000005.safetensors cannot be read: Input/output error"):
        read_snapshot(tmp_path)
    assert names_in(tmp_path) == ["snapshot_000004.safetensors", "snapshot_000005.safetensors"]


def test_when_every_snapshot_is_damaged_there_is_none(tmp_path: Path) -> None:
    write_snapshots(tmp_path, [4, 5])
    for path in list(tmp_path.iterdir()):
        damage(path)

    found = read_snapshot(tmp_path)

    assert found is None
    assert names_in(tmp_path) == ["snapshot_000004.damaged", "snapshot_000005.damaged"]


@pytest.mark.parametrize("attempt", range(20))
def test_ranks_that_meet_a_damaged_snapshot_together_all_go_on_from_the_one_before_it(
    tmp_path: Path, attempt: int
) -> None:
    num_ranks = 4
    write_snapshots(tmp_path, [1, 2])
    damage(tmp_path / "snapshot_000002.safetensors")
    together = Barrier(num_ranks)

    def rank(_: int) -> object:
        together.wait()
        return (read_snapshot(tmp_path) or ({}, {}))[1]

    with ThreadPoolExecutor(num_ranks) as ranks:
        found = list(ranks.map(rank, range(num_ranks)))

    assert found == [{"epoch": 1}] * num_ranks


def test_dropping_snapshots_leaves_other_files_alone(tmp_path: Path) -> None:
    write_snapshots(tmp_path, [1, 2])
    small_file(tmp_path / "model.safetensors")

    drop_snapshots(tmp_path)

    assert names_in(tmp_path) == ["model.safetensors"]


def test_a_file_that_is_replaced_keeps_its_old_contents_for_those_who_have_it_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.arange(5000.0)}, {})
    tensors, _ = read_tensors(path)

    write_tensors(path, {"a": torch.zeros(5000)}, {})

    np.testing.assert_array_equal(tensors["a"].numpy(), np.arange(5000, dtype=np.float32))


@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda path: path.write_text(path.read_text().replace("91.25", "99.25")),
        lambda path: path.write_text(path.read_text()[:-20]),
        lambda path: path.write_text("[]"),
    ],
    ids=["lost", "edited", "truncated", "something else"],
)
def test_a_point_that_was_kept_is_taken_only_as_it_was_written(harm: Callable[[Path], object], tmp_path: Path) -> None:
    path, point = tmp_path / "kept" / "epoch_1.json", {"label": "epoch_1", "test_accuracy": 91.25}
    write_point(path, point)
    assert read_point(path) == point
    harm(path)
    assert read_point(path) is None
