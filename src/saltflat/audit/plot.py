"""Drift against spread as a picture."""

from __future__ import annotations

from importlib import import_module
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saltflat.errors import InvalidValue, MissingDependency

if TYPE_CHECKING:
    from saltflat.audit.result import Audit

# Neighbours that the colour-blind tell apart (after Paul Tol); markers tell the rest.
_COLOURS = (
    *("#000000", "#CC6677", "#332288", "#DDCC77", "#117733", "#88CCEE"),
    *("#882255", "#E69F00", "#44AA99", "#999933", "#AA4499"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h", "d")
# A drift of nothing at all is drawn here: logarithms have no zero.
_FLOOR = 1e-17


def plot(audit: Audit, path: Path) -> Path:
    """One panel for each kind of rescaling, one line a measure; both axes are logarithmic."""
    if not audit.kinds or not len(audit):
        raise InvalidValue("There is nothing to draw: the audit has no measure or no rescaling.")
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingDependency(
            "A picture needs matplotlib, which is not installed. "
            "Install it with: pip install matplotlib"
        ) from error
    count = len(audit.kinds)
    figure = figures.Figure(figsize=(2.6 + 3.0 * count, 4.2), layout="constrained")
    axes = figure.subplots(1, count, sharex=True, sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, audit.kinds, strict=True):
        _panel(axis, audit, kind)
    axes[0].set_ylim(bottom=_FLOOR / 5)  # of all panels; only now, since it ends autoscaling
    axes[0].set_ylabel("relative drift of the measure")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(f"{audit.model}: same function, other weights", x=0.01, ha="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def _panel(axis: Any, audit: Audit, kind: str) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    tolerance = audit.tolerances.closed
    axis.axhspan(_FLOOR / 5, tolerance, color="0.93", zorder=0)
    axis.text(
        *(0.98, tolerance), "invariant", transform=axis.get_yaxis_transform(), color="0.45"
    ).set(ha="right", va="top", fontsize=8)
    for index, (name, row) in enumerate(audit.items()):
        curve = row[kind].curve
        axis.plot(
            list(curve),
            [max(drift, _FLOOR) if isfinite(drift) else nan for drift in curve.values()],
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            linewidth=1.4,
            markersize=5,
            label=name,
        )
    axis.set_title(f"{kind} rescaling", fontsize=10, loc="left")
    axis.set_xlabel("spread of the factors")
    axis.grid(True, which="major", linewidth=0.4, color="0.85")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
