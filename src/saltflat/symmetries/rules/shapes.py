"""Operations that move entries about: they are run on the ids themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from saltflat.symmetries.rules import Operand, Outputs, Step, ids_of, rules_of
from saltflat.symmetries.scales import ANY, PINNED, NotUnderstood, repeat

aten = torch.ops.aten

#: an index of these types chooses the places where it is not zero
MASKS = (torch.bool, torch.uint8)


def same(step: Step, x: Operand, *args: Any, **kwargs: Any) -> Outputs:
    """Homogeneous of degree one, entry by entry: f(a·x) = a·f(x) for a > 0.

    A cast is so to a type that holds every number of the old one, which is seen to outside.
    """
    return x.ids


def move(step: Step, *args: Any, **kwargs: Any) -> Outputs:
    """The operation itself, on ids."""

    def ids(leaf: Any) -> Any:
        return leaf.ids if isinstance(leaf, Operand) else leaf

    moved = step.op(*tree_map(ids, args), **tree_map(ids, kwargs))
    return moved if isinstance(moved, Tensor) else list(moved)


def reshape(step: Step, x: Operand, *args: Any, **kwargs: Any) -> Outputs:
    """Ids that repeat along the batch are not copied for it."""
    ids, shape = x.ids, step.shape
    batch = ids.ndim > 0 and len(shape) > 0 and ids.shape[0] == shape[0] and ids.stride(0) == 0
    if batch and shape[0] > 0:
        return repeat(ids[:1].reshape(1, *shape[1:])).expand(shape)
    return repeat(ids.reshape(shape))


def pad(step: Step, x: Operand, widths: list[int], value: float = 0) -> Outputs:
    filler = int(ids_of(value))
    padded: Tensor = aten.constant_pad_nd.default(x.ids, widths, filler)
    return padded


def index(step: Step, x: Operand, indices: list[Operand | None], *rest: Any) -> Outputs:
    """Constant indices pick ids; indices that depend on the input could pick any."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if all(i.constant is not None for _, i in given):
        return x.ids[_places(indices)]
    if any(i.dtype in MASKS for _, i in given):
        raise NotUnderstood
    tied = step.scales.tie(x.ids, [d for d, _ in given])
    zeros = [None if i is None else torch.zeros(i.shape, dtype=torch.int64) for i in indices]
    return tied[tuple(slice(None) if i is None else i for i in zeros)]


def _places(indices: list[Operand | None]) -> Any:
    values = [None if i is None else i.constant for i in indices]
    return tuple(slice(None) if v is None else v.cpu() for v in values)


def pick(step: Step, x: Operand, dim: int, i: Operand, *args: Any, **kwargs: Any) -> Outputs:
    """index_select and gather along one dimension."""
    if i.constant is not None:
        moved: Tensor = step.op(x.ids, dim, i.constant.cpu())
        return moved
    tied = step.scales.tie(x.ids, [dim])
    moved = step.op(tied, dim, torch.zeros(i.shape, dtype=torch.int64))
    return moved


def embedding(step: Step, weight: Operand, i: Operand, *args: Any, **kwargs: Any) -> Outputs:
    """Any row may be looked up: all rows of a column share one scale."""
    if (table := weight.first) is not None and weight.shape[0] > 0:
        row = step.scales.fresh(weight.shape[1], table.weight.label)
        table.define((row[None], 1.0))
        return step.only(row)
    return step.only(step.scales.tie(weight.ids, [0])[0])


def embedding_bag(
    step: Step, weight: Operand, i: Operand, offsets: Operand, *args: Any, **kwargs: Any
) -> Outputs:
    if any(isinstance(a, Operand) and a.dtype.is_floating_point for a in (*args, *kwargs.values())):
        raise NotUnderstood  # weights of the samples
    return embedding(step, weight, i)


def index_add(
    step: Step, x: Operand, dim: int, i: Operand, source: Operand, *, alpha: float = 1
) -> Outputs:
    """Rows of the source may land on any row."""
    row = step.scales.tie(x.ids, [dim])
    other = step.scales.tie(source.ids, [dim])
    step.scales.equate(row, other)
    return torch.where(row == ANY, other, row).expand(step.shape)


def index_put(
    step: Step, x: Operand, indices: list[Operand | None], values: Operand, accumulate: bool = False
) -> Outputs:
    """Constant places are written to; with others every place along those dimensions may be."""
    given = [i for i in indices if i is not None]
    if not accumulate and all(i.constant is not None for i in given):
        out = x.ids.clone()
        out[_places(indices)] = values.ids
        return out
    if given != list(indices[: len(given)]) or any(i.dtype in MASKS for i in given):
        raise NotUnderstood
    row = step.scales.tie(x.ids, range(len(given)))
    picked = torch.broadcast_shapes(*[i.shape for i in given])
    written = values.ids.expand(*picked, *step.shape[len(given) :])
    other = step.scales.tie(written, range(len(picked)))
    other = other.reshape(*[1] * len(given), *step.shape[len(given) :])
    step.scales.equate(row, other)
    return torch.where(row == ANY, other, row).expand(step.shape)


def scatter(
    step: Step, x: Operand, dim: int, i: Operand, source: Any, *args: Any, **kwargs: Any
) -> Outputs:
    """Entries of the source may land on, or be added to, any entry along the dimension."""
    if x.ndim == 0 or any(a in ("prod", "multiply") for a in (*args, *kwargs.values())):
        raise NotUnderstood
    row = step.scales.tie(x.ids, [dim])
    part = tuple(slice(0, 1 if d == dim % x.ndim else n) for d, n in enumerate(i.shape))
    ids = ids_of(source)
    other = step.scales.tie(ids.expand(i.shape) if ids.ndim == 0 else ids[_corner(i.shape)], [dim])
    step.scales.equate(row[part], other)
    out = step.scales.find(row).clone()
    out[part] = torch.where(out[part] == ANY, other, out[part])
    return out.expand(step.shape)


def _corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def blank(step: Step, *args: Any, **kwargs: Any) -> Outputs:
    """A tensor made after the shape of another one, filled with a number."""
    name = str(step.op)
    fill = (
        0 if "zeros" in name else next((a for a in args[1:] if not isinstance(a, list | tuple)), 1)
    )
    return ids_of(1 if "empty" in name else fill).expand(step.shape)


def first_of_two(step: Step, x: Operand, *args: Any, **kwargs: Any) -> Outputs:
    """Dropout: what is kept is multiplied by a constant."""
    return [x.ids, torch.full((), PINNED).expand(step.shapes[1])]


RULES = rules_of({
    **dict.fromkeys([
        "permute", "t", "transpose", "expand", "squeeze", "unsqueeze", "select", "slice", "split",
        "split_with_sizes", "unbind", "cat", "stack", "flip", "roll", "repeat", "diagonal",
        "slice_scatter", "select_scatter", "diagonal_scatter", "tril", "triu", "pixel_shuffle",
        "pixel_unshuffle", "unfold", "narrow", "movedim", "alias", "detach", "lift_fresh_copy",
        "channel_shuffle", "rot90", "diag_embed",
    ], move),
    **dict.fromkeys(
        ["relu", "leaky_relu", "abs", "neg", "clone", "positive", "dropout", "conj", "contiguous"],
        same,
    ),
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "flatten", "unflatten"], reshape),
    **dict.fromkeys([
        "full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_full",
        "new_empty",
    ], blank),
    "index": index, "_unsafe_index": index, "constant_pad_nd": pad, "_to_copy": same, "to": same,
    "index_select": pick, "gather": pick, "embedding": embedding, "_embedding_bag": embedding_bag,
    "_embedding_bag_forward_only": embedding_bag, "index_add": index_add, "index_put": index_put,
    "native_dropout": first_of_two, "scatter_add": scatter, "scatter": scatter,
    "scatter_reduce": scatter,
})  # fmt: skip
# One looks at bits as if they were of another type, the other takes its start from a tensor.
del RULES[aten.view.dtype], RULES[aten.narrow.Tensor]
