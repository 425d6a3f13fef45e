"""The average as it would be had phase 2 stopped earlier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Clock, Project

from stages.phase3 import models_after
from swap_pipeline.averaging.job import Averager
from swap_pipeline.config.common_params import setting_of
from swap_pipeline.config.kept_models import models_to_keep
from swap_pipeline.config.reading import read_params
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.storage.files import read_json


def test_the_last_point_is_phase_3s_result(finished_project: Project) -> None:
    points = finished_project.json("metrics/phase3.json")["points"]
    phase3 = finished_project.json("metrics/phase3.json")
    assert [point["label"] for point in points] == ["epoch_1", "epoch_2"]
    assert points[-1]["accuracy"] == phase3["test_accuracy"]
    assert points[-1]["loss"] == phase3["test_loss"]


def test_an_earlier_point_is_the_mean_of_the_models_kept_then(
    finished_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from swap_pipeline.engine.distributed import Group
    from swap_pipeline.storage.tensor_files import read_tensors

    monkeypatch.chdir(finished_project.root)
    params = read_params()
    group = Group(rank=0, world_size=1, device=torch.device("cpu"))
    averager = Averager.open(setting_of(params), params.phase3, group)
    kept = [read_tensors(Path(f"checkpoints/phase2/seed_{seed}/epoch_1.safetensors"))[0] for seed in (0, 1, 2)]
    for name, parameter in averager.network.named_parameters():
        parameter.data.copy_(sum(tensors[name].double() for tensors in kept) / 3)
    averager.network.to(memory_format=torch.channels_last)
    averager.recompute_statistics(None)
    score = averager.score(None)

    (first, _) = finished_project.json("metrics/phase3.json")["points"]
    assert first["accuracy"] == pytest.approx(score.accuracy)
    assert first["loss"] == pytest.approx(score.loss, rel=1e-5)


def test_the_clock_of_an_average_stands_still_while_it_starts_and_is_tested(
    finished_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from swap_pipeline.averaging import job
    from swap_pipeline.engine.distributed import Group

    clock = Clock()

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*given: Any, **more: Any) -> Any:
            clock.advance(seconds)
            return function(*given, **more)

        return slow

    monkeypatch.chdir(finished_project.root)
    monkeypatch.setattr(job, "time", clock)
    monkeypatch.setattr(job, "average_on_ranks", taking(2, job.average_on_ranks))
    for name, cost in (("open", 1000), ("recompute_statistics", 3), ("score", 100)):
        monkeypatch.setattr(Averager, name, taking(cost, getattr(Averager, name)))
    params, folder = read_params(), JobFolder(tmp_path / "job")

    job.run_averaging_job(
        {"epoch_2": {seed: [Path(f"checkpoints/phase2/seed_{seed}/model.safetensors")] for seed in (0, 1, 2)}},
        name="phase3",
        header={},
        setting=setting_of(params),
        statistics=params.phase3,
        group=Group(rank=0, world_size=1, device=torch.device("cpu")),
        folder=folder,
    )

    assert read_json(folder.result / "record.json")["seconds"] == 5
    assert clock.now == 1000 + 2 + 3 + 100


def test_workers_keep_the_models_that_params_list(finished_project: Project) -> None:
    def models(folder: str) -> list[str]:
        return sorted(path.name for path in (finished_project.root / folder).iterdir())

    assert models("checkpoints/phase1") == ["epoch_2.safetensors", "model.safetensors"]
    assert models("checkpoints/phase2/seed_1") == ["epoch_1.safetensors", "model.safetensors"]


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (2, ["epoch_2"]),
        (4, ["cycle_1"]),
        (5, ["cycle_1", "epoch_5"]),
        (8, ["cycle_1", "cycle_2"]),
        (12, ["cycle_1", "cycle_2", "model"]),
    ],
)
def test_with_cycles_the_models_of_past_cycles_take_part(epoch: int, expected: list[str]) -> None:
    by_seed = models_after(epoch, seeds=(3, 1), epochs=12, cycles=3)
    assert list(by_seed.items()) == [
        (seed, [Path(f"checkpoints/phase2/seed_{seed}/{name}.safetensors") for name in expected]) for seed in (1, 3)
    ]


def test_epochs_that_never_come_are_not_kept() -> None:
    assert models_to_keep((1, 3, 9), epochs=4) == {1: "epoch_1.safetensors", 3: "epoch_3.safetensors"}
    assert list(models_to_keep("all", epochs=4)) == [1, 2, 3]  # the fourth is the run's own model
