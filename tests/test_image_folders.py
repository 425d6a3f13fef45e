"""Folders of images: what `prepare` finds in them, makes of them, and refuses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import xxhash
from conftest import Project, wait_until
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from torchvision.datasets.folder import IMG_EXTENSIONS

from swap_pipeline.config.params import Data
from swap_pipeline.datasets import image_folders
from swap_pipeline.datasets.prepare import prepare
from swap_pipeline.errors import SwapError

REAL = os.environ.get("SWAP_TEST_IMAGE_FOLDER")


def settings(
    root: Path, name: str = "imagefolder", train_images: int | Literal["all"] = "all", max_gb: float = 1.0
) -> Data:
    return Data(
        name=name,
        root=str(root),
        train_images=train_images,
        max_gb_in_memory=max_gb,
    )


def picture(path: Path, *, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> Path:
    """Noise that differs from path to path; `size` is width and height."""
    seed = zlib.crc32("/".join(path.parts[-3:]).encode())
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).convert(mode).save(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes, with three and two training images and one test image each."""
    root = tmp_path / "images"
    for name in ("train/cat/a.png", "train/cat/b.png", "train/cat/c.png", "train/dog/a.png", "train/dog/b.png"):
        picture(root / name)
    for name in ("test/cat/a.png", "test/dog/a.png"):
        picture(root / name)
    return root


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


def arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    with safe_open(path, framework="np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def meta(out: Path) -> dict[str, object]:
    tree: dict[str, object] = json.loads((out / "meta.json").read_text())
    return tree


def by_hand(root: Path, paths: list[str], mode: str = "RGB") -> NDArray[np.uint8]:
    pixels = [np.asarray(Image.open(root / path).convert(mode)) for path in paths]
    return np.stack([values.reshape(*values.shape[:2], -1).transpose(2, 0, 1) for values in pixels])


def paths_in(index: dict[str, NDArray[np.generic]]) -> list[str]:
    blob, ends = index["paths"].tobytes(), index["path_ends"].tolist()
    return [blob[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


# --- in memory


def test_images_of_one_size_become_tensors_sorted_by_class_and_path(root: Path, out: Path) -> None:
    line = prepare(settings(root), out)

    train, test = arrays(out / "train.safetensors"), arrays(out / "test.safetensors")
    paths = ["train/cat/a.png", "train/cat/b.png", "train/cat/c.png", "train/dog/a.png", "train/dog/b.png"]
    np.testing.assert_array_equal(train["images"], by_hand(root, paths))
    np.testing.assert_array_equal(test["images"], by_hand(root, ["test/cat/a.png", "test/dog/a.png"]))
    assert train["labels"].tolist() == [0, 0, 0, 1, 1] and train["labels"].dtype == np.int64
    assert test["labels"].tolist() == [0, 1]
    assert line == "imagefolder: 5 training and 2 test images, 3×5×7, 2 classes, in memory"


def test_meta_has_classes_shape_kind_and_moments_of_the_training_pixels(root: Path, out: Path) -> None:
    prepare(settings(root), out)

    pixels = arrays(out / "train.safetensors")["images"].astype(np.float64) / 255
    found = meta(out)
    assert found.pop("mean") == pytest.approx(pixels.mean(axis=(0, 2, 3)).tolist(), rel=1e-12)
    assert found.pop("std") == pytest.approx(pixels.std(axis=(0, 2, 3)).tolist(), rel=1e-12)
    assert found == {"classes": ["cat", "dog"], "shape": [3, 5, 7], "kind": "memory"}


def test_files_are_found_at_any_depth_and_with_any_spelling_of_their_extension(root: Path, out: Path) -> None:
    names = [f"train/cat/z/{index}{extension}" for index, extension in enumerate(IMG_EXTENSIONS)]
    for name in [*names, "train/cat/B.PNG", "train/cat/a/b/c.Jpg", "train/cat/ä ö.png"]:
        grey = name.endswith(".pgm")
        picture(root / name, mode="L" if grey else "RGB")

    prepare(settings(root), out)

    own = ["B.PNG", "a.png", "a/b/c.Jpg", "b.png", "c.png"]  # capitals first, and `.` before `/`
    paths = [f"train/cat/{name}" for name in own] + names + ["train/cat/ä ö.png"]
    found = arrays(out / "train.safetensors")
    np.testing.assert_array_equal(found["images"][: len(paths)], by_hand(root, paths))
    assert found["labels"].tolist() == [0] * len(paths) + [1, 1]


def test_hidden_files_and_those_that_are_no_images_are_skipped_and_counted(root: Path, out: Path) -> None:
    picture(root / "train/cat/.hidden.png")
    picture(root / "train/.hidden/a.png")
    picture(root / "test/loose.png")
    (root / "train/cat/notes.txt").write_text("no image")
    (root / "README.md").write_text("beside the splits, not in them")

    line = prepare(settings(root), out)

    assert "5 training and 2 test images" in line
    assert f"note: 4 files or folders in {root} were skipped" in line


def test_links_are_followed_but_not_in_circles(root: Path, out: Path) -> None:
    (root / "train/dog").rename(root / "elsewhere")
    (root / "train/dog").symlink_to(root / "elsewhere", target_is_directory=True)
    (root / "train/cat/again").symlink_to(root / "train/cat", target_is_directory=True)

    prepare(settings(root), out)

    assert arrays(out / "train.safetensors")["labels"].tolist() == [0, 0, 0, 1, 1]


def test_val_serves_as_test(root: Path, out: Path) -> None:
    (root / "test").rename(root / "val")

    prepare(settings(root), out)

    expected = by_hand(root, ["val/cat/a.png", "val/dog/a.png"])
    np.testing.assert_array_equal(arrays(out / "test.safetensors")["images"], expected)


def test_of_test_and_val_test_is_taken_and_that_is_said(root: Path, out: Path) -> None:
    picture(root / "val/cat/other.png")

    line = prepare(settings(root), out)

    expected = by_hand(root, ["test/cat/a.png", "test/dog/a.png"])
    np.testing.assert_array_equal(arrays(out / "test.safetensors")["images"], expected)
    assert f"note: {root} has both test and val: test is used for testing" in line


@pytest.mark.parametrize("mode", ["L", "1", "LA"])
def test_grey_images_alone_have_one_channel(root: Path, out: Path, mode: str) -> None:
    for path in root.rglob("*.png"):
        picture(path, mode=mode)

    prepare(settings(root), out)

    paths = sorted(path.relative_to(root).as_posix() for path in (root / "train").rglob("*.png"))
    found = arrays(out / "train.safetensors")["images"]
    np.testing.assert_array_equal(found, by_hand(root, paths, mode="L"))
    assert meta(out)["shape"] == [1, 5, 7]
    assert meta(out)["mean"] == pytest.approx([found.mean() / 255], rel=1e-12)


@pytest.mark.parametrize("odd", ["train/dog/b.png", "test/dog/a.png", "train/cat/a.png"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_a_single_image_in_colour_makes_all_of_them_rgb(root: Path, out: Path, odd: str, mode: str) -> None:
    for path in root.rglob("*.png"):
        picture(path, mode=mode if path == root / odd else "L")

    prepare(settings(root), out)

    for split in ("train", "test"):
        paths = sorted(path.relative_to(root).as_posix() for path in (root / split).rglob("*.png"))
        np.testing.assert_array_equal(arrays(out / f"{split}.safetensors")["images"], by_hand(root, paths))
    train = arrays(out / "train.safetensors")["images"]
    assert meta(out)["mean"] == pytest.approx((train.mean(axis=(0, 2, 3)) / 255).tolist(), rel=1e-12)


def test_sixteen_bit_greys_are_scaled(root: Path, out: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 2**16, (5, 7), dtype=np.uint16)
    for path in root.rglob("*.png"):
        Image.fromarray(deep).save(path)

    prepare(settings(root), out)

    np.testing.assert_array_equal(arrays(out / "train.safetensors")["images"][0, 0], deep // 256)


# --- from files


def check_index(root: Path, out: Path, split: str, paths: list[str], labels: list[int]) -> None:
    """Against the folder itself, read independently."""
    index = arrays(out / f"{split}.safetensors")
    assert {key: array.dtype.name for key, array in index.items()} == {
        "labels": "int64",
        "heights": "int32",
        "widths": "int32",
        "paths": "uint8",
        "path_ends": "int64",
        "digests": "uint8",
    }
    assert paths_in(index) == paths
    assert index["labels"].tolist() == labels
    sizes = [Image.open(root / path).size for path in paths]
    assert list(zip(index["widths"].tolist(), index["heights"].tolist(), strict=True)) == sizes
    digests = [xxhash.xxh3_64((root / path).read_bytes()).digest() for path in paths]
    assert [bytes(row) for row in index["digests"]] == digests


def test_images_of_different_sizes_become_an_index(root: Path, out: Path) -> None:
    picture(root / "train/dog/b.png", size=(40, 30))
    picture(root / "train/dog/größe/c.png", size=(8, 9))

    line = prepare(settings(root), out)

    cats, dogs = (
        [f"train/cat/{name}.png" for name in "abc"],
        [f"train/dog/{name}.png" for name in ("a", "b", "größe/c")],
    )
    check_index(root, out, "train", cats + dogs, [0, 0, 0, 1, 1, 1])
    check_index(root, out, "test", ["test/cat/a.png", "test/dog/a.png"], [0, 1])
    assert line == (
        "imagefolder: 6 training and 2 test images, in colour, 2 classes, left in files: they differ in size"
    )


def test_the_moments_of_images_in_files_are_those_of_all_their_pixels(root: Path, out: Path) -> None:
    picture(root / "train/dog/b.png", size=(40, 30))
    picture(root / "train/dog/grey.png", size=(20, 10), mode="L")
    picture(root / "test/dog/huge.png", size=(90, 90))  # does not count

    prepare(settings(root), out)

    pixels = [np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3) for path in (root / "train").rglob("*.png")]
    values = np.concatenate(pixels) / 255
    found = meta(out)
    assert found["mean"] == pytest.approx(values.mean(axis=0).tolist(), rel=1e-12)
    assert found["std"] == pytest.approx(values.std(axis=0).tolist(), rel=1e-12)
    assert (found["kind"], found["shape"]) == ("files", [3, None, None])


def test_the_border_between_the_two_ways_is_the_bytes_of_all_images_together(root: Path, out: Path) -> None:
    num_bytes = 7 * 3 * 5 * 7

    at_the_border = prepare(settings(root, max_gb=num_bytes / 1e9), out)
    kind_at_the_border = meta(out)["kind"]
    above = prepare(settings(root, max_gb=(num_bytes - 1) / 1e9), out)

    assert at_the_border.endswith("in memory") and kind_at_the_border == "memory"
    assert "left in files" in above and "more than data.max_gb_in_memory" in above and meta(out)["kind"] == "files"


def test_a_grey_image_first_does_not_move_the_border(root: Path, out: Path) -> None:
    picture(root / "train/cat/a.png", mode="L")
    num_bytes = 7 * 3 * 5 * 7

    prepare(settings(root, max_gb=num_bytes / 1e9), out)
    assert meta(out)["kind"] == "memory"
    prepare(settings(root, max_gb=(num_bytes - 1) / 1e9), out)
    assert meta(out)["kind"] == "files"


def test_the_hash_of_the_list_changes_with_any_image(root: Path, out: Path) -> None:
    def list_hash() -> str:
        prepare(settings(root, max_gb=0), out)
        with safe_open(out / "train.safetensors", framework="np") as file:
            about = json.loads(file.metadata()["swap_pipeline"])["info"]
        assert about["split"] == "train"
        return str(about["list"])

    hashes = [list_hash(), list_hash()]
    (root / "train/cat/a.png").rename(root / "train/cat/d.png")
    hashes.append(list_hash())
    picture(root / "train/cat/d.png")
    hashes.append(list_hash())
    (root / "train/cat/d.png").unlink()
    hashes.append(list_hash())

    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


# --- what is refused, and what is only said


def remove(*names: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for name in names:
            path = root / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    return change


def empty_folder(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).mkdir(parents=True)


def flat(split: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        shutil.rmtree(root / split)
        for name in ("1.png", "2.png", "3.png"):
            picture(root / split / name)

    return change


def emptied(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        shutil.rmtree(root / name)
        (root / name).mkdir(parents=True)

    return change


def undecodable_name(root: Path) -> None:
    shutil.copy(os.fsencode(root / "train/cat/a.png"), os.fsencode(root / "train/cat") + b"/\xff.png")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove(""), ["params.yaml: data.root is", "does not exist", "train and test"]),
        (emptied(""), ["has no folder train", "train/<class>/"]),
        (remove("train"), ["has no folder train", "train/<class>/"]),
        (remove("test"), ["has no folder test or val", "test/<class>/"]),
        (emptied("train"), ["/train is empty", "train/<class>/"]),
        (emptied("test"), ["/test is empty", "test/<class>/"]),
        (flat("train"), ["/train has 3 images but no class folders", "train/<class>/"]),
        (flat("test"), ["/test has 3 images but no class folders", "test/<class>/"]),
        (empty_folder("train/emu"), ["/train has no images of class emu", "remove the folder"]),
        (empty_folder("test/emu"), ["/test has class emu, which train lacks"]),
        (lambda root: picture(root / "test/emu/a.png"), ["/test has class emu, which train lacks"]),
        (remove("test/cat/a.png", "test/dog/a.png"), ["/test has no images"]),
        (remove("train/dog", "test/dog"), ["/train has a single class (cat)"]),
        (undecodable_name, ["/train/cat has '\\udcff.png'", "not UTF-8"]),
    ],
)
def test_a_tree_that_cannot_be_learned_from_is_refused_in_one_line(
    root: Path, out: Path, change: Callable[[Path], None], words: list[str]
) -> None:
    change(root)

    with pytest.raises(SwapError) as caught:
        prepare(settings(root), out)

    assert "\n" not in str(caught.value)
    for word in [str(root), *words]:
        assert word in str(caught.value)
    assert not out.exists()


def test_a_data_root_that_is_a_file_is_refused(tmp_path: Path, out: Path) -> None:
    path = picture(tmp_path / "image.png")

    with pytest.raises(SwapError, match="which is not a folder"):
        prepare(settings(path), out)


def test_many_classes_are_named_by_the_first_few(root: Path, out: Path) -> None:
    for number in range(8):
        picture(root / f"test/unknown_{number}/a.png")

    with pytest.raises(SwapError, match=r"has 8 classes: unknown_0, .*unknown_4 and 3 more, which train lacks"):
        prepare(settings(root), out)


def test_a_class_without_test_images_is_a_warning(root: Path, out: Path) -> None:
    shutil.rmtree(root / "test/dog")

    line = prepare(settings(root), out)

    assert line.splitlines()[1:] == [
        f"warning: {root}/test has no images of class dog: the test accuracy says nothing about it"
    ]
    assert arrays(out / "test.safetensors")["labels"].tolist() == [0]
    assert meta(out)["classes"] == ["cat", "dog"]


def harm(root: Path) -> list[str]:
    """Makes five images unreadable, each in its own way."""
    names = ["train/cat/a.png", "train/cat/b.png", "train/dog/a.png", "train/dog/link.png", "test/cat/a.png"]
    (root / names[0]).write_bytes(b"")
    (root / names[1]).write_bytes((root / names[1]).read_bytes()[:60])
    (root / names[2]).write_text("an error page instead of an image")
    (root / names[3]).symlink_to(root / "gone.png")
    picture(root / names[4].replace("png", "jpg"), size=(64, 64))
    data = (root / names[4].replace("png", "jpg")).read_bytes()
    (root / names[4]).write_bytes(data[: len(data) // 2])
    (root / names[4].replace("png", "jpg")).unlink()
    return names


def test_all_unreadable_images_are_listed_with_their_reasons(root: Path, out: Path) -> None:
    names = harm(root)

    with pytest.raises(SwapError) as caught:
        prepare(settings(root), out)

    first, *others = str(caught.value).splitlines()
    assert first == f"5 of 8 images in {root} cannot be read: repair or remove them"
    assert len(others) == 5
    reasons = ["the file is empty", "cannot be read as an image", "format is none of", "not found", "truncated"]
    for name, reason, line in zip(names, reasons, others, strict=True):
        assert line.startswith(f"{root / name} ") and reason in line
    assert not out.exists()


def test_the_stage_prints_the_list_without_a_traceback_and_writes_nothing(project: Project, root: Path) -> None:
    harm(root)
    project.set_params({"data.name": "imagefolder", "data.root": str(root)})

    done = project.stage("prepare")

    assert done.returncode == 1
    assert done.stderr.startswith("error: 5 of 8 images") and len(done.stderr.splitlines()) == 6
    assert not (project.root / "data/prepared").exists()


def test_the_stage_prepares_a_folder_and_prints_what_it_found(project: Project, root: Path) -> None:
    project.set_params({"data.name": "imagefolder", "data.root": str(root)})

    done = project.stage("prepare")

    assert done.stdout == "imagefolder: 5 training and 2 test images, 3×5×7, 2 classes, in memory\n", done.stderr
    paths = ["test/cat/a.png", "test/dog/a.png"]
    found = arrays(project.root / "data/prepared/test.safetensors")["images"]
    np.testing.assert_array_equal(found, by_hand(root, paths))


def test_images_that_are_all_of_one_colour_teach_nothing(root: Path, out: Path) -> None:
    for path in root.rglob("*.png"):
        Image.new("L", (4, 4), 128).save(path)

    with pytest.raises(SwapError, match="all training images have the same value in channel 0"):
        prepare(settings(root), out)


# --- many images, in processes


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Enough images for processes to be started; the last of them are in colour."""
    root = tmp_path / "many"
    for number in range(2 * image_folders.POOL_FROM_IMAGES):
        name = "ant" if number < 350 else "bee"
        picture(root / f"train/{name}/{number:04}.png", size=(3, 4), mode="L" if number < 500 else "RGB")
    for name in ("ant", "bee"):
        picture(root / f"test/{name}/0.png", size=(3, 4), mode="L")
    return root


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folders, "POOL_FROM_IMAGES", 10**9)


@pytest.mark.parametrize("max_gb", [1.0, 0.0])
def test_many_processes_make_what_a_single_one_makes(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_gb: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    prepare(settings(many, max_gb=max_gb), tmp_path / "together")
    alone(monkeypatch)
    prepare(settings(many, max_gb=max_gb), tmp_path / "alone")

    for name in ("train.safetensors", "test.safetensors", "meta.json"):
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    if max_gb:
        paths = sorted(path.relative_to(many).as_posix() for path in (many / "train").rglob("*.png"))
        np.testing.assert_array_equal(arrays(tmp_path / "alone" / "train.safetensors")["images"], by_hand(many, paths))


def test_unreadable_images_are_found_in_all_processes(many: Path, out: Path) -> None:
    broken = [many / f"train/ant/{number:04}.png" for number in (0, 120, 349)] + [many / "test/bee/0.png"]
    for path in broken:
        path.write_bytes(b"")

    with pytest.raises(SwapError) as caught:
        prepare(settings(many), out)

    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["4", *map(str, broken)]


def descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(pid for child in children for pid in descendants(child))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_decoder(pid: int) -> bool:
    """Whether a process is one of those that decode: Ctrl-C is blocked there, unlike in multiprocessing's helper."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    blocked = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(blocked >> (signal.SIGINT - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in Linux's /proc")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core has no pool")
@pytest.mark.parametrize("end", ["Ctrl-C", "kill"])
@pytest.mark.long
def test_whatever_ends_the_stage_ends_its_processes(project: Project, tmp_path: Path, end: str) -> None:
    image = picture(tmp_path / "large.jpg", size=(1500, 1500))
    for number in range(4000):
        path = tmp_path / f"images/{'train' if number else 'test'}/{'cat' if number < 2000 else 'dog'}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(image)
    project.set_params({"data.name": "imagefolder", "data.root": str(tmp_path / "images"), "data.max_gb_in_memory": 0})
    stage = subprocess.Popen(
        [sys.executable, "-m", "stages.prepare"],
        cwd=project.root,
        env=project.full_environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: sum(map(is_decoder, descendants(stage.pid))) >= 2, seconds=60)
        family = descendants(stage.pid)
        if end == "Ctrl-C":
            os.killpg(stage.pid, signal.SIGINT)
        else:
            stage.kill()

        output, _ = stage.communicate(timeout=60)
        wait_until(lambda: not any(map(is_running, family)), seconds=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(stage.pid, signal.SIGKILL)

    assert stage.returncode == (128 + signal.SIGINT if end == "Ctrl-C" else -signal.SIGKILL)
    assert output.endswith("interrupted: `dvc repro` resumes from here\n") or end == "kill", output
    assert not (project.root / "data/prepared").exists()


# --- a part of the images, ImageNet, planning


def test_a_part_of_the_training_images_is_the_same_each_time_and_in_order(many: Path, tmp_path: Path) -> None:
    lines = [prepare(settings(many, train_images=101, max_gb=0), tmp_path / name) for name in ("one", "two")]

    found = arrays(tmp_path / "one/train.safetensors")
    assert found["labels"].tolist() == [0] * 51 + [1] * 50
    assert paths_in(found) == sorted(set(paths_in(found)))
    assert "101 training and 2 test images" in lines[0]
    assert "note: 101 of 600 training images are used" in lines[0]
    first, second = ((tmp_path / name / "train.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second


def test_images_that_are_not_chosen_are_not_even_opened(many: Path, tmp_path: Path) -> None:
    prepare(settings(many, train_images=10, max_gb=0), tmp_path / "before")
    chosen = paths_in(arrays(tmp_path / "before/train.safetensors"))
    for path in (many / "train").rglob("*.png"):
        if path.relative_to(many).as_posix() not in chosen:
            path.write_bytes(b"")

    prepare(settings(many, train_images=10, max_gb=0), tmp_path / "after")

    assert paths_in(arrays(tmp_path / "after/train.safetensors")) == chosen


def test_more_images_than_there_are_is_refused(root: Path, out: Path) -> None:
    with pytest.raises(SwapError, match=r"params\.yaml: data\.train_images is 6, but imagefolder has 5: lower it"):
        prepare(settings(root, train_images=6), out)


def imagenet(root: Path) -> Path:
    (root / "test").rename(root / "val")
    return root


def test_imagenet_is_normalised_as_is_customary_on_both_ways(root: Path, out: Path) -> None:
    imagenet(root)
    for max_gb, kind in ((1.0, "memory"), (0.0, "files")):
        line = prepare(settings(root, "imagenet", max_gb=max_gb), out)

        assert meta(out)["kind"] == kind
        assert meta(out)["mean"] == [0.485, 0.456, 0.406] and meta(out)["std"] == [0.229, 0.224, 0.225]
        assert f"note: {root} has 2 classes, ImageNet has 1,000" in line.splitlines()


def test_imagenet_has_three_channels_even_where_all_images_are_grey(root: Path, out: Path) -> None:
    for path in imagenet(root).rglob("*.png"):
        picture(path, mode="L")

    prepare(settings(root, "imagenet"), out)

    paths = ["val/cat/a.png", "val/dog/a.png"]
    np.testing.assert_array_equal(arrays(out / "test.safetensors")["images"], by_hand(root, paths))


def test_imagenets_own_test_images_which_have_no_labels_are_left_alone(root: Path, out: Path) -> None:
    picture(imagenet(root) / "test/ILSVRC2012_test_00000001.png")

    line = prepare(settings(root, "imagenet"), out)

    assert "5 training and 2 test images" in line
    assert f"note: {root} has both val and test: val is used for testing" in line


def test_imagenets_validation_images_must_be_sorted_into_class_folders(root: Path, out: Path) -> None:
    shutil.rmtree(root / "test")
    picture(root / "val/ILSVRC2012_val_00000001.png")

    with pytest.raises(SwapError, match=r"/val has 1 images but no class folders: sort them into val/<class>/"):
        prepare(settings(root, "imagenet"), out)


def test_a_temporary_folder_without_the_images_is_refused(
    root: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC has hashed what is in the temporary folder; reading the project's images would hide changes in them."""
    temporary = tmp_path / "temporary"
    (temporary / root.name).mkdir(parents=True)
    monkeypatch.chdir(temporary)
    monkeypatch.setenv("DVC_ROOT", str(root.parent))

    with pytest.raises(SwapError, match=r"its images are not in this temporary folder.* absolute path, or `dvc add"):
        prepare(settings(Path(root.name)), out)


def test_folders_that_are_links_are_told_since_dvc_does_not_look_behind_them(root: Path, out: Path) -> None:
    (root / "train/cat").rename(root.parent / "cats")
    (root / "train/cat").symlink_to(root.parent / "cats")

    line = prepare(settings(root), out)

    assert "warning: 1 folders in" in line and "are links (train/cat): DVC does not follow them" in line


@pytest.mark.skipif(REAL is None, reason="SWAP_TEST_IMAGE_FOLDER names no folder of images of one size")
def test_a_real_folder_gives_what_pillow_decodes(out: Path) -> None:
    assert REAL is not None
    prepare(settings(Path(REAL), max_gb=100), out)

    for split in ("train", "test"):
        found = arrays(out / f"{split}.safetensors")
        folders = sorted(path for path in (Path(REAL) / split).iterdir())
        paths = [path for folder in folders for path in sorted(folder.iterdir())]
        assert len(found["images"]) == len(paths)
        for path, pixels, label in zip(paths, found["images"], found["labels"], strict=True):
            np.testing.assert_array_equal(pixels, np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1))
            assert folders[int(label)] == path.parent
