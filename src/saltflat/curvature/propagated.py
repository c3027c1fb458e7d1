"""Propagated curvature: the second derivative of a network from those of its single operations.

The Hessian of a sample's loss in a block of parameters is a sum over the curved operations m of
the graph,

    H = Σ_m J_mᵀ M_m J_m,    J_m = ∂(operands of m)/∂block,    M_m = ∇²⟨δ_m, f_m⟩,

where δ_m is the loss's gradient at the operation's result; at the loss itself M is the output
Hessian (Martens, Sutskever and Swersky, 2012). Every M_m is E[b aᵀ] for vectors a and b that are
linear in random signs, which are independent between operations, samples and positions. One
backward pass sends all (a + b)/2 down together, another all (a − b)/2; what arrives at a
parameter's operation gives per-sample gradients G₊ and G₋, and G₊ G₊ᵀ − G₋ G₋ᵀ is H on average: its
trace, its diagonal, its forms. Nothing is differentiated twice but single operations.

An operation counts for a parameter if it is curved in a pair of operands that the parameter reaches
both (see `proof`). A parameter that is itself an operand of such a pair (a recurrent weight, a tied
embedding) feeds itself: its block is not served here. Neither are those of parameters that reach a
curved operation on complex numbers, whose M acts on real and imaginary parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from saltflat.curvature.loss_hessian import insist_on_derivative
from saltflat.curvature.proof import curved_pairs, leaves_first, signed
from saltflat.curvature.rules import Use

Sides = tuple[list[Tensor], list[Tensor]]  # a and b, a tensor an operand


class Operation(ABC):
    """One curved operation of a graph: M = E[b aᵀ] in the operands that `edges` lead to.

    What does not change from draw to draw is computed once.
    """

    def __init__(self, edges: list[GradientEdge]) -> None:
        self.edges = edges

    @property
    @abstractmethod
    def signs(self) -> tuple[torch.Size, ...]:
        """The shapes of the random signs that a draw takes."""

    @abstractmethod
    def sides(self, *signs: Tensor) -> Sides:
        """a and b, both linear in the signs."""


@final
class Entrywise(Operation):
    """φ of every entry: M is diagonal, with φ''(u) δ."""

    def __init__(self, edges: list[GradientEdge], bend: Tensor) -> None:
        super().__init__(edges)
        self.root, self.sign = bend.abs().sqrt(), bend.sign()

    @property
    def signs(self) -> tuple[torch.Size, ...]:
        return (self.root.shape,)

    def sides(self, *signs: Tensor) -> Sides:
        a = self.root * signs[0]
        return [a], [self.sign * a]


def _scaled_pair(one: Tensor, other: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """c·one and other/c with c so that both have one size along `dim`; 0 where either is 0."""
    first = torch.linalg.vector_norm(one, dim=dim, keepdim=True)
    second = torch.linalg.vector_norm(other, dim=dim, keepdim=True)
    good = (first > 0) & (second > 0)
    scale = torch.where(good, second, 1.0).sqrt() / torch.where(good, first, 1.0).sqrt()
    return (one * scale).where(good, 0.0), (other / scale).where(good, 0.0)


@final
class Softmax(Operation):
    """M = diag(w) − p wᵀ − w pᵀ with w = p ∘ (δ − p·δ), along one dimension."""

    def __init__(self, edges: list[GradientEdge], p: Tensor, delta: Tensor, dim: int) -> None:
        super().__init__(edges)
        w = p * (delta - (p * delta).sum(dim, keepdim=True))
        self.root, self.sign, self.dim = w.abs().sqrt(), w.sign(), dim
        self.p, self.w = _scaled_pair(p, w, dim)

    @property
    def signs(self) -> tuple[torch.Size, ...]:
        one = list(self.p.shape)
        one[self.dim] = 1
        return self.p.shape, torch.Size(one), torch.Size(one)

    def sides(self, *signs: Tensor) -> Sides:
        each, one, other = signs
        a = self.root * each
        b = self.sign * a
        a.addcmul_(self.p, one).addcmul_(self.w, other)
        b.addcmul_(self.w, one, value=-1).addcmul_(self.p, other, value=-1)
        return [a], [b]


@final
class LogSoftmax(Operation):
    """M = −(Σδ) (diag(p) − p pᵀ), along one dimension."""

    def __init__(self, edges: list[GradientEdge], p: Tensor, total: Tensor, dim: int) -> None:
        super().__init__(edges)
        self.p, self.root, self.dim = p, p.sqrt(), dim
        self.size, self.sign = total.abs().sqrt(), -total.sign()

    @property
    def signs(self) -> tuple[torch.Size, ...]:
        return (self.p.shape,)

    def sides(self, *signs: Tensor) -> Sides:
        mixed = self.root * signs[0]
        a = (mixed - self.p * mixed.sum(self.dim, keepdim=True)) * self.size
        return [a], [self.sign * a]


@final
class Normalisation(Operation):
    """x̂ = x/s of centred (or plain) x, rows along the last dimension of `unit` = x̂.

    With g the gradient in x̂ (centred too), κ = x̂·g and r = g − κ x̂/‖x̂‖²,

        M = −(κ P⊥ + 3κ (1/‖x̂‖² − 1/d) x̂ x̂ᵀ + r x̂ᵀ + x̂ rᵀ) / (d s²),

    where P⊥ projects to what is orthogonal to x̂ (and to 1).
    """

    def __init__(
        self,
        edges: list[GradientEdge],
        unit: Tensor,  # (rows, d)
        gradient: Tensor,  # g
        inverse: Tensor,  # 1/s, (rows, 1)
        centred: bool,
        shape: torch.Size,  # of the operand
    ) -> None:
        super().__init__(edges)
        self.unit, self.centred, self.shape = unit, centred, shape
        d, square = unit.shape[-1], unit.square().sum(-1, keepdim=True)
        inner = (unit * gradient).sum(-1, keepdim=True)
        there = square > 0
        over = torch.where(there, 1 / torch.where(there, square, 1.0), 0.0)
        size = inverse / d**0.5
        self.dual, self.rest = unit * over, gradient - unit * (inner * over)
        self.alone = (3 * (over - 1 / d)).clamp(min=0).where(there, 0.0).sqrt()
        self.own, self.sign = inner.abs().sqrt() * size, -inner.sign()
        along, across = _scaled_pair(unit, self.rest, -1)
        self.along, self.across = along * size, across * size

    @property
    def signs(self) -> tuple[torch.Size, ...]:
        one = self.own.shape
        return self.unit.shape, one, one, one

    def sides(self, *signs: Tensor) -> Sides:
        each, alone, one, other = signs
        mixed = each - each.mean(-1, keepdim=True) if self.centred else each
        inner = (self.dual * mixed).sum(-1, keepdim=True)
        a = torch.addcmul(mixed, self.unit, self.alone * alone - inner).mul_(self.own)
        b = self.sign * a
        a.addcmul_(self.along, one).addcmul_(self.across, other)
        b.addcmul_(self.across, one, value=-1).addcmul_(self.along, other, value=-1)
        return [a.reshape(self.shape)], [b.reshape(self.shape)]


@final
class EntryProduct(Operation):
    """Σ d u v of entries of two operands, either of which may be spread by broadcasting.

    Where one is spread, d along what it is spread over is one vector, and needs one sign.
    """

    def __init__(
        self, edges: list[GradientEdge], weight: Tensor, one: torch.Size, other: torch.Size
    ) -> None:
        super().__init__(edges)
        self.first_is_small = one.numel() <= other.numel()
        self.small, self.large = (one, other) if self.first_is_small else (other, one)
        narrow = (1,) * (weight.ndim - len(self.small)) + tuple(self.small)
        along = [d for d, size in enumerate(narrow) if size == 1 and weight.shape[d] > 1]
        norm = torch.linalg.vector_norm(weight, dim=along, keepdim=True) if along else weight.abs()
        self.root = norm.sqrt()
        self.wide = weight / torch.where(self.root > 0, self.root, 1.0)

    @property
    def signs(self) -> tuple[torch.Size, ...]:
        return self.root.shape, self.root.shape

    def sides(self, *signs: Tensor) -> Sides:
        one, other = signs
        a = [(self.root * one).sum_to_size(self.small), (self.wide * other).sum_to_size(self.large)]
        b = [(self.root * other).sum_to_size(self.small), (self.wide * one).sum_to_size(self.large)]
        return (a, b) if self.first_is_small else (a[::-1], b[::-1])


@final
class MatrixProduct(Operation):
    """⟨D, U V⟩ of batches of matrices U (n × k) and V (k × m), with D = P Qᵀ.

    Of the two sides of D, the shorter one is scaled: P = D/c and Q = diag(c), or the transposed.
    """

    def __init__(self, edges: list[GradientEdge], weight: Tensor, inner: int) -> None:
        super().__init__(edges)
        *lead, n, m = weight.shape
        self.by_columns = m <= n
        norm = torch.linalg.vector_norm(weight, dim=-2 if self.by_columns else -1, keepdim=True)
        self.root = norm.sqrt()
        self.wide = weight / torch.where(self.root > 0, self.root, 1.0)
        self.shape = torch.Size((*lead, min(n, m), inner))

    @property
    def signs(self) -> tuple[torch.Size, ...]:
        return self.shape, self.shape

    def sides(self, *signs: Tensor) -> Sides:
        one, other = signs
        return self._pair(one, other), self._pair(other, one)

    def _pair(self, left: Tensor, right: Tensor) -> list[Tensor]:
        if self.by_columns:
            return [self.wide @ left, right.mT * self.root]
        return [self.root * left, right.mT @ self.wide]


@final
class AnyOperation(Operation):
    """a = c ξ and b = M ξ / c, by differentiating the one operation twice; c balances the two."""

    def __init__(
        self, edges: list[GradientEdge], product: LocalProduct, scale: list[float]
    ) -> None:
        super().__init__(edges)
        self.product, self.scale = product, scale

    @property
    def signs(self) -> tuple[torch.Size, ...]:
        return self.product.shapes

    def sides(self, *signs: Tensor) -> Sides:
        a = [c * sign for c, sign in zip(self.scale, signs, strict=True)]
        b = self.product([sign / c for c, sign in zip(self.scale, signs, strict=True)])
        return a, b


@dataclass(frozen=True, slots=True)
class CurvedNode:
    """A node of the graph, and the operands between which it is curved for some parameter."""

    node: Any
    name: str
    pairs: tuple[tuple[int, int], ...]

    @property
    def operands(self) -> list[int]:
        return sorted({k for pair in self.pairs for k in pair})

    @property
    def apart(self) -> list[list[int]]:
        """The operands, those that are one and the same tensor together, as in pow(x, x)."""
        same: dict[Any, list[int]] = {}
        for k in self.operands:
            same.setdefault(self.node.next_functions[k], []).append(k)
        return list(same.values())

    def edge(self, operand: int) -> GradientEdge:
        return GradientEdge(*self.node.next_functions[operand])

    def shape(self, operand: int) -> torch.Size:
        child, result = self.node.next_functions[operand]
        return torch.Size(child._input_metadata[result].shape)


@final
@dataclass(frozen=True, slots=True)
class CurvedGraph:
    """What of a graph is curved in some parameters."""

    nodes: tuple[CurvedNode, ...]
    unserved: frozenset[str]  # parameters that feed themselves, or meet complex numbers


def curved_graph(
    outputs: Tensor,
    parameters: Mapping[str, Tensor],
    uses: Sequence[Use],
    writes: Callable[[], frozenset[str]],
) -> CurvedGraph:
    """Walk the graph of `outputs` for the nodes that count for one of the parameters.

    `uses` are all the operations that take these parameters: below its use a parameter reaches a
    node directly, above it by way of activations, which belong to samples.
    """
    bits = {id(p): 1 << k for k, p in enumerate(parameters.values())}
    ends = {use.edge.node for use in uses}
    reach: dict[Any, int] = {None: 0}
    direct: dict[Any, int] = {None: 0}
    nodes, unserved = [], 0
    for node, name, children in leaves_first(outputs.grad_fn):
        if not children:
            reach[node] = direct[node] = bits.get(id(getattr(node, "variable", None)), 0)
            continue
        below = [reach[child] for child, _ in children]
        straight = [direct[child] for child, _ in children]
        reach[node] = direct[node] = 0
        for each, at_once in zip(below, straight, strict=True):
            reach[node] |= each
            direct[node] |= at_once
        if node in ends:
            direct[node] = 0
        if not reach[node]:
            continue
        pairs = []
        for k, j in _pairs_of(node, name, len(below), writes):
            if not (both := below[k] & below[j]):
                continue
            lost = both if _is_complex(node, k, j) else both & (straight[k] | straight[j])
            unserved |= lost
            if both & ~lost:
                pairs.append((k, j))
        if pairs:
            nodes.append(CurvedNode(node, name, tuple(pairs)))
    names = frozenset(name for k, name in enumerate(parameters) if unserved >> k & 1)
    return CurvedGraph(tuple(nodes), names)


def _is_complex(node: Any, *operands: int) -> bool:
    """Whether an operation takes or gives complex numbers."""
    taken = (node.next_functions[k] for k in operands)
    ends = [child._input_metadata[result] for child, result in taken]
    return any(end.dtype.is_complex for end in (*node._input_metadata, *ends))


def _pairs_of(
    node: Any, name: str, operands: int, writes: Callable[[], frozenset[str]]
) -> Iterator[tuple[int, int]]:
    pairs = curved_pairs(node, name, operands, writes)
    if pairs is None:
        yield from ((k, j) for k in range(operands) for j in range(k, operands))
    else:
        yield from ((k, j) for k, j in pairs if max(k, j) < operands)


def operations(graph: CurvedGraph, outputs: Tensor, slope: Tensor) -> list[Operation]:
    """The curved operations, given the loss's gradient in the outputs."""
    places = [
        GradientEdge(each.node, k)
        for each in graph.nodes
        for k in range(len(each.node._input_metadata))
    ]
    if not places:
        return []
    deltas = iter(torch.autograd.grad(outputs, places, slope, retain_graph=True, allow_unused=True))
    built: list[Operation] = []
    for each in graph.nodes:
        here = [next(deltas) for _ in each.node._input_metadata]
        if any(delta is not None for delta in here):
            build = _CLOSED.get(each.name, _anything)
            built.extend(build(each, here))
    return built


def _entrywise(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    if len(at.node.next_functions) > 1 or at.operands != [0]:
        return _anything(at, deltas)
    (bend,) = LocalProduct(at, deltas)([torch.ones_like(_first(deltas))])
    return [Entrywise([at.edge(0)], bend)]


def _first(deltas: Sequence[Tensor | None]) -> Tensor:
    assert deltas[0] is not None
    return deltas[0]


def _softmax(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    p, dim = at.node._saved_result.detach(), signed(at.node._saved_dim)
    return [Softmax([at.edge(0)], p, _first(deltas), dim)]


def _log_softmax(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    delta, dim = _first(deltas), signed(at.node._saved_dim)
    p = at.node._saved_result.detach().exp()
    return [LogSoftmax([at.edge(0)], p, delta.sum(dim, keepdim=True), dim)]


def _layer_norm(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    node, delta = at.node, _first(deltas)
    if at.operands != [0]:
        return _anything(at, deltas)
    d = prod(node._saved_normalized_shape)
    x = node._saved_input.detach().reshape(-1, d)
    mean, inverse = node._saved_result1.reshape(-1, 1), node._saved_result2.reshape(-1, 1)
    weight = node._saved_weight
    g = (delta if weight is None else delta * weight.detach()).reshape(-1, d)
    g = g - g.mean(-1, keepdim=True)
    unit = (x - mean) * inverse
    return [Normalisation([at.edge(0)], unit, g, inverse, True, delta.shape)]


def _rms_norm(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    node, delta = at.node, _first(deltas)
    if at.operands != [0]:
        return _anything(at, deltas)
    d = prod(node._saved_normalized_shape)
    x, inverse = node._saved_input.detach().reshape(-1, d), node._saved_result1.reshape(-1, 1)
    weight = node._saved_weight
    g = (delta if weight is None else delta * weight.detach()).reshape(-1, d)
    return [Normalisation([at.edge(0)], x * inverse, g, inverse, False, delta.shape)]


def _group_norm(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    node, delta = at.node, _first(deltas)
    if at.operands != [0]:
        return _anything(at, deltas)
    x, groups = node._saved_input.detach(), node._saved_group
    mean, inverse = node._saved_result1.reshape(-1, 1), node._saved_result2.reshape(-1, 1)
    weight = node._saved_weight
    if weight is not None:
        delta = delta * weight.detach().reshape(1, -1, *[1] * (delta.ndim - 2))
    g = delta.reshape(len(x) * groups, -1)
    g = g - g.mean(-1, keepdim=True)
    unit = (x.reshape(g.shape) - mean) * inverse
    return [Normalisation([at.edge(0)], unit, g, inverse, True, delta.shape)]


def _entry_product(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    edges, shapes = [at.edge(0), at.edge(1)], (at.shape(0), at.shape(1))
    return [EntryProduct(edges, _first(deltas), *shapes)]


def _division(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    """u/v: −δ/v² between u and v, and 2 δ u/v³ in v."""
    delta, v = _first(deltas), at.node._saved_other.detach()
    built: list[Operation] = []
    if (0, 1) in at.pairs:
        edges, shapes = [at.edge(0), at.edge(1)], (at.shape(0), at.shape(1))
        built.append(EntryProduct(edges, -delta / v.square(), *shapes))
    if (1, 1) in at.pairs:
        bend = (2 * delta * at.node._saved_self.detach() / v**3).sum_to_size(v.shape)
        built.append(Entrywise([at.edge(1)], bend))
    return built


def _matrix_product(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    (one, other), *_ = at.pairs
    delta = _first(deltas) * getattr(at.node, "_saved_alpha", 1)
    return [MatrixProduct([at.edge(one), at.edge(other)], delta, at.shape(one)[-1])]


def _anything(at: CurvedNode, deltas: Sequence[Tensor | None]) -> list[Operation]:
    product = LocalProduct(at, deltas)
    like = _like(deltas)
    generator = torch.Generator(like.device).manual_seed(20_250_101)
    image = product([_signs_like(like, shape, generator) for shape in product.shapes])
    scale = [max(float(each.square().mean()), 1e-60) ** 0.25 for each in image]
    return [AnyOperation(product.edges, product, scale)]


def _like(deltas: Sequence[Tensor | None]) -> Tensor:
    return next(delta for delta in deltas if delta is not None)


def _signs_like(like: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    bits = torch.randint(2, shape, generator=generator, device=like.device)
    return (1 - 2 * bits).to(like.dtype)


@final
class LocalProduct:
    """v ↦ M v of one operation, by differentiating its own backward formula.

    That formula knows its operands as what the saved tensors lead to, and these may depend on each
    other, as in x·σ(x): nothing is let through a node of an operand.
    """

    def __init__(self, at: CurvedNode, deltas: Sequence[Tensor | None]) -> None:
        insist_on_derivative(at.node)
        self.at = at
        call = getattr(at.node, "apply", at.node)
        given = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if d is None else d
            for d, meta in zip(deltas, at.node._input_metadata, strict=True)
        ]
        with torch.enable_grad():
            pulled = call(*given)
            pulled = pulled if isinstance(pulled, tuple) else (pulled,)
            self.pulled = [_sum([pulled[k] for k in operands]) for operands in at.apart]
        self.edges = [at.edge(k) for k, *_ in at.apart]
        self.shapes = tuple(at.shape(k) for k, *_ in at.apart)

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        pairs = [
            (g, v)
            for g, v in zip(self.pulled, vectors, strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:
            return [torch.zeros_like(v) for v in vectors]
        gradients, along = zip(*pairs, strict=True)
        children = {child for child, _ in self.at.node.next_functions if child is not None}
        hooks = [child.register_prehook(_nothing) for child in children]
        try:
            found = torch.autograd.grad(
                gradients, self.edges, along, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        return [
            torch.zeros_like(v) if each is None else each
            for each, v in zip(found, vectors, strict=True)
        ]


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return sum(known[1:], known[0]) if known else None


def _nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


# fmt: off
_ENTRYWISE = {
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cos", "Cosh", "Digamma", "Elu",
    "Erf", "Erfc", "Erfinv", "Exp", "Exp2", "Expm1", "Gelu", "Hardswish", "Lgamma", "Log", "Log10",
    "Log1P", "Log2", "LogSigmoid", "Logit", "Mish", "Pow", "Reciprocal", "Rsqrt", "Sigmoid",
    "Silu", "Sin", "Sinc", "Sinh", "Softplus", "Sqrt", "Tan", "Tanh",
}
# fmt: on

_CLOSED: dict[str, Callable[[CurvedNode, Sequence[Tensor | None]], list[Operation]]] = {
    **dict.fromkeys(_ENTRYWISE, _entrywise),
    **dict.fromkeys(("Softmax", "SafeSoftmax"), _softmax),
    "LogSoftmax": _log_softmax,
    "NativeLayerNorm": _layer_norm,
    "FusedRmsNorm": _rms_norm,
    "NativeGroupNorm": _group_norm,
    "Mul": _entry_product,
    "Div": _division,
    **dict.fromkeys(("Bmm", "Mm", "Baddbmm", "Addmm"), _matrix_product),
}


@final
class Sources:
    """Places in a graph with what is to be sent down from each, in some directions."""

    def __init__(self, directions: int) -> None:
        self.edges: list[GradientEdge] = []
        self.cotangents: list[list[Tensor]] = [[] for _ in range(directions)]
        self._known: dict[tuple[Any, int], int] = {}

    def add(self, edge: GradientEdge, cotangents: Sequence[Tensor]) -> None:
        key = edge.node, edge.output_nr
        if key in self._known:
            for each, cotangent in zip(self.cotangents, cotangents, strict=True):
                each[self._known[key]] = each[self._known[key]] + cotangent
            return
        self._known[key] = len(self.edges)
        self.edges.append(edge)
        for each, cotangent in zip(self.cotangents, cotangents, strict=True):
            each.append(cotangent)


def sources(built: Sequence[Operation], signs: Callable[[torch.Size], Tensor]) -> Sources:
    """One draw: all (a + b)/2 in the first direction, all (a − b)/2 in the second."""
    both = Sources(2)
    for operation in built:
        a, b = operation.sides(*[signs(shape) for shape in operation.signs])
        for edge, one, other in zip(operation.edges, a, b, strict=True):
            both.add(edge, ((one + other) / 2, (one - other) / 2))
    return both
