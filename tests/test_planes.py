"""Planes through three models: coordinates that keep distances, and what has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from swap_pipeline.analysis.planes import Plane, axis, parameter_names, read_vector, set_parameters
from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import write_tensors


def weights(seed: int, size: int = 5000) -> torch.Tensor:
    """float32 values, as in a checkpoint, in float64."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).double()


@pytest.fixture
def points() -> dict[str, torch.Tensor]:
    """Three models that differ little from one another, as workers do."""
    start = weights(0)
    return {
        "A": start,
        "B": (start + 0.01 * weights(1)).float().double(),
        "C": (start + 0.02 * weights(2)).float().double(),
    }


def test_u_and_v_are_orthonormal(points: dict[str, torch.Tensor]) -> None:
    plane = Plane.through(points)
    u, v = plane.u.numpy(), plane.v.numpy()
    assert abs(np.dot(u, u) - 1) < 1e-6 and abs(np.dot(v, v) - 1) < 1e-6
    assert abs(np.dot(u, v)) < 1e-6


def test_u_and_v_are_orthonormal_where_the_points_are_nearly_on_a_line(points: dict[str, torch.Tensor]) -> None:
    nearly = points["A"] + 0.5 * (points["B"] - points["A"]) + 1e-5 * weights(3)
    plane = Plane.through({**points, "C": nearly})
    assert abs(float(plane.u @ plane.v)) < 1e-6


def test_the_three_points_have_their_own_weights_back_to_the_last_bit(points: dict[str, torch.Tensor]) -> None:
    plane = Plane.through(points)
    for point in points.values():
        position, distance = plane.project(point)
        assert distance < 1e-9
        assert torch.equal(plane.at(position).float(), point.float())


def test_positions_are_distances_between_weights(points: dict[str, torch.Tensor]) -> None:
    plane = Plane.through(points)
    (a, b, c) = (np.array(plane.project(point)[0]) for point in points.values())
    assert a == pytest.approx([0, 0]) and b[1] == pytest.approx(0, abs=1e-9)
    for one, other, names in ((a, b, "AB"), (b, c, "BC"), (a, c, "AC")):
        expected = np.linalg.norm((points[names[0]] - points[names[1]]).numpy())
        assert np.linalg.norm(one - other) == pytest.approx(expected, rel=1e-12)


def test_a_further_point_is_projected_and_its_distance_told(points: dict[str, torch.Tensor]) -> None:
    plane = Plane.through(points)
    other = weights(4)
    (a, b), distance = plane.project(other)
    basis = np.stack([(points[name] - points["A"]).numpy() for name in "BC"], axis=1)
    offset = (other - points["A"]).numpy()
    solution, *_ = np.linalg.lstsq(basis, offset, rcond=None)
    nearest = basis @ solution
    assert plane.at((a, b)).numpy() == pytest.approx(points["A"].numpy() + nearest, abs=1e-9)
    assert distance == pytest.approx(np.linalg.norm(offset - nearest))


def test_points_that_are_the_same_are_refused(points: dict[str, torch.Tensor]) -> None:
    with pytest.raises(SwapError, match="no plane goes through A, B and C: B and C are the same point"):
        Plane.through({**points, "C": points["B"].clone()})
    with pytest.raises(SwapError, match="A and B are the same point"):
        Plane.through(dict.fromkeys("ABC", points["A"]))


@pytest.mark.parametrize("share", [0.5, -1.0, 3.0])
def test_points_on_one_line_are_refused(points: dict[str, torch.Tensor], share: float) -> None:
    on_line = (points["A"] + share * (points["B"] - points["A"])).float().double()  # to the rounding of a checkpoint
    with pytest.raises(SwapError, match="no plane goes through A, B and C: they lie on one line"):
        Plane.through({**points, "C": on_line})


def test_an_axis_reaches_beyond_all_values_by_the_margin() -> None:
    assert axis([0.0, 4.0, 1.0], margin=0.25, num=4) == pytest.approx([-1, 1, 3, 5])
    assert axis([0.0, 0.3, 0.1], margin=0, num=7)[0] == 0.0
    assert axis([0.0, 0.3, 0.1], margin=0, num=7)[-1] == 0.3


def test_a_vector_holds_parameters_and_no_buffers(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)
    write_tensors(tmp_path / "model.safetensors", network.state_dict(), {})

    vector = read_vector(tmp_path / "model.safetensors", parameter_names(network))

    assert vector.dtype == torch.float64
    expected = [p.detach().contiguous().numpy().reshape(-1) for p in network.parameters()]
    assert vector.numpy() == pytest.approx(np.concatenate(expected))
    other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)
    set_parameters(other, vector)
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"head": torch.tensor([1.0, float("nan")])}, {})
    with pytest.raises(SwapError, match=r"model\.safetensors: tensor 'head' contains NaN or Inf"):
        read_vector(tmp_path / "model.safetensors", ["head"])
