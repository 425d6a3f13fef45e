"""Safetensors in, safetensors out: atomic, checked, without pickle.

A file is plain safetensors and opens with any reader of that format. Its header carries one metadata entry, sorted
JSON, because safetensors writes several entries in no fixed order: with equal contents, bytes are equal. The entry
holds the caller's `info` about the file and a digest of every tensor, so that a flipped bit is found when the tensor
is read, not when the model gives wrong results.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from swap_pipeline.errors import DamagedFileError, SwapError, shown
from swap_pipeline.storage.files import atomic_write, open_plain

METADATA_KEY = "swap_pipeline"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_PLACEHOLDER = "0" * 16


@dataclass(frozen=True)
class Spec:
    """What a tensor looks like, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], *, durable: bool = True
) -> None:
    """Write tensors that are all in memory."""
    layout = {key: Spec(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    write_in_pieces(path, layout, lambda key: [tensors[key]], info, durable=durable)


def file_order(layout: Mapping[str, Spec]) -> list[str]:
    """Keys in the order in which their bytes are stored: wide types first, so that every tensor is aligned."""
    return sorted(layout, key=lambda key: (-layout[key].dtype.itemsize, key))


def write_in_pieces(
    path: Path,
    layout: Mapping[str, Spec],
    pieces_of: Callable[[str], Iterable[torch.Tensor]],
    info: Mapping[str, Any],
    *,
    threads: int = 1,
    durable: bool = True,
) -> None:
    """Write tensors with no more than a piece of each in memory.

    `pieces_of(key)` yields the values of a tensor in order, in one or more pieces. With several `threads`, each
    writes a different tensor and calls `pieces_of`; the bytes are the same.
    """
    entries: dict[str, Any] = {}
    end = 0
    for key in file_order(layout):
        start, end = end, end + layout[key].num_bytes
        entries[key] = {
            "dtype": _DTYPES[layout[key].dtype],
            "shape": list(layout[key].shape),
            "data_offsets": [start, end],
        }
    # The digests come before the data but are known only after it: placeholders of the same length reserve the space.
    data_start = len(_header(entries, info, dict.fromkeys(entries, _PLACEHOLDER)))
    with atomic_write(path, durable=durable) as file, _map_by(threads) as mapping:

        def write(key: str) -> str:
            digest, (start, end) = xxhash.xxh3_64(), entries[key]["data_offsets"]
            for piece in pieces_of(key):
                assert piece.dtype == layout[key].dtype, key
                data = _bytes_of(piece)
                digest.update(data)
                _write_at(file.fileno(), data, data_start + start)
                start += len(data)
            assert start == end, key
            return digest.hexdigest()

        # In parallel, the largest first, so that no large one is left for a single thread at the end.
        order = sorted(entries, key=lambda key: -layout[key].num_bytes) if threads > 1 else list(entries)
        digests = dict(zip(order, mapping(write, order), strict=True))
        file.write(_header(entries, info, digests))


@contextlib.contextmanager
def _map_by(threads: int) -> Iterator[Callable[..., Iterable[str]]]:
    """`map` over this many threads; the first error is raised, and calls that have not begun are dropped."""
    if threads == 1:
        yield map
        return
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield pool.map


def _write_at(handle: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(handle, data, place)
        data, place = data[written:], place + written


def _header(entries: Mapping[str, Any], info: Mapping[str, Any], digests: Mapping[str, str]) -> bytes:
    # safetensors' own reader accepts entries in any order; they are sorted for stable bytes.
    about = {"info": info, "tensors": digests, "header": _header_digest(entries, info, digests)}
    header = {"__metadata__": {METADATA_KEY: _canonical(about)}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header_digest(entries: Mapping[str, Any], info: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    shapes = {key: [entry["dtype"], entry["shape"]] for key, entry in entries.items()}
    return digest_of([shapes, info, digests])


def digest_of(value: Any) -> str:
    """A digest of any JSON value."""
    return xxhash.xxh3_64_hexdigest(_canonical(value).encode())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class TensorFile:
    """An open file of ours: the header is checked on opening, each tensor when it is read.

    Tensors are views of the memory-mapped file, so several processes share one copy. With `of_any_origin`, other
    safetensors are opened too; these have no `info`, and no digests that their tensors could be compared with.
    """

    def __init__(self, path: Path, *, of_any_origin: bool = False) -> None:
        self.path = path
        try:
            open_plain(path).close()
            self._file = safe_open(path, framework="pt", device="cpu")
            self._slices = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118
            self.layout = {key: _spec_of(part) for key, part in self._slices.items()}
            metadata = self._file.metadata() or {}
        except FileNotFoundError:
            raise SwapError(f"{path} is missing: run `dvc repro`, or `dvc checkout` if it was made before") from None
        except OSError as error:
            raise UnreadableFileError(f"{path} cannot be read: {error.strerror or error}") from None
        except RuntimeError as error:  # torch's, if the file was removed after the check above
            if path.exists():
                raise DamagedFileError(path, str(error)) from None
            raise SwapError(f"{path} has just been removed") from None
        except (SafetensorError, KeyError, ValueError, OverflowError) as error:
            raise DamagedFileError(path, str(error)) from None
        self.info: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        if METADATA_KEY not in metadata:
            if of_any_origin:
                return
            raise SwapError(f"{path} was not written by this pipeline: it has no {METADATA_KEY!r} entry in its header")
        try:
            about = json.loads(metadata[METADATA_KEY])
            self.info = about["info"]
            self._digests = about["tensors"]
            stated = about["header"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedFileError(path, "its header cannot be read") from None
        if not isinstance(self.info, dict) or not isinstance(self._digests, dict):
            raise DamagedFileError(path, "its header is malformed")
        entries = {key: {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape)} for key, spec in self.layout.items()}
        if stated != _header_digest(entries, self.info, self._digests) or set(self._digests) != set(self.layout):
            raise DamagedFileError(path, "its header does not match its digest")

    def read(self, key: str) -> torch.Tensor:
        """One tensor, checked against its digest."""
        try:
            tensor = self._file.get_tensor(key)
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:  # torch's, for odd shapes
            raise DamagedFileError(self.path, str(error)) from None
        assert isinstance(tensor, torch.Tensor)
        if key in self._digests and xxhash.xxh3_64_hexdigest(_bytes_of(tensor)) != self._digests[key]:
            raise self._mismatch(key)
        return tensor

    def pieces(self, key: str, *, into: torch.Tensor) -> Iterator[torch.Tensor]:
        """One tensor's values in order, as many at a time as fit into the flat tensor `into`; each piece overwrites it.

        Reads, while `read` maps: mapped pages count as this process's memory for as long as the file is open. The
        digest is checked after the last piece; until then, the data may be damaged.
        """
        spec = self.layout[key]
        assert into.dtype == spec.dtype
        window, digest = _bytes_of(into), xxhash.xxh3_64()
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._starts[key])
                for first in range(0, spec.num_elements, len(into)):
                    count = min(len(into), spec.num_elements - first)
                    part = window[: count * spec.dtype.itemsize]
                    if not _fill(part, file):
                        raise DamagedFileError(self.path, f"it ends in the middle of tensor {shown(key)}")
                    digest.update(part)
                    yield into[:count]
        except OSError as error:
            raise SwapError(f"{self.path} cannot be read: {error.strerror or error}") from None
        if key in self._digests and digest.hexdigest() != self._digests[key]:
            raise self._mismatch(key)

    @functools.cached_property
    def _starts(self) -> dict[str, int]:
        """Where the bytes of each tensor begin in the file."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        return {key: 8 + length + header[key]["data_offsets"][0] for key in self.layout}

    def _mismatch(self, key: str) -> DamagedFileError:
        return DamagedFileError(self.path, f"tensor {shown(key)} does not match its digest")


def _fill(part: memoryview, file: io.FileIO) -> bool:
    """Read until `part` is full, since network disks may return less at a time; False if the file is too short."""
    while part and (count := file.readinto(part)):
        part = part[count:]
    return not part


def _spec_of(part: Any) -> Spec:
    if part.get_dtype() not in _TORCH_DTYPES:
        raise ValueError(f"it has tensors of type {part.get_dtype()}, which are not supported")
    return Spec(_TORCH_DTYPES[part.get_dtype()], tuple(part.get_shape()))


def open_any(path: Path) -> TensorFile:
    """A safetensors file from anywhere; what is wrong with it is not for `dvc repro` to repair."""
    try:
        return TensorFile(path, of_any_origin=True)
    except DamagedFileError as error:
        raise SwapError(f"{path} is not a safetensors file that can be used ({error.reason}){_way_out(path)}") from None
    except UnreadableFileError:
        raise
    except SwapError:
        raise SwapError(f"{path} not found") from None


def _way_out(path: Path) -> str:
    with open_plain(path) as file:
        is_pickle = file.read(4).startswith((b"PK\x03\x04", b"\x80"))  # a zip archive, or a bare pickle
    if not is_pickle:
        return ": take another file"
    return (
        ": it looks like a file of torch.save, which could run code; convert it with "
        "safetensors.torch.save_file(torch.load(path, weights_only=True), new_path), where its weights are on top"
    )


class UnreadableFileError(SwapError):
    """A file that may be intact, but cannot be read from the disk now."""


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a file, and its info."""
    file = TensorFile(path)
    return {key: file.read(key) for key in file.layout}, file.info
