"""Damaged and hostile files: a clear error or a correct result, whatever is in them.

Another seed: `FUZZ_SEED=1 python -m pytest tests/test_fuzz.py`; more files: `FUZZ_COUNT=20000`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import random
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from conftest import ROOT
from mutations import (
    COUNT,
    Mutant,
    Tensors,
    TensorsAndInfo,
    edited,
    equal,
    file_of,
    fuzz,
    hurt,
    mutant_of_image,
    mutant_of_tensors,
)
from PIL import EpsImagePlugin, Image
from ruamel.yaml import YAML
from safetensors.torch import load, load_file, save, save_file
from torch import nn

from swap_pipeline.averaging.mean import average_files
from swap_pipeline.cli.models.average import Wish, average
from swap_pipeline.cli.models.predict import predict
from swap_pipeline.cli.recipes import list_recipes, recipe_of_params, use_recipe
from swap_pipeline.config.copies import file_of_copies
from swap_pipeline.config.params import Optimizer, Params
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.data.copies import Copies
from swap_pipeline.data.images import read_images
from swap_pipeline.data.loader import FileImages
from swap_pipeline.data.prepared import Meta, read_meta
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.opening import view_of_checkpoint
from swap_pipeline.engine.precision import Scaler
from swap_pipeline.errors import SwapError
from swap_pipeline.models.networks import ResNet9, load_model
from swap_pipeline.storage.image_files import FORMATS, decode, read_image, shape_of
from swap_pipeline.storage.tensor_files import TensorFile, digest_of, read_tensors
from swap_pipeline.storage.weights import load_weights
from swap_pipeline.training.resuming import State, resume
from swap_pipeline.training.run import Run
from swap_pipeline.training.sgd import Sgd
from swap_pipeline.training.shards import Shards

CPU = torch.device("cpu")
ALONE = Group(rank=0, world_size=1, device=CPU)


def network(seed: int, width: int = 1) -> ResNet9:
    torch.manual_seed(seed)
    return ResNet9(width=width, channels=1, num_classes=3)


@cache
def state(seed: int, width: int = 1) -> Tensors:
    return {key: tensor.clone() for key, tensor in network(seed, width).state_dict().items()}


def header(seed: int, width: int = 1) -> dict[str, Any]:
    return {
        "model": {"name": "resnet9", "channels": 1, "num_classes": 3, "width": width},
        "classes": ["ant", "bee", "cat"],
        "shape": [1, 8, 8],
        "mean": [0.5],
        "std": [0.25],
        "phase": "phase2",
        "seed": seed,
    }


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# --- checkpoints


def mean_by_hand(one: Tensors, two: Tensors) -> dict[str, Any]:
    result = {}
    for key, tensor in one.items():
        if not tensor.is_floating_point():
            result[key] = tensor.numpy()
            continue
        mean = (tensor.double().numpy() + two[key].double().numpy()) / 2
        result[key] = torch.from_numpy(np.asarray(mean)).to(tensor.dtype).double().numpy()
    return result


def some_weights(seed: int, width: int = 3) -> Tensors:
    """Tensors of every kind that a network may have."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(2, width, 3, generator=generator),
        "bias": torch.randn(width, generator=generator),
        "double": torch.randn(2, 2, generator=generator, dtype=torch.float64),
        "half": torch.randn(5, generator=generator).half(),
        "brain": torch.randn(5, generator=generator).bfloat16(),
        "num_batches_tracked": torch.tensor(7),
        "mask": torch.tensor([True, False]),
    }


def test_of_weights_the_average_is_right_or_refused(tmp_path: Path) -> None:
    path, good, mean = (tmp_path / f"{name}.safetensors" for name in ("x", "good", "mean"))
    good.write_bytes(file_of(some_weights(1), header(1)))
    original = TensorsAndInfo(some_weights(2), header(2))
    others = [TensorsAndInfo(some_weights(3), header(3)), TensorsAndInfo(some_weights(3, width=2), header(3, width=2))]

    def answer(mutant: Mutant) -> str | None:
        path.write_bytes(mutant.content)
        with naming(path):
            tensors, info = read_tensors(path)
            if not equal(tensors, mutant.tensors):
                return "other tensors than those in the file"
            if as_json(info) != as_json(mutant.info):
                return "another header than that of the file"
            average_files([good, path], mean, {})
        found, expected = read_tensors(mean)[0], mean_by_hand(some_weights(1), mutant.tensors)
        if any(not np.array_equal(found[key].double().numpy(), values) for key, values in expected.items()):
            return "a wrong average"
        finite = all(np.isfinite(values).all() for values in expected.values())
        return None if finite else "an average that is not finite"

    def draw(chance: random.Random) -> Mutant:
        return mutant_of_tensors(original, chance.choice(others), chance)

    count = 3 * COUNT // 4
    tally = fuzz(
        "weights", lambda chance: mutant_of_tensors(original, chance.choice(others), chance), answer, count=count
    )

    assert tally.refused > count / 2 and tally.accepted > count / 20


def test_of_files_from_elsewhere_swap_average_writes_the_mean_or_nothing(tmp_path: Path) -> None:
    path, good, mean = (tmp_path / f"{name}.safetensors" for name in ("x", "good", "mean"))
    one, two = some_weights(1), some_weights(2)
    save_file(one, good)
    original, other = save(two), save(some_weights(3, width=2))

    def draw(chance: random.Random) -> Mutant:
        what, content = hurt(original, other, chance)
        return Mutant(what=what, content=content)

    def answer(mutant: Mutant) -> str | None:
        path.write_bytes(mutant.content)
        mean.unlink(missing_ok=True)
        try:
            with naming(path):
                average([good, path], mean, Wish())
        except SwapError:
            assert [each.name for each in tmp_path.iterdir() if each not in (path, good)] == []
            raise
        expected = mean_by_hand(one, load(mutant.content))  # without digests, other values are as good
        found = load_file(mean)
        same = found.keys() == expected.keys() and all(
            np.array_equal(found[key].double().numpy(), values) for key, values in expected.items()
        )
        return None if same else "a wrong average"

    tally = fuzz("foreign weights", draw, answer, count=COUNT // 2)

    assert tally.refused > COUNT / 6 and tally.accepted > COUNT / 40


def test_of_checkpoints_swap_average_computes_statistics_or_refuses_them(tmp_path: Path) -> None:
    path, good, mean = (tmp_path / f"{name}.safetensors" for name in ("x", "good", "mean"))
    for number in range(3):
        Image.new("L", (8, 8), 50 * number).save(tmp_path / f"{number}.png")
    good.write_bytes(file_of(state(1), header(1)))
    viewed = {"view": {"size": 8, "min_scale": 0.5}, "test_crop": "rectangle"}
    originals = [TensorsAndInfo(state(2), header(2)), TensorsAndInfo(state(2), header(2) | viewed)]
    others = [TensorsAndInfo(state(3), header(3)), TensorsAndInfo(state(3, width=2), header(3, width=2))]

    def answer(mutant: Mutant) -> str | None:
        path.write_bytes(mutant.content)
        mean.unlink(missing_ok=True)
        with naming(path):
            average([good, path], mean, Wish(data=tmp_path))
        network = load_model(mean)
        expected = mean_by_hand(state(1), mutant.tensors)
        same = all(
            np.array_equal(tensor.double().numpy(), expected[key])
            for key, tensor in network.state_dict().items()
            if "running" not in key
        )
        return None if same else "a wrong average"

    tally = fuzz(
        "statistics",
        lambda chance: mutant_of_tensors(chance.choice(originals), chance.choice(others), chance),
        answer,
        count=COUNT // 8,
    )

    assert tally.refused > COUNT / 20 and tally.accepted > 0


@pytest.mark.long
def test_of_a_checkpoint_the_network_in_it_is_loaded_and_used_or_refused(tmp_path: Path) -> None:
    path, image = tmp_path / "x.safetensors", tmp_path / "image.png"
    Image.new("L", (8, 8), 100).save(image)
    viewed = {"view": {"size": 8, "min_scale": 0.5}, "test_crop": "square"}
    originals = [TensorsAndInfo(state(2), header(2)), TensorsAndInfo(state(2), header(2) | viewed)]
    others = [TensorsAndInfo(state(3), header(3)), TensorsAndInfo(state(3, width=2), header(3, width=2))]

    def answer(mutant: Mutant) -> str | None:
        path.write_bytes(mutant.content)
        with naming(path):
            into = network(4)
            load_weights(into, path)
            if not equal(into.state_dict(), mutant.tensors):
                return "other weights than those in the file"
            view = view_of_checkpoint(path)
            if view is not None and dataclasses.asdict(view) != mutant.info["view"]:
                return f"a view {view}"
            ((_, classes),) = predict([image], path)
            if not equal(load_model(path).state_dict(), mutant.tensors):
                return "load_model has other weights than those in the file"
        if {name for name, _ in classes} != set(mutant.info["classes"]):
            return f"classes {classes}"
        total = sum(probability for _, probability in classes)
        return None if abs(total - 1) < 1e-5 else f"probabilities {classes}"

    def draw(chance: random.Random) -> Mutant:
        return mutant_of_tensors(chance.choice(originals), chance.choice(others), chance)

    count = COUNT // 4
    tally = fuzz("checkpoint", draw, answer, count=count)

    assert tally.refused > count / 2 and tally.accepted > count / 20


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What is refused in this block is refused by the name of the file."""
    try:
        yield
    except SwapError as error:
        if str(path) not in str(error):
            raise AssertionError(f"the file is not named: {error}") from error
        raise


# --- snapshots


def little(seed: int, width: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, width, 3, bias=False), nn.BatchNorm2d(width))


def sgd_of(net: nn.Module) -> Sgd:
    optimizer = Optimizer(
        momentum=0.9, nesterov=True, weight_decay=0.0, decay_norms=True, decay_biases=True, label_smoothing=0.0
    )
    return Sgd(net, optimizer, Scaler("fp32", CPU))


def snapshot(seed: int, epochs: int, width: int = 2) -> tuple[Tensors, dict[str, Any]]:
    net = little(seed, width)
    tensors = {f"network.{key}": tensor for key, tensor in net.state_dict().items()}
    tensors |= {f"optimizer.{key}": torch.rand_like(p.detach()) for key, p in net.named_parameters()}
    rows = [
        {
            "epoch": epoch,
            "learning_rate": 0.1,
            "train_loss": 1.5,
            "train_accuracy": 50.0,
            "noise_scale": None,
            "loss": 1.4,
            "accuracy": 49.0,
            "top5": None,
            "seconds": 0.5,
        }
        for epoch in range(1, epochs + 1)
    ]
    return tensors, {
        "run": ["phase1", 5],
        "curve": rows,
        "precision": "fp32",
        "scaler": {},
        "optimizer": {},
        "hardware": "cpu",
    }


@pytest.mark.long
def test_of_a_snapshot_training_takes_what_is_in_it_or_the_one_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(
        name="phase1", section="phase1", seed=5, batch_size=lambda epoch: 4, epochs=9, learning_rate=lambda epoch: 0.1
    )
    older, newer = tmp_path / "snapshot_000001.safetensors", tmp_path / "snapshot_000002.safetensors"
    before, after = TensorsAndInfo(*snapshot(1, 1)), TensorsAndInfo(*snapshot(2, 2))
    others = [before, TensorsAndInfo(*snapshot(3, 2, width=3)), TensorsAndInfo(state(2), header(2))]

    def draw(chance: random.Random) -> Mutant:
        return mutant_of_tensors(after, chance.choice(others), chance)

    def answer(mutant: Mutant) -> str | None:
        for leftover in tmp_path.iterdir():
            leftover.unlink()
        older.write_bytes(before.content)
        newer.write_bytes(mutant.content)
        net = little(4)
        sgd = sgd_of(net)
        shards = Shards(dict(net.named_buffers()), run.shards, ALONE)
        state = State(network=net, sgd=sgd, shards=shards, mean=None, group=ALONE)
        curve, _ = resume(run, state, tmp_path, num_images=1000, deterministic=True) or ([], None)
        parts = {"network": net.state_dict(), "optimizer": sgd.state()}
        found = {f"{part}.{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()}
        said = capsys.readouterr().out
        if "starting afresh" in said:  # trained in another precision
            return None if curve == [] and not newer.exists() else f"said {said!r}"
        if not newer.exists():
            if newer.with_suffix(".damaged").read_bytes() != mutant.content:
                return "the renamed file is not the one that was there"
            if "warning: " not in said or said.count("\n") != 1 or newer.name not in said:
                return f"no warning in one line: {said!r}"
            whole = equal(found, before.tensors) and [row.epoch for row in curve] == [1]
            raise SwapError(said.strip()) if whole else AssertionError("it did not resume from the one before")
        if said:
            return f"said {said!r}"
        if not equal(found, mutant.tensors):
            return "other weights than those in the file"
        same = as_json([dataclasses.asdict(row) for row in curve]) == as_json(mutant.info["curve"])
        return None if same else "another curve"

    tally = fuzz("snapshot", draw, answer)
    assert tally.refused > COUNT / 4 and tally.accepted > COUNT / 50


# --- prepared data


def prepared(kind: str, seed: int) -> tuple[dict[str, TensorsAndInfo], dict[str, Any]]:
    """Both splits of a small data set, as `prepare` writes them, and its meta.json."""
    generator = torch.Generator().manual_seed(seed)
    shape = [1, 4, 4] if kind == "memory" else [1, None, None]
    meta = {"kind": kind, "classes": ["ant", "bee"], "shape": shape, "mean": [0.5], "std": [0.25]}
    meta["mean"] = [0.5 + seed / 100]
    splits = {}
    for split in ("train", "test"):
        tensors = {"labels": torch.tensor([0, 1, 1, 0])}
        if kind == "memory":
            tensors["images"] = torch.randint(256, (4, 1, 4, 4), generator=generator, dtype=torch.uint8)
        else:
            paths = [f"{split}/{name}.png".encode() for name in ("ant/1", "bee/1", "bee/22", "ant/é")]
            tensors |= {
                "heights": torch.tensor([8, 9, 10, 11], dtype=torch.int32),
                "widths": torch.tensor([8, 8, 8, 8], dtype=torch.int32),
                "paths": torch.frombuffer(bytearray(b"".join(paths)), dtype=torch.uint8),
                "path_ends": torch.tensor(np.cumsum([len(path) for path in paths])),
                "digests": torch.zeros(4, 8, dtype=torch.uint8),
            }
        splits[split] = TensorsAndInfo(tensors, {"split": split, "meta": digest_of(meta)})
    return splits, meta


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_of_prepared_data_the_images_are_those_that_were_prepared_or_refused(tmp_path: Path, kind: str) -> None:
    splits, meta = prepared(kind, 1)
    foreign, foreign_meta = prepared(kind, 2)
    others = [splits["test"], foreign["train"], foreign["test"], prepared("memory", 3)[0]["train"]]

    def draw(chance: random.Random) -> Mutant:
        if chance.random() < 0.6:
            return mutant_of_tensors(splits["train"], chance.choice(others), chance)
        content, other = json.dumps(meta).encode(), json.dumps(foreign_meta).encode()
        if chance.random() < 0.5:
            what, content = hurt(content, other, chance)
        else:
            what, tree = edited(meta, chance)
            content = json.dumps(tree).encode()
        return splits["train"].mutant(f"meta.json: {what}", content)

    def answer(mutant: Mutant) -> str | None:
        hurt_meta = mutant.what.startswith("meta.json")
        (tmp_path / "meta.json").write_bytes(mutant.content if hurt_meta else json.dumps(meta).encode())
        (tmp_path / "test.safetensors").write_bytes(splits["test"].content)
        (tmp_path / "train.safetensors").write_bytes(splits["train"].content if hurt_meta else mutant.content)
        with naming(tmp_path):
            found = read_meta(tmp_path)
            # Whatever the file says by now, images were prepared with this.
            if (list(found.classes), list(found.mean), found.channels) != (meta["classes"], meta["mean"], 1):
                read_split(found)
                return f"meta.json is believed: {found}"
            tensors = read_split(found)
        if not hurt_meta and [mutant.info.get(key) for key in ("split", "meta")] != ["train", digest_of(meta)]:
            return "images of another split or data set are believed"
        if mutant.tensors["labels"].tolist() != tensors.pop("labels").tolist():
            return "other labels than those in the file"
        return None if equal(tensors, {key: mutant.tensors[key] for key in tensors}) else "other images"

    def read_split(found: Meta) -> Tensors:
        if found.in_memory:
            images = read_images(tmp_path, "train", CPU)
            return {"labels": images.labels, "images": images.pixels}
        files = FileImages(tmp_path, "train", found, root=tmp_path, test_crop="square", device=CPU)
        reader = files._loader.dataset
        inside = [reader.path(index) for index in range(len(files))]  # type: ignore[attr-defined]
        assert all(path.resolve().is_relative_to(tmp_path) for path in inside), inside
        joined = b"".join(str(path.relative_to(tmp_path)).encode() for path in inside)
        return {
            "labels": reader.labels,  # type: ignore[attr-defined]
            "paths": torch.frombuffer(bytearray(joined), dtype=torch.uint8),
            "heights": torch.from_numpy(reader.heights),  # type: ignore[attr-defined]
            "widths": torch.from_numpy(reader.widths),  # type: ignore[attr-defined]
        }

    count = COUNT // 2
    tally = fuzz(f"prepared {kind}", draw, answer, count=count)

    assert tally.refused > count / 2 and tally.accepted > count / 50


# --- copies of images


def test_of_copies_the_bytes_are_those_that_were_written_or_refused(tmp_path: Path) -> None:
    chance = random.Random(0)
    copies = [chance.randbytes(length) for length in (90, 40, 70, 1)]
    files = [b"".join(copies[:2]), b"".join(copies[2:])]
    places = torch.tensor([[0, 0, 90], [0, 90, 40], [1, 0, 70], [1, 70, 1]])

    def index_of(copies: list[bytes]) -> TensorsAndInfo:
        digests = b"".join(map(xxhash.xxh3_64_digest, copies))
        tensors = {
            "labels": torch.tensor([0, 1, 1, 0]),
            "copies_16": places,
            "copy_digests_16": torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(4, 8),
        }
        return TensorsAndInfo(tensors, {"split": "train"})

    index, foreign = index_of(copies), index_of(copies[::-1])
    path = tmp_path / "train.safetensors"

    def draw(chance: random.Random) -> Mutant:
        if chance.random() < 0.5:
            return mutant_of_tensors(index, foreign, chance)
        what, content = hurt(files[0], files[1], chance)
        return index.mutant(f"copies: {what}", content)

    def answer(mutant: Mutant) -> str | None:
        hurt_copies = mutant.what.startswith("copies")
        path.write_bytes(index.content if hurt_copies else mutant.content)
        for number, content in enumerate(files):
            place = file_of_copies(tmp_path, "train", 16, number)
            place.write_bytes(mutant.content if hurt_copies and number == 0 else content)
        with naming(tmp_path):
            file = TensorFile(path)
            if "labels" not in file.layout or not file.layout["labels"].shape:
                raise SwapError(f"{path}: that is checked by those who open it")
            reader = Copies(tmp_path, "train", 16, file)
            found = [reader.read(position)[0] for position in range(file.layout["labels"].shape[0])]
        named = [
            files[number][start : start + length] for number, start, length in mutant.tensors["copies_16"].tolist()
        ]
        return None if found == named else "other bytes than those that were written"

    tally = fuzz("copies", draw, answer, count=COUNT // 2)

    assert tally.refused > COUNT / 4 and tally.accepted > COUNT / 100


# --- image files

SAVED_AS: dict[str, tuple[str, ...]] = {
    "BMP": ("1", "L", "P", "RGB"),
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "PPM": ("1", "L", "RGB", "I;16"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F"),
    "WEBP": ("RGB", "RGBA"),
}


@cache
def saved(kind: str, mode: str, seed: int, **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (11, 13, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert("L" if mode == "I;16" else "RGB").convert(mode).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", SAVED_AS)
def test_of_an_image_file_the_pixels_are_read_or_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(SAVED_AS) == set(FORMATS)
    most = Image.MAX_IMAGE_PIXELS or 0  # twice as many are decoded, in one and a half gigabytes, and more are refused
    path = tmp_path / "x.png"
    options = [{"compression": name} for name in (None, "tiff_lzw", "tiff_adobe_deflate")] if kind == "TIFF" else [{}]
    files = [saved(kind, mode, 1, **each) for mode in SAVED_AS[kind] for each in options]
    starts_ghostscript = saved("EPS", "RGB", 1)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))

    def draw(chance: random.Random) -> Mutant:
        first = starts_ghostscript if chance.random() < 0.1 else chance.choice(files)
        return mutant_of_image(first, chance.choice(files), chance)

    def answer(mutant: Mutant) -> str | None:
        path.write_bytes(mutant.content)
        with naming(path):
            try:
                shape = shape_of(path)
                _, image = read_image(path, None)
                decode(path, 1), decode(path, 3)
            except SwapError as error:
                if "MemoryError" not in str(error) or math.prod(Image.open(path).size) > most:
                    raise
                return f"much memory is taken: {error}"
        found = (len(image.getbands()), image.height, image.width)
        return None if found == shape else f"{shape} in the header, {found} in the pixels"

    count = COUNT // 4
    tally = fuzz(f"image {kind}", draw, answer, count=count)

    assert tally.refused > count / 20 and tally.accepted > count / 20


# --- params files and recipes


@cache
def small_params() -> str:
    """The default recipe without its comments, and small, since some thousands are read."""
    yaml = YAML(typ="safe", pure=True)
    tree = yaml.load((ROOT / "recipes" / "fashion-mini.yaml").read_text())
    text = io.StringIO()
    yaml.default_flow_style = False
    yaml.dump(tree, text)
    return text.getvalue()


def tree_of(params: Params) -> Any:
    """Params as a file holds them."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {
                f.name: plain(getattr(value, f.name))
                for f in dataclasses.fields(value)
                if getattr(value, f.name) is not None
            }
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    return plain(params)


def with_defaults(tree: Any, kind: Any = Params) -> Any:
    """What a file says, and what it does not mention."""
    hints, said = typing.get_type_hints(kind), dict(tree)
    for field in dataclasses.fields(kind):
        if field.name in said and dataclasses.is_dataclass(hints[field.name]):
            said[field.name] = with_defaults(said[field.name], hints[field.name])
        elif field.default not in (dataclasses.MISSING, None):
            said.setdefault(field.name, [] if field.default == () else field.default)
    return said


def test_of_a_params_file_what_is_in_it_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    small, other = small_params().encode(), (ROOT / "recipes" / "imagenet.yaml").read_bytes()
    yaml = YAML(typ="safe", pure=True)
    tree = yaml.load(small_params())

    def draw(chance: random.Random) -> Mutant:
        if chance.random() < 0.1:  # the recipes below have more
            what, content = hurt(small, other, chance)
            return Mutant(what=what, content=content)
        what, changed = edited(tree, chance)
        return Mutant(what=what, content=b"", info=changed)

    def answer(mutant: Mutant) -> str | None:
        if mutant.content:
            path.write_bytes(mutant.content)
            try:
                params = read_params(path)
            except SwapError as error:
                if not str(error).startswith(str(path)):
                    return f"does not name the file: {error}"
                raise
            expected = yaml.load(mutant.content.decode())
        else:
            params, expected = parse_params(mutant.info), mutant.info
        return None if tree_of(params) == with_defaults(expected) else "other params than those in the file"

    tally = fuzz("params", draw, answer)
    assert tally.refused > COUNT / 4 and tally.accepted > COUNT / 50


def with_options(options: str) -> str:
    """A params file in which nothing else is wrong."""
    return small_params().replace("  name: resnet9\n", f"  name: resnet9\n  options: {options}\n")


# Twelve short lines, and 8¹² words.
BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in itertools.pairwise("abcdefghijkl")
)
HOSTILE_YAML = {
    "bomb": f"{BOMB}data: *l\n",
    "itself": "data: &a\n  name: *a\n",
    "itself in options": with_options("&a {b: *a}"),
    "bomb in options": with_options("{" + BOMB.strip().replace("\n", ", ") + "}"),
    "deep": "data: " + "[" * 3000 + "]" * 3000,
    "deep sections": "".join(" " * level + "a:\n" for level in range(300)),
    "digits": "seed: " + "9" * 5000,
    "bits": "phase1: 0x" + "f" * 5000,
    "no date": "data: 2001-99-99",
    "no time": "data: 2001-01-01 99:99:99",
    "odd keys": "? [a, b]\n: c",
    "key of a section": "? {a: b}\n: c",
    "merge": "data: {<<: 3}",
    "twice": "data: 1\ndata: 2",
    "tag": "data: !!python/object/apply:os.system [true]",
    "tag of a number": "data: !!int x",
    "bytes": "data: !!binary '%%%'",
    "set": "data: !!set {a, b}",
    "ordered": "data: !!omap [a: 1]",
    "version": "%YAML 9.9\n---\ndata: 1",
    "documents": "data: 1\n---\ndata: 2",
    "control": "data: \x07",
    "long key": "x" * 5000 + ": 1",
    "key in lines": '"a\\nb": 1',
    "large": small_params() + "# " + "x" * 2_000_000,
    "nothing": "",
    "a word": "x",
    "not text": "\ud800",
}


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_a_params_file_made_to_hurt_is_refused_in_one_line_with_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "params.yaml"

    def answer(mutant: Mutant) -> str | None:
        path.write_bytes(mutant.content)
        with naming(path):
            read_params(path)
        return "it was believed"

    content = HOSTILE_YAML[name].encode(errors="surrogatepass")
    tally = fuzz(name, lambda chance: Mutant(what=name, content=content), answer, count=1)

    assert tally.refused == 1


@pytest.mark.long
def test_of_a_recipe_params_yaml_is_all_of_it_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    small, other = small_params().encode(), b"# another\n" + small_params().encode()
    Path("recipes/other.yaml").write_bytes(other)
    tree = YAML(typ="safe", pure=True).load(small_params())

    def draw(chance: random.Random) -> Mutant:
        if chance.random() < 0.7:
            return Mutant(**dict(zip(("what", "content"), hurt(small, other, chance), strict=True)))
        what, changed = edited(tree, chance)
        return Mutant(what=what, content=json.dumps(changed, default=str).encode())  # YAML too

    def answer(mutant: Mutant) -> str | None:
        Path("recipes/hurt.yaml").write_bytes(mutant.content)
        Path("params.yaml").write_bytes(other)
        listed = {recipe.name: recipe.summary for recipe in list_recipes()}
        if listed.keys() != {"hurt", "other"} or not all(map(str.isprintable, listed.values())):
            return f"listed {listed}"
        try:
            with naming(Path("recipes/hurt.yaml")):
                use_recipe("hurt", force=True)
        except SwapError:
            if Path("params.yaml").read_bytes() != other:
                return "params.yaml was overwritten with what is not valid"
            raise
        if Path("params.yaml").read_bytes() != mutant.content or not recipe_of_params(list_recipes())[1]:
            return "params.yaml is not the recipe"
        return None

    tally = fuzz("recipe", draw, answer)

    assert tally.refused > COUNT / 4 and tally.accepted > COUNT / 50
