"""Probes in the space of activations: every sample perturbs every weight by noise of its own.

A change V_i of a weight that sample i alone feels shifts the results of the weight's operation by
t = V_i x at all positions, to first order; its block of the curvature of ⟨r, outputs⟩, r held
fixed, is that of the shifts. So with signs for V_i

    E[⟨t, R_z t⟩] = Tr R_i,    R_z t = the derivative along all t of the gradient at all results,

which is one backward pass through the graph of a gradient, with activations only. Terms of both
signs cancel inside, before they are squared; but the blocks' noise enters each other, which is why
the noise of a block may be scaled: shifts by c t, values divided by c².

For traces V_i itself is not needed: t is any noise with the covariance of V_i x, so where a sample
has fewer positions than its weight has inputs, t = E R with E one sign a position and x = Q R. For
diagonals and forms it is: with G_i = Σ (R_z t) xᵀ, E[G_i V_iᵀ] is the whole block.

A weight that reaches its own operation (recurrent, tied along a path) is not served: its change
would move x as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from saltflat.curvature.contractions import Term
from saltflat.curvature.proof import leaves_first
from saltflat.curvature.rules import Rows, Shift, Use


@final
@dataclass(frozen=True, slots=True)
class Probe:
    """What one draw gave for a parameter: the noise, the shift, and the gradients' change by it."""

    shift: Shift
    rows: Rows
    signs: Tensor
    moved: Tensor
    image: Tensor

    def traces(self) -> Tensor:
        """An estimate a sample, (n,)."""
        return self.rows.first(self.moved * self.image).flatten(1).sum(1, dtype=torch.float64)

    def term(self) -> Term:
        """Two gradients of every sample; the difference of their squares is the estimate."""
        assert self.shift.term is not None
        return self.shift.term(self.signs, self.image)


@final
class ProbedChunk:
    """Probes of one chunk: the curvature of ⟨slope, outputs⟩ in the parameters of `uses`.

    `shifts` holds the parameters that it can serve: what has one use, of a known kind. Of those in
    `written` more than the trace is to be had.
    """

    def __init__(
        self,
        outputs: Tensor,
        slope: Tensor,
        uses: Sequence[tuple[Use, Rows]],
        names: frozenset[str],
        written: frozenset[str] = frozenset(),
    ) -> None:
        self.uses = list(uses)
        calls = [name for use, _ in uses for name in use.names.values()]
        self.shifts: dict[str, tuple[int, Shift]] = {}
        with torch.no_grad():
            for k, (use, rows) in enumerate(self.uses):
                for name, shift in use.shifts(rows, not written.isdisjoint(use.names.values())):
                    if name in names and calls.count(name) == 1:
                        self.shifts[name] = k, shift
        self.edges = [use.edge for use, _ in self.uses]
        with _plain_convolutions(outputs):
            gradients = torch.autograd.grad(
                outputs, self.edges, slope, create_graph=True, allow_unused=True
            )
        # Those that depend on what may be shifted.
        self.gradients = {
            k: g for k, g in enumerate(gradients) if g is not None and g.requires_grad
        }

    def draw(
        self, signs: Callable[[torch.Size], Tensor], scale: Mapping[str, float]
    ) -> Iterator[tuple[str, Probe]]:
        """One probe of every parameter that is served."""
        dealt = {name: signs(shift.signs) for name, (_, shift) in self.shifts.items()}
        moved = {name: shift.of(dealt[name]) for name, (_, shift) in self.shifts.items()}
        shifts: dict[int, Tensor] = {}
        for name, (k, _) in self.shifts.items():
            t = moved[name] * scale.get(name, 1.0)
            shifts[k] = shifts[k] + t if k in shifts else t
        both = [(g, shifts[k].to(g)) for k, g in self.gradients.items() if k in shifts]
        images: Sequence[Tensor | None] = [None] * len(self.edges)
        if both:
            gradients, along = zip(*both, strict=True)
            images = torch.autograd.grad(
                gradients, self.edges, along, retain_graph=True, allow_unused=True
            )
        for name, (k, shift) in self.shifts.items():
            image = images[k]
            image = torch.zeros_like(moved[name]) if image is None else image
            rows, size = self.uses[k][1], scale.get(name, 1.0)
            yield name, Probe(shift, rows, dealt[name], moved[name], image / size)


@contextmanager
def _plain_convolutions(outputs: Tensor) -> Iterator[None]:
    """Gradients through convolutions whose own derivative is one more convolution.

    Torch's also has the weight's part, whether or not it is asked for: by a loop over the groups,
    as many convolutions as a depthwise one has channels.
    """
    hooks = [
        node.register_hook(_replaced(node))
        for node, name, children in leaves_first(outputs.grad_fn)
        if name == "Convolution" and (weight := children[1][0]) is not None
        if hasattr(weight, "variable")  # no result of other operations, that may be asked for
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replaced(node: Any) -> Callable[..., tuple[Tensor | None, ...] | None]:
    def hook(
        gradients: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        if gradients[0] is None or arrived[0] is None:
            return None
        plain: Tensor = _InputGradient.apply(arrived[0], node)  # type: ignore[no-untyped-call]
        return plain, *gradients[1:]

    return hook


@final
class _InputGradient(torch.autograd.Function):
    """The gradient of a convolution in its input, as a function of that in its results."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, node: Any) -> Tensor:
        ctx.weight = node._saved_weight.detach()
        ctx.geometry = (
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )
        given = node._saved_input.detach(), ctx.weight, None
        wanted = [True, False, False]
        gradient: Tensor = torch.ops.aten.convolution_backward(
            arrived, *given, *ctx.geometry, wanted
        )[0]
        return gradient

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor, None]:
        return torch.convolution(along[0], ctx.weight, None, *ctx.geometry), None
