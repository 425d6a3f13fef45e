"""`phase3.select: greedy`: which workers are taken, what that costs, and what is said of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Project, assert_one_line

from swap_pipeline.averaging.selection import num_passes, select_greedily
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import parse_params, read_params
from swap_pipeline.engine.distributed import Group
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.storage.files import read_json
from swap_pipeline.storage.tensor_files import read_tensors

ALONE = Group(rank=0, world_size=1, device=torch.device("cpu"))
Table = dict[frozenset[int], tuple[float, float]]
"""accuracy and loss of the average of some workers"""


def taken_by(table: Table) -> tuple[list[int], list[frozenset[int]]]:
    """What is taken by these figures, and whose figures were asked for."""
    asked = []

    def measure(models: Mapping[str, Sequence[Path]]) -> list[dict[str, Any]]:
        chosen = [frozenset(int(path.name) for path in paths) for paths in models.values()]
        asked.extend(chosen)
        return [{"accuracy": table[seeds][0], "loss": table[seeds][1]} for seeds in chosen]

    seeds = sorted(seed for chosen in table if len(chosen) == 1 for seed in chosen)
    taken, measured = select_greedily({seed: [Path(str(seed))] for seed in seeds}, measure, ALONE)
    assert len(measured) == len(asked) == 2 * len(seeds) - 1
    return taken, asked


def table_of(figures: Mapping[str, float], losses: Mapping[str, float] | None = None) -> Table:
    return {frozenset(map(int, key)): (value, (losses or {}).get(key, 0.5)) for key, value in figures.items()}


def test_the_best_worker_comes_first_and_others_only_if_the_average_gets_no_worse() -> None:
    figures = {"1": 80, "2": 90, "3": 85, "12": 99, "13": 99, "23": 89, "123": 99}
    # 2 is the best; with 3, the next, it would get worse; with 1 it gets better.
    assert taken_by(table_of(figures)) == (
        [2, 1],
        [frozenset({1}), frozenset({2}), frozenset({3}), frozenset({2, 3}), frozenset({1, 2})],
    )


def test_an_average_that_is_as_good_is_taken_and_equal_workers_are_ranked_by_loss() -> None:
    figures = {"1": 90, "2": 90, "3": 90, "12": 90, "13": 90, "23": 90, "123": 90}
    assert taken_by(table_of(figures, {"1": 0.3, "2": 0.2, "3": 0.1}))[0] == [3, 2, 1]


def test_where_no_average_is_better_the_best_worker_is_left_alone() -> None:
    figures = {"1": 90, "2": 91, "3": 89, "12": 50, "13": 99, "23": 50, "123": 99}
    assert taken_by(table_of(figures))[0] == [2]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_can_be_walked_on_the_table_of_all_averages(seed: int) -> None:
    draw = random.Random(seed)
    workers = range(5)
    chosen = [frozenset(some) for size in range(1, 6) for some in itertools.combinations(workers, size)]
    table = {some: (float(draw.randrange(80, 90)), draw.random()) for some in chosen}

    taken, _ = taken_by(table)

    ranked = sorted(workers, key=lambda one: (-table[frozenset({one})][0], table[frozenset({one})][1]))
    for number, one in enumerate(ranked):
        before = frozenset(ranked[:number]) & set(taken)
        is_better = not before or table[before | {one}][0] >= table[before][0]
        assert (one in taken) == is_better


def params_with(recipe: Any, **changes: Any) -> Params:
    tree = {section: dict(entries) if isinstance(entries, dict) else entries for section, entries in recipe.items()}
    for dotted, value in changes.items():
        section, _, name = dotted.partition("__")
        tree[section][name] = value
    return parse_params(tree)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),
        ({"phase3__select": "greedy"}, 4),  # three more workers, and the result
        ({"phase3__select": "greedy", "phase2__cycles": 2}, 8),  # also the mean of each worker's own models
        ({"phase3__select": "greedy", "phase2__ema_decay": 0.9}, 8),
        ({"phase3__select": "greedy", "workers__seeds": [0]}, 0),
        ({"workers__seeds": [0], "phase2__cycles": 2}, 1),
    ],
)
def test_the_cost_is_known_in_passes_over_the_training_images(changes: dict[str, Any], expected: int) -> None:
    from conftest import ROOT
    from ruamel.yaml import YAML

    recipe = YAML(typ="safe", pure=True).load((ROOT / "recipes/fashion-mini.yaml").read_text())
    assert num_passes(params_with(recipe, **changes)) == expected


# --- in the pipeline


@pytest.fixture(scope="module")
def selected(validated: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The workers of a finished run, selected, and all choices of them measured by the analysis."""
    project = validated.copy_to(tmp_path_factory.mktemp("selected") / "project")
    project.set_params({"phase3.select": "greedy"})
    project.set_analysis({"subsets": 10})
    (project.root / "output.txt").write_text(project.dvc("repro"))
    done = project.stage("workers")
    assert done.returncode == 0, done.stderr
    return project


@pytest.mark.long
def test_phase_3_takes_whom_the_analysis_of_all_choices_says_it_should(selected: Project) -> None:
    phase3, analysis = selected.json("metrics/phase3.json"), selected.json("analysis/workers.json")
    assert analysis["split"] == "validation"
    table = {frozenset(one["seeds"]): (one["accuracy"], one["loss"]) for one in analysis["subsets"]}
    assert len(table) == 7
    expected, asked = taken_by(table)

    assert phase3["taken"] == expected
    assert [point["label"] for point in phase3["tried"][:3]] == ["seed_0", "seed_1", "seed_2"]
    assert [(point["accuracy"], point["loss"]) for point in phase3["tried"]] == [table[some] for some in asked]
    assert phase3["validation_accuracy"] == table[frozenset(expected)][0]
    assert phase3["validation_loss"] == table[frozenset(expected)][1]
    assert phase3["models"] == 2 * len(expected)  # two cycles
    assert phase3["seconds"] > sum(point["seconds"] for point in phase3["tried"])


def test_the_result_is_the_mean_of_those_taken_and_says_who_they_are(selected: Project) -> None:
    taken = sorted(selected.json("metrics/phase3.json")["taken"])
    names = [f"checkpoints/phase2/seed_{seed}/{name}.safetensors" for seed in taken for name in ("cycle_1", "model")]
    models = [read_tensors(selected.root / name)[0] for name in names]
    average, info = read_tensors(selected.root / "checkpoints/phase3/model.safetensors")
    key = next(key for key, tensor in average.items() if tensor.ndim == 4)
    by_hand = torch.stack([model[key].double() for model in models]).mean(dim=0)
    torch.testing.assert_close(average[key].double(), by_hand, rtol=1e-6, atol=1e-7)
    assert info["seeds"] == taken


def test_metrics_and_page_say_how_many_were_taken(selected: Project) -> None:
    taken = selected.json("metrics/phase3.json")["taken"]
    assert selected.json("metrics/swap.json")["taken"] == len(taken)
    page = " ".join((selected.root / "report/index.html").read_text().split())
    assert f"Of 3 workers, {len(taken)} were taken" in page
    assert ", ".join(map(str, taken)) in page


def test_a_job_that_was_killed_measures_nothing_twice(
    selected: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.phase3 import average_workers
    from swap_pipeline.averaging.job import Averager

    monkeypatch.chdir(selected.root)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "SWAP_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    params, folder, average = read_params(), JobFolder(tmp_path / "job"), Averager.average
    calls: list[int] = []

    def counted(*given: Any, **more: Any) -> float:
        calls.append(len(given[1]))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return average(*given, **more)

    monkeypatch.setattr(Averager, "average", counted)
    with pytest.raises(KeyboardInterrupt):
        average_workers(params, folder)
    average_workers(params, folder)

    # Three workers alone, two tries, the average had phase 2 ended after its first epoch, and the result; one in vain.
    assert len(calls) == 3 + 2 + 1 + 1 + 1
    found, before = read_json(folder.result / "record.json"), selected.json("metrics/phase3.json")
    assert found["taken"] == before["taken"]
    assert found["validation_loss"] == before["validation_loss"]


@pytest.mark.long
def test_two_ranks_take_the_same(selected: Project, tmp_path: Path) -> None:
    project = selected.copy_to(tmp_path / "project")
    before = project.json("metrics/phase3.json")
    project.set_params({"phase1.shards": 2})

    done = project.stage("phase3", SWAP_NPROC="2")

    assert done.returncode == 0, done.stderr
    after = project.json("metrics/phase3.json")
    assert after["devices"] == "2 × cpu"
    assert after["taken"] == before["taken"]
    assert after["validation_accuracy"] == before["validation_accuracy"]


def test_without_a_validation_set_it_is_refused_in_one_line(project: Project) -> None:
    project.set_params({"phase3.select": "greedy"})
    assert_one_line(project.swap("check"), "phase3.select is greedy", "data.validation_images is 0: raise it")
