"""Eight ranks, where two would hide errors: sums in another order, ranks without a batch, a rank killed among many."""

from __future__ import annotations

from pathlib import Path

import on_devices
import pytest
import torch
from safetensors.torch import load_file


def same(one: Path, other: Path, *, rtol: float, atol: float) -> None:
    first, second = load_file(one), load_file(other)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.long
def test_eight_ranks_exchange_exactly() -> None:
    assert on_devices.run("exchange", processes=8, device="cpu") == []


@pytest.mark.long
def test_eight_ranks_end_where_one_ends(tmp_path: Path) -> None:
    for processes in (1, 8):
        out = str(tmp_path / f"{processes}.safetensors")
        on_devices.run("train", processes=processes, device="cpu", shards=8, out=out)
    same(tmp_path / "1.safetensors", tmp_path / "8.safetensors", rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_eight_ranks_of_which_three_have_no_batch_find_the_statistics_of_one(tmp_path: Path) -> None:
    scores = [
        on_devices.run("statistics", processes=n, device="cpu", out=str(tmp_path / f"{n}.safetensors")) for n in (1, 8)
    ]
    same(tmp_path / "1.safetensors", tmp_path / "8.safetensors", rtol=1e-6, atol=1e-6)
    assert scores[1] == pytest.approx(scores[0])
