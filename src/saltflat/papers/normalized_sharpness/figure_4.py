"""Figure 4 of Normalized Flat Minima: trace of the Hessian against the accuracy gap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from saltflat.papers.experiment import Experiment, Row
from saltflat.papers.normalized_sharpness import networks
from saltflat.sweep import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAME, _TITLE = "hessian_trace", "trace of the Hessian"
_PUBLISHED = 0.708  # the correlation coefficient that figure 1 gives for Wide ResNets


def _rows(runs: Sequence[Run]) -> list[Row]:
    return networks.rows(runs, _NAME, _TITLE, _PUBLISHED)


def _draw(runs: Sequence[Run]) -> Figure:
    return networks.draw(runs, _NAME, _TITLE)


FIGURE_4 = Experiment(
    name="normalized-sharpness/figure-4",
    title="Trace of the Hessian against the accuracy gap under random labels",
    paper="tsuzuku2020normalized",
    changed=networks.CHANGED,
    runs=networks.runs,
    work=networks.work,
    rows=_rows,
    draw=_draw,
    together=networks.together,
    most=33,
    runs_of="normalized-sharpness/figure-3",
)
