"""Normalized Flat Minima (Tsuzuku et al., 2020): its figures 3 and 4, of the same networks.

Both keep the same runs: a copy of one's folder `runs` spares the other the training.
"""

from __future__ import annotations

from saltflat.papers.experiment import Experiment
from saltflat.papers.normalized_sharpness.figure_3 import FIGURE_3
from saltflat.papers.normalized_sharpness.figure_4 import FIGURE_4

EXPERIMENTS: tuple[Experiment, ...] = (FIGURE_3, FIGURE_4)
