"""A network's weights from one of our files; one for another architecture is refused, naming a tensor."""

from __future__ import annotations

from pathlib import Path

import torch

from swap_pipeline.errors import SwapError, shown
from swap_pipeline.storage.tensor_files import TensorFile


def load_weights(network: torch.nn.Module, path: Path) -> None:
    """Fill `network` from a checkpoint; one for another architecture is refused, naming a tensor."""
    file = TensorFile(path)
    check_fits(network, file)
    network.load_state_dict({key: file.read(key) for key in file.layout})


def check_fits(network: torch.nn.Module, file: TensorFile) -> None:
    """Refuse a checkpoint for another architecture, without reading its tensors."""
    expected = network.state_dict()
    for key, tensor in expected.items():
        if key not in file.layout:
            raise _other_architecture(file, f"it has no tensor {shown(key)}")
        if file.layout[key].shape != tuple(tensor.shape):
            found, wanted = list(file.layout[key].shape), list(tensor.shape)
            raise _other_architecture(file, f"tensor {key!r} has shape {found} instead of {wanted}")
        if file.layout[key].dtype != tensor.dtype:
            types = f"{file.layout[key].dtype} instead of {tensor.dtype}".replace("torch.", "")
            raise _other_architecture(file, f"tensor {key!r} is {types}")
    extra = sorted(set(file.layout) - set(expected))
    if extra:
        raise _other_architecture(file, f"it has a tensor {shown(extra[0])} that the network does not have")


def _other_architecture(file: TensorFile, reason: str) -> SwapError:
    if file.info:
        remedy = "set the model section of params.yaml to what it was trained with, or train again"
    else:
        remedy = "name the network that it was trained with"
    return SwapError(f"{file.path} belongs to another network ({reason}): {remedy}")
