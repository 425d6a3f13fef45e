"""Images that stay in files: what the loaders deliver, and that nothing but (seed, epoch, position) decides it."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

from swap_pipeline.config.params import Augment
from swap_pipeline.data.epochs import batch_share, draw_epoch
from swap_pipeline.data.loader import FileImages, random_box, random_crop, rectangle
from swap_pipeline.data.prepared import Meta, View
from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import write_tensors

CPU = torch.device("cpu")
AUGMENT = Augment(padding=0, flip=True, cutout=5)
META = Meta(classes=("a", "b", "c"), shape=None, channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5))
SIZES = [(40, 60), (60, 40), (50, 50), (33, 97), (90, 31), (64, 64), (48, 52), (30, 30), (44, 80), (70, 35), (36, 36)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven photographs, of noise, and an index of them as `prepare` writes it."""
    generator = np.random.default_rng(0)
    paths = []
    for i, (height, width) in enumerate(SIZES):
        path = Path("train") / "abc"[i % 3] / f"bild-{i}-ä.png"
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(tmp_path / path)
        paths.append(path.as_posix().encode())
    tensors = {
        "labels": torch.tensor([i % 3 for i in range(len(SIZES))]),
        "heights": torch.tensor([height for height, _ in SIZES], dtype=torch.int32),
        "widths": torch.tensor([width for _, width in SIZES], dtype=torch.int32),
        "paths": torch.tensor(list(b"".join(paths)), dtype=torch.uint8),
        "path_ends": torch.tensor([len(path) for path in paths]).cumsum(0),
    }
    write_tensors(tmp_path / "train.safetensors", tensors, {"split": "train", "meta": META.digest})
    return tmp_path


def opened(folder: Path, *, test_crop: str = "square") -> FileImages:
    return FileImages(folder, "train", META, root=folder, test_crop=test_crop, device=CPU)


def normalised(pixels: np.ndarray) -> torch.Tensor:
    scaled = torch.from_numpy(pixels.astype(np.float64)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (META.mean, META.std))
    return ((scaled - mean) / std).float()


def middle_by_hand(path: Path, height: int, width: int) -> torch.Tensor:
    """Pillow alone: the shorter side to 8/7 of the crop's, bilinear; then the middle."""
    with Image.open(path) as image:
        short = round(min(height, width) * 256 / 224)
        if image.width <= image.height:
            size = (short, int(short * image.height / image.width))
        else:
            size = (int(short * image.width / image.height), short)
        resized = image.resize(size, Image.Resampling.BILINEAR)
    top, left = round((resized.height - height) / 2), round((resized.width - width) / 2)
    return normalised(np.asarray(resized.crop((left, top, left + width, top + height))))


def epoch(images: FileImages, *, seed: int = 3, number: int = 0, world_size: int = 1, min_scale: float | None = 0.3):
    """All batches of an epoch, in the order in which one process would see them."""
    choices = draw_epoch(seed=seed, epoch=number, num_images=len(images), image_size=(24, 24), augment=AUGMENT)
    steps: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for rank in range(world_size):
        parts = [batch_share(step, batch_size=4, shard=rank, num_shards=world_size) for step in range(2)]
        view = View(size=24, min_scale=min_scale)
        batches = images.batches(choices, parts, view=view, channels_last=False)
        for step, batch in enumerate(batches):
            steps[step].append(batch)
    return [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in steps]


def same(first: list[tuple[torch.Tensor, torch.Tensor]], second: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_the_middle_of_an_image_is_what_pillow_makes_of_it(folder: Path) -> None:
    images = opened(folder)
    got, labels = zip(*images.test_batches(batch_size=4, rank=0, world_size=1, view=View(size=24)), strict=True)
    paths = [next(folder.glob(f"train/*/bild-{i}-*")) for i in range(len(SIZES))]
    expected = torch.stack([middle_by_hand(path, 24, 24) for path in paths])
    assert [len(batch) for batch in got] == [4, 4, 3]
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=1e-5)
    assert torch.cat(labels).tolist() == [i % 3 for i in range(len(SIZES))]


def test_ranks_share_the_test_images_without_overlap_or_loss(folder: Path) -> None:
    images = opened(folder)
    by_rank = [
        [x for x, _ in images.test_batches(batch_size=2, rank=rank, world_size=3, view=View(size=24))]
        for rank in range(3)
    ]
    alone = [x for x, _ in images.test_batches(batch_size=2, rank=0, world_size=1, view=View(size=24))]
    assert sum(len(batch) for batches in by_rank for batch in batches) == len(SIZES)
    assert all(torch.equal(by_rank[i % 3][i // 3], batch) for i, batch in enumerate(alone))


def test_rectangles_keep_the_shape_of_the_image_up_to_two_to_one() -> None:
    assert rectangle(500, 500, 288) == (288, 288)
    assert rectangle(375, 500, 288) == (288, 384)
    assert rectangle(500, 375, 288) == (384, 288)
    assert rectangle(500, 499, 288) == (288, 288)
    assert rectangle(100, 5000, 224) == (224, 448)


def test_rectangular_test_batches_hold_every_image_once_in_its_own_shape(folder: Path) -> None:
    images = opened(folder, test_crop="rectangle")
    seen: dict[tuple[int, ...], int] = {}
    for batch, _ in images.test_batches(batch_size=3, rank=0, world_size=1, view=View(size=32)):
        seen[tuple(batch.shape[2:])] = seen.get(tuple(batch.shape[2:]), 0) + len(batch)
    expected: dict[tuple[int, ...], int] = {}
    for height, width in SIZES:
        shape = rectangle(height, width, 32)
        expected[shape] = expected.get(shape, 0) + 1
    assert seen == expected
    wide = next(x for x, _ in images.test_batches(batch_size=1, rank=0, world_size=1, view=View(size=32)))
    assert wide.shape[2:] == (32, 32)


def test_the_crops_of_an_epoch_depend_on_seed_and_epoch_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = epoch(opened(folder))
    images = opened(folder)
    torch.manual_seed(123)
    random.seed(123)
    assert not same(epoch(images, number=1), reference)
    assert not same(epoch(images, seed=4), reference)
    assert same(epoch(images), reference)
    monkeypatch.setenv("SWAP_LOADERS", "3")
    assert same(epoch(opened(folder)), reference)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_see_together_what_one_process_sees(folder: Path, world_size: int) -> None:
    assert same(epoch(opened(folder), world_size=world_size), epoch(opened(folder)))


def test_without_a_random_crop_the_middle_is_flipped_and_cut_as_in_memory(folder: Path) -> None:
    choices = draw_epoch(seed=3, epoch=0, num_images=len(SIZES), image_size=(24, 24), augment=AUGMENT)
    assert (
        choices.changes.flip is not None
        and choices.changes.cut_top is not None
        and choices.changes.cut_left is not None
    )
    (batch, labels), _ = epoch(opened(folder), min_scale=None)
    for position in range(4):
        index = int(choices.order[position])
        expected = middle_by_hand(next(folder.glob(f"train/*/bild-{index}-*")), 24, 24)
        if choices.changes.flip[position]:
            expected = expected.flip(2)
        top, left = int(choices.changes.cut_top[position]), int(choices.changes.cut_left[position])
        expected[:, top : top + 5, left : left + 5] = 0
        torch.testing.assert_close(batch[position], expected, rtol=0, atol=1e-5)
        assert int(labels[position]) == index % 3


def test_a_random_crop_is_a_part_of_the_image_of_at_least_the_given_share(tmp_path: Path) -> None:
    """An image whose pixels tell their place: red its column, green its row. Where a crop begins and ends shows."""
    side = 200
    ramp = np.linspace(0, 255, side)
    place = np.zeros((side, side, 3), np.uint8)
    place[..., 0], place[..., 1] = ramp[None, :], ramp[:, None]
    (tmp_path / "one.png").parent.mkdir(exist_ok=True)
    Image.fromarray(place).save(tmp_path / "one.png")
    tensors = {
        "labels": torch.tensor([0]),
        "heights": torch.tensor([side], dtype=torch.int32),
        "widths": torch.tensor([side], dtype=torch.int32),
        "paths": torch.tensor(list(b"one.png"), dtype=torch.uint8),
        "path_ends": torch.tensor([7]),
    }
    write_tensors(tmp_path / "train.safetensors", tensors, {"split": "train", "meta": META.digest})
    images = FileImages(tmp_path, "train", META, root=tmp_path, test_crop="square", device=CPU)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (META.mean, META.std))
    shares = []
    for number in range(60):
        choices = draw_epoch(seed=0, epoch=number, num_images=1, image_size=(50, 50))
        view = View(size=50, min_scale=0.25)
        ((batch, _),) = images.batches(choices, [slice(0, 1)], view=view, channels_last=False)
        pixels = batch[0] * std + mean
        width = (pixels[0, :, -1] - pixels[0, :, 0]).mean() * 50 / 49
        height = (pixels[1, -1, :] - pixels[1, 0, :]).mean() * 50 / 49
        shares.append(float(width * height))
    assert min(shares) > 0.25 * 0.93
    assert max(shares) > 0.8
    assert min(shares) < 0.4


@pytest.mark.parametrize("channels", [1, 3])
def test_a_random_crop_is_what_pillow_makes_of_its_box_to_within_a_step_of_255(channels: int) -> None:
    chance = np.random.default_rng(0)
    for height, width in ((40, 30), (7, 90), (300, 211)):
        noise = chance.integers(0, 256, (height, width, channels), dtype=np.uint8)
        image = Image.fromarray(noise if channels == 3 else noise[..., 0])
        for seed in range(20):
            top, left, rows, columns = random_box(height, width, min_scale=0.25, seed=seed)
            part = image.crop((left, top, left + columns, top + rows))
            expected = np.asarray(part.resize((32, 24), Image.Resampling.BILINEAR)).reshape(24, 32, channels)
            found = random_crop(torch.from_numpy(noise), (24, 32), min_scale=0.25, seed=seed).numpy()
            assert found.shape == expected.shape
            assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize(("height", "width", "min_scale"), [(200, 300, 0.25), (256, 256, 0.08), (31, 97, 0.9)])
def test_the_boxes_of_random_crops_are_distributed_as_torchvision_s(height: int, width: int, min_scale: float) -> None:
    number = 8000
    ours = np.array([random_box(height, width, min_scale=min_scale, seed=seed) for seed in range(number)], float)
    torch.manual_seed(0)
    crop, image = v2.RandomResizedCrop((8, 8), scale=(min_scale, 1.0)), torch.empty(3, height, width)
    drawn = (crop.make_params([image]) for _ in range(number))
    theirs = np.array([[box[key] for key in ("top", "left", "height", "width")] for box in drawn], float)

    def looked_at(sample: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Where the middle is, which says more than where it begins, the sides, the area and their ratio."""
        top, left, rows, columns = sample.T
        return [top + rows / 2, left + columns / 2, rows, columns, rows * columns, rows / columns]

    for one, other in zip(looked_at(ours), looked_at(theirs), strict=True):
        both = np.sort(np.concatenate([one, other]))
        shares = [np.searchsorted(np.sort(sample), both, side="right") / number for sample in (one, other)]
        # Kolmogorov and Smirnov's: at equal laws, one pair of such samples in a million is farther apart.
        assert np.abs(shares[0] - shares[1]).max() < 2.69 * (2 / number) ** 0.5


def test_the_box_of_an_image_that_no_ratio_fits_is_its_middle() -> None:
    assert random_box(10, 100, min_scale=1.0, seed=0) == (0, 43, 10, 13)
    assert random_box(100, 10, min_scale=1.0, seed=0) == (43, 0, 13, 10)
    assert random_box(1, 1, min_scale=0.5, seed=0) == (0, 0, 1, 1)


def test_an_image_that_changed_or_went_missing_after_preparing_is_named(folder: Path) -> None:
    images = opened(folder)
    path = next(folder.glob("train/*/bild-2-*"))
    Image.new("RGB", (10, 10)).save(path)
    with pytest.raises(SwapError, match=r"bild-2-ä\.png has changed since it was prepared: run `dvc repro`"):
        list(images.test_batches(batch_size=4, rank=0, world_size=1, view=View(size=24)))
    path.unlink()
    with pytest.raises(SwapError, match=r"bild-2-ä\.png not found"):
        list(images.test_batches(batch_size=4, rank=0, world_size=1, view=View(size=24)))


def test_a_long_path_of_temporary_files_does_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("x" * 125)
    long.mkdir()
    expected = epoch(opened(folder))
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)

    assert same(epoch(opened(folder)), expected)


def test_a_loader_that_cannot_deliver_is_noticed_with_its_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was with TMPDIR: the batch is made, but no way leads to the rank, which waited for it without end."""

    def refuse(family: str) -> str:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr("multiprocessing.connection.arbitrary_address", refuse)

    with pytest.raises(SwapError, match="a process that decodes images failed: OSError: AF_UNIX path too long"):
        epoch(opened(folder))


def test_a_loader_that_is_killed_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_oneself(path: Path, channels: int) -> Image.Image:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setattr("swap_pipeline.data.loader.decode", kill_oneself)

    with pytest.raises(SwapError, match=r"a process that decodes images was killed .*worker.*"):
        epoch(opened(folder))
