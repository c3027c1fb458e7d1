"""The exact pass: Σ_i J_iᵀ B_i J_i, as traces or diagonals of its blocks, in one sweep over data.

Every direction of every sample's output Hessian is sent backwards once, as activation gradients
only; what arrives at a parameter's operation is squared there in factored form. Chunks of samples
and of directions bound the memory; their sums do not depend on where the cuts fall.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from saltflat.curvature.certify import (
    GENERIC,
    UNUSED,
    Plan,
    channels_last,
    plan_for,
    probe,
)
from saltflat.curvature.factors import Additivity, Factor, direction_count, factor
from saltflat.curvature.generic import PerSample
from saltflat.curvature.layers import Rows, Use
from saltflat.curvature.memory import out_of_memory
from saltflat.curvature.record import Recorder
from saltflat.curvature.terms import Explicit, Term, combine
from saltflat.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    Loss,
    MeanSquaredError,
    divisor,
)
from saltflat.risk import Batch, Risk

Quantity = Literal["trace", "diagonal"]
Certify = Literal["sample", "all", "none"]

# Below this many entries a direction, on a CPU, the overhead of separate backward passes is
# larger than what batching them costs.
_SMALL = 300_000


class NotCertified(Exception):
    """A batch of another shape showed that some parameters are not what the first probe said."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class TooManyDirections(Exception):
    """A batch has more directions a sample than are to be sent one by one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count


@dataclass(frozen=True, slots=True)
class Settings:
    """How the pass is carried out: what is sketched, what is probed, and in what portions."""

    max_directions: int = 1000
    memory_budget: int | None = None
    certify: Certify = "sample"

    def budget(self, device: torch.device) -> int:
        """Bytes that one chunk may take."""
        if self.memory_budget is not None:
            return self.memory_budget
        if device.type == "cuda":
            # What torch has set aside and not given out is free too.
            idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return int((torch.cuda.mem_get_info(device)[0] + idle) // 2)
        return 1 << 30


@dataclass(frozen=True, slots=True)
class Draw:
    """One random sketch of the directions, the same whatever the chunks are."""

    seed: int

    def signs(self, like: Tensor, batch: int, first: int) -> Tensor:
        """±1 for every output of the samples from `first` of a batch on."""
        rows = []
        for i in range(len(like)):
            generator = torch.Generator().manual_seed(hash((self.seed, batch, first + i)) % 2**63)
            rows.append(torch.randint(0, 2, like.shape[1:], generator=generator))
        return (torch.stack(rows) * 2 - 1).to(like)


@final
class Pass:
    """One sweep over the data for the blocks `names`; `sums` and `normaliser` hold the result."""

    def __init__(
        self,
        risk: Risk,
        names: Sequence[str],
        quantity: Quantity,
        settings: Settings,
        *,
        must_be_linear: bool,
        draw: Draw | None = None,
    ) -> None:
        assert isinstance(risk.loss, Loss)
        self.risk, self.loss, self.names = risk, risk.loss, frozenset(names)
        self.quantity, self.settings, self.draw = quantity, settings, draw
        self.must_be_linear = must_be_linear
        self.certified = 0  # samples that the certificate speaks for
        self.normaliser = 0.0
        self.rules: dict[str, set[str]] = {name: set() for name in names}
        self.sums: dict[str, Tensor] = {}
        for name in names:
            shape = risk.parameters[name].shape if quantity == "diagonal" else ()
            device = risk.parameters[name].device
            self.sums[name] = torch.zeros(shape, dtype=torch.float64, device=device)
        self._pending: dict[str, Tensor] = {}  # of the chunk at hand, until it is done
        self._additivity = Additivity(risk.loss) if isinstance(risk.loss, CustomLoss) else None
        self._generic: PerSample | None = None
        self._size: int | None = None  # samples a chunk, once memory has run out

    def run(self, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Σ over all samples, divided by the loss's normaliser."""
        for index, batch in enumerate(batches):
            plan = plan_for(self.risk, batch)
            if index == 0 and self.settings.certify != "all":
                self.certified = plan.samples
            self._batch(batch, index, plan)
        if self._additivity is not None:
            self._additivity.finish()
        scale = divisor(self.loss, self.normaliser)
        return {name: value / scale for name, value in self.sums.items()}

    def _batch(self, batch: Batch, index: int, plan: Plan) -> None:
        start, looked = 0, -1  # `looked`: the chunk that was probed as a whole
        while start < batch.size:
            size = min(self._size or self._chunk(plan, batch), batch.size - start)
            chunk = batch.part(start, start + size)
            self._pending = {}
            try:
                normaliser = self._samples(chunk, index, start, plan)
            except RuntimeError as error:
                if plan.channels_last and not out_of_memory(error):
                    plan = replace(plan, channels_last=False)  # it may not bear that layout
                    continue
                if not out_of_memory(error) or size == 1:
                    raise
                self._size = size // 2
                if self.risk.device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            awake = plan.unseen & self._pending.keys()
            if looked != start and any(bool(self._pending[n].any()) for n in awake):
                plan, looked = probe(self.risk, chunk), start  # now there is something to see
                continue
            if self.settings.certify == "all":
                self.certified += size
            self.normaliser += normaliser
            for name, value in self._pending.items():
                self.sums[name] += value
            start += size

    def _chunk(self, plan: Plan, batch: Batch) -> int:
        """How many samples fit: graph, deltas of some directions, patches, output Hessians.

        The batch is cut evenly. On a GPU chunks stay below 512 samples, above which cuDNN picks
        slower kernels (ResNet-18 on an H200: 5.5 gradients at 1000, 4.8 at 500).
        """
        outputs = plan.outputs.numel()
        entries = 2 * (plan.inputs + plan.activations) + min(outputs, 16) * plan.kept
        each = plan.width * (entries + plan.patches)
        if not isinstance(self.loss, CrossEntropy | MeanSquaredError | BinaryCrossEntropy):
            each += 32 * min(outputs, self.settings.max_directions) ** 2
        most = max(1, self.settings.budget(self.risk.device) // max(1, each))
        if self.risk.device.type == "cuda":
            most = min(most, 512)
        return -(-batch.size // -(-batch.size // most))

    def _samples(self, chunk: Batch, index: int, first: int, plan: Plan) -> float:
        """Put the chunk's sums into `_pending`; return its part of the normaliser."""
        if plan.channels_last:
            chunk = channels_last(chunk)
        with Recorder(self.risk.parameters) as recorder:
            outputs = self.risk.forward(chunk)
        self.risk.check(outputs, chunk)
        plan = self._plan(plan, chunk, outputs, recorder.uses)
        normaliser = self.loss.normaliser(outputs, chunk.targets)
        if self._additivity is not None:
            self._additivity.check(outputs, chunk)
        count = direction_count(self.loss, outputs, chunk.targets)
        if self.draw is None and count > self.settings.max_directions:
            raise TooManyDirections(count)
        sides = factor(self.loss, outputs, chunk, sketched=self.draw is not None)
        if outputs.requires_grad:
            for columns, sign in self._columns(sides, outputs, index, first, plan):
                self._directions_of(chunk, outputs, recorder.uses, plan, columns, sign)
        for name, rules in self.rules.items():
            rules.add(plan.rules[name])
        return normaliser

    def _plan(self, plan: Plan, chunk: Batch, outputs: Tensor, uses: Sequence[Use]) -> Plan:
        """The plan that holds for this chunk: probed anew where the given one does not fit."""
        holds = plan.serves(uses, chunk.size) and not self._wakes(plan, outputs)
        if self.settings.certify == "all" or not holds:
            plan = probe(self.risk, chunk)
        if plan.coupled or (
            self.must_be_linear and not all(plan.certified[name] for name in self.names)
        ):
            raise NotCertified(plan)
        return plan

    def _wakes(self, plan: Plan, outputs: Tensor) -> bool:
        """Whether a parameter that had no effect on the probed samples has one here."""
        unused = [self.risk.parameters[n] for n, rule in plan.rules.items() if rule == UNUSED]
        if not unused or not outputs.requires_grad:
            return False
        found = torch.autograd.grad(
            outputs, unused, torch.ones_like(outputs), retain_graph=True, allow_unused=True
        )
        return any(g is not None for g in found)

    def _columns(
        self, sides: Factor, outputs: Tensor, index: int, first: int, plan: Plan
    ) -> Iterable[tuple[Tensor, Tensor | None]]:
        """Directions in groups whose deltas fit the memory budget."""
        if self.draw is not None:
            noise = self.draw.signs(outputs.detach(), index, first)
            yield sides.sketch(noise)
            return
        width = outputs.element_size() * len(outputs)
        share = self.settings.budget(self.risk.device) // 2
        group = max(1, share // max(1, width * (plan.kept + outputs[0].numel())))
        written = sum(p.numel() for p in self._written_out(plan).values())
        group = min(group, max(1, share // max(1, outputs.element_size() * written)))
        for start in range(0, sides.count, group):
            yield sides.columns(start, min(sides.count, start + group))

    def _directions_of(
        self,
        chunk: Batch,
        outputs: Tensor,
        uses: Sequence[Use],
        plan: Plan,
        columns: Tensor,
        sign: Tensor | None,
    ) -> None:
        live = self._live(uses, plan)
        if sign is not None and not aligned(outputs, live, plan, columns[0]):
            # The model reorders its samples: their signs would meet the wrong ones.
            plan = probe(self.risk, chunk)
            live = self._live(uses, plan)
        kept = backward(outputs, live, plan, columns)
        with torch.no_grad():
            terms: dict[str, list[Term]] = {}
            calls = dict.fromkeys(self.names, 0)
            for use in live:
                for name in use.names.values():
                    calls[name] = calls.get(name, 0) + 1
            for k, use in enumerate(live):
                arrived = kept[k]
                if arrived is None:
                    for name in use.names.values():
                        calls[name] -= 1
                    continue
                rows = Rows(chunk.size, _dim(use, plan))
                for name, term in use.terms(arrived, rows):
                    if name in self.names and name in plan.dims:
                        terms.setdefault(name, []).append(term)
                        if len(terms[name]) == calls[name]:
                            self._add(name, combine(terms.pop(name)), sign)
                kept[k] = arrived = None
            for name, parts in terms.items():
                self._add(name, combine(parts), sign)
        self._generic_terms(chunk, plan, columns, sign)

    def _live(self, uses: Sequence[Use], plan: Plan) -> list[Use]:
        """The uses of wanted parameters that a fast rule serves."""
        return [use for use in uses if self.names & set(use.names.values()) & set(plan.dims)]

    def _written_out(self, plan: Plan) -> dict[str, Tensor]:
        """The parameters that go the per-sample way."""
        return {
            n: self.risk.parameters[n]
            for n, rule in plan.rules.items()
            if rule == GENERIC and n in self.names
        }

    def _generic_terms(
        self, chunk: Batch, plan: Plan, columns: Tensor, sign: Tensor | None
    ) -> None:
        names = list(self._written_out(plan))
        if not names:
            return
        if self._generic is None or set(self._generic.parameters) != set(names):
            self._generic = PerSample(self.risk, names, chunk.part(0, 2))
        for rows, gradients in self._generic.gradients(chunk, columns):
            part = None if sign is None else sign[:, rows]
            for name, gradient in gradients.items():
                self._add(name, Explicit(gradient), part)

    def _add(self, name: str, term: Term, sign: Tensor | None) -> None:
        value = term.trace(sign) if self.quantity == "trace" else term.diagonal(sign)
        waiting = self._pending.get(name)
        self._pending[name] = value if waiting is None else waiting.double().add_(value)


def _dim(use: Use, plan: Plan) -> int:
    return next(plan.dims[name] for name in use.names.values() if name in plan.dims)


def aligned(outputs: Tensor, uses: Sequence[Use], plan: Plan, column: Tensor) -> bool:
    """Whether what arrives at the uses from every other sample stays on that sample's rows."""
    if not uses or len(outputs) == 1:
        return True
    silent = torch.arange(len(outputs), device=outputs.device) % 2 == 1
    cotangent = torch.where(silent.reshape(-1, *[1] * (outputs.ndim - 1)), 0.0, column)
    deltas = torch.autograd.grad(
        outputs, [use.edge for use in uses], cotangent, retain_graph=True, allow_unused=True
    )
    for use, delta in zip(uses, deltas, strict=True):
        rows = Rows(len(outputs), _dim(use, plan))
        if delta is not None and rows.first(delta)[silent].any():
            return False
    return True


def backward(outputs: Tensor, uses: Sequence[Use], plan: Plan, columns: Tensor) -> list[Any]:
    """Send directions backwards; for every use, what is to be kept of each, or None if unreached.

    Small networks take all directions at once through vmap; large ones go direction by direction,
    which is as fast there and needs less memory.
    """
    if not uses:
        return []
    edges = [use.edge for use in uses]
    rows = [Rows(columns.shape[1], _dim(use, plan)) for use in uses]
    entries = plan.activations * columns.shape[1]
    if len(columns) > 1 and entries <= _SMALL:
        try:
            return _all_at_once(outputs, uses, rows, edges, columns)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
    kept: list[list[Any] | None] = [[] for _ in uses]
    for column in columns:
        deltas = torch.autograd.grad(outputs, edges, column, retain_graph=True, allow_unused=True)
        for k, (use, delta) in enumerate(zip(uses, deltas, strict=True)):
            entry = kept[k]
            if delta is None or entry is None:
                kept[k] = None
            else:
                with torch.no_grad():
                    entry.append(use.keep(delta, rows[k]))
    return list(kept)


def _all_at_once(
    outputs: Tensor, uses: Sequence[Use], rows: Sequence[Rows], edges: Any, columns: Tensor
) -> list[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        deltas = torch.autograd.grad(
            outputs, edges, columns, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    with torch.no_grad():
        return [
            None if delta is None else use.keep_all(delta, row)
            for use, row, delta in zip(uses, rows, deltas, strict=True)
        ]
