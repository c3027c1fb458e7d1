"""Walk the tape and let every operation say what it knows about scales."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.symmetries import linear, pointwise, reductions, views
from saltflat.symmetries.contraction import Contraction
from saltflat.symmetries.ids import PINNED
from saltflat.symmetries.scales import Scales
from saltflat.symmetries.step import NotUnderstood, Operand, Rule, Step, pinned
from saltflat.symmetries.tape import Call, Ref, Tape, refs

RULES: dict[Any, Rule] = {**views.RULES, **pointwise.RULES, **reductions.RULES, **linear.RULES}

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default


@final
class Propagation:
    """The scales of a network, the ids of its parameters and statistics, and what pinned them."""

    def __init__(self, tape: Tape, movable: set[str]) -> None:
        self.scales = Scales()
        self.parameters: dict[str, Tensor] = {}
        self.means: dict[str, Tensor] = {}
        self.deviations: dict[str, Tensor] = {}
        self.eps: dict[str, float] = {}
        self.pinning: Counter[str] = Counter()
        self._contract = Contraction(self.scales)
        self._operands: dict[int, Operand] = {}
        calls = tape.live()
        self._statistics(tape, calls)
        self._constants(tape, calls, movable)
        self._last = _last_uses(tape, calls)
        for i, call in enumerate(calls):
            self._step(tape, call)
            for index in self._last.get(i, ()):
                self._operands.pop(index, None)
        for answer in tape.answers:
            self.scales.pin(self._operands[answer.index].ids)
        self.scales.settle()
        for ids in self.parameters.values():
            self._unread(ids)

    def used(self) -> set[str]:
        """The parameters of which some operation has used an entry."""
        scales = self.scales
        return {
            n for n, i in self.parameters.items() if not bool(scales.is_fresh(scales.find(i)).all())
        }

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
            self._operands[index] = Operand(slot.shape, slot.dtype, ids)

    def _constants(self, tape: Tape, calls: list[Call], movable: set[str]) -> None:
        used = {r.index for c in calls for r in refs((c.args, c.kwargs))}
        used |= {r.index for r in tape.answers}
        for index, slot in enumerate(tape.slots):
            if index in self._operands or index not in used:
                continue
            if slot.parameter in movable:
                assert slot.parameter is not None
                count = int(torch.Size(slot.shape).numel())
                ids = self.scales.fresh(count, slot.parameter).reshape(slot.shape)
                self.parameters[slot.parameter] = ids
                self._operands[index] = Operand(slot.shape, slot.dtype, ids)
            elif slot.value is not None:
                value = slot.value.detach()
                self._operands[index] = Operand(slot.shape, slot.dtype, constant=value)
            else:  # an input, until a call makes it
                self._operands[index] = Operand(slot.shape, slot.dtype, pinned(slot.shape))

    def _step(self, tape: Tape, call: Call) -> None:
        def operand(leaf: Any) -> Any:
            return self._operands[leaf.index] if isinstance(leaf, Ref) else leaf

        args, kwargs = tree_map(operand, (call.args, call.kwargs))
        outputs = refs(call.outputs)
        inputs = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Operand)]
        if self._fold(tape, call, args, kwargs, inputs, outputs):
            return
        found = self._apply(tape, call, args, kwargs, inputs)
        for ref, ids in zip(outputs, found, strict=True):
            slot = tape.slots[ref.index]
            if ids is None or not slot.dtype.is_floating_point:
                ids = pinned(slot.shape)
            assert tuple(ids.shape) == slot.shape, (call.op, tuple(ids.shape), slot.shape)
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
    ) -> list[Tensor | None]:
        outputs = refs(call.outputs)
        name = str(call.op).removeprefix("aten.").split(".")[0]
        rule = RULES.get(call.op)
        if rule is not None:
            shapes = tuple(tape.slots[r.index].shape for r in outputs)
            step = Step(call.op, self.scales, self._contract, shapes, name)
            try:
                found = rule(step, *args, **kwargs)
            except NotUnderstood:
                pass
            else:
                if isinstance(found, Tensor) or found is None:
                    found = [found]
                return list(found)
        # Not understood: nothing that goes in may change, so that nothing that comes out does.
        if any(self._pin(o) for o in inputs):
            self.pinning[name] += 1
        return [None] * len(outputs)

    def _pin(self, operand: Operand) -> bool:
        """True iff there was something to pin."""
        if operand.constant is not None or not operand.dtype.is_floating_point:
            return False
        moving = bool((self.scales.find(operand.ids) > PINNED).any())
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
            along = unread.movedim(d, 0).flatten(1)
            if bool((along.all(1) == along.any(1)).all()):
                self.scales.tie(ids, [d])
                return
        self.scales.pin(ids)


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
    kept = {r.index for r in tape.answers}
    freed: dict[int, list[int]] = {}
    for index, i in last.items():
        if index not in kept:
            freed.setdefault(i, []).append(index)
    return freed
