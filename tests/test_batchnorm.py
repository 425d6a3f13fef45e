"""Batch-norm statistics against moments computed by hand, in float64, from captured activations."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from swap_pipeline.config.params import Augment
from swap_pipeline.data.images import Images
from swap_pipeline.engine.batchnorm import batches_of_rank, recompute_statistics
from swap_pipeline.engine.distributed import Group, process_group
from swap_pipeline.models.networks import ResNet9

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ALONE = Group(rank=0, world_size=1, device=CPU)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def mixed_network() -> nn.Sequential:
    """Dropout before two of three batch-norm layers, a different momentum in each, statistics of some other data."""
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.5),
        nn.Conv2d(4, 5, 3),
        nn.BatchNorm2d(5, momentum=None),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(5, 6),
        nn.BatchNorm1d(6, momentum=0.3),
    )
    for layer in batch_norms(network).values():
        nn.init.uniform_(layer.weight, 0.5, 2.0)
        nn.init.normal_(layer.bias)
        layer.running_mean.normal_(50, 9)
        layer.running_var.uniform_(3, 900)
        layer.num_batches_tracked.fill_(17)
    return network


def batches_with_a_short_last_one() -> list[torch.Tensor]:
    """8, 8 and 3 images; each batch has a mean and a spread of its own, the short one more than any."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((8, 0.0, 1.0), (8, 2.0, 0.5), (3, -5.0, 4.0))
    return [torch.randn(count, 2, 7, 6, generator=generator) * std + mean for count, mean, std in shapes]


def batch_norms(network: nn.Module) -> dict[str, nn.BatchNorm2d]:
    return {name: module for name, module in network.named_modules() if isinstance(module, BATCH_NORMS)}


def captured_inputs(network: nn.Module, batches: Sequence[torch.Tensor]) -> dict[str, list[NDArray[np.float64]]]:
    """What each batch-norm layer is given, batch by batch, as values × channels, while it is in training mode."""
    network = copy.deepcopy(network).eval()
    captured: dict[str, list[NDArray[np.float64]]] = {}
    for name, layer in batch_norms(network).items():
        layer.train()
        inputs = captured.setdefault(name, [])

        def capture(_: nn.Module, given: tuple[torch.Tensor], inputs: list[NDArray[np.float64]] = inputs) -> None:
            inputs.append(given[0].detach().double().movedim(1, -1).flatten(0, -2).numpy().copy())

        layer.register_forward_pre_hook(capture)
    with torch.no_grad():
        for batch in batches:
            network(batch)
    return captured


def statistics_by_hand(network: nn.Module, batches: Sequence[torch.Tensor]) -> dict[str, NDArray[np.float64]]:
    statistics = {}
    for name, inputs in captured_inputs(network, batches).items():
        values = np.concatenate(inputs)
        mean = sum(values) / len(values)
        statistics[f"{name}.running_mean"] = mean
        statistics[f"{name}.running_var"] = sum((values - mean) ** 2) / (len(values) - 1)
    return statistics


def statistics_of(network: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in network.state_dict().items() if "running_" in key}


def assert_close(
    found: dict[str, torch.Tensor], by_hand: dict[str, NDArray[np.float64]], *, rtol: float = 5e-6
) -> None:
    assert found.keys() == by_hand.keys()
    for key, expected in by_hand.items():
        np.testing.assert_allclose(found[key].double().numpy(), expected, rtol=rtol, atol=1e-6, err_msg=key)


def test_statistics_are_the_moments_of_what_the_layers_are_given() -> None:
    network, batches = mixed_network(), batches_with_a_short_last_one()
    by_hand = statistics_by_hand(network, batches)

    recompute_statistics(network, batches, group=ALONE)

    assert_close(statistics_of(network), by_hand)


def test_statistics_of_the_papers_network_are_the_moments_of_what_its_layers_are_given() -> None:
    torch.manual_seed(0)
    network = ResNet9(width=4, channels=2, num_classes=5)
    batches = [torch.randn(count, 2, 12, 12) for count in (6, 6, 2)]
    by_hand = statistics_by_hand(network, batches)

    num_layers = recompute_statistics(network, batches, group=ALONE)

    assert num_layers == 8
    assert_close(statistics_of(network), by_hand, rtol=1e-5)


def test_the_variance_is_that_over_all_samples() -> None:
    layer = nn.BatchNorm1d(1)

    recompute_statistics(
        layer, [torch.tensor([[1.0], [3.0]]), torch.tensor([[10.0], [12.0], [14.0], [16.0]])], group=ALONE
    )

    # Mean 56/6. Squared distances add up to 706 - 56²/6.
    assert layer.running_mean is not None and layer.running_var is not None
    found = layer.running_mean.item(), layer.running_var.item()
    assert found == pytest.approx((56 / 6, (706 - 56**2 / 6) / 5), rel=1e-6)


def test_a_large_mean_does_not_swallow_a_small_variance() -> None:
    layer = nn.BatchNorm1d(1)
    values = 4096 + torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75])[:, None]

    recompute_statistics(layer, values.split(3), group=ALONE)

    assert layer.running_mean.item() == pytest.approx(4096.875, abs=1e-3)
    assert layer.running_var.item() == pytest.approx(0.375, rel=1e-3)


def test_one_batch_and_many_pool_to_the_same_statistics_of_the_first_layer() -> None:
    images = torch.cat(batches_with_a_short_last_one())
    whole, parts = mixed_network(), mixed_network()

    recompute_statistics(whole, [images], group=ALONE)
    recompute_statistics(parts, images.split(5), group=ALONE)

    torch.testing.assert_close(parts[1].running_mean, whole[1].running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts[1].running_var, whole[1].running_var, rtol=1e-5, atol=1e-6)


def test_statistics_that_were_there_before_leave_no_trace() -> None:
    network, other = mixed_network(), mixed_network()
    for layer in batch_norms(other).values():
        layer.running_mean.fill_(-1e6)
        layer.running_var.fill_(1e-6)

    for each in (network, other):
        recompute_statistics(each, batches_with_a_short_last_one(), group=ALONE)

    assert statistics_of(network).keys() == statistics_of(other).keys()
    for key, tensor in statistics_of(network).items():
        assert torch.equal(statistics_of(other)[key], tensor), key


def test_dropout_stays_off_although_the_network_is_in_training_mode() -> None:
    network = mixed_network().train()
    seen = []
    network[9].register_forward_hook(lambda module, given, output: seen.append(torch.equal(given[0], output)))

    recompute_statistics(network, batches_with_a_short_last_one(), group=ALONE)

    assert seen == [True, True, True]


def test_nothing_but_the_statistics_changes() -> None:
    network = mixed_network().train()
    network[3].eval()
    network[5].eval()
    modes = [module.training for module in network.modules()]
    others = {key: tensor.clone() for key, tensor in network.state_dict().items() if "running_" not in key}

    recompute_statistics(network, batches_with_a_short_last_one(), group=ALONE)

    assert [module.training for module in network.modules()] == modes
    assert [layer.momentum for layer in batch_norms(network).values()] == [0.1, None, 0.3]
    assert [layer.num_batches_tracked.item() for layer in batch_norms(network).values()] == [17, 17, 17]
    assert [key for key, tensor in others.items() if not torch.equal(network.state_dict()[key], tensor)] == []
    assert [module for module in network.modules() if module._forward_hooks] == []
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())


def test_modes_momenta_and_counters_are_restored_after_an_error() -> None:
    network = mixed_network().train()
    network[5].eval()
    modes = [module.training for module in network.modules()]

    def batches() -> Iterator[torch.Tensor]:
        yield batches_with_a_short_last_one()[0]
        raise RuntimeError("the data is gone")

    with pytest.raises(RuntimeError, match="the data is gone"):
        recompute_statistics(network, batches(), group=ALONE)

    assert [module.training for module in network.modules()] == modes
    assert [layer.momentum for layer in batch_norms(network).values()] == [0.1, None, 0.3]
    assert [layer.num_batches_tracked.item() for layer in batch_norms(network).values()] == [17, 17, 17]
    assert [module for module in network.modules() if module._forward_hooks] == []


def test_a_network_without_running_statistics_needs_no_pass() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2))
    batches = iter([torch.ones(3, 2)])

    num_layers = recompute_statistics(network, batches, group=ALONE)

    assert num_layers == 0
    assert len(list(batches)) == 1


def numbered_images(num_images: int) -> Images:
    """Every pixel of image i has the value i + 1."""
    pixels = torch.arange(1, num_images + 1, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 4, 5)
    one = torch.ones(1, 2, 1, 1)
    return Images(pixels=pixels.contiguous(), labels=torch.zeros(num_images).long(), mean=0 * one, std=one)


def numbers_in_batches(
    num_images: int, *, batch_size: int, world_size: int, seed: int = 0, augment: Augment | None = None
) -> dict[int, list[tuple[int, ...]]]:
    """Which images are in the batches of each rank."""
    images = numbered_images(num_images)
    return {
        rank: [
            tuple((batch.amax(dim=(1, 2, 3)) - 1).int().tolist())
            for batch in batches_of_rank(
                images,
                batch_size=batch_size,
                seed=seed,
                augment=augment,
                group=Group(rank=rank, world_size=world_size, device=CPU),
            )
        ]
        for rank in range(world_size)
    }


@pytest.mark.parametrize("augment", [None, Augment(padding=2, flip=True, cutout=2)], ids=["plain", "augmented"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_images", [1, 3, 8, 9, 10, 16, 17, 31])
def test_the_ranks_together_see_every_image_exactly_once(
    num_images: int, world_size: int, augment: Augment | None
) -> None:
    of_ranks = numbers_in_batches(num_images, batch_size=4, world_size=world_size, augment=augment)

    seen = sorted(number for batches in of_ranks.values() for batch in batches for number in batch)

    assert seen == list(range(num_images))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_batch_is_whole_on_one_rank_and_the_same_for_any_number_of_ranks(world_size: int) -> None:
    alone = numbers_in_batches(31, batch_size=4, world_size=1)

    of_ranks = numbers_in_batches(31, batch_size=4, world_size=world_size)

    assert sorted(batch for batches in of_ranks.values() for batch in batches) == sorted(alone[0])
    counts = [len(batches) for batches in of_ranks.values()]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("num_images", "sizes"), [(8, [4, 4]), (11, [4, 4, 3]), (10, [4, 4, 2]), (9, [4, 5]), (3, [3]), (1, [1])]
)
def test_the_last_batch_is_short_but_a_single_image_joins_the_batch_before_it(
    num_images: int, sizes: list[int]
) -> None:
    batches = numbers_in_batches(num_images, batch_size=4, world_size=1)[0]

    assert [len(batch) for batch in batches] == sizes


def test_the_pass_goes_over_a_permutation_that_the_seed_decides() -> None:
    first, again, other = (numbers_in_batches(40, batch_size=40, world_size=1, seed=seed)[0][0] for seed in (5, 5, 6))

    assert first == again
    assert first != other
    assert first != tuple(range(40))


def test_images_of_the_pass_are_normalised_and_otherwise_as_they_were() -> None:
    pixels = torch.randint(256, (6, 2, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = torch.tensor([100.0, 30.0]).view(1, 2, 1, 1), torch.tensor([50.0, 7.0]).view(1, 2, 1, 1)
    images = Images(pixels=pixels, labels=torch.zeros(6).long(), mean=mean, std=std)

    (batch,) = batches_of_rank(images, batch_size=6, seed=0, augment=None, group=ALONE)

    scale = np.array([50, 7], dtype=np.float32)[:, None, None]
    shift = np.array([100, 30], dtype=np.float32)[:, None, None]
    by_hand = sorted(((image.astype(np.float32) - shift) / scale).tobytes() for image in pixels.numpy())
    assert sorted(image.contiguous().numpy().tobytes() for image in batch) == by_hand


# Two real ranks. Case → number of images and augmentation; the second leaves rank 1 without a batch.
CASES: dict[str, tuple[int, Augment | None]] = {
    "short last batch": (27, None),
    "an idle rank": (5, None),
    "augmented": (30, Augment(padding=1, flip=True, cutout=2)),
}


def images_of_case(case: str) -> Images:
    num_images, _ = CASES[case]
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randint(256, (num_images, 2, 7, 6), generator=generator, dtype=torch.uint8)
    scale = torch.full((1, 2, 1, 1), 64.0)
    return Images(pixels=pixels, labels=torch.zeros(num_images).long(), mean=2 * scale, std=scale)


def batches_of_case(case: str, group: Group) -> Iterator[torch.Tensor]:
    return batches_of_rank(images_of_case(case), batch_size=8, seed=3, augment=CASES[case][1], group=group)


def work_of_a_rank(folder: Path) -> None:
    """What each of the processes below does."""
    torch.set_num_threads(1)
    with process_group() as group:
        for case in CASES:
            network = mixed_network()
            recompute_statistics(network, batches_of_case(case, group), group=group)
            save_file(network.state_dict(), folder / f"{case} {group.rank}.safetensors")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the networks of two real processes that worked together."""
    folder = tmp_path_factory.mktemp("two_ranks")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SWAP_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    code = "import sys, pathlib, test_batchnorm; test_batchnorm.work_of_a_rank(pathlib.Path(sys.argv[1]))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_find_the_statistics_of_one_to_rounding(two_ranks: Path, case: str) -> None:
    alone = mixed_network()
    batches = list(batches_of_case(case, ALONE))
    by_hand = statistics_by_hand(alone, batches)

    recompute_statistics(alone, batches, group=ALONE)
    together = [load_file(two_ranks / f"{case} {rank}.safetensors") for rank in range(2)]

    assert_close({key: together[0][key] for key in by_hand}, by_hand)
    for key, tensor in alone.state_dict().items():
        torch.testing.assert_close(together[0][key], tensor, rtol=1e-6, atol=1e-7, msg=key)
        assert torch.equal(together[1][key], together[0][key]), key
