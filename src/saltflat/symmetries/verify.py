"""Does a rescaling keep the function? In float64, on an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.errors import SaltflatError
from saltflat.risk import logits, unwrap
from saltflat.session import RandomState, lend
from saltflat.symmetries.rescale import Element, duplicate

NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Widen(TorchDispatchMode):
    """Computes in float64 what a model would do in a narrower type, by a cast or with a constant.

    Rounding there would drown the comparison.
    """

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if op is torch.ops.aten._to_copy.default and dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        if not op._schema.is_mutable:
            args, kwargs = widened((args, kwargs))
        return op(*args, **kwargs)


def run(model: nn.Module, example: Any) -> Any:
    """The model on an example: a tensor, a tuple of arguments or a dict of them."""
    args, kwargs = split(example)
    return model(*args, **kwargs)


def split(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def widened(example: Any) -> Any:
    """The example with its floating point tensors in float64."""

    def wide(leaf: Any) -> Any:
        narrow = isinstance(leaf, Tensor) and leaf.dtype in NARROW
        return leaf.detach().double() if narrow else leaf

    return tree_map(wide, example)


def answers(
    model: nn.Module, example: Any, output: Callable[[Any], Any] | None = None
) -> list[Tensor]:
    """What the model answers, computed in float64 on a copy of it."""
    inner = duplicate(unwrap(model))
    device = next((p.device for p in inner.parameters()), torch.device("cpu"))
    state = RandomState(None, device)
    try:
        with lend(inner, set(), torch.float64), torch.no_grad(), Widen():  # type: ignore[no-untyped-call]
            raw = (output or logits)(run(inner, widened(example)))
    finally:
        state.restore()
    return [t.detach() for t in tree_leaves(raw) if isinstance(t, Tensor)]


def verify(
    model: nn.Module,
    element: Element,
    example: Any,
    *,
    output: Callable[[Any], Any] | None = None,
    tolerance: float = 1e-9,
) -> float:
    """The largest change of the outputs in float64, relative to their largest entry.

    Raises SaltflatError if it is larger than `tolerance`: the element is no symmetry.
    """
    wide = duplicate(unwrap(model)).double()
    before, after = answers(wide, example, output), answers(element(wide), example, output)
    drift = 0.0
    for a, b in zip(before, after, strict=True):
        size = float(a.abs().max()) if a.numel() else 0.0
        change = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        drift = max(drift, change / size if size else change)
    if not drift <= tolerance:
        raise SaltflatError(
            "The rescaling does not keep the function: the outputs moved by "
            f"{drift:.3g} of their size (allowed: {tolerance:.3g}). If the element came from "
            "saltflat.symmetries, this is an error in saltflat; please report the model."
        )
    return drift
