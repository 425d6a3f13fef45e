"""Copies of image files that are made smaller once (`data.copies`): what is written, read, resumed and refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from conftest import ROOT, Project, wait_until
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from test_image_folders import picture

from swap_pipeline.analysis.sample import _write_index
from swap_pipeline.cli.doctor import bytes_to_write
from swap_pipeline.cli.plan.facts import planned_devices
from swap_pipeline.cli.plan.forecast import plan_params
from swap_pipeline.cli.plan.text import text_of
from swap_pipeline.cli.plan.times import Forecast, Throughput, expected_times
from swap_pipeline.config.copies import copy_for
from swap_pipeline.config.params import Data
from swap_pipeline.config.parsing import read_tree
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.config.schedules import by_epoch
from swap_pipeline.config.seeds import derive_seed
from swap_pipeline.data.decoding import decode
from swap_pipeline.data.epochs import draw_epoch
from swap_pipeline.data.loader import FileImages, random_box
from swap_pipeline.data.prepared import View, read_meta
from swap_pipeline.datasets import copies
from swap_pipeline.datasets import prepare as preparing
from swap_pipeline.datasets.prepare import prepare
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.inputs import hash_of
from swap_pipeline.storage import image_files
from swap_pipeline.storage.tensor_files import TensorFile

CPU = torch.device("cpu")
SIDES = (20, 40)
# Width and height; some smaller than one copy, or than both.
SIZES = [(64, 48), (48, 64), (100, 50), (30, 33), (15, 90), (41, 40), (50, 50)]
NAMES = [f"train/{'cat' if index < 4 else 'dog'}/{index}.jpg" for index in range(len(SIZES))]


@pytest.fixture
def project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images, two in a file of copies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(copies, "IMAGES_IN_A_FILE", 2)
    for name, size in zip(NAMES, SIZES, strict=True):
        smooth(Path("images") / name, size)
    for name in ("test/cat/a.png", "test/dog/b.png"):
        smooth(Path("images") / name, (70, 60))
    return tmp_path


def smooth(path: Path, size: tuple[int, int]) -> None:
    """What JPEG keeps well."""
    coarse = np.random.default_rng(len(str(path)) + size[0]).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, quality=95)


def data(**changes: Any) -> Data:
    return Data(**{"name": "imagefolder", "root": "images", "copies": SIDES, **changes})


def opened(split: str = "train", folder: str = "prepared", **more: Any) -> FileImages:
    prepared = Path(folder)
    return FileImages(prepared, split, read_meta(prepared), root=Path("images"), test_crop="square", device=CPU, **more)


def by_hand(path: Path, side: int) -> bytes:
    """Pillow alone."""
    with Image.open(path) as image:
        image = image.convert("RGB")
        ratio = side / min(image.size)
        size = image.size if ratio >= 1 else (round(image.width * ratio), round(image.height * ratio))
        file = io.BytesIO()
        image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90, subsampling="4:2:0")
    return file.getvalue()


def written(split: str = "train") -> dict[str, NDArray[Any]]:
    with safe_open(f"prepared/{split}.safetensors", framework="np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pixels(batch: torch.Tensor) -> NDArray[np.float64]:
    """Of normalised images, N×C×H×W, on the scale 0–255."""
    meta = read_meta(Path("prepared"))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (meta.mean, meta.std))
    found: NDArray[np.float64] = ((batch * std + mean) * 255).double().numpy()
    return found


# --- what is written


def test_copies_are_what_pillow_makes_of_the_files_one_after_another(project_folder: Path) -> None:
    line = prepare(data(), Path("prepared"))

    index = written()
    for side in SIDES:
        for position, name in enumerate(NAMES):
            expected = by_hand(Path("images") / name, side)
            number, start, length = index[f"copies_{side}"][position].tolist()
            path = Path(f"prepared/copies/train_{side}_{number:05}.jpegs")
            assert path.read_bytes()[start : start + length] == expected
            assert index[f"copy_digests_{side}"][position].tobytes() == xxhash.xxh3_64_digest(expected)
        assert index[f"copies_{side}"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3]
        sizes = [path.stat().st_size for path in sorted(Path("prepared/copies").glob(f"train_{side}_*"))]
        assert sum(sizes) == index[f"copies_{side}"][:, 2].sum() and len(sizes) == 4
    assert json.loads(Path("prepared/meta.json").read_text())["copies"] == list(SIDES)
    assert "; copies of 20 and 40 pixels: " in line
    assert not Path(".swap/copies").exists()


def test_without_copies_nothing_is_written_that_was_not_before(project_folder: Path) -> None:
    prepare(data(), Path("prepared"))
    prepare(data(copies=()), Path("prepared"))

    assert sorted(everything(Path("prepared"))) == ["meta.json", "test.safetensors", "train.safetensors"]
    assert "copies" not in json.loads(Path("prepared/meta.json").read_text())
    assert not any("cop" in key for key in written())


def test_grey_images_have_grey_copies(project_folder: Path) -> None:
    for name in (*NAMES, "test/cat/a.png", "test/dog/b.png"):
        path = Path("images") / name
        Image.open(path).convert("L").save(path)

    prepare(data(), Path("prepared"))

    first = written()["copies_20"][0, 2]
    assert Image.open(io.BytesIO(Path("prepared/copies/train_20_00000.jpegs").read_bytes()[:first])).mode == "L"
    batch, _ = next(opened().test_batches(batch_size=2, rank=0, world_size=1, view=View(size=16)))
    assert batch.shape == (2, 1, 16, 16)


# --- what is read


@pytest.mark.parametrize(
    ("image_size", "side"), [(1, 160), (128, 160), (129, 352), (224, 352), (281, 352), (282, None), (288, None)]
)
def test_the_smallest_copy_that_is_a_quarter_larger_is_read(image_size: int, side: int | None) -> None:
    assert copy_for(image_size, (160, 352)) == side
    assert copy_for(image_size, ()) is None


def test_the_recipe_for_imagenet_reads_what_the_original_read() -> None:
    params = read_params(ROOT / "recipes/imagenet.yaml")
    assert params.phase2.image_size is not None
    size = by_epoch(params.phase2.image_size)
    assert [copy_for(size(epoch), params.data.copies) for epoch in (0, 12, 13, 24, 25)] == [160, 160, 352, 352, None]


@pytest.mark.parametrize(("size", "side"), [(16, 20), (17, 40), (32, 40), (33, None)])
def test_each_view_is_made_from_its_copy_or_else_from_the_file(
    project_folder: Path, size: int, side: int | None
) -> None:
    prepare(data(), Path("prepared"))

    batches = opened().test_batches(batch_size=3, rank=0, world_size=1, view=View(size=size))
    found = np.concatenate([pixels(batch) for batch, _ in batches])

    for image, name in zip(found, NAMES, strict=True):
        path = Path("images") / name
        source = Image.open(path if side is None else io.BytesIO(by_hand(path, side))).convert("RGB")
        short = round(size * 8 / 7)
        ratio = short / min(source.size)
        whole = (short, int(source.height * short / source.width))
        if source.width > source.height:
            whole = (int(source.width * short / source.height), short)
        assert ratio <= 1 or min(Image.open(path).size) < short  # never enlarged, unless the file is that small
        resized = source.resize(whole, Image.Resampling.BILINEAR)
        top, left = round((resized.height - size) / 2), round((resized.width - size) / 2)
        expected = np.asarray(resized.crop((left, top, left + size, top + size))).transpose(2, 0, 1)
        assert np.abs(image - expected).max() < 1e-2


def test_a_random_crop_is_that_box_of_the_copy(project_folder: Path) -> None:
    prepare(data(), Path("prepared"))
    choices = draw_epoch(seed=1, epoch=2, num_images=len(NAMES), image_size=(16, 16))

    ((batch, labels),) = opened().batches(
        choices, [slice(0, len(NAMES))], view=View(size=16, min_scale=0.3), channels_last=False
    )

    for position, image in enumerate(pixels(batch)):
        index = int(choices.order[position])
        assert labels[position] == (index >= 4)
        copy = Image.open(io.BytesIO(by_hand(Path("images") / NAMES[index], 20)))
        seed = derive_seed("crop", choices.seed, position)
        top, left, height, width = random_box(copy.height, copy.width, min_scale=0.3, seed=seed)
        part = copy.crop((left, top, left + width, top + height)).resize((16, 16), Image.Resampling.BILINEAR)
        assert np.abs(image - np.asarray(part).transpose(2, 0, 1)).max() < 1.01


def test_a_sample_of_the_images_reads_their_own_copies(project_folder: Path) -> None:
    prepare(data(), Path("prepared"))
    whole = list(opened().test_batches(batch_size=1, rank=0, world_size=1, view=View(size=16)))

    _write_index(
        Path("sample/train.safetensors"), TensorFile(Path("prepared/train.safetensors")), torch.tensor([1, 5]), SIDES
    )
    os.link("prepared/meta.json", "sample/meta.json")
    part = opened(folder="sample", copies=Path("prepared/copies"))
    found = list(part.test_batches(batch_size=1, rank=0, world_size=1, view=View(size=16)))

    assert [torch.equal(one[0], other[0]) for one, other in zip(found, [whole[1], whole[5]], strict=True)] == [True] * 2


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": "4:4:4"}, {"quality": 30}])
@pytest.mark.parametrize("channels", [1, 3])
def test_decoding_gives_pillows_pixels(tmp_path: Path, mode: str, options: dict[str, Any], channels: int) -> None:
    smooth(tmp_path / "x.png", (61, 47))
    path = tmp_path / "x.jpg"
    Image.open(tmp_path / "x.png").convert(mode).save(path, **options)

    expected = np.asarray(image_files.decode(path, channels)).reshape(47, 61, channels)
    np.testing.assert_array_equal(decode(path, channels).numpy(), expected)


def test_a_truncated_jpeg_is_refused_in_pillows_words(tmp_path: Path) -> None:
    picture(tmp_path / "x.jpg", size=(40, 40))
    (tmp_path / "x.jpg").write_bytes((tmp_path / "x.jpg").read_bytes()[:700])

    with pytest.raises(SwapError, match=r"x\.jpg cannot be read as an image: .*truncated"):
        decode(tmp_path / "x.jpg", 3)


# --- what is said beforehand


def test_plan_and_doctor_say_how_much_disk_copies_take_and_what_is_read(tmp_path: Path) -> None:
    params = read_params(ROOT / "recipes/imagenet.yaml")
    params = replace(params, data=replace(params.data, root=str(tmp_path)))
    plan = plan_params(params, planned_devices(params, 16))
    without = replace(plan, data=replace(plan.data, copies=()))
    by_hand = (1_281_167 + 50_000) * (160 * 160 + 352 * 352) * 4 / 3 * 0.3  # bytes a pixel

    assert plan.data.copies_bytes == pytest.approx(by_hand)
    assert bytes_to_write(plan) - bytes_to_write(without) == pytest.approx(2 * by_hand)
    speed = Throughput(images_per_second=1000, image_size=(128, 128), source="test", measured_on=None)
    text, plain = (
        text_of(Forecast(title="", plan=each, throughput=speed, times=expected_times(each, speed)))
        for each in (plan, without)
    )
    words = " ".join(text.split())
    assert "copies about 79.6 GB, and as much again in DVC's cache; those of 160 px are read for 128" in words
    assert "those of 352 px are read for 224, the files themselves for 288" in words
    assert "copies about" not in plain


# --- resuming


def test_copies_that_are_whole_are_not_made_again_and_the_bytes_are_the_same(
    project_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data(), Path("undisturbed"))
    made: list[str] = []

    def copy_until_the_fifth(image: Image.Image, side: int) -> bytes:
        made.append(f"{image.size} {side}")
        if len(made) == 10:
            raise KeyboardInterrupt
        return image_files.copy_of(image, side)

    monkeypatch.setattr(copies, "copy_of", copy_until_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        prepare(data(), Path("prepared"))
    assert not Path("prepared/meta.json").exists()
    monkeypatch.setattr(copies, "copy_of", lambda image, side: made.append("") or image_files.copy_of(image, side))  # type: ignore[func-returns-value]
    damaged = next(Path(".swap/copies").glob("*/train_20_00000.jpegs"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    made.clear()

    prepare(data(), Path("prepared"))

    assert everything(Path("prepared")) == everything(Path("undisturbed"))
    # Of two blocks that were whole, one is damaged: 2 of 7 images are there.
    assert "copies of 2 of 7 training images are there already" in capsys.readouterr().out
    assert len(made) == 2 * (len(NAMES) + 2 - 2)


def test_copies_of_other_images_or_sizes_are_not_taken_for_these(
    project_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "link_or_copy", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(data(copies=(20,)), Path("prepared"))
    monkeypatch.undo()
    monkeypatch.chdir(project_folder)
    smooth(Path("images") / NAMES[0], (99, 66))

    prepare(data(copies=(20,)), Path("prepared"))

    first = written()["copies_20"][0, 2]
    found = Path("prepared/copies/train_20_00000.jpegs").read_bytes()[:first]
    assert found == by_hand(Path("images") / NAMES[0], 20)


@pytest.mark.long
def test_after_a_kill_the_stage_makes_the_rest_and_ends_in_the_same_bytes(project: Project, tmp_path: Path) -> None:
    for number in range(8300):
        image = tmp_path / f"one_{number % 7}.jpg"
        if number < 7:
            smooth(image, (260 + number, 200))
        path = tmp_path / f"images/{'train' if number > 20 else 'test'}/{'cat' if number % 2 else 'dog'}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(image, path)
    changes = {
        "data.name": "imagefolder",
        "data.root": str(tmp_path / "images"),
        "data.validation_images": 20,
        "data.copies": [40, 80],
        "phase1.image_size": 32,
        "phase2.image_size": 64,
    }
    project.set_params(changes)
    prepared = project.root / "data/prepared"
    command = [sys.executable, "-m", "stages.prepare"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=project.root, env=project.full_environment(), stdout=subprocess.PIPE, text=True
        )

    stage = start()
    wait_until(lambda: any((project.root / ".swap/copies").glob("*/train_00000.json")), seconds=300)
    os.kill(stage.pid, signal.SIGKILL)
    stage.communicate()
    second = start()
    said, _ = second.communicate(timeout=300)
    resumed = everything(prepared)
    third = start()
    third.communicate(timeout=300)

    assert second.returncode == 0 and "training images are there already" in said
    assert resumed == everything(prepared)
    assert not (project.root / ".swap/copies").exists()


# --- what is refused


def view_all() -> None:
    for size in (16, 32):
        list(opened().test_batches(batch_size=4, rank=0, world_size=1, view=View(size=size)))


def hurt(path: Path, kind: str) -> None:
    content = path.read_bytes()
    changed = {
        "cut": content[:-1],
        "empty": b"",
        "flipped": content[:500] + bytes([content[500] ^ 1]) + content[501:],
        "foreign": Path("prepared/copies/train_40_00001.jpegs").read_bytes() * 2,
    }
    path.write_bytes(changed[kind])


@pytest.mark.parametrize("kind", ["cut", "empty", "flipped", "foreign"])
def test_a_damaged_or_foreign_file_of_copies_is_refused_by_name(project_folder: Path, kind: str) -> None:
    prepare(data(), Path("prepared"))
    view_all()
    path = Path("prepared/copies/train_40_00000.jpegs")
    hurt(path, kind)

    with pytest.raises(SwapError, match=r"^prepared/copies/train_40_00000\.jpegs is damaged \([^\n]*run `dvc repro`"):
        view_all()


def test_a_missing_file_of_copies_or_one_that_is_no_file_is_refused(project_folder: Path) -> None:
    prepare(data(), Path("prepared"))
    path = Path("prepared/copies/train_20_00002.jpegs")
    path.unlink()

    with pytest.raises(SwapError, match=r"^prepared/copies/train_20_00002\.jpegs is missing: run `dvc repro`"):
        opened()
    os.mkfifo(path)
    with pytest.raises(SwapError, match=r"train_20_00002\.jpegs is damaged"):
        opened()


def test_an_edit_of_copies_is_told_by_the_index_that_fingerprints_read(project_folder: Path) -> None:
    prepare(data(), Path("prepared"))
    hashes = hash_of(Path("prepared"))

    assert hashes["copies"] == {}
    smooth(Path("images") / NAMES[0], (90, 60))
    prepare(data(), Path("prepared"))
    assert hash_of(Path("prepared"))["train.safetensors"] != hashes["train.safetensors"]


def test_copies_of_images_in_memory_are_refused(project_folder: Path) -> None:
    for name in (*NAMES, "test/cat/a.png", "test/dog/b.png"):
        smooth(Path("images") / name, (50, 40))

    with pytest.raises(SwapError, match=r"data\.copies has no effect on images in memory: .*max_gb_in_memory: 0"):
        prepare(data(), Path("prepared"))
    with pytest.raises(SwapError, match=r"data\.copies has no effect on images in memory: remove it$"):
        prepare(data(name="cifar10"), Path("prepared"))
    assert not Path("prepared/meta.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"copies": [352, 160]}, r"data\.copies is \[352, 160\]: list each size once, in rising order"),
        ({"copies": [160, 160]}, r"data\.copies is \[160, 160\]: list each size once"),
        ({"copies": [100]}, r"data\.copies is \[100\], but no epoch would read them: images of 128 .* at least 160"),
        ({"copies": [4]}, r"data\.copies\[0\] is 4, but must be at least 8"),
        ({"copies": [1 << 13]}, r"data\.copies\[0\] is 8192, but must be at most 4096"),
        ({"copies": 160}, r"data\.copies is 160: write a list"),
        ({"image_size": None}, r"data\.copies is for images that are read from their files: set phase1\.image_size"),
    ],
)
def test_params_that_make_no_sense_are_refused_by_key(changes: dict[str, Any], words: str) -> None:
    tree = read_tree(ROOT / "recipes/imagenet.yaml")
    if "copies" in changes:
        tree["data"]["copies"] = changes["copies"]
    else:
        for phase in ("phase1", "phase2"):
            del tree[phase]["image_size"], tree[phase]["min_scale"]

    with pytest.raises(SwapError, match=words) as refused:
        parse_params(tree)
    assert "\n" not in str(refused.value)
