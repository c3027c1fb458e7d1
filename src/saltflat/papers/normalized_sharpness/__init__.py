"""Normalized Flat Minima (Tsuzuku et al., 2020): its figures 3 and 4, of the same networks."""

from __future__ import annotations

from saltflat.papers.experiment import Experiment
from saltflat.papers.normalized_sharpness.figures import FIGURE_3, FIGURE_4

EXPERIMENTS: tuple[Experiment, ...] = (FIGURE_3, FIGURE_4)
