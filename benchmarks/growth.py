"""Growth: averaging against the number and size of the files, phase 2 against W, data order and index against images.

Each should be a straight line: R² of the least-squares line is at least 0.98, and the slope between the last two points
is 0.8 to 1.25 times that line's. All points are in results.json and in docs/figures/growth.svg.

- averaging: `average_files`, files in the page cache; its peak memory, each in a fresh process, is in results.json and
  does not grow with W.
- phase 2: the launcher's total time for W workers, including start-up and result, on all cores: with two cores, two
  workers at a time.
- data order: `draw_epoch`, with crops and flips, for up to 10 million images; prepare: writing the index of that many
  image files, and opening it as training does. There are no images.

Learned: an epoch's order for 10 million images does not stay in the cache, so the line bends a little upwards there.
"""

from __future__ import annotations

import functools
import gc
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import averaging, phase2
from benchmarks.children import ROOT, call, say
from benchmarks.harness import Sample, interleaved, straight
from benchmarks.made_up import write_models
from benchmarks.options import Options
from benchmarks.results import Limit, Row

if TYPE_CHECKING:
    from swap_pipeline.report.figures import Drawing

FIGURES = ROOT / "docs" / "figures"
_STRAIGHT = Limit("≥", 0.98)
_LAST_SLOPES = (0.8, 1.25)
_MB = 1_000_000


def measure(options: Options) -> Iterator[Row]:
    rows = []
    for part in (_averaging, _phase2, _images):
        for row in part(options):
            rows.append(row)
            yield row
    if not options.quick:
        save(rows)


def _row(name: str, what: str, against: str, per: float, points: dict[float, Sample]) -> Row:
    xs, ys = list(points), [sample.median for sample in points.values()]
    line = straight(xs, ys)
    low, high = _LAST_SLOPES
    return Row(
        name=f"growth/{name}",
        what=f"growth: {what}",
        ours=f"at {xs[-1] / per:,.6g} {against}",
        other=f"at {xs[0] / per:,.6g}",
        unit="s",
        our_figures=points[xs[-1]],
        other_figures=points[xs[0]],
        ratio=Sample((line.r_squared,)),
        limit=_STRAIGHT,
        note=f"Growth, {what}: the ratio is R² of a straight line; between the last two points it rises "
        f"{line.last_slope:.2f} times as fast as the line, where {low:g} to {high:g} is straight.",
        also_reached=low <= line.last_slope <= high,
        more={
            "against": against,
            "points": [[x / per, sample.median] for x, sample in points.items()],
            "slope": line.slope * per,
            "offset": line.offset,
            "last_slope": line.last_slope,
        },
    )


def _averaging(options: Options) -> Iterator[Row]:
    folder = options.scratch / "growth_models"
    num_bytes = options.sized(40, 1) * _MB
    counts = [1, 2, 4, 8, 16, 32][: options.sized(6, 3)]
    paths = write_models(folder, number=counts[-1], num_bytes=num_bytes)
    points = _averages(options, {count: paths[:count] for count in counts})
    row = _row("averaging_files", f"averaging W files of {num_bytes // _MB} MB", "files", 1, points)
    peaks = {str(count): averaging.fresh("ours", paths[:count], cores=options.cores)["peak"] / _MB for count in counts}
    yield replace(row, more={**row.more, "peak_mb": peaks})
    shutil.rmtree(folder)

    sizes = [size * _MB for size in ((25, 50, 100, 200, 400) if not options.quick else (1, 2, 3))]
    points = _averages(options, {size: write_models(folder / str(size), number=2, num_bytes=size) for size in sizes})
    yield _row("averaging_bytes", "averaging 2 files", "MB each", _MB, points)
    shutil.rmtree(folder)


def _averages(options: Options, files: Mapping[int, Sequence[Path]]) -> dict[float, Sample]:
    """Seconds to average each of these sets of files."""
    sets = {str(size): [str(path) for path in paths] for size, paths in files.items()}
    found = call(averaging_seconds, threads=max(1, options.cores // 2), sets=sets, rounds=options.rounds)
    return {float(size): Sample(tuple(values)) for size, values in found.items()}


def averaging_seconds(*, sets: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """In a child: seconds to average each set."""
    from swap_pipeline.averaging.mean import average_files

    def seconds(paths: list[Path]) -> float:
        began = time.perf_counter()
        average_files(paths, paths[0].parent / "mean", {}, threads=2, durable=False)  # as in a phase 3 of two ranks
        return time.perf_counter() - began

    measures = {size: functools.partial(seconds, [Path(path) for path in paths]) for size, paths in sets.items()}
    return {size: list(sample.values) for size, sample in interleaved(measures, rounds=rounds, say=say).items()}


def _phase2(options: Options) -> Iterator[Row]:
    counts = [2, 4, 8] if not options.quick else [1, 2]
    width, batch_size, steps = options.sized(8, 2), options.sized(96, 8), options.sized(8, 2)
    project = phase2.project_with_phase1(
        options.scratch / "growth_phase2",
        width=width,
        batch_size=batch_size,
        num_images=steps * batch_size,
        workers=counts[-1],
    )

    def seconds(count: int) -> float:
        return float(phase2.fan_out(project, count)["seconds"])

    # Takes minutes, and every process is a new one, so there is no warm-up.
    found = interleaved(
        {str(count): functools.partial(seconds, count) for count in counts},
        rounds=options.rounds,
        warm_up=0,
        say=options.say,
    )
    points = {float(count): sample for count, sample in found.items()}
    yield _row("phase2_workers", f"phase 2 with W workers on {options.cores} cores", "workers", 1, points)


def _images(options: Options) -> Iterator[Row]:
    million = 1_000_000
    cases = (
        ("data_order", "order and augmentation of an epoch", order_seconds, (1, 2, 5, 10)),
        ("index", "index of image files: written and opened", index_seconds, (1, 3, 10)),
    )
    for name, what, function, millions in cases:
        sizes = [options.sized(million, 1000) * number for number in millions]
        folder = str(options.scratch / "growth_index")
        found = call(function, threads=1, sizes=sizes, rounds=options.rounds, folder=folder)
        points = {float(size): Sample(tuple(values)) for size, values in zip(sizes, found, strict=True)}
        yield _row(name, what, "million images", million, points)


def order_seconds(*, sizes: list[int], rounds: int, folder: str) -> list[list[float]]:
    """In a child: seconds to draw an epoch of each size."""
    from swap_pipeline.config.params import Augment
    from swap_pipeline.data.epochs import draw_epoch

    def seconds(size: int) -> float:
        began = time.perf_counter()
        draw_epoch(seed=0, epoch=0, num_images=size, image_size=(32, 32), augment=Augment(padding=4, flip=True))
        return time.perf_counter() - began

    found = interleaved({str(size): functools.partial(seconds, size) for size in sizes}, rounds=rounds)
    return [list(found[str(size)].values) for size in sizes]


def index_seconds(*, sizes: list[int], rounds: int, folder: str) -> list[list[float]]:
    """In a child: seconds to write an index of each size and to open it."""
    names = {split: _names_of_images(split, number) for split, number in (("train", max(sizes)), ("test", 1000))}
    found = interleaved(
        {str(size): functools.partial(_index_once, size, names, Path(folder)) for size in sizes},
        rounds=rounds,
        warm_up=0,
    )
    return [list(found[str(size)].values) for size in sizes]


def _names_of_images(split: str, number: int) -> list[str]:
    return [f"{split}/class_{index % 1000:03d}/image_{index:08d}.jpg" for index in range(number)]


def _index_once(size: int, names: Mapping[str, list[str]], folder: Path) -> float:
    import numpy as np
    import torch

    from swap_pipeline.data.loader import FileImages
    from swap_pipeline.data.prepared import read_meta
    from swap_pipeline.datasets import prepare
    from swap_pipeline.datasets.image_folders import FolderSplit, Looks

    def split(name: str, number: int) -> tuple[FolderSplit, Looks]:
        side = np.full(number, 256, dtype=np.int32)
        looks = Looks(
            side,
            side,
            np.zeros(number, dtype=np.bool_),
            np.zeros((number, 8), dtype=np.uint8),
            np.zeros((3, 256), dtype=np.int64),
            [],
        )
        return FolderSplit(names[name][:number], np.arange(number, dtype=np.int64) % 1000), looks

    train, test = split("train", size), split("test", 1000)
    gc.collect()
    gc.disable()  # collection would take long with ten million names, and there is nothing to collect
    began = time.perf_counter()
    prepare._write(
        folder,
        prepare._Prepared(
            splits={"train": prepare._index(*train, {}), "test": prepare._index(*test, {})},
            kind="files",
            classes=tuple(f"class_{number:03d}" for number in range(1000)),
            shape=(3, None, None),
            normalisation=([0.5] * 3, [0.25] * 3),
            about="",
        ),
    )
    meta = read_meta(folder)
    FileImages(folder, "train", meta, root=folder, test_crop="square", device=torch.device("cpu"))
    seconds = time.perf_counter() - began
    gc.enable()
    shutil.rmtree(folder)
    return seconds


def save(rows: Sequence[Row], folder: Path = FIGURES) -> None:
    """Draw all lines into docs/figures."""
    from swap_pipeline.report.figures import picture_bytes
    from swap_pipeline.storage.files import atomic_write

    drawing = draw(rows)
    with atomic_write(folder / f"{drawing.name}.svg", durable=False) as file:
        file.write(picture_bytes(drawing.figure, "svg"))


def draw(rows: Sequence[Row]) -> Drawing:
    """A panel for each, with the points and the line through them."""
    from swap_pipeline.report.figures import COLOURS, GREY, Drawing, grid, new_figure, style

    data: list[tuple[Any, ...]] = []
    with style():
        figure = new_figure(3.4 * 3, 2.9 * -(-len(rows) // 3))
        panels = list(figure.subplots(-(-len(rows) // 3), 3, squeeze=False).flat)
        for axes, row in zip(panels, rows, strict=False):
            points = row.more["points"]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            ends = [0, xs[-1]]
            line = [row.more["offset"] + row.more["slope"] * x for x in ends]
            axes.plot(ends, line, color=GREY, linewidth=1)
            axes.plot(xs, ys, "o", color=COLOURS["swap"], markersize=5)
            axes.set_title(row.what.removeprefix("growth: "), wrap=True)
            axes.set_xlabel(row.more["against"])
            axes.set_ylabel("seconds")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            grid(axes)
            data += [(row.name, x, y) for x, y in points]
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
    return Drawing(
        name="growth",
        figure=figure,
        alt="Seconds against size, each with a straight line: " + "; ".join(row.what for row in rows),
        columns=("what", "size", "seconds"),
        rows=tuple(data),
    )
