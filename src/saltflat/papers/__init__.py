"""The experiments of the papers: what was published, how it is run here, and what came out."""

from __future__ import annotations

from saltflat.papers import (
    bn_sharpness,
    minimum_sharpness,
    normalized_sharpness,
    predictors,
    relative_flatness,
    reparameterization,
)
from saltflat.papers.experiment import Experiment, Reproduction, Row, Size, reproduce

__all__ = ["EXPERIMENTS", "Experiment", "Reproduction", "Row", "Size", "reproduce"]

# By name, "paper/figure".
_ALL: tuple[Experiment, ...] = (
    *minimum_sharpness.EXPERIMENTS,
    *normalized_sharpness.EXPERIMENTS,
    *reparameterization.EXPERIMENTS,
    *relative_flatness.EXPERIMENTS,
    *bn_sharpness.EXPERIMENTS,
    *predictors.EXPERIMENTS,
)
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _ALL}
