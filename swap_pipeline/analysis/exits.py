"""What other exits from phase 1 would have given: phases 2 and 3 from its models after several epochs, as a job."""

from __future__ import annotations

import statistics as stats
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from swap_pipeline.averaging.job import Averager, measured_averages
from swap_pipeline.config.common_params import Setting
from swap_pipeline.config.instances import PHASE1
from swap_pipeline.config.kept_models import LAST_MODEL, label_of_epoch, models_of_cycles, models_to_keep
from swap_pipeline.config.params import EpochList, Optimizer, Phase2, Phase3
from swap_pipeline.engine.distributed import Group
from swap_pipeline.runtime.job_folder import RECORD, JobFolder
from swap_pipeline.runtime.progress import Reporter
from swap_pipeline.storage.files import read_json, write_json
from swap_pipeline.training.job import run_of_worker, run_training_job
from swap_pipeline.training.leaving.rules import ForkTest, exit_of_rule
from swap_pipeline.training.run import Epoch, Run

RULES = ("accuracy", "plateau", "qsr", "fork")


def exits_of(wanted: EpochList, *, kept: EpochList, epochs: int) -> dict[int, Path]:
    """Models of phase 1 by epoch: those that are wanted and have been kept, and the last one."""
    there = models_to_keep(kept, epochs=epochs)
    chosen = {epoch: name for epoch, name in there.items() if wanted == "all" or epoch in wanted}
    return {epoch: PHASE1.checkpoints / name for epoch, name in {**chosen, epochs: LAST_MODEL}.items()}


def run_exits_job(
    exits: Mapping[int, Path],
    *,
    phase1: Run,
    phase2: Phase2,
    seeds: Sequence[int],
    name: str,
    setting: Setting,
    optimizer: Optimizer,
    statistics: Phase3,
    group: Group,
    folder: JobFolder,
) -> None:
    """Run one rank of a job that trains workers from each of phase 1's models `exits`, and averages them.

    Each worker runs on one rank, as a job of its own inside this one's folder, so it is resumed or reused.
    """
    with folder.writer(is_main=group.is_main):
        if group.main_says(folder.is_complete):
            return
        pieces = list(product(exits, seeds))
        places = {piece: JobFolder(folder.path / f"epoch_{piece[0]}_seed_{piece[1]}") for piece in pieces}
        reporter = Reporter(name=name, total=len(pieces) + len(exits), folder=folder.path, is_main=group.is_main)
        cycles = models_of_cycles(epochs=phase2.epochs, cycles=phase2.cycles)
        averager = Averager.open(setting, statistics, group)
        folder.check_inputs()
        for epoch, seed in pieces[group.rank :: group.world_size]:
            run_training_job(
                run_of_worker(phase2, worker=seed, seed=setting.seed),
                start=exits[epoch],
                header={"phase": "phase2", "seed": seed, "exit": epoch},
                setting=setting,
                optimizer=optimizer,
                group=replace(group, rank=0, world_size=1),
                folder=places[epoch, seed],
                keep=cycles,
                averaged=cycles,
            )
        group.wait()
        names = [*cycles.values(), LAST_MODEL]
        models = {
            label_of_epoch(epoch): [places[epoch, seed].result / file for seed in seeds for file in names]
            for epoch in exits
        }
        points = measured_averages(models, averager, folder=folder, reporter=reporter, final=True)
        if group.is_main:
            record = read_json(PHASE1.record)
            found = [
                {"epoch": epoch, **point, **_workers(record, epoch, [places[epoch, seed] for seed in seeds], point)}
                for epoch, point in zip(exits, points, strict=True)
            ]
            # Without a validation set, there is nothing for it to look at.
            rules = RULES if averager.data.validation is not None else [name for name in RULES if name != "plateau"]
            left = _exits_of_rules(rules, phase1, record, found)
            about = {"exits": found, "rules": left, "seeds": seeds, "split": averager.data.held_out_name}
            with folder.complete() as result:
                write_json(result / RECORD, {**about, **group.as_json()})


def _workers(
    phase1: Mapping[str, Any], epoch: int, workers: Sequence[JobFolder], point: Mapping[str, Any]
) -> dict[str, float]:
    """The workers' mean accuracy before averaging, and the critical path of all three phases."""
    records = [read_json(worker.result / RECORD) for worker in workers]
    before = sum(row["seconds"] for row in phase1["curve"][:epoch])
    return {
        "workers": stats.fmean(record["test_accuracy"] for record in records),
        "seconds": before + max(record["seconds"] for record in records) + point["seconds"],
    }


def _exits_of_rules(
    rules: Sequence[str], phase1: Run, record: Mapping[str, Any], exits: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Where each rule would have left phase 1, if it would, and what that costs: its regret, at the nearest exit."""
    curve = [Epoch(**row) for row in record["curve"]]
    tests = [ForkTest(**test) for test in record.get("forks", ())]
    found = []
    for rule in rules:
        if (epoch := exit_of_rule(rule, phase1, curve, tests)) is not None:
            nearest = min(exits, key=lambda point: abs(point["epoch"] - epoch))
            regret = max(point["accuracy"] for point in exits) - nearest["accuracy"]
            found.append({"rule": rule, "epoch": epoch, "nearest": nearest["epoch"], "regret": regret})
    return found
