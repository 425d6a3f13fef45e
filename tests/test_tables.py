"""The tables: figures against ones worked out by hand, and what is said where one is missing."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from typing import Any

import pytest
from conftest import ROOT
from made_up import METHODS, experiment, made_up_tables

from swap_pipeline.cli.compare.experiments import Experiment
from swap_pipeline.cli.compare.measured import Measured, student_t
from swap_pipeline.cli.compare.tables import Records, Row, Tables, make_tables
from swap_pipeline.cli.compare.tables_text import as_csv, as_json, best_rows, cells_of, markdown
from swap_pipeline.config.reading import read_params


def rows_of(tables: Tables, number: int) -> dict[str, list[str]]:
    """A table as people see it: cells by the first one, those of the paper by that of the row above and `paper`."""
    found: dict[str, list[str]] = {}
    above = ""
    for (first, *rest), _ in cells_of(tables.tables[number]):
        above = above if first == "paper" else first
        found[f"{above} paper" if first == "paper" else first] = rest
    return found


def row_of(tables: Tables, number: int, key: str) -> Row:
    return next(row for row in tables.tables[number].rows if row.key == key)


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045), (100, 1.984)]
)
def test_students_t_is_that_of_printed_tables(degrees: int, t: float) -> None:
    assert student_t(0.95, degrees) == pytest.approx(t, abs=5e-4)


def test_a_difference_is_taken_seed_by_seed_with_an_interval_from_three_on() -> None:
    small, swap = Measured({0: 90.1, 1: 91.3, 2: 92.2, 7: 5.0}), Measured({0: 90.0, 1: 91.0, 2: 92.0, 9: 1.0})
    difference = small.minus(swap)
    assert difference.values == pytest.approx({0: 0.1, 1: 0.3, 2: 0.2})
    assert difference.interval is not None
    reach = 4.3027 * 0.1 / math.sqrt(3)
    assert difference.interval == pytest.approx((0.2 - reach, 0.2 + reach), abs=1e-5)
    assert Measured({0: 1.0, 1: 2.0}).interval is None


def test_mean_and_deviation_are_those_of_the_definition() -> None:
    measured = Measured({0: 1.0, 1: 2.0, 5: 6.0})
    assert (measured.n, measured.mean) == (3, 3.0)
    assert measured.std == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert Measured({0: 1.0}).std is None and Measured({}).mean is None


def test_the_tables_show_what_was_worked_out_by_hand() -> None:
    tables = made_up_tables(seeds=(0, 1, 2))
    # Phase 1 on 2 devices for 64, 65, 66 s; 4 workers on one each for 48 s; phase 3 on 2 devices for 2 s.
    assert rows_of(tables, 0) == {
        "SGD (small-batch)": ["3", "91.10 ± 0.10", "2", "153.0 ± 1.0", "306.0 ± 2.0", "+0.20 [+0.20, +0.20]"],
        "SGD (large-batch)": ["3", "90.00 ± 0.10", "2", "83.0 ± 1.0", "166.0 ± 2.0", "-0.90 [-0.90, -0.90]"],
        "SGD (small-batch) with EMA": ["3", "91.20 ± 0.10", "2", "154.0 ± 1.0", "308.0 ± 2.0", "+0.30 [+0.30, +0.30]"],
        "SGD (large-batch) with EMA": ["3", "90.20 ± 0.10", "2", "84.0 ± 1.0", "168.0 ± 2.0", "-0.70 [-0.70, -0.70]"],
        "SWAP (before averaging)": ["3", "90.40 ± 0.00", "4", "113.0 ± 1.0", "322.0 ± 2.0", "-0.50 [-0.75, -0.25]"],
        "SWAP (after averaging)": ["3", "90.90 ± 0.10", "4", "115.0 ± 1.0", "326.0 ± 2.0", ""],
    }
    swa = rows_of(tables, 1)
    assert list(swa) == [
        "large-batch SWA",
        "large-, then small-batch SWA",
        "small-batch SWA",
        "SWAP (8 small-batch epochs)",
    ]
    assert swa["small-batch SWA"][:5] == ["3", "90.40 ± 0.00", "91.30 ± 0.10", "2", "201.0 ± 1.0"]
    assert tables.notes[0] == "ran on 2 × cpu, 1 × cpu"


def test_one_seed_has_no_spread_and_two_have_no_interval() -> None:
    assert rows_of(made_up_tables(seeds=(4,)), 0)["SGD (small-batch)"][1::4] == ["91.40", "+0.20"]
    assert rows_of(made_up_tables(seeds=(4, 5)), 0)["SGD (small-batch)"][1::4] == ["91.45 ± 0.07", "+0.20"]


def test_bold_are_all_that_no_other_beats_in_the_digits_shown() -> None:
    column = [Measured({0: 91.001}), Measured({0: 91.004}), Measured({}), Measured({0: 90.0})]
    assert best_rows("test_accuracy", column) == {0, 1}
    assert best_rows("training_time", column) == {3}
    assert best_rows("devices", column) == best_rows("test_accuracy", column[:1]) == set()
    assert "**91.25 ± 0.07**" in markdown(made_up_tables())
    assert "**" not in markdown(made_up_tables(), bold=False)


def test_what_has_not_run_is_a_dash_and_a_note_with_the_command() -> None:
    tables = made_up_tables(without=("small_batch",))
    assert rows_of(tables, 0)["SGD (small-batch)"] == ["0", "–", "–", "–", "–", "–"]
    assert "small_batch: not run (`swap compare --methods small_batch --seeds 0,1`)" in tables.notes


def test_a_missing_seed_is_named_and_the_difference_takes_the_others() -> None:
    found, records = made("swap", "small_batch", seeds=(0, 1, 2))
    del found["swap"][1]
    tables = make_tables("fashion-mini", ["swap", "small_batch"], found, records)
    assert "swap: no seed 1 (`swap compare --methods swap --seeds 1`)" in tables.notes
    assert row_of(tables, 0, "small_batch").measured["test_accuracy"].n == 3
    assert row_of(tables, 0, "small_batch").minus_swap["test_accuracy"].values == pytest.approx({0: 0.2, 2: 0.2})


def made(*methods: str, seeds: tuple[int, ...]) -> tuple[dict[str, dict[int, Experiment]], dict[str, Records]]:
    both = {method: {seed: experiment(method, seed) for seed in seeds} for method in methods}
    records = {one.commit: read for by_seed in both.values() for one, read in by_seed.values()}
    return {method: {seed: one for seed, (one, _) in by_seed.items()} for method, by_seed in both.items()}, records


def test_records_that_dvc_does_not_have_leave_accuracy_and_time() -> None:
    found, records = made("swap", "small_batch", seeds=(0,))
    del records["swap-0"]
    tables = make_tables("fashion-mini", ["swap", "small_batch"], found, records)
    assert rows_of(tables, 0)["SWAP (after averaging)"] == ["1", "90.80", "–", "114.0", "–", ""]
    assert rows_of(tables, 0)["SWAP (before averaging)"][:4] == ["1", "90.40", "–", "–"]
    assert "devices, compute and top-5 of swap-0: their records are not in DVC's cache" in tables.notes


def test_a_method_of_ones_own_has_a_row_and_swap_may_be_left_out() -> None:
    found, records = made("small_batch", seeds=(0,))
    tables = make_tables("mine", ["small_batch", "gentle"], {**found, "gentle": found["small_batch"]}, records)
    assert list(rows_of(tables, 0)) == ["SGD (small-batch)", "gentle"]
    assert rows_of(tables, 0)["gentle"][-1] == "" and rows_of(tables, 1) == {}


def test_runs_that_shared_the_machine_are_named_but_not_for_what_they_share() -> None:
    found, records = made("swap", "swa_large_then_small", "small_batch", seeds=(0,))

    def ran(name: str, phase1: tuple[int, int], worker: tuple[int, int]) -> None:
        one = records[name]
        workers = [{**worker_record, "ran": list(worker)} for worker_record in one.workers]
        records[name] = replace(one, phase1={**one.phase1, "ran": list(phase1)}, workers=workers)

    ran("swap-0", (0, 10), (10, 20))
    ran("swa_large_then_small-0", (0, 10), (20, 30))
    ran("small_batch-0", (30, 40), (40, 40))
    told = "ran at the same time, which may have slowed them down: "
    assert not any(note.startswith(told) for note in make_tables("x", [*found], found, records).notes)
    ran("small_batch-0", (29, 40), (40, 40))
    assert f"{told}small_batch-0, swa_large_then_small-0" in make_tables("x", [*found], found, records).notes


def test_top_5_accuracy_has_a_column_where_it_was_recorded() -> None:
    found, records = made("swap", seeds=(0,))
    one = records["swap-0"]
    workers = [{**worker, "test_top5": 98 + number} for number, worker in enumerate(one.workers)]
    records["swap-0"] = replace(one, workers=workers, phase3={**one.phase3, "test_top5": 99.5})
    tables = make_tables("fashion-mini", ["swap"], found, records)
    assert [row[2] for row in rows_of(tables, 0).values()] == ["99.50", "99.50"]
    assert "test_top5" not in made_up_tables().tables[0].columns


def test_json_and_csv_have_every_figure() -> None:
    tables = made_up_tables(recipe="imagenet", seeds=(0, 1, 2), without=("large_batch",))
    plain = {row["method"]: row["quantities"] for row in as_json(tables)["tables"][0]["rows"]}
    time = plain["small_batch"]["training_time"]
    assert (time["mean"], time["std"], time["n"], time["unit"]) == (153, 1, 3, "s")
    assert time["seeds"] == {"0": 152, "1": 153, "2": 154}
    assert time["minus_swap"]["mean"] == 38 and time["minus_swap"]["interval"] == pytest.approx((38, 38))
    assert time["paper"] == {"mean": 235.29, "std": 0.33, "unit": "min"}
    assert plain["swap_after"]["training_time"]["minus_swap"] is None
    lines = {(line["table"], line["method"], line["quantity"]): line for line in csv_of(tables)}
    assert len(lines) == sum(len(table.columns) * len(table.rows) for table in tables.tables)
    line = lines["plain_training", "small_batch", "training_time"]
    assert [line[key] for key in ("mean", "std", "n", "minus_swap", "seed_2")] == ["153.0", "1.0", "3", "38.0", "154"]
    assert [line[key] for key in ("paper_mean", "paper_std", "paper_unit")] == ["235.29", "0.33", "min"]
    missing = lines["plain_training", "large_batch", "total_compute"]
    assert {key for key, text in missing.items() if text} == {"table", "method", "quantity", "unit", "n"}


def csv_of(tables: Tables) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(as_csv(tables))))


# --- the paper: figures as printed in its Tables 1 to 4, GPUs as told in sections 5.1 and 5.2

TABLE_1 = {
    "SGD (small-batch)": ["95.24 ± 0.09", "2", "254.12 ± 0.62", "–"],
    "SGD (large-batch)": ["94.77 ± 0.23", "8", "132.62 ± 1.09", "–"],
    "SWAP (before averaging)": ["94.70 ± 0.20", "8", "167.57 ± 3.25", "–"],
    "SWAP (after averaging)": ["95.23 ± 0.08", "8", "169.20 ± 3.25", "–"],
}
TABLE_2 = {
    "SGD (small-batch)": ["77.01 ± 0.25", "1", "573.76 ± 2.25", "–"],
    "SGD (large-batch)": ["75.84 ± 0.35", "8", "116.13 ± 1.35", "–"],
    "SWAP (before averaging)": ["75.74 ± 0.15", "8", "123.11 ± 1.85", "–"],
    "SWAP (after averaging)": ["78.18 ± 0.21", "8", "125.34 ± 1.85", "–"],
}
TABLE_3 = {
    "SGD (small-batch)": ["76.14 ± 0.07", "93.30 ± 0.07", "8", "235.29 ± 0.33 min", "–"],
    "SGD (large-batch)": ["75.86 ± 0.03", "92.98 ± 0.06", "16", "127.20 ± 0.78 min", "–"],
    "SWAP (before averaging)": ["75.96 ± 0.02", "93.15 ± 0.02", "16", "149.12 ± 0.55 min", "–"],
    "SWAP (after averaging)": ["76.19 ± 0.03", "93.32 ± 0.02", "16", "156.55 ± 0.56 min", "–"],
}
TABLE_4 = {
    "large-batch SWA": ["76.06 ± 0.25", "76.00 ± 0.31", "–", "376.4 ± 2.25", "–"],
    "large-, then small-batch SWA": ["76.26 ± 0.35", "78.12 ± 0.14", "–", "398.0 ± 1.35", "–"],
    "small-batch SWA": ["76.80 ± 0.15", "79.09 ± 0.19", "–", "848.6 ± 5.61", "–"],
    "SWAP (8 small-batch epochs)": ["75.74 ± 0.15", "78.18 ± 0.21", "–", "125.30 ± 1.85", "–"],
    "SWAP (40 small-batch epochs)": ["76.19 ± 0.19", "79.11 ± 0.12", "–", "241.54 ± 1.62", "–"],
}


def of_paper(tables: Tables, number: int) -> dict[str, list[str]]:
    rows = rows_of(tables, number).items()
    return {name.removesuffix(" paper"): row[1:-1] for name, row in rows if name.endswith(" paper")}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("cifar10", TABLE_1),
        ("cifar10-cpu", TABLE_1),
        ("cifar100", TABLE_2),
        ("imagenet", TABLE_3),
        ("fashion-mini", {}),
    ],
)
def test_under_each_method_stands_what_the_paper_reports(recipe: str, expected: dict[str, list[str]]) -> None:
    tables = made_up_tables(recipe=recipe)
    assert of_paper(tables, 0) == expected
    assert tables.tables[0].source.startswith("Table ") == bool(expected)


def test_the_paper_has_swa_on_cifar100_alone_with_swap_for_40_epochs() -> None:
    found, records = made(*METHODS, seeds=(0,))
    long = found["swap"][0]
    found["swap_40"] = {0: replace(long, params={**long.params, "phase2": {"epochs": 40}})}
    assert of_paper(make_tables("cifar100", [*METHODS, "swap_40"], found, records), 1) == TABLE_4
    for recipe in ("cifar10", "imagenet", "fashion-mini"):
        assert of_paper(made_up_tables(recipe=recipe), 1) == {}


def test_the_recipe_for_cpu_says_how_the_papers_run_was_larger() -> None:
    source = made_up_tables(recipe="cifar10-cpu").tables[0].source
    assert "four times as wide as this recipe's and saw all 50,000 images" in source
    recipe = read_params(ROOT / "recipes/cifar10-cpu.yaml")
    assert recipe.model.width == 64 // 4
    assert recipe.data.train_images != "all" and recipe.data.train_images < 50_000
