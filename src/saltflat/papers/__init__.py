"""The experiments of the papers: what was published, how it is run here, and what came out."""

from __future__ import annotations

from saltflat.papers import predictors, relative_flatness
from saltflat.papers.experiment import Experiment, Reproduction, Row, Size, reproduce

__all__ = ["EXPERIMENTS", "Experiment", "Reproduction", "Row", "Size", "reproduce"]

# By name, "paper/figure".
_ALL: tuple[Experiment, ...] = (*relative_flatness.EXPERIMENTS, *predictors.EXPERIMENTS)
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _ALL}
