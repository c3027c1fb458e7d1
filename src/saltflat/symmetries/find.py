"""`symmetries`: every positive rescaling that keeps a model's function."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from saltflat.errors import ForwardError, InvalidType, InvalidValue, ModelError
from saltflat.losses import summary
from saltflat.memory import fails_again, ordinary, out_of_memory
from saltflat.risk import Chooser, Output, Unpack, answer_of, check_finite, check_parameters, unwrap
from saltflat.session import TensorValues, arguments, values_of
from saltflat.sharded import ADVICE, parameters_of, refuse_sharded
from saltflat.symmetries.assemble import Assembly, Basis
from saltflat.symmetries.element import Exponents, duplicate
from saltflat.symmetries.evaluate import check_copy, confirm, evaluation, memory
from saltflat.symmetries.example import inputs_of
from saltflat.symmetries.group import Generator, Group, Kind
from saltflat.symmetries.liveness import liveness
from saltflat.symmetries.propagate import RULES, Propagation
from saltflat.symmetries.tape import Answer, Tape, record


def symmetries(
    model: nn.Module,
    example: Any,
    *,
    output: Output | None = None,
    parameters: str = "all",
    unpack: Unpack | None = None,
) -> Group:
    """Find all positive rescalings of a model's parameters that leave its function unchanged.

    The model is traced once in evaluation mode. Every entry of every tensor gets a log-scale, every
    operation relates scales, inputs and outputs are pinned, and the linear system is solved.
    Operations that are not understood let no scale through: the group can come out too small,
    never wrong. What was found is put to the test: random elements are applied to the model on the
    example, in float64 up to ten million parameters, and the outputs compared. A rescaling that
    moves them is a defect of saltflat and raises `SaltflatError`.

    Parameters
    ----------
    model : any `torch.nn.Module`; it is left as it was found.
    example : inputs, a tensor for `model(x)`, a tuple for `model(*x)`, a dict for `model(**x)`; or
        data as in `measure`, of which the first samples are taken. A tuple (a, b), or a dict with
        `labels`, is inputs where the signature of `forward` takes it, and inputs with targets
        otherwise; `[(a, b)]` is always data. Use sequences of two tokens or more: on one token
        position encodings are not seen.
    output : chooses the tensors that count as the answer, as in `trace`.
    parameters : "all", or "trainable" to keep frozen parameters where they are.
    unpack : splits an item of the data, as elsewhere.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> x = torch.randn(8, 3)
    >>> group = sf.symmetries(model, x)
    >>> len(group)
    4
    >>> torch.allclose(group.random(seed=0, spread=10.0)(model)(x), model(x), atol=1e-5)
    True
    """
    inner, movable = _checked(model, parameters)
    refuse_sharded(
        parameters_of(inner).values(), "Rescalings are sought in whole parameters", ADVICE
    )
    example = inputs_of(inner, example, unpack, movable)
    answer = answer_of(output)
    values = values_of(inner)  # of which every pass below would make a copy
    tape = _trace(inner, example, answer, values)
    named = dict(inner.named_parameters())
    movable -= _shared(tape, named)
    propagation = Propagation(tape, movable)
    used = propagation.used()
    basis = Assembly(propagation).solve()
    live = liveness(inner, example, answer, basis.factors, used, values)
    unseen = tuple(n for n in named if n in movable - used)
    dead = tuple(n for n in named if n in live.idle or (n in unseen and not tape.recorded))
    uncopied = _uncopied(inner, example, answer)
    group = _group(inner, propagation, basis.restricted(live.rows), dead, uncopied)
    steady = not tape.recorded
    notes = confirm(group, inner, example, answer, steady=steady, values=values)
    return replace(group, notes=(*_notes(tape, unseen), *notes))


def _checked(model: nn.Module, parameters: str) -> tuple[nn.Module, set[str]]:
    """The module inside wrappers, and the names of the parameters that may move."""
    if parameters not in ("all", "trainable"):
        raise InvalidValue(f"parameters must be 'all' or 'trainable'. Got {parameters!r}.")
    inner = unwrap(model)
    named = dict(inner.named_parameters())
    movable = {
        n for n, p in named.items() if _can_move(p) and (parameters == "all" or p.requires_grad)
    }
    if not movable:
        raise ModelError("The model has no floating point parameters that may be rescaled.")
    check_parameters(named, movable)
    check_finite(named)
    return inner, movable


def _trace(model: nn.Module, example: Any, output: Chooser, values: TensorValues) -> Tape:
    try:
        with evaluation(model, example, output, wide=False, differentiable=True, values=values):
            return record(Answer(model, output), *arguments(example), RULES)
    except TypeError as error:
        raise InvalidType(
            "The model cannot be run on the inputs: a tensor for model(x), a tuple for model(*x) "
            f"or a dict for model(**x). Got {type(example).__name__}; the "
            f"model said: {error}"
        ) from error
    except Exception as error:
        if not ordinary(error):
            raise
        raise ForwardError(
            f"The model failed on the example, given {summary(example)}: {error}"
        ) from error


def _can_move(p: nn.Parameter) -> bool:
    lazy = isinstance(p, nn.parameter.UninitializedParameter)
    return lazy or p.is_floating_point()


def _shared(tape: Tape, named: dict[str, nn.Parameter]) -> set[str]:
    """Parameters whose memory serves as a constant or another parameter too: they stay."""
    owners: dict[int, list[str]] = {}
    for name, p in named.items():
        owners.setdefault(memory(p), []).append(name)
    owners.pop(0, None)
    constants = [s.value for s in tape.slots if s.value is not None and s.parameter is None]
    pointers = {memory(c) for c in constants}
    return {n for at, names in owners.items() if at in pointers or len(names) > 1 for n in names}


def _uncopied(model: nn.Module, example: Any, output: Chooser) -> str:
    """Why elements cannot be applied to a copy of the model, or nothing."""

    def check() -> None:
        # The copy is thrown away: there is nothing to put back.
        check_copy(model, duplicate(model), example, output, TensorValues(()))

    try:
        check()
    except ModelError as error:
        return str(error)
    except Exception as error:
        if out_of_memory(error) or not fails_again(check):
            raise
        return f"The model cannot be copied: {error}"
    return ""


def _notes(tape: Tape, unseen: tuple[str, ...]) -> tuple[str, ...]:
    if not tape.recorded:
        return ()
    note = "values decide what is computed: found for inputs that take the example's branches"
    return (note + (f", which do not meet {', '.join(unseen)}" if unseen else ""),)


def _group(
    model: nn.Module,
    propagation: Propagation,
    basis: Basis,
    dead: tuple[str, ...],
    uncopied: str,
) -> Group:
    factors = basis.factors
    means = {n: factors.layouts[n].terms[0][0] for n in propagation.means}
    deviations = {n: factors.layouts[n].terms[0][0] for n in propagation.deviations}
    floors: dict[int, float] = {}
    statistics = set()
    buffers = dict(model.named_buffers())
    for name, classes in deviations.items():
        eps, var = propagation.eps[name], buffers[name].detach().double().cpu()
        lowest = 0.5 * (eps / (var + eps)).log()
        for c, low in zip(classes.tolist(), lowest.tolist(), strict=True):
            floors[c] = max(low, floors.get(c, -math.inf))
            statistics.add(c)
    moves = np.zeros(factors.matrix.shape[1], bool)
    moves[np.unique(factors.matrix[sorted(statistics)].nonzero()[1])] = True
    bilinear = np.asarray(abs(basis.scales.T) @ basis.bilinear.astype(float)).ravel() > 0
    generators = []
    for i, (label, unit) in enumerate(basis.units):
        kind: Kind = "batchnorm" if moves[i] else "attention" if bilinear[i] else "neuron"
        generators.append(Generator(_layer(label), unit, kind))
    exponents = Exponents(factors, means, deviations, propagation.eps, floors, uncopied)
    return Group(
        tuple(generators),
        dead,
        tuple(f"{_layer(label)}[{unit}]" for label, unit in basis.approximate),
        dict(propagation.pinning),
        exponents,
        basis.scales,
        basis.places,
        [_layer(s.label) for s in propagation.scales.sites],
    )


def _layer(label: str) -> str:
    """`fc1.weight` is told by its layer's name."""
    return label.removesuffix(".weight")
