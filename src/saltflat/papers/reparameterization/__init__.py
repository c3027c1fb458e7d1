"""A reparameterization-invariant flatness measure for deep networks (Petzka et al., 2019)."""

from __future__ import annotations

from saltflat.papers.experiment import Experiment
from saltflat.papers.reparameterization.figure_1 import FIGURE_1
from saltflat.papers.reparameterization.figure_3 import FIGURE_3

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (FIGURE_1, FIGURE_3)
