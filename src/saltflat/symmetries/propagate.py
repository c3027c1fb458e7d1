"""Walk the tape and let every operation say what it knows about scales."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.symmetries.rules import (
    Operand,
    Outputs,
    Rule,
    Step,
    contractions,
    entrywise,
    pinned,
    rules_of,
    shapes,
)
from saltflat.symmetries.rules.contractions import Contraction
from saltflat.symmetries.scales import PINNED, NotUnderstood, Scales, Terms, View, Weight, squash
from saltflat.symmetries.tape import Call, Ref, Slot, Tape, refs

aten = torch.ops.aten


def opaque(step: Step, *args: Any, **kwargs: Any) -> Outputs:
    """No rule: nothing moves through."""
    raise NotUnderstood


#: what the exporter does not take apart either, so that a network with these is recorded as fast
OPAQUE = rules_of(dict.fromkeys([
    "gelu", "_softmax", "_log_softmax", "tanh", "sigmoid", "exp", "log", "erf", "sin", "cos",
    "arange", "full", "scalar_tensor", "any", "logical_and", "logical_or", "logical_not",
    "bitwise_and", "bitwise_or", "bitwise_not",
], opaque))  # fmt: skip
RULES: dict[Any, Rule] = {
    **{op: rule for op, rule in OPAQUE.items() if torch.Tag.core in op.tags},
    **shapes.RULES, **entrywise.RULES, **contractions.RULES,
}  # fmt: skip

BATCH_NORM = aten._native_batch_norm_legit_no_training.default


@final
class Propagation:
    """The scales of a network, the ids of its parameters and statistics, and what pinned them."""

    def __init__(self, tape: Tape, movable: set[str]) -> None:
        self.scales = Scales()
        self.own: dict[str, Tensor | Weight] = {}  # of parameters
        self.means: dict[str, Tensor] = {}
        self.deviations: dict[str, Tensor] = {}
        self.eps: dict[str, float] = {}
        self.pinning: Counter[str] = Counter()
        self._contract = Contraction(self.scales)
        self._operands: dict[int, Operand] = {}
        calls = tape.live()
        self._used = {r.index for c in calls for r in refs((c.args, c.kwargs))}
        self._used |= {r.index for r in tape.answers}
        self._statistics(tape, calls)
        self._constants(tape, movable)
        self._last = _last_uses(tape, calls)
        for i, call in enumerate(calls):
            self._step(tape, call)
            for index in self._last.get(i, ()):
                self._operands.pop(index, None)
        for answer in tape.answers:
            self.scales.pin(self._operands[answer.index].ids)
        self.scales.settle()
        for own in self.own.values():
            ids = own.own() if isinstance(own, Weight) else own
            if ids is not None:
                self._unread(ids)

    def used(self) -> set[str]:
        """The parameters of which some operation has used an entry."""
        return {n for n, own in self.own.items() if self._is_read(own)}

    def _is_read(self, own: Tensor | Weight) -> bool:
        if isinstance(own, Weight):
            return own.is_read
        return not bool(self.scales.is_fresh(self.scales.find(own)).all())

    def parameters(self) -> dict[str, Terms]:
        """The scales of every parameter's entries."""
        return {
            n: own.final() if isinstance(own, Weight) else ((own, 1.0),)
            for n, own in self.own.items()
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of parameters and statistics."""
        tensors = {**self.own, **self.means, **self.deviations}
        return {n: tuple(t.shape) for n, t in tensors.items()}

    def _statistics(self, tape: Tape, calls: list[Call]) -> None:
        """Running statistics of BatchNorm move; one that serves anything else too is a constant."""
        roles: dict[int, set[tuple[str, float]]] = {}
        for call in calls:
            for ref in refs((call.args, call.kwargs)):
                roles.setdefault(ref.index, set()).add(_role(call, ref))
        for index, seen in roles.items():
            slot, (role, eps) = tape.slots[index], next(iter(seen))
            if slot.buffer is None or len(seen) > 1 or role == "other":
                continue
            ids = self.scales.fresh(slot.shape[0], slot.buffer)
            if role == "mean":
                self.means[slot.buffer] = ids
            else:
                self.deviations[slot.buffer], self.eps[slot.buffer] = ids, eps
            self._operands[index] = Operand(slot.shape, slot.dtype, ids, statistic=role)

    def _constants(self, tape: Tape, movable: set[str]) -> None:
        for index, slot in enumerate(tape.slots):
            if index in self._operands or index not in self._used:
                continue
            if slot.parameter in movable:
                self._operands[index] = self._parameter(slot)
            elif slot.value is not None:
                value = slot.value.detach()
                self._operands[index] = Operand(slot.shape, slot.dtype, constant=value)
            else:  # an input, until a call makes it
                self._operands[index] = Operand(slot.shape, slot.dtype, pinned(slot.shape))

    def _parameter(self, slot: Slot) -> Operand:
        name, shape = slot.parameter, slot.shape
        assert name is not None
        if len(shape) < 2:
            ids = self.scales.fresh(torch.Size(shape).numel(), name).reshape(shape)
            self.own[name] = ids
            return Operand(shape, slot.dtype, ids)
        weight = self.own[name] = Weight(self.scales, shape, name)
        return Operand(shape, slot.dtype, view=View(weight, tuple(range(len(shape)))))

    def _step(self, tape: Tape, call: Call) -> None:
        def operand(leaf: Any) -> Any:
            return self._operands[leaf.index] if isinstance(leaf, Ref) else leaf

        args, kwargs = tree_map(operand, (call.args, call.kwargs))
        outputs = refs(call.outputs)
        inputs = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Operand)]
        if self._fold(tape, call, args, kwargs, inputs, outputs):
            return
        if inputs and inputs[0].view is not None and (dims := _order(call, inputs[0].ndim)):
            view, slot = inputs[0].view.permuted(dims), tape.slots[outputs[0].index]
            self._operands[outputs[0].index] = Operand(slot.shape, slot.dtype, view=view)
            return
        results = self._apply(tape, call, args, kwargs, inputs)
        for ref, ids in zip(outputs, results, strict=True):
            slot = tape.slots[ref.index]
            self._operands[ref.index] = Operand(slot.shape, slot.dtype, ids)

    def _fold(
        self,
        tape: Tape,
        call: Call,
        args: Any,
        kwargs: Any,
        inputs: list[Operand],
        outputs: list[Ref],
    ) -> bool:
        """Run an operation on constants: masks, positions, tables of cosines."""
        random = torch.Tag.nondeterministic_seeded in getattr(call.op, "tags", ())
        if random or not outputs or any(o.constant is None for o in inputs):
            return False

        def value(leaf: Any) -> Any:
            return leaf.constant if isinstance(leaf, Operand) else leaf

        with torch.no_grad():
            result = call.op(*tree_map(value, args), **tree_map(value, kwargs))
        values = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for ref, tensor in zip(outputs, values, strict=True):
            self._operands[ref.index] = Operand(tensor.shape, tensor.dtype, constant=tensor)
        return True

    def _apply(
        self, tape: Tape, call: Call, args: Any, kwargs: Any, inputs: list[Operand]
    ) -> list[Tensor]:
        """What the operation's rule says of its outputs; without one nothing may move."""
        name = str(call.op).removeprefix("aten.").split(".")[0]
        indices = [r.index for r in refs(call.outputs)]
        slots = [tape.slots[i] for i in indices]
        step = Step(call.op, self.scales, self._contract, tuple(s.shape for s in slots), name)
        try:
            rule: Rule = RULES.get(call.op, opaque)
            result = rule(step, *args, **kwargs)
            said = [result] if isinstance(result, Tensor) or result is None else list(result)
            return [
                self._checked(ids, slot, inputs, index in self._used)
                for ids, slot, index in zip(said, slots, indices, strict=True)
            ]
        except Exception:
            # Whatever the reason was, a rule that cannot follow is no rule. What it has said until
            # then restricts the scales and stays.
            pass
        # Not understood: nothing that goes in may change, so that nothing that comes out does. All
        # of them are pinned, also after the first that could move.
        if sum(self._pin(o) for o in inputs):
            self.pinning[name] += 1
        return [pinned(slot.shape) for slot in slots]

    def _checked(self, ids: Tensor | None, slot: Slot, inputs: list[Operand], used: bool) -> Tensor:
        """The ids of one output, if they can be right: what moves is a floating point number.

        Rounding is not homogeneous, be it to integers or to a narrower type, and of complex numbers
        nothing is known here.
        """
        if ids is None:
            if used and (slot.dtype.is_floating_point or slot.dtype.is_complex):
                raise NotUnderstood
            return pinned(slot.shape)
        if tuple(ids.shape) != slot.shape:
            raise NotUnderstood
        if self._moves(ids):
            narrowed = [o for o in inputs if not _holds(slot.dtype, o.dtype)]
            if any(o.constant is None and self._moves(o.ids) for o in narrowed):
                raise NotUnderstood
        return ids

    def _moves(self, ids: Tensor) -> bool:
        return bool((self.scales.find(squash(ids)) > PINNED).any())

    def _pin(self, operand: Operand) -> bool:
        """True iff there was something to pin."""
        if operand.constant is not None:
            return False
        if operand.first is not None:
            operand.first.weight.pin()
            return True
        moving = self._moves(operand.ids)
        self.scales.pin(operand.ids)
        return moving

    def _unread(self, ids: Tensor) -> None:
        """Entries that the example did not use, say positions beyond its length.

        They are used by other inputs in the same way as their neighbours along that dimension, so
        that they get the neighbours' scale. Where there is no such dimension nothing may move.
        """
        unread = self.scales.is_fresh(self.scales.find(ids))
        if not unread.any() or unread.all():
            return
        for d in range(ids.ndim):
            along = unread.movedim(d, 0).reshape(ids.shape[d], -1)
            if bool((along.all(1) == along.any(1)).all()):
                self.scales.tie(ids, [d])
                return
        self.scales.pin(ids)


def _order(call: Call, ndim: int) -> list[int] | None:
    """The order in which an operation puts the dimensions, if that is all it does."""
    order = list(range(ndim))
    if call.op is aten.t.default:
        return order[::-1]
    if call.op is aten.permute.default:
        return [int(d) % ndim for d in call.args[1]]
    if call.op is aten.transpose.int:
        a, b = call.args[1] % ndim, call.args[2] % ndim
        order[a], order[b] = order[b], order[a]
        return order
    return None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of one floating point type is a number of the other."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow and wide.is_floating_point
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.max >= b.max and a.eps <= b.eps and a.tiny <= b.tiny


def _role(call: Call, ref: Ref) -> tuple[str, float]:
    """What a tensor is to an operation: a running mean, a running variance, or something else."""
    if call.op is BATCH_NORM and ref == call.args[3]:
        return "mean", 0.0
    if call.op is BATCH_NORM and ref == call.args[4]:
        return "deviation", float(call.args[6])
    return "other", 0.0


def _last_uses(tape: Tape, calls: list[Call]) -> dict[int, list[int]]:
    """For each call the tensors that nobody needs after it."""
    last: dict[int, int] = {}
    for i, call in enumerate(calls):
        for ref in refs((call.args, call.kwargs)):
            last[ref.index] = i
    answers = {r.index for r in tape.answers}
    freed: dict[int, list[int]] = {}
    for index, i in last.items():
        if index not in answers:
            freed.setdefault(i, []).append(index)
    return freed
