"""FAM: Relative Flatness Aware Minimization (Adilova et al., 2023)."""

from __future__ import annotations

from saltflat.papers.experiment import Experiment
from saltflat.papers.relative_flatness.table_1 import TABLE_1, TABLE_1_FASHION_MNIST

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (TABLE_1, TABLE_1_FASHION_MNIST)
