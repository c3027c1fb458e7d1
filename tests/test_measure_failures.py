"""One measure that cannot be computed never takes the others down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
from cases import BY_NAME
from dense import Dense
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature.curvature import Curvature
from saltflat.curvature.sweep import Kind
from saltflat.errors import MissingDependency, NoSecondDerivative, NotApplicable
from saltflat.measurement import Measurement
from saltflat.measures import MEASURES
from saltflat.measures.base import Context, Measure

CASE = BY_NAME["mlp"]
X, Y = CASE.data()
NO_HESSIAN = {"fisher_rao_norm", "delta_sharpness", "sam_sharpness", "adaptive_sharpness"}


class Once(torch.autograd.Function):
    """Twice the input; torch gives zero for what is differentiated through it twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Never(torch.autograd.Function):
    """Twice the input, with no derivative at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


class Through(nn.Module):
    """A network whose outputs go through a function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.body, self.function = CASE.model(), function

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.function.apply(self.body(x))
        return outputs


def test_a_loss_without_a_second_derivative_leaves_what_needs_none() -> None:
    report = sf.measure(CASE.model(), (X, Y), nn.MultiMarginLoss(p=2), measures="all")
    assert set(report) == NO_HESSIAN
    assert set(report.skipped) == set(MEASURES) - NO_HESSIAN
    assert "multi_margin" in report.skipped["hessian_trace"]
    named = sf.measure(CASE.model(), (X, Y), nn.MultiMarginLoss(p=2), measures=sorted(NO_HESSIAN))
    for name in NO_HESSIAN:
        assert report[name].value == named[name].value


@pytest.mark.parametrize("names", [["hessian_trace"], ["sam_sharpness", "hessian_trace"]])
def test_one_that_was_named_is_an_error(names: list[str]) -> None:
    with pytest.raises(NoSecondDerivative, match="multi_margin"):
        sf.measure(CASE.model(), (X, Y), nn.MultiMarginLoss(p=2), measures=names)


def test_a_model_that_can_be_differentiated_once() -> None:
    """Its gradients are those of the model written out, and so is its Gauss–Newton trace."""

    class Doubled(Through):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.body(x)

    with pytest.raises(NoSecondDerivative, match="curvature='ggn'"):
        sf.max_eigenvalue(Through(Once), (X, Y))
    with pytest.raises(NoSecondDerivative, match="Once"):  # its gradient is constant
        sf.max_eigenvalue(Through(Once), (X, Y), lambda o, y: o.sum().square())
    report = sf.measure(Through(Once), (X, Y), measures="all")
    plain = sf.measure(Doubled(Once), (X, Y), measures="all")
    assert set(report) >= NO_HESSIAN
    assert "hessian_max_eigenvalue" in report.skipped
    for name in NO_HESSIAN:
        assert report[name].value == pytest.approx(plain[name].value, rel=1e-10)
    traces = [sf.trace(kind(Once), (X, Y), curvature="ggn").total for kind in (Through, Doubled)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-10)


def test_what_comes_after_a_function_that_can_be_differentiated_once() -> None:
    """Second derivatives in the last layer do not pass through it."""

    class Early(Through):
        def forward(self, x: Tensor) -> Tensor:
            return self.body[2](self.function.apply(self.body[:2](x)))

    model, names = Early(Once), ["body.2.weight", "body.2.bias"]
    oracle = Dense(Early(Once), X, Y, names=names)
    largest = float(torch.linalg.eigvalsh(oracle.hessian)[-1])
    found = sf.max_eigenvalue(model, (X, Y), parameters=names)
    assert found.value == pytest.approx(largest, rel=1e-6)
    with pytest.raises(NoSecondDerivative, match="Once"):
        sf.max_eigenvalue(model, (X, Y))


def test_what_has_no_derivative_at_all_is_an_error_of_ours() -> None:
    for call in (sf.trace, sf.max_eigenvalue, sf.measure):
        with pytest.raises(NoSecondDerivative, match="differentiated") as caught:
            call(Through(Never), (X, Y))
        assert isinstance(caught.value, sf.ModelError)


def fails_with(error: Exception) -> Any:
    def find(self: Curvature, kinds: frozenset[Kind], *others: Any) -> Any:
        if "diagonal" in kinds:
            raise error
        return found(self, kinds, *others)

    found = Curvature.find
    return find


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MissingDependency("It needs the package mpmath."), "mpmath"),
        (NoSecondDerivative("There is none."), "There is none"),
        (RuntimeError("derivative for aten::odd is not implemented"), "aten::odd"),
        (NotImplementedError("odd"), "odd"),
        (RuntimeError("The singular value decomposition failed\nto converge"), "RuntimeError: The"),
        (torch.OutOfMemoryError("none left"), "OutOfMemoryError: none left"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
def test_a_sweep_that_fails_for_one_kind(error: Exception, words: str, monkeypatch) -> None:
    """What needs no diagonal is what it is without the failure."""
    plain = sf.measure(CASE.model(), (X, Y), measures="all")
    monkeypatch.setattr(Curvature, "find", fails_with(error))
    report = sf.measure(CASE.model(), (X, Y), measures="all")
    lost = {"normalized_sharpness", "neuronwise_minimum_sharpness"}
    assert lost <= set(report.skipped)
    for name in lost:
        assert words in report.skipped[name]
    for name in ("hessian_trace", "fisher_rao_norm", "kappa", "rho"):
        assert report[name].value == pytest.approx(plain[name].value, rel=1e-10)
    with pytest.raises(type(error) if isinstance(error, MissingDependency) else Exception):
        sf.measure(CASE.model(), (X, Y), measures=["normalized_sharpness"])


def test_a_sweep_that_fails_once_is_not_tried_again(monkeypatch) -> None:
    tried = []

    def find(self: Curvature, kinds: frozenset[Kind], *others: Any) -> Any:
        tried.append(kinds)
        if kinds:
            raise NoSecondDerivative("There is none.")
        return found(self, kinds, *others)

    found = Curvature.find
    monkeypatch.setattr(Curvature, "find", find)
    sf.measure(CASE.model(), (X, Y), measures="all")
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize(
    ("data", "loss", "kind"),
    [
        ((X * torch.nan, Y), "cross_entropy", sf.DataError),
        ((X, Y + 7), "cross_entropy", sf.DataError),
        ((X, Y), lambda o, y: o.sum() * torch.nan, sf.DataError),
        ((X[:, :2], Y), "cross_entropy", sf.ModelError),
    ],
)
def test_what_is_wrong_with_everything_is_an_error(data, loss, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        sf.measure(CASE.model(), data, loss, measures="all")


@final
@dataclass(frozen=True)
class Broken(Measure):
    """Fails in a way of its own."""

    name: ClassVar[str] = "broken"
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    needs: ClassVar[frozenset[Any]] = frozenset()
    invariant_to: ClassVar[frozenset[Any]] = frozenset()
    error: Exception

    def compute(self, context: Context) -> Measurement:
        raise self.error


@pytest.mark.parametrize(
    "error", [NotApplicable("never"), RuntimeError(), NotImplementedError("never")]
)
def test_a_measure_that_fails(error: Exception) -> None:
    chosen = [Broken(error), MEASURES["hessian_trace"]()]
    report = sf.measure(CASE.model(), (X, Y), measures=chosen, on_error="skip")
    assert list(report) == ["hessian_trace"]
    assert report.skipped["broken"]
    with pytest.raises((type(error), NoSecondDerivative)):
        sf.measure(CASE.model(), (X, Y), measures=chosen)


def test_a_skipped_measure_is_a_row_that_says_why() -> None:
    chosen = ["hessian_trace", Broken(NotApplicable("never"))]
    report = sf.measure(CASE.model(), (X, Y), measures=chosen, on_error="skip")
    (row,) = [line for line in str(report).splitlines() if "broken" in line]
    assert "does not apply" in row
    assert "never" in row
    frame = report.to_pandas()
    assert math.isnan(frame.loc["broken", "value"])
    assert frame.loc["broken", "skipped"] == "never"
    assert frame.loc["hessian_trace", "value"] == report["hessian_trace"].value


def test_all_measures_can_be_made_to_raise() -> None:
    with pytest.raises(NoSecondDerivative, match="multi_margin"):
        sf.measure(CASE.model(), (X, Y), nn.MultiMarginLoss(p=2), measures="all", on_error="raise")


def test_unknown_words_for_errors() -> None:
    with pytest.raises(sf.InvalidValue, match="on_error must be 'raise' or 'skip'"):
        sf.measure(CASE.model(), (X, Y), on_error="ignore")


def test_mistakes_are_not_hidden() -> None:
    """Of ours, that is: only what torch, SciPy and saltflat raise on purpose is a reason."""
    broken = Broken(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        sf.measure(CASE.model(), (X, Y), measures=[broken], on_error="skip")


# Monitor and audit


class Scale(nn.Module):
    """No weight matrix at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_monitor_records_why() -> None:
    monitor = sf.Monitor(Scale(), (X, Y), measures=["hessian_trace", "minimum_sharpness", "rho"])
    record = monitor.measure()
    truth = torch.autograd.functional.hessian(
        lambda s: nn.functional.cross_entropy(X * s, Y), Scale().scale.detach()
    )
    assert record.values == {"hessian_trace": pytest.approx(float(truth.trace()))}
    assert set(record.failed) == {"minimum_sharpness", "rho"}
    assert "no weight matrix" in record.failed["rho"]


def test_monitor_where_the_sweep_fails() -> None:
    names = ["hessian_trace", "fisher_rao_norm"]
    record = sf.Monitor(
        CASE.model(), (X, Y), measures=names, loss=nn.MultiMarginLoss(p=2)
    ).measure()
    assert set(record.values) == {"fisher_rao_norm"}
    assert "multi_margin" in record.failed["hessian_trace"]
    with pytest.raises(NoSecondDerivative):
        sf.Monitor(CASE.model(), (X, Y), measures=names[:1], loss=nn.MultiMarginLoss(p=2)).measure()


def test_audit_where_the_sweep_fails() -> None:
    audit = sf.audit(CASE.model(), (X, Y), nn.MultiMarginLoss(p=2), elements=1)
    assert "multi_margin" in audit.skipped["hessian_trace"]
    assert "fisher_rao_norm" not in audit.skipped
