"""A comparison's figures for `dvc exp show`."""

from __future__ import annotations

from pathlib import Path

from swap_pipeline.files import read_json, write_json
from swap_pipeline.instances import Instance

SHOWN = ("test_accuracy", "test_top5", "test_loss", "train_accuracy", "seconds")


def write_headline(instance: Instance) -> None:
    """Write those of repeat 0 to a small file that git keeps, where DVC finds them for every experiment."""
    if instance.repeat == 0:
        record = read_json(instance.record)
        figures = {key: record[key] for key in SHOWN if key in record}
        write_json(Path("comparisons") / f"{instance.method}.json", {instance.method: figures})
