"""python docs/generate.py

Write the generated parts of docs/params.md and docs/api.md, between their markers. `make docs` does it; a test fails
if they are stale.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from swap_pipeline.config.params import Params

ROOT = Path(__file__).parents[1]
PUBLIC = (
    ("swap_pipeline", "models/networks.py", "load_model"),
    ("swap_pipeline.config.reading", "config/reading.py", "read_params"),
    ("swap_pipeline.storage.tensor_files", "storage/tensor_files.py", "TensorFile"),
    ("swap_pipeline.storage.tensor_files", "storage/tensor_files.py", "TensorFile.read"),
    ("swap_pipeline.averaging.mean", "averaging/mean.py", "average_files"),
)
"""What others may build on: where it is imported from, its file, its name."""


def params_tables() -> str:
    """A table for each section of a params file, from the declarations."""
    hints = typing.get_type_hints(Params)
    plain = [field for field in dataclasses.fields(Params) if not dataclasses.is_dataclass(hints[field.name])]
    lines = ["## Top level", "", *_table(Params, plain)]
    for field in dataclasses.fields(Params):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            doc = inspect.getdoc(kind)
            readers = f"Read by {', '.join(_readers(field.name))}."
            lines += ["", f"## {field.name}", "", f"{doc} {readers}", "", *_table(kind, dataclasses.fields(kind))]
    return "\n".join(lines)


def _table(kind: Any, fields: typing.Iterable[Any]) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    yield "| param | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for field in fields:
        default = "required" if field.default is dataclasses.MISSING else f"`{_yaml(field.default)}`"
        yield f"| `{field.name}` | {_values(hints[field.name], field.metadata)} | {default} | {_doc(field)} |"


def _doc(field: Any) -> str:
    return html.escape(field.metadata["doc"], quote=False)


def _readers(section: str) -> list[str]:
    """Stages that read a section; `check` and `report` read the whole file."""
    stages = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
    listed = {name: [str(entry).partition(".")[0] for entry in stage["params"]] for name, stage in stages.items()}
    return [f"`{name}`" for name in stages if section in listed[name] or f"${{{section}." in str(stages[name])]


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[]" if value == () else str(value).removesuffix(".0")


def _values(kind: Any, limits: Any) -> str:
    """The type of a param and its range, in words."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
        return " or ".join(dict.fromkeys(_values(part, limits) for part in parts))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return "list of `[epoch, value]`" if typing.get_origin(item) is tuple else f"list of {_values(item, {})}s"
    if typing.get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "section"
    name = {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}[kind]
    return f"{name}{_range(limits)}" if kind in (int, float) else name


def _range(limits: Any) -> str:
    low, above, high = limits.get("minimum"), limits.get("above"), limits.get("maximum")
    parts = [f" ≥ {low}" if low is not None else "", f" > {above}" if above is not None else ""]
    # Limits that only keep numbers representable are no help to a reader.
    return "".join([*parts, f", ≤ {high}" if high is not None and 1 <= high < 1 << 16 else ""])


def public_functions() -> str:
    """Signature and docstring of what is public, read from the source without importing torch."""
    return "\n\n".join(_entry(module, ROOT / "swap_pipeline" / file, name) for module, file, name in PUBLIC)


def _entry(module: str, path: Path, name: str) -> str:
    outer, _, inner = name.partition(".")
    node: Any = _find(ast.parse(path.read_text(encoding="utf-8")), outer)
    node = _find(node, inner) if inner else node
    function = _find(node, "__init__") if isinstance(node, ast.ClassDef) else node
    function.args.args = [each for each in function.args.args if each.arg != "self"]
    returns = f" -> {ast.unparse(node.returns)}" if isinstance(node, ast.FunctionDef) and node.returns else ""
    signature = f"{name}({ast.unparse(function.args)}){returns}"
    doc = textwrap.dedent(ast.get_docstring(node) or "")
    imported = "" if inner else f"from {module} import {name}\n\n"
    return f"## {name}\n\n```python\n{imported}{signature}\n```\n\n{doc}"


def _find(tree: Any, name: str) -> Any:
    return next(node for node in tree.body if getattr(node, "name", None) == name)


def with_generated(page: str, text: str) -> str:
    """The page with what stands between its markers replaced."""
    return re.sub(r"(<!-- generated -->\n).*(<!-- end -->)", lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.S)


PAGES = {"params.md": params_tables, "api.md": public_functions}

if __name__ == "__main__":
    for file, make in PAGES.items():
        path = ROOT / "docs" / file
        path.write_text(with_generated(path.read_text(encoding="utf-8"), make()), encoding="utf-8")
