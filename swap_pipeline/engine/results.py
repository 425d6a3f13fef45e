"""A job's outputs: its result, the header of its models, and partial results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from swap_pipeline.config.kept_models import LAST_MODEL
from swap_pipeline.data.prepared import Meta, View
from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.job_folder import JobFolder
from swap_pipeline.storage.files import read_json, write_json
from swap_pipeline.storage.tensor_files import digest_of, write_tensors


def write_point(path: Path, point: Mapping[str, Any]) -> None:
    """Save a small partial result, so that a killed job need not compute it again."""
    write_json(path, {"point": point, "digest": digest_of(point)})


def read_point(path: Path) -> dict[str, Any] | None:
    """A saved partial result; None if it is missing or damaged."""
    try:
        kept = read_json(path)
        return kept["point"] if kept["digest"] == digest_of(kept["point"]) else None
    except (SwapError, KeyError, TypeError):
        return None


def write_result(
    folder: JobFolder,
    network: torch.nn.Module,
    info: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    kept: Iterable[str] = (),
) -> None:
    """Complete a job: the network, in a file without anything that differs from run to run, the run's record, and the
    models `kept` during training."""
    with folder.complete(kept=kept) as result:
        write_tensors(result / LAST_MODEL, network.state_dict(), info)
        write_json(result / "record.json", record)


def describe_model(
    description: Mapping[str, Any],
    meta: Meta,
    *,
    image_shape: tuple[int, int, int],
    view: View | None,
    test_crop: str,
) -> dict[str, Any]:
    """The header of a checkpoint, with all that is needed to rebuild and use the network."""
    header = {
        "model": dict(description),
        "classes": list(meta.classes),
        "shape": list(image_shape),
        "mean": list(meta.mean),
        "std": list(meta.std),
    }
    if view is not None:
        header |= {"view": asdict(view), "test_crop": test_crop}
    return header
