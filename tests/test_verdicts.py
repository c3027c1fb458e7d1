"""Which of two models is flatter, and when that cannot be said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME
from torch import Tensor, nn

import saltflat as sf
from saltflat.measures import NormalizedSharpness
from saltflat.report import Standing

CASE = BY_NAME["mlp"]
MEASURES = ["hessian_trace", "rho"]
AT = Standing(0.5, 0.01, 0.9, 1.1, 1e-3, 1e-4, (1.0, 2.0))


def report(value: float, standing: Standing | None = AT, **fields: Any) -> sf.Report:
    """Of one measure, with a value and a standing as given."""
    found = sf.measure(CASE.model(), CASE.data(), measures=["rho"])
    source = {k: fields.pop(k) for k in ("model", "parameters", "data_hash") if k in fields}
    m = replace(found["rho"], value=value, **({"sampling": 0.01} | fields))
    provenance = replace(found.provenance, **source)
    return replace(found, measurements={"rho": m}, provenance=provenance, standing=standing)


def other(**fields: Any) -> Standing:
    return replace(AT, **({"outputs": (1.0, 2.1)} | fields))


def verdict(one: sf.Report, two: sf.Report, measure: str = "rho") -> sf.Verdict:
    return one.compare(two, ("a", "b")).verdict(measure, "a", "b")


def test_the_lower_value_is_flatter() -> None:
    found = verdict(report(2.0), report(1.0, other()))
    assert (found.word, found.flatter, found.reason) == ("flatter", "b", "")
    assert str(found) == "rho: b is flatter than a"
    assert repr(found) == "<Verdict rho: b is flatter than a>"
    assert verdict(report(1.0), report(2.0, other())).flatter == "a"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"sampling": 0.2}, "not distinguishable"),
        ({"sampling": 0.05}, "flatter"),
        ({"exact": False, "stderr": 0.2}, "not distinguishable"),
        ({"gap": 0.3}, "not distinguishable"),
        ({"gap": float("nan")}, "not distinguishable"),
        ({"bound": "lower", "exact": False}, "flatter"),
    ],
)
def test_errors_count(fields: dict[str, Any], word: str) -> None:
    assert verdict(report(1.0, **fields), report(1.3, other(), **fields)).word == word


def test_a_sign_that_is_unknown_is_told() -> None:
    fields: dict[str, Any] = {"exact": False, "stderr": 0.8}
    both = report(1.0, **fields).compare(report(2.0, other(), **fields), ("a", "b"))
    told = "sign of rho unknown, within its error: a"
    assert told in str(both).splitlines()
    assert told in both.sections()[0].notes
    sure = report(2.0, **fields).compare(report(2.0, other(), **fields), ("a", "b"))
    assert "unknown" not in str(sure)


def test_a_searched_supremum_may_miss_some() -> None:
    searched: dict[str, Any] = {"bound": "lower", "exact": False, "sampling": None}
    assert verdict(report(1.0, **searched), report(1.005, other(), **searched)).word == (
        "not distinguishable"
    )
    exact: dict[str, Any] = {"sampling": None}
    found = verdict(report(1.0, **exact), report(1.005, other(), **exact))
    assert found.word == "flatter"
    assert found.reason == "on these samples; for others it is not known"


@pytest.mark.parametrize(
    ("one", "two", "reason"),
    [
        (report(1.0), report(2.0, other(), data_hash="0"), "the data differ"),
        (
            report(1.0, parameters=7),
            report(2.0, other()),
            "the architecture differs: Sequential of 7 parameters and Sequential of 43 parameters",
        ),
        (report(1.0, other(decrease=0.4)), report(2.0), "not a minimum: a"),
        (
            report(1.0, other(loss=3.0)),
            report(2.0, other(decrease=0.4, outputs=(3.0, 1.0))),
            "not shown to be a minimum: a; not a minimum: b",
        ),
        (
            report(1.0, other(decrease=0.4)),
            report(2.0, other(decrease=0.3, outputs=(3.0, 1.0))),
            "not a minimum: a and b",
        ),
        (report(1.0, other(loss=0.1)), report(2.0), "the loss level differs: 0.1 and 0.5"),
    ],
)
def test_what_is_not_comparable(one: sf.Report, two: sf.Report, reason: str) -> None:
    found = verdict(one, two)
    assert (found.word, found.flatter, found.reason) == ("not comparable", "", reason)
    assert reason in str(found)


def test_losses_that_differ_by_their_sampling_error_are_one_level() -> None:
    assert verdict(report(1.0, other(loss=0.1, sampling=0.3)), report(2.0)).word == "flatter"


def test_reports_of_before_there_were_standings() -> None:
    assert verdict(report(1.0, None), report(2.0, None)).word == "flatter"
    assert "a minimum?" not in str(report(1.0, None).compare(report(2.0, None)))


def test_settings_and_measures_that_are_missing() -> None:
    found = sf.measure(CASE.model(), CASE.data(), measures=[NormalizedSharpness(lam=1.0), "rho"])
    again = sf.measure(CASE.model(), CASE.data(), measures=["normalized_sharpness"])
    both = found.compare(again, ("a", "b"))
    settings = both.verdict("normalized_sharpness", "a", "b")
    assert settings.reason == "the settings of normalized_sharpness differ"
    assert both.verdict("rho", "a", "b").reason == "rho of b was not measured"
    with pytest.raises(sf.NotMeasured, match=r"'rhoo' was not measured. Nearest is 'rho'"):
        both.verdict("rhoo", "a", "b")
    with pytest.raises(KeyError):
        both.verdict("rho", "a", "c")


def fitted(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1500)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


@pytest.fixture(scope="module")
def three() -> sf.Comparison:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (300,), generator=generator)
    model = fitted(0, x, y)
    twin = sf.symmetries(model, x[:8]).random(seed=0, spread=100.0)(model)
    models = {"a": model, "twin": twin, "b": fitted(1, x, y)}
    return sf.compare(models, (x, y), measures=MEASURES)


def test_a_rescaled_twin_is_the_same_function(three: sf.Comparison) -> None:
    for measure in MEASURES:
        assert three.verdict(measure, "a", "twin").word == "same function"
        assert three.verdict(measure, "a", "b").word in ("flatter", "not distinguishable")
    text = str(three)
    assert "a and twin are the same function" in text
    moved = three.verdict("hessian_trace", "b", "twin")
    assert (moved.word, moved.flatter) == ("flatter", "b")
    assert "a rescaling that keeps the function could reverse this" in moved.reason
    assert len(three.verdicts) == 2 * 3
    assert three.standing["b"] is three["b"].standing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_models_that_fit_their_data_are_not_one_function(dtype: torch.dtype) -> None:
    """Their outputs are the targets, all of them; elsewhere they differ, and so do their values."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 5, generator=g).double(), torch.randn(10, 1, generator=g).double()

    def fit(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 1, bias=False)
        model = nn.Sequential(*layers).double()
        with torch.no_grad():
            model[2].weight.copy_(torch.linalg.lstsq(model[:2](x), y, driver="gelsd").solution.T)
        return model

    one, two = fit(0), fit(1)
    twin = sf.symmetries(one, x).random(seed=0)(one)
    assert torch.allclose(one(x), two(x), rtol=1e-12, atol=1e-12)
    models = {name: m.to(dtype) for name, m in {"one": one, "two": two, "twin": twin}.items()}
    found = sf.compare(models, (x.to(dtype), y.to(dtype)), "mse", measures=["rho"])
    assert found.verdict("rho", "one", "two").word in ("flatter", "not distinguishable")
    assert found.verdict("rho", "one", "twin").word == "same function"


def test_saved_comparisons_say_the_same(three: sf.Comparison, tmp_path: Path) -> None:
    path = three.save(tmp_path / "both.json")
    again = sf.Comparison.load(path)
    assert again == three
    assert sf.load(path) == three
    assert again.verdicts == three.verdicts
    assert str(again) == str(three)
    saved = {name: sf.load(r.save(tmp_path / f"{name}.json")) for name, r in three.items()}
    assert sf.Comparison(saved).verdicts == three.verdicts
    with pytest.raises(sf.InvalidValue, match=r"not a report: it holds a comparison. Use sf.load"):
        sf.Report.load(path)


def test_the_table(three: sf.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 130):
        monkeypatch.setenv("COLUMNS", str(width))
        text = str(three)
        assert max(map(len, text.splitlines())) <= width
        rows = {line.strip("│ ").split()[0]: line for line in text.splitlines() if line.strip("│ ")}
        assert f"{three['a'].standing.loss:.4g}" in rows["loss"]
        assert "%" in rows["accuracy"]
        for word in ("hessian_trace", "rho", "verdict", "a minimum?"):
            assert word in text
    two = three["a"].compare(three["twin"], ("a", "twin"))
    assert "same function" in str(two)
    flat = report(1.0).compare(report(2.0, other()), ("x", "y"))
    assert flat.flattest("rho") == "x flatter"
    assert "x flatter" in str(flat)
    assert "verdict" not in str(sf.Comparison({"a": three["a"]}))


def test_to_pandas(three: sf.Comparison) -> None:
    pytest.importorskip("pandas")
    frame = three.to_pandas()
    assert frame.index.names == ["model", "measure"]
    assert frame.loc[("b", "rho"), "value"] == three["b"]["rho"].value
    assert frame.loc[("b", "rho"), "loss"] == three["b"].standing.loss
    assert frame.loc[("b", "rho"), "a minimum?"] == three["b"].standing.word


# Where a model stands, and the word and the phrase for it.
STANDS = [
    (other(), "yes", "a minimum"),
    (other(decrease=0.003, chance=3.0), "yes", "a minimum"),
    (other(decrease=0.01), "nearly", "nearly a minimum"),
    (other(decrease=0.0), "stationary", "a stationary point, perhaps a minimum"),
    (other(loss=3.0), "not shown", "not shown to be a minimum"),
    (other(decrease=0.4), "no", "not a minimum"),
    (other(loss=3.0, decrease=2.0), "no", "not a minimum"),
]


@pytest.mark.parametrize(("stand", "word", "phrase"), STANDS)
def test_one_vocabulary_for_minima(stand: Standing, word: str, phrase: str, tmp_path: Path) -> None:
    """A report, a comparison, their pages and their files call a place the same."""
    one, two = report(1.0, stand), report(2.0, AT)
    assert (stand.word, stand.phrase) == (word, phrase)
    assert f": {phrase}: " in " ".join(str(one).split())
    assert f"{phrase[0].upper()}{phrase[1:]}: " in one.sections()[0].text
    both = one.compare(two, ("x", "y"))
    (row,) = (line for line in str(both).splitlines() if line.lstrip("│ ").startswith("a minimum?"))
    assert row.replace("│", " ").split("?")[1].strip().startswith(f"{word}  ")
    assert both.sections()[0].facts["x"].endswith(f"a minimum? {word}")
    away = f"{phrase}, and so not comparable: x"
    assert (away in " ".join(str(both).split())) != stand.minimum
    assert (both.verdict("rho", "x", "y").reason == f"{phrase}: x") != stand.minimum
    for result in (one, both):
        content = json.loads(result.save(tmp_path / "result.json").read_text())
        saved = content.get("standing") or content["reports"]["x"]["standing"]
        assert (saved["word"], saved["minimum"]) == (word, stand.minimum)
        assert saved["verdict"].startswith(f"{phrase}: ")
        assert sf.load(tmp_path / "result.json") == result


def test_data_of_another_type_are_the_same_data() -> None:
    """Values that float32 holds, and those that it rounds; another value is another."""
    x, y = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3

    def measured(x: Tensor, y: Tensor = y) -> sf.Report:
        torch.manual_seed(0)
        model = nn.Linear(5, 3).to(x.dtype)
        return sf.measure(model, (x, y), measures=["hessian_trace"])

    single, double = measured(x), measured(x.double())
    assert single.provenance.data_hash != double.provenance.data_hash
    assert not single.compare(double).problems
    assert verdict(single, double, "hessian_trace").word == "same function"
    wide = x.double() + 1e-12
    assert not measured(wide).compare(measured(wide.float())).problems
    for other in (
        measured(wide.float() * 1.001),
        measured(x, y.flip(0)),
        measured(x[:, [1, 0, 2, 3, 4]]),
    ):
        assert verdict(double, other, "hessian_trace").reason == "the data differ"
    # Of one type, every digit counts.
    assert verdict(measured(wide), double, "hessian_trace").reason == "the data differ"


def scaled(factor: float) -> Any:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return factor * F.cross_entropy(o, y)

    return loss


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return self.factor * F.cross_entropy(o, y)


def with_default(o: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    return factor * F.cross_entropy(o, y)


class Private:
    """As users write them: settings in private attributes, methods that help, and a counter."""

    def __init__(self, factor: float) -> None:
        self._factor, self._calls = factor, 0

    def loss(self, o: Tensor, y: Tensor) -> Tensor:
        self._calls += 1
        return self._scaled(F.cross_entropy(o, y))

    def _scaled(self, loss: Tensor) -> Tensor:
        return self._factor * loss


class Trainer:
    """With a loss among its methods, and much else."""

    def __init__(self, factor: float, step: int = 0) -> None:
        self.config, self.step, self.model = SimpleNamespace(factor=factor, step=step), step, CASE

    def loss(self, o: Tensor, y: Tensor) -> Tensor:
        return self.config.factor * F.cross_entropy(o, y)


def by_class(factor: float) -> Any:
    class Constants:
        FACTOR = factor

    return lambda o, y: Constants.FACTOR * F.cross_entropy(o, y)


def by_method(factor: float) -> Any:
    class Inner(nn.Module):
        def forward(self, o: Tensor, y: Tensor) -> Tensor:
            return self.value(o, y)

        value = staticmethod(scaled(factor))

    inner = Inner()
    return lambda o, y: inner(o, y)


def weighted(factor: float) -> Any:
    weights = torch.ones(5000, dtype=torch.float64)
    weights[4000] = factor
    return lambda o, y: F.cross_entropy(o, y, weights[: o.shape[1]])


LOSSES: dict[str, tuple[Any, Any, Any]] = {
    "methods of objects": (Private(1.0).loss, Private(1.0).loss, Private(2.0).loss),
    "methods of trainers": (Trainer(1.0).loss, Trainer(1.0, step=7).loss, Trainer(2.0).loss),
    "constants of classes": (by_class(1.0), by_class(1.0), by_class(2.0)),
    "methods of modules": (by_method(1), by_method(1), by_method(2)),
    "long tensors": (weighted(1.0), weighted(1.0), weighted(2.0)),
    "lambdas": (
        lambda o, y: F.cross_entropy(o, y),
        lambda o, y: F.cross_entropy(o, y),
        lambda o, y: 2 * F.cross_entropy(o, y),
    ),
    "closures": (scaled(1.0), scaled(1.0), scaled(2.0)),
    "modules": (Scaled(1.0), Scaled(1.0), Scaled(2.0)),
    "methods": (Scaled(1.0).forward, Scaled(1.0).forward, Scaled(2.0).forward),
    "partials": (
        partial(with_default, factor=1.0),
        partial(with_default, factor=1.0),
        partial(with_default, factor=2.0),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_one_name_are_told_apart(name: str, tmp_path: Path) -> None:
    options: Any = {"measures": ["hessian_trace"]}
    first, again, third = (
        sf.measure(CASE.model(), CASE.data(), f, **options) for f in LOSSES[name]
    )
    assert len({r.provenance.loss for r in (first, again, third)}) == 1
    assert not first.compare(again).problems
    assert verdict(first, third, "hessian_trace").reason == "the loss differs"
    (line,) = sf.Report.load(first.save(tmp_path / "a.json")).compare(third).problems
    assert first.provenance.loss_code in line
    assert third.provenance.loss_code in line
    # Files of before, and other versions of Python, cannot tell.
    old = replace(first, provenance=replace(first.provenance, loss_code=""))
    assert not old.compare(third).problems
    python = replace(first.provenance, versions={"python": "3.9.1"})
    assert not replace(first, provenance=python).compare(third).problems


def test_hashes_of_code_are_the_same_in_another_process() -> None:
    """Sets of words have another order there, and objects another identity."""
    text = """
from saltflat.report.code import code_hash
def helper(x): return x in {"a", "b", "c"}
limit = 3.0
def loss(o, y, power=(1, 2)):
    return [helper(k) * limit for k in (o, y)]
print(code_hash(loss))
"""
    found = set()
    for seed, script in (("1", text), ("2", "# moved\n" + text), ("1", text.replace("3.0", "4.0"))):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = [sys.executable, "-c", script]
        found.add(subprocess.run(run, env=environment, capture_output=True, text=True).stdout)
    assert len(found) == 2
    assert all(len(line) == 17 for line in found)


def test_other_parameters_of_the_same_number() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    one, two, again = (
        sf.measure(model, (x, y), parameters=[name], measures=["hessian_trace"])
        for name in ("0.weight", "2.weight", "0.weight")
    )
    found = verdict(one, two, "hessian_trace")
    assert (found.word, found.reason) == ("not comparable", "other parameters were measured")
    assert verdict(one, again, "hessian_trace").word == "same function"
    old = replace(one, provenance=replace(one.provenance, measured=""))
    assert verdict(old, two, "hessian_trace").reason != "other parameters were measured"
