"""Is the backward pass the derivative of the forward pass? Asked of values, by differences.

Autograd differentiates what it is shown. A part of the forward pass under `no_grad`, a value that
was detached, a straight-through estimator, a reversed gradient or a hook that changes gradients
make it give something else than the derivative of the outputs, and second derivatives follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import isfinite, isnan, sqrt
from statistics import median_low
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from saltflat.curvature.loss_hessian import insist_on_derivatives
from saltflat.curvature.proof import narrowest
from saltflat.curvature.rules import Safe
from saltflat.errors import LossError, ModelError, listed
from saltflat.losses import scalar
from saltflat.memory import out_of_memory
from saltflat.risk import Batch, Risk
from saltflat.sharded import held, is_sharded, move, on_request, shard_like, whole_of

_NAMED = 5  # parameters that an error names


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Steps, relative to the parameters, and the relative difference of slopes that agree."""

    steps: tuple[float, ...]
    tolerance: float
    wide: bool = True  # whether values have the digits of float64

    def raised(self, share: float) -> _Comparison:
        """For parameters that add so small a share to the slope.

        With steps h rounding is about ε/(h share) of their slope, and about h of their ReLUs change
        sides: both are small at h ~ sqrt(ε/share), which is no more than a few hundredths of them.
        """
        least = min(2 * sqrt(torch.finfo(torch.float64).eps / max(share, 1e-14)), _LARGEST)
        if not self.wide or share >= 1 or least <= self.steps[0]:
            return self
        steps = tuple(min(least / self.steps[0] * step, _LARGEST) for step in self.steps)
        return replace(self, steps=steps, tolerance=max(self.tolerance, 10 * least))

    def same(self, a: float, b: float, noise: float = 0.0) -> bool:
        return isfinite(b) and abs(a - b) <= self.tolerance * max(abs(a), abs(b)) + noise


# In float64 quotients of smooth functions are right to about 1e-9; a ReLU that changes sides costs
# its share of the slope, which at one of the steps is small. What is detached in part must not be.
_FINE = _Comparison((1e-6, 1e-5, 1e-4, 1e-7, 1e-8, 1e-9), 1e-5)
_QUICK = _Comparison((2e-5,), 1e-3, wide=False)  # a ReLU changes sides in one check of ten
_NEAR = _Comparison((1e-9,), 1e-5)  # of millions of ReLUs, few change sides
_COARSE = _Comparison((0.1, 0.03, 0.01), 0.2, wide=False)
_LARGEST = 0.03  # step
# Of float32, each would be rounding alone; two in a row agree where curvature is small enough.
_DIGITS = _Comparison((3e-8, 1e-8, 3e-9, 1e-9, 3e-10, 1e-10), 1e-4)
# What curvature adds to a quotient changes ninefold from each of these steps to the next, and what
# rounding adds threefold: two in a row agree with a slope where both are small, and hardly else.
_SMALL = _Comparison((3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5), 0.01, wide=False)


def check_derivative(
    risk: Risk,
    batch: Batch,
    cotangent: Tensor,
    gradients: Mapping[str, Tensor],
    largest: Mapping[str, float],
    *,
    together: int | None = None,
    cuts: bool = False,
) -> None:
    """Refuse a model whose gradients of ⟨cotangent, outputs⟩ are not its slopes.

    `largest` are the gradients' largest entries, NaN where one is.

    Asked first where the model stands, of some rows of every parameter, in its own precision and
    then in float64, which settles it for most: a large network has ReLUs whose sides rounding and
    steps change, and takes float64 gradients and the smallest step. If that does not agree, of all
    entries and a little way off, where no ReLU or maximum has a tie. `together` is how many samples
    may be taken at a time, if not all. With `cuts` something was hidden from autograd in the
    forward pass: float32 does not settle it then, which would not see a thousandth.
    """
    gradients = {name: g for name, g in gradients.items() if g.numel()}
    if risk.differentiable or not gradients:
        return
    if names := [name for name in gradients if isnan(largest[name])]:
        raise ModelError(
            f"The gradient of the outputs in {listed(names)} is NaN, though the outputs are "
            "finite: a root or a norm of 0, say, has no derivative. Keep it away from 0 (add a "
            "small number under the root), or leave these parameters out with parameters=[…]."
        )
    single = next(iter(gradients.values())).dtype != torch.float64
    question = _Question(risk, batch, cotangent, _QUICK if single else _FINE)
    agrees = question.agrees_here(gradients)
    if agrees and (risk.sharded or not (single and cuts)):
        return
    if risk.sharded:
        if not question.agrees_somehow(gradients, single):
            raise ModelError(f"{_NO_DERIVATIVE}, along one direction of all parameters. {_LOOK}.")
        return
    try:
        blamed = question.in_float64(lambda wide: wide.blamed_nearby(gradients, together))
    except RuntimeError as error:
        if agrees:
            return
        if out_of_memory(error):
            raise
        # It cannot be run in float64: it casts to a type of few digits, perhaps.
        blamed = replace(question, how=_COARSE).disagreeing(gradients)
    # A model that changes from pass to pass is refused, by name, when it is given back.
    if blamed and _steady(risk, batch):
        raise ModelError(
            f"{_NO_DERIVATIVE}: {_listed(blamed)}. {_LOOK}, or leave these parameters out with "
            "parameters=[…]."
        )


def check_second_derivative(risk: Risk, batch: Batch) -> None:
    """Refuse a model whose second derivatives are not the slopes of its gradients.

    Torch's own operations are trusted. A function of the user's has a backward pass that is the
    derivative and need not have one itself: what is detached in it is held fixed. Asked in
    float64, as a model that cannot be run so is not judged.
    """
    if risk.sharded:
        return
    try:
        with torch.enable_grad():
            question = _Question(risk, batch, torch.empty(0), _FINE)
            found = question.in_float64(_Question.bent)
            if found and question.has(found):
                return
    except Exception as error:  # of a function that takes no float64, of whatever kind
        if out_of_memory(error):
            raise
        return  # what has no second derivative is told where it is needed
    if found and _steady(risk, batch):
        name, (said, bend) = next(iter(found.items()))
        raise ModelError(
            "The second derivative of the model is not the slope of its gradient in "
            f"{listed(list(found))}: in {name} that is {bend:.4g} along one direction of all "
            f"parameters, and autograd says {said:.4g}. Look for detach(), ctx attributes and "
            "numpy in the backward of functions of your own: what the gradient is made of must be "
            "saved with save_for_backward and differentiated too. Gauss–Newton quantities do "
            "not need it: curvature='ggn'."
        )


_NO_DERIVATIVE = (
    "The backward pass of the model is not the derivative of its forward pass, so that autograd "
    "knows no Hessian of it"
)
_LOOK = (
    "Look for values that are detached or computed under torch.no_grad(), straight-through "
    "estimators (rounding, quantisation), reversed gradients and hooks that change gradients; "
    "measure the model without them"
)


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that add about as much to the slope: where they go, and their slope there."""

    direction: dict[str, Tensor]
    slope: float
    share: float  # of the largest slope of a group; 1 if what noise leaves needs no other step
    noise: float  # in the slope


def _groups(
    parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], way: _Way, wide: bool
) -> Iterator[_Group]:
    """Directions of parameters that add about as much to the slope, so that none goes unseen.

    What is next to nothing of the largest is noise: what is left of gradients that cancel, which
    are exact to float64 or not. But small parameters have small slopes and no more noise for that:
    they go apart.
    """
    largest, small = 0.0, frozenset[str]()
    while gradients:
        direction, slopes = way(parameters, gradients)
        total = sum(map(abs, slopes.values()))
        # All of them where one overflows, which agrees with nothing.
        seen = {n for n, s in slopes.items() if abs(s) >= _HIDDEN * total} or set(gradients)
        if largest > 0:
            small = small or _small(parameters)
            seen = (seen & small) or seen
        total = sum(abs(slopes[n]) for n in seen)
        seeing = seen <= small or (wide and total > 0)
        share = total / largest if seeing and largest > 0 else 1.0
        noise = largest * (_LOST if seeing else _CANCELLED)
        yield _Group({n: direction[n] for n in seen}, sum(slopes[n] for n in seen), share, noise)
        largest = max(largest, total)
        gradients = {n: g for n, g in gradients.items() if n not in seen}


_UNITS = 64  # of the last digit of outputs, that rounding may take
_HIDDEN = 0.003  # of the slope: what adds less is looked at apart
_CANCELLED, _LOST = 1e-6, 1e-12  # of the largest slope: noise, of gradients in float32 and at all


def _small(parameters: Mapping[str, Tensor]) -> frozenset[str]:
    """The parameters whose entries are far smaller than those of most."""
    norms = torch.stack(torch._foreach_norm([p.detach() for p in parameters.values()])).tolist()
    entries = (max(1, p.numel()) ** 0.5 for p in parameters.values())
    sizes = {n: norm / root for n, norm, root in zip(parameters, norms, entries, strict=True)}
    felt = [size for size in sizes.values() if size > 0]
    most = 1e-3 * median_low(felt or [0.0])
    return frozenset(name for name, size in sizes.items() if 0 < size < most)


def _bind(parameters: Mapping[str, Tensor], data: Mapping[str, Tensor]) -> None:
    """Their own memory for the parameters that a forward pass bound anew."""
    for name, own in data.items():
        if not is_sharded(own) and parameters[name].data_ptr() != own.data_ptr():
            parameters[name].data = own


_ENTRIES = 1 << 14  # of a parameter, that are moved at first


def _some(tensor: Tensor) -> Tensor:
    """Rows from all over a parameter, as a view; all of a small one."""
    if tensor.ndim == 0 or tensor.numel() <= _ENTRIES:
        return tensor
    return tensor[:: -(-tensor.numel() // _ENTRIES) | 1]  # an odd step: even and odd rows


def _rows(tensor: Tensor) -> Tensor:
    """The same; of a sharded parameter a copy."""
    return _some(whole_of(tensor)).clone() if is_sharded(tensor) else _some(tensor)


def check_bend(call: Callable[..., Tensor], name: str, outputs: Tensor, batch: Batch) -> None:
    """Refuse a user's loss whose second derivative in the outputs is not its gradient's slope.

    One that casts to few digits, or holds tensors on a GPU, is not judged.
    """
    at, targets = _on_cpu(outputs.double()), _on_cpu(batch.targets)
    try:
        bends = [list(_bends(call, at + s * _noise(at, 3), targets)) for s in (0.0, 1e-3)]
    except (RuntimeError, ValueError):
        return  # it does not take such outputs
    tried = [each for some in bends for each in some if all(map(isfinite, each))]
    if tried and not any(_FINE.same(*each) for each in tried):
        said, bend, _ = tried[0]
        raise LossError(
            f"The second derivative of the loss {name} is not the slope of its gradient: on "
            f"{batch.where}, along one direction of the outputs, that is {bend:.4g} and autograd "
            f"says {said:.4g}. Look for detach() and torch.no_grad() in it; what it detaches must "
            "not move with the outputs."
        )


def _bends(
    call: Callable[..., Tensor], outputs: Tensor, targets: Any
) -> Iterator[tuple[float, float, float]]:
    """⟨z, B z⟩ by autograd and by differences, and the rounding in these, for every step."""

    def gradient(at: Tensor) -> tuple[Tensor, Tensor]:
        at = at.clone().requires_grad_()
        with torch.enable_grad():
            value = _of_its_type(call, at, targets)
            (slope,) = torch.autograd.grad(value, at, create_graph=True)
        return at, slope

    direction = _noise(outputs, 7)
    at, first = gradient(outputs)
    if first.requires_grad:
        (product,) = torch.autograd.grad(first, at, direction, materialize_grads=True)
    else:
        product = torch.zeros_like(outputs)
    said = float((product * direction).sum())
    size = float((first.detach() * direction).abs().sum())
    rounding = 64 * torch.finfo(torch.float64).eps * size
    for step in _FINE.steps:
        ends = [gradient(outputs + s * direction)[1].detach() for s in (step, -step)]
        bend = float(((ends[0] - ends[1]) * direction).sum() / (2 * step))
        yield said, bend, rounding / step


def _of_its_type(call: Callable[..., Tensor], outputs: Tensor, targets: Any) -> Tensor:
    """The loss, if it has as many digits as the outputs."""
    value = scalar(call, outputs, targets)
    if value.dtype != outputs.dtype:
        raise ValueError(f"the loss casts to {value.dtype}")
    return value


def check_slope(call: Callable[..., Tensor], name: str, outputs: Tensor, batch: Batch) -> None:
    """Refuse a user's loss whose gradient in the outputs is not its slope.

    Asked where the outputs are and a little way off them, where no hinge has its kink. A loss that
    does not take such outputs (probabilities above one, another precision) is not judged by them;
    it is asked on the CPU, because on a GPU it could not refuse them without breaking the process.
    """
    compared: list[tuple[float, float]] = []
    outputs, targets = _on_cpu(outputs), _on_cpu(batch.targets)
    for wide, how in ((outputs.double(), _FINE), (outputs, _COARSE)):
        for shift in (0.0, 1e-3):
            at = wide + shift * _noise(wide, 3)
            try:
                slopes = list(_slopes(call, at, targets, how))
            except (RuntimeError, ValueError):
                continue
            if any(how.same(said, slope, noise) for said, slope, noise in slopes):
                return
            compared += [(said, slope) for said, slope, _ in slopes if isfinite(slope)]
        if compared:
            break
    if compared:
        said, slope = compared[0]
        raise LossError(
            f"The gradient of the loss {name} is not its slope: on {batch.where}, along one "
            f"direction of the outputs, it changes at the rate {slope:.4g} and autograd says "
            f"{said:.4g}. Look for detach() and torch.no_grad() in it: autograd holds fixed what "
            "in truth moves with the outputs (a focal weight, a pseudo-label). Let gradients "
            "through, or compute that part beforehand and pass it among the targets."
        )


def _on_cpu(content: Any) -> Any:
    return tree_map_only(Tensor, Tensor.cpu, content)


def _slopes(
    call: Callable[..., Tensor], outputs: Tensor, targets: Any, how: _Comparison
) -> Iterator[tuple[float, float, float]]:
    """Autograd's slope, the loss's own and the rounding in it, for every step."""
    at = outputs.clone().requires_grad_()
    with torch.enable_grad():
        value = _of_its_type(call, at, targets)
        (gradient,) = torch.autograd.grad(value, at)
    size = max(float(torch.linalg.vector_norm(outputs)), 1e-2 * outputs.numel() ** 0.5)
    noise = _noise(outputs, 5)
    direction = sum(
        v * (size / length)
        for v in (gradient, 0.5 * noise)
        if (length := float(torch.linalg.vector_norm(v))) > 0
    )
    said = float((gradient * direction).sum(dtype=torch.float64))
    rounding = 64 * torch.finfo(outputs.dtype).eps * abs(float(value.detach()))
    for step in how.steps:
        with torch.no_grad():
            ends = [float(scalar(call, outputs + s * direction, targets)) for s in (step, -step)]
        yield said, (ends[0] - ends[1]) / (2 * step), rounding / step


def check_unreached(
    risk: Risk, batch: Batch, outputs: Tensor, reached: Collection[str], *, cuts: bool = False
) -> None:
    """Refuse parameters that move the outputs though autograd does not reach them.

    With `cuts` something was hidden from autograd in the forward pass, and float64 is asked too:
    what moves the outputs by less than float32 shows has curvature all the same.
    """
    moving = [name for name, p in risk.parameters.items() if p.numel() and name not in reached]
    blamed = _moving(risk, batch, outputs, moving)
    if not blamed and cuts and not risk.sharded and outputs.dtype != torch.float64:
        question = _Question(risk, batch, torch.empty(0), _FINE)
        with suppress(RuntimeError):  # it cannot be run in float64
            blamed = question.in_float64(
                lambda wide: _moving(wide.risk, wide.batch, wide.risk.forward(wide.batch), moving)
            )
    if not blamed:
        return
    raise ModelError(
        f"The outputs depend on {listed(blamed)}, but autograd does not reach them from the "
        "outputs: the forward pass uses them under torch.no_grad(), detached, or inside reentrant "
        "checkpointing (pass use_reentrant=False). Their curvature is not zero and cannot be had "
        "so; let gradients through, or freeze them (requires_grad_(False)) to leave them out."
    )


def _moving(risk: Risk, batch: Batch, outputs: Tensor, names: Sequence[str]) -> list[str]:
    """Those that move the outputs, if they do so together."""
    if not names or not _moves(risk, batch, outputs, names):
        return []
    return [name for name in names if _moves(risk, batch, outputs, [name])] or list(names)


def _moves(risk: Risk, batch: Batch, outputs: Tensor, names: Sequence[str]) -> bool:
    direction = {n: _noise(whole_of(risk.parameters[n]), k) for k, n in enumerate(names)}
    with _shifted(risk.parameters, direction, 0.1):
        changed = (risk.forward(batch).detach() - outputs.detach()).abs().max()
    size = outputs.detach().abs().max()
    return bool(changed > 64 * torch.finfo(outputs.dtype).eps * size)


def _noise(parameter: Tensor, seed: int) -> Tensor:
    """Random, and as large as the entries and their neighbours are."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
    return noise * (parameter.detach().abs() + _typical(parameter))


def _typical(parameter: Tensor) -> Tensor:
    """The size of entries like these, by row and column: of a unit that was scaled down, small."""
    p = parameter.detach()
    size: Tensor = torch.linalg.vector_norm(p) / max(1, p.numel()) ** 0.5
    if not bool(p.any()):
        return torch.full_like(size, 1e-2)
    if p.ndim < 2:
        return 1e-3 * size
    others = [[d for d in range(p.ndim) if d != kept] for kept in (0, 1)]
    row, column = (p.square().mean(dims, keepdim=True).sqrt() for dims in others)
    sizes = row * column / size
    return torch.where(sizes > 0, sizes, 1e-2 * size)


def _direction(
    parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Along the gradients, each about as long as its parameter; none drowns the others.

    With the slopes along them.
    """
    given, own = list(gradients.values()), [parameters[name].detach() for name in gradients]
    norms = torch.stack(torch._foreach_norm([*given, *own])).tolist()
    lengths, sizes = norms[: len(given)], norms[len(given) :]
    roots = [max(1, p.numel()) ** 0.5 for p in own]
    sizes = [size if size > 0 else root for size, root in zip(sizes, roots, strict=True)]
    scales = _scales(lengths, sizes)
    along = list(torch._foreach_mul(given, scales))
    # Entries without a gradient move too, and more: they may have none because they are detached.
    # How does not matter: by what their neighbours are, and a little.
    felt = torch.stack([torch.count_nonzero(g) for g in given]).tolist()
    for k in [k for k, g in enumerate(given) if felt[k] < g.numel()]:
        beside = own[k].roll(1).add_(sizes[k] / roots[k]).mul_(3.0)
        along[k] = torch.where(given[k] == 0, beside, along[k])
    slopes = (s * length**2 for s, length in zip(scales, lengths, strict=True))
    return dict(zip(gradients, along, strict=True)), dict(zip(gradients, slopes, strict=True))


def _scales(lengths: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """What gradients of these lengths are to be multiplied by, of parameters of these sizes."""
    shares = [a * b for a, b in zip(lengths, sizes, strict=True)]  # what each adds to the slope
    felt = [share for share in shares if share > 0]  # the others would make nothing of these
    middle = median_low(felt or [0.0])

    def scale(length: float, size: float, share: float) -> float:
        if not share > 0:
            return 0.0
        raised = min(max(middle / share, 1.0), 30.0)  # not far: slopes are those of small steps
        factor = size / length * (10 * middle / share if share > 10 * middle else raised)
        return factor if isfinite(factor) else 0.0

    return list(map(scale, lengths, sizes, shares))


def _gentle(
    parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The same, but no entry moves by many times its size.

    Rescaled networks have units whose weights are small and whose gradients are large: along these
    the smallest step would take ReLUs to their other side.
    """
    direction, _ = _direction(parameters, gradients)
    for name, v in direction.items():
        most = 30 * (parameters[name].detach().abs() + _typical(parameters[name])).to(v)
        v.clamp_(-most, most)
    products = [(gradients[n] * v).sum(dtype=torch.float64) for n, v in direction.items()]
    return direction, dict(zip(direction, torch.stack(products).tolist(), strict=True))


_Way = Callable[
    [Mapping[str, Tensor], Mapping[str, Tensor]], tuple[dict[str, Tensor], dict[str, float]]
]


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    products = [(a[name] * b[name]).sum(dtype=torch.float64) for name in a]
    return float(torch.stack(products).sum()) if products else 0.0


@contextmanager
def _shifting(
    parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Iterator[Callable[[float], None]]:
    """Puts the parameters a step from where they are, each time that it is called.

    They are moved in place, so that whoever shares their memory moves too. Where other processes
    get them as they are at the same time, only what this one gets of them is moved.
    """
    own = {name: parameters[name].data for name in direction}
    apart = {name: data for name, data in own.items() if on_request(data)}
    moved = held(data for name, data in own.items() if name not in apart)
    before = [p.clone() for p in moved]
    along = held(_shard(v, own[name]) for name, v in direction.items() if name not in apart)

    def shift(step: float) -> None:
        _bind(parameters, own)
        for p, start, v in zip(moved, before, along, strict=True):
            torch.add(start, v, alpha=step, out=p)
        for name, sharded in apart.items():
            move(sharded, partial(_step, direction[name], step))

    try:
        yield shift
    finally:
        if moved:
            torch._foreach_copy_(moved, before)
        _bind(parameters, own)
        for sharded in apart.values():
            move(sharded, None)


def _step(direction: Tensor, step: float, whole: Tensor) -> None:
    """Move a parameter, or some rows of it, along a direction of as many."""
    part = whole if direction.shape == whole.shape else _some(whole)
    part.add_(direction, alpha=step)


@contextmanager
def _shifted(
    parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor], step: float
) -> Iterator[None]:
    """The parameters a step from where they are."""
    with _shifting(parameters, direction) as shift:
        shift(step)
        yield


def _shard(direction: Tensor, like: Tensor) -> Tensor:
    """What a process has of a direction, of all of a parameter or of some rows."""
    if direction.shape != like.shape:
        whole = direction.new_zeros(like.shape)
        _some(whole).copy_(direction)
        direction = whole
    return shard_like(direction, like) if is_sharded(like) else direction


def _steady(risk: Risk, batch: Batch) -> bool:
    """Whether the model gives the same outputs again and again."""
    first, *_, last = (risk.forward(batch).detach() for _ in range(4))
    size = torch.finfo(first.dtype).eps * first.abs().max()
    return bool((first - last).abs().max() <= 4 * size)


def _move(risk: Risk) -> None:
    """Every parameter by about 1e-3 of itself."""
    for k, p in enumerate(risk.parameters.values()):
        p.data.add_(_noise(p, 1000 + k), alpha=1e-3)


@dataclass(frozen=True, slots=True)
class _Question:
    """Whether slopes of ⟨cotangent, outputs⟩ in the parameters are what gradients say."""

    risk: Risk
    batch: Batch
    cotangent: Tensor
    how: _Comparison

    def slope(
        self, moved: Mapping[str, Tensor], direction: Mapping[str, Tensor], step: float
    ) -> float:
        """The central difference along a direction of `moved`."""
        ends, cotangent = [], self.cotangent.double()
        with _shifting(moved, direction) as shift, torch.no_grad():
            for signed in (step, -step):
                shift(signed)
                outputs = self.risk.forward(self.batch, Safe())
                ends.append(float((outputs.double() * cotangent).sum()))
        return (ends[0] - ends[1]) / (2 * step)

    def agrees_here(self, gradients: Mapping[str, Tensor]) -> bool:
        """Along some rows of every parameter, by the first step."""
        own = {name: p.data for name, p in self.risk.parameters.items() if name in gradients}
        rows = {name: _rows(data) for name, data in own.items()}
        parts = {name: _some(g).to(rows[name]) for name, g in gradients.items()}
        fine = all(g.dtype == torch.float64 for g in gradients.values())
        moved = own if self.risk.sharded else rows

        def agrees(group: _Group) -> bool:
            how = self.how.raised(group.share)
            slope = self.slope(moved, group.direction, how.steps[0])
            return how.same(group.slope, slope, group.noise)

        try:
            return all(map(agrees, _groups(rows, parts, _direction, fine)))
        finally:
            _bind(self.risk.parameters, own)

    def agrees_nearby(self, gradients: Mapping[str, Tensor], together: int) -> bool:
        """The same in float64: of these gradients, or of its own for some samples at a time.

        At the smallest step, and at a larger one: of a deep network whose gradients vanish, the
        smallest shows rounding alone.
        """
        if replace(self, how=_NEAR).agrees_here(gradients) or self.agrees_here(gradients):
            return True
        return all(part.agrees_with_its_own(gradients) for part in self.parts(together))

    def blamed_nearby(
        self, gradients: Mapping[str, Tensor], together: int | None
    ) -> dict[str, tuple[float, float]]:
        """The parameters along which slope and gradient differ, here and a little way off."""
        if self.agrees_nearby(gradients, together or self.batch.size):
            return {}
        _move(self.risk)
        return self.disagreeing(gradients)

    def agrees_with_its_own(self, names: Collection[str]) -> bool:
        own, _, _ = self.gradients(names)
        return replace(self, how=_NEAR).agrees_here(own) or self.agrees_here(own)

    def parts(self, together: int) -> Iterator[_Question]:
        for start in range(0, self.batch.size, together):
            stop = min(start + together, self.batch.size)
            some = self.batch.part(start, stop)
            yield replace(self, batch=some, cotangent=self.cotangent[start:stop])

    def agrees_somehow(self, gradients: Mapping[str, Tensor], single: bool) -> bool:
        """The same at one of more steps: where the model cannot be run in float64."""
        how = _COARSE if single else self.how
        others = (_Comparison((step,), how.tolerance) for step in how.steps)
        return any(replace(self, how=other).agrees_here(gradients) for other in others)

    def agrees(self, gradients: Mapping[str, Tensor], largest: float, rounding: float) -> bool:
        """For some parameters together, at one of the steps; other slopes are up to `largest`."""
        direction = _along(self.risk.parameters, gradients)
        said = _dot(gradients, direction)
        seeing = self.how.wide and said != 0
        # Beside large outputs a slope is small too: it may be that of a branch that hardly counts.
        reach = max(largest, rounding / (_UNITS * torch.finfo(torch.float64).eps))
        how = self.how.raised(abs(said) / reach) if seeing and reach > 0 else self.how
        noise = largest * (_LOST if seeing else _CANCELLED)
        # Of a step so small that rounding is all there is, what is left says nothing.
        return any(
            how.same(
                said,
                self.slope(self.risk.parameters, direction, step),
                noise + rounding / max(step, how.steps[0]),
            )
            for step in how.steps
        )

    def agrees_closely(self, gradients: Mapping[str, Tensor], rounding: float) -> bool | None:
        """The same where values have few digits, at steps for which larger ones are too large.

        None if they tell nothing: no two in a row agree with each other, or rounding may be all.
        """
        if self.how.wide:
            return None
        direction = _along(self.risk.parameters, gradients)
        said, told = _dot(gradients, direction), None
        slopes = ((s, self.slope(self.risk.parameters, direction, s)) for s in _SMALL.steps)
        for (_, one), (step, other) in pairwise(slopes):
            if _SMALL.same(said, one) and _SMALL.same(said, other):
                return True
            if _SMALL.same(one, other) and abs(other) > rounding / step:
                told = False
        return told

    def bent(self) -> dict[str, tuple[float, float]]:
        """The parameters in whose gradients no step shows the slope that autograd says, here and a
        little way off; with ⟨v, H u⟩ over their entries by autograd and by differences.

        What has not the digits of float64 has differences that do not agree with each other: a
        function may cast inside, where no graph shows it. That is not judged.
        """
        outputs = self.risk.forward(self.batch, Safe())
        if narrowest(outputs) != torch.float64:
            return {}
        question, same = self.of_some_outputs(outputs), self.how.same
        for moved in (False, True):
            if moved:
                _move(self.risk)
            first, *others = question.bends()
            steps = first, *others
            unlike = [n for n in first if not any(same(*each[n]) for each in steps)]
            if not unlike:
                return {}
        found = {}
        for name in unlike:
            said, bend, rounding = first[name]
            rest = (each[name] for each in others)
            if any(same(bend, other, rounding + more) for _, other, more in rest):
                found[name] = said, bend
        return found

    def bends(self) -> Iterator[dict[str, tuple[float, float, float]]]:
        """⟨v, H u⟩ over every parameter's entries by autograd, which has it as a slope of ⟨g, u⟩,
        and by differences along u, and the rounding in these, for every step.

        Of every parameter apart: one that adds next to nothing to the sum is a block all the same.
        """
        parameters = {n: p for n, p in self.risk.parameters.items() if p.numel()}
        u, v, first, second = self.second()
        sizes = {n: float((g * v[n]).abs().sum()) for n, g in first.items()}
        total = sum(sizes.values())
        for step in self.how.steps:
            ends = []
            with _shifting(parameters, u) as shift:
                for signed in (step, -step):
                    shift(signed)
                    found = self.gradients(parameters)[0]
                    ends.append({n: _dot({n: g}, v) for n, g in found.items()})
            # Of a step so small that rounding is all there is, what is left says nothing.
            least = torch.finfo(torch.float64).eps / max(step, self.how.steps[0])
            yield {
                n: (
                    said,
                    (ends[0][n] - ends[1][n]) / (2 * step),
                    least * (64 * sizes[n] + 8 * total),
                )
                for n, said in second.items()
            }

    def second(
        self,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        """Some u and v, the gradients, and ⟨v, H u⟩ over every parameter's entries by autograd."""
        parameters = {n: p for n, p in self.risk.parameters.items() if p.numel()}
        outputs = self.risk.forward(self.batch, Safe())
        insist_on_derivatives(outputs, parameters.values())
        v, u = (
            {n: _noise(p, k + s) for k, (n, p) in enumerate(parameters.items())} for s in (3, 7)
        )
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        own, second = list(parameters.values()), dict.fromkeys(parameters, 0.0)
        slopes = torch.autograd.grad(outputs, own, self.cotangent, create_graph=True, **options)
        first = dict(zip(parameters, slopes, strict=True))
        along = torch.stack([(g * u[n]).sum() for n, g in first.items()]).sum()
        if along.requires_grad:
            rows = torch.autograd.grad(along, own, **options)
            second = {n: _dot({n: row}, v) for n, row in zip(parameters, rows, strict=True)}
        return u, v, {n: g.detach() for n, g in first.items()}, second

    def has(self, found: Mapping[str, tuple[float, float]]) -> bool:
        """Whether in the model's own precision autograd says what is found by differences, rather
        than what it says in float64.

        A function of the user's that casts its input to float32 has the input itself where that is
        in float32 already, and else a copy, which it holds fixed.
        """
        parameters = self.risk.parameters
        if all(p.dtype == torch.float64 for p in parameters.values()):
            return False
        moved = {n: _noise(p, 1000 + k) for k, (n, p) in enumerate(parameters.items())}
        with _shifted(parameters, moved, 1e-3):  # as `bent` has moved them
            question = self.of_some_outputs(self.risk.forward(self.batch, Safe()))
            *_, second = question.second()
        return all(
            abs(second[name] - bend) < 0.5 * abs(said - bend)
            for name, (said, bend) in found.items()
        )

    def gradients(self, names: Collection[str]) -> tuple[dict[str, Tensor], Tensor, torch.dtype]:
        """What autograd says, the outputs, and the least precise type on the way to them."""
        outputs = self.risk.forward(self.batch, Safe())
        moved = {n: p for n, p in self.risk.parameters.items() if n in names}
        narrow = narrowest(outputs)
        slopes = torch.autograd.grad(
            outputs, list(moved.values()), self.cotangent, materialize_grads=True
        )
        return dict(zip(moved, slopes, strict=True)), outputs.detach(), narrow

    def disagreeing(self, names: Collection[str]) -> dict[str, tuple[float, float]]:
        """The parameters along which slope and gradient differ: name -> (slope, autograd's)."""
        parameters = self.risk.parameters
        gradients, outputs, narrow = self.gradients(names)
        size = float((outputs * self.cotangent).abs().double().sum())
        rounding = _UNITS * float(torch.finfo(narrow).eps) * size
        if torch.finfo(narrow).eps > torch.finfo(outputs.dtype).eps and self.how is not _COARSE:
            return replace(self, how=_COARSE).disagreeing(names)

        def all_agree() -> bool:
            groups = list(_groups(parameters, gradients, _gentle, self.how.wide))
            largest = max(abs(group.slope) for group in groups)
            return all(
                self.agrees({n: gradients[n] for n in group.direction}, largest, rounding)
                for group in groups
            )

        if all_agree():
            return {}
        written = _written(self.risk, self.batch)
        gradients = {n: g for n, g in gradients.items() if n not in written}
        if not gradients or (written and all_agree()):
            return {}
        return self.blamed(gradients, rounding)

    def blamed(
        self, gradients: Mapping[str, Tensor], rounding: float
    ) -> dict[str, tuple[float, float]]:
        """Of parameters that do not agree, those that do not alone; if all do, a word for that.

        Closely, they may all agree after all.
        """
        blamed, parameters = {}, self.risk.parameters
        groups = list(_groups(parameters, gradients, _gentle, self.how.wide))
        largest = max(abs(group.slope) for group in groups)

        def agree(some: dict[str, Tensor]) -> bool:
            closely = self.agrees_closely(some, rounding)
            return self.agrees(some, largest, rounding) if closely is None else closely

        for name, gradient in gradients.items():
            if not agree({name: gradient}):
                direction = _along(parameters, {name: gradient})
                slope = self.slope(parameters, direction, self.how.steps[0])
                blamed[name] = slope, _dot({name: gradient}, direction)
        together = ({n: gradients[n] for n in group.direction} for group in groups)
        if blamed or (not self.how.wide and all(map(agree, together))):
            return blamed
        return {"all parameters together": (float("nan"), float("nan"))}

    def in_float64(self, judge: Callable[[_Question], Answer]) -> Answer:
        """What is found of the same question in float64, parts that are cast to float32 too.

        Autograd takes a cast for the identity, rightly. Of a model that casts, quotients have the
        digits of float32 alone, and only steps show a slope that are too large for many models.
        """
        try:
            return self._in_float64(lambda wide: wide.without_casts(judge))
        except Exception as error:  # of a function that takes float32 alone, of whatever kind
            if out_of_memory(error):
                raise
        return self._in_float64(judge)

    def without_casts(self, judge: Callable[[_Question], Answer]) -> Answer:
        """The answer with what is cast to float32 in float64, if the model bears that."""
        widened = _Widened()
        with torch.no_grad():
            bears = self.bears(widened)
        with widened if bears else nullcontext():
            return judge(self)

    def bears(self, widened: _Widened) -> bool:
        """Whether there are casts, and without them the same function with the digits of float64.

        What is no rounding of the outputs is no cast alone: adding 1.5 · 2²³ rounds to integers in
        float32. And kernels that are not torch's may cast where nobody sees it.
        """
        with widened:
            outputs = self.risk.forward(self.batch, Safe())
        if not widened.used:
            return False
        own = self.risk.forward(self.batch, Safe())
        rounding = torch.finfo(torch.float32).eps ** 0.5 * own.abs().max()
        if not bool((outputs - own).abs().max() <= rounding):
            return False
        parameters, question = self.risk.parameters, self.of_some_outputs(own)
        direction = {name: _noise(p, k) for k, (name, p) in enumerate(parameters.items())}
        slopes = (question.slope(parameters, direction, step) for step in _DIGITS.steps)
        with widened:
            return any(one and _DIGITS.same(one, other) for one, other in pairwise(slopes))

    def of_some_outputs(self, outputs: Tensor) -> _Question:
        """The same of a random mix of all outputs."""
        return replace(self, cotangent=_noise(torch.ones_like(outputs), 5))

    def _in_float64(self, judge: Callable[[_Question], Answer]) -> Answer:
        """What is found of the same question with parameters, buffers and inputs in float64.

        The model's own tensors stay as they are: another dtype would cut them off from graphs of
        the user's. Others stand in for them until the answer is there, as checkpointed blocks read
        them in the backward pass too.
        """
        risk, model = copy.copy(self.risk), self.risk.model
        if isinstance(model, torch.jit.ScriptModule):
            raise RuntimeError("Compiled modules keep their own tensors.")
        if risk.device.type == "mps":
            risk.device = torch.device("cpu")  # there is no float64

        def wide(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dtype = torch.float64 if leaf.is_floating_point() else None
            return leaf.detach().to(risk.device, dtype)

        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {name: wide(tensor) for name, tensor in state.items()}
        for name, own in risk.parameters.items():
            if state[name].data_ptr() == own.data_ptr():  # it is in float64 already
                state[name] = state[name].clone()
            state[name].requires_grad_()
        risk.dtype = torch.float64
        risk.parameters = {name: state[name] for name in risk.parameters}  # type: ignore[misc]
        batch = replace(self.batch, inputs=tree_map(wide, self.batch.inputs))
        question = _Question(risk, batch, wide(self.cotangent), _FINE)
        held = {f"0.{name}": tensor for name, tensor in state.items()}
        answer: Answer = functional_call(_Around(model), held, (partial(judge, question),))
        return answer


Answer = TypeVar("Answer")


class _Widened(TorchDispatchMode):
    """What would be cast to float32 or made in it is in float64 instead."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = False  # whether there was something

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for name, value in kwargs.items():
            if isinstance(value, torch.dtype) and value in _WIDER:
                kwargs[name], self.used = _WIDER[value], True
        return func(*args, **kwargs)


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _Around(nn.Sequential):
    """A module that does some work, while others' tensors may stand in for a model's."""

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def _written(risk: Risk, batch: Batch) -> set[str]:
    """The parameters that the forward pass itself projects: clipped or renormalised weights.

    They are measured as projected; moved away, they would be moved back.
    """
    parameters = risk.parameters
    direction = {name: _noise(p, k) for k, (name, p) in enumerate(parameters.items())}
    with _shifted(parameters, direction, 0.1):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        risk.forward(batch)
        return {name for name, p in parameters.items() if not torch.equal(p.detach(), before[name])}


def _along(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Along the gradients; where there are none, somewhere."""
    direction, _ = _gentle(parameters, gradients)
    return {
        n: v if bool(v.any()) else _noise(parameters[n], k)
        for k, (n, v) in enumerate(direction.items())
    }


def _listed(blamed: Mapping[str, tuple[float, float]]) -> str:
    shown = [
        f"along {name} the outputs change at the rate {slope:.4g} and autograd says {said:.4g}"
        for name, (slope, said) in list(blamed.items())[:_NAMED]
    ]
    return "; ".join(shown) + ("; …" if len(blamed) > _NAMED else "")
