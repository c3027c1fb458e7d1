"""Probe a model on a few samples: which rule serves which parameter, and what may be called exact.

Three things are found out, each by asking autograd and none by looking at layer types.

*Samples.* Outputs of a sample must not depend on the other samples of its batch, nor on chance.

*Rules.* A fast rule is right for a parameter if, for random cotangents and random weights a_i of
the samples, Σ_i a_i G_i equals autograd's own gradient. The weights catch a rule that takes some
other dimension for the samples; the comparison catches every use that the recorder did not see.

*Piecewise linearity.* If outputs o are piecewise linear in a block, its Hessian block equals the
Gauss–Newton block for any loss. Where every operation of the autograd graph is a known one, that
is read off the graph (see `structure`). The other blocks are probed. With parameters held fixed,
the gradients δ = ∂⟨r, o⟩/∂z at all
recorded operations must not change with any z; one random second derivative decides that for
every block at once. It can fail though each block alone is linear (a product of two branches),
and it says nothing of a parameter used twice along a path; those blocks are probed one by one, by
the derivative of ⟨∂⟨r, o⟩/∂w, v⟩ in w. The cotangent r is random, never the loss's own gradient:
where that vanishes, every network would pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from saltflat.curvature.layers import LinearUse, Rows, Use
from saltflat.curvature.matrix import Matrix
from saltflat.curvature.memory import out_of_memory
from saltflat.curvature.plan import (
    GENERIC,
    UNUSED,
    Plan,
    channels_last,
    fits,
    patch_entries,
    signature,
)
from saltflat.curvature.record import Recorder
from saltflat.curvature.structure import unproven
from saltflat.curvature.terms import Term, combine
from saltflat.errors import ModelError
from saltflat.risk import Batch, Risk
from saltflat.session import full_precision


def probe(risk: Risk, batch: Batch) -> Plan:
    """Probe the model on all samples of a (small) batch."""
    with full_precision(risk.device):
        return _Probe(risk, batch).plan()


class _Probe:
    def __init__(self, risk: Risk, batch: Batch) -> None:
        self.risk, self.batch = risk, batch
        self.unseen: frozenset[str] = frozenset()
        self.generator = torch.Generator(risk.device).manual_seed(20_210_618)

    def plan(self) -> Plan:
        outputs, self.uses = self._forward()
        self.risk.check(outputs, self.batch)
        coupled = self._coupled(outputs)
        names = list(self.risk.parameters)
        rules, dims = dict.fromkeys(names, UNUSED), dict[str, int]()
        linear, reasons = dict.fromkeys(names, True), dict.fromkeys(names, "no effect on outputs")
        if outputs.requires_grad:
            self.outputs = outputs
            self.cotangent = self._normal(outputs)
            self.doubtful = unproven(outputs, self.risk.parameters)
            self._deltas()
            rules, dims = self._rules()
            linear, reasons = self._linearity(rules)
        n = self.batch.size
        return Plan(
            samples=n,
            coupled=coupled,
            rules=rules,
            dims=dims,
            matrices=self._matrices(rules),
            certified=linear,
            reasons=reasons,
            unseen=self.unseen,
            signature=signature(self.uses),
            channels_last=self.channels_last,
            width=outputs.element_size(),
            outputs=outputs.shape[1:],
            activations=sum(use.shape.numel() for use in self.uses) // n,
            kept=sum(use.shape.numel() for use in self.uses if use.keeps) // n,
            inputs=sum(use.input.numel() for use in self.uses) // n,
            patches=max((patch_entries(use) for use in self.uses), default=0) // n,
        )

    def _matrices(self, rules: Mapping[str, str]) -> dict[str, Matrix]:
        """What acts as a matrix; of an unknown operation, whatever has two dimensions or more."""
        found = {}
        for use in self.uses:
            matrix, name = use.matrix(), use.names.get("weight")
            if matrix is None or name is None:
                continue
            if rules[name] == GENERIC and isinstance(use, LinearUse) and use.transposed:
                continue  # a product of two parameters, b @ a: no input of the layer
            # An embedding that is tied to a Linear counts as the Linear.
            if name not in found or matrix.out == 0:
                found[name] = matrix
        for name, rule in rules.items():
            shape = self.risk.parameters[name].shape
            if rule == GENERIC and len(shape) > 1 and shape.numel() > max(shape):
                found.setdefault(name, Matrix())
        return {name: found[name] for name in rules if name in found}

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(
            like.shape, generator=self.generator, device=like.device, dtype=like.dtype
        )

    def _images(self) -> bool:
        """Whether there are images on a CPU, whose convolutions are faster channels last.

        (cuDNN's are not: 4.8 gradients against 5.2 for a ResNet-18 on an H200.)
        """
        leaves = tree_leaves(self.batch.inputs)
        return any(isinstance(t, Tensor) and t.ndim == 4 and t.is_cpu for t in leaves)

    def _forward(self) -> tuple[Tensor, list[Use]]:
        with Recorder(self.risk.parameters, sizes=True) as recorder:
            outputs = self.risk.forward(self.batch)
        self.sizes = recorder.sizes
        return outputs, recorder.uses

    def _coupled(self, outputs: Tensor) -> bool:
        """Whether samples of a batch depend on each other; an error if they depend on chance."""
        half = self.batch.size // 2
        part, expected = self.batch.part(half, self.batch.size), outputs[half:]
        with torch.no_grad():
            self.channels_last = self._images() and self._gives(channels_last(part), expected)
            alone = self.channels_last or self._gives(part, expected)
            compared = expected.numel() if alone else 0
            while compared < _ENOUGH:  # few entries may agree by chance
                if not self._close(self.risk.forward(self.batch), outputs):
                    raise ModelError(
                        "The model is random in evaluation mode: equal inputs give different "
                        "outputs, so it has no Hessian to measure. Look for dropout called with "
                        "training=True or noise that is not switched off by eval()."
                    )
                compared += outputs.numel()
        return not alone

    def _gives(self, batch: Batch, expected: Tensor) -> bool:
        """Whether the model gives these outputs for a part of the batch, maybe laid out anew.

        It may refuse: one that makes views of contiguous images, or that needs many samples.
        """
        try:
            return self._close(self.risk.forward(batch), expected)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise
            return False

    def _close(self, a: Tensor, b: Tensor) -> bool:
        tolerance = 1e-10 if a.dtype == torch.float64 else 1e-3
        difference, whole = _largest([a - b, b])
        return difference <= tolerance * max(whole, 1e-30)

    def _deltas(self) -> None:
        """δ at every recorded operation, differentiable once more if linearity is in doubt."""
        edges = [use.edge for use in self.uses]
        self.deltas: Sequence[Tensor | None] = ()
        if edges:
            self.deltas = torch.autograd.grad(
                self.outputs,
                edges,
                self.cotangent,
                retain_graph=True,
                create_graph=bool(self.doubtful),
                allow_unused=True,
            )

    def _rules(self) -> tuple[dict[str, str], dict[str, int]]:
        weights = self._normal(self.outputs.new_empty(self.batch.size))
        spread = weights.reshape(-1, *[1] * (self.outputs.ndim - 1))
        truth = torch.autograd.grad(
            self.outputs,
            list(self.risk.parameters.values()),
            self.cotangent * spread,
            retain_graph=True,
            allow_unused=True,
        )
        gradients = dict(zip(self.risk.parameters, truth, strict=True))
        rules = {name: UNUSED if g is None else GENERIC for name, g in gradients.items()}
        dims: dict[str, int] = {}
        given = {name: g for name, g in gradients.items() if g is not None}
        sizes = dict(zip(given, _largest(list(given.values())), strict=True))
        open_ = {name for name, size in sizes.items() if size > 0}
        self.unseen = frozenset(sizes) - open_
        for dim in (0, 1):
            with torch.no_grad():
                offers = self._offers(Rows(self.batch.size, dim), open_)
                values = {
                    name: combine([term for _, term in terms]).weighted(weights)
                    for name, terms in offers.items()
                }
            fitting = {n: v - given[n] for n, v in values.items() if v.shape == given[n].shape}
            for name, error in zip(fitting, _largest(list(fitting.values())), strict=True):
                if error <= self._tolerance(given[name]) * sizes[name]:
                    rules[name], dims[name] = offers[name][0][0].rule, dim
                    open_.discard(name)
        return rules, dims

    def _tolerance(self, like: Tensor) -> float:
        return 1e-9 if like.dtype == torch.float64 else 1e-3

    def _offers(self, rows: Rows, wanted: set[str]) -> dict[str, list[tuple[Use, Term]]]:
        """What the uses of the wanted parameters make of the deltas, with samples along `rows`."""
        found: dict[str, list[tuple[Use, Term]]] = {}
        refused = set[str]()
        for use, delta in zip(self.uses, self.deltas, strict=True):
            if delta is None or not wanted & set(use.names.values()):
                continue
            if not fits(use, rows):
                refused |= set(use.names.values())
                continue
            for name, term in use.terms([use.keep(delta.detach(), rows)], rows):
                found.setdefault(name, []).append((use, term))
        return {n: terms for n, terms in found.items() if n in wanted and n not in refused}

    def _linearity(self, rules: Mapping[str, str]) -> tuple[dict[str, bool], dict[str, str]]:
        calls: dict[str, int] = {}
        for use in self.uses:
            for name in use.names.values():
                calls[name] = calls.get(name, 0) + 1
        single = {n for n, rule in rules.items() if calls.get(n) == 1 and rule != GENERIC}
        good = f"outputs are piecewise linear in it on {self.batch.size} probed samples"
        linear, reasons = dict.fromkeys(rules, True), dict.fromkeys(rules, good)
        together = bool(self.doubtful) and self._all_linear()
        for name, rule in rules.items():
            if rule == UNUSED:
                reasons[name] = "no effect on outputs"
            elif name in self.doubtful and not (together and name in single):
                problem = self._nonlinear(self.risk.parameters[name])
                if problem:
                    linear[name], reasons[name] = False, problem
        return linear, reasons

    def _all_linear(self) -> bool:
        """Whether no δ changes with any recorded output."""
        found = [
            (use.edge, delta, size)
            for use, delta, size in zip(self.uses, self.deltas, self.sizes, strict=True)
            if delta is not None and delta.requires_grad
        ]
        if not found:
            return True
        edges = [edge for edge, _, _ in found]
        deltas = [delta for _, delta, _ in found]
        scales = self._scales(deltas, torch.stack([size for _, _, size in found]))
        directions = [self._normal(d) * scale for d, scale in zip(deltas, scales, strict=True)]
        try:
            changes = torch.autograd.grad(
                deltas, edges, directions, retain_graph=True, allow_unused=True
            )
        except RuntimeError:
            return False  # found out, block by block, by `_nonlinear`
        moved = [(c, d.detach()) for c, d in zip(changes, deltas, strict=True) if c is not None]
        sizes = _largest([*(c for c, _ in moved), *(d for _, d in moved)])
        bends = zip(moved, sizes[: len(moved)], sizes[len(moved) :], strict=True)
        return all(change <= _rounding(c) * scale for (c, _), change, scale in bends)

    def _scales(self, gradients: Sequence[Tensor], sizes: Tensor) -> Tensor:
        """The sizes of directions, so large that a change of a gradient along one would show.

        At least that of the thing itself, and of what changes the outputs by about themselves;
        at least 1, since both can vanish (a network that is zero at its start).
        """
        norms = _norms(gradients)
        ratios = _norms([self.outputs]) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        return torch.maximum(sizes, ratios.clamp(max=1e30)).clamp(min=1.0)

    def _nonlinear(self, parameter: Tensor) -> str | None:
        """Why the outputs are not piecewise linear in one parameter, or None if they are."""
        try:
            (gradient,) = torch.autograd.grad(
                self.outputs, parameter, self.cotangent, create_graph=True
            )
            if not gradient.requires_grad:
                return None
            size = _norms([parameter]) / parameter.numel() ** 0.5
            direction = self._normal(gradient) * self._scales([gradient], size)[0]
            (change,) = torch.autograd.grad(
                gradient, parameter, direction, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            return f"its second derivative is not available: {str(error).splitlines()[0]}"
        if change is None or _negligible(change, gradient.detach()):
            return None
        return "outputs are not piecewise linear in it"


_ENOUGH = 16  # entries of the outputs to compare


def _norms(tensors: Iterable[Tensor], order: float = 2.0) -> Tensor:
    """Norms of all of them, in a few launches on a GPU."""
    norms = list(torch._foreach_norm([x.detach() for x in tensors], order))
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(norms)


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    """The largest entries, all fetched at once: waiting for a GPU is what costs here."""
    found: list[float] = _norms(tensors, float("inf")).tolist() if tensors else []
    return found


def _rounding(x: Tensor) -> float:
    return 16 * float(torch.finfo(x.dtype).eps)


def _negligible(change: Tensor, scale: Tensor) -> bool:
    size, whole = _largest([change, scale])
    return size <= _rounding(change) * whole
