"""Synthetic shapes in place of the paper's skulls: hollow unions of ellipsoids with a part missing.

The paper's skulls are medical images that are not public. What is generated here has their form:
binary volumes of 64³ voxels, or fewer, that hold a thin shell; every training shape lacks one part,
and every shape of the evaluation is given twice, with a defect like those of the training and with
one of another shape, size and place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

_THICKNESS = 0.16  # of the shell, as a part of the radius


class Shapes(NamedTuple):
    """Whole shapes and the same with a part missing, float32 of shape (n, 1, side, side, side)."""

    train: Tensor
    train_defective: Tensor
    test: Tensor
    test_defective: Tensor  # evaluation set 1: a ball is missing at the top, as in training
    test_otherwise: Tensor  # evaluation set 2: a larger box is missing at one side


def synthetic_shapes(train: int, test: int, seed: int = 0, side: int = 64) -> Shapes:
    """So many shapes; all of them follow from the seed, in volumes of every side."""
    generator, grid = Generator().manual_seed(seed), _grid(side)
    whole = torch.stack([_shell(grid, generator) for _ in range(train + test)])
    alike = torch.stack([_without_ball(shape, grid, generator) for shape in whole])
    otherwise = torch.stack([_without_box(shape, grid, generator) for shape in whole[train:]])
    return Shapes(whole[:train], alike[:train], whole[train:], alike[train:], otherwise)


def _grid(side: int) -> Tensor:
    """Coordinates of all voxels, from -1 to 1: (side, side, side, 3)."""
    axis = torch.linspace(-1, 1, side)
    return torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), dim=-1)


def _uniform(low: float, high: float, count: int, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator)


def _shell(grid: Tensor, generator: Generator) -> Tensor:
    """The surface of a large ellipsoid around the middle, grown together with two others."""
    radius = torch.full(grid.shape[:3], torch.inf)
    for spread, low, high in ((0.05, 0.55, 0.75), (0.4, 0.25, 0.45), (0.4, 0.25, 0.45)):
        centre = _uniform(-spread, spread, 3, generator)
        axes = _uniform(low, high, 3, generator)
        radius = torch.minimum(radius, ((grid - centre) / axes).norm(dim=-1))
    return ((radius <= 1) & (radius > 1 - _THICKNESS)).float()[None]


def _without_ball(shape: Tensor, grid: Tensor, generator: Generator) -> Tensor:
    """Without what lies in a ball around a point near the top of the shell."""
    centre = torch.cat([_uniform(0.5, 0.65, 1, generator), _uniform(-0.2, 0.2, 2, generator)])
    outside: Tensor = (grid - centre).norm(dim=-1) > _uniform(0.25, 0.35, 1, generator)
    return shape * outside


def _without_box(shape: Tensor, grid: Tensor, generator: Generator) -> Tensor:
    """Without what lies in a box around a point at the side of the shell."""
    centre = torch.cat([_uniform(-0.4, 0.1, 1, generator), _uniform(0.4, 0.65, 2, generator)])
    half = _uniform(0.3, 0.45, 3, generator)
    return shape * ((grid - centre).abs() > half).any(dim=-1)
