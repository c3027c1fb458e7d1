"""BN-invariant sharpness regularizes the training model (Yi et al., 2019)."""

from __future__ import annotations

from saltflat.papers.bn_sharpness.figure_1 import FIGURE_1
from saltflat.papers.bn_sharpness.tables import HEADLINE, TABLE_1, TABLE_2
from saltflat.papers.experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (FIGURE_1, HEADLINE, TABLE_2, TABLE_1)
