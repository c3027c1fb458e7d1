"""SGDS: training with BN-Sharpness as a regularizer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from saltflat.checks import check_integer, check_number
from saltflat.errors import InvalidValue, ModelError, nearest
from saltflat.geometry import Matrix
from saltflat.landscape import Feeds, Filters, Spheres, at_least_tiny
from saltflat.risk import unwrap
from saltflat.sharded import refuse_sharded
from saltflat.symmetries import Group, symmetries
from saltflat.training.perturbing import Closure, Listener, PerturbedOptimizer, Walk
from saltflat.vectors import Vector, copies, put, scale, total_norm

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


@final
@dataclass(frozen=True, slots=True)
class FedWeight:
    """The weight `name` whose filters feed BatchNorm.

    how : what told so, "forward pass" or "scale inference"; "named" if the user did.
    """

    name: str
    filters: Filters
    how: str


@final
class FilterSearch:
    """Watches the first forward pass with gradients of a model; `result` is None until then.

    A layer counts if its outputs go into BatchNorm with batch statistics and nowhere else: scaling
    a filter by a > 0 then changes nothing, whatever its bias.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        self.result: tuple[FedWeight, ...] | None = None
        self._filters: dict[str, Filters] = {}
        self._feeds: Feeds | None = None
        self._opened_by: nn.Module | None = None  # the model, or what wraps it
        self._stack = ExitStack()
        self._listener = Listener()
        self._listener.open(self._before, self._after)

    def close(self) -> None:
        self._listener.close()

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._feeds is not None:
            # On several ranks it does not go through F.batch_norm, and what it calls is its own.
            if isinstance(module, nn.SyncBatchNorm) and module.training and args:
                self._feeds.normalise(args[0])
                self._feeds.paused = True
        elif torch.is_grad_enabled() and unwrap(module) is self.model:
            self._filters = filters_of(self.model)
            self._feeds = Feeds(self._filters, training=True)
            self._opened_by = module
            # A compiled model hides its layers.
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack.enter_context(self._feeds)

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._feeds is None:
            return
        if isinstance(module, nn.SyncBatchNorm):
            self._feeds.paused = False
        if module is not self._opened_by:
            return
        feeds, self._feeds = self._feeds, None
        self._stack.close()
        if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output)):
            # Otherwise it failed, or computed nothing that can be trained.
            feeds.use(output)
            names = [name for name, fed in feeds.units().items() if fed.all()]
            self.result = tuple(FedWeight(n, self._filters[n], "forward pass") for n in names)
            self.close()


def scale_free(model: nn.Module, example: Any) -> tuple[FedWeight, ...]:
    """The weights each of whose filters can be scaled on its own, as scale inference finds it.

    A filter may be far from BatchNorm, with ReLU, pooling or dropout between, as long as its scale
    reaches it. Filters whose bias must be scaled with them are left out: a bias right before
    BatchNorm does nothing, which the forward pass shows, and any other belongs to no sphere.
    """
    inner = unwrap(model)
    group = symmetries(inner, example, parameters="trainable").only("batchnorm")
    if not len(group):
        return ()
    matrix, classes = group.exponents().matrix.tocsr(), group.exponents().classes
    alone = (np.diff(matrix.indptr) == 1) & (np.asarray(matrix.sum(1)).ravel() == 1)
    mover = np.where(alone, np.asarray(matrix.argmax(1)).ravel(), -1)  # of a class of entries
    entries = np.zeros(matrix.shape[0])
    for each in classes.values():
        entries += np.bincount(each.numpy().ravel(), minlength=len(entries))
    moved = (matrix != 0).T @ entries  # by each generator
    frozen = _frozen(inner, group)
    result = []
    for name, f in filters_of(inner).items():
        if name in classes:
            units = mover[f.matrix.grouped(classes[name]).flatten(2).flatten(0, 1).numpy()]
            one = (units[:, :1] == units).all(1) & (units[:, 0] >= 0) & ~frozen[units[:, 0]]
            if (one & (moved[units[:, 0]] == units.shape[1])).all():
                result.append(FedWeight(name, f, "scale inference"))
    return tuple(result)


def _frozen(model: nn.Module, group: Group) -> NDArray[np.bool_]:
    """Which generators move a BatchNorm that stays in evaluation mode while the model trains."""
    exponents = group.exponents()
    result = np.zeros(len(group), dtype=bool)
    for name, classes in exponents.deviations.items():
        norm = model.get_submodule(name.rpartition(".")[0])
        if model.training and not norm.training:
            result[exponents.matrix[classes.numpy()].nonzero()[1]] = True
    return result


def named_filters(model: nn.Module, names: Sequence[str]) -> tuple[FedWeight, ...]:
    """The filters of the layers with these names."""
    modules = dict(unwrap(model).named_modules())
    result = []
    for name in names:
        if name not in modules:
            raise InvalidValue(f"The model has no layer {name!r}. {nearest(name, modules)}")
        module = modules[name]
        if not isinstance(module, _LAYERS):
            raise InvalidValue(
                f"A filter belongs to a Linear or a convolution. Got {name!r}, which is "
                f"{type(module).__name__}."
            )
        # Not `module.weight`, which a parametrization computes anew each time.
        weight = module._parameters.get("weight")
        if weight is None:
            raise InvalidValue(
                f"The filters of {name!r} are not slices of a parameter: its weight is computed "
                "from others. Leave it out of `filters`."
            )
        full = f"{name}.weight".lstrip(".")
        result.append(FedWeight(full, Filters(weight, _matrix(module)), "named"))
    return tuple(result)


def filters_of(model: nn.Module) -> dict[str, Filters]:
    """The filters of every layer whose weight is a parameter, by the parameter's name."""
    # Not `m.weight`, which may be computed anew each time.
    layers = {id(m._parameters.get("weight")): m for m in model.modules() if isinstance(m, _LAYERS)}
    return {
        name: Filters(parameter, _matrix(layers[id(parameter)]))
        for name, parameter in model.named_parameters()
        if id(parameter) in layers
    }


def _matrix(layer: nn.Module) -> Matrix:
    return Matrix(1, layer.groups) if isinstance(layer, _TRANSPOSED) else Matrix()


@final
class BNSharpnessSGD(PerturbedOptimizer):
    """The base optimizer on L(θ) + λ S(θ)^p, S the BN-Sharpness (SGDS, algorithm 1).

    S(θ)^p = (1/δ) ∫_{−δ}^{δ} ((L(θ+tv) − L(θ))/δ)^p dt, where ‖v_i‖ = ‖θ_i‖ for every filter i
    that feeds BatchNorm and the rest of v has norm 1. With g = ∇L(θ), s = ⟨g, v⟩, c = p/(p+1) and
    the unit directions u_i = v_i/‖v_i‖ held fixed its gradient is, up to higher orders in δ,

        (1/δ) s^{p−1} [∇L(θ+cδv) − ∇L(θ−cδv)]  +  (2p/(p+1)) s^{p−1} ⟨g_i, u_i⟩ θ_i/‖θ_i‖

    the second term on the filters only. (Eq. 15 of the paper adds the two gradients and subtracts
    2g, which vanishes to first order, and lacks the second term.)

    v is the direction of the gradient on every sphere, or what `ascent_steps` steps of Riemannian
    ascent from there find (eqs. 14, 16 and 17, in u, so that they are invariant to the scale of
    the filters too; the paper's for filters of norm 1). One step costs 3 + 2 `ascent_steps` passes.

    Parameters
    ----------
    base : any torch optimizer that takes no closure.
    model : the model, to see which filters feed BatchNorm: `filters` names them after the first
        forward pass, and `repr` says how each was found, too.
    strength, growth : λ, and its factor an epoch; call `end_epoch()`. λ is the setting
        `strength` of a parameter group; 0 is the base optimizer.
    delta, p : δ, and an even power.
    clip : the largest norm of λ∇S^p; None for no limit.
    ascent_rate : the step size of the ascent.
    example : inputs of the model, as for `saltflat.symmetries`: scale inference on them adds
        filters without bias whose scale reaches BatchNorm through ReLU, pooling and the like.
    filters : names of layers, to be used instead of those that are found.

    The difference of two gradients over δ magnifies rounding: prefer float32 to autocast. The
    paper takes the two gradients on different batches, which `step(closure, plus, minus)` does;
    their difference is then mostly that of the batches, over δ, and `clip` decides the length.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    >>> model, x, y = torch.nn.Sequential(*layers), torch.randn(8, 3), torch.arange(8) % 2
    >>> optimizer = sf.BNSharpnessSGD(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     return loss
    >>> losses = [optimizer.step(closure).item() for _ in range(10)]
    >>> losses[-1] < losses[0], optimizer.filters
    (True, {'0.weight': 4})
    """

    _scale_free = False
    _settings = ("delta", "p", "ascent_steps", "ascent_rate", "growth", "clip")
    _lasting = (*PerturbedOptimizer._lasting, *_settings, "model", "_inferred", "_named")

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        strength: float = 1e-4,
        delta: float = 1e-3,
        p: int = 2,
        ascent_steps: int = 0,
        growth: float = 1.02,
        clip: float | None = 0.1,
        *,
        ascent_rate: float = 1.0,
        example: Any = None,
        filters: Sequence[str] | None = None,
        freeze_batchnorm: bool = True,
        same_randomness: bool = True,
    ) -> None:
        if not isinstance(p, int) or p < 2 or p % 2:
            raise InvalidValue(f"p must be an even integer of at least 2. Got {p!r}.")
        if example is not None and filters is not None:
            raise InvalidValue("Pass either filters or the example that they are found on.")
        self.delta, self.p = check_number("delta", delta, above=True), p
        self.ascent_steps = check_integer("ascent_steps", ascent_steps, least=0)
        self.ascent_rate = check_number("ascent_rate", ascent_rate, above=True)
        self.growth = check_number("growth", growth, above=True)
        self.clip = None if clip is None else check_number("clip", clip, above=True)
        super().__init__(
            base,
            {"strength": check_number("strength", strength)},
            freeze_batchnorm=freeze_batchnorm,
            same_randomness=same_randomness,
        )
        refuse_sharded(
            (q for group in base.param_groups for q in group["params"]),
            "BNSharpnessSGD needs the filters of whole parameters",
            "Wrap the model in DistributedDataParallel instead, or take SAM, which has no filters.",
        )
        self.model = model
        self._inferred = () if example is None else scale_free(model, example)
        self._named = None if filters is None else named_filters(model, filters)
        self._search = self._look() if filters is None else None

    @property
    def filters(self) -> dict[str, int] | None:
        """The weights whose filters feed BatchNorm, and how many; None before the first pass."""
        weights = self._fed()
        return None if weights is None else {w.name: w.filters.count for w in weights}

    def end_epoch(self) -> None:
        """Multiply λ by `growth`."""
        for group in self.param_groups:
            group["strength"] = self._setting(group, "strength") * self.growth

    def step(
        self,
        closure: Closure | None = None,
        plus: Closure | None = None,
        minus: Closure | None = None,
    ) -> Any:
        """One step. `plus` and `minus` are closures for θ+cδv and θ−cδv, with other batches."""
        own = {name: f for name, f in (("plus", plus), ("minus", minus)) if f is not None}
        if closure is None or not own:
            if own:
                raise InvalidValue("plus and minus need a closure for the first pass too.")
            return super().step(closure)
        loss = self._run(closure, own)
        self._base_step()
        return loss

    def _fed(self) -> tuple[FedWeight, ...] | None:
        if self._named is None and self._search is not None and self._search.result is not None:
            seen, self._search = self._search.result, None
            names = {w.name for w in seen}
            self._named = (*seen, *(w for w in self._inferred if w.name not in names))
            if not self._named:
                warnings.warn(
                    "BNSharpnessSGD found no filter that feeds BatchNorm: all weights share one "
                    "sphere, and the measure is not scale-invariant. filters=[…] names them.",
                    stacklevel=4,
                )
        return self._named

    def _look(self) -> FilterSearch:
        search = FilterSearch(self.model)
        weakref.finalize(self, search.close)
        return search

    def _neutral(self) -> bool:
        return all(self._setting(group, "strength") == 0 for group in self.param_groups)

    def _passes(self) -> Walk:
        entries = self._with_gradients()
        parameters = [q for q, _, _ in entries]
        gradient, start = copies([g for _, g, _ in entries]), copies(parameters)
        spheres = Spheres(start, self._by_parameter(parameters))
        units: Vector = spheres.units(gradient)
        try:
            for _ in range(self.ascent_steps):
                both = yield from self._pair(spheres, units, parameters, (self.p + 1), "ascent")
                units = self._ascend(spheres, units, gradient, torch._foreach_add(*both))
            both = yield from self._pair(spheres, units, parameters, self.p)
            put(parameters, start)
            term = self._term(spheres, units, gradient, torch._foreach_sub(*both))
            strengths = [self._setting(group, "strength") for _, _, group in entries]
            torch._foreach_mul_(term, strengths)
            self._clip(term)
            for q, g, t in zip(parameters, gradient, term, strict=True):
                q.grad = g + t
        finally:
            put(parameters, start)

    def _pair(
        self,
        spheres: Spheres,
        units: Vector,
        parameters: list[Tensor],
        power: int,
        name: str | None = None,
    ) -> Generator[str, None, tuple[Vector, Vector]]:
        """The gradients at θ ± cδv with c = power/(power + 1)."""
        reach = self.delta * power / (power + 1)
        shift = torch._foreach_mul(
            [r * u for r, u in zip(spheres.radii, units, strict=True)], reach
        )
        results = []
        for stage, move in (("plus", torch._foreach_add), ("minus", torch._foreach_sub)):
            put(parameters, move(spheres.parameters, shift))
            yield name or stage
            # Copies: under DistributedDataParallel gradients may be views of one buffer.
            results.append(
                copies([torch.zeros_like(q) if q.grad is None else q.grad for q in parameters])
            )
        return results[0], results[1]

    def _ascend(self, spheres: Spheres, units: Vector, gradient: Vector, both: Vector) -> Vector:
        """One step up ∇_u S^p = (p/(p+1)) s^{p−1} ‖θ_i‖ [∇L(θ+cδv) + ∇L(θ−cδv)] (eq. 16)."""
        radii = spheres.radii
        s = spheres.slope(gradient, units)
        rate = self.ascent_rate * self.p / (self.p + 1) * s ** (self.p - 1)
        uphill = [rate.to(r.device) * r * t for r, t in zip(radii, both, strict=True)]
        return spheres.units(torch._foreach_add(units, spheres.tangent(uphill, units)))

    def _term(
        self, spheres: Spheres, units: Vector, gradient: Vector, difference: Vector
    ) -> Vector:
        """∇S^p with the unit directions held fixed."""
        radii = spheres.radii
        factor = spheres.slope(gradient, units) ** (self.p - 1)
        result = []
        for theta, r, u, g, d, f in zip(
            spheres.parameters, radii, units, gradient, difference, spheres.filters, strict=True
        ):
            term = d / self.delta
            if f is not None:
                radial = 2 * self.p / (self.p + 1) * f.sums(g * u)
                term += radial * theta / at_least_tiny(r)
            result.append(factor.to(term) * term)
        return result

    def _clip(self, term: Vector) -> None:
        if self.clip is not None:
            norm = total_norm(term)
            factor = (self.clip / at_least_tiny(norm)).clamp_max(1.0)
            scale(term, factor)

    def _by_parameter(self, parameters: Sequence[Tensor]) -> list[Filters | None]:
        weights = self._fed()
        if weights is None:
            raise ModelError(
                "BNSharpnessSGD has not seen a forward pass of its model with gradients on. Run "
                "the model that was given, or name its layers with filters=[…]."
            )
        by_id = {id(w.filters.weight): w.filters for w in weights}
        return [by_id.get(id(q)) for q in parameters]

    def __repr__(self) -> str:
        weights = self._fed()
        listed = "not seen yet"
        if weights is not None:
            listed = ", ".join(f"{w.name}: {w.filters.count} ({w.how})" for w in weights)
        return f"{super().__repr__()}\nfilters that feed BatchNorm: {listed or 'none'}"

    def __getstate__(self) -> dict[str, Any]:
        self._fed()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._search = self._look() if self._named is None else None
