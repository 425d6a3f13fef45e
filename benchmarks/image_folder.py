"""Image folders: our loader against torchvision's reference style, ImageFolder with per-image transforms.

Loading alone, without a network: an epoch of normalised batches, with as many loader processes as cores on both sides.
Everything has been read before, so files come from the page cache.

- CIFAR-10 as a folder of small JPEGs (`--cifar`): images of one size that fit into memory are decoded once, by
  `prepare`, so an epoch decodes nothing; the seconds of `prepare` stand in the note. And the same files left where they
  are (`data.max_gb_in_memory: 0`), so that both decode in every epoch.
- JPEGs of 256 pixels, generated, left in their files: what takes the time is decoding and resizing a random crop.
- Images of 500 × 375 pixels, like ImageNet's (`--photos`, or generated), from their files and from smaller copies;
  making these is not in the figure.

Learned: one uint8 batch from each loader process, normalised and flipped as a whole, instead of float images that are
handled one by one and stacked, gave 1.22 at 256 pixels and 1.11 at 32. What was left was Pillow's resizing, which takes
as long as its decoding (480 µs and 400 µs, one image of 256 pixels, busy machine): torch resizes uint8 images whose
channels come last in 90 µs. Then at 256 pixels it was 1.36, at 32 still 1.11: there, decoding takes 40 µs of 370 for an
image, and what takes the time is Python. Where a crop lies is now worked out without torch's scalars, and the whole
takes 225 µs, half of it in Pillow's Python that opens a file.

Decoders, on 150 photographs of 500 × 375 pixels and their copies of 160 (CPU time, one core, medians of 7 turns):
Pillow takes 1.25 and 1.73 times as long as torchvision.io, 1.34 and 1.96 times as long as simplejpeg, and all three
give the same pixels. torchvision is there anyway; simplejpeg would be one more dependency for a tenth. libjpeg-turbo's
faster transform would save another tenth at most, and its pixels differ by up to 100 of 255.
"""

from __future__ import annotations

import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.children import call, say
from benchmarks.harness import Sample, interleaved
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared, left_out
from swap_pipeline.config.copies import copy_for

_LIMIT = Limit("≥", 1.3)
_COPIES = (160, 352)
_OTHER = "ImageFolder, v2, DataLoader"


def measure(options: Options) -> Iterator[Row]:
    yield from _cifar(options)
    yield from _photos(options)
    number, size = options.sized(1_536, 32), options.sized(256, 64)
    folder = options.scratch / "jpegs"
    options.say(f"drawing {number} JPEGs of {size} pixels")
    draw(folder, number=number, width=size, height=size)
    found = _in_turns(options, "jpegs", folder, view=options.sized(224, 32), batch_size=options.sized(64, 8))
    yield compared(
        "image_folder/jpeg_256",
        f"image folder, {number:,} JPEGs of {size} px, random crops to {options.sized(224, 32)} px",
        ours=("our loader", found["ours"]),
        other=(_OTHER, found["torchvision"]),
        unit="images/s",
        limit=_LIMIT,
    )


def _photos(options: Options) -> Iterator[Row]:
    if options.photos is None:
        folder, number = options.scratch / "photos", options.sized(1_024, 32)
        options.say(f"drawing {number} JPEGs of 500 × 375 pixels")
        draw(folder, number=number, width=500, height=375)
    else:
        folder = _folder_of(options.photos, options)
    what = "photographs of about 500 × 375 px" if options.photos else "JPEGs of 500 × 375 px, generated"
    for size in (128, 224):
        found = _in_turns(options, f"photos_{size}", folder, view=size, batch_size=options.sized(64, 8), copies=_COPIES)
        for name, ours, limit in (("", "ours", _LIMIT), ("_copies", "copies", Limit("≥", 3))):
            source = f"from copies of {copy_for(size, _COPIES)} px" if name else "from the files"
            yield compared(
                f"image_folder/photos_{size}{name}",
                f"image folder, {what}, random crops to {size} px, {source}",
                ours=("our loader", found[ours]),
                other=(_OTHER, found["torchvision"]),
                unit="images/s",
                limit=limit,
            )


def _cifar(options: Options) -> Iterator[Row]:
    cases = (
        ("cifar10", "image folder, CIFAR-10 as JPEGs, decoded once", None),
        ("cifar10_files", "image folder, CIFAR-10 as JPEGs, left in files, random crops to 32 px", 32),
    )
    folder = None if options.cifar is None else _folder_of(options.cifar, options)
    for name, what, view in cases:
        key = f"image_folder/{name}"
        if folder is None:
            why = "CIFAR-10 was not given: --cifar PATH, with train/<class>/*.jpg and test/<class>/*.jpg"
            yield left_out(key, what, other=_OTHER, unit="images/s", why=why, limit=_LIMIT)
            continue
        found = _in_turns(options, name, folder, view=view, batch_size=options.sized(128, 8))
        seconds = found["prepare"].median
        once = f"CIFAR-10's folder is decoded once, by prepare, in {seconds:.1f} s; that is not in the figure."
        yield compared(
            key,
            what,
            ours=("our loader", found["ours"]),
            other=(_OTHER, found["torchvision"]),
            unit="images/s",
            limit=_LIMIT,
            note=once if view is None else "",
        )


def _folder_of(path: Path, options: Options) -> Path:
    """The folder with `train` and `test`, unpacked if `path` is a tar."""
    folder = path.resolve()
    if path.is_file():
        folder = options.scratch / "unpacked"
        options.say(f"unpacking {path.name}")
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    found = next((place for place in (folder, *folder.iterdir()) if (place / "train").is_dir()), None)
    if found is None:
        raise RuntimeError(f"{path} has no train/<class>/*.jpg")
    return found


def draw(folder: Path, *, number: int, width: int, height: int) -> None:
    """Smooth shapes with some noise, which compress about as photographs do; the last tenth is for testing."""
    chance = np.random.default_rng(0)
    for index in range(number):
        coarse = chance.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = smooth + chance.integers(-12, 13, smooth.shape, dtype=np.int16)
        split = "test" if index % 10 == 9 else "train"
        path = folder / split / f"class_{index % 4}" / f"{index:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def _in_turns(
    options: Options, name: str, root: Path, *, view: int | None, batch_size: int, copies: Sequence[int] = ()
) -> dict[str, Sample]:
    found = call(
        in_turns,
        threads=options.cores,
        root=str(root),
        prepared=str(options.scratch / f"prepared_{name}"),
        view=view,
        batch_size=batch_size,
        most=options.sized(10_000, 64),
        rounds=options.rounds,
        copies=copies,
    )
    return {name: Sample(tuple(values)) for name, values in found.items()}


def in_turns(
    *, root: str, prepared: str, view: int | None, batch_size: int, most: int, rounds: int, copies: Sequence[int]
) -> dict[str, Any]:
    """In a child: images a second of both, over at most so many images; also of ours from copies, if there are any."""
    from swap_pipeline.config.params import Data
    from swap_pipeline.datasets.prepare import prepare

    data = Data(name="imagefolder", root=root, max_gb_in_memory=2.0 if view is None else 0.0)
    began = time.perf_counter()
    say(prepare(data, Path(prepared)).splitlines()[0])
    seconds = time.perf_counter() - began
    min_scale = 0.08 if copies else 0.25
    ours, number, meta = _ours(Path(prepared), root, view=view, min_scale=min_scale, batch_size=batch_size, most=most)
    contenders = {"ours": ours}
    if copies:
        folder = Path(f"{prepared}_copies")
        say(prepare(replace(data, copies=tuple(copies)), folder).splitlines()[0])
        contenders["copies"], _, _ = _ours(
            folder, root, view=view, min_scale=min_scale, batch_size=batch_size, most=most
        )
    loader = _torchvision_loader(
        Path(root), view=view, min_scale=min_scale, batch_size=batch_size, number=number, meta=meta
    )

    def torchvision() -> float:
        began = time.perf_counter()
        number = 0
        for batch, _ in loader:
            number += len(batch.to(memory_format=torch.channels_last))
        return number / (time.perf_counter() - began)

    found = interleaved({**contenders, "torchvision": torchvision}, rounds=rounds, say=say)
    return {"prepare": [seconds], **{name: list(sample.values) for name, sample in found.items()}}


def _ours(
    prepared: Path, root: str, *, view: int | None, min_scale: float, batch_size: int, most: int
) -> tuple[Callable[[], float], int, Any]:
    """What gives our images a second over an epoch, how many images are in one, and what is known of the data."""
    from swap_pipeline.config.params import Augment
    from swap_pipeline.data.epochs import draw_epoch
    from swap_pipeline.data.images import read_images
    from swap_pipeline.data.loader import FileImages
    from swap_pipeline.data.prepared import View, read_meta

    augment = Augment(padding=4 if view is None else 0, flip=True, cutout=0)
    meta, cpu = read_meta(prepared), torch.device("cpu")
    images = (
        read_images(prepared, "train", cpu)
        if meta.in_memory
        else FileImages(prepared, "train", meta, root=Path(root), test_crop="square", device=cpu)
    )
    images.start()
    seen = None if view is None else View(size=view, min_scale=min_scale)
    steps = min(most, len(images)) // batch_size
    parts = [slice(step * batch_size, (step + 1) * batch_size) for step in range(steps)]
    epochs = iter(range(10_000))

    def ours() -> float:
        began = time.perf_counter()
        choices = draw_epoch(
            seed=0,
            epoch=next(epochs),
            num_images=len(images),
            image_size=images.image_shape(seen)[1:],
            augment=augment,
        )
        number = 0
        for batch, _ in images.batches(choices, parts, view=seen, channels_last=True):
            number += len(batch)
        return number / (time.perf_counter() - began)

    return ours, steps * batch_size, meta


def _torchvision_loader(
    root: Path, *, view: int | None, min_scale: float, batch_size: int, number: int, meta: Any
) -> Any:
    """As torchvision's reference scripts have it, with Pillow."""
    from torch.utils.data import DataLoader, Subset
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = (
        v2.RandomCrop(32, padding=4, padding_mode="reflect")
        if view is None
        else v2.RandomResizedCrop(view, scale=(min_scale, 1.0), antialias=True)
    )
    transforms = v2.Compose(
        [
            crop,
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(meta.mean), list(meta.std)),
        ]
    )
    dataset = ImageFolder(str(root / "train"), transform=transforms)
    chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:number].tolist()
    return DataLoader(
        Subset(dataset, chosen),
        batch_size=batch_size,
        shuffle=True,
        num_workers=torch.get_num_threads(),  # as many as ours
        persistent_workers=True,
    )
