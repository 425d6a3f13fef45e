"""`python -m benchmarks`: the shape of what it prints and keeps; never a time."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from benchmarks import __main__ as command_line
from benchmarks import growth, image_folder, results
from benchmarks.harness import Sample, divided, interleaved, straight
from benchmarks.options import Options
from benchmarks.results import Limit, Row, compared, left_out

ABOUT = {
    "machine": "2 cores of a CPU",
    "versions": {"torch": "2.15.0"},
    "date": "2026-01-31",
    "commit": "abc1234",
    "rounds": 2,
    "quick": False,
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def row(name: str = "phase1/default", ours: tuple[float, ...] = (3.0, 2.0), **more: Any) -> Row:
    limit = more.pop("limit", Limit("≥", 0.95))
    return compared(
        name, name, ours=("ours", Sample(ours)), other=("bare", Sample((2.0, 4.0))), unit="s", limit=limit, **more
    )


@pytest.mark.long
def test_rows_that_need_real_dvc_can_be_measured(tmp_path: Path) -> None:
    kept, scratch = tmp_path / "results.json", tmp_path / "scratch"
    families = [word for name in ("nothing_to_do", "many_workers", "whole_run") for word in ("--only", name)]

    done = bench("--quick", "--rounds", "1", "--results", str(kept), "--folder", str(scratch), *families)

    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(kept.read_text())["rows"]] == [
        "nothing_to_do/repro",
        "many_workers/each_2",
        "many_workers/nothing_to_do_2",
        "whole_run/default",
    ]


@pytest.mark.long
def test_a_quick_run_keeps_rows_and_prints_a_table_of_them(tmp_path: Path) -> None:
    kept, scratch = tmp_path / "results.json", tmp_path / "scratch"

    done = bench(
        *("--quick", "--rounds", "2", "--results", str(kept), "--folder", str(scratch)),
        *("--only", "batchnorm", "--only", "image_folder"),
    )

    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(kept.read_text())["rows"]}
    assert list(rows) == [
        "image_folder/cifar10",
        "image_folder/cifar10_files",
        "image_folder/photos_128",
        "image_folder/photos_128_copies",
        "image_folder/photos_224",
        "image_folder/photos_224_copies",
        "image_folder/jpeg_256",
        "batchnorm/width_4",
    ]
    measured = rows["batchnorm/width_4"]
    assert len(measured["ours"]["figures"]["values"]) == len(measured["ratio"]["values"]) == 2
    assert measured["limit"] == "≤ 1.15" and measured["reached"] in (True, False)
    assert measured["quick"] is True and measured["versions"]["torch"] and "cores of" in measured["machine"]
    assert measured["date"] and measured["commit"]
    assert rows["image_folder/cifar10"]["ratio"] is None and "--cifar" in rows["image_folder/cifar10"]["note"]
    assert [line.split("|")[1].split(" [")[0].strip() for line in done.stdout.splitlines()[2:10]] == [
        row["what"] for row in rows.values()
    ]
    assert not scratch.exists()


def test_what_was_kept_is_shown_again_without_measuring(tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    results.keep(kept, ABOUT, [row()], order=["phase1"])

    done = bench("--show", "--results", str(kept))

    assert (done.returncode, done.stdout.strip()) == (0, results.table(results.read(kept)))


def test_nothing_kept_is_said_in_one_line(tmp_path: Path) -> None:
    done = bench("--show", "--results", str(tmp_path / "none.json"))

    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"Error: there is no {tmp_path / 'none.json'}: measure first"]


def test_everything_takes_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def measured(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = interleaved({name: lambda name=name: measured(name) for name in "ab"}, rounds=2)

    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert (found["a"].values, found["b"].values) == ((3.0, 6.0), (4.0, 5.0))


def test_ratios_are_formed_within_a_round_and_their_median_is_reported() -> None:
    ratio = divided(Sample((1.0, 8.0, 3.0)), Sample((2.0, 2.0, 3.0)))

    assert ratio.values == (0.5, 4.0, 1.0)
    assert ratio.as_json() == {"median": 1.0, "low": 0.5, "high": 4.0, "values": [0.5, 4.0, 1.0]}


@pytest.mark.parametrize(
    ("limit", "ratio", "kept"),
    [
        (Limit("≥", 0.95), 0.95, True),
        (Limit("≥", 0.95), 0.94, False),
        (Limit("≤", 2.0), 2.0, True),
        (Limit("≤", 2.0), 2.1, False),
        (Limit(">", 1), 1.0, False),
        (Limit("<", 1), 0.9, True),
    ],
)
def test_limits(limit: Limit, ratio: float, kept: bool) -> None:
    assert limit.is_kept_by(ratio) == kept


def test_rows_measured_again_replace_their_own_kind_and_stand_in_the_families_order(tmp_path: Path) -> None:
    kept, order = tmp_path / "results.json", ["phase1", "averaging"]
    results.keep(kept, ABOUT, [row("averaging/reading"), row("phase1/default")], order=order)

    results.keep(kept, {**ABOUT, "rounds": 7}, [row("phase1/default", ours=(2.0, 4.0))], order=order)

    rows = results.read(kept)["rows"]
    assert [(row["name"], row["rounds"], row["ratio"]["values"]) for row in rows] == [
        ("phase1/default", 7, [1.0, 1.0]),
        ("averaging/reading", 2, [1.5, 0.5]),
    ]


def test_the_table_has_ours_the_other_ratio_limit_and_verdict(tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    missing = left_out("averaging/timm", "against timm", other="timm", unit="s", why="timm is not installed")
    missed = row("phase1/large", limit=Limit("≤", 0.5), note="why it is so")
    results.keep(kept, ABOUT, [row(), missed, missing], order=["phase1", "averaging"])

    lines = results.table(results.read(kept)).splitlines()

    assert lines[2:5] == [
        "| phase1/default | ours: 2.50 s | bare: 3.00 s | **1.00** (0.500 – 1.50) | ≥ 0.95 | ✓ |",
        "| phase1/large [1] | ours: 2.50 s | bare: 3.00 s | **1.00** (0.500 – 1.50) | ≤ 0.5 | missed |",
        "| against timm [2] | – | timm: – | – |  |  |",
    ]
    assert lines[6:8] == ["[1] why it is so", "[2] timm is not installed"]
    where = "2 cores of a CPU; torch 2.15.0; medians of 2 interleaved rounds; 2026-01-31, commit abc1234."
    assert lines[-1] == where


def test_a_line_is_straight_and_a_parabola_is_not() -> None:
    line = straight([1, 2, 4], [3, 5, 9])
    bent = straight([1, 2, 4, 8], [1, 4, 16, 64])

    assert (line.slope, line.offset, line.r_squared, line.last_slope) == pytest.approx((2, 1, 1, 1))
    assert bent.r_squared < 0.98 and bent.last_slope > 1.2


@pytest.mark.parametrize(("last", "reached"), [(10.0, True), (10.6, False), (9.4, False)])
def test_growth_is_straight_if_it_does_not_bend_at_its_end(last: float, reached: bool) -> None:
    points = {float(x): Sample((float(x),)) for x in range(1, 10)} | {10.0: Sample((last,))}

    row = growth._row("index", "index of image files", "images", 1, points).as_json()

    assert row["ratio"]["median"] > 0.98
    assert row["reached"] is reached


@pytest.fixture
def tiny_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two families that measure nothing."""
    for name in ("first", "second"):
        module = types.ModuleType(f"benchmarks.{name}")
        module.measure = lambda options, name=name: iter([row(f"{name}/row")])
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    monkeypatch.setattr(command_line, "FAMILIES", {"first": "", "second": ""})


def kept_after(path: Path, scratch: Path, *arguments: str) -> list[str]:
    everything = [*arguments, "--results", str(path), "--folder", str(scratch)]
    command_line.main.main(everything, standalone_mode=False)
    return [row["name"] for row in results.read(path)["rows"]]


def test_a_run_of_everything_keeps_no_row_of_before(tiny_families: None, tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    results.keep(kept, ABOUT, [row("gone/row")], order=[])

    assert kept_after(kept, tmp_path / "scratch") == ["first/row", "second/row"]


def test_a_quick_look_never_replaces_what_was_measured(
    tiny_families: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "results.json"
    results.keep(kept, ABOUT, [row()], order=[])
    before = kept.read_bytes()
    monkeypatch.setattr(results, "RESULTS", kept)

    command_line.main.main(["--quick", "--folder", str(tmp_path / "scratch")], standalone_mode=False)

    assert kept.read_bytes() == before
    assert len(results.read(tmp_path / "scratch" / "results.json")["rows"]) == 2


def test_a_tar_of_an_image_folder_is_unpacked_into_scratch(tmp_path: Path) -> None:
    image = tmp_path / "made" / "train" / "cat" / "1.jpg"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"pixels")
    with tarfile.open(tmp_path / "images.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "made", arcname="cifar")
    options = Options(rounds=1, quick=True, scratch=tmp_path / "scratch", cores=1)

    folder = image_folder._folder_of(tmp_path / "images.tar.xz", options)

    assert folder.is_relative_to(options.scratch)
    assert (folder / "train" / "cat" / "1.jpg").read_bytes() == b"pixels"


def test_growth_is_drawn_with_its_points(tmp_path: Path) -> None:
    points = {1e6: Sample((1.0,)), 2e6: Sample((2.5,)), 4e6: Sample((4.0,))}
    rows = [growth._row("index", "index of image files", "million images", 1e6, points)]

    growth.save(rows, tmp_path)

    assert growth.draw(rows).rows == (
        ("growth/index", 1.0, 1.0),
        ("growth/index", 2.0, 2.5),
        ("growth/index", 4.0, 4.0),
    )
    assert "index of image files" in (tmp_path / "growth.svg").read_text()
