"""Data order and augmentation against a slow reference that handles one image at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.transforms import functional

from swap_pipeline.config.params import Augment
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data import augmentation
from swap_pipeline.data.epochs import EpochChoices, draw_epoch
from swap_pipeline.data.images import Images, make_batch, read_images
from swap_pipeline.data.prepared import read_meta
from swap_pipeline.engine.placement import seed_torch
from swap_pipeline.storage.files import write_json
from swap_pipeline.storage.tensor_files import digest_of, write_tensors

CPU = torch.device("cpu")
MEAN = np.array([120.5, 60.25, 200.125], dtype=np.float32)
STD = np.array([60.1, 30.7, 9.9], dtype=np.float32)


def random_images(num_images: int, *, channels: int = 3, height: int = 9, width: int = 12) -> Images:
    generator = torch.Generator().manual_seed(7)
    return Images(
        pixels=torch.randint(256, (num_images, channels, height, width), generator=generator, dtype=torch.uint8),
        labels=torch.randint(10, (num_images,), generator=generator),
        mean=torch.from_numpy(MEAN[:channels]).view(1, -1, 1, 1),
        std=torch.from_numpy(STD[:channels]).view(1, -1, 1, 1),
    )


def draw(
    images: Images, *, seed: int = 0, epoch: int = 0, padding: int = 0, flip: bool = False, cutout: int = 0
) -> EpochChoices:
    _, _, height, width = images.pixels.shape
    return draw_epoch(
        seed=seed,
        epoch=epoch,
        num_images=len(images),
        image_size=(height, width),
        augment=Augment(padding=padding, flip=flip, cutout=cutout),
    )


def one_image_by_hand(
    images: Images, choices: EpochChoices, position: int, *, padding: int = 0, flip: int = 0, cutout: int = 0
) -> NDArray[np.float32]:
    """Pad, crop and flip with torchvision, normalise and cut with numpy."""
    _, channels, height, width = images.pixels.shape
    image = images.pixels[choices.order[position]]
    if padding:
        assert choices.changes.top is not None and choices.changes.left is not None
        image = functional.pad(image, [padding] * 4, padding_mode="reflect")
        image = functional.crop(
            image, int(choices.changes.top[position]), int(choices.changes.left[position]), height, width
        )
    if flip:
        assert choices.changes.flip is not None
        image = functional.hflip(image) if choices.changes.flip[position] else image
    result = np.zeros((channels, height, width), dtype=np.float32)
    for channel in range(channels):
        result[channel] = (image[channel].numpy().astype(np.float32) - MEAN[channel]) / STD[channel]
    if cutout:
        assert choices.changes.cut_top is not None and choices.changes.cut_left is not None
        top, left = int(choices.changes.cut_top[position]), int(choices.changes.cut_left[position])
        result[:, top : top + cutout, left : left + cutout] = 0
    return result


AUGMENTS = [
    {},
    {"padding": 4},
    {"padding": 8},
    {"flip": True},
    {"cutout": 4},
    {"cutout": 9},
    {"padding": 2, "flip": True},
    {"padding": 4, "flip": True, "cutout": 5},
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
def test_a_batch_is_what_a_slow_loop_over_its_images_gives(augment: dict[str, int], channels: int) -> None:
    images = random_images(200, channels=channels)
    choices = draw(images, seed=3, epoch=2, **augment)

    batch, labels = make_batch(images, choices, slice(40, 160))

    by_hand = np.stack([one_image_by_hand(images, choices, position, **augment) for position in range(40, 160)])
    np.testing.assert_array_equal(batch.numpy(), by_hand)
    assert labels.tolist() == [int(images.labels[choices.order[position]]) for position in range(40, 160)]


def test_a_batch_is_float32_and_stored_channels_last() -> None:
    images = random_images(10)

    batch, labels = make_batch(images, draw(images, padding=4), slice(0, 6))

    assert (batch.dtype, tuple(batch.shape)) == (torch.float32, (6, 3, 9, 12))
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert (labels.dtype, tuple(labels.shape)) == (torch.int64, (6,))


def test_making_a_batch_leaves_the_images_alone() -> None:
    images = random_images(30)
    before = images.pixels.clone()

    make_batch(images, draw(images, padding=4, flip=True, cutout=3), slice(0, 30))

    assert torch.equal(images.pixels, before)


@pytest.mark.parametrize("augment", [{}, {"padding": 4, "flip": True, "cutout": 3}], ids=["plain", "augmented"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_the_slices_of_the_ranks_make_up_the_global_batch(world_size: int, augment: dict[str, int]) -> None:
    images = random_images(50)
    choices = draw(images, seed=1, epoch=5, **augment)
    share = 12 // world_size

    whole, labels = make_batch(images, choices, slice(24, 36))
    parts = [
        make_batch(images, choices, slice(24 + rank * share, 24 + (rank + 1) * share)) for rank in range(world_size)
    ]

    assert torch.equal(torch.cat([part for part, _ in parts]), whole)
    assert torch.equal(torch.cat([part for _, part in parts]), labels)


def test_the_steps_of_an_epoch_show_every_image_once() -> None:
    images = random_images(60, channels=1)
    images.labels.copy_(torch.arange(60))
    choices = draw(images, seed=1, epoch=5, padding=4)

    shown = [
        int(label) for step in range(6) for label in make_batch(images, choices, slice(10 * step, 10 * step + 10))[1]
    ]

    assert sorted(shown) == list(range(60))


def test_the_cut_out_square_is_whole_in_every_image_and_has_the_mean_colour() -> None:
    images = random_images(2000, channels=1, height=8, width=11)  # no pixel is the mean, 120.5
    choices = draw(images, cutout=3)

    batch, _ = make_batch(images, choices, slice(0, 2000))

    blank = (batch[:, 0] == 0).numpy()
    assert (blank.sum(axis=(1, 2)) == 9).all()
    assert (blank.any(axis=2).sum(axis=1) == 3).all()
    assert (blank.any(axis=1).sum(axis=1) == 3).all()


def test_every_crop_flip_and_place_to_cut_comes_up_about_equally_often() -> None:
    images = random_images(9000, channels=1, height=8, width=11)

    choices = draw(images, padding=2, flip=True, cutout=3)

    counts = {
        "top": np.bincount(choices.changes.top.numpy()),
        "left": np.bincount(choices.changes.left.numpy()),
        "flip": np.bincount(choices.changes.flip.numpy()),
        "cut_top": np.bincount(choices.changes.cut_top.numpy()),
        "cut_left": np.bincount(choices.changes.cut_left.numpy()),
    }
    assert {key: len(count) for key, count in counts.items()} == {
        "top": 5,
        "left": 5,
        "flip": 2,
        "cut_top": 6,
        "cut_left": 9,
    }
    for key, count in counts.items():
        expected = 9000 / len(count)
        assert np.abs(count - expected).max() < 5 * np.sqrt(expected), key


def test_the_choices_of_an_image_are_independent_of_each_other() -> None:
    images = random_images(9000, channels=1, height=8, width=11)

    choices = draw(images, padding=2, flip=True, cutout=3)

    drawn = choices.changes
    columns = [choices.order, drawn.top, drawn.left, drawn.flip, drawn.cut_top, drawn.cut_left]
    correlation = np.corrcoef(np.stack([column.numpy().astype(np.float64) for column in columns]))
    assert np.abs(correlation - np.eye(6)).max() < 5 / np.sqrt(9000)


@pytest.mark.parametrize("num_images", [1, 2, 1000])
def test_the_order_of_an_epoch_is_a_permutation(num_images: int) -> None:
    order = draw(random_images(num_images, channels=1)).order

    assert sorted(order.tolist()) == list(range(num_images))


def test_every_seed_and_epoch_has_an_order_of_its_own() -> None:
    images = random_images(50, channels=1)

    orders = {tuple(draw(images, seed=seed, epoch=epoch).order.tolist()) for seed in range(12) for epoch in range(12)}

    assert len(orders) == 144


def test_every_seed_and_epoch_has_an_augmentation_of_its_own() -> None:
    images = random_images(50, channels=1)

    drawn = [draw(images, seed=seed, epoch=epoch, padding=4) for seed in range(6) for epoch in range(6)]

    assert len({tuple(choices.changes.top.tolist()) for choices in drawn}) == 36


def test_the_choices_are_a_function_of_seed_and_epoch_alone() -> None:
    images = random_images(50)
    augment = {"padding": 4, "flip": True, "cutout": 3}
    torch.manual_seed(1)
    first = draw(images, seed=8, epoch=3, **augment)
    torch.manual_seed(2)
    draw(images, seed=0, epoch=0, **augment)

    again = draw(images, seed=8, epoch=3, **augment)

    assert torch.equal(again.order, first.order)
    for name in ("top", "left", "flip", "cut_top", "cut_left"):
        assert torch.equal(getattr(again.changes, name), getattr(first.changes, name)), name


def test_drawing_leaves_the_global_generator_alone() -> None:
    images = random_images(50)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    draw(images, seed=8, epoch=3, padding=4, flip=True, cutout=3)

    assert torch.equal(torch.rand(3), expected)


def test_derived_seeds_are_the_same_everywhere_and_forever() -> None:
    # printf "%s" "('epoch', 3, 7)" | b2sum -l 64, read from the last byte to the first, without its lowest bit
    assert derive_seed("epoch", 3, 7) == 0x12E606F4C1B18A3D >> 1
    assert derive_seed("step", 0, 1, 2, 0) == 0xD9C8FC788434F660 >> 1


def test_derived_seeds_differ_for_different_parts() -> None:
    parts = [("a", 1, 23), ("a", 12, 3), ("a", 1, 2, 3), ("a", 123), ("b", 1, 23), ("a", "1", 23), (1, "a", 23), ("a",)]
    parts += [("a", seed, epoch) for seed in range(100, 130) for epoch in range(100, 130)]

    seeds = {derive_seed(*each) for each in parts}

    assert len(seeds) == len(parts)


def test_derived_seeds_are_spread_over_63_bits() -> None:
    seeds = [derive_seed("x", number) for number in range(2000)]

    assert all(0 <= seed < 2**63 for seed in seeds)
    ones = [sum(seed >> bit & 1 for seed in seeds) for bit in range(63)]
    assert max(abs(count - 1000) for count in ones) < 5 * np.sqrt(500)


def test_prepared_images_are_read_with_their_normalisation(tmp_path: Path) -> None:
    images = random_images(20, height=6, width=6)
    meta = {
        "kind": "memory",
        "classes": list("abcdefghij"),
        "shape": [3, 6, 6],
        "mean": [0.5, 0.25, 0.125],
        "std": [0.2, 0.1, 0.4],
    }
    write_json(tmp_path / "meta.json", meta)
    tensors = {"images": images.pixels, "labels": images.labels}
    write_tensors(tmp_path / "train.safetensors", tensors, {"split": "train", "meta": digest_of(meta)})

    found = read_images(tmp_path, "train", CPU)

    assert len(found) == 20
    assert torch.equal(found.pixels, images.pixels) and torch.equal(found.labels, images.labels)
    scaled = images.pixels.numpy().astype(np.float64) / 255
    by_hand = (scaled - np.array(meta["mean"]).reshape(1, 3, 1, 1)) / np.array(meta["std"]).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(found.normalise(found.pixels).numpy(), by_hand, rtol=1e-5, atol=1e-6)
    assert read_meta(tmp_path).classes == tuple("abcdefghij")


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("height", "width"), [(5, 7), (64, 50)], ids=["small", "large"])
@pytest.mark.parametrize("augment", AUGMENTS[1:], ids=str)
def test_batches_are_laid_out_as_asked_with_the_same_values(
    augment: dict[str, int], height: int, width: int, channels_last: bool
) -> None:
    augment = {key: min(value, 4) for key, value in augment.items()}
    images = random_images(30, height=height, width=width)
    choices = draw(images, seed=3, epoch=2, **augment)

    batch, _ = make_batch(images, choices, slice(10, 30), channels_last=channels_last)

    by_hand = np.stack([one_image_by_hand(images, choices, position, **augment) for position in range(10, 30)])
    np.testing.assert_array_equal(batch.numpy(), by_hand)
    assert batch.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_squares_are_cut_out_alike_by_index_and_by_mask(size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(20, 8, 9, 3, generator=generator)
    top, left = (torch.randint(length - size + 1, (20,), generator=generator) for length in (8, 9))
    by_index, by_mask = pixels.clone(), pixels.clone()

    augmentation.cut_out_by_index(by_index, top, left, size)
    augmentation.cut_out_by_mask(by_mask, top, left, size)

    assert torch.equal(by_index, by_mask) and not torch.equal(by_index, pixels)


def test_a_seed_gives_what_torch_s_own_seeding_gives() -> None:
    seed = derive_seed("step", 1, 2, 3, 0)
    torch.manual_seed(seed)
    expected = torch.rand(5), torch.nn.functional.dropout(torch.ones(50)), torch.randperm(9)

    seed_torch(seed, CPU)

    found = torch.rand(5), torch.nn.functional.dropout(torch.ones(50)), torch.randperm(9)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_that_are_made_several_at_a_time_are_those_made_one_by_one(
    ranks: int, size: int, channels_last: bool
) -> None:
    images = random_images(90)
    choices = draw(images, padding=2, flip=True, cutout=3)
    parts = [slice(first, min(first + size, 90)) for first in range(3, 90, size)][::ranks]

    found = images.batches(choices, parts, view=None, channels_last=channels_last)

    for part, (batch, labels) in zip(parts, found, strict=True):
        alone, own_labels = make_batch(images, choices, part, channels_last=channels_last)
        assert torch.equal(batch, alone) and torch.equal(labels, own_labels)
        assert batch.stride() == alone.stride()
        assert batch.data_ptr() % 64 == 0
