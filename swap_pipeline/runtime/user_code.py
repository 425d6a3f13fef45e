"""A user's own network, `package.module:function`: where its code is, and the function itself.

Does not import torch, so that the launcher can use it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swap_pipeline.errors import SwapError, did_you_mean


def is_own(name: str) -> bool:
    """Whether `model.name` means a function outside of this package, torchvision and timm."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix not in ("torchvision", "timm")


def source_file(name: str) -> Path | None:
    """The file that defines a user's own network, relative to the project's root if it is inside.

    None for all other networks. Imports nothing, not even the packages around the module.
    """
    if not is_own(name):
        return None
    with said_of("params.yaml"):
        module, _ = _split(name)
        spec = _find(module)
        if spec is None:
            raise SwapError(_no_module(name, module))
    if not spec.has_location or spec.origin is None:
        return None
    path, root = Path(spec.origin).resolve(), Path.cwd().resolve()
    return path.relative_to(root) if path.is_relative_to(root) else path


@contextlib.contextmanager
def said_of(file: str | Path) -> Iterator[None]:
    """Prefix errors about an entry with the name of its file."""
    try:
        yield
    except SwapError as error:
        text = str(error)
        raise SwapError(text if text.startswith(str(file)) else f"{file}: {text}") from error.__cause__


def import_function(name: str) -> Callable[..., Any]:
    """The function that builds the network; any problem with it is reported in one line."""
    module_name, function_name = _split(name)
    if _find(module_name) is None:
        raise SwapError(_no_module(name, module_name))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise SwapError(f"model.name is {name!r}: {module_name} cannot be imported: {cause(error)}") from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        it_has = f" (it has {', '.join(functions[:10])})" if functions else ""
        hint = did_you_mean(function_name, {each: f"{module_name}:{each}" for each in functions}, otherwise=it_has)
        raise SwapError(f"model.name is {name!r}: {module_name} has no {function_name}{hint}")
    if not callable(function):
        raise SwapError(
            f"model.name is {name!r}: {function_name} is not a function but {type(function).__name__}: "
            f"name the function that builds the network"
        )
    return function


def in_words(error: BaseException) -> str:
    """An error from third-party code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def cause(error: BaseException) -> str:
    """An error from the user's code in one line, with the last line of their code in the traceback."""
    here, files = str(Path(__file__).parents[1]), traceback.extract_tb(error.__traceback__)
    theirs = [each for each in files if Path(each.filename).is_file() and not each.filename.startswith(here)]
    places = [each for each in theirs if "site-packages" not in each.filename] or theirs
    if isinstance(error, SyntaxError) or not places:
        return in_words(error)  # a SyntaxError names its file and line
    return f"{in_words(error)} ({Path(places[-1].filename).name}, line {places[-1].lineno})"


def _split(name: str) -> tuple[str, str]:
    module, _, function = name.partition(":")
    if "/" in module or module.endswith(".py"):
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise SwapError(f"model.name is {name!r}: write it as Python imports it, {dotted}:{function or 'function'}")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise SwapError(f"model.name is {name!r}: your own network is written package.module:function")
    return module, function


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Like importlib.util.find_spec, but without importing the parent packages."""
    root = str(Path.cwd())
    if not {"", root} & set(sys.path):  # `python -m` puts it there, the `swap` command does not
        sys.path.insert(0, root)
    importlib.invalidate_caches()
    spec = None
    path = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        if count > 1 and path is None:
            return None  # not a package
        specs = (finder.find_spec(".".join(parts[:count]), path) for finder in sys.meta_path)
        spec = next((found for found in specs if found is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _no_module(name: str, module: str) -> str:
    parent, _, last = module.rpartition(".")
    around = _find(parent) if parent else None
    if parent and around is None:
        return _no_module(name, parent)
    folders = [str(Path.cwd())] if around is None else list(around.submodule_search_locations or [])
    known = {each.name: module.removesuffix(last) + each.name for each in pkgutil.iter_modules(folders)}
    if not parent:
        known |= {"torchvision": "torchvision", "timm": "timm"}
    hint = did_you_mean(last, known, otherwise="")
    return f"model.name is {name!r}: no module {module} in {Path.cwd()} or installed{hint}"
