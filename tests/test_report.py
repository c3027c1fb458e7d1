"""`measure` and `compare` as calls, and what they return: reports that print, save and compare."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME, Case, normal
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from untouched import assert_untouched, dressed, fingerprint

import saltflat as sf
from saltflat import work
from saltflat.curvature import curvature
from saltflat.measures import (
    MEASURES,
    Context,
    FisherRaoNorm,
    Measure,
    NormalizedSharpness,
    NotApplicable,
    RelativeFlatness,
    Rho,
)
from saltflat.report import Provenance

CASE = BY_NAME["mlp"]


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")


FEW = ["hessian_trace", "rho", "normalized_sharpness"]


def measured(measures: Any = FEW, case: Case = CASE, **options: Any) -> sf.Report:
    return sf.measure(case.model(), case.data(), case.loss, measures=measures, **options)


def made(**fields: Any) -> sf.Measurement:
    return sf.Measurement(**({"name": "rho", "value": 1.5, "exact": True} | fields))


def report_of(*measurements: sf.Measurement, **fields: Any) -> sf.Report:
    source = measured(["hessian_trace"]).provenance
    values = {"skipped": {}, "provenance": source} | fields
    return sf.Report({m.name: m for m in measurements}, **values)


# Which measures


def test_unknown_measures_are_refused_with_the_nearest() -> None:
    with pytest.raises(sf.InvalidValue, match=r"Unknown measure 'hesian_trace'. Nearest is 'hess"):
        measured(["hesian_trace"])
    with pytest.raises(sf.InvalidValue, match="'rho' is asked for twice"):
        measured(["rho", "kappa", "rho"])
    with pytest.raises(sf.InvalidValue, match="'normalized_sharpness' is asked for twice"):
        measured([NormalizedSharpness(lam=1.0), "normalized_sharpness"])
    with pytest.raises(sf.InvalidValue, match="measures is empty"):
        measured([])
    with pytest.raises(sf.InvalidType, match=r"or 'all'. Got 'rho'; pass \['rho'\]"):
        measured("rho")
    with pytest.raises(sf.InvalidType, match=r"names or measures.*NormalizedSharpness\(\)"):
        measured([NormalizedSharpness])
    with pytest.raises(sf.InvalidType, match=r"names or measures\. Got int\."):
        measured([3])
    with pytest.raises(sf.InvalidType, match="seed must be an integer"):
        measured(seed=1.5)
    with pytest.raises(sf.InvalidType, match="seed must be an integer"):
        measured(seed=True)
    with pytest.raises(sf.InvalidType, match=r"estimator must be .*Got str"):
        measured(estimator="hutchinson")
    with pytest.raises(sf.InvalidValue, match="curvature must be"):
        measured(curvature="fisher")


def test_names_and_configured_measures() -> None:
    found = measured(["rho", NormalizedSharpness(lam=2.0)])
    assert list(found) == ["rho", "normalized_sharpness"]
    assert found["normalized_sharpness"].settings["lam"] == 2.0
    generator = (name for name in ["rho"])
    assert list(measured(generator)) == ["rho"]


def test_what_one_sweep_gives_is_the_default() -> None:
    found = sf.measure(CASE.model(), CASE.data())
    assert {name for name in MEASURES if name in found} == {
        name for name, kind in MEASURES.items() if kind.cost == "sweep"
    }
    assert not found.skipped
    assert {*found, *found.left_out} == set(MEASURES)
    assert "kappa" not in found
    text = str(found)
    assert "cost, gradients" in text
    for name, price in found.left_out.items():
        row = next(line for line in text.splitlines() if f" {name} " in line)
        assert "not computed" in row
        assert f"about {price:.0f} " in row
        assert 'measures="all"' in row
    with pytest.raises(sf.NotMeasured, match=r'about 60 gradients.*measures=\["kappa"\]'):
        found["kappa"]
    with pytest.raises(sf.NotMeasured, match=r'^kappa was.*, or measures="all"\.$'):
        found["kappa"]
    # What was asked for has no such rows.
    assert not measured().left_out


def test_the_line_to_write_computes_what_was_left_out() -> None:
    found = sf.measure(CASE.model(), CASE.data())
    with pytest.raises(sf.NotMeasured) as raised:
        found["kappa"]
    line = str(raised.value).partition("Write ")[2].partition("),")[0] + ")"
    asked = eval(line, {"sf": sf, "model": CASE.model(), "data": CASE.data()})
    assert asked["kappa"].value > 0


def test_what_was_left_out_survives(tmp_path: Path) -> None:
    found = sf.measure(CASE.model(), CASE.data())
    loaded = sf.Report.load(found.save(tmp_path / "run.json"))
    assert loaded == found
    assert loaded.left_out == found.left_out
    assert str(loaded) == str(found)
    with pytest.raises(sf.NotMeasured, match="kappa was not computed"):
        loaded["kappa"]
    frame = found.to_pandas()
    assert frame.loc["kappa", "cost_gradients"] == 60
    assert frame.loc["kappa", "skipped"] == 'not computed: measures="all"'
    # As it was saved before there were prices.
    content = json.loads((tmp_path / "run.json").read_text())
    del content["left_out"], content["provenance"]["gradients"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = sf.Report.load(tmp_path / "old.json")
    assert not old.left_out
    assert "shared by all" not in str(old)


def test_what_was_left_out_is_compared() -> None:
    data = CASE.data()
    both = sf.compare({"a": CASE.model(), "b": CASE.model()}, data)
    assert both.left_out["kappa"] == 60
    assert "not computed, about 60 gradients" in str(both)
    one = sf.measure(CASE.model(), data, measures=["kappa"])
    mixed = sf.Comparison({"a": both["a"], "b": one})
    assert "kappa" not in mixed.left_out


def test_costs_are_counted() -> None:
    """A search costs what its price says; a sweep stands once, and the same on every run."""
    names = ["hessian_trace", "rho", "sam_sharpness", "kappa"]
    few = sf.measure(CASE.model(), CASE.data(), measures=names).provenance.gradients
    again = sf.measure(CASE.model(), CASE.data(), measures=names).provenance.gradients
    assert few == again
    assert few["hessian_trace"] == few["rho"] == 0
    assert few["sam_sharpness"] == pytest.approx(MEASURES["sam_sharpness"]().price())
    assert 0 < few["kappa"] <= MEASURES["kappa"]().price()
    assert 1 < few["curvature"] < 60
    split = list(zip(*(part.split(3) for part in CASE.data()), strict=True))
    parts = sf.measure(CASE.model(), split, measures=names).provenance.gradients
    assert parts["curvature"] == pytest.approx(few["curvature"], rel=1e-2)


def test_everything() -> None:
    found = sf.measure(CASE.model(), CASE.data(), measures="all")
    assert {*found, *found.skipped} == set(MEASURES)
    assert not found.left_out
    assert "bn_sharpness" in found.skipped
    assert "BatchNorm" in found.skipped["bn_sharpness"]
    assert "rho" in found
    assert "bn_sharpness" not in found
    text = str(found)
    assert "does not apply" in text
    for name in MEASURES:
        assert name in text


def test_what_does_not_apply_is_an_error_if_it_was_named() -> None:
    with pytest.raises(NotApplicable, match="BatchNorm"):
        measured(["rho", "bn_sharpness"])


class Scale(nn.Module):
    """No weight matrix at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_model_without_matrices() -> None:
    """The whole Hessian is there all the same."""
    x, y = normal(3)(5, torch.Generator().manual_seed(0)), torch.arange(5) % 3
    found = sf.measure(Scale(), (x, y), measures=["hessian_trace", "hessian_max_eigenvalue"])
    model = Scale()
    hessian = torch.autograd.functional.hessian(
        lambda s: F.cross_entropy(x * s, y), model.scale.detach()
    )
    assert found["hessian_trace"].value == pytest.approx(float(hessian.trace()))
    largest = float(torch.linalg.eigvalsh(hessian)[-1])
    assert found["hessian_max_eigenvalue"].value == pytest.approx(largest)
    for name in ("rho", "kappa", "normalized_sharpness"):
        with pytest.raises(NotApplicable, match="no weight matrix"):
            sf.measure(model, (x, y), measures=[name])


# How it is computed


def forwards(measures: list[Any]) -> int:
    """How often the model is run, from nothing known of it."""
    model, calls = CASE.model(), []
    model.register_forward_hook(lambda *args: calls.append(1))
    sf.measure(model, CASE.data(), measures=measures, progress=False)
    return len(calls)


def test_each_quantity_is_computed_once() -> None:
    together = [
        "hessian_trace",
        "kappa_trace",
        "matrix_normalized_sharpness",
        "normalized_sharpness",
        "rho",
        "relative_flatness",
        "fisher_rao_norm",
    ]
    alone = forwards(["normalized_sharpness"])
    assert forwards(together) == alone
    assert forwards([*together, "kappa"]) > alone, "the count must be able to tell"
    # a look at the model is needed anyway
    assert forwards(["hessian_max_eigenvalue"]) > 0


@pytest.mark.parametrize("case", ["mlp", "residual", "dropout"])
def test_the_model_is_left_as_it_was(case: str) -> None:
    chosen = BY_NAME[case]
    model = dressed(chosen.model())
    before = fingerprint(model)
    sf.measure(model, chosen.data(), chosen.loss)
    assert_untouched(model, before)


@pytest.mark.parametrize("at", ["curvature", "rho", "fisher_rao_norm", "done"])
def test_the_model_is_left_as_it_was_by_a_failure(at: str) -> None:
    model = dressed(CASE.model())
    before = fingerprint(model)

    def fail(step: str, done: int, total: int) -> None:
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sf.measure(model, CASE.data(), measures=["rho", "fisher_rao_norm"], progress=fail)
    assert_untouched(model, before)


def test_liang_leaves_the_weights() -> None:
    case = BY_NAME["mlp without bias"]
    for chosen, fails in ((case, False), (BY_NAME["mlp"], True)):
        model = dressed(chosen.model())
        before = fingerprint(model)
        try:
            sf.measure(model, chosen.data(), measures=[FisherRaoNorm(form="liang")])
        except NotApplicable:
            assert fails
        assert_untouched(model, before)


def test_batches_do_not_matter() -> None:
    x, y = BY_NAME["mlp"].data(n=7)
    names = [*FEW, "relative_flatness", "kappa_trace", "fisher_rao_norm"]
    whole = sf.measure(CASE.model(), (x, y), measures=names)
    parts = sf.measure(
        CASE.model(),
        [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])],
        "cross_entropy",
        measures=names,
    )
    for name in names:
        assert parts[name].value == pytest.approx(whole[name].value, rel=1e-10)
    assert parts.provenance.data_hash == whole.provenance.data_hash
    assert (parts.provenance.batches, parts.provenance.batch_size) == (3, 3)


def test_some_parameters() -> None:
    found = measured(["kappa_trace", "hessian_trace"], parameters=["2.weight"])
    assert list(found["kappa_trace"].by_layer) == ["2"]
    assert list(found["hessian_trace"].by_parameter) == ["2.weight"]
    frozen = measured(["hessian_trace"], case=BY_NAME["frozen"])
    assert frozen.provenance.frozen == ("0.weight", "2.bias")
    assert "frozen, not measured: 0.weight, 2.bias" in frozen.notes
    assert "frozen, not measured" in str(frozen)


# Progress


def test_progress_callback() -> None:
    seen: list[tuple[str, int, int]] = []
    measured(progress=lambda *step: seen.append(step))
    names = ["curvature", *FEW, "standing", "done"]
    assert seen == [(name, k, len(FEW) + 2) for k, name in enumerate(names)]


@pytest.mark.parametrize("terminal", [True, False])
def test_short_work_shows_nothing_unless_asked(
    terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    measured(progress=False)
    measured()
    assert capfd.readouterr().err == ""
    measured(progress=True)
    shown = capfd.readouterr()
    assert "saltflat: done" in shown.err
    assert shown.err[-1] == ("\r" if terminal else "\n")
    assert shown.out == ""


class Slow(nn.Module):
    """Sleeps on every forward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(2, 2), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.layer(x)
        return out


SLOW = torch.randn(4, 2), torch.arange(4) % 2


@pytest.mark.parametrize("terminal", [True, False])
def test_long_work_is_announced_and_moves(
    terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time runs ten times as fast here: what lasts a second is announced, and moves ten times."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(work, "LONG", 1.0)
    monkeypatch.setattr(curvature, "LONG", 1.0)
    monkeypatch.setattr(work, "_EVERY", 0.1)
    start = time.perf_counter()
    sf.measure(Slow(0.05), SLOW, measures=["sam_sharpness"])
    seconds = time.perf_counter() - start
    shown = capfd.readouterr()
    assert shown.out == ""
    first, _, rest = shown.err.partition("\n")
    announced = re.fullmatch(r"saltflat: about \d+ s: 26 gradients at ([\d.]+) s", first)
    assert announced
    assert 0.05 <= float(announced[1]) < 0.5
    moves = rest.count("\r" if terminal else ";")
    assert moves >= 10 * seconds / 2
    assert "sam_sharpness" in rest
    assert "%" in rest
    assert rest.count("\n") < 6


def test_long_work_is_quiet_if_asked(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LONG", 0.1)
    monkeypatch.setattr(curvature, "LONG", 0.1)
    monkeypatch.setattr(work, "_EVERY", 0.1)
    sf.measure(Slow(0.01), SLOW, measures=["sam_sharpness"], progress=False)
    steps: list[str] = []
    sf.measure(
        Slow(0.01), SLOW, measures=["sam_sharpness"], progress=lambda step, *_: steps.append(step)
    )
    monkeypatch.setenv("SALTFLAT_PROGRESS", "0")
    sf.measure(Slow(0.01), SLOW, measures=["sam_sharpness"])
    assert capfd.readouterr().err == ""
    assert [step for step in steps if step.startswith("about ")]


CALLS = {
    "trace": sf.trace,
    "diagonal": sf.diagonal,
    "eigenvalues": sf.eigenvalues,
    "density": sf.density,
    "audit": lambda *data, **options: sf.audit(*data, measures=["rho"], elements=1, **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_long_call_is_announced(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LONG", 1e-3)
    monkeypatch.setattr(curvature, "LONG", 1e-3)
    steps: list[str] = []
    options: dict[str, Any] = {"k": 1} if name == "eigenvalues" else {}
    if name == "density":
        options = {"probes": 2, "steps": 3}
    call = CALLS[name]
    call(Slow(0.01), SLOW, progress=lambda step, *_: steps.append(step), **options)
    found = re.search(r"^about .*: \d+ gradients at ([\d.]+) s", "\n".join(steps), re.MULTILINE)
    assert found
    assert 0.01 <= float(found[1]) < 0.1
    call(Slow(0.01), SLOW, **options)
    assert capfd.readouterr().err.startswith("saltflat: about ")
    monkeypatch.setattr(work, "LONG", 1e6)
    call(Slow(0.0), SLOW, **options)
    assert capfd.readouterr().err == ""


def test_the_line_ends_with_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    bad = torch.full((4, 2), torch.nan), torch.zeros(4).long()
    with pytest.raises(sf.DataError):
        sf.measure(nn.Linear(2, 2), bad, progress=True)
    assert threading.active_count() == before
    assert capfd.readouterr().err.endswith("\n")


def test_a_tick_does_not_move_what_has_just_begun(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LONG", 0.0)
    line = work.Line(sys.stderr, eager=False)
    line.tick()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(work, "_EVERY", 0.0)
    line.tick()
    assert capfd.readouterr().err.startswith("saltflat: ")


def test_short_calls_in_a_row_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Counted(threading.Thread):
        def start(self) -> None:
            started.append(self.name)
            super().start()

    monkeypatch.setattr(work, "Thread", Counted)
    for _ in range(5):
        sf.trace(nn.Linear(2, 2), SLOW)
    assert len(started) < 5
    ticker = work._Ticker(lingers=True)
    monkeypatch.setattr(work, "_EVERY", 0.01)
    with work.Line(sys.stderr, eager=False) as line:
        ticker.add(line)
        ticker.remove(line)
        ticker.add(line)
        thread = ticker._thread
        ticker.remove(line)
    assert thread is not None
    thread.join(timeout=5)
    assert not thread.is_alive()


@pytest.mark.parametrize("wrong", ["yes", 1, [True]])
def test_progress_of_another_type(wrong: Any) -> None:
    with pytest.raises(sf.InvalidType, match="progress must be True, False, None or a callable"):
        measured(progress=wrong)


# Provenance


def test_provenance() -> None:
    p = measured(seed=3).provenance
    assert p.model == "Sequential"
    assert p.parameters == sum(q.numel() for q in CASE.model().parameters())
    assert (p.samples, p.batches, p.batch_size) == (5, 1, 5)
    assert p.loss == "cross_entropy"
    assert (p.curvature, p.dtype, p.device, p.seed) == ("hessian", "float64", "cpu", 3)
    assert p.certified
    assert p.certified_samples > 0
    assert set(p.versions) == {"saltflat", "torch", "numpy", "scipy", "python"}
    assert p.versions["torch"] == torch.__version__
    assert set(p.seconds) == {"curvature", "standing", *FEW}
    assert all(s >= 0 for s in p.seconds.values())
    assert p.created.endswith("+00:00")
    assert len(p.model_hash) == 64
    assert len(p.data_hash) == 16
    with pytest.warns(UserWarning, match="estimated"):
        bent = measured(["hessian_trace"], BY_NAME["mlp GELU"], estimator=sf.Hutchinson(probes=4))
    assert not bent.provenance.certified


@dataclass(frozen=True)
class Look(Measure):
    """Needs nothing."""

    name = "look"
    needs = frozenset()
    invariant_to = frozenset()

    def compute(self, context: Context) -> sf.Measurement:
        return self.measurement(value=float(len(context.layers)), exact=True)


def test_data_are_counted_without_a_pass_too() -> None:
    """A measure that stops after its first batch still says what the data are."""
    found = sf.measure(CASE.model(), [CASE.data()] * 3, measures=[Look()])
    assert (found.provenance.samples, found.provenance.batches) == (15, 3)


def test_model_hash_tells_one_weight() -> None:
    model = BY_NAME["residual"].model()
    data = BY_NAME["residual"].data()

    def digest(model: nn.Module) -> str:
        return sf.measure(model, data, measures=["hessian_trace"]).provenance.model_hash

    first = digest(model)
    assert digest(copy.deepcopy(model)) == first
    for change in ("conv1.weight", "bn1.running_var"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.state_dict()[change].view(-1)[0] += 1e-12
        assert digest(other) != first, change


class Extra(nn.Module):
    """State that is not a tensor, and a tensor without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.body = CASE.model()
        self.register_buffer("nothing", torch.zeros(0))

    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}

    def set_extra_state(self, state: Any) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_model_hash_of_odd_states() -> None:
    found = sf.measure(Extra(), CASE.data(), measures=["hessian_trace"])
    assert len(found.provenance.model_hash) == 64


def test_data_hash_does_not_know_the_order() -> None:
    x, y = CASE.data()
    order = torch.tensor([3, 1, 4, 0, 2])

    def digest(data: Any) -> str:
        return sf.measure(CASE.model(), data, measures=["hessian_trace"]).provenance.data_hash

    first = digest((x, y))
    assert digest((x[order], y[order])) == first
    assert digest((x, y[order])) != first
    other = x.clone()
    other[2, 1] += 1e-12
    assert digest((other, y)) != first


def custom(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("cross_entropy", "cross_entropy"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "cross_entropy(label_smoothing=0.1)"),
        (nn.CrossEntropyLoss(reduction="sum"), "cross_entropy(mean=False)"),
        (
            nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0])),
            "cross_entropy(weight=[0.5, 1.0, 2.0])",
        ),
        (custom, "custom"),
        (BY_NAME["dice"].loss, "dice"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_losses_are_named_with_what_matters(loss: Any, text: str) -> None:
    few = sf.Hutchinson(probes=4)
    found = sf.measure(CASE.model(), CASE.data(), loss, measures=["hessian_trace"], estimator=few)
    assert found.provenance.loss == text


# A report as a value


def test_report_is_a_mapping() -> None:
    found = measured()
    assert isinstance(found, Mapping)
    assert list(found) == FEW
    assert len(found) == 3
    assert [m.name for m in found.values()] == FEW
    assert "rho" in found
    assert "kappa" not in found
    assert found.get("kappa") is None
    with pytest.raises(KeyError, match=r"'kappa' was not asked for. Known: 'hessian_trace', 'rho'"):
        _ = found["kappa"]
    left_out = replace(found, left_out={"kappa": 60.0})
    with pytest.raises(KeyError, match=r"'kapa' was not asked for. Nearest is 'kappa'"):
        _ = left_out["kapa"]
    with pytest.raises(KeyError, match=r"'rhoo' was not asked for. Nearest is 'rho'"):
        _ = found["rhoo"]
    skipped = report_of(made(), skipped={"kappa": "it has none"})
    with pytest.raises(KeyError, match="kappa was not measured: it has none"):
        _ = skipped["kappa"]


def test_report_prints() -> None:
    found = measured([*FEW, "kappa_trace"])
    text = str(found)
    assert repr(found) == text
    for name in found:
        assert name in text
    for word in ("43 parameters", "5 samples", "cross_entropy", "exact", "every rescaling"):
        assert word in text
    row = next(line for line in text.splitlines() if "kappa_trace" in line)
    assert "layer" in row
    assert f"{found['kappa_trace'].value:.6g}" in row
    assert "nothing" in next(line for line in text.splitlines() if "hessian_trace" in line)
    assert "lam=0.5" in text


def test_brackets_are_printed_as_they_are() -> None:
    m = made(settings={"layer": "[red]x[/red]"}, notes=("of [bold]y",))
    text = str(report_of(m, skipped={"kappa": "of [blue]z"}, notes=("[dim]w",)))
    for part in ("layer=[red]x[/red]", "rho: of [bold]y", "of [blue]z", "[dim]w"):
        assert part in text


def test_layers_print() -> None:
    found = measured([*FEW, "kappa_trace", RelativeFlatness(layer="0")])
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(found.layers())
    text = capture.get()
    for name in ("kappa_trace", "rho", "relative_flatness"):
        assert name in text
    assert "hessian_trace" not in text
    assert f"{found['kappa_trace'].by_layer['2']:.5g}" in text


def test_neurons_print() -> None:
    found = measured([Rho(side="rows"), "kappa_trace", "hessian_trace"])
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(found.neurons("0"))
    lines = capture.get().splitlines()
    assert "By neuron, layer 0" in lines[0]
    assert "hessian_trace" not in lines[2]
    assert "rho, output units" in lines[2]
    assert "kappa_trace, input units" in lines[2]
    rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    inputs, outputs = (found[n].by_neuron["0"] for n in ("kappa_trace", "rho"))
    assert len(rows) == max(len(inputs), len(outputs)) > min(len(inputs), len(outputs))
    for j, (unit, rho, kappa) in enumerate([cell.strip() for cell in row] for row in rows):
        assert unit == str(j)
        assert rho == (f"{float(outputs[j]):.5g}" if j < len(outputs) else "")
        assert kappa == (f"{float(inputs[j]):.5g}" if j < len(inputs) else "")
    with pytest.raises(sf.InvalidValue, match="No values by neuron of layer '9'"):
        found.neurons("9")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "exact"),
        ({"gap": 1e-12}, "exact"),
        ({"gap": 1e-3}, "exact to 0.001"),
        ({"gap": float("inf")}, "not converged"),
        ({"gap": float("nan")}, "not converged"),
        ({"exact": False, "stderr": 0.25}, "± 0.25"),
        ({"exact": False, "bound": "lower"}, "≥, searched"),
        ({"exact": False, "bound": "lower", "stderr": 0.5}, "≥, searched, ± 0.5"),
        ({"exact": False, "bound": "upper", "stderr": 0.5}, "≤, ± 0.5"),
    ],
)
def test_certainty(fields: dict[str, Any], text: str) -> None:
    assert made(**fields).certainty == text
    assert text in str(made(**fields))
    assert text in str(report_of(made(**fields)))


def test_invariance_is_said() -> None:
    kinds = {frozenset({"neuron", "layer"}): "layer, neuron", frozenset(): "nothing"}
    for kind, text in kinds.items():
        assert text in str(report_of(made(invariant_to=kind)))
    plain, normal = (
        measured([RelativeFlatness(normalize_features=on)])["relative_flatness"].invariant_to
        for on in (False, True)
    )
    assert "neuron" in normal
    assert "neuron" not in plain


def test_measurements_are_equal_by_what_they_hold() -> None:
    neurons = {"fc": torch.tensor([1.0, float("nan")])}
    one = made(by_neuron=neurons, details={"a": torch.ones(2), "b": (1, "x")})
    assert one == made(by_neuron=copy.deepcopy(neurons), details={"a": [1.0, 1.0], "b": [1, "x"]})
    assert one != made(by_neuron={"fc": torch.tensor([1.0, 2.0])}, details=one.details)
    assert one != made(by_neuron=neurons, details={"a": [1.0], "b": [1, "x"]})
    assert made(value=float("nan")) == made(value=float("nan"))
    assert made() != made(value=2.0)
    assert made() != "rho"
    with pytest.raises(TypeError, match="unhashable"):
        hash(made())


# Files


def test_save_and_load(tmp_path: Path) -> None:
    found = measured([*FEW, "kappa_trace"])
    path = found.save(tmp_path / "deep" / "run.json")
    assert sf.Report.load(path)["kappa_trace"].max == found["kappa_trace"].max
    assert path == tmp_path / "deep" / "run.json"
    again = sf.Report.load(str(path))
    assert again == found
    assert again.provenance == found.provenance
    for name in found:
        assert again[name] == found[name]
    neurons = again["rho"].by_neuron["0"]
    assert neurons.dtype == torch.float64
    assert torch.equal(neurons, found["rho"].by_neuron["0"])
    assert str(again) == str(found)
    assert os.listdir(path.parent) == ["run.json"]
    with pytest.raises(sf.InvalidValue, match=r"saved as .json or .html. Got 'run.txt'"):
        found.save(tmp_path / "run.txt")


def test_reports_from_before_bounds_had_a_direction(tmp_path: Path) -> None:
    """They say lower_bound, nothing of degrees of freedom, and `neurons` in details."""
    made_now = [
        made(neurons="heads"),
        made(exact=False, bound="lower"),
        made(exact=False, stderr=0.5),
    ]
    for m, degrees in zip(made_now, (math.inf, math.inf, math.nan), strict=True):
        path = report_of(m).save(tmp_path / "old.json")
        content = json.loads(path.read_text())
        old = content["measurements"]["rho"]
        old["lower_bound"] = old.pop("bound") == "lower"
        del old["degrees"]
        old["details"]["neurons"] = old.pop("neurons")
        path.write_text(json.dumps(content))
        assert sf.Report.load(path)["rho"] == replace(m, degrees=degrees)


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    odd = made(
        value=-inf,
        gap=nan,
        stderr=inf,
        by_layer={"a": nan, "b": inf},
        by_neuron={"a": torch.tensor([nan, -inf, 0.1], dtype=torch.float64)},
        details={"alpha": torch.tensor([inf, 1.0]), "deep": {"x": [nan, "text"]}, "n": 3},
        settings={"p": inf, "names": ("a", "b"), "some": frozenset({"b", "a"})},
    )
    found = report_of(odd, skipped={"kappa": "no"}, notes=("a", "b"))
    path = found.save(tmp_path / "odd.json")
    json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    again = sf.Report.load(path)
    assert again.skipped == {"kappa": "no"}
    assert again.notes == ("a", "b")
    want = dict(odd.settings) | {"some": ["a", "b"]}
    assert again["rho"] == made(
        **{f: getattr(odd, f) for f in odd.__dict__ if f != "settings"} | {"settings": want}
    )


def test_numpy_and_objects_are_saved_as_plain_values(tmp_path: Path) -> None:
    details = {
        "scalar": np.float64(0.5),
        "array": np.arange(3),
        "strategy": sf.Hutchinson(probes=4),
        "dtype": torch.float32,
        "nothing": None,
    }
    again = sf.Report.load(report_of(made(details=details)).save(tmp_path / "a.json"))
    assert dict(again["rho"].details) == {
        "scalar": 0.5,
        "array": [0, 1, 2],
        "strategy": {"probes": 4, "seed": 0},
        "dtype": "torch.float32",
        "nothing": None,
    }


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_failed_save_leaves_the_old_file(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = measured(["rho"]).save(tmp_path / "run.json")
    old = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="disk is full"):
        measured(["hessian_trace"]).save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_saved_report_can_be_read_by_others(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.write_text("")
    path = report_of(made()).save(tmp_path / "run.json")
    assert path.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no json", "is not a report: it is not JSON"),
        (b"\xff\xfe\x00", "is not a report: it is not JSON"),
        (b"[1, 2]", "is not a report that saltflat saved"),
        (b'{"loss": 0.3}', "is not a report that saltflat saved"),
        (b'{"saltflat": 2}', r"saved by a newer version of saltflat, in format 2; this one"),
        (b'{"saltflat": "x"}', "is not a report that saltflat saved"),
        (b'{"saltflat": 1, "kind": "audit"}', "is not a report: it holds an audit. Use sf.load"),
        (b'{"saltflat": 1}', "is a damaged report: KeyError"),
        (b'{"saltflat": 1, "provenance": 3}', "is a damaged report: TypeError"),
    ],
)
def test_loading_something_else(content: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(sf.InvalidValue, match=text):
        sf.Report.load(path)
    with pytest.raises(FileNotFoundError):
        sf.Report.load(tmp_path / "none.json")


class Frame:
    """As much of a DataFrame as is used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.index = rows, None

    def set_index(self, name: str) -> Frame:
        self.index = name
        return self


def test_to_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("pandas")
    fake.DataFrame = Frame
    monkeypatch.setitem(sys.modules, "pandas", fake)
    found = measured()
    frame = found.to_pandas()
    assert frame.index == "measure"
    assert [row["measure"] for row in frame.rows] == FEW
    assert [row["value"] for row in frame.rows] == [m.value for m in found.values()]
    assert frame.rows[1]["invariant_to"] == "attention, batchnorm, layer, neuron"
    assert {"exact", "stderr", "degrees", "gap", "bound"} <= set(frame.rows[0])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(sf.MissingDependency, match="pip install pandas"):
        found.to_pandas()


# Side by side


def test_compare() -> None:
    a, b = CASE.model(), BY_NAME["mlp Hardtanh"].model()
    both = sf.compare({"plain": a, "[other]": b}, CASE.data(), measures=FEW)
    assert isinstance(both, sf.Comparison)
    assert list(both) == ["plain", "[other]"]
    assert len(both) == 2
    assert both.measures == FEW
    assert both.problems == ()
    assert both["plain"]["rho"].value == measured()["rho"].value
    text = str(both)
    for word in ("plain", "[other]", *FEW, "every rescaling", f"{both['plain']['rho'].value:.5g}"):
        assert word in text
    assert "Not comparable" not in text
    with pytest.raises(KeyError):
        _ = both["sam"]


def test_compare_shuffled_data() -> None:
    x, y = CASE.data()
    loaders = {
        name: DataLoader(
            TensorDataset(x, y), 2, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )
        for seed, name in enumerate(("a", "b"))
    }
    models = {"a": CASE.model(), "b": CASE.model()}
    assert sf.compare(models, loaders, measures=["rho"]).problems == ()


def test_compare_names_the_problems() -> None:
    x, y = CASE.data()
    models = {"a": CASE.model(), "b": CASE.model()}
    other = sf.compare(models, {"a": (x, y), "b": (x + 1, y)}, measures=["rho"])
    assert len(other.problems) == 1
    assert other.problems[0].startswith("the data differ (a: ")
    fewer = sf.compare(models, {"a": (x, y), "b": (x[:4], y[:4])}, measures=["rho"])
    assert any(p == "the number of samples differs (a: 5, b: 4)" for p in fewer.problems)
    assert "Not comparable" in str(fewer)
    assert "number of samples differs" in str(fewer)


def test_reports_compare_with_each_other() -> None:
    one = measured()
    assert one.compare(measured()).problems == ()
    assert list(one.compare(measured(), names=("x", "y"))) == ["x", "y"]
    smooth = sf.measure(
        CASE.model(), CASE.data(), nn.CrossEntropyLoss(label_smoothing=0.1), measures=FEW
    )
    text = "the loss differs (this: cross_entropy, other: cross_entropy(label_smoothing=0.1))"
    assert one.compare(smooth).problems == (text,)
    ggn = measured(curvature="ggn")
    assert one.compare(ggn).problems == ("the curvature differs (this: hessian, other: ggn)",)
    lam = measured([*FEW[:-1], NormalizedSharpness(lam=1.0)])
    assert one.compare(lam).problems == ("the settings of normalized_sharpness differ",)
    fewer = one.compare(measured(["rho"]))
    assert fewer.problems == ()
    assert fewer.measures == FEW
    assert "–" in str(fewer)


def test_compare_shows_errors() -> None:
    noisy = report_of(made(exact=False, stderr=0.25))
    assert "1.5 ± 0.25" in str(noisy.compare(noisy, ("a", "b")))


def test_compare_refuses() -> None:
    with pytest.raises(sf.InvalidType, match=r"compare needs a mapping.*Got list"):
        sf.compare([CASE.model()], CASE.data())
    with pytest.raises(sf.InvalidValue, match="nothing to compare"):
        sf.compare({}, CASE.data())
    wrong: Any = {"a": "model"}
    with pytest.raises(sf.InvalidType, match=r"must be a torch.nn.Module. Got str"):
        sf.compare(wrong, CASE.data())
    with pytest.raises(sf.InvalidValue, match="nothing to compare"):
        sf.Comparison({})


def test_provenance_is_complete() -> None:
    """Every field is filled, so that a new one cannot be forgotten."""
    p = measured().provenance
    empty = [f for f in Provenance.__dataclass_fields__ if getattr(p, f) in ("", None, {})]
    assert empty == ["loss_code"]  # its code is the package's
