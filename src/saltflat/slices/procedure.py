"""`landscape`: the loss on a grid along a line or a plane, computed point by point."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, final, get_args

import torch
from torch import Tensor, nn

from saltflat.checks import check_integer, check_number, check_seed
from saltflat.curvature import Curvature, Layer, checked_settings, derivatives_explained
from saltflat.distributed import Reduction, reduction
from saltflat.errors import InvalidValue, LossError
from saltflat.landscape import RiskSurface
from saltflat.losses import LossLike, with_settings
from saltflat.report import STANDING, model_hash, standing_of
from saltflat.risk import Output, Risk, Unpack, unwrap
from saltflat.slices.directions import (
    Directions,
    Kind,
    check_given,
    digest,
    eigenvector_directions,
    filter_directions,
    given_directions,
    random_directions,
)
from saltflat.slices.result import Landscape
from saltflat.slices.twin import balanced_twin
from saltflat.symmetries import symmetries
from saltflat.watch import kept
from saltflat.work import FORWARD, PRODUCT, Callback, reporting

# How far to go by default, in lengths of the weights; the loss is steep along eigenvectors.
_SPAN = 1.0
_STEEP_SPAN = 0.1


def landscape(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    directions: Kind | Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] = "filter",
    dimensions: int = 2,
    span: float | None = None,
    points: int = 25,
    accuracy: bool = False,
    path: str | Path | None = None,
    parameters: str | Iterable[str] = "trainable",
    seed: int = 0,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Landscape:
    """The loss on a line or a plane through a model's parameters: L(θ + a d₁ + b d₂) on a grid.

    A picture depends on the directions d, and most pictures change when weights are rescaled in a
    way that leaves the function as it is. Only "balanced" ones do not.

    Parameters
    ----------
    model, data, loss : as in `trace`; the model is left exactly as it was found.
    directions :
        "random": independent normal entries for all parameters, as long as all of them together.
        "filter": normal entries for the weight matrices, every filter as long as that filter of the
        weights (Li et al. 2018, section 4); biases and normalisation parameters stay. This undoes
        a rescaling of what enters a unit, and not of what leaves it.
        "balanced": "filter" around the balanced twin of the model, which has the same function
        and, among all rescalings of it, the least trace of the Gauss–Newton matrix plus squared
        length of the weights. Rescaled models have the same twin, and so the same picture. (The
        trace alone, as in `Group.balance`, does not decide where filters feed BatchNorm.)
        "eigenvectors": those of the largest eigenvalues of the Hessian, over all parameters, as
        long as all of them together.
        Or directions of your own: a mapping from parameter names to tensors, one for each
        dimension, e.g. the difference to another model.
    dimensions : 1 for a line, 2 for a plane.
    span : coordinates go from −span to span; a step of one goes as far as the weights that move are
        long. By default 1, and 0.1 along eigenvectors.
    points : along each direction; an odd number has the model itself among them.
    accuracy : also the share of classes that are named right, for cross-entropy; a further forward
        pass a point.
    path : a .json file that is written after every point, whole or not at all, which takes some
        milliseconds. One that is there from an earlier call with the same arguments is continued;
        one of something else is an error. `Landscape.load` reads it, finished or not.
    parameters : as in `trace`; for "balanced", "trainable" or "all".
    seed : of the normal entries, and of the search for eigenvectors.
    Other arguments as in `trace`.

    Where the loss overflows it is inf or NaN; the result says at how many points.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> inwards = {"weight": -model.weight}
    >>> line = sf.landscape(model, (x, y), "mse", directions=inwards, dimensions=1, points=3)
    >>> line.values
    tensor([4., 1., 0.], dtype=torch.float64)
    """
    grid = _Grid.checked(directions, dimensions, span, points, seed)
    settings = checked_settings(1000, memory_budget, "proof")
    if path is not None and Path(path).suffix != ".json":
        raise InvalidValue(f"path must be a .json file. Got {Path(path).name!r}.")
    data, identity = kept(data), model_hash(unwrap(model))
    common = {"parameters": parameters, "dtype": dtype, "unpack": unpack, "output": output}
    calls = {"memory_budget": memory_budget, "distributed": distributed, "progress": progress}
    notes: tuple[str, ...] = ()
    asked = {"grid": grid, "accuracy": accuracy, "path": path is not None}
    with reduction(distributed, "landscape", **asked) as together:
        if directions == "balanced":
            model, notes = _balanced(model, data, loss, common, calls, together)
        risk = Risk(model, data, loss, **common, reduction=together)  # type: ignore[arg-type]
        risk.watched.on = True
        engine = Curvature(risk, settings=settings, seed=seed)
        engine.foresee = partial(engine.announce, grid.price(accuracy))
        told = progress if together.rank == 0 else False
        with reporting(told) as risk.work, risk.session(), derivatives_explained():
            plan = engine.look()
            surface = RiskSurface(risk, list(risk.parameters), memory_budget=memory_budget)
            begun = replace(_begun(surface, grid, accuracy), model_hash=identity)
            begun = together.each(lambda: _continued(begun, path))[0]
            if begun.complete:
                return begun
            chosen = grid.directions(engine, partial(engine.layers, plan))
            begun = replace(
                begun,
                lengths=chosen.lengths,
                cosine=chosen.cosine,
                eigenvalues=chosen.eigenvalues,
                moving=chosen.moving,
                notes=tuple(dict.fromkeys((*notes, *begun.notes, *risk.notes))),
            )
            return _filled(begun, surface, chosen, path if together.rank == 0 else None)


def _continued(begun: Landscape, path: str | Path | None) -> Landscape:
    """With the points that a file has already."""
    if path is None or not os.path.exists(path):
        return begun
    return Landscape.load(path).continued(begun, path)


@final
@dataclass(frozen=True)
class _Grid:
    """Where the loss is asked for, as the user says it."""

    kind: str
    given: tuple[Mapping[str, Tensor], ...]
    dimensions: int
    span: float
    points: int
    seed: int

    @classmethod
    def checked(
        cls, directions: Any, dimensions: Any, span: float | None, points: Any, seed: Any
    ) -> _Grid:
        if dimensions not in (1, 2):
            raise InvalidValue(
                f"dimensions must be 1, for a line, or 2, for a plane. Got {dimensions!r}."
            )
        named = isinstance(directions, str)
        if named and directions not in get_args(Kind):
            known = ", ".join(map(repr, get_args(Kind)))
            raise InvalidValue(f"directions must be one of {known}. Got {directions!r}.")
        given = () if named else check_given(directions, dimensions)
        if span is None:
            span = _STEEP_SPAN if directions == "eigenvectors" else _SPAN
        check_number("span", span, above=True)
        check_integer("points", points, least=2)
        kind = directions if named else f"given {digest(given)}"
        return cls(kind, given, dimensions, float(span), points, check_seed(seed))

    @property
    def axis(self) -> tuple[float, ...]:
        """From −span to span, exactly symmetric."""
        steps = self.points - 1
        return tuple(self.span * (2 * i - steps) / steps for i in range(self.points))

    def price(self, accuracy: bool) -> float:
        """In gradients: one pass for every point, and about ten products for an eigenvector."""
        passes = float(self.points**self.dimensions) * FORWARD * (2 if accuracy else 1)
        found = 10 * (1 + self.dimensions) * PRODUCT if self.kind == "eigenvectors" else 0.0
        return STANDING + passes + found

    def directions(self, engine: Curvature, layers: Callable[[], list[Layer]]) -> Directions:
        parameters = engine.risk.parameters
        if self.given:
            return given_directions(parameters, self.given)
        if self.kind == "random":
            return random_directions(parameters, self.dimensions, self.seed)
        if self.kind == "eigenvectors":
            return eigenvector_directions(engine, self.dimensions)
        return filter_directions(layers(), self.dimensions, self.seed)


def _begun(surface: RiskSurface, grid: _Grid, accuracy: bool) -> Landscape:
    """What is known before the first point: the model, the data, and the loss where it is."""
    risk = surface.risk
    stand, notes = standing_of(surface)
    if accuracy and stand.accuracy is None:
        raise LossError(
            "accuracy=True needs a cross-entropy, whose targets are classes. "
            f"Got {with_settings(risk.loss)}."
        )
    seen = risk.seen()
    return Landscape(
        directions=grid.kind,
        axes=(grid.axis,) * grid.dimensions,
        losses=(None,) * grid.points**grid.dimensions,
        accuracies=(None,) * grid.points**grid.dimensions if accuracy else (),
        standing=stand,
        model=type(risk.model).__name__,
        parameters=sum(p.numel() for p in risk.parameters.values()),
        measured=blake2b("\n".join(risk.parameters).encode(), digest_size=8).hexdigest(),
        samples=seen.samples,
        data_hash=f"{seen.checksum:016x}",
        loss=with_settings(risk.loss),
        dtype=str(next(iter(risk.parameters.values())).dtype).removeprefix("torch."),
        seed=grid.seed,
        notes=tuple(notes),
    )


def _filled(
    begun: Landscape, surface: RiskSurface, chosen: Directions, path: str | Path | None
) -> Landscape:
    """The loss at every point that has none yet."""
    losses, accuracies = list(begun.losses), list(begun.accuracies)
    work, count = surface.risk.work, len(losses)
    for index, coordinates in enumerate(product(*begun.axes)):
        if losses[index] is not None:
            continue
        work.at("landscape", index, count)
        shift = chosen.shift(coordinates)
        losses[index] = surface.value(shift, overflow=True)
        if accuracies:
            accuracies[index] = surface.accuracy(shift)
        begun = replace(begun, losses=tuple(losses), accuracies=tuple(accuracies))
        if path is not None:
            begun.save(path)
    work.at("done", count, count)
    return begun


def _balanced(
    model: nn.Module,
    data: Any,
    loss: LossLike,
    common: dict[str, Any],
    calls: dict[str, Any],
    together: Reduction,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The balanced twin of the model, over all its rescalings, and what there is to say of it."""
    parameters, output = common["parameters"], common["output"]
    if parameters not in ("trainable", "all"):
        raise InvalidValue(
            "directions='balanced' rescales all layers: parameters must be 'trainable' or 'all'. "
            f"Got {parameters!r}."
        )
    risk = Risk(model, data, loss, **common, reduction=together)
    with risk.session():
        inputs = risk.some(2).inputs
    with reporting(calls["progress"] if together.rank == 0 else False) as work:
        work.at("searching rescalings", 0, 1)
        group = symmetries(model, inputs, output=output, parameters=parameters)
    return balanced_twin(group, model, data, loss, {**common, **calls})
