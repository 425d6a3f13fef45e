"""The pictures: what is drawn is what the records say, in the same bytes each time."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from made_up import (
    cosine_record,
    landscape_record,
    made_up_tables,
    method_params,
    params_file,
    plane,
    swap_records,
    workers_record,
)
from PIL import Image

from swap_pipeline.cli.compare.tables_page import draw_accuracy_against_time
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.report.figures import COLOURS, Drawing, picture_bytes, save
from swap_pipeline.report.figures_analysis import draw_cosine, draw_landscape, draw_pairs, draw_subsets, levels_above
from swap_pipeline.report.figures_schedules import (
    Sampling,
    courses_as_run,
    draw_samplings,
    draw_schedules,
    planned_courses,
    sampling_of,
)
from swap_pipeline.report.figures_training import draw_noise, draw_training

FASHION = read_params(ROOT / "recipes" / "fashion-mini.yaml")


def drawn(drawing: Drawing, gid: str) -> Any:
    """The line, or what else it is, that has this name."""
    (found,) = drawing.figure.findobj(lambda artist: artist.get_gid() == gid)
    return found


def points(drawing: Drawing, gid: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in drawn(drawing, gid).get_xydata()]


def names(drawing: Drawing) -> set[str]:
    return {artist.get_gid() for artist in drawing.figure.findobj(lambda artist: artist.get_gid() is not None)}


def course(records: dict[str, Any], params: Params = FASHION) -> Drawing:
    phase1 = records["phase1"]
    rates = courses_as_run(params, phase1["epochs"])
    return draw_training(phase1, records["workers"], records["phase3"]["points"], rates=rates)


def test_the_course_of_a_run_is_that_of_its_records() -> None:
    records = swap_records(seeds=(3, 8))
    drawing = course(records)

    phase1 = records["phase1"]["curve"]
    assert points(drawing, "accuracy-phase1") == [(row["epoch"], row["accuracy"]) for row in phase1]
    for seed, worker in records["workers"].items():
        later = [(20 + row["epoch"], row["accuracy"]) for row in worker["curve"]]
        assert points(drawing, f"accuracy-seed_{seed}") == points(drawing, f"close-seed_{seed}") == later
    average = [(20 + epoch, point["accuracy"]) for epoch, point in enumerate(records["phase3"]["points"], 1)]
    assert points(drawing, "accuracy-averaged") == average
    assert average[-1] == (28, records["phase3"]["test_accuracy"])
    # The rate rises to its peak, and falls towards 0 at max_epochs, which phase 1 did not reach.
    assert points(drawing, "rate-phase1") == [(0, 0), (4, 0.8), (20, pytest.approx(0.8 * 4 / 20))]
    assert points(drawing, "rate-phase2") == [(20, 0.1), (28, 0)]


def test_the_rate_that_is_drawn_is_the_one_that_is_trained_with() -> None:
    from swap_pipeline.config.schedules import learning_rate_of

    drawing = course(swap_records())
    epochs, rates = zip(*points(drawing, "rate-phase1"), strict=True)
    rate = learning_rate_of(FASHION.phase1, epochs=FASHION.phase1.max_epochs)
    for epoch in (0.5, 3.9, 4, 11.25, 19.99):
        assert np.interp(epoch, epochs, rates) == pytest.approx(rate(epoch))


@pytest.mark.parametrize("kept", [0, 1])
def test_the_course_of_the_average_may_be_a_point_or_nothing(kept: int) -> None:
    records = swap_records(seeds=(5,), epochs=1)
    records["phase3"]["points"] = records["phase3"]["points"][:kept]
    drawing = course(records)
    assert ("accuracy-averaged" in names(drawing)) == bool(kept)
    assert len(points(drawing, "accuracy-seed_5")) == 1
    assert picture_bytes(drawing.figure, "svg").startswith(b"<?xml")


def test_a_hundred_workers_share_one_entry_of_the_legend() -> None:
    drawing = course(swap_records(seeds=tuple(range(100)), epochs=2))
    (legend,) = drawing.figure.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["phase 1", "each of 100 workers", "their average, had phase 2 ended here", "phase 1's end"]
    assert len(points(drawing, "close-seed_99")) == 2


def test_cycles_of_phase_2_are_drawn_one_after_another(tmp_path: Path) -> None:
    params = read_params(params_file(tmp_path, {"phase2.cycles": 2, "phase2.warmup_epochs": 1}))
    rates = points(course(swap_records(), params), "rate-phase2")
    assert rates == [(20, 0), (21, 0.1), (24, 0), (24, 0), (25, 0.1), (28, 0)]


def test_schedules_by_epoch_jump_where_params_do() -> None:
    params = method_params("imagenet", "small_batch")
    (run,) = planned_courses(params)
    assert run.rates[:5] == ((0, 1.0), (7, 2.0), (13, 0.25), (13, 0.4375), (22, 0.04375))
    assert run.batch_sizes == ((0, 4096), (13, 4096), (13, 1792), (25, 1792), (25, 1024), (28, 1024))
    worker = planned_courses(method_params("imagenet", "swap"))[1]  # takes up small_batch's lists at epoch 22
    assert worker.rates[0] == (22, 0.04375) and worker.rates[-1] == (28, 0.00025)
    assert worker.batch_sizes == ((22, 1792), (25, 1792), (25, 1024), (28, 1024))
    assert points(draw_schedules([run]), "batch-phase1") == list(run.batch_sizes)
    assert points(draw_schedules([run, worker]), "rate-phase2") == list(worker.rates)


def test_swa_samples_at_the_end_of_each_cycle_and_swap_all_at_once() -> None:
    drawing = draw_samplings(samplings())
    for method in ("swa_large_batch", "swa_large_then_small", "swa_small_batch"):
        assert points(drawing, f"{method}-samples") == [(epoch, 0) for epoch in (32, 40, 48, 56)]
    assert points(drawing, "swa_large_batch-phase2")[:3] == [(24, 0.4), (32, 0), (32, 0)]
    assert points(drawing, "swap-samples") == [(32, 0)]
    (sample,) = [row for row in drawing.rows if row[:2] == ("swap", "sample")]
    assert sample == ("swap", "sample", 32, None, 4)


def samplings() -> list[Sampling]:
    chosen = ("swa_large_batch", "swa_large_then_small", "swa_small_batch", "swap")
    return [sampling_of(method_params("fashion-mini", method), method=method, title=method) for method in chosen]


def test_without_phase_2_there_is_no_panel_of_it(tmp_path: Path) -> None:
    params = read_params(params_file(tmp_path, {"phase2.epochs": 0, "workers.seeds": [0]}))
    records = swap_records(seeds=(0,), epochs=0)
    drawing = course(records, params)
    assert names(drawing) >= {"rate-phase1", "accuracy-phase1"}
    assert not any(name.startswith("close-") or "seed" in name or "phase2" in name for name in names(drawing))
    assert len(drawing.figure.axes) == 2
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()] == ["phase 1"]
    assert {row[0] for row in drawing.rows} == {"phase1"}
    schedules = draw_schedules(planned_courses(params))
    assert names(schedules) >= {"rate-phase1", "batch-phase1"} and "rate-phase2" not in names(schedules)


def test_a_landscape_fills_the_plane_with_its_errors() -> None:
    bowl = plane("workers")
    drawing = draw_landscape(bowl)
    for kind in ("train", "test"):
        filled = drawn(drawing, f"filled-{kind}_error")
        errors = [error for row in bowl[f"{kind}_error"] for error in row]
        assert filled.get_clim() == (pytest.approx(min(errors)), pytest.approx(max(errors)))
        assert len(filled.levels) == 13
        assert np.diff(filled.levels)[0] < np.diff(filled.levels)[-1] / 20
    for name, u, v in (("worker 2", 3.1, 3.9), ("SWAP", 3.6, 1.3)):
        marks = drawing.figure.findobj(lambda artist, gid=f"mark-{name}": artist.get_gid() == gid)
        assert [tuple(mark.get_xydata()[0]) for mark in marks] == [(u, v)] * 2
    grid = [row for row in drawing.rows if row[0] is None]
    assert len(grid) == 169
    assert grid[14] == (None, pytest.approx(-2 + 11 / 12), pytest.approx(-3 + 8 / 12),
                        bowl["train_error"][1][1], bowl["test_error"][1][1])  # fmt: skip


def test_labels_of_a_landscape_do_not_cover_points_or_each_other() -> None:
    for bowl in landscape_record()["planes"]:
        figure = draw_landscape(bowl).figure
        figure.canvas.draw()  # type: ignore[attr-defined]
        for axes in figure.axes[:2]:
            boxes = [text.get_window_extent() for text in axes.texts]
            assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
            spots = [axes.transData.transform(mark["position"]) for mark in bowl["marks"]]
            assert not any(box.contains(*spot) for box in boxes for spot in spots)


def test_a_plain_and_the_smallest_grid_can_be_drawn() -> None:
    flat = plane("phases", size=2)
    flat["train_error"] = [[10.0, 10.0], [10.0, 10.0]]
    assert picture_bytes(draw_landscape(flat).figure, "png").startswith(b"\x89PNG")
    assert levels_above(3, 3) == [2.5, 3.5]


def test_cosines_are_drawn_by_run_with_the_boundary_of_the_phases() -> None:
    record = cosine_record(seeds=(0, 4))
    drawing = draw_cosine(list(reversed(record["points"])))
    for run in ("phase1", "seed_4"):
        expected = [(point["epoch"], point["cosine"]) for point in record["points"] if point["run"] == run]
        assert points(drawing, f"cosine-{run}") == expected
    assert drawn(drawing, "handover").get_xdata() == [20, 20]
    alone = draw_cosine([point for point in record["points"] if point["run"] == "seed_0"][:1])
    assert "handover" not in names(alone)


def test_accuracy_by_number_of_workers_has_mean_and_spread_over_choices() -> None:
    record = workers_record()
    drawing = draw_subsets(record["subsets"], "validation")
    assert len(points(drawing, "choices")) == len(record["subsets"]) == 4 + 6 + 4 + 1
    accuracies = [s["accuracy"] for s in record["subsets"] if s["size"] == 2]
    assert points(drawing, "means")[1] == (2, pytest.approx(statistics.fmean(accuracies)))
    low, high = drawn(drawing, "means-spread").get_segments()[1][:, 1]
    assert (high - low) / 2 == pytest.approx(statistics.stdev(accuracies))


@pytest.mark.parametrize("num_workers", [1, 4, 40])
def test_matrices_show_numbers_while_there_is_room(num_workers: int) -> None:
    record = workers_record(seeds=tuple(range(num_workers)), most=1)
    drawing = draw_pairs(record)
    left, right = drawing.figure.axes[:2]
    matrix = drawn(drawing, "matrix-distance").get_array()
    assert matrix.shape == (num_workers + 1, num_workers + 1)
    assert matrix[0, 1] == record["distance_from_phase1"][0]
    numbers = 0 if num_workers == 40 else num_workers * (num_workers - 1)
    assert len(right.texts) == numbers
    if num_workers == 4:
        assert [text.get_text() for text in right.texts[:3]] == ["0.21", "0.22", "0.23"]
        assert len(left.texts) == 5 * 4
    assert picture_bytes(drawing.figure, "svg")


def test_accuracy_against_time_shows_what_has_run() -> None:
    drawing = draw_accuracy_against_time(made_up_tables(without=("small_batch", "swa_small_batch")))
    assert points(drawing, "seeds-large_batch") == [(82, 89.9), (83, pytest.approx(90.0))]
    assert points(drawing, "mean-large_batch") == [(82.5, pytest.approx(89.95))]
    shown = {"large_batch", "large_batch_ema", "small_batch_ema", "swap_before", "swap_after"}
    assert {row[0] for row in drawing.rows} == {*shown, "swa_large_batch", "swa_large_then_small"}


def test_the_same_run_has_the_same_colour_everywhere() -> None:
    training, cosine = course(swap_records()), draw_cosine(cosine_record()["points"])
    schedules, swa = draw_schedules(planned_courses(FASHION)), draw_samplings(samplings())
    for run, lines in {
        "phase1": [(training, "accuracy-phase1"), (cosine, "cosine-phase1"), (schedules, "rate-phase1"),
                   (swa, "swap-phase1")],
        "phase2": [(training, "close-seed_0"), (cosine, "cosine-seed_0"), (schedules, "rate-phase2"),
                   (swa, "swap-phase2")],
    }.items():  # fmt: skip
        assert {drawn(drawing, gid).get_color() for drawing, gid in lines} == {COLOURS[run]}


def test_pictures_are_saved_as_svg_and_png_with_their_data_in_the_same_bytes_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    record = cosine_record(seeds=(0, 1))
    save([draw_cosine(record["points"])], tmp_path / "first")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)  # a user's own settings
    pictures = save([draw_cosine(record["points"])], tmp_path / "second")

    for name in ("cosine.svg", "cosine.png", "cosine.csv"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert pictures == {"cosine": (tmp_path / "first" / "cosine.svg").read_bytes()}
    with Image.open(tmp_path / "first" / "cosine.png") as picture:
        assert picture.size == (1600, 800)
        assert np.asarray(picture.convert("L")).std() > 10
    rows = list(csv.DictReader((tmp_path / "first" / "cosine.csv").open()))
    assert [float(row["cosine"]) for row in rows] == [point["cosine"] for point in record["points"]]
    assert rows[-1]["run"] == "seed_1"


@pytest.mark.parametrize(
    ("scale", "verdict"),
    [
        (5149.0, "about 5,100 images, 11 times the batch of 450: B₁ could be larger"),
        (460.0, "about 460 images, 1 times the batch of 450: B₁ is about as large as is efficient"),
        (90.0, "about 90 images, 0.2 times the batch of 450: larger batches would gain little"),
    ],
)
def test_the_noise_scale_is_drawn_beside_the_batch_size_and_says_whether_that_could_be_larger(
    scale: float, verdict: str
) -> None:
    curve = [{"epoch": 1, "noise_scale": 70.0}, {"epoch": 2, "noise_scale": None}, {"epoch": 3, "noise_scale": scale}]
    drawing = draw_noise({"curve": curve}, ((0.0, 450.0), (3.0, 450.0)))
    assert drawing is not None
    assert drawing.alt == f"After epoch 3 of phase 1 the gradient noise scale was {verdict}."
    assert drawing.rows[:2] == (("noise_scale", 1, 70.0), ("noise_scale", 3, scale))
    assert draw_noise({"curve": curve[1:2]}, ((0.0, 450.0), (3.0, 450.0))) is None
