"""The tables of the comparisons: every figure against one worked out by hand, and what is said where one is missing."""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import ROOT

from swap_pipeline.comparison import Comparison, Measured, Table
from swap_pipeline.instances import Instance
from swap_pipeline.params import read_params
from swap_pipeline.tables import as_csv, as_json, best_rows, cell, compare, markdown
from swap_pipeline.tables_words import most_at_once as at_once

Records = dict[Instance, dict[str, Any]]

SEEDS, REPEATS = (5, 9), (1, 3)
PLAIN = ("small_batch", "large_batch")
SWA = ("swa_large_batch", "swa_large_then_small", "swa_small_batch")


def run(accuracy: float, seconds: float, cores: int, **more: Any) -> dict[str, Any]:
    """A record, with what the tables have no use for left out."""
    return {
        "test_accuracy": accuracy,
        "seconds": seconds,
        "devices": f"{cores} × cpu",
        "num_devices": cores,
        **more,
    }


def swa(models: list[float], accuracy: float, seconds: float, cores: int) -> dict[str, Any]:
    return run(accuracy, seconds, cores, models=2, cycle_epochs=8, model_accuracies=models)


def all_records() -> Records:
    """Three repeats of everything; the two workers run side by side."""
    of_repeats: dict[int, dict[str, Any]] = {
        0: {
            "small_batch": run(83, 300, 1),
            "large_batch": run(80, 120, 2),
            "phase1": run(70, 100, 2),
            "workers": [run(80, 40, 2, ran=[1000, 1050]), run(82, 50, 2, ran=[1010, 1070])],
            "phase3": run(84, 4, 1),
            "swa_large_batch": swa([78, 82], 81, 200, 2),
            "swa_large_then_small": swa([82, 84], 85, 160, 1),
            "swa_small_batch": swa([84, 86], 87, 100, 1),
        },
        1: {
            "small_batch": run(84, 310, 1),
            "large_batch": run(80, 130, 2),
            "phase1": run(71, 110, 2),
            "workers": [run(81, 60, 2, ran=[2000, 2070]), run(83, 30, 2, ran=[2000, 2040])],
            "phase3": run(86, 6, 1),
            "swa_large_batch": swa([80, 82], 82, 210, 2),
            "swa_large_then_small": swa([83, 85], 86, 170, 1),
            "swa_small_batch": swa([85, 87], 88, 110, 1),
        },
        3: {
            "small_batch": run(85, 320, 1),
            "large_batch": run(83, 140, 2),
            "phase1": run(72, 90, 2),
            "workers": [run(79, 45, 2, ran=[3000, 3050]), run(81, 45, 2, ran=[3000, 3050])],
            "phase3": run(85, 5, 1),
            "swa_large_batch": swa([79, 85], 83, 220, 2),
            "swa_large_then_small": swa([84, 86], 87, 180, 1),
            "swa_small_batch": swa([86, 88], 89, 120, 1),
        },
    }
    records: Records = {}
    for repeat, runs in of_repeats.items():
        for seed, worker in zip(SEEDS, runs.pop("workers"), strict=True):
            records[Instance(method="phase2", repeat=repeat, seed=seed)] = worker
        records |= {Instance(method=method, repeat=repeat): record for method, record in runs.items()}
    return records


# Mean and sample standard deviation of each, worked out by hand from the records above. SWAP before averaging, repeat
# 0: accuracy (80 + 82) / 2, time 100 + 50, compute 100·2 + 40·2 + 50·2; after: time + 4, compute + 4·1.
BY_HAND: dict[tuple[str, str, str], tuple[tuple[float, float, float], float, float]] = {
    ("plain_training", "small_batch", "test_accuracy"): ((83, 84, 85), 84, 1),
    ("plain_training", "small_batch", "devices"): ((1, 1, 1), 1, 0),
    ("plain_training", "small_batch", "training_time"): ((300, 310, 320), 310, 10),
    ("plain_training", "small_batch", "total_compute"): ((300, 310, 320), 310, 10),
    ("plain_training", "large_batch", "test_accuracy"): ((80, 80, 83), 81, math.sqrt(3)),
    ("plain_training", "large_batch", "devices"): ((2, 2, 2), 2, 0),
    ("plain_training", "large_batch", "training_time"): ((120, 130, 140), 130, 10),
    ("plain_training", "large_batch", "total_compute"): ((240, 260, 280), 260, 20),
    ("plain_training", "swap_before", "test_accuracy"): ((81, 82, 80), 81, 1),
    ("plain_training", "swap_before", "devices"): ((4, 4, 4), 4, 0),
    ("plain_training", "swap_before", "training_time"): ((150, 170, 135), 455 / 3, math.sqrt(925 / 3)),
    ("plain_training", "swap_before", "total_compute"): ((380, 400, 360), 380, 20),
    ("plain_training", "swap_after", "test_accuracy"): ((84, 86, 85), 85, 1),
    ("plain_training", "swap_after", "devices"): ((4, 4, 4), 4, 0),
    ("plain_training", "swap_after", "training_time"): ((154, 176, 140), 470 / 3, math.sqrt(988 / 3)),
    ("plain_training", "swap_after", "total_compute"): ((384, 406, 365), 385, math.sqrt(421)),
    ("swa", "swa_large_batch", "before_averaging"): ((80, 81, 82), 81, 1),
    ("swa", "swa_large_batch", "after_averaging"): ((81, 82, 83), 82, 1),
    ("swa", "swa_large_batch", "training_time"): ((320, 340, 360), 340, 20),
    ("swa", "swa_large_batch", "total_compute"): ((640, 680, 720), 680, 40),
    ("swa", "swa_large_batch", "devices"): ((2, 2, 2), 2, 0),
    ("swa", "swa_large_then_small", "before_averaging"): ((83, 84, 85), 84, 1),
    ("swa", "swa_large_then_small", "after_averaging"): ((85, 86, 87), 86, 1),
    ("swa", "swa_large_then_small", "training_time"): ((260, 280, 270), 270, 10),
    ("swa", "swa_large_then_small", "total_compute"): ((360, 390, 360), 370, math.sqrt(300)),
    ("swa", "swa_large_then_small", "devices"): ((2, 2, 2), 2, 0),
    ("swa", "swa_small_batch", "before_averaging"): ((85, 86, 87), 86, 1),
    ("swa", "swa_small_batch", "after_averaging"): ((87, 88, 89), 88, 1),
    ("swa", "swa_small_batch", "training_time"): ((400, 420, 440), 420, 20),
    ("swa", "swa_small_batch", "total_compute"): ((400, 420, 440), 420, 20),
    ("swa", "swa_small_batch", "devices"): ((1, 1, 1), 1, 0),
    ("swa", "swap", "before_averaging"): ((81, 82, 80), 81, 1),
    ("swa", "swap", "after_averaging"): ((84, 86, 85), 85, 1),
    ("swa", "swap", "training_time"): ((154, 176, 140), 470 / 3, math.sqrt(988 / 3)),
    ("swa", "swap", "total_compute"): ((384, 406, 365), 385, math.sqrt(421)),
    ("swa", "swap", "devices"): ((4, 4, 4), 4, 0),
}

PLAIN_BY_HAND = """\
| method                  | test accuracy (%) | devices | training time (s) | total compute (device-s) |
| ----------------------- | ----------------: | ------: | ----------------: | -----------------------: |
| SGD (small-batch)       |      84.00 ± 1.00 |       1 |      310.0 ± 10.0 |             310.0 ± 10.0 |
| SGD (large-batch)       |      81.00 ± 1.73 |       2 |  **130.0 ± 10.0** |         **260.0 ± 20.0** |
| SWAP (before averaging) |      81.00 ± 1.00 |       4 |      151.7 ± 17.6 |             380.0 ± 20.0 |
| SWAP (after averaging)  |  **85.00 ± 1.00** |       4 |      156.7 ± 18.1 |             385.0 ± 20.5 |
"""
SWA_BY_HAND = """\
| method                                  | before averaging (%) | after averaging (%) | training time (s) | total compute (device-s) |
| --------------------------------------- | -------------------: | ------------------: | ----------------: | -----------------------: |
| Large-batch SWA                         |         81.00 ± 1.00 |        82.00 ± 1.00 |      340.0 ± 20.0 |             680.0 ± 40.0 |
| Large-batch followed by small-batch SWA |         84.00 ± 1.00 |        86.00 ± 1.00 |      270.0 ± 10.0 |         **370.0 ± 17.3** |
| Small-batch SWA                         |     **86.00 ± 1.00** |    **88.00 ± 1.00** |      420.0 ± 20.0 |             420.0 ± 20.0 |
| SWAP (8 small-batch epochs)             |         81.00 ± 1.00 |        85.00 ± 1.00 |  **156.7 ± 18.1** |             385.0 ± 20.5 |
"""  # noqa: E501


def comparison_of(
    records: Records,
    *,
    seeds: tuple[int, ...] = SEEDS,
    repeats: tuple[int, ...] = REPEATS,
    epochs: int = 8,
    cycles: int = 1,
    recipe: str = "own",
) -> Comparison:
    return compare(records, seeds=seeds, repeats=repeats, epochs=epochs, cycles=cycles, recipe=recipe)


def tables_of(records: Records, **given: Any) -> tuple[Table, Table]:
    plain, swa = comparison_of(records, **given).tables
    return plain, swa


def without(*left_out: Callable[[Instance], bool]) -> Records:
    return {run: record for run, record in all_records().items() if not any(out(run) for out in left_out)}


def cells(comparison: Comparison, title: str) -> dict[str, list[str]]:
    """A table as its readers see it: cells by the first one, and those of the paper by that and `paper`."""
    section = markdown(comparison).partition(f"## {title}\n")[2].partition("\n## ")[0]
    found, above = {}, ""
    for line in section.splitlines():
        if line.startswith("| "):
            first, *rest = (text.strip() for text in line.strip("|").split("|"))
            above = above if first == "*paper*" else first
            found[f"{above} paper" if first == "*paper*" else first] = rest
    return found


# --- figures


def test_the_tables_show_what_was_worked_out_by_hand() -> None:
    text = markdown(comparison_of(all_records()))
    assert f"# Comparisons\n\n## SWAP beside plain training\n\n{PLAIN_BY_HAND}\n- " in text
    assert f"\n\n## SWA beside SWAP\n\n{SWA_BY_HAND}\n- " in text
    assert "Notes" not in text and "paper" not in text


def test_an_average_of_other_workers_than_those_listed_does_not_count() -> None:
    records = all_records()
    for repeat, models in ((0, 2), (1, 3), (3, 4)):
        records[Instance(method="phase3", repeat=repeat)]["models"] = models
    table = comparison_of(records).tables[0]
    assert table.rows[-1].repeats == (0,)
    assert any("SWAP: 1 of 3 repeats; repeat 1 lacks phase 3; repeat 3 lacks phase 3" in note for note in table.notes)


def test_captions_say_which_repeats_ran_side_by_side() -> None:
    records = all_records()
    spans = {"small_batch": ([0, 9], [5, 20], [6, 8]), "large_batch": ([0, 9], [9, 12], [30, 31])}
    for method, intervals in spans.items():
        for repeat, interval in zip((0, 1, 3), intervals, strict=True):
            records[Instance(method=method, repeat=repeat)]["ran"] = interval
    captions = [table.captions for table in comparison_of(records).tables]
    assert "Repeats here: small batch: up to 3 side by side; large batch: one after another." in captions[0]
    swa = next(caption for caption in captions[1] if caption.startswith("Repeats here"))
    assert "small-batch SWA: not recorded" in swa


def test_captions_say_which_methods_ran_side_by_side() -> None:
    records = all_records()
    spans = {"small_batch": [0, 9], "swa_large_then_small": [8, 20], "swa_small_batch": [20, 30]}
    for method, interval in spans.items():
        records[Instance(method=method, repeat=0)]["ran"] = interval
    for table in comparison_of(records).tables:
        told = [caption for caption in table.captions if caption.startswith("At the same time")]
        assert told == ["At the same time here: small batch and large-batch followed by small-batch SWA."]
    del records[Instance(method="small_batch", repeat=0)]["ran"]
    captions = [caption for table in comparison_of(records).tables for caption in table.captions]
    assert not any(caption.startswith("At the same time") for caption in captions)


def test_json_has_all_figures_and_comes_back_from_its_file_as_it_was() -> None:
    comparison = comparison_of(all_records())
    told = as_json(comparison)
    assert json.loads(json.dumps(told)) == told
    assert (told["recipe"], told["repeats"]) == ("own", [0, 1, 3])
    quantities = {
        (table, method, key): quantity
        for table, entry in told["tables"].items()
        for method, row in entry["rows"].items()
        for key, quantity in row["quantities"].items()
    }
    assert set(quantities) == set(BY_HAND)
    for where, (values, mean, std) in BY_HAND.items():
        quantity = quantities[where]
        assert quantity["repeats"] == dict(zip(("0", "1", "3"), values, strict=True))
        assert (quantity["mean"], quantity["std"]) == pytest.approx((mean, std))
        assert (quantity["n"], quantity["paper"]) == (3, None)
    for table, entry in zip(comparison.tables, told["tables"].values(), strict=True):
        assert (entry["title"], entry["columns"]) == (table.title, list(table.columns))
        assert (entry["captions"], entry["notes"]) == (list(table.captions), [])
    units = {key: quantity["unit"] for (_, _, key), quantity in quantities.items()}
    assert units == {
        "test_accuracy": "%",
        "before_averaging": "%",
        "after_averaging": "%",
        "devices": "devices",
        "training_time": "s",
        "total_compute": "device-seconds",
    }


def test_csv_has_a_line_for_each_quantity_of_each_method() -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(comparison_of(all_records())))))
    assert [(line["table"], line["method"], line["quantity"]) for line in lines] == list(BY_HAND)
    for line, (values, mean, std) in zip(lines, BY_HAND.values(), strict=True):
        assert [float(line[f"repeat_{repeat}"]) for repeat in (0, 1, 3)] == list(values)
        assert [float(line[key]) for key in ("mean", "std", "n")] == pytest.approx([mean, std, 3])
        assert (line["paper_mean"], line["paper_std"], line["paper_unit"]) == ("", "", "")


def test_csv_leaves_empty_what_is_missing_and_keeps_the_papers_unit() -> None:
    records = without(lambda run: run.repeat != 1 or run.method == "large_batch")
    lines = csv.DictReader(io.StringIO(as_csv(comparison_of(records, recipe="imagenet"))))
    found = {(line["method"], line["quantity"]): line for line in lines if line["table"] == "plain_training"}
    assert found["small_batch", "training_time"] == {
        "table": "plain_training",
        "method": "small_batch",
        "quantity": "training_time",
        "unit": "s",
        "mean": "310.0",
        "std": "",
        "n": "1",
        "paper_mean": "235.29",
        "paper_std": "0.33",
        "paper_unit": "min",
        "repeat_0": "",
        "repeat_1": "310",
        "repeat_3": "",
    }
    large = found["large_batch", "total_compute"]
    assert {key for key, text in large.items() if text} == {"table", "method", "quantity", "unit", "n"}
    assert large["n"] == "0"


def test_mean_and_deviation_are_those_of_the_definition() -> None:
    chance = random.Random(0)
    for _ in range(200):
        values = [chance.uniform(0, 1000) for _ in range(chance.randint(2, 12))]
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        measured = Measured(dict(enumerate(values)))
        assert (measured.mean, measured.std) == pytest.approx((mean, std))
        assert cell("test_accuracy", measured) == f"{measured.mean:.2f} ± {measured.std:.2f}"
        assert cell("training_time", measured) == f"{measured.mean:.1f} ± {measured.std:.1f}"


def test_bold_are_all_that_no_other_beats_in_the_digits_shown() -> None:
    chance = random.Random(0)
    better = {
        "test_accuracy": (2, operator.gt),
        "test_top5": (2, operator.gt),
        "before_averaging": (2, operator.gt),
        "after_averaging": (2, operator.gt),
        "training_time": (1, operator.lt),
        "total_compute": (1, operator.lt),
    }
    for key, (digits, beats) in better.items():
        for _ in range(100):
            means = [chance.choice([None, *(90 + k / 10**3 for k in range(12))]) for _ in range(chance.randint(0, 5))]
            shown = {i: round(mean, digits) for i, mean in enumerate(means) if mean is not None}
            expected = {i for i in shown if not any(beats(other, shown[i]) for other in shown.values())}
            column = [Measured({} if mean is None else {0: mean}) for mean in means]
            assert best_rows(key, column) == (expected if len(shown) > 1 else set())


def test_devices_are_never_bold() -> None:
    assert best_rows("devices", [Measured({0: 1}), Measured({0: 2})]) == set()


def test_equal_means_are_all_bold_and_a_column_of_one_value_has_none() -> None:
    records = without(lambda run: run.repeat != 0 or run.method in {"phase3", "large_batch"})
    alone = cells(comparison_of(records), "SWAP beside plain training")
    assert alone["SGD (small-batch)"] == ["83.00", "1", "300.0", "300.0"]

    # To be shown with two digits, and equal in those.
    records[Instance(method="large_batch")] = run(83.004, 300.04, 1)
    both = cells(comparison_of(records), "SWAP beside plain training")
    assert both["SGD (small-batch)"] == ["**83.00**", "1", "**300.0**", "**300.0**"]
    assert both["SGD (large-batch)"] == ["**83.00**", "1", "**300.0**", "**300.0**"]


def test_one_repeat_has_no_spread() -> None:
    comparison = comparison_of(all_records(), repeats=())
    plain, swa = comparison.tables
    assert cells(comparison, plain.title)["SWAP (after averaging)"] == ["**84.00**", "4", "154.0", "384.0"]
    for table in (plain, swa):
        assert "n = 1, repeat 0: there is no spread to tell." in table.captions
        assert table.notes == ()
    assert "±" not in markdown(comparison)


def test_records_that_the_params_do_not_ask_for_do_not_count() -> None:
    records = all_records()
    records[Instance(method="phase2", repeat=0, seed=77)] = run(10, 9999, 64)
    records[Instance(method="small_batch", repeat=8)] = run(10, 9999, 64)
    assert comparison_of(records) == comparison_of(all_records())


def test_the_time_of_one_worker_is_that_of_the_slowest() -> None:
    records = all_records()
    table = cells(comparison_of(records, seeds=(5,), repeats=()), "SWAP beside plain training")
    assert table["SWAP (before averaging)"] == ["80.00", "2", "140.0", "280.0"]


def test_a_phase_3_on_many_devices_counts_its_devices() -> None:
    records = all_records()
    records[Instance(method="phase3")] = run(84, 4, 16)
    table = cells(comparison_of(records, repeats=()), "SWAP beside plain training")
    assert table["SWAP (after averaging)"] == ["**84.00**", "16", "154.0", "444.0"]


def test_different_numbers_of_devices_are_all_named() -> None:
    records = all_records()
    records[Instance(method="small_batch", repeat=3)] = run(85, 320, 2)
    plain, _ = tables_of(records)
    assert cells(comparison_of(records), plain.title)["SGD (small-batch)"][1] == "1 or 2"
    assert any("small batch: 1 × cpu or 2 × cpu;" in line for line in plain.captions)
    assert any("that of small batch on 1 or 2 devices: " in line for line in plain.captions)


def test_swap_is_called_by_its_epochs() -> None:
    assert "SWAP (1 small-batch epoch)" in cells(comparison_of({}, epochs=1), "SWA beside SWAP")
    assert "SWAP (40 small-batch epochs)" in cells(comparison_of({}, epochs=40), "SWA beside SWAP")


# --- top-5


def top5_records() -> Records:
    records = all_records()
    accuracies = {"small_batch": 97.0, "large_batch": 96.0, "phase1": 90.0, "phase3": 98.5}
    for instance, record in records.items():
        if instance.method in accuracies:
            record["test_top5"] = accuracies[instance.method]
        elif instance.method == "phase2":
            record["test_top5"] = 96.5 if instance.seed == 5 else 97.25
    return records


def test_top_5_accuracy_has_a_column_where_it_was_recorded() -> None:
    comparison = comparison_of(top5_records())
    table = cells(comparison, "SWAP beside plain training")
    assert table["method"][:2] == ["test accuracy (%)", "top-5 accuracy (%)"]
    # Of the workers: (96.5 + 97.25) / 2 = 96.875.
    assert [row[1] for name, row in table.items() if name.startswith("S")] == [
        "97.00 ± 0.00",
        "96.00 ± 0.00",
        "96.88 ± 0.00",
        "**98.50 ± 0.00**",
    ]
    assert as_json(comparison)["tables"]["plain_training"]["rows"]["swap_before"]["quantities"]["test_top5"] == {
        "unit": "%",
        "mean": 96.875,
        "std": 0.0,
        "n": 3,
        "repeats": {"0": 96.875, "1": 96.875, "3": 96.875},
        "paper": None,
    }


def test_top_5_accuracy_that_some_runs_lack_is_a_dash_and_a_note() -> None:
    records = top5_records()
    for repeat in (0, 1, 3):
        del records[Instance(method="small_batch", repeat=repeat)]["test_top5"]
    records[Instance(method="phase2", repeat=1, seed=9)]["test_top5"] = None
    comparison = comparison_of(records)
    assert cells(comparison, "SWAP beside plain training")["SGD (small-batch)"][1] == "–"
    assert comparison.tables[0].notes == (
        "small batch: top-5 accuracy not recorded in repeats 0, 1 and 3",
        "SWAP: top-5 accuracy not recorded in repeat 1",
    )
    swap = as_json(comparison)["tables"]["plain_training"]["rows"]["swap_before"]["quantities"]["test_top5"]
    assert swap["repeats"] == {"0": 96.875, "3": 96.875}


def test_there_is_no_word_about_top_5_where_nothing_has_it() -> None:
    comparison = comparison_of(all_records())
    for text in (markdown(comparison), json.dumps(as_json(comparison)), as_csv(comparison)):
        assert "top" not in text


# --- captions


def test_captions_say_what_the_figures_mean() -> None:
    plain, swa = tables_of(all_records())
    shared = (
        "Mean ± sample standard deviation over n = 3, repeats 0, 1 and 3.",
        "Training time of SWAP: phase 1 + slowest worker + phase 3, that is with the workers side by side, whatever "
        "this machine could do; before averaging without phase 3. Its devices are as many as that takes; phase 1 had 2 "
        "of these 4.",
        "Here all 2 workers of a repeat ran side by side.",
        "Total compute: each part's seconds times its devices, all workers counted.",
    )
    assert plain.captions == (
        *shared,
        "Repeats here: small batch: not recorded; large batch: not recorded.",
        "Ran on: small batch: 1 × cpu; large batch: 2 × cpu; phase 1: 2 × cpu; each worker: 2 × cpu; phase 3: 1 × cpu.",
        "The clocks exclude evaluation and start-up (not compiling, if that is on), for all methods alike.",
        # (470 / 3) / 310 = 0.5054, 385 / 310 = 1.2419
        "SWAP's time on 4 devices ÷ that of small batch on 1 device: 156.7 s ÷ 310.0 s = 0.51. "
        "In total compute: 385.0 device-s ÷ 310.0 device-s = 1.24.",
    )
    assert swa.captions == (
        "Before averaging: the mean over the sampled models, of SWAP over the workers.",
        "Training time of SWA: the run that it starts from (large batch, phase 1, small batch), then its cycles, one "
        "after another, and the average.",
        *shared,
        "Repeats here: large batch: not recorded; small batch: not recorded; large-batch SWA: not recorded; "
        "large-batch followed by small-batch SWA: not recorded; small-batch SWA: not recorded.",
        "Ran on: large batch: 2 × cpu; phase 1: 2 × cpu; small batch: 1 × cpu; large-batch SWA: 2 × cpu; large-batch "
        "followed by small-batch SWA: 1 × cpu; small-batch SWA: 1 × cpu; each worker: 2 × cpu; phase 3: 1 × cpu.",
        "The clocks exclude evaluation and start-up (not compiling, if that is on), for all methods alike.",
        # (470 / 3) / 420 = 0.3730, 385 / 420 = 0.9167
        "SWAP's time on 4 devices ÷ that of small-batch SWA on 1 device: 156.7 s ÷ 420.0 s = 0.37. "
        "In total compute: 385.0 device-s ÷ 420.0 device-s = 0.92.",
    )


@pytest.mark.parametrize(
    ("intervals", "most"),
    [
        ([(0, 10)], 1),
        ([(0, 10), (10, 20)], 1),
        ([(10, 20), (0, 10)], 1),
        ([(0, 10), (9, 20)], 2),
        ([(0, 100), (10, 20), (30, 40)], 2),
        ([(0, 100), (10, 20), (15, 40), (19, 30)], 4),
        ([(0, 10), (1, 4), (3, 6), (5, 8)], 3),
        ([(0, 10), (0, 10), (0, 10)], 3),
        ([(5, 5)], 1),
        ([(0, 10), (5, 5)], 2),
        ([(0, 10), None], None),
        ([None], None),
    ],
)
def test_the_largest_number_at_work_at_the_same_moment(
    intervals: list[tuple[float, float] | None], most: int | None
) -> None:
    assert at_once(intervals) == most


def test_the_largest_number_is_that_at_the_busiest_of_all_moments() -> None:
    chance = random.Random(0)
    for _ in range(200):
        begins = [chance.randint(0, 30) for _ in range(chance.randint(1, 8))]
        intervals = [(begun, begun + chance.randint(1, 20)) for begun in begins]
        moments = [k + 0.5 for k in range(60)]
        assert at_once(intervals) == max(
            len([1 for begun, ended in intervals if begun < moment < ended]) for moment in moments
        )


FOUR_WORKERS = [(0, 10), (0, 10), (10, 20), (10, 20)]


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (FOUR_WORKERS, "Here at most 2 of the 4 workers of a repeat ran side by side, the others in sequence."),
        ([(0, 10)] * 4, "Here all 4 workers of a repeat ran side by side."),
        ([(k, k + 1) for k in range(4)], "Here the 4 workers of a repeat ran one after another."),
        ([*FOUR_WORKERS[:3], None], "How many of the 4 workers were at work at the same moment here: not recorded."),
        ([(0, 10)], "SWAP has one worker here, so nothing ran side by side."),
        ([None], "SWAP has one worker here, so nothing ran side by side."),
    ],
)
def test_captions_tell_how_the_workers_really_ran(ran: list[tuple[float, float] | None], words: str) -> None:
    records: Records = {Instance(method="phase1"): run(70, 100, 2), Instance(method="phase3"): run(84, 4, 1)}
    for seed, interval in enumerate(ran):
        records[Instance(method="phase2", seed=seed)] = run(80, 10, 1, ran=interval)
    for table in tables_of(records, seeds=tuple(range(len(ran))), repeats=()):
        assert words in table.captions


def test_repeats_whose_workers_ran_differently_are_told_apart() -> None:
    records = all_records()
    records[Instance(method="phase2", repeat=1, seed=5)]["ran"] = [0, 10]
    del records[Instance(method="phase2", repeat=3, seed=9)]["ran"]
    for table in tables_of(records):
        assert (
            "Here, of 2 workers, so many were at work at the same moment: "
            "2 (repeat 0); 1 (repeat 1); not recorded (repeat 3)."
        ) in table.captions


def test_a_process_with_several_cores_is_told_with_their_number() -> None:
    records = all_records()
    records[Instance(method="large_batch")] = run(80, 120, 8, devices="2 × cpu")
    plain, _ = tables_of(records, repeats=())
    assert any("; large batch: 2 × cpu with 8 cores in all; " in line for line in plain.captions)


def test_older_records_without_devices_and_clock_are_said_to_lack_them() -> None:
    records = all_records()
    for record in records.values():
        for key in ("devices", "num_devices", "ran"):
            record.pop(key, None)
    comparison = comparison_of(records)
    plain, swa = comparison.tables
    assert cells(comparison, plain.title)["SGD (small-batch)"] == ["84.00 ± 1.00", "–", "310.0 ± 10.0", "–"]
    assert cells(comparison, swa.title)["Small-batch SWA"][2:] == ["420.0 ± 20.0", "–"]
    assert plain.notes == tuple(
        f"{name}: number of devices not recorded in repeats 0, 1 and 3"
        for name in ("small batch", "large batch", "SWAP")
    )
    assert "small-batch SWA: number of devices not recorded in repeats 0, 1 and 3" in swa.notes
    assert (
        "SWAP's time on devices not recorded ÷ that of small batch on devices not recorded: 156.7 s ÷ 310.0 s = 0.51."
        in plain.captions
    )
    assert any(line.startswith("Ran on: small batch: not recorded; ") for line in plain.captions)
    assert "How many of the 2 workers were at work at the same moment here: not recorded." in plain.captions


# --- what is missing


def test_nothing_at_all_is_dashes_and_notes() -> None:
    for recipe in (None, "own", "cifar10", "cifar10-cpu", "cifar100", "cifar100-40epochs", "imagenet"):
        comparison = comparison_of({}, repeats=(), recipe=recipe)
        plain, swa = comparison.tables
        for table in (plain, swa):
            rows = {name: row for name, row in cells(comparison, table.title).items() if name[0] in "SL"}
            measured = [text for name, row in rows.items() if not name.endswith("paper") for text in row]
            assert measured == ["–"] * 4 * len(table.columns)
            assert "Nothing has run to its end yet." in table.captions
        assert plain.notes == (
            "small batch: not run yet (`dvc repro comparisons/dvc.yaml:small_batch`)",
            "large batch: not run yet (`dvc repro comparisons/dvc.yaml:large_batch`)",
            "SWAP: not run yet (`dvc repro phase3`)",
        )
        assert swa.notes == (
            "large-batch SWA: not run yet (`dvc repro comparisons/dvc.yaml:swa_large_batch`)",
            "large-batch followed by small-batch SWA: not run yet "
            "(`dvc repro comparisons/dvc.yaml:swa_large_then_small`)",
            "small-batch SWA: not run yet (`dvc repro comparisons/dvc.yaml:swa_small_batch`)",
            "SWAP: not run yet (`dvc repro phase3`)",
        )
        lines = list(csv.DictReader(io.StringIO(as_csv(comparison))))
        assert {(line["mean"], line["std"], line["n"], line["repeat_0"]) for line in lines} == {("", "", "0", "")}
        assert json.loads(json.dumps(as_json(comparison)))["repeats"] == [0]


@pytest.mark.parametrize(
    ("gone", "note"),
    [
        ({0, 1, 3}, "not run yet (`dvc repro comparisons/dvc.yaml:{0} comparisons/dvc.yaml:{0}_again`)"),
        ({0}, "2 of 3 repeats; repeat 0 is missing (`dvc repro comparisons/dvc.yaml:{0}`)"),
        ({3}, "2 of 3 repeats; repeat 3 is missing (`dvc repro comparisons/dvc.yaml:{0}_again@3`)"),
        ({1, 3}, "1 of 3 repeats; repeats 1 and 3 are missing (`dvc repro comparisons/dvc.yaml:{0}_again`)"),
        (
            {0, 1},
            "1 of 3 repeats; repeats 0 and 1 are missing "
            "(`dvc repro comparisons/dvc.yaml:{0} comparisons/dvc.yaml:{0}_again@1`)",
        ),
    ],
)
@pytest.mark.parametrize(
    ("method", "name", "title"),
    [
        ("small_batch", "small batch", "SGD (small-batch)"),
        ("large_batch", "large batch", "SGD (large-batch)"),
        ("swa_large_batch", "large-batch SWA", "Large-batch SWA"),
        ("swa_large_then_small", "large-batch followed by small-batch SWA", "Large-batch followed by small-batch SWA"),
        ("swa_small_batch", "small-batch SWA", "Small-batch SWA"),
    ],
)
def test_a_missing_run_leaves_its_repeat_out_and_a_note(
    method: str, name: str, title: str, gone: set[int], note: str
) -> None:
    comparison = comparison_of(without(lambda run: run.method == method and run.repeat in gone))
    table = comparison.tables[0 if method in PLAIN else 1]
    row = next(row for row in table.rows if row.method == method)
    assert table.notes[0] == f"{name}: {note.format(method)}"
    assert row.repeats == tuple(repeat for repeat in (0, 1, 3) if repeat not in gone)
    for key, measured in row.measured.items():
        values = dict(zip((0, 1, 3), BY_HAND[table.key, method, key][0], strict=True))
        assert measured.values == {repeat: value for repeat, value in values.items() if repeat not in gone}
    if len(gone) == 3:
        assert cells(comparison, table.title)[title] == ["–"] * len(table.columns)


SWAP_PARTS = {
    "phase 1": lambda run: run.method == "phase1",
    "worker 9": lambda run: run.seed == 9,
    "phase 3": lambda run: run.method == "phase3",
}


@pytest.mark.parametrize("lacking", [("phase 1",), ("worker 9",), ("phase 3",), ("worker 9", "phase 3")])
def test_a_repeat_of_swap_counts_only_with_all_its_parts(lacking: tuple[str, ...]) -> None:
    records = without(lambda run: run.repeat == 1 and any(SWAP_PARTS[part](run) for part in lacking))
    plain, swa = tables_of(records)
    note = (
        f"SWAP: 2 of 3 repeats; repeat 1 lacks {' and '.join(lacking)} "
        "(`dvc repro comparisons/dvc.yaml:phase3_again@1`)"
    )
    for table, methods in ((plain, ("swap_before", "swap_after")), (swa, ("swap",))):
        assert note in table.notes
        for row in table.rows:
            if row.method in methods:
                assert row.repeats == (0, 3)
                for key, measured in row.measured.items():
                    first, _, last = BY_HAND[table.key, row.method, key][0]
                    assert measured.values == {0: first, 3: last}


def test_a_swap_that_is_half_done_everywhere_is_told_part_by_part() -> None:
    records = without(
        lambda run: run.repeat == 0 and run.method == "phase3",
        lambda run: run.repeat == 1 and run.seed is not None,
        lambda run: run.repeat == 3 and run.method.startswith("phase"),
    )
    comparison = comparison_of(records)
    assert cells(comparison, "SWAP beside plain training")["SWAP (after averaging)"] == ["–"] * 4
    assert comparison.tables[0].notes == (
        "SWAP: 0 of 3 repeats; repeat 3 is missing; repeat 0 lacks phase 3; repeat 1 lacks worker 5 and worker 9 "
        "(`dvc repro phase3 comparisons/dvc.yaml:phase3_again`)",
    )
    alone, _ = tables_of(records, repeats=())
    assert alone.notes == ("SWAP: repeat 0 lacks phase 3 (`dvc repro phase3`)",)


@pytest.mark.parametrize("method", ["small_batch", "swap"])
def test_there_is_no_ratio_without_both_its_times(method: str) -> None:
    records = without(lambda run: run.method == ("small_batch" if method == "small_batch" else "phase3"))
    plain, _ = tables_of(records, recipe="cifar10")
    assert not any("÷" in line for line in plain.captions)


@pytest.mark.parametrize(
    ("start", "method", "name", "start_name", "again", "first"),
    [
        (
            "large_batch",
            "swa_large_batch",
            "large-batch SWA",
            "large batch",
            "comparisons/dvc.yaml:large_batch_again@1",
            "comparisons/dvc.yaml:large_batch",
        ),
        (
            "phase1",
            "swa_large_then_small",
            "large-batch followed by small-batch SWA",
            "phase 1",
            "comparisons/dvc.yaml:phase1_again@1",
            "phase1",
        ),
        (
            "small_batch",
            "swa_small_batch",
            "small-batch SWA",
            "small batch",
            "comparisons/dvc.yaml:small_batch_again@1",
            "comparisons/dvc.yaml:small_batch",
        ),
    ],
)
def test_swa_has_no_time_without_the_run_it_started_from(
    start: str, method: str, name: str, start_name: str, again: str, first: str
) -> None:
    one_gone = without(lambda run: run.method == start and run.repeat == 1)
    _, table = tables_of(one_gone)
    row = next(row for row in table.rows if row.method == method)
    assert row.repeats == (0, 1, 3)
    for key, measured in row.measured.items():
        values = dict(zip((0, 1, 3), BY_HAND["swa", method, key][0], strict=True))
        if not key.endswith("averaging"):
            del values[1]
        assert measured.values == values
    words = f"{name}: no time without that of the run it started from; {start_name} of "
    assert f"{words}repeat 1 is missing (`dvc repro {again}`)" in table.notes
    assert not any("not recorded" in note for note in table.notes)

    _, alone = tables_of(without(lambda run: run.method == start), repeats=())
    assert f"{words}repeat 0 is missing (`dvc repro {first}`)" in alone.notes
    assert all(
        measured.n == (1 if key.endswith("averaging") else 0)
        for row in alone.rows
        for key, measured in row.measured.items()
        if row.method == method
    )


def test_methods_with_different_repeats_are_named_with_them() -> None:
    records = without(lambda run: run.method == "small_batch" and run.repeat == 3)
    plain, swa = tables_of(records)
    assert "Mean ± sample standard deviation over each method's repeats, which differ: see the notes." in plain.captions
    assert plain.notes[-1] == (
        "the repeats differ: small batch n = 2 (repeats 0 and 1); large batch n = 3 (repeats 0, 1 and 3); "
        "SWAP n = 3 (repeats 0, 1 and 3)"
    )
    assert "Mean ± sample standard deviation over n = 3, repeats 0, 1 and 3." in swa.captions
    # As many are not the same: 0 and 1 here, 0 and 3 there.
    records = {
        run: record
        for run, record in records.items()
        if not (run.repeat == 1 and run.method in ("large_batch", "phase3"))
    }
    assert tables_of(records)[0].notes[-1] == (
        "the repeats differ: small batch n = 2 (repeats 0 and 1); large batch n = 2 (repeats 0 and 3); "
        "SWAP n = 2 (repeats 0 and 3)"
    )


def test_swa_with_other_samples_than_swap_is_noted() -> None:
    records = all_records()
    for repeat in (0, 1, 3):
        records[Instance(method="swa_small_batch", repeat=repeat)] |= {"models": 3}
    records[Instance(method="swa_large_batch", repeat=3)] |= {"cycle_epochs": 5}
    assert tables_of(records)[1].notes == (
        "large-batch SWA averaged 2 models, 5 epochs a model; SWAP averages 2, 8 epochs a model",
        "small-batch SWA averaged 3 models, 8 epochs a model; SWAP averages 2, 8 epochs a model",
    )
    # Two workers, two models each, after 4 epochs each.
    notes = tables_of(all_records(), cycles=2)[1].notes
    assert notes == tuple(
        f"{name} averaged 2 models, 8 epochs a model; SWAP averages 4, 4 epochs a model"
        for name in ("large-batch SWA", "large-batch followed by small-batch SWA", "small-batch SWA")
    )


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
    "Large-batch SWA": ["76.06 ± 0.25", "76.00 ± 0.31", "376.4 ± 2.25", "–"],
    "Large-batch followed by small-batch SWA": ["76.26 ± 0.35", "78.12 ± 0.14", "398.0 ± 1.35", "–"],
    "Small-batch SWA": ["76.80 ± 0.15", "79.09 ± 0.19", "848.6 ± 5.61", "–"],
    "SWAP (10 small-batch epochs)": ["75.74 ± 0.15", "78.18 ± 0.21", "125.30 ± 1.85", "–"],
    "SWAP (40 small-batch epochs)": ["76.19 ± 0.19", "79.11 ± 0.12", "241.54 ± 1.62", "–"],
}


def of_paper(comparison: Comparison, title: str) -> dict[str, list[str]]:
    rows = cells(comparison, title).items()
    return {name.removesuffix(" paper"): row for name, row in rows if name.endswith(" paper")}


@pytest.mark.parametrize(
    ("recipe", "expected", "ratio"),
    [
        ("cifar10", TABLE_1, "169.2 s ÷ 254.12 s = 0.67, on 8 and 2 GPUs"),
        ("cifar10-cpu", TABLE_1, "169.2 s ÷ 254.12 s = 0.67, on 8 and 2 GPUs"),
        ("cifar100", TABLE_2, "125.34 s ÷ 573.76 s = 0.22, on 8 and 1 GPUs"),
        ("imagenet", TABLE_3, "156.55 min ÷ 235.29 min = 0.67, on 16 and 8 GPUs"),
        (
            "cifar100-40epochs",
            {
                **TABLE_2,
                # The last row of Table 4, which does not tell the time without averaging.
                "SWAP (before averaging)": ["76.19 ± 0.19", "8", "–", "–"],
                "SWAP (after averaging)": ["79.11 ± 0.12", "8", "241.54 ± 1.62", "–"],
            },
            "241.54 s ÷ 573.76 s = 0.42, on 8 and 1 GPUs",
        ),
    ],
)
def test_under_each_method_stands_what_the_paper_reports(
    recipe: str, expected: dict[str, list[str]], ratio: str
) -> None:
    comparison = comparison_of(all_records(), recipe=recipe)
    table = comparison.tables[0]
    assert of_paper(comparison, table.title) == expected
    assert any(line.endswith(f" In the paper: {ratio}.") for line in table.captions)
    assert table.captions[-1].startswith("*paper*: Table ")


@pytest.mark.parametrize(("recipe", "epochs", "ratio"), [("cifar100", 10, "0.15"), ("cifar100-40epochs", 40, "0.28")])
def test_under_each_variant_of_swa_stands_what_the_paper_reports(recipe: str, epochs: int, ratio: str) -> None:
    comparison = comparison_of(all_records(), recipe=recipe, epochs=epochs)
    of_others = {name: row for name, row in TABLE_4.items() if not name.startswith("SWAP")}
    swap = f"SWAP ({epochs} small-batch epochs)"
    assert of_paper(comparison, "SWA beside SWAP") == {**of_others, swap: TABLE_4[swap]}
    words = f" In the paper: {TABLE_4[swap][2].split(' ')[0].rstrip('0')} s ÷ 848.6 s = {ratio}."
    assert any(line.endswith(words) for line in comparison.tables[1].captions)


@pytest.mark.parametrize("recipe", ["cifar10", "cifar10-cpu", "imagenet", "dawnbench", "fashion-mini", "own", None])
def test_the_paper_has_swa_on_cifar100_alone(recipe: str | None) -> None:
    comparison = comparison_of(all_records(), recipe=recipe)
    assert of_paper(comparison, "SWA beside SWAP") == {}
    assert not any("paper" in line for line in comparison.tables[1].captions)


@pytest.mark.parametrize("recipe", ["dawnbench", "fashion-mini", "fashion-mnist", "own", None])
def test_nothing_is_said_about_the_paper_where_it_has_no_table(recipe: str | None) -> None:
    assert "paper" not in markdown(comparison_of(all_records(), recipe=recipe))


def test_the_recipe_for_cpu_says_how_the_papers_run_was_larger() -> None:
    for recipe, is_larger in (("cifar10-cpu", True), ("cifar10", False)):
        caption = comparison_of({}, recipe=recipe).tables[0].captions[-1]
        assert caption.startswith("*paper*: Table 1: 10 runs on Tesla V100 GPUs.")
        assert ("four times as wide as this recipe's and saw all 50,000 images" in caption) == is_larger
    recipe = read_params(ROOT / "recipes/cifar10-cpu.yaml")
    assert recipe.model.width == 64 // 4
    assert recipe.data.train_images != "all" and recipe.data.train_images < 50_000


def test_the_papers_figures_are_never_bold_and_do_not_compete() -> None:
    with_paper, plain = (
        cells(comparison_of(all_records(), recipe=recipe), "SWA beside SWAP") for recipe in ("cifar100", None)
    )
    assert {name: row for name, row in with_paper.items() if not name.endswith(" paper")} == plain
    assert not any(
        "*" in text
        for row in of_paper(comparison_of({}, recipe="cifar100"), "SWA beside SWAP").values()
        for text in row
    )


def test_json_and_csv_have_the_papers_minutes_as_minutes() -> None:
    comparison = comparison_of(top5_records(), recipe="imagenet")
    rows = as_json(comparison)["tables"]["plain_training"]["rows"]
    time = rows["swap_after"]["quantities"]["training_time"]
    assert time["paper"] == {"mean": 156.55, "std": 0.56, "text": "156.55 ± 0.56", "unit": "min"}
    assert time["unit"] == "s" and time["mean"] == pytest.approx(470 / 3)
    devices = rows["small_batch"]["quantities"]["devices"]["paper"]
    assert devices == {"mean": 8.0, "std": None, "text": "8", "unit": "devices"}
    lines = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    line = next(line for line in lines if (line["method"], line["quantity"]) == ("large_batch", "test_top5"))
    assert (line["paper_mean"], line["paper_std"], line["paper_unit"]) == ("92.98", "0.06", "%")


# --- the stage


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params for two workers and one further repeat, and nothing recorded yet."""
    text = (ROOT / "recipes" / "fashion-mini.yaml").read_text()
    lines = {"  seeds:": "  seeds: [5, 9]", "repeats:": "repeats: [1]", "  epochs: 8 ": "  epochs: 6"}
    for start, line in lines.items():
        (old,) = [found for found in text.splitlines() if found.startswith(start)]
        text = text.replace(old, line)
    (tmp_path / "params.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_tables() -> str:
    from stages.tables import main

    done = CliRunner().invoke(main, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_stage_reads_the_records_that_there_are(project: Path) -> None:
    files = {
        Instance(method="phase1"): "metrics/phase1.json",
        Instance(method="phase2", seed=5): "metrics/phase2/seed_5.json",
        Instance(method="phase2", seed=9): "metrics/phase2/seed_9.json",
        Instance(method="phase3"): "metrics/phase3.json",
        Instance(method="small_batch"): "comparisons/metrics/repeat_0/small_batch.json",
        Instance(method="phase1", repeat=1): "comparisons/metrics/repeat_1/phase1.json",
        Instance(method="phase2", repeat=1, seed=5): "comparisons/metrics/repeat_1/phase2/seed_5.json",
        Instance(method="phase2", repeat=1, seed=9): "comparisons/metrics/repeat_1/phase2/seed_9.json",
        Instance(method="phase3", repeat=1): "comparisons/metrics/repeat_1/phase3.json",
        Instance(method="swa_large_then_small", repeat=1): "comparisons/metrics/repeat_1/swa_large_then_small.json",
    }
    for instance, file in files.items():
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text(json.dumps(all_records()[instance]))

    output = make_tables()

    text = (project / "comparisons" / "tables.md").read_text()
    assert text in output and output.endswith("\ntables: comparisons/tables.md\n")
    told = json.loads((project / "comparisons" / "tables.json").read_text())
    rows = told["tables"]["plain_training"]["rows"]
    assert rows["small_batch"]["quantities"]["training_time"]["repeats"] == {"0": 300}
    assert rows["large_batch"]["quantities"]["training_time"]["repeats"] == {}
    assert rows["swap_after"]["quantities"]["training_time"]["repeats"] == {"0": 154, "1": 176}
    assert told["tables"]["swa"]["rows"]["swa_large_then_small"]["quantities"]["training_time"]["repeats"] == {"1": 280}
    assert told["tables"]["swa"]["rows"]["swap"]["title"] == "SWAP (6 small-batch epochs)"
    assert told["recipe"] == "fashion-mini"
    lines = list(csv.DictReader((project / "comparisons" / "tables.csv").open()))
    assert {(line["repeat_0"], line["repeat_1"]) for line in lines if line["method"] == "swa_small_batch"} == {("", "")}
    assert "`dvc repro comparisons/dvc.yaml:small_batch_again@1`" in text
    assert "SWA averaged 2 models, 8 epochs a model; SWAP averages 2, 6 epochs a model\n" in text


def test_the_stage_makes_tables_of_nothing(project: Path) -> None:
    output = make_tables()
    assert "small batch: not run yet (`dvc repro comparisons/dvc.yaml:small_batch " in output
    assert {path.name for path in (project / "comparisons").iterdir()} == {"tables.md", "tables.json", "tables.csv"}


def test_the_same_records_give_the_same_bytes(project: Path) -> None:
    make_tables()
    before = {path.name: path.read_bytes() for path in (project / "comparisons").iterdir()}
    shutil.rmtree(project / "comparisons")
    make_tables()
    assert {path.name: path.read_bytes() for path in (project / "comparisons").iterdir()} == before


def test_tables_need_no_torch() -> None:
    code = "import sys, stages.tables, swap_pipeline.tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
