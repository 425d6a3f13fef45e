"""Planes in weight space: through three models, with coordinates that preserve distances.

A model is the float64 vector of its parameters, without buffers (batch-norm statistics). θ = θ₁ + a·u + b·v with
orthonormal u and v (section 4 of the paper), so a and b are distances between weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from swap_pipeline.errors import SwapError
from swap_pipeline.storage.tensor_files import TensorFile

Position = tuple[float, float]
"""Along u and v."""

# As a share of the largest distance between the three points. Weights are float32, so a smaller distance from a point
# or line is rounding.
_SAME_POINT = 1e-6
_SAME_LINE = 1e-4


def parameter_names(network: nn.Module) -> list[str]:
    """The order of the parameters in a vector."""
    return [name for name, _ in network.named_parameters()]


def read_vector(path: Path, names: Iterable[str]) -> torch.Tensor:
    """The parameters of a checkpoint as one float64 vector."""
    file = TensorFile(path)
    parts = []
    for name in names:
        if name not in file.layout:
            raise SwapError(f"{path} belongs to another network (it has no tensor {name!r}): train again")
        parts.append(file.read(name).double().reshape(-1))
        if not torch.isfinite(parts[-1]).all():
            raise SwapError(f"{path}: tensor {name!r} contains NaN or Inf: train this model again")
    return torch.cat(parts)


@torch.no_grad()
def set_parameters(network: nn.Module, vector: torch.Tensor) -> None:
    """Set `network`'s weights to a vector."""
    parameters = list(network.parameters())
    parts = vector.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view(parameter.shape))


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """A plane in weight space."""

    origin: torch.Tensor
    u: torch.Tensor
    v: torch.Tensor

    @classmethod
    def through(cls, points: Mapping[str, torch.Tensor]) -> Plane:
        """The plane through three named points: the first is the origin, and u points to the second."""
        assert len(points) == 3
        names = f"no plane goes through {_listed(list(points))}"
        distances = {(a, b): float((points[a] - points[b]).norm()) for a, b in combinations(points, 2)}
        largest = max(distances.values())
        for (a, b), distance in distances.items():
            if distance <= _SAME_POINT * largest:
                raise SwapError(f"{names}: {a} and {b} are the same point")
        origin, second, third = points.values()
        u = second - origin
        u /= u.norm()
        v = third - origin
        for _ in range(2):  # twice, to remove what rounding leaves of u
            v -= (v @ u) * u
        if v.norm() <= _SAME_LINE * largest:
            raise SwapError(f"{names}: they lie on one line")
        v /= v.norm()
        return cls(origin=origin, u=u, v=v)

    def project(self, vector: torch.Tensor) -> tuple[Position, float]:
        """The nearest position in the plane, and the vector's distance from it."""
        offset = vector - self.origin
        a, b = float(offset @ self.u), float(offset @ self.v)
        return (a, b), float((offset - a * self.u - b * self.v).norm())

    def at(self, position: Position) -> torch.Tensor:
        """The weights at a position."""
        a, b = position
        return self.origin + a * self.u + b * self.v


def axis(values: Sequence[float], *, margin: float, num: int) -> list[float]:
    """`num` equally spaced places that extend beyond all `values` by `margin` times their extent on both sides."""
    low, high = min(values), max(values)
    beyond = margin * (high - low)
    return [float(place) for place in torch.linspace(low - beyond, high + beyond, num, dtype=torch.float64)]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
