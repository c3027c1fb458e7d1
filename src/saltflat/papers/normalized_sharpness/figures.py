"""Figures 3 and 4: normalized sharpness, and the trace of the Hessian, against the accuracy gap."""

from __future__ import annotations

from functools import partial

from saltflat.papers.experiment import Experiment
from saltflat.papers.normalized_sharpness import networks
from saltflat.papers.random_labels import RATIOS


def _experiment(number: int, name: str, title: str, published: float) -> Experiment:
    """Of one measure; both are of the same networks."""
    return Experiment(
        name=f"normalized-sharpness/figure-{number}",
        title=f"{title[0].upper()}{title[1:]} against the accuracy gap under random labels",
        paper="tsuzuku2020normalized",
        changed=networks.CHANGED,
        runs=networks.runs,
        work=networks.work,
        rows=partial(networks.rows, name=name, title=title, published=published),
        draw=partial(networks.draw, name=name, title=title),
        together=networks.together,
        most=len(RATIOS),  # a seed
        runs_of=None if number == 3 else "normalized-sharpness/figure-3",
    )


# The correlation coefficients are those that figure 1 gives for Wide ResNets.
FIGURE_3 = _experiment(3, "normalized_sharpness", "normalized sharpness", published=0.911)
FIGURE_4 = _experiment(4, "hessian_trace", "trace of the Hessian", published=0.708)
