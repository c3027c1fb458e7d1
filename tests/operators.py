"""PyTorch's own database of operators, each as a small network with a parameter on every operand.

Nothing here knows how saltflat finds symmetries: a network, its inputs, and what it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

#: how operands come from parameters: as they are, or times an input
FORMS = ("weights", "activations")
OPERATORS = {
    f"{op.name}.{op.variant_test_name}".rstrip("."): op
    for op in op_db
    if op.supports_dtype(torch.float64, "cpu")
}


@dataclass(frozen=True)
class Sample:
    """A call of an operator: `leaves` are its arguments, flattened."""

    call: Callable[..., Any]
    leaves: list[Any]
    shape: Any

    def operands(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if is_operand(leaf)]

    def having(self, **options: Any) -> Sample:
        """The same call with other keywords, where it has them."""
        args, kwargs = tree_unflatten(self.leaves, self.shape)
        leaves, shape = tree_flatten(
            (args, kwargs | {k: options[k] for k in options.keys() & kwargs.keys()})
        )
        return replace(self, leaves=leaves, shape=shape)

    def __call__(self, operands: list[Tensor]) -> list[Tensor]:
        rest = iter(operands)
        leaves = [next(rest) if is_operand(leaf) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.shape)
        return [t for t in tree_leaves(self.call(*args, **kwargs)) if isinstance(t, Tensor)]


def is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float64 and leaf.layout == torch.strided


def samples(name: str, count: int) -> Iterator[Sample]:
    """The database's first samples of an operator, drawn from a fixed seed."""
    op = OPERATORS[name]
    torch.manual_seed(0)
    for given in islice(op.sample_inputs("cpu", torch.float64), count):
        leaves, shape = tree_flatten(((given.input, *given.args), dict(given.kwargs)))
        sample = Sample(op.op, [detached(leaf) for leaf in leaves], shape)
        if sample.operands():
            yield sample


def detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class Around(nn.Module):
    """An operator between parameters: each operand has its own, and each output is read by one."""

    def __init__(self, sample: Sample, form: str) -> None:
        super().__init__()
        self.sample, self.form = sample, form
        values = sample.operands()
        if form == "activations":
            values = [torch.rand_like(v) + 0.5 for v in values]
        self.operands = nn.ParameterList(nn.Parameter(v.clone()) for v in values)
        torch.manual_seed(0)
        outputs = [real(t) for t in sample(sample.operands())]
        self.readout = nn.ParameterList(
            nn.Parameter(torch.rand(t.shape, dtype=torch.float64) + 0.5)
            for t in outputs
            if t.is_floating_point()
        )

    def example(self) -> tuple[Tensor, ...]:
        """Inputs at which the operator is called as in the database."""
        values = self.sample.operands()
        if self.form == "weights":
            return (torch.ones((), dtype=torch.float64),)
        return tuple(v / p.detach() for v, p in zip(values, self.operands, strict=True))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        operands = list(self.operands)
        if self.form == "activations":
            operands = [p * x for p, x in zip(operands, inputs, strict=True)]
        outputs = [real(t) for t in self.sample(operands)]
        readout = iter(self.readout)
        return [t * next(readout) if t.is_floating_point() else t for t in outputs]


def real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def answers(model: nn.Module, example: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(*example)


def drift(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest change, relative to the largest entry; the same infinities are no change."""
    found = 0.0
    for a, b in zip(before, after, strict=True):
        a, b = (t.to_dense().double() for t in (a, b))
        same = (a == b) | (a.isnan() & b.isnan())
        change = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
        finite = a[a.isfinite()].abs()
        size = float(finite.max()) if finite.numel() else 0.0
        if a.numel():
            found = max(found, float(change.max()) / (size or 1.0))
    return found
