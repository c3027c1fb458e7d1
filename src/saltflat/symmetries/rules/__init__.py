"""What a rule is given, one operation and its operands with the ids of their scales, and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from saltflat.symmetries.scales import ANY, PINNED, NotUnderstood, Scales, View


@final
@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that goes into an operation: its ids or, where it is a constant, its value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    given: Tensor | None = None
    constant: Tensor | None = None
    statistic: str | None = None  # "mean" or "deviation": it moves with BatchNorm's input
    view: View | None = None  # of a weight, the entries of which need not have ids

    @property
    def first(self) -> View | None:
        """The weight, if this is its first use."""
        return self.view if self.view is not None and self.view.weight.is_new else None

    @cached_property
    def ids(self) -> Tensor:
        if self.given is not None:
            return self.given
        if self.view is not None:
            return self.view.ids
        assert self.constant is not None
        return constant_ids(self.constant)

    @property
    def ndim(self) -> int:
        return len(self.shape)


def constant_ids(value: Tensor) -> Tensor:
    """Zero stays zero and infinity infinite under any scale; other constants are pinned."""
    free = (value == 0) | torch.isinf(value)
    if not free.any():
        return torch.tensor(PINNED).expand(value.shape)
    return torch.where(free, ANY, PINNED).cpu()


def pinned(shape: Sequence[int]) -> Tensor:
    return torch.tensor(PINNED).expand(tuple(shape))


def ids_of(value: Any) -> Tensor:
    """The ids of an operand or of a Python number."""
    if isinstance(value, Operand):
        return value.ids
    if isinstance(value, complex):
        raise NotUnderstood
    return constant_ids(torch.tensor(float(value)))


@dataclass(frozen=True, slots=True)
class Step:
    """One operation; `shapes` are those of its outputs, `where` names it."""

    op: Any
    scales: Scales
    contract: Callable[[Tensor, Tensor], Tensor]
    shapes: tuple[tuple[int, ...], ...]
    where: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    def only(self, ids: Tensor) -> list[Tensor | None]:
        """Ids of the first output; of the others nothing is said."""
        return [ids.expand(self.shape), *[None] * (len(self.shapes) - 1)]


#: ids of the outputs; None where nothing is said of an output, which must then not be used unless
#: it holds integers or truth values
Outputs = Tensor | Sequence[Tensor | None] | None
Rule = Callable[..., Outputs]


def rules_of(table: Mapping[str, Rule]) -> dict[Any, Rule]:
    """The rule of every form of the operations that the table names."""
    return {form: rule for name, rule in table.items() for form in overloads(name)}


def overloads(name: str) -> list[Any]:
    """The forms of an operation that write to nothing but their result."""
    packet = getattr(torch.ops.aten, name)
    forms = [getattr(packet, o) for o in packet.overloads()]
    return [o for o in forms if not o._schema.is_mutable]
