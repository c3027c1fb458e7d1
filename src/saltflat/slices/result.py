"""Landscape: the loss on a line or a plane, which prints, draws and saves itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from itertools import product
from math import isclose, isfinite, log10, nan
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from saltflat.errors import InvalidValue, optional
from saltflat.report import Figure, Section, Standing, html, store

# What must be the same for a file to be continued, and how to say that it is not.
_SAME = {
    "directions": "the directions",
    "axes": "the grid",
    "seed": "the seed",
    "model_hash": "the model",
    "data_hash": "the data",
    "loss": "the loss",
    "measured": "the parameters",
    "dtype": "the dtype",
}

_NAMES = {  # of one and of two
    "random": ("a random direction", "random directions"),
    "filter": ("a filter-normalised random direction", "filter-normalised random directions"),
    "balanced": (
        "a filter-normalised random direction of the balanced twin",
        "filter-normalised random directions of the balanced twin",
    ),
    "eigenvectors": (
        "the eigenvector of the Hessian's largest eigenvalue",
        "the eigenvectors of the Hessian's two largest eigenvalues",
    ),
    "given": ("a given direction", "given directions"),
}

_EXPLAINED = {
    "random": "Normal entries for all parameters, as long as all of them together. The picture "
    "changes when weights are rescaled, also where the function does not.",
    "filter": "Every filter of the direction is as long as that filter of the weights; biases and "
    "normalisation parameters stay (Li et al. 2018). The picture still changes when what leaves a "
    "unit is rescaled against what enters it.",
    "balanced": "Around the twin of the model that has the same function and the least trace of "
    "the Gauss–Newton matrix plus squared length of the weights; every filter of the direction is "
    "as long as that filter of the twin's weights. "
    "The picture is the same for all rescalings of the model that keep its function.",
    "eigenvectors": "Where the Hessian bends the loss most, as long as all parameters together.",
    "given": "Directions that were passed in, at the length that they have.",
}

_COLOURS = "cividis"


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class Landscape:
    """The loss on a grid along one direction or two. `sf.landscape` makes it.

    Attributes
    ----------
    directions : "random", "filter", "balanced", "eigenvectors", or "given" and a hash.
    axes : the coordinates along each direction; the model itself is at 0.
    losses : the loss at every point, the last coordinate running fastest; None where it is not
        computed yet, inf or NaN where it overflows. `values` is the same as a tensor.
    accuracies : the same of the accuracy, or empty.
    standing : the loss at the model itself, its accuracy, and whether that is a minimum; `center`
        is that loss.
    lengths : of the directions, to which a step of one goes. cosine : of the angle between two.
    eigenvalues : of directions that are eigenvectors.
    parameters, moving : how many numbers are measured, and how many of them move. measured : a hash
        of the parameters' names.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model, data = torch.nn.Linear(3, 2), (torch.randn(8, 3), torch.arange(8) % 2)
    >>> plane = sf.landscape(model, data, points=3)
    >>> plane.values.shape, abs(float(plane.values[1, 1]) - plane.center) < 1e-6
    (torch.Size([3, 3]), True)
    >>> path = plane.save("plane.json")
    >>> sf.Landscape.load(path) == plane
    True
    """

    directions: str
    axes: tuple[tuple[float, ...], ...]
    losses: tuple[float | None, ...]
    standing: Standing
    model: str
    parameters: int
    samples: int
    loss: str
    data_hash: str
    dtype: str
    seed: int
    model_hash: str = ""
    measured: str = ""
    accuracies: tuple[float | None, ...] = ()
    lengths: tuple[float, ...] = ()
    cosine: float | None = None
    eigenvalues: tuple[float, ...] = ()
    moving: int = 0
    notes: tuple[str, ...] = ()

    @property
    def center(self) -> float:
        """The loss at the model itself."""
        return self.standing.loss

    @property
    def values(self) -> Tensor:
        """The losses as a float64 tensor of one dimension a direction; NaN where there are none."""
        return self._shaped(self.losses)

    @property
    def accuracy(self) -> Tensor:
        """The accuracies in the same way."""
        if not self.accuracies:
            raise InvalidValue("The landscape has no accuracies. Pass accuracy=True to landscape.")
        return self._shaped(self.accuracies)

    def _shaped(self, values: tuple[float | None, ...]) -> Tensor:
        numbers = [nan if value is None else value for value in values]
        return torch.tensor(numbers, dtype=torch.float64).reshape([len(axis) for axis in self.axes])

    @property
    def complete(self) -> bool:
        """Whether there is a loss at every point."""
        return None not in self.losses

    @property
    def kind(self) -> str:
        """What the directions are, in one word."""
        return self.directions.split()[0]

    def continued(self, begun: Landscape, path: str | Path) -> Landscape:
        """What this one, from a file, has of one that was just begun, if it is of the same."""
        other = [words for key, words in _SAME.items() if getattr(self, key) != getattr(begun, key)]
        # Functions of the user's own, for the loss or for the outputs, are told by what they give.
        if not other and not isclose(self.center, begun.center, rel_tol=1e-3, abs_tol=1e-6):
            other.append("the loss at the model")
        if len(self.accuracies) != len(begun.accuracies):
            other.append("accuracy")
        if other:
            raise InvalidValue(
                f"{path} is the landscape of something else: {', '.join(other)} differ. Give "
                "another path, or remove the file."
            )
        if self.complete:
            return self
        return replace(begun, losses=self.losses, accuracies=self.accuracies)

    # Files.

    def save(self, path: str | Path) -> Path:
        """Write to a .json file, or as a page to a .html file, whole or not at all."""
        if Path(path).suffix == ".html":
            return html.write(path, f"Loss landscape of {self.model}", self.sections())
        return store.save(path, "A landscape", "landscape", {"landscape": self})

    @classmethod
    def load(cls, path: str | Path) -> Landscape:
        """Read a landscape that `save` wrote, or that `landscape` is still writing."""
        content = store.read(path, "landscape").get("landscape")
        if not isinstance(content, dict):
            raise InvalidValue(f"{path} is not a landscape: it has no 'landscape' in it.")
        return store.decoded(cls, content, f"{path} is a damaged landscape")

    def plot(self, path: str | Path) -> Path:
        """Draw it as a picture (.png, .svg, .pdf): a curve, or contours."""
        path = Path(path)
        figure = self._drawn()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, bbox_inches="tight")
        return path

    def _drawn(self) -> Any:
        if not self.values.isfinite().any():
            raise InvalidValue("There is nothing to draw: the loss is finite at no point.")
        figures = optional("matplotlib.figure", "A picture")
        figure = figures.Figure(figsize=(6.0, 4.6), layout="constrained")
        axes = figure.subplots()
        (_curve if len(self.axes) == 1 else _contours)(self, axes)
        axes.set_title(f"{self.model}: l{self.title[1:]}", loc="left", fontsize=10)
        return figure

    @property
    def title(self) -> str:
        """`Loss along filter-normalised random directions`."""
        return f"Loss along {_NAMES[self.kind][len(self.axes) - 1]}"

    def label(self, axis: int) -> str:
        """The name of an axis."""
        unit = "" if self.kind == "given" else ", in lengths of the weights"
        if self.eigenvalues:
            return f"eigenvector {axis + 1} (λ = {self.eigenvalues[axis]:.3g}){unit}"
        return f"direction {axis + 1}{unit}"

    # Pages and printing.

    def sections(self) -> list[Section]:
        """What a page shows of it."""
        figures = [_line_figure(self)] if len(self.axes) == 1 else _plane_figures(self)
        facts = {"loss at the model": f"{self.center:.4g}", "a minimum?": self.standing.word}
        facts["lengths of the directions"] = ", ".join(f"{each:.4g}" for each in self.lengths)
        if self.cosine is not None:
            facts["cosine between them"] = f"{self.cosine:.2g}"
        facts["moving"] = f"{self.moving:,} of {self.parameters:,} parameters"
        facts["data"] = f"{self.samples:,} samples, {self.loss}"
        text = _EXPLAINED[self.kind]
        return [Section(self.title, text, facts, figures=figures, notes=self._notes())]

    def _notes(self) -> tuple[str, ...]:
        missing = self.losses.count(None)
        beyond = sum(value is not None and not isfinite(value) for value in self.losses)
        said = [f"{missing} of {len(self.losses)} points are not computed yet"] if missing else []
        said += [f"the loss overflows at {beyond} points, which are left empty"] if beyond else []
        return (*said, *self.notes)

    def _repr_html_(self) -> str:
        if find_spec("matplotlib") is None or not self.values.isfinite().any():
            return f"<pre>{escape(repr(self))}</pre>"
        buffer = io.BytesIO()
        self._drawn().savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        picture = base64.b64encode(buffer.getvalue()).decode()
        words = escape(repr(self), quote=True)
        return f'<img src="data:image/png;base64,{picture}" alt="{words}" style="max-width:100%">'

    def __str__(self) -> str:
        values = self.values[self.values.isfinite()]
        reach = f"{values.min():.4g} to {values.max():.4g}" if len(values) else "nowhere finite"
        size = " × ".join(str(len(axis)) for axis in self.axes)
        notes = "".join(f"; {note}" for note in self._notes())
        return (
            f"{self.title}, {self.model}: {size} points up to ±{self.axes[0][-1]:g}, loss {reach}, "
            f"{self.center:.4g} at the model{notes}"
        )

    __repr__ = __str__


def _curve(landscape: Landscape, axes: Any) -> None:
    axes.plot(landscape.axes[0], landscape.values, color="#332288", marker="o", markersize=3)
    axes.plot([0], [landscape.center], color="#CC6677", marker="D", linestyle="none")
    axes.annotate(
        "the model", (0, landscape.center), (6, 8), textcoords="offset points", color="#CC6677"
    )
    axes.set_xlabel(landscape.label(0))
    axes.set_ylabel(f"loss ({landscape.loss})")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _contours(landscape: Landscape, axes: Any) -> None:
    """Filled contours at quantiles of the loss, so that a steep border does not hide the rest."""
    values = landscape.values.where(landscape.values.isfinite(), nan)
    finite = values[values.isfinite()]
    levels = torch.unique(finite.quantile(torch.linspace(0, 1, 15, dtype=torch.float64)))
    x, y = landscape.axes
    if len(levels) > 1:
        colours = optional("matplotlib", "A picture").colormaps[_COLOURS]
        shades = colours(torch.linspace(0, 1, len(levels) - 1).numpy())
        drawn = axes.contourf(x, y, values.T, levels=levels.tolist(), colors=shades)
        axes.contour(x, y, values.T, levels=levels.tolist(), colors="white", linewidths=0.4)
        bar = axes.figure.colorbar(drawn, ax=axes, format="%.3g")
        bar.set_label(f"loss ({landscape.loss}), levels at its quantiles")
    axes.set_aspect("equal")
    axes.plot([0], [0], color="white", marker="+", markersize=10, markeredgewidth=1.6)
    axes.set_xlabel(landscape.label(0))
    axes.set_ylabel(landscape.label(1))


def _line_figure(landscape: Landscape) -> Figure:
    x, y = list(landscape.axes[0]), landscape.values.tolist()
    columns: dict[str, Any] = {"coordinate": x, "loss": y}
    if landscape.accuracies:
        columns["accuracy"] = landscape.accuracy.tolist()
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": x,
        "y": y,
        "marker": {"size": 5, "color": "@0"},
        "line": {"color": "@0", "width": 2},
        "hovertemplate": "at %{x:.3g}: loss %{y:.5g}<extra></extra>",
    }
    model = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [0.0],
        "y": [landscape.center],
        "text": ["the model"],
        "textposition": "top center",
        "textfont": {"color": "@1"},
        "marker": {"size": 9, "symbol": "diamond", "color": "@1"},
        "hovertemplate": "the model: loss %{y:.5g}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": landscape.label(0)}},
        "yaxis": {"title": {"text": f"loss ({html.label(landscape.loss)})"}},
    }
    return Figure("Along a line", "", [curve, model], layout, columns)


def _plane_figures(landscape: Landscape) -> list[Figure]:
    """Contours, which every browser draws, and the same as a surface."""
    pairs = list(product(*landscape.axes))
    columns: dict[str, Any] = {
        "coordinate 1": [a for a, _ in pairs],
        "coordinate 2": [b for _, b in pairs],
        "loss": landscape.values.flatten().tolist(),
    }
    if landscape.accuracies:
        columns["accuracy"] = landscape.accuracy.flatten().tolist()
    common, hint = _heights(landscape)
    flat, scene = _plane_layout(landscape), _plane_layout(landscape, common["colorbar"])
    contours = {
        **common,
        "type": "contour",
        "ncontours": 24,
        "line": {"width": 0.5, "color": "rgba(255,255,255,0.5)"},
    }
    model = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [0.0],
        "y": [0.0],
        "text": ["the model"],
        "textposition": "top center",
        "textfont": {"color": "#ffffff"},
        "marker": {"symbol": "cross-thin-open", "size": 12, "line": {"width": 2}, "color": "#fff"},
        "hovertemplate": f"the model: loss {landscape.center:.5g}<extra></extra>",
    }
    surface = {**common, "type": "surface", "showscale": False}
    turn = f"{hint} Drag to turn it.".strip()
    return [
        Figure("Contours", hint, [contours, model], flat, columns, height=440, small=True),
        Figure("Surface", turn, [surface], {"scene": scene}, columns, height=440, small=True),
    ]


def _heights(landscape: Landscape) -> tuple[dict[str, Any], str]:
    """What contours and surface share: the loss, or its logarithm where it has many sizes."""
    values = landscape.values.T  # rows are the second coordinate
    finite = values[values.isfinite()]
    logarithmic = len(finite) > 0 and float(finite.min()) > 0 and finite.max() > 20 * finite.min()
    bar: dict[str, Any] = {
        "title": {"text": "loss", "side": "right"},
        "thickness": 12,
        "outlinewidth": 0,
    }
    if logarithmic:
        marks = html.ticks(finite.tolist())
        bar |= {**marks, "tickvals": [log10(mark) for mark in marks["tickvals"]]}
    x, y = (list(axis) for axis in landscape.axes)
    common = {
        "x": x,
        "y": y,
        "z": (values.log10() if logarithmic else values).tolist(),
        "text": [[f"{value:.5g}" for value in row] for row in values.tolist()],
        "colorscale": "Cividis",
        "colorbar": bar,
        "hovertemplate": "(%{x:.3g}, %{y:.3g}): loss %{text}<extra></extra>",
    }
    return common, "Heights are on a logarithmic scale." if logarithmic else ""


def _plane_layout(landscape: Landscape, bar: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of contours, or of a surface whose heights are marked as the colour bar is."""
    if bar is None:
        names = [{"title": {"text": landscape.label(k)}} for k in (0, 1)]
        square = {"scaleanchor": "x", "constrain": "domain"}
        return {"xaxis": names[0] | {"constrain": "domain"}, "yaxis": names[1] | square}
    names = [{"title": {"text": f"direction {k}"}} for k in (1, 2)]
    marks = {key: bar[key] for key in ("tickvals", "ticktext") if key in bar}
    return {
        "xaxis": names[0],
        "yaxis": names[1],
        "zaxis": {"title": {"text": "loss"}, **marks},
        "camera": {"eye": {"x": 1.7, "y": 1.7, "z": 1.1}, "center": {"x": 0, "y": 0, "z": -0.15}},
    }
