"""Files from elsewhere: the weights that phase 1 starts from, and the description of a file that has none.

What depends on the number of classes is found by comparing the network with itself for another number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_pipeline.config.params import Model
from swap_pipeline.errors import SwapError, shown
from swap_pipeline.models.networks import NETWORKS, describe_network, shapes_of
from swap_pipeline.runtime.user_code import said_of
from swap_pipeline.storage.tensor_files import TensorFile, open_any

Shapes = Mapping[str, tuple[int, ...]]


def load_start(network: nn.Module, description: Mapping[str, Any], path: Path) -> None:
    """Fill a new network from any safetensors file of it; a last layer for other classes stays as it is."""
    with said_of("params.yaml: phase1.start"):
        file = open_any(path)
        state = network.state_dict()
        shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
        others = shapes_of({**description, "num_classes": description["num_classes"] + 1})
        fresh = _last_layer(file, shapes, others)
        if wrong := _mismatches(file, state, fresh):
            few = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise SwapError(f"{path} is not of the network {description['name']} that the model section names: {few}")
        taken = {key: file.read(key) for key in state if key in file.layout and key not in fresh}
        for key, tensor in taken.items():
            if not torch.isfinite(tensor).all():
                raise SwapError(f"{path}: tensor {shown(key)} contains NaN or Inf: take another file")
    network.load_state_dict({**state, **taken})
    if os.environ.get("RANK", "0") == "0":
        few = ", ".join(fresh[:4]) + (f" and {len(fresh) - 4} more" if len(fresh) > 4 else "")
        what = f"all but {few}, which stay new for {description['num_classes']} classes" if fresh else "all"
        print(f"weights of {path}: {what}", flush=True)


def _last_layer(file: TensorFile, shapes: Shapes, others: Shapes) -> list[str]:
    """The tensors that depend on the number of classes, if those of the file are for another number or missing."""
    last = [key for key in shapes if others[key] != shapes[key]]

    def found(key: str) -> tuple[int, ...] | None:
        return file.layout[key].shape if key in file.layout else None

    def may_differ(key: str) -> bool:
        shape, expected = found(key), shapes[key]
        if shape is None:
            return True
        sides = zip(shape, expected, others[key], strict=False)
        return len(shape) == len(expected) and all(
            side == wanted or wanted != changed for side, wanted, changed in sides
        )

    is_other = any(found(key) != shapes[key] for key in last) and all(map(may_differ, last))
    return last if is_other and len(last) < len(shapes) else []


def _mismatches(file: TensorFile, state: Mapping[str, torch.Tensor], fresh: list[str]) -> list[str]:
    """In words, in the network's order."""
    wrong = []
    for key, tensor in state.items():
        if key in fresh or (key not in file.layout and key.endswith("num_batches_tracked")):
            continue
        if key not in file.layout:
            wrong.append(f"it has no {shown(key)}")
        elif file.layout[key].shape != tuple(tensor.shape):
            wrong.append(f"its {shown(key)} is {list(file.layout[key].shape)} instead of {list(tensor.shape)}")
        elif file.layout[key].dtype.is_floating_point != tensor.dtype.is_floating_point:
            wrong.append(f"its {shown(key)} is {file.layout[key].dtype} instead of {tensor.dtype}")
    return wrong + [f"the network has no {shown(key)}" for key in sorted(file.layout.keys() - state.keys())]


def describe_file(model: Model, file: TensorFile) -> dict[str, Any]:
    """The description of a file without one: its channels and classes are read from the shapes of its tensors."""
    if model.name in NETWORKS and model.width is None:
        stem = file.layout.get("stem.0.weight")
        model = replace(model, width=stem.shape[0] if stem is not None and stem.shape else 1)
    description = describe_network(model, channels=3, num_classes=1000, where="--model")
    for key, other in (("num_classes", 1001), ("channels", 1)):
        changed = shapes_of({**description, key: other})
        places = (
            (name, side)
            for name, shape in shapes_of(description).items()
            for side in range(len(shape))
            if (shape[side], changed[name][side]) == (description[key], other) and name in file.layout
        )
        for name, side in places:
            found = file.layout[name].shape
            if len(found) == len(changed[name]):
                description[key] = found[side]
                break
    return description
