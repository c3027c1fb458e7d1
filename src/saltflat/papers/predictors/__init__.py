"""Which measures predict generalisation: the measures of all papers on one pool of networks."""

from __future__ import annotations

from saltflat.papers.experiment import Experiment
from saltflat.papers.predictors.pool import POOL

EXPERIMENTS: tuple[Experiment, ...] = (POOL,)
