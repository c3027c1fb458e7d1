"""`measure` and `compare`: all measures from one call, each curvature quantity computed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from time import perf_counter
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from saltflat.checks import check_choice, check_options, check_seed
from saltflat.curvature import (
    CURVATURE,
    FISHER,
    Certify,
    Curvature,
    Estimator,
    Kind,
    Layer,
    MatrixName,
    Plan,
    Settings,
    check_estimator,
    checked_settings,
    derivatives_explained,
)
from saltflat.distributed import reduction
from saltflat.errors import (
    ChangedData,
    DistributedError,
    Interrupted,
    InvalidType,
    InvalidValue,
    MissingDependency,
    NoSecondDerivative,
    NotApplicable,
    SaltflatError,
    nearest,
    nearest_of,
)
from saltflat.landscape import RiskSurface
from saltflat.losses import LossLike
from saltflat.measurement import Measurement, shortfall
from saltflat.measures import INCLUDED, MEASURES, Context, Measure, Need, Quantity
from saltflat.report import (
    INTERRUPTED,
    STANDING,
    Comparison,
    Report,
    Standing,
    provenance,
    standing_of,
)
from saltflat.risk import Batch, Output, Risk, Unpack
from saltflat.subsample import NO_PARTS, Part, Population, Rule, Samples, check_samples, grown
from saltflat.symmetries import Group
from saltflat.watch import kept
from saltflat.work import Callback, reporting

OnError = Literal["raise", "skip"]
Selection = Iterable[str | Measure] | Literal["all"] | None


def measure(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    measures: Selection = None,
    on_error: OnError | None = None,
    curvature: MatrixName = "hessian",
    parameters: str | Iterable[str] = "trainable",
    estimator: Estimator | None = None,
    tolerance: float | None = None,
    samples: Samples = "all",
    certify: Certify = "proof",
    max_directions: int = 1000,
    memory_budget: int | None = None,
    dtype: torch.dtype | None = None,
    unpack: Unpack | None = None,
    output: Output | None = None,
    seed: int = 0,
    standing: bool = True,
    distributed: bool = False,
    progress: bool | Callback | None = None,
) -> Report:
    """Measure how flat a model's minimum is, by what one sweep gives or by what is named.

    Parameters
    ----------
    model, data, loss : as in `trace`; the model is left exactly as it was found.
    measures : names or configured measures, e.g. `["rho", NormalizedSharpness(lam=1.0)]`, or
        "all". By default those that are made of one sweep over the data, which together cost at
        most 60 gradients on a network that is proved piecewise linear; a gradient is one forward
        and one backward pass over the same data. The others are rows of the report that say what
        they cost (`left_out`).
    on_error : what becomes of a measure that does not apply to the model or cannot be computed:
        "raise" its error, or "skip" it, which the report lists with the reason (`skipped`). By
        default those that were named raise, the others are skipped. What is wrong with the model,
        the data or the loss as a whole is an error all the same.
    estimator, tolerance : for what cannot be had exactly, and a tolerance that is given also for
        what can, as in `trace`: each kind of curvature that the measures are made of has it, and
        every measurement tells its own error.
    samples : "all", or "auto" for growing random parts of the data, until `Measurement.interval` of
        every measure reaches at most 2 `tolerance` of its value to either side; see `trace`.
        Measures that are no smooth function of means over samples (`sampling` is None) do not
        apply then, unless half of the samples are not enough and all are measured.
    seed : of the searches and estimates, and of the order in which samples are drawn.
    standing : whether to find out the loss, the accuracy and whether this is a minimum at all
        (`Report.standing`), for up to 2.7 gradients, and 2 more where the gradient vanishes.
    distributed : True, on every rank of torch's process group, each with its own samples as `data`:
        measured are those of all ranks together, with the same result on all of them (see
        `ShardSampler`). Without it a call is of the process alone and waits for no other.
    progress : True, False, or a callable of (step, done, total); of several ranks, on rank 0. By
        default, what will take longer than ten seconds is announced on the error stream, and
        followed by a line that moves every second; SALTFLAT_PROGRESS=0 in the environment silences
        that.
    Other arguments as in `trace`.

    Ctrl-C raises `Interrupted`, a KeyboardInterrupt, once a measure is done: its `partial` is the
    report so far.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> report = sf.measure(model, (x, y), measures=["hessian_trace", "kappa"])
    >>> round(report["kappa"].value, 3), report["kappa"].invariant_to
    (0.357, frozenset({'layer'}))
    """
    selection = measure_objects(measures)
    on_error = on_error or ("skip" if measures is None or measures == "all" else "raise")
    check_choice("on_error", on_error, get_args(OnError))
    settings = checked_settings(max_directions, memory_budget, certify, tolerance)
    check_estimator(estimator)
    check_seed(seed)
    names = parameters if isinstance(parameters, str) else list(parameters)
    chosen = partial(Risk, parameters=names, dtype=dtype, unpack=unpack, output=output)
    engine_options = {"curvature": curvature, "estimator": estimator, **settings.asked}

    def once(
        data: Any, measures: Sequence[Measure], standing: bool, settings: Settings = settings
    ) -> tuple[Report, Curvature]:
        asked = {"measures": measures, "on_error": on_error, "standing": standing, "seed": seed}
        with reduction(distributed, "measure", **asked, **engine_options) as together:
            risk = chosen(model, data, loss, reduction=together)
            risk.watched.on = True
            engine = Curvature(risk, curvature, estimator, settings, seed)
            told = progress if together.rank == 0 else False
            with reporting(told) as risk.work, risk.session(), derivatives_explained():
                return _measured(measures, engine, on_error, standing), engine

    if check_samples(samples) == "auto":
        with reduction(distributed, "measure", samples=samples, seed=seed) as together:
            population = Population(data, unpack, seed, together)
        report, engine = _on_samples(population, settings, once, selection, on_error, standing)
    else:
        report, engine = once(data, selection, standing)
    if measures is None:
        report = replace(report, left_out=left_out())
    told = _shortfall(report, engine) if estimator is None else ""
    if told:
        report = replace(report, notes=(told, *report.notes))
    for warning in [told, *engine.warnings] if told else engine.warnings:
        warnings.warn(warning, stacklevel=2)
    return report


def _shortfall(report: Report, engine: Curvature) -> str:
    """What is to be said of estimates that the tolerance does not allow; of values on some of the
    samples their intervals tell."""
    if report.provenance.population:
        return ""
    errors = {name: (m.value, m.stderr) for name, m in report.items()}
    first = engine.first
    return shortfall(engine.settings.tolerance, errors, first.shortfall, first.probes)


Once = Callable[[Any, Sequence[Measure], bool, Settings], tuple[Report, Curvature]]


def _on_samples(
    population: Population,
    settings: Settings,
    once: Once,
    measures: Sequence[Measure],
    on_error: OnError,
    standing: bool,
) -> tuple[Report, Curvature]:
    """The measures on as many samples as it takes."""
    rule, on_parts = Rule(population.size, settings.tolerance), settings.on_parts()
    refused: dict[str, str] = {}
    spent: list[float] = []  # in gradients of one sample, by look

    def look(data: Any) -> tuple[tuple[Report, Curvature], list[Part]]:
        asked = [measure for measure in measures if measure.name not in refused]
        try:
            report, engine = once(data, asked, False, on_parts)
        except Interrupted as stop:
            raise Interrupted(_estimated(stop.partial, rule, refused)) from stop
        spent.append(sum(report.provenance.gradients.values()) * report.provenance.samples)
        for name in [m.name for m in report.values() if m.sampling is None]:
            refused[name] = NO_PARTS.format(name)
            if on_error == "raise":
                raise NotApplicable(refused[name])
        parts = [_part(m) for m in report.values() if m.sampling is not None]
        if not parts:
            name, why = next(iter({**report.skipped, **refused}.items()))
            raise NotApplicable(f"No measure can be had on some of the samples. {name}: {why}")
        return (report, engine), parts

    tight = grown(population, rule, look)
    if tight is None:
        report, engine = once(population.data, measures, standing, settings)
        return _with_looks(report, sum(spent)), engine
    (report, engine), size = tight
    report = _with_looks(_estimated(report, rule, refused), sum(spent[:-1]))
    if standing:
        other = once(population.first(size), [], True, on_parts)[0]
        gradients = {**report.provenance.gradients, **other.provenance.gradients}
        source = replace(report.provenance, gradients=gradients)
        report = replace(report, standing=other.standing, provenance=source)
    return report, engine


def _part(m: Measurement) -> Part:
    assert m.sampling is not None
    assert m.skewness is not None
    return Part(m.value, m.sampling, m.skewness, m.stderr)


def _estimated(report: Report, rule: Rule, refused: Mapping[str, str]) -> Report:
    """A report on some samples as one of all of them."""
    size = report.provenance.samples
    measurements = {
        name: replace(m, exact=False, **rule.certainty(_part(m), size))
        for name, m in report.items()
        if m.sampling is not None
    }
    return replace(
        report,
        measurements=measurements,
        skipped={**report.skipped, **refused},
        provenance=replace(report.provenance, population=rule.population),
        notes=(*report.notes, rule.used(size)),
    )


def _with_looks(report: Report, spent: float) -> Report:
    """The report with what looks at fewer samples have cost."""
    source = report.provenance
    gradients = {**source.gradients, "looks": round(spent / source.samples, 3)}
    return replace(report, provenance=replace(source, gradients=gradients))


def _measured(
    measures: Sequence[Measure], engine: Curvature, on_error: OnError, standing: bool
) -> Report:
    """The measures one after the other, inside the session of the engine's risk."""
    risk, work, count = engine.risk, engine.risk.work, len(measures) + 1 + standing
    seconds: dict[str, float] = {}
    spent: dict[str, float] = {}
    done: dict[str, Measurement] = {}
    skipped: dict[str, str] = {}
    work.at("curvature", 0, count)
    beside = STANDING if standing else 0.0
    engine.foresee = partial(announce, engine, measures, 1, beside=beside)
    start = perf_counter()
    context, failure = prepared(engine, measures, on_error)
    seconds["curvature"], spent["curvature"] = perf_counter() - start, work.done
    try:
        for index, each in enumerate(measures):
            work.at(each.name, index + 1, count)
            start, before = perf_counter(), work.done
            result = compute_one(each, context) if on_error == "raise" else attempt(each, context)
            if isinstance(result, Measurement):
                done[each.name] = result
            else:
                skipped[each.name] = result
            seconds[each.name], spent[each.name] = perf_counter() - start, work.done - before
    except KeyboardInterrupt as stop:
        if not done or risk.reduction.ranks > 1 or risk.sharded:
            raise  # a report takes what processes have together
        raise Interrupted(_partial(measures, engine, done, skipped, seconds, spent)) from stop
    if failure is not None and not done:
        raise failure
    stands, remarks = None, list[str]()
    if standing:
        work.at("standing", count - 1, count)
        start, before = perf_counter(), work.done
        stands, remarks = _standing(engine)
        seconds["standing"], spent["standing"] = perf_counter() - start, work.done - before
    work.at("done", count, count)
    _check_agreement(risk, skipped)
    certificate = engine.first.certificate
    source = provenance(risk, certificate, engine.matrix, engine.seed, seconds, spent)
    notes = (*_notes(risk), *engine.first.notes, *remarks)
    return Report(done, skipped, source, notes, standing=stands)


def _check_agreement(risk: Risk, skipped: Mapping[str, str]) -> None:
    """Refuse results of which some ranks have more than others: for want of memory, say."""
    first, *others = risk.reduction.each(lambda: dict(skipped))
    for rank, other in enumerate(others, 1):
        for name in sorted(first.keys() ^ other.keys()):
            who, why = (rank, other[name]) if name in other else (0, first[name])
            raise DistributedError(
                f"{name} was skipped on rank {who} and not on rank {rank - who}, so that the ranks "
                f"have no result in common: {why}"
            )


def _standing(engine: Curvature) -> tuple[Standing | None, list[str]]:
    """Where the model stands, and what is to be said of that, or why it is not known."""
    risk, budget = engine.risk, engine.settings.memory_budget
    try:
        return standing_of(RiskSurface(risk, list(risk.parameters), memory_budget=budget))
    except (ChangedData, DistributedError):
        raise
    except (SaltflatError, RuntimeError) as reason:
        words = (str(reason) or type(reason).__name__).splitlines()[0]
        return None, [f"whether this is a minimum is not known: {words}"]


def _partial(
    measures: Sequence[Measure],
    engine: Curvature,
    done: Mapping[str, Measurement],
    skipped: Mapping[str, str],
    seconds: Mapping[str, float],
    spent: Mapping[str, float],
) -> Report:
    """What there is after an interruption; the rest is listed as skipped for that reason."""
    rest = [m.name for m in measures if m.name not in done and m.name not in skipped]
    reasons = {**skipped, **dict.fromkeys(rest, INTERRUPTED)}
    note = f"PARTIAL: interrupted after {len(done)} of {len(measures)} measures"
    risk, first = engine.risk, engine.first
    source = provenance(risk, first.certificate, engine.matrix, engine.seed, seconds, spent)
    return Report(done, reasons, source, (note, *_notes(risk), *first.notes))


def compare(
    models: Mapping[str, nn.Module], data: Any, loss: LossLike = "cross_entropy", **options: Any
) -> Comparison:
    """Measure several models on the same data, and put them side by side.

    `data` is one for all, or a mapping with the same names as `models`. Options as in `measure`.
    The result says when its numbers are not comparable: other data, loss or sample count; and of
    any two models which is flatter by a measure, if that can be said (`verdicts`).

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> models = {"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)}
    >>> data = torch.randn(8, 3), torch.arange(8) % 2
    >>> comparison = sf.compare(models, data, measures=["hessian_trace"])
    >>> comparison.problems
    ()
    >>> comparison["b"]["hessian_trace"].exact
    True
    """
    if not isinstance(models, Mapping):
        raise InvalidType(
            "compare needs a mapping from names to models, e.g. {'sgd': a, 'sam': b}. "
            f"Got {type(models).__name__}."
        )
    if odd := [name for name in models if not isinstance(name, str)]:
        raise InvalidType(f"The names of models to compare must be strings. Got {odd[0]!r}.")
    every = signature(measure).parameters.values()
    check_options("compare", options, [p.name for p in every if p.kind is p.KEYWORD_ONLY])
    own = isinstance(data, Mapping) and set(data) == set(models)
    reports, data = {}, data if own else kept(data)
    for name, model in models.items():
        reports[name] = measure(model, data[name] if own else data, loss, **options)
    return Comparison(reports)


def prepared(
    engine: Curvature, measures: Sequence[Measure], on_error: OnError, group: Group | None = None
) -> tuple[Context, Exception | None]:
    """What the measures compute from, with all the curvature that they need from one sweep.

    Where that fails and measures are skipped, the context has none, and the error says why: each
    measure then computes what it needs, or fails for itself. What is wrong with the model, the data
    or the loss as a whole is an error all the same.
    """
    kinds = _kinds(measures)
    quantities: dict[Kind, Quantity] = {}
    failure: Exception | None = None
    try:
        with derivatives_explained():
            if kinds:
                _narrow(engine, measures)
                each_block = not all(measure.adds_up for measure in measures)
                quantities = engine.quantities(kinds, partial(_wanted, measures), each_block)
    except (SaltflatError, RuntimeError) as error:
        alone = NoSecondDerivative | NotApplicable | MissingDependency
        if on_error == "raise" or (
            isinstance(error, SaltflatError) and not isinstance(error, alone)
        ):
            raise
        failure = error
    return Context(engine.risk, engine.layers(), quantities, engine.seed, engine, group), failure


def _narrow(engine: Curvature, measures: Sequence[Measure]) -> None:
    """Leave all parameters alone but those of single layers, if no measure asks for others."""
    if all(measure.one_layer for measure in measures):
        layers = engine.outline()
        chosen = [measure.chosen(layers) for measure in measures]
        if all(chosen):
            engine.risk.narrow(frozenset(layer.parameter for layer in chosen if layer))


def _wanted(measures: Sequence[Measure], layers: Sequence[Layer]) -> dict[Kind, frozenset[str]]:
    """The parameters that kinds of curvature are wanted of, where measures of one layer ask."""
    chosen = [measure.chosen(layers) if measure.one_layer else None for measure in measures]
    names = frozenset(layer.parameter for layer in chosen if layer)
    wide = [m.required() for m, layer in zip(measures, chosen, strict=True) if not layer]
    return dict.fromkeys(CURVATURE.difference(*wide), names) if names else {}


def _kinds(measures: Iterable[Measure]) -> frozenset[Kind]:
    """The kinds of curvature that the measures need."""
    needs = frozenset[Need]().union(*(measure.required() for measure in measures))
    return cast(frozenset[Kind], needs & (CURVATURE | FISHER))


def announce(
    engine: Curvature,
    measures: Sequence[Measure],
    times: int,
    first: Batch,
    plan: Plan,
    beside: float = 0.0,
) -> None:
    """Say how long it will take to measure so many models like this one, if that is long.

    `beside` is what else each of them takes, in gradients.
    """
    gradients = engine.price(_kinds(measures), first, plan) + sum(m.price() for m in measures)
    engine.announce(times * (gradients + beside), first, plan)


def compute_one(measure: Measure, context: Context) -> Measurement:
    """The measure of the model in `context`, or `NotApplicable`."""
    if not context.layers and measure.needs_layers:
        raise NotApplicable("The model has no weight matrix among its measured parameters.")
    with derivatives_explained():
        return measure.compute(context)


def attempt(measure: Measure, context: Context) -> Measurement | str:
    """The measure, or why there is none: what fails for one measure concerns it alone."""
    try:
        return compute_one(measure, context)
    except (ChangedData, DistributedError):
        raise
    except SaltflatError as reason:
        return str(reason)
    except RuntimeError as reason:  # torch's own, or SciPy's: an iteration that does not converge
        return f"{type(reason).__name__}: {(str(reason) or 'no message').splitlines()[0]}"


def left_out() -> dict[str, float]:
    """The measures that are not computed unless they are asked for, and their prices."""
    return {n: kind().price() for n, kind in MEASURES.items() if kind.cost not in INCLUDED}


def measure_objects(measures: Selection) -> Sequence[Measure]:
    """The measures that these names and measures stand for; the cheap ones for None."""
    if measures is None:
        return [kind() for kind in MEASURES.values() if kind.cost in INCLUDED]
    if measures == "all":
        return [kind() for kind in MEASURES.values()]
    if isinstance(measures, str):
        close = measures if measures in MEASURES else nearest_of(measures, MEASURES)
        hint = f"; pass [{close!r}]" if close else f". {nearest(measures, MEASURES)}"
        raise InvalidType(f"measures must be a list, or 'all'. Got {measures!r}{hint}.")
    selection: dict[str, Measure] = {}
    for each in measures:
        if isinstance(each, str):
            if each not in MEASURES:
                raise InvalidValue(f"Unknown measure {each!r}. {nearest(each, MEASURES)}")
            each = MEASURES[each]()
        elif not isinstance(each, Measure):
            raise InvalidType(f"measures must hold names or measures. Got {_wrong(each)}.")
        if each.name in selection:
            raise InvalidValue(f"The measure {each.name!r} is asked for twice.")
        selection[each.name] = each
    if not selection:
        raise InvalidValue("measures is empty: there is nothing to measure.")
    return list(selection.values())


def _wrong(each: object) -> str:
    if isinstance(each, type):
        return f"the class {each.__name__}; pass {each.__name__}()"
    return type(each).__name__


def _notes(risk: Risk) -> list[str]:
    frozen = [f"frozen, not measured: {', '.join(risk.frozen)}"] if risk.frozen else []
    return [*frozen, *risk.notes]
