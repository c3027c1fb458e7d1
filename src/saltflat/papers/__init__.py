"""The experiments of the papers: what was published, how it is run here, and what came out."""

from __future__ import annotations

from saltflat.papers import (
    bn_sharpness,
    minimum_sharpness,
    relative_flatness,
    reparameterization,
)
from saltflat.papers.experiment import Experiment, Reproduction, Row, Size, reproduce

__all__ = ["EXPERIMENTS", "Experiment", "Reproduction", "Row", "Size", "reproduce"]

# By name, "paper/figure".
_ALL: tuple[Experiment, ...] = (
    *minimum_sharpness.EXPERIMENTS,
    *relative_flatness.EXPERIMENTS,
    *reparameterization.EXPERIMENTS,
    *bn_sharpness.EXPERIMENTS,
)
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _ALL}
