"""`audit`: can a measure be trusted under rescalings that do not change the function?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from saltflat.audit.elements import Family, Trial, families, trials
from saltflat.audit.ledger import Function, Ledger, Panel
from saltflat.audit.result import Audit, Tolerances
from saltflat.checks import check_integer, check_seed
from saltflat.curvature import Estimator, MatrixName, check_estimator, checked_settings
from saltflat.distributed import Reduction, reduction
from saltflat.errors import Interrupted, InvalidType, InvalidValue, ModelError
from saltflat.losses import JointLoss, Loss, LossLike, describe, refuse_parameters, scalar
from saltflat.measure import Selection, left_out, measure_objects
from saltflat.measurement import Measurement
from saltflat.measures import Measure
from saltflat.risk import Batch, Output, Risk, Unpack, answer_of, unwrap
from saltflat.symmetries import Group, check_copy, duplicate, symmetries
from saltflat.watch import kept
from saltflat.work import Callback, Work, reporting

# What the kinds are found on and the outputs are compared on, if no example is given.
_SAMPLES = 32


def audit(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    measures: Selection = None,
    functions: Mapping[str, Function] | None = None,
    elements: int = 2,
    spread: float = 1e3,
    tolerances: Tolerances | None = None,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    estimator: Estimator | None = None,
    tolerance: float | None = None,
    max_directions: int = 1000,
    memory_budget: int | None = None,
    example: Any = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    seed: int = 0,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Audit:
    """Find the rescalings that keep a model's function, and see which measures they move.

    Everything is computed in float64 on a copy; the model is left exactly as it was found. Every
    rescaling that is used is verified first: one that moves the outputs by more than 1e-9 of
    their size is an error in saltflat and raises `SaltflatError`.

    The kinds are told apart: "layer" multiplies every weight matrix by one number; "neuron" is
    unit by unit; "batchnorm" is filters that feed BatchNorm; "attention" is queries against keys
    and values against the projection after them. Kinds that the model does not have are left out.

    Parameters
    ----------
    model, data, loss, measures : as in `measure`, whose default holds here too: each rescaling
        costs one sweep over the data. The other measures are rows that say what they cost
        (`left_out`); "all" includes them, or name them. An empty list leaves the functions alone.
        Eigenvalues are found to `tol=1e-6` or less, and their residuals count in the verdict.
    functions : a user's own measures by name, `f(model, data) -> float`. Each gets a copy of the
        model in float64 and evaluation mode, and the data in float64.
    elements : how many random rescalings of each kind. To them come the first one at smaller
        spreads (for `Audit.plot`), and the heaviest unit and the heaviest layer alone, by
        `spread` and by 1/spread.
    spread : factors are drawn log-uniformly from [1/spread, spread].
    tolerances : how much drift is still called invariant.
    tolerance : as in `measure`, but what can be had exactly is.
    example : inputs to find the rescalings on; by default the first samples of the data.
    Other arguments as in `measure`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = torch.randn(8, 3), torch.arange(8) % 2
    >>> audit = sf.audit(model, data, measures=["hessian_trace", "rho"], elements=1)
    >>> {name: row.verdict for name, row in audit.items()}
    {'hessian_trace': 'moved', 'rho': 'invariant'}
    >>> audit.ok
    True
    """
    panel_measures = _measures(measures, functions or {})
    _check(elements, spread, seed)
    settings = checked_settings(max_directions, memory_budget, "proof", tolerance)
    settings = replace(settings, adaptive=False)  # drift is told from noise best without any
    check_estimator(estimator)
    data = kept(data)  # one for all models
    asked = {"measures": panel_measures, "elements": elements, "spread": spread, "seed": seed}
    asked |= {"curvature": curvature, "estimator": estimator, **settings.asked}
    with reduction(distributed, "audit", **asked) as together, _shown(together, progress) as work:
        _check_functions(functions or {}, together)
        work.at("searching rescalings", 0, 1)
        common: dict[str, Any] = {"unpack": unpack, "output": output, "reduction": together}
        wide, inputs = _prepared(model, data, loss, parameters, example, common)
        panel = Panel(
            data=data,
            loss=loss,
            measures=panel_measures,
            functions=functions or {},
            group=symmetries(wide, inputs, output=output, parameters="trainable"),
            curvature=curvature,
            estimator=estimator,
            settings=settings,
            seed=seed,
            work=work,
            **common,
        )
        planned, kinds = _planned(panel.group, wide, spread, elements, seed)
        work.at("the model itself", 0, 1)
        named = measures is not None and measures != "all"
        before, skipped = _split(panel.read(wide, announced=1 + len(planned)), named)
        ledger = Ledger(before, panel, wide, inputs, tolerances or Tolerances())
        rest = left_out() if measures is None else {}
        prices = {name: (1 + len(planned)) * price for name, price in rest.items()}
        name = type(unwrap(model)).__name__
        finish = partial(ledger.audit, name, spread=spread, skipped=skipped, left_out=prices)
        result = _tried(ledger, planned, kinds, finish)
    for warning in panel.warnings:
        warnings.warn(warning, stacklevel=2)
    return result


def _shown(together: Reduction, progress: bool | Callback | None) -> AbstractContextManager[Work]:
    """The work of the audit, which one rank shows."""
    return reporting(progress if together.rank == 0 else False)


def _planned(
    group: Group, model: nn.Module, spread: float, elements: int, seed: int
) -> tuple[list[Trial], list[Family]]:
    """The rescalings to try, and their kinds."""
    kinds, spreads = families(group), _spreads(spread)
    return [t for f in kinds for t in trials(f, model, spreads, elements, seed)], kinds


def _tried(
    ledger: Ledger,
    planned: Sequence[Trial],
    kinds: Sequence[Family],
    finish: Callable[..., Audit],
) -> Audit:
    """The audit once all rescalings are tried; before that, Ctrl-C leaves what there is."""
    work, done = ledger.panel.work, 0
    try:
        for trial in planned:
            work.at(f"{trial.kind}: {trial.name}", done + 1, len(planned) + 1)
            ledger.add(trial)
            done += 1
    except KeyboardInterrupt as stop:
        tried = {trial.kind for trial in planned[:done]}
        if not tried or ledger.panel.reduction.ranks > 1:
            raise
        partial_audit = finish(kinds=[family for family in kinds if family.kind in tried])
        note = f"PARTIAL: interrupted after {done} of {len(planned)} rescalings"
        notes = (note, *partial_audit.notes)
        raise Interrupted(replace(partial_audit, notes=notes)) from stop
    return finish(kinds=kinds)


def _measures(measures: Selection, functions: Mapping[str, Function]) -> Sequence[Measure]:
    if not isinstance(functions, Mapping):
        raise InvalidType(
            "functions must map names to callables, e.g. {'mine': f}. "
            f"Got {type(functions).__name__}."
        )
    for name, function in functions.items():
        if not callable(function):
            raise InvalidType(
                "functions must map names to callables f(model, data). "
                f"Got {type(function).__name__} for {name!r}."
            )
    if measures is not None and not isinstance(measures, str):
        measures = list(measures)
        if not measures and functions:
            return []
    known = [measure.for_comparison() for measure in measure_objects(measures)]
    for measure in known:
        if measure.name in functions:
            raise InvalidValue(f"{measure.name!r} is a measure; give the function another name.")
    return known


def _check(elements: int, spread: float, seed: int) -> None:
    check_seed(seed)
    check_integer("elements", elements)
    if not (math.isfinite(spread) and spread > 1):
        raise InvalidValue(f"spread must be a finite number > 1. Got {spread!r}.")


def _check_functions(functions: Mapping[str, Function], together: Reduction) -> None:
    if functions and together.ranks > 1:
        raise InvalidValue(
            "functions cannot be audited with distributed=True: each would see the samples of its "
            "own rank alone. Audit them on one rank, with all data."
        )


def _spreads(spread: float) -> list[float]:
    """Powers of ten up to the spread."""
    decades = range(1, math.ceil(math.log10(spread) - 1e-9))
    return [*(10.0**k for k in decades), float(spread)]


def _prepared(
    model: nn.Module,
    data: Any,
    loss: LossLike,
    parameters: str | Iterable[str],
    example: Any,
    common: Mapping[str, Any],
) -> tuple[nn.Module, Any]:
    """A float64 copy in which exactly the measured parameters require gradients, and inputs."""
    wide = duplicate(unwrap(model)).double()
    risk = Risk(wide, data, loss, parameters=parameters, dtype=torch.float64, **common)
    for name, p in wide.named_parameters():
        p.requires_grad_(name in risk.parameters)
    with risk.session():
        few = risk.first().part(0, _SAMPLES)
    example = few.inputs if example is None else example
    try:
        check_copy(unwrap(model), wide, example, answer_of(common["output"]))
    except ModelError:
        raise
    except Exception:
        _check_loss(risk, few, unwrap(model))
        raise
    _check_loss(risk, few, unwrap(model))
    return wide, example


def _check_loss(risk: Risk, few: Batch, model: nn.Module) -> None:
    """Refuse a loss that contains parameters of the model itself, which its copies do not share."""
    with risk.session(), torch.no_grad():
        outputs = risk.forward(few)  # which tells what is wrong if the data do not fit the model
    if isinstance(risk.loss, Loss | JointLoss):
        return
    value = scalar(risk.loss, outputs, few.targets)
    refuse_parameters(describe(risk.loss), value, dict(model.named_parameters()))


def _split(
    readings: Mapping[str, Measurement | str], named: bool
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """The measures that apply, and why the others do not; one that was named must apply."""
    skipped = {name: r for name, r in readings.items() if isinstance(r, str)}
    applied = {name: r for name, r in readings.items() if isinstance(r, Measurement)}
    if skipped and (named or not applied):
        name, reason = next(iter(skipped.items()))
        raise ModelError(f"{name} does not apply to the model: {reason}")
    return applied, skipped
