"""Facts that a plan needs, of the data, the network and the devices.

Networks are built and run on torch's `meta` device, where tensors have shapes but no values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from swap_pipeline.cli.plan.plan import DataFacts, Devices, NetworkFacts, Size
from swap_pipeline.config.params import Data, Model, Optimizer, Params
from swap_pipeline.datasets.image_folders import Tree, scan
from swap_pipeline.datasets.parts import num_trained_on
from swap_pipeline.datasets.prepare import FACTS, TEST_FOLDERS, no_copies, unknown
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.launch.devices import share_of_phase1, share_of_worker, this_machine
from swap_pipeline.launch.jobs import Machine
from swap_pipeline.models.networks import describe_network, new_network
from swap_pipeline.runtime import environment
from swap_pipeline.runtime.environment import find_root
from swap_pipeline.storage.image_files import shape_of
from swap_pipeline.training.optimizers.named import new_optimizer

# Batch norm needs more than one value per channel, even where the image has shrunk to a single pixel.
_IMAGES = 2
# How many image headers of a folder are read, to see whether the images differ in size.
_SAMPLE = 20_000


def data_facts(data: Data) -> DataFacts:
    """Facts of a named data set, or of a folder of images."""
    root = find_root(data.root)
    if data.name in TEST_FOLDERS and (root / "train").is_dir():
        return _limited(_folder_facts(data, scan(root, test_names=TEST_FOLDERS[data.name])), data)
    if data.name in FACTS:
        facts = FACTS[data.name]
        channels, height, width = facts.shape
        return _limited(
            DataFacts(
                name=data.name,
                num_train=facts.num_train,
                num_test=facts.num_test,
                num_classes=facts.num_classes,
                channels=channels,
                size=None if height is None or width is None else (height, width),
                source=None,
            ),
            data,
        )
    if data.name not in TEST_FOLDERS:
        raise unknown(data.name)
    return _limited(_folder_facts(data, scan(root)), data)  # raises an error that says what is missing


def _folder_facts(data: Data, tree: Tree) -> DataFacts:
    paths = [*tree.train.paths, *tree.test.paths]
    sample = [shape_of(tree.root / path) for path in paths[:: math.ceil(len(paths) / _SAMPLE)]]
    channels = 3 if data.name == "imagenet" else max(channels for channels, _, _ in sample)
    _, height, width = sample[0]
    used = len(tree.train) if data.train_images == "all" else data.train_images + data.validation_images
    num_bytes = (min(used, len(tree.train)) + len(tree.test)) * channels * height * width
    in_memory = len({shape[1:] for shape in sample}) == 1 and num_bytes <= data.max_gb_in_memory * 1e9
    return DataFacts(
        name=data.name,
        num_train=len(tree.train),
        num_test=len(tree.test),
        num_classes=len(tree.classes),
        channels=channels,
        size=(height, width) if in_memory else None,
        source=f"counted in {tree.root}",
    )


def _limited(facts: DataFacts, data: Data) -> DataFacts:
    if data.copies and facts.size is not None:
        raise no_copies(data)
    num_train = num_trained_on(facts.num_train, data)
    return dataclasses.replace(facts, num_train=num_train, num_validation=data.validation_images, copies=data.copies)


def planned_devices(params: Params, num_gpus: int) -> Devices:
    """That many GPUs, which need not exist."""
    machine = Machine(device_type="cuda", devices=tuple(map(str, range(num_gpus))), cores=num_gpus)
    return _devices(params, machine, at_most=None, max_workers=None)


def devices_here(params: Params) -> Devices:
    """What `dvc repro` would use on this machine."""
    machine = this_machine()
    max_workers = environment.max_workers_at_once(default=machine.num_devices)
    return _devices(params, machine, at_most=environment.num_processes(), max_workers=max_workers)


def _devices(params: Params, machine: Machine, *, at_most: int | None, max_workers: int | None) -> Devices:
    return Devices(
        kind="GPU" if machine.device_type == "cuda" else "CPU core",
        count=machine.num_devices,
        phase1=share_of_phase1(machine, shards=params.phase1.shards, at_most=at_most),
        worker=share_of_worker(machine, shards=params.phase2.shards),
        max_workers=max_workers,
    )


def network_facts(model: Model, *, channels: int, num_classes: int, sizes: Sequence[Size]) -> NetworkFacts:
    """Parameters, bytes, and FLOPs for each of these image sizes."""
    description = describe_network(model, channels=channels, num_classes=num_classes)
    try:
        with torch.device("meta"):
            network = new_network(description, seed=0)
        flops = {size: count_flops(network, (channels, *size)) for size in sizes}
    except Exception:
        # Some networks need values: build and run it for real, so that an error is a real one.
        network = new_network(description, seed=0)
        flops = {size: _count_or_refuse(network, model.name, (channels, *size)) for size in sizes}
    return NetworkFacts(
        name=model.name,
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        gradient_bytes=sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad),
        state_bytes=sum(tensor.nbytes for tensor in network.state_dict().values()),
        num_batch_norms=sum(
            isinstance(module, _BatchNorm) and module.running_mean is not None for module in network.modules()
        ),
        flops=flops,
    )


def optimizer_bytes(optimizer: Optimizer, network: NetworkFacts) -> int:
    """Of its state: as much for each byte of gradient as it has for a layer."""
    layer = nn.Linear(512, 512, bias=False)
    state = new_optimizer(layer, optimizer, Scaler("fp32", torch.device("cpu"))).layout()
    num_bytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return network.gradient_bytes * num_bytes // layer.weight.nbytes


def count_flops(network: nn.Module, shape: tuple[int, int, int]) -> int:
    """Counted by torch for each operator of a forward pass."""
    device = next(network.parameters()).device
    network.train()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(_IMAGES, *shape, device=device))
    return int(counter.get_total_flops()) // _IMAGES


def _count_or_refuse(network: nn.Module, name: str, shape: tuple[int, int, int]) -> int:
    try:
        return count_flops(network, shape)
    except SwapError:
        raise
    except Exception as error:
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise SwapError(f"model {name} cannot be trained on images of {'×'.join(map(str, shape))}: {what}") from error
