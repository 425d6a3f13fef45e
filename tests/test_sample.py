"""A fixed sample of the images, in memory or in files, and passes over it that are made once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loader import CPU, META, SIZES, folder

from swap_pipeline.analysis import sample
from swap_pipeline.analysis.landscape_job import Prober
from swap_pipeline.analysis.planes import parameter_names
from swap_pipeline.analysis.sample import SamePass, chosen, open_sample
from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.params import Augment, Compute, Model, Phase3
from swap_pipeline.data.loader import FileImages
from swap_pipeline.data.prepared import View
from swap_pipeline.engine.distributed import Group
from swap_pipeline.models.networks import new_network
from swap_pipeline.storage.tensor_files import digest_of, read_tensors, write_tensors

__all__ = ["folder"]  # the fixture, with eleven image files

ALONE = Group(rank=0, world_size=1, device=CPU)
VIEW = View(size=24, min_scale=0.3)


def setting(root: Path, test_crop: str) -> Setting:
    return Setting(
        root=str(root),
        seed=0,
        augment=Augment(padding=0, flip=True, cutout=0, test_crop=test_crop),
        model=Model(name="resnet9", width=2, pretrained=False, zero_init_last_gamma=False),
        compute=Compute(precision="fp32", channels_last=True, compile=False, deterministic=True),
    )


@pytest.fixture
def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an index of the image files that are in `folder`."""
    (folder / "data/prepared").mkdir(parents=True)
    meta = {"kind": "files", "classes": META.classes, "shape": [3, 0, 0], "mean": META.mean, "std": META.std}
    tensors, _ = read_tensors(folder / "train.safetensors")
    for split in ("train", "test"):
        info = {"split": split, "meta": digest_of(json.loads(json.dumps(meta)))}
        write_tensors(folder / f"data/prepared/{split}.safetensors", tensors, info)
    (folder / "data/prepared/meta.json").write_text(json.dumps(meta))
    monkeypatch.chdir(folder)
    return folder


def test_a_sample_is_drawn_without_repetition_from_the_seed_alone() -> None:
    found = chosen(100, 10, seed=3, split="train")
    assert found is not None and len(set(found.tolist())) == 10 and found.tolist() == sorted(found.tolist())
    assert torch.equal(found, chosen(100, 10, seed=3, split="train"))  # type: ignore[arg-type]
    for seed, split in ((4, "train"), (3, "test")):
        assert not torch.equal(found, chosen(100, 10, seed=seed, split=split))  # type: ignore[arg-type]
    assert chosen(100, "all", seed=3, split="train") is None
    assert chosen(100, 100, seed=3, split="train") is None


@pytest.mark.parametrize("test_crop", ["square", "rectangle"])
def test_a_sample_of_image_files_shows_the_chosen_ones_as_the_whole_does(prepared: Path, test_crop: str) -> None:
    whole = FileImages(prepared, "train", META, root=prepared, test_crop=test_crop, device=CPU)
    some = open_sample(
        "train", 4, seed=0, setting=setting(prepared, test_crop), group=ALONE, scratch=prepared / "scratch"
    )
    indices = chosen(len(SIZES), 4, seed=0, split="train")
    assert indices is not None and len(some) == 4

    def one_by_one(images: FileImages) -> list[tuple[torch.Tensor, int]]:
        batches = images.test_batches(batch_size=1, rank=0, world_size=1, view=VIEW)
        return [(pixels[0], int(labels[0])) for pixels, labels in batches]

    expected, found = one_by_one(whole), one_by_one(some)  # type: ignore[arg-type]
    if test_crop == "square":
        expected = [expected[i] for i in indices.tolist()]
    assert len(found) == 4
    for pixels, label in found:  # rectangles come sorted by their shape
        assert any(label == other and torch.equal(pixels, same) for same, other in expected)


@pytest.mark.parametrize("augment", [False, True])
def test_landscapes_of_image_files_are_the_same_whether_their_batches_are_kept_or_read_anew(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, augment: bool
) -> None:
    network = new_network({"name": "resnet9", "width": 2, "channels": 3, "num_classes": 3}, seed=1)
    weights = [torch.cat([network.get_parameter(n).detach().double().reshape(-1) for n in parameter_names(network)])]
    weights.append(weights[0] * 1.5 + 0.1)

    def errors() -> list[tuple[float, float]]:
        prober = Prober(
            network,
            statistics=Phase3(batch_size=4, augment=augment),
            setting=setting(prepared, "rectangle"),
            view=VIEW,
            train_images=8,
            test_images=7,
            group=ALONE,
            scratch=prepared / "scratch",
        )
        return [(found.train, found.test) for found in map(prober.errors, (*weights, weights[0]))]

    kept = errors()
    monkeypatch.setattr(sample, "_ROOM_ON_CPU", 0)
    assert errors() == kept
    assert kept[0] == kept[2]


@pytest.mark.long
def test_statistics_at_a_point_are_computed_as_phase_3_says(prepared: Path) -> None:
    network = new_network({"name": "resnet9", "width": 2, "channels": 3, "num_classes": 3}, seed=1)
    weights = torch.cat([parameter.detach().double().reshape(-1) for parameter in network.parameters()])

    def statistics(*, seed: int = 0, **changed: Any) -> torch.Tensor:
        given = Phase3(batch_size=4, augment=False)
        prober = Prober(
            network,
            statistics=replace(given, **changed),
            setting=replace(setting(prepared, "square"), seed=seed),
            view=VIEW,
            train_images="all",
            test_images=2,
            group=ALONE,
            scratch=prepared / "scratch",
        )
        prober.errors(weights)
        return torch.cat([buffer.double().reshape(-1) for buffer in network.buffers()])

    as_given = statistics()
    assert torch.equal(as_given, statistics())
    for changed in ({"batch_size": 6}, {"augment": True}, {"seed": 1}):
        assert not torch.allclose(as_given, statistics(**changed), rtol=1e-4), changed


def test_a_pass_that_is_kept_is_made_once() -> None:
    made = []

    def make() -> list[int]:
        made.append(1)
        return [1, 2]

    kept, fresh = SamePass(make, keep=True), SamePass(make, keep=False)
    assert [list(kept), list(kept), list(fresh), list(fresh)] == [[1, 2]] * 4
    assert len(made) == 3
