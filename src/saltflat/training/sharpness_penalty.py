"""Minimum sharpness and normalized sharpness as penalties, for research.

Both are minima over scales of something linear in the diagonal h of the Hessian,

    S(θ) = min_s Σ_i a_i(s) h_i(θ) + b(s, θ),

so that by the envelope theorem ∇S = Σ_i a_i(s*) ∇h_i + ∇b(s*, ·) with the optimal scales s* held
fixed. The scales are found exactly, now and then, on data of their own (`refresh`); between, each
step needs the derivative of Σ_i a_i h_i, which random signs ε give without bias:
Σ_i a_i h_i = E⟨v, H v⟩ for v = √a ∘ ε.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from saltflat.checks import check_integer, check_number
from saltflat.curvature import Curvature, Quantity
from saltflat.errors import InvalidValue, LossError, ModelError, NegativeCurvature
from saltflat.losses import LossLike
from saltflat.measures import Context, balance_layer
from saltflat.risk import Risk, unwrap
from saltflat.sharded import parameters_of, refuse_sharded
from saltflat.symmetries import Group, Least, least_trace

Penalised = Literal["minimum_sharpness", "neuronwise_minimum_sharpness", "normalized_sharpness"]


@final
class SharpnessPenalty:
    """strength × a sharpness measure, differentiable through all layers:

        penalty = sf.SharpnessPenalty(model, (x, y), strength=1e-3)
        loss = criterion(model(x), y)
        (loss + penalty(loss)).backward()

    Parameters
    ----------
    model : the model that is trained.
    data : what the optimal scales are found on, as in `measure`; a fixed part of the training data.
    measure : "minimum_sharpness", "neuronwise_minimum_sharpness" or "normalized_sharpness".
    strength : λ.
    refresh : the scales are found anew after this many calls.
    probes : products with the Hessian a call; one is unbiased already.
    seed : of the random signs.

    `loss` is the loss of the batch, with its graph; the penalty is an unbiased estimate of the
    measure's linear part on that batch, and so is its gradient, at the last found scales. One call
    costs about four gradients a probe, and needs a model that can be differentiated three times.

    At given scales and random signs the penalty is a mean over samples, as the loss is. With the
    same `data` and `seed` on every rank, DistributedDataParallel with shards of equal size thus
    computes what one process computes on the whole batch. If every rank finds the scales on data
    of its own, the gradient is the mean of the ranks' penalties, each at its own scales; as a
    minimum over scales is concave in the curvature, the mean of the shards' sharpness is at most
    that of all data. Micro-batches of gradient accumulation draw random signs of their own, which
    leaves the estimate unbiased.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> x, y = torch.randn(8, 3), torch.arange(8) % 2
    >>> penalty = sf.SharpnessPenalty(model, (x, y), strength=1e-3)
    >>> loss = torch.nn.functional.cross_entropy(model(x), y)
    >>> (loss + penalty(loss)).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: LossLike = "cross_entropy",
        *,
        strength: float = 1e-3,
        measure: Penalised = "minimum_sharpness",
        refresh: int = 100,
        probes: int = 1,
        seed: int = 0,
    ) -> None:
        if measure not in get_args(Penalised):
            raise InvalidValue(
                f"measure must be one of {', '.join(get_args(Penalised))}. Got {measure!r}."
            )
        refuse_sharded(
            parameters_of(unwrap(model)).values(),
            "SharpnessPenalty takes third derivatives in whole parameters",
            "Wrap the model in DistributedDataParallel instead, or take FAM.",
        )
        self.model, self.data, self.loss, self.measure = model, data, loss, measure
        self.strength = check_number("strength", strength)
        self.refresh = check_integer("refresh", refresh)
        self.probes = check_integer("probes", probes)
        self.calls = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._weights: dict[str, Tensor] = {}  # √a, by parameter
        self._norms: dict[str, Tensor] = {}  # what multiplies θ²

    def __call__(self, loss: Tensor) -> Tensor:
        """The penalty for a batch whose loss this is."""
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.requires_grad:
            raise LossError(
                "The penalty needs the loss of a batch, a scalar with its graph: "
                "loss = criterion(model(x), y); loss + penalty(loss)."
            )
        if self.strength == 0:
            return torch.zeros_like(loss, requires_grad=False)
        if self.calls % self.refresh == 0:
            self._find()
        self.calls += 1
        named = dict(unwrap(self.model).named_parameters())
        total = self._curvature(loss, {n: named[n] for n in self._weights})
        for name, weight in self._norms.items():
            total = total + (weight * named[name].square()).sum()
        return self.strength * total

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs: the scales, the calls so far, the random state."""
        return {
            "calls": self.calls,
            "generator": self._generator.get_state(),
            "weights": dict(self._weights),
            "norms": dict(self._norms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        named = dict(unwrap(self.model).named_parameters())
        for name, value in chain(state["weights"].items(), state["norms"].items()):
            if name not in named or value.shape != named[name].shape:
                got = "has none" if name not in named else f"has {tuple(named[name].shape)}"
                raise InvalidValue(
                    f"The state is that of another model: it holds scales of {name!r} in the shape "
                    f"{tuple(value.shape)}, of which this model {got}."
                )
        self.calls = int(state["calls"])
        self._generator.set_state(state["generator"].cpu())
        self._weights, self._norms = (
            {name: value.to(named[name]) for name, value in state[part].items()}
            for part in ("weights", "norms")
        )

    def _curvature(self, loss: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        wanted = list(parameters.values())
        derivatives = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        if all(g is None for g in derivatives):
            raise LossError("The loss does not depend on the parameters of the penalty's model.")
        gradients = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(wanted, derivatives, strict=True)
        ]
        total = torch.zeros_like(loss)
        for _ in range(self.probes):
            vectors = [self._probe(name) for name in parameters]
            inner = torch.stack(
                [(g * v).sum() for g, v in zip(gradients, vectors, strict=True)]
            ).sum()
            products = _twice(inner, wanted)
            for product, v in zip(products, vectors, strict=True):
                total = total + (product * v).sum()
        return total / self.probes

    def _probe(self, name: str) -> Tensor:
        root = self._weights[name]
        bits = torch.randint(0, 2, root.shape, generator=self._generator)
        return root * (bits * 2 - 1).to(root)

    def _find(self) -> None:
        """The optimal scales of the model as it is now."""
        risk = Risk(self.model, self.data, self.loss)
        risk.watched.on = False  # the scales of a penalty may come from augmented samples
        with risk.session():
            engine = Curvature(risk)
            curvature = engine.quantities(frozenset({"diagonal"}))["diagonal"]
            diagonal = curvature.values
            context = Context(risk, engine.layers(), {}, 0, engine)
            slopes: dict[str, Tensor | float] = {}
            norms: dict[str, Tensor] = {}
            if self.measure == "normalized_sharpness":
                for layer in context.layers:
                    balanced = balance_layer(layer, diagonal[layer.parameter])
                    slopes[layer.parameter] = balanced.slopes
                    norms[layer.parameter] = balanced.shrink
            else:
                layerwise = self.measure == "minimum_sharpness"
                group = context.group.only("layer") if layerwise else context.group
                slopes = dict(_least(group, curvature).slopes)
        named = dict(unwrap(self.model).named_parameters())
        self._weights = {
            name: torch.as_tensor(a, dtype=torch.float64)
            .sqrt()
            .to(named[name])
            .expand(named[name].shape)
            for name, a in slopes.items()
        }
        self._norms = {name: value.to(named[name]) for name, value in norms.items()}


def _twice(inner: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    """The derivative of what is a derivative already."""
    try:
        return torch.autograd.grad(inner, wanted, create_graph=True, materialize_grads=True)
    except RuntimeError as error:
        if "double backward" not in str(error):
            raise
        raise ModelError(
            "The model is compiled to kernels without second derivatives, which the penalty "
            "needs. Compile with backend='eager' or not at all."
        ) from error


def _least(group: Group, diagonal: Quantity) -> Least:
    try:
        return least_trace(group, diagonal.values, diagonal.errors)
    except NegativeCurvature as error:
        raise NegativeCurvature(
            "The curvature of some parameters is negative, so the least trace may be −∞ and is no "
            "penalty. Use measure='normalized_sharpness', which counts it as 0."
        ) from error
