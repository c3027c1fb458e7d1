"""Run a model on an example: as it is, in float64, with other values in its parameters.

Does a rescaling, or a copy, keep the answers? To run a model nothing is copied: a deep copy may
still compute with the parameters of the model that it was made of (see `check_copy`), whereas a
model that is lent is the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.errors import ModelError, SaltflatError
from saltflat.memory import fails_again, out_of_memory
from saltflat.risk import Chooser, Output, answer_of, unwrap
from saltflat.session import RandomState, TensorValues, arguments, lend
from saltflat.symmetries.element import Element, duplicate
from saltflat.symmetries.group import Group

Values = Mapping[str, Tensor] | Callable[[str], Tensor | None]

NARROW = (torch.float32, torch.float16, torch.bfloat16)


@final
class Widen(TorchDispatchMode):
    """Computes in float64 what a model would do in a narrower type, by a cast or with a constant.

    Rounding there would drown the comparison. `rounded` holds the types that were left: something
    is written into a tensor of such a type, or an operator of the model's own makes one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not op._schema.is_mutable and any(t.dtype in NARROW for t in tensors):
            args, kwargs = widened((args, kwargs))
        result = op(*args, **kwargs)
        # What is made of numbers alone is made in the default type.
        if not op._schema.is_mutable and not tensors:
            result = widened(result)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.rounded |= {leaf.dtype for leaf in leaves if leaf.dtype in NARROW}
        return result


def run(model: nn.Module, example: Any) -> Any:
    """The model on inputs."""
    args, kwargs = arguments(example)
    return model(*args, **kwargs)


def widened(example: Any) -> Any:
    """The example with its floating point tensors in float64."""

    def wide(leaf: Any) -> Any:
        narrow = isinstance(leaf, Tensor) and leaf.dtype in NARROW
        return leaf.detach().double() if narrow else leaf

    return tree_map(wide, example)


@final
class Evaluation:
    """A model that is lent, and its answers to one example.

    `own` holds the values of its parameters and buffers, `start` the same in the type that is
    computed in. In another type than its own the model is called with other tensors in their place
    (`borrowed`): parameters that changed their type, if only for a while, would be cut off from
    graphs that the user holds and from hooks on their gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        output: Chooser,
        random: RandomState,
        mode: Any,
        differentiable: bool,
        own: Mapping[str, Tensor],
    ) -> None:
        self.model, self.example, self.output, self.own = model, example, output, own
        self._random, self._mode = random, mode
        named = dict(model.named_parameters())
        self._held = {**named, **dict(model.named_buffers())}
        self._wide = isinstance(mode, Widen)
        self._replaced: bool | None = None  # not known before the first answers
        self._contiguous = False  # whether values must be
        self._tensors = dict(self._held)
        if self._wide:
            self._tensors = {
                name: _leaf(t, differentiable and name in named) for name, t in self._held.items()
            }
        self.parameters = {name: self._tensors[name] for name in named}

    @property
    def borrowed(self) -> bool:
        return bool(self._replaced)

    @cached_property
    def start(self) -> dict[str, Tensor]:
        return {name: widened(t) if self._wide else t for name, t in self.own.items()}

    @property
    def rounded(self) -> set[torch.dtype]:
        """The types narrower than float64 that were met."""
        if isinstance(self._mode, Widen):
            return self._mode.rounded
        return {t.dtype for t in self.own.values() if t.dtype in NARROW}

    def answers(self, values: Values | None = None) -> list[Tensor]:
        """The tensors that are the answer, with some of the values replaced.

        The model gets copies, so that a forward pass which writes to its parameters does no harm,
        and the same random numbers every time. Values that a function makes are not copied: a
        tensor for a name, or None to leave that one as it is.
        """
        if self._wide and self._replaced is None:
            answers = self._borrowing(values)
            self._replaced = answers is not None
            if answers is not None:
                return answers
            self._contiguous, self._tensors = True, self._held
            self.parameters.update({name: self._held[name] for name in self.parameters})
        self._put(values)
        return self._answers()

    def _answers(self) -> list[Tensor]:
        raw = self.output(self._call())
        return [t for t in tree_leaves(raw) if isinstance(t, Tensor)]

    def _put(self, values: Values | None) -> None:
        for name, tensor in self._tensors.items():
            own = self.own[name]
            dtype = torch.float64 if self._wide and own.dtype in NARROW else own.dtype
            made = None
            if callable(values):
                tensor.data = tensor.data.new_empty(0)  # what it held is not needed any more
                made = values(name)
            if made is None:
                given = values if isinstance(values, Mapping) else {}
                made = given.get(name, own).to(dtype, copy=True)
            made = made.to(dtype)
            tensor.data = made.contiguous() if self._contiguous else made
        self._random.restore()

    def _call(self) -> Any:
        if not self._replaced:
            return run(self.model, self.example)
        return functional_call(self.model, self._tensors, *arguments(self.example))

    def _borrowing(self, values: Values | None) -> list[Tensor] | None:
        """The answers, if the model computes with the tensors that it is called with.

        One that holds its parameters in a list beside, or a ScriptModule, does not.
        """
        reads = _Reads({memory(t): name for name, t in self._held.items() if memory(t)})
        self._replaced = True

        def attempt() -> list[Tensor]:
            self._put(values)
            with reads:
                return self._answers()

        for self._contiguous in (False, True):
            try:
                answers = attempt()
                return None if reads.met else answers
            except Exception as error:
                if not out_of_memory(error) and not fails_again(attempt):
                    raise
            if all(t.is_contiguous() for t in self._tensors.values()):
                break
        return None


def _leaf(tensor: Tensor, differentiable: bool) -> Tensor:
    """Room for the tensor in float64."""
    dtype = torch.float64 if tensor.dtype in NARROW else tensor.dtype
    room = torch.empty(0, dtype=dtype, device=tensor.device)
    return room.requires_grad_(differentiable and room.is_floating_point())


@contextmanager
def evaluation(
    model: nn.Module,
    example: Any,
    output: Chooser,
    *,
    wide: bool,
    differentiable: bool = False,
    values: TensorValues | None = None,
) -> Iterator[Evaluation]:
    """Lend the model for answers, in float64 if `wide` and in its own precision if not.

    `values` are a copy of what its tensors hold; without, one is made.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    state = RandomState(None, device)
    measured = {id(p) for p in model.parameters()} if differentiable else set[int]()
    mode: Any = Widen() if wide else nullcontext()
    tensors = (*model.named_parameters(), *model.named_buffers())
    own = {name: t.data for name, t in tensors}  # which the mode would widen
    try:
        with lend(model, measured, None, (), values), torch.set_grad_enabled(differentiable), mode:
            shown = widened(example) if wide else example
            yield Evaluation(model, shown, output, state, mode, differentiable, own)
    finally:
        state.restore()


def change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest change of the answers, relative to the largest entry of each.

    An infinity that stays, or a NaN, is no change; NaN where no answer holds a finite number: then
    nothing was compared.
    """
    largest, compared = 0.0, not any(t.numel() for t in before)
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return math.inf
        a, b = _real(a), _real(b)
        finite = a.isfinite()
        if not bool(finite.all()):
            if not torch.equal(a[~finite].nan_to_num(0.5), b[~finite].nan_to_num(0.5)):
                return math.inf
            a, b = a[finite], b[finite]
        if a.numel():
            compared = True
            moved = float((a - b).abs().max())
            largest = max(largest, moved / (float(a.abs().max()) or 1.0))
            if math.isnan(moved):
                return math.inf
    return largest if compared else math.nan


def _real(t: Tensor) -> Tensor:
    t = t.detach()
    return torch.view_as_real(t.resolve_conj()).double() if t.is_complex() else t.double()


# Copies.


@final
class _Reads(TorchDispatchMode):
    """Sees whether an operation meets the memory of certain tensors."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners = owners
        self.met: dict[str, None] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (name := self.owners.get(memory(leaf))):
                self.met[name] = None
        return op(*args, **(kwargs or {}))


def memory(tensor: Tensor) -> int:
    """Where a tensor's numbers lie; 0 for one that has none, or none of its own."""
    plain = tensor.layout == torch.strided and tensor.device.type != "meta"
    try:
        return tensor.untyped_storage().data_ptr() if plain and tensor.numel() else 0
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return 0


def check_copy(
    model: nn.Module,
    copied: nn.Module,
    example: Any,
    output: Chooser,
    values: TensorValues | None = None,
) -> None:
    """Refuse a copy that computes with the parameters of the model that it was made of.

    A function that closes over the model (`lambda t: self.fc(t)` kept in a list, a `forward` that
    was patched) is not copied by `deepcopy` and goes on with the original's parameters: what is
    done to the copy would be without effect. It is seen where the copy runs, by the memory that
    its operations meet.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    reads = _Reads({memory(t): name for name, t in tensors if memory(t)})
    try:
        with evaluation(copied, example, output, wide=False, values=values) as lent, reads:
            run(lent.model, lent.example)
    except Exception:
        if not reads.met:
            raise
    if reads.met:
        names = list(reads.met)
        raise ModelError(
            "A deep copy of the model still computes with the original's "
            f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}, so that nothing done to the "
            "copy would count. A function that closes over the model (a lambda that uses self, a "
            "patched forward) is not copied: make it a method, or give the model a __deepcopy__."
        )


# Rescalings.

#: models with more parameters than this are verified in their own precision
WIDEST = 10_000_000
#: allowed change of the outputs, by the narrowest type that is computed in
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 5e-2,
}
#: what an honest network makes of rounding may be this much more than of one relative rounding
_AMPLIFIED = 100.0
#: but never as much as this
_MOST = 0.1


def answers(model: nn.Module, example: Any, output: Output | None = None) -> list[Tensor]:
    """What the model answers, computed in float64."""
    with evaluation(unwrap(model), example, answer_of(output), wide=True) as lent:
        return [t.detach() for t in lent.answers()]


def verify(
    model: nn.Module,
    element: Element,
    example: Any,
    *,
    output: Output | None = None,
    tolerance: float = 1e-9,
) -> float:
    """The largest change of the outputs in float64, relative to their largest entry.

    Raises SaltflatError if it is larger than `tolerance`: the element is no symmetry.
    """
    wide = duplicate(unwrap(model)).double()
    drift = change(answers(wide, example, output), answers(element(wide), example, output))
    if not drift <= tolerance:
        raise SaltflatError(
            "The rescaling does not keep the function: the outputs moved by "
            f"{drift:.3g} of their size (allowed: {tolerance:.3g}). If the element came from "
            "saltflat.symmetries, this is an error in saltflat; please report the model."
        )
    return drift


def confirm(
    group: Group,
    model: nn.Module,
    example: Any,
    output: Chooser,
    *,
    steady: bool,
    values: TensorValues | None = None,
) -> tuple[str, ...]:
    """Apply random elements of a group that was just found, and compare the outputs.

    One at the model's own parameters and one, if some of these are zero, beside them: what is zero
    hides from a rescaling, as the bias or the second factor of a low-rank update do at the start of
    training. Not so where values decide what is computed (`steady` is False): other parameters
    could take another branch.

    Raises SaltflatError where the outputs move: a rule is wrong. Returns notes on what could not be
    compared.
    """
    if len(group) == 0:
        return ()
    parameters = list(model.parameters())
    few = sum(p.numel() for p in parameters) <= WIDEST
    wide = few and all(p.device.type != "mps" for p in parameters)  # which has no float64

    def compared(wide: bool) -> tuple[str, ...]:
        with evaluation(model, example, output, wide=wide, values=values) as lent, torch.no_grad():
            return _Confirmation(group, lent, steady).notes()

    if not wide:
        return compared(wide=False)
    try:
        return compared(wide=True)
    except SaltflatError:
        raise
    except Exception as error:
        # Some models cannot run in float64: they look at bits, or own an operator for one type.
        if not out_of_memory(error) and not fails_again(lambda: compared(wide=True)):
            raise
        words = (str(error) or "no message").splitlines()[0]
        note = f"verified in its own precision: in float64 {type(error).__name__}: {words}"
    return (*compared(wide=False), note)


@final
@dataclass(frozen=True)
class _Confirmation:
    """Elements of a group applied to a lent model."""

    group: Group
    lent: Evaluation
    steady: bool

    def notes(self) -> tuple[str, ...]:
        start = self.lent.start
        note = self._compare(start, self.lent.answers(start), self._logs(0))
        beside = _beside(start, set(self.group.parameters())) if self.steady else {}
        if note or not beside:
            return (note,) if note else ()
        point = {**start, **beside}
        try:
            before = self.lent.answers(point)
        except Exception as error:
            if out_of_memory(error) or not fails_again(partial(self.lent.answers, point)):
                raise
            return ()  # beside its own parameters the model need not be defined
        self._compare(point, before, self._logs(1))
        return ()

    def _compare(self, point: Mapping[str, Tensor], before: list[Tensor], logs: Tensor) -> str:
        """Refuse an element that moves the outputs; a note if that cannot be seen."""
        drift = self._drift(point, before, logs)
        if math.isnan(drift):
            return "not verified: the outputs on the example are not finite"
        if drift <= self._tolerance:
            return ""
        if not change(before, self.lent.answers(point)) <= self._tolerance:
            return "not verified: the outputs on the example differ from run to run"
        if drift <= min(_AMPLIFIED * self._rounding(point, before), _MOST):
            return ""
        raise SaltflatError(self._complaint(point, before, drift, logs))

    def _logs(self, seed: int) -> Tensor:
        """Random powers of two: where exponents are whole, multiplying by them does not round."""
        generator = torch.Generator().manual_seed(seed)
        widest = 1 if self.lent.rounded & {torch.float16, torch.bfloat16} else 2
        powers = torch.randint(-widest, widest + 1, (len(self.group),), generator=generator)
        return powers.double() * math.log(2)

    def _drift(self, point: Mapping[str, Tensor], before: list[Tensor], logs: Tensor) -> float:
        element = self.group.element(logs)

        def values(name: str) -> Tensor | None:
            return element.applied(name, point[name]) if element.moves(name) else None

        try:
            return change(before, self.lent.answers(values))
        except Exception as error:
            there, here = (partial(self.lent.answers, each) for each in (values, point))
            if out_of_memory(error) or not fails_again(there) or fails_again(here):
                raise
            return math.inf  # it runs at the point itself

    @property
    def _tolerance(self) -> float:
        return max(TOLERANCES[dtype] for dtype in (torch.float64, *self.lent.rounded))

    def _rounding(self, point: Mapping[str, Tensor], before: list[Tensor]) -> float:
        """How far the outputs move if the parameters do by one rounding each."""
        generator = torch.Generator().manual_seed(0)
        moved = {}
        for name in self.group.parameters():
            value = point[name]
            signs = torch.randint(2, value.shape, generator=generator).to(value.device) * 2 - 1
            moved[name] = value * (1 + torch.finfo(value.dtype).eps * signs)
        drift = change(before, self.lent.answers({**point, **moved}))
        return drift if math.isfinite(drift) else 0.0

    def _complaint(
        self, point: Mapping[str, Tensor], before: list[Tensor], drift: float, logs: Tensor
    ) -> str:
        name = self._culprit(point, before, logs)
        return (
            "Rescalings that saltflat found do not keep the model's function: the outputs on the "
            f"example moved by {drift:.3g} of their size (allowed: {self._tolerance:.3g}), that of "
            f"{name} for one. This is a defect of saltflat, not of the model. Please report it "
            f"with the layers around {name.split('[')[0]}; operations that let no scale through: "
            f"{', '.join(self.group.pinned_by) or 'none'}."
        )

    def _culprit(self, point: Mapping[str, Tensor], before: list[Tensor], logs: Tensor) -> str:
        """A generator that moves the outputs, by halves."""
        suspects = torch.arange(len(logs))
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            part = torch.zeros_like(logs)
            part[half] = logs[half]
            wrong = not self._drift(point, before, part) <= self._tolerance
            suspects = half if wrong else suspects[len(half) :]
        return self.group.generators[int(suspects[0])].name


def _beside(start: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """The parameters that hold zeros, with small numbers instead of these."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name in sorted(names):
        value = start[name]
        zero = value == 0
        if bool(zero.any()):
            wide = torch.promote_types(value.dtype, torch.float32)
            root = float(torch.linalg.vector_norm(value, dtype=wide)) / math.sqrt(value.numel())
            count = int(zero.sum())
            noise = torch.randn(count, generator=generator, dtype=torch.float64)
            moved[name] = value.clone()
            moved[name][zero] = (0.1 * (root or 1.0) * noise).to(value)
    return moved
