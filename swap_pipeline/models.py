"""A network by name, and a trained network by file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_pipeline.checkpoint import TensorFile, load_weights
from swap_pipeline.errors import SwapError


class ResNet9(nn.Module):
    """The network of the paper's CIFAR experiments: the DAWNBench entry of David Page (cifar10-fast).

    A stem and three stages that each double the channels and halve the image, a residual pair of convolutions after
    the first and the third; then the maximum over what is left of the image, a linear map without bias, and logits
    scaled by 1/8. 6,573,120 parameters at width 64 with 3 channels and 10 classes.
    """

    def __init__(self, *, width: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = _conv_bn_relu(channels, width)
        self.stage1 = nn.Sequential(_conv_bn_relu(width, 2 * width), nn.MaxPool2d(2), _Residual(2 * width))
        self.stage2 = nn.Sequential(_conv_bn_relu(2 * width, 4 * width), nn.MaxPool2d(2))
        self.stage3 = nn.Sequential(_conv_bn_relu(4 * width, 8 * width), nn.MaxPool2d(2), _Residual(8 * width))
        self.head = nn.Linear(8 * width, num_classes, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(images))))
        logits: torch.Tensor = self.head(x.amax(dim=(2, 3)))
        return logits * 0.125


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pair = nn.Sequential(_conv_bn_relu(channels, channels), _conv_bn_relu(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refined: torch.Tensor = self.pair(x)
        return x + refined


def _conv_bn_relu(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


NETWORKS = ("resnet9",)


def describe_network(*, name: str, width: int, channels: int, num_classes: int) -> dict[str, Any]:
    """All that it takes to build the network again; stands in every checkpoint's header."""
    if name not in NETWORKS:
        raise SwapError(f"params.yaml: model.name is {name!r}: choose one of {', '.join(NETWORKS)}")
    return {"name": name, "width": width, "channels": channels, "num_classes": num_classes}


def new_network(description: Mapping[str, Any], *, seed: int) -> nn.Module:
    """A network with the initial weights of `seed`; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(description)


def _build(description: Mapping[str, Any]) -> nn.Module:
    settings = dict(description)
    name = settings.pop("name")
    assert name == "resnet9", name
    return ResNet9(**settings)


def load_model(path: str | Path) -> nn.Module:
    """The network of a checkpoint in eval mode, rebuilt from the file alone.

    Its input is a float batch, N×C×H×W, that the caller has normalised with the `mean` and `std` of the header
    (`swap_pipeline.checkpoint.TensorFile(path).info`); `swap predict` does that for you.
    """
    path = Path(path)
    info = TensorFile(path).info
    description = info.get("model")
    if not isinstance(description, dict):
        raise SwapError(f"{path} is not a checkpoint of a network: its header does not describe one")
    if description.get("name") not in NETWORKS:
        raise SwapError(f"{path} holds a network {description.get('name')!r}, which this version does not know")
    network = new_network(description, seed=0)
    load_weights(network, path)
    return network.eval()
