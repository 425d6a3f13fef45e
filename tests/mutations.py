"""Damaged and hostile files, drawn from a seed: hurt bytes, edited trees, edited tensors, dishonest headers.

Every mutant is a function of (seed, kind, number) alone, so that a failure can be looked at by itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import random
import resource
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from swap_pipeline.errors import SwapError
from swap_pipeline.storage import tensor_files

SEED = os.environ.get("FUZZ_SEED", "0")
COUNT = int(os.environ.get("FUZZ_COUNT", "2000"))
MAX_BYTES = 1 << 30
MAX_SECONDS = 60  # for one file of some kilobytes: a hang, whatever else the machine does

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A file that somebody or something has changed."""

    what: str
    content: bytes
    tensors: Tensors = field(default_factory=dict)
    """all that a reader of a tensor file may find in it, if it finds anything"""
    info: Any = None


def chance_of(kind: str, number: int) -> random.Random:
    return random.Random(f"{SEED} {kind} {number}")


# --- bytes


def hurt(content: bytes, other: bytes, chance: random.Random) -> tuple[str, bytes]:
    """What a bad disk, a full one, or a slip of the hand makes of a file; `other` is a file of the same kind."""
    data = bytearray(content)
    place = chance.randrange(len(data))
    length = chance.choice((1, 2, 8, 64, 500))
    part = bytes(data[place : place + length])
    what = chance.choice(
        ("flip", "flip", "flips", "byte", "cut", "cut", "append", "remove", "repeat", "zeros", "move", "splice", "swap")
    )
    if what == "flip":
        data[place] ^= 1 << chance.randrange(8)
    elif what == "flips":
        for _ in range(chance.choice((2, 10, 100))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif what == "byte":
        data[place] = chance.choice(b'\0\xff{}[]":,0919-.\n\t #&*!e')
    elif what == "cut":
        del data[place:]
    elif what == "append":
        data += chance.choice((b"\0", b" ", b"\n", other, bytes(100)))
    elif what == "remove":
        del data[place : place + length]
    elif what == "repeat":
        data[place:place] = part * chance.choice((1, 1, 3, 50))
    elif what == "zeros":
        data[place : place + length] = bytes(len(part))
    elif what == "move":
        del data[place : place + length]
        target = chance.randrange(len(data) + 1)
        data[target:target] = part
    elif what == "splice":
        data[place:] = other[place:]
    else:
        data[:] = other
    return f"{what} at {place}, {length} bytes", bytes(data)


# --- trees, as JSON and YAML hold them


def deep(levels: int) -> Any:
    tree: Any = []
    for _ in range(levels):
        tree = [tree]
    return tree


ODD: tuple[Callable[[], Any], ...] = (
    *(
        lambda value=value: value  # type: ignore[misc]
        for value in (None, True, False, -1, 0, 1, 2, 7, 1.5, -0.0, 1e-320, 1e308, 2**100, 2**63, -(2**63), 2**64)
    ),
    *(lambda value=value: float(value) for value in ("nan", "inf", "-inf")),  # type: ignore[misc]
    *(
        lambda value=value: value  # type: ignore[misc]
        for value in (
            "",
            "x",
            "7",
            "nan",
            "all",
            "../../x",
            "/etc/passwd",
            "a\nb",
            "\0",
            "é\u202e",
            "x" * 3000,
            "os:system",
        )
    ),
    list,
    dict,
    lambda: [[]],
    lambda: [0, 0.5, "x", None],
    lambda: {"x": {"y": [1]}},
    lambda: [[0, 1], [1, 0]],
    lambda: [1] * 300,
    lambda: deep(50),
    lambda: deep(400),
)


def edited(tree: Any, chance: random.Random) -> tuple[str, Any]:
    """The tree with one to three edits anywhere in it."""
    tree = copy.deepcopy(tree)
    said = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree, ()))
        parent, key, where = chance.choice(places) if places else ([tree], 0, ())
        what = chance.choice(("odd", "odd", "odd", "remove", "rename", "extra", "wrap", "swap", "repeat"))
        said.append(f"{what} {'.'.join(map(str, where))[:80]}")
        if what == "odd" or not places:
            parent[key] = chance.choice(ODD)()
        elif what == "remove":
            del parent[key]
        elif what == "rename" and isinstance(parent, dict):
            parent[str(key) + chance.choice(("x", " ", "s", "é"))] = parent.pop(key)
        elif what == "extra" and isinstance(parent, dict):
            parent[chance.choice(("x", "", "__class__", "0", "self"))] = copy.deepcopy(parent[key])
        elif what == "wrap":
            parent[key] = chance.choice(([parent[key]], {"x": parent[key]}, str(parent[key])))
        elif what == "repeat" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            other, name, _ = chance.choice(places)
            with contextlib.suppress(LookupError):  # the place may be inside of what was moved away
                parent[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(parent[key])
    return ", ".join(said), tree


def _places(tree: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    if len(where) > 20:
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key, (*where, key)
        yield from _places(value, (*where, key))


# --- files of tensors


def file_of(tensors: Mapping[str, torch.Tensor], info: Any) -> bytes:
    """What the pipeline writes for these, in memory."""
    layout = {key: tensor_files.Spec(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    entries: dict[str, Any] = {}
    data = b""
    for key in tensor_files.file_order(layout):
        raw = bytes(tensor_files._bytes_of(tensors[key]))
        shape = list(tensors[key].shape)
        offsets = [len(data), len(data) + len(raw)]
        entries[key] = {"dtype": tensor_files._DTYPES[tensors[key].dtype], "shape": shape, "data_offsets": offsets}
        data += raw
    digests = {key: xxhash.xxh3_64_hexdigest(tensor_files._bytes_of(tensor)) for key, tensor in tensors.items()}
    return tensor_files._header(entries, info, digests) + data


@dataclass(frozen=True)
class TensorsAndInfo:
    """A file of tensors, to make mutants of."""

    tensors: Tensors
    info: Any

    @functools.cached_property
    def content(self) -> bytes:
        return file_of(self.tensors, self.info)

    def mutant(self, what: str, content: bytes) -> Mutant:
        return Mutant(what=what, content=content, tensors=self.tensors, info=self.info)


def mutant_of_tensors(original: TensorsAndInfo, other: TensorsAndInfo, chance: random.Random) -> Mutant:
    """A mutant of a file of tensors; one in two has a header and digests that fit what was done."""
    content = original.content
    kind = chance.choice(
        ("hurt", "hurt", "hurt", "length", "header", "header", "tensors", "tensors", "info", "info", "other")
    )
    if kind == "hurt":
        what, damaged = hurt(content, other.content, chance)
        # A splice or a swap may leave the whole of the other file.
        return (other if damaged == other.content else original).mutant(what, damaged)
    if kind == "length":
        length = chance.choice((0, 1, 7, 8, len(content), len(content) - 8, 2**31, 2**32, 10**8, 2**63 - 1, 2**64 - 1))
        return original.mutant(f"length {length}", length.to_bytes(8, "little") + content[8:])
    if kind == "header":
        return original.mutant(*_dishonest_header(content, chance))
    if kind == "other":
        return other.mutant("another file", other.content)
    if kind == "info":
        what, info = edited(original.info, chance)
        return Mutant(
            what=f"info: {what}", content=file_of(original.tensors, info), tensors=original.tensors, info=info
        )
    what, tensors = _edited_tensors(original.tensors, chance)
    return Mutant(what=what, content=file_of(tensors, original.info), tensors=tensors, info=original.info)


def _edited_tensors(tensors: Tensors, chance: random.Random) -> tuple[str, Tensors]:
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    key = chance.choice(sorted(tensors))
    tensor = tensors[key]
    what = chance.choice(("NaN", "Inf", "-Inf", "type", "shape", "missing", "extra", "name", "value", "empty", "none"))
    if what in ("NaN", "Inf", "-Inf", "value") and tensor.numel():
        value = 17.0 if what == "value" or not tensor.is_floating_point() else float(what)
        tensor.view(-1)[chance.randrange(tensor.numel())] = value
    elif what == "type":
        tensors[key] = tensor.to(chance.choice(sorted(tensor_files._DTYPES, key=str)))
    elif what == "shape":
        tensors[key] = chance.choice((tensor.reshape(-1), tensor[None], torch.cat([tensor.reshape(-1)] * 2)))
    elif what == "missing":
        del tensors[key]
    elif what == "extra":
        tensors[chance.choice(("extra", "", "network.extra", "optimizer.extra", "é", "x" * 2000))] = torch.ones(3)
    elif what == "name":
        tensors[key + "x"] = tensors.pop(key)
    elif what == "empty":
        shape = chance.choice(((0,), (0, 3), (2**40, 0), (0, 2**31, 2**31)))
        tensors[key] = torch.zeros(0, dtype=tensor.dtype).reshape(shape)
    elif what == "none":
        tensors = {}
    return f"{what} {key}", tensors


def _dishonest_header(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """The header says what is not so, with a digest that fits its words."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    about = json.loads(header.pop("__metadata__")[tensor_files.METADATA_KEY])
    key = chance.choice(sorted(header))
    entry = header[key]
    what = chance.choice(("shape", "dtype", "offsets", "twice", "metadata", "deep", "about", "digest", "huge number"))
    if what == "shape":
        huge = (2**31, 2**40, 2**62, 2**63, 2**64, 10**30, -1, 1.5, "3", None)
        entry["shape"] = chance.choice(
            ([chance.choice(huge)], [*entry["shape"], chance.choice(huge)], [0, chance.choice(huge)])
        )
    elif what == "dtype":
        # Another width, or a type that nobody knows: with one of the same width it would just be another file.
        same = {"F64": "F64", "I64": "F64", "U8": "U8", "I8": "U8", "BOOL": "U8"}.get(entry["dtype"])
        names = ("F8_E4M3", "U16", "C64", "F4", "", "X", 7, None, "F64", "U8")
        entry["dtype"] = chance.choice([name for name in names if name != same])
    elif what == "offsets":
        first, last = entry["data_offsets"]
        entry["data_offsets"] = chance.choice(
            (
                [last, first],
                [first, last + 1],
                [first, 2**63],
                [-1, last],
                [first + 8, last + 8],
                [0],
                "x",
                [first, 2**64],
            )
        )
    digests = about["tensors"]
    text = ""
    if what == "about":
        name, about = edited(about, chance)
        what = f"about {name}"
    elif what == "digest":
        digests[key] = chance.choice(("0" * 16, "", None, 7, [], digests[key].upper() + "0"))
    elif what == "deep":
        text = "[" * chance.choice((100, 5000, 100_000))
    elif what == "huge number":
        text = '{"info":' + "9" * chance.choice((400, 5000, 200_000)) + "}"
    if what in ("shape", "dtype", "offsets", "twice", "metadata", "digest"):
        with contextlib.suppress(TypeError):
            about["header"] = tensor_files._header_digest(header, about["info"], digests)
    header = {"__metadata__": {tensor_files.METADATA_KEY: text or json.dumps(about)}, **header}
    if what == "metadata":
        header["__metadata__"] = chance.choice((None, [], "x", {}, {tensor_files.METADATA_KEY: 7}, {"a": "b"}))
    raw = json.dumps(header)
    if what == "twice":
        again = {**entry, "shape": entry["shape"][::-1] if len(entry["shape"]) > 1 else [1, *entry["shape"]]}
        raw = chance.choice(
            (
                raw[:-1] + "," + json.dumps({key: again})[1:],
                "{" + json.dumps({key: again})[1:-1] + "," + raw[1:],
                raw[:-1] + ',"__metadata__":{}}',
            )
        )
    encoded = raw.encode()
    encoded += b" " * (-len(encoded) % 8)
    return f"header: {what} of {key}", len(encoded).to_bytes(8, "little") + encoded + data


def equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Same names, types, shapes and bytes."""
    return found.keys() == expected.keys() and all(
        (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        and bytes(tensor_files._bytes_of(found[key])) == bytes(tensor_files._bytes_of(tensor))
        for key, tensor in expected.items()
    )


# --- images


def mutant_of_image(content: bytes, other: bytes, chance: random.Random) -> Mutant:
    """Hurt, or with another number in its header, and as a PNG with matching checksums: a lie instead of damage."""
    if chance.random() < 0.3:
        what, data = hurt(content, other, chance)
        return Mutant(what=what, content=data)
    data, lies = bytearray(content), []
    for _ in range(chance.choice((1, 1, 2, 4))):
        size = chance.choice((1, 2, 4))
        place = chance.randrange(min(len(data), chance.choice((32, 200))) - size)
        order = chance.choice(("little", "big"))
        value = chance.choice((0, 1, 2, 9, 20, 255, 12_000, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1)) % (1 << 8 * size)
        data[place : place + size] = value.to_bytes(size, order)  # type: ignore[arg-type]
        lies.append(f"{value} at {place}")
    return Mutant(what=", ".join(lies), content=_with_checksums(data) if content[1:4] == b"PNG" else bytes(data))


def _with_checksums(png: bytearray) -> bytes:
    start = 8
    while start + 12 <= len(png):
        end = start + 8 + int.from_bytes(png[start : start + 4], "big")
        png[end : end + 4] = zlib.crc32(png[start + 4 : end]).to_bytes(4, "big")
        start = end + 4
    return bytes(png)


# --- answers


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Within this block, more than a gigabyte of further memory is an error, and so is a file that takes a minute."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, hard))
    before = signal.signal(signal.SIGALRM, _hangs)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _hangs(number: int, frame: Any) -> None:
    raise TimeoutError(f"no answer in {MAX_SECONDS} s")


@dataclass(frozen=True)
class Tally:
    """How the answers came out."""

    refused: int = 0
    accepted: int = 0


def fuzz(
    kind: str, draw: Callable[[random.Random], Mutant], answer: Callable[[Mutant], str | None], *, count: int = COUNT
) -> Tally:
    """Draw `count` mutants and check the answer to each.

    `answer` raises a `SwapError`, or returns what is wrong with a result, or None. All problems are reported together,
    each with what is needed to draw it again.
    """
    tally, wrong = Tally(), []
    with limits():
        for number in range(count):
            mutant = draw(chance_of(kind, number))
            signal.alarm(MAX_SECONDS)
            try:
                complaint = answer(mutant)
                tally = replace(tally, accepted=tally.accepted + 1)
            except SwapError as error:
                complaint = _unclear(str(error))
                tally = replace(tally, refused=tally.refused + 1)
            except (Exception, RecursionError) as error:
                complaint = f"{type(error).__name__}: {str(error)[:200]}"
            if complaint:
                wrong.append(f"FUZZ_SEED={SEED} {kind} {number} ({mutant.what}): {complaint}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count} were answered wrongly:", *wrong[:20]])
    return tally


def _unclear(message: str) -> str | None:
    if "\n" in message or len(message) > 1000:
        return f"not one readable line: {message[:200]!r}"
    if "the file" not in message and ":" not in message:
        return f"says nothing of what to do: {message!r}"
    return None
