"""What a job leaves behind: its result, the header of its models, and pieces of its work on the way."""

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
    """Keep a small piece of a job's work, so that a job that was killed need not do it again."""
    write_json(path, {"point": point, "digest": digest_of(point)})


def read_point(path: Path) -> dict[str, Any] | None:
    """What was kept, if it is there and as it was written."""
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
    """Complete a job: the network, with nothing in it that differs from run to run, what is known of the run, and the
    models that were `kept` on the way."""
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
    """The header of a checkpoint, from which the network can be rebuilt and used."""
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
