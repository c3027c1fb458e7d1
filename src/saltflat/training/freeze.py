"""Derivatives in which some quantities are constants, though they are not.

Relative flatness is a second derivative in one layer. BatchNorm in training mode couples the
samples above that layer through its statistics; these are held constant in the second derivative.
What comes out still depends on them, and the training gradient must see that. So they pass
through a gate that is shut while the penalty takes its own derivatives, and open afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from saltflat.errors import ModelError


@final
@dataclass(slots=True)
class Switch:
    """Whether gates are shut."""

    shut: bool = True


class _Gate(torch.autograd.Function):
    """The identity, through which no derivative passes while its switch is shut."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, switch: Switch) -> Tensor:
        ctx.switch = switch
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return (None if ctx.switch.shut else gradient), None


def gate(value: Tensor, switch: Switch) -> Tensor:
    """`value`, a constant to derivatives that are taken while `switch` is shut."""
    gated: Tensor = _Gate.apply(value, switch)  # type: ignore[no-untyped-call]
    return gated


@contextmanager
def constant_statistics(
    outputs: Tensor, edges: Iterable[GradientEdge], samples: int, switch: Switch
) -> Iterator[bool]:
    """Within, derivatives of the outputs at the edges take batch statistics for constants.

    Yields whether there are any between the outputs and the edges. BatchNorm's own node is left
    to run, and what it returns is replaced by γ/σ times what arrived.
    """
    handles: list[RemovableHandle] = []
    try:
        for node in _between(outputs, edges):
            _check(node)
            if _couples(node, samples):
                handles.append(_hold(node, switch))
        yield bool(handles)
    finally:
        for handle in handles:
            handle.remove()


def _between(outputs: Tensor, edges: Iterable[GradientEdge]) -> list[Node]:
    """The nodes of the graph on the way from the outputs to any of the edges."""
    parents: dict[Node, list[Node]] = {}
    stack = [outputs.grad_fn] if outputs.grad_fn is not None else []
    seen = set(stack)
    while stack:
        node = stack.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            parents.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                stack.append(child)
    above: dict[Node, None] = {}
    stack = [edge.node for edge in edges]
    while stack:
        for parent in parents.get(stack.pop(), []):
            if parent not in above:
                above[parent] = None
                stack.append(parent)
    return list(above)


def _check(node: Node) -> None:
    name = node.name()
    if "ScaledDotProduct" in name:
        raise ModelError(
            "Fused attention above the layer has no second derivative. Run the model within "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
    if "CompiledFunction" in name:
        raise ModelError(
            "The layers above are compiled to a kernel without second derivatives. Compile with "
            "backend='eager' or not at all, or choose the output layer."
        )


def _couples(node: Any, samples: int) -> bool:
    """BatchNorm with batch statistics. InstanceNorm runs as the same operation on one row."""
    name = node.name()
    if "BatchNorm" not in name or not hasattr(node, "_saved_input"):
        return False
    return bool(node._saved_training) and len(node._saved_input) > 1 and samples > 1


def _hold(node: Any, switch: Switch) -> RemovableHandle:
    x = node._saved_input
    wide = torch.promote_types(x.dtype, torch.float32)
    others = [d for d in range(x.ndim) if d != 1]
    variance = x.to(wide).var(others, correction=0, keepdim=True)
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    factor = gate((variance + eps).rsqrt(), switch)
    if node._saved_weight is not None:
        factor = factor * node._saved_weight.reshape(variance.shape)

    def replace(below: tuple[Tensor, ...], above: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ((above[0] * factor).to(above[0].dtype), *below[1:])

    handle: RemovableHandle = node.register_hook(replace)
    return handle
