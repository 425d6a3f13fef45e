"""A YAML file as frozen, checked objects. Each error names the dotted key, the value found and the fix."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, TypeVar

from swap_pipeline.errors import SwapError, did_you_mean, shown
from swap_pipeline.storage.files import read_yaml

# Far more than any params file has: anything beyond is a mistake or a YAML bomb.
_MAX_BYTES = 1 << 18
_MAX_VALUES = 20_000
_MAX_DEPTH = 20


Kind = TypeVar("Kind")


def knob(
    doc: str,
    *,
    default: Any = dataclasses.MISSING,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare a parameter: its meaning, its valid values, and its default if the file does not mention it."""
    return field(default=default, metadata={"doc": doc, "minimum": minimum, "above": above, "maximum": maximum})


def read_tree(path: Path) -> Any:
    """The contents of a params file, not checked yet."""
    try:
        return read_yaml(path, max_bytes=_MAX_BYTES)
    except FileNotFoundError:
        raise SwapError(f"{path} not found: run this from the project's root folder") from None
    except OSError as error:
        raise SwapError(f"{path} cannot be read: {error.strerror or error}") from None


def parse_as(kind: type[Kind], tree: Any, *, file: str) -> Kind:
    """Check each entry of a nested dict, as read from `file`, against what `kind` declares."""
    try:
        _check_extent(tree)
        parsed = _parse(kind, tree, key="")
    except SwapError as error:
        raise SwapError(f"{file}: {error}") from None
    assert isinstance(parsed, kind)
    return parsed


def _check_extent(tree: Any) -> None:
    """YAML aliases can expand a few lines into an endless tree: refuse more than any params file needs."""
    num_values = 0
    layer = [tree]
    for _ in range(_MAX_DEPTH):
        parts = [[*part.keys(), *part.values()] if isinstance(part, dict) else part for part in layer]
        layer = [value for part in parts if isinstance(part, list) for value in part]
        num_values += len(layer)
        if not layer:
            return
        if num_values > _MAX_VALUES:
            raise SwapError(f"the file has more than {_MAX_VALUES:,} values: it cannot be a params file")
    raise SwapError(f"the file is nested more than {_MAX_DEPTH} deep, or an entry contains itself: write it flat")


def _parse(kind: Any, value: Any, *, key: str, limits: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Turn `value`, found at the dotted `key`, into `kind`."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _parse_union(typing.get_args(kind), value, key=key, limits=limits)
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise SwapError(f"{key} is {shown(value)}, but must be a section with entries of its own")
        return dict(value)
    if dataclasses.is_dataclass(kind):
        return _parse_section(kind, value, key=key)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise SwapError(f"{key} is {shown(value)}: choose one of {', '.join(choices)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise SwapError(f"{key} is {shown(value)}: write a list, for example {_example(kind)}")
        if typing.get_args(kind)[-1] is not Ellipsis:
            return _parse_pair(typing.get_args(kind), value, key=key, limits=limits)
        item_kind = typing.get_args(kind)[0]
        return tuple(_parse(item_kind, item, key=f"{key}[{i}]", limits=limits) for i, item in enumerate(value))
    return _parse_scalar(kind, value, key=key, limits=limits)


def _example(kind: Any) -> str:
    return "[0, 1, 2, 3]" if typing.get_args(kind)[0] is int else "[[0, 0.1], [10, 0.0]]"


def _parse_union(kinds: tuple[Any, ...], value: Any, *, key: str, limits: Mapping[str, Any]) -> Any:
    """Parse the value as the one of the possible kinds that it looks like."""
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds:
        origin = typing.get_origin(kind)
        if (origin is tuple and isinstance(value, list)) or (origin is Literal and value in typing.get_args(kind)):
            return _parse(kind, value, key=key, limits=limits)
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    try:
        return _parse(kinds[0], value, key=key, limits=limits)
    except SwapError as error:
        if words and isinstance(value, str):
            raise SwapError(f"{error}, or {', '.join(words)}") from None
        raise


def _parse_pair(kinds: tuple[Any, ...], value: list[Any], *, key: str, limits: Mapping[str, Any]) -> Any:
    """An epoch and its value; the limits apply to the value."""
    if len(value) != 2:
        raise SwapError(f"{key} is {shown(value)}: write a pair, [epoch, value]")
    epoch = _parse_scalar(kinds[0], value[0], key=f"{key}[0]", limits={"minimum": 0})
    return epoch, _parse(kinds[1], value[1], key=f"{key}[1]", limits=limits)


def _parse_section(kind: Any, value: Any, *, key: str) -> Any:
    where = f"{key}." if key else ""
    if not isinstance(value, dict):
        raise SwapError(f"{key or 'the file'} must be a section with entries of its own, not {shown(value)}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in fields:
            plain = isinstance(name, str) and name.isprintable() and len(name) <= 80
            raise SwapError(
                f"{where}{name if plain else shown(name)} is not a known parameter{did_you_mean(name, [*fields])}"
            )
    for name, declared in fields.items():
        if name not in value and declared.default is dataclasses.MISSING:
            doc = declared.metadata.get("doc")
            raise SwapError(f"{where}{name} is missing{f' ({doc})' if doc else ''}: add it")
    return kind(
        **{
            name: _parse(hints[name], value[name], key=f"{where}{name}", limits=declared.metadata)
            for name, declared in fields.items()
            if name in value
        }
    )


def _parse_scalar(kind: type, value: Any, *, key: str, limits: Mapping[str, Any]) -> Any:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    accepted = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}[kind]
    # bool is an int to Python, but `batch_size: true` is a slip.
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        hint = " (write it without quotes)" if kind in (int, float) and _is_number(value) else ""
        raise SwapError(f"{key} is {shown(value)}, but must be {names[kind]}{hint}")
    if kind is str or kind is bool:
        return value
    assert isinstance(value, int | float)
    if abs(value) > sys.float_info.max or math.isnan(value):
        raise SwapError(f"{key} is {shown(value)}, but must be finite")
    minimum, above, maximum = limits.get("minimum"), limits.get("above"), limits.get("maximum")
    if minimum is not None and value < minimum:
        raise SwapError(f"{key} is {shown(value)}, but must be at least {minimum}")
    if above is not None and value <= above:
        raise SwapError(f"{key} is {shown(value)}, but must be above {above}")
    if maximum is not None and value > maximum:
        raise SwapError(f"{key} is {shown(value)}, but must be at most {maximum}")
    return kind(value)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)
