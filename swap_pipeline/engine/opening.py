"""Opening a job's inputs: the prepared images, on this rank's device, and how a model saw them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_pipeline.config.common_params import Setting
from swap_pipeline.data.images import Split, read_images
from swap_pipeline.data.prepared import Meta, View, read_meta, view_in
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.runtime.environment import find_root
from swap_pipeline.storage.tensor_files import TensorFile

PREPARED = Path("data/prepared")


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The prepared data set, on this rank's device."""

    meta: Meta
    train: Split
    test: Split
    """for final models; without a validation set, for everything"""
    validation: Split | None

    @property
    def num_classes(self) -> int:
        return len(self.meta.classes)

    @property
    def held_out(self) -> Split:
        """Images on which models are evaluated until they are final, and by which choices are made."""
        return self.test if self.validation is None else self.validation

    @property
    def held_out_name(self) -> str:
        return "test" if self.validation is None else "validation"

    def as_json(self) -> dict[str, Any]:
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        return {
            "classes": list(self.meta.classes),
            "shape": list(self.meta.shape or (self.meta.channels, None, None)),
            "images": {name: len(images) for name, images in splits.items() if images is not None},
        }


def open_data(setting: Setting, group: Group) -> PreparedData:
    """All splits; starts loading those that are used first."""
    meta = read_meta(PREPARED)
    names = ("train", "test", *(["validation"] if meta.num_validation else []))
    if meta.in_memory:
        with must_fit("the prepared images", remedy="lower data.max_gb_in_memory, so that they stay in their files"):
            splits: dict[str, Split] = {name: read_images(PREPARED, name, group.device) for name in names}
    else:
        from swap_pipeline.data.loader import FileImages  # with torchvision, which doubles a rank's start-up time

        root, crop = find_root(setting.root), setting.augment.test_crop
        splits = {
            name: FileImages(PREPARED, name, meta, root=root, test_crop=crop, device=group.device) for name in names
        }
    data = PreparedData(meta=meta, train=splits["train"], test=splits["test"], validation=splits.get("validation"))
    for images in (data.train, data.held_out):
        images.start()
    return data


def view_of_checkpoint(path: Path) -> View | None:
    """How the network in this file last saw its training images."""
    return view_in(TensorFile(path).info, path)
