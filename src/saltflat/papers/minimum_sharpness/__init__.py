"""Minimum sharpness (Ibayashi et al., 2021): its figures."""

from __future__ import annotations

from saltflat.papers.experiment import Experiment
from saltflat.papers.minimum_sharpness.figure_1 import FIGURE_1
from saltflat.papers.minimum_sharpness.figure_2 import FIGURE_2
from saltflat.papers.minimum_sharpness.figure_3 import FIGURE_3
from saltflat.papers.minimum_sharpness.figure_4 import FIGURE_4

EXPERIMENTS: tuple[Experiment, ...] = (FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_4)
