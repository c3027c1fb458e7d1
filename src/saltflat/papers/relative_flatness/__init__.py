"""FAM: Relative Flatness Aware Minimization (Adilova et al., 2023)."""

from __future__ import annotations

from saltflat.papers.experiment import Experiment
from saltflat.papers.relative_flatness.figure_4 import FIGURE_4
from saltflat.papers.relative_flatness.figure_5 import FIGURE_5
from saltflat.papers.relative_flatness.table_1 import TABLE_1, TABLE_1_FASHION_MNIST
from saltflat.papers.relative_flatness.table_2 import TABLE_2
from saltflat.papers.relative_flatness.table_3 import TABLE_3

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    TABLE_1,
    TABLE_1_FASHION_MNIST,
    TABLE_2,
    TABLE_3,
    FIGURE_4,
    FIGURE_5,
)
