"""What a job begins with: the prepared images, on this rank's device, and how a model saw them."""

from __future__ import annotations

from pathlib import Path

from swap_pipeline.config.common_params import Setting
from swap_pipeline.data.images import Split, read_images
from swap_pipeline.data.prepared import Meta, View, read_meta, view_in
from swap_pipeline.engine.distributed import Group
from swap_pipeline.engine.out_of_memory import must_fit
from swap_pipeline.runtime.environment import find_root
from swap_pipeline.storage.tensor_files import TensorFile

PREPARED = Path("data/prepared")


def open_data(setting: Setting, group: Group) -> tuple[Meta, Split, Split]:
    """The prepared data set for this rank's device: what is known of it, training and test images."""
    meta = read_meta(PREPARED)
    if meta.in_memory:
        with must_fit("the prepared images", remedy="lower data.max_gb_in_memory, so that they stay in their files"):
            return meta, read_images(PREPARED, "train", group.device), read_images(PREPARED, "test", group.device)
    from swap_pipeline.data.loader import FileImages  # with torchvision, which doubles a rank's start-up time

    def split(name: str) -> FileImages:
        root = find_root(setting.root)
        return FileImages(PREPARED, name, meta, root=root, test_crop=setting.augment.test_crop, device=group.device)

    train_images, test_images = split("train"), split("test")
    for images in (train_images, test_images):
        images.start()
    return meta, train_images, test_images


def view_of_checkpoint(path: Path) -> View | None:
    """How the network in this file saw its training images last."""
    return view_in(TensorFile(path).info, path)
