"""The audit against what is published about each measure, and against naive transcriptions."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from dense import second_derivatives
from scaling_networks import BY_NAME, randomise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from untouched import assert_untouched, fingerprint

import saltflat as sf
from saltflat import zoo
from saltflat.audit import Audit, Tolerances, audit
from saltflat.errors import InvalidType, InvalidValue, ModelError, NotMeasured, SaltflatError
from saltflat.measurement import EVERY_RESCALING, Measurement, Symmetry
from saltflat.measures import MEASURES, BNSharpness, HessianTrace, RelativeFlatness
from saltflat.measures.base import Context, Measure, Need
from saltflat.symmetries import Group, symmetries

Data = tuple[Tensor, Tensor]


def points(n: int = 16, inputs: int = 4, classes: int = 3) -> Data:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (n,), generator=generator)


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6, bias=bias), nn.ReLU(), nn.Linear(6, 3, bias=bias)).double()


def dense_blocks(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """The Hessian's diagonal blocks by autograd, as matrices."""
    x, y = data
    return {
        name: second_derivatives(F.cross_entropy(model(x), y), [p])
        for name, p in model.named_parameters()
    }


def dense_trace(model: nn.Module, data: Data) -> float:
    return sum(float(block.trace()) for block in dense_blocks(model, data).values())


def dense_largest(model: nn.Module, data: Data) -> float:
    value = F.cross_entropy(model(data[0]), data[1])
    whole = second_derivatives(value, list(model.parameters()))
    return float(torch.linalg.eigvalsh(whole)[-1])


def squared_norm(model: nn.Module, data: Data) -> float:
    """‖W‖² Tr H of the last layer."""
    weight = model[2].weight.detach()
    return float(weight.norm() ** 2 * dense_blocks(model, data)["2.weight"].trace())


def misprint(model: nn.Module, data: Data) -> float:
    """‖W‖ Tr H, as a public implementation has it."""
    weight = model[2].weight.detach()
    return float(weight.norm() * dense_blocks(model, data)["2.weight"].trace())


@pytest.fixture(scope="module")
def plain() -> Audit:
    """All measures but searched ones on a small network, and some written out naively."""
    functions = {
        "dense trace": dense_trace,
        "dense λ_max": dense_largest,
        "‖W‖² Tr H": squared_norm,
        "‖W‖ Tr H": misprint,
    }
    names = [name for name, kind in MEASURES.items() if not kind.searched]
    return audit(mlp(), points(), measures=names, functions=functions, elements=1)


def test_every_declaration_holds_and_everything_else_is_seen_to_move(plain: Audit) -> None:
    assert plain.ok
    assert list(plain.kinds) == ["layer", "neuron"]  # no BatchNorm, no attention
    assert plain.kinds == {"layer": 1, "neuron": 6}
    assert plain.output_drift < 1e-12
    invariant = {
        "layer": {
            "minimum_sharpness",
            "neuronwise_minimum_sharpness",
            "normalized_sharpness",
            "matrix_normalized_sharpness",
            "kappa",
            "kappa_trace",
            "rho",
            "relative_flatness",
            "fisher_rao_norm",
            "‖W‖² Tr H",
        },
        "neuron": {
            "neuronwise_minimum_sharpness",
            "normalized_sharpness",
            "rho",
            "fisher_rao_norm",
        },
    }
    for kind, names in invariant.items():
        assert {n for n, row in plain.items() if row[kind].verdict == "invariant"} == names
        moved = [row[kind].drift for n, row in plain.items() if n not in names]
        assert min(moved) > 0.5
        assert max(plain[n][kind].drift for n in names) < 1e-8


def test_dinh_layers_move_trace_and_eigenvalue_without_bound(plain: Audit) -> None:
    for name, naive in (
        ("hessian_trace", "dense trace"),
        ("hessian_max_eigenvalue", "dense λ_max"),
    ):
        ours, dense = plain[name], plain[naive]
        assert ours.value == pytest.approx(dense.value, rel=1e-9)
        for kind in plain.kinds:
            assert ours[kind].drift == pytest.approx(dense[kind].drift, rel=1e-5)
        assert ours["layer"].drift > 1e5  # a layer × 1000 adds about a millionfold
        curve = list(ours["layer"].curve.values())
        assert list(ours["layer"].curve) == [10, 100, 1000]
        assert curve[1] > 2 * curve[0]
        assert curve[2] > 2 * curve[1]


def test_dinh_by_hand() -> None:
    """The audit's single-layer element is W₁ × 1000, b₁ × 1000, W₂ ÷ 1000 or the inverse."""
    model, data = mlp(), points()
    found = audit(model, data, measures=["hessian_trace"], elements=1)["hessian_trace"]
    traces = []
    for factor in (1e3, 1e-3):
        other = mlp()
        with torch.no_grad():
            for p in (other[0].weight, other[0].bias):
                p *= factor
            other[2].weight /= factor
        traces.append(dense_trace(other, data))
    before = dense_trace(model, data)
    expected = max(abs(t - before) / before for t in traces)
    assert found["layer"].drift == pytest.approx(expected, rel=1e-9)


def test_misprint_is_caught(plain: Audit) -> None:
    assert plain["‖W‖² Tr H"]["layer"].verdict == "invariant"
    assert plain["‖W‖ Tr H"]["layer"].verdict == "moved"
    assert plain["‖W‖ Tr H"]["layer"].drift > 100
    assert plain["‖W‖ Tr H"].declared is None  # nothing was promised, so nothing is broken
    assert plain["‖W‖ Tr H"].ok


def test_row_and_column_scaling_of_appendix_a1() -> None:
    """Tsuzuku et al. 2020, eqs. 31–45: norms move, unit by unit, without the function moving."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    model.double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model[2].weight.copy_(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    x, y = points(inputs=2, classes=2)
    functions = {
        "first": lambda m, _: m[0].weight.norm(),
        "second": lambda m, _: m[2].weight.norm(),
        "product": lambda m, _: m[0].weight.norm() * m[2].weight.norm(),
    }
    found = audit(model, (x / 30, y), measures=["normalized_sharpness", "rho"], functions=functions)
    assert found["first"].value == pytest.approx(math.sqrt(30))
    assert found["second"].value == pytest.approx(math.sqrt(174))
    assert found["product"]["layer"].verdict == "invariant"
    for name in functions:
        assert found[name]["neuron"].verdict == "moved"
    for name in ("normalized_sharpness", "rho"):
        assert found[name]["neuron"].verdict == "invariant"

    group = symmetries(model, x)
    moved = group.row_column("0", 1, 0.1)(group.row_column("0", 0, 10.0)(model))
    for i, matrix in ((0, [[0.1, 0.2], [30.0, 40.0]]), (2, [[50.0, 0.6], [70.0, 0.8]])):  # 40, 41
        assert torch.allclose(moved[i].weight, torch.tensor(matrix).double(), rtol=1e-6)
    # Eq. 44 prints √6101.13 for the second; the matrix of eq. 41 has √7401.
    squares = [float(moved[i].weight.detach().norm() ** 2) for i in (0, 2)]
    assert squares == pytest.approx([2500.05, 7401.0], abs=1e-9)


def test_relative_flatness_needs_normalised_features_under_unit_rescaling() -> None:
    found = [
        audit(mlp(), points(), measures=[RelativeFlatness(normalize_features=on)], elements=1)
        for on in (False, True)
    ]
    plain, normalised = (a["relative_flatness"] for a in found)
    assert plain["layer"].verdict == normalised["layer"].verdict == "invariant"
    assert plain["neuron"].verdict == "moved"
    assert normalised["neuron"].verdict == "invariant"
    assert all(a.ok for a in found)


def batch_norm(eps: float) -> tuple[nn.Module, Data]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False),
        nn.BatchNorm2d(2, eps=eps),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    x, y = points(24, 16)
    x = x.view(24, 1, 4, 4).float()
    model.train()(x)
    return model, (x, y)


def test_batch_norm_filters() -> None:
    model, data = batch_norm(1e-14)
    measures = [BNSharpness(strategy="small_delta"), "hessian_trace", "rho"]
    found = audit(model, data, measures=measures, elements=1)
    assert list(found.kinds) == ["layer", "neuron", "batchnorm"]
    assert found["bn_sharpness"]["batchnorm"].verdict == "invariant"
    assert found["bn_sharpness"]["neuron"].verdict == "moved"
    assert found["hessian_trace"]["batchnorm"].verdict == "moved"
    assert found["rho"].verdict == "invariant"
    assert found.ok


def test_eps_that_batch_statistics_feel_is_no_broken_promise() -> None:
    model, data = batch_norm(1e-3)
    found = audit(model, data, measures=[BNSharpness(strategy="small_delta")], elements=1)
    assert found["bn_sharpness"]["batchnorm"].verdict == "undecided"
    assert found["bn_sharpness"]["batchnorm"].drift > 0.1
    assert found.ok
    assert any("eps" in note for note in found.notes)
    assert any("clipped" in note for note in found.notes)  # a running variance has a floor


def test_attention() -> None:
    case = BY_NAME["encoder"]
    torch.manual_seed(0)
    model = case.make()
    randomise(model, 0)
    x = case.draw()
    flat = nn.Sequential(model, nn.Flatten())
    y = torch.arange(len(x)) % 6
    found = audit(flat, (x, y), measures=["kappa_trace", "rho"], curvature="ggn", elements=1)
    assert list(found.kinds) == ["layer", "neuron", "attention"]
    assert found["rho"].verdict == "invariant"
    assert found["kappa_trace"].verdict == "moved by neuron, attention"
    assert found.ok


def test_layers_are_whole_matrices_where_activations_are_concatenated() -> None:
    """One factor for an activation that is concatenated gives the next matrix several."""
    case = BY_NAME["dense"]
    torch.manual_seed(0)
    model = case.make()
    randomise(model, 0)
    x = case.draw()
    y = torch.arange(len(x)) % 2
    found = audit(model, (x, y), measures=["kappa_trace", "minimum_sharpness"], elements=1)
    assert found.ok
    assert found["kappa_trace"]["layer"].verdict == "invariant"
    assert 0 < found.kinds["layer"] < len(symmetries(model, x).only("layer"))


@dataclasses.dataclass(frozen=True)
class Lying(Measure):
    """Tr H, sold as invariant to everything."""

    name: ClassVar[str] = "lying"
    title: ClassVar[str] = "Tr H"
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = HessianTrace.needs
    invariant_to: ClassVar[frozenset[Symmetry]] = EVERY_RESCALING

    def compute(self, context: Context) -> Measurement:
        return self.measurement(value=HessianTrace().compute(context).value, exact=True)


def test_a_false_declaration_is_caught() -> None:
    found = audit(mlp(), points(), measures=[Lying(), "hessian_trace"], elements=1)
    assert not found.ok
    assert not found["lying"].ok
    assert found["hessian_trace"].ok
    assert "DISAGREES: moved by layer, neuron" in str(found)


def test_a_broken_symmetry_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Group:
        group = symmetries(*args, **options)
        # Outgoing weights grow with the incoming ones instead of shrinking.
        wrong = group.exponents().mapped(abs)
        return dataclasses.replace(group, _exponents=wrong)

    monkeypatch.setattr(import_module("saltflat.audit.procedure"), "symmetries", broken)
    with pytest.raises(SaltflatError, match="does not keep the function"):
        audit(mlp(), points(), measures=["hessian_trace"])


def test_nothing_is_touched() -> None:
    model = mlp().float().train()
    model(points()[0].float()).sum().backward()
    x, y = points()
    data = DataLoader(TensorDataset(x.float(), y), batch_size=5, shuffle=True)
    seen: list[tuple[Any, ...]] = []

    def look(m: nn.Module, batches: Any) -> float:
        first, _ = next(iter(batches))
        p = next(m.parameters())
        seen.append((len(batches), first.dtype, p.dtype, m.training, p.grad, first.sum().item()))
        with torch.no_grad():
            p.zero_()  # spoils this function's own copy only
        torch.rand(3)
        return 1.0

    before = fingerprint(model)
    found = audit(
        model, data, measures=["hessian_trace"], functions={"a": look, "b": look}, elements=1
    )
    assert_untouched(model, before)
    assert found["a"].verdict == "invariant"
    assert found["hessian_trace"].value > 0
    assert len(set(seen)) == 1  # the same first batch for all, whatever the shuffling
    assert seen[0][:5] == (4, torch.float64, torch.float64, False, None)


def test_frozen_layers_stay_where_they_are() -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    found = audit(model, points(), measures=["hessian_trace"], elements=1)
    assert not found.kinds
    assert "no rescaling keeps its function" in " ".join(str(found).split())
    assert found["hessian_trace"].verdict == "not tested"
    everything = audit(model, points(), measures=["hessian_trace"], parameters="all", elements=1)
    assert everything.kinds == {"layer": 1, "neuron": 6}
    assert not model[2].weight.requires_grad


def test_measures_that_do_not_apply_are_listed_or_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Conv1d(2, 3, 3), nn.Flatten())
    x, y = points()
    data = (x.view(16, 1, 4), y)
    options: dict[str, Any] = {"elements": 1, "spread": 10.0}
    found = audit(model, data, **options)
    assert list(found.skipped) == ["relative_flatness"]
    assert "no Linear layer" in str(found)
    with pytest.raises(KeyError, match="does not apply"):
        found["relative_flatness"]
    with pytest.raises(KeyError, match="'rho'"):
        found["rhoo"]
    with pytest.raises(ModelError, match="relative_flatness does not apply"):
        audit(model, data, measures=["relative_flatness"], **options)


def test_estimates_are_judged_by_their_errors() -> None:
    def noisy(error: float) -> Any:
        def measure(model: nn.Module, data: Data) -> Measurement:
            value = 1.0 + 0.01 * math.tanh(float(model[0].weight.detach().norm()))
            return Measurement(name="noisy", value=value, exact=False, stderr=error)

        return measure

    functions = {"precise": noisy(1e-6), "coarse": noisy(0.02), "useless": noisy(1.0)}
    found = audit(mlp(), points(), measures=[], functions=functions, elements=1)
    assert [row["layer"].verdict for row in found.values()] == ["moved", "invariant", "undecided"]


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        # Where nothing can be rescaled: between the layers a cast would let no scale through.
        out: Tensor = self.net(x).float().to(x.dtype)
        return out


def test_a_model_that_rounds_inside_is_held_to_what_it_can_keep() -> None:
    found = audit(Rounding(), points(), measures=["rho", "hessian_trace"], elements=1)
    assert found.tolerances.closed == 1e-4
    assert found["rho"].verdict == "invariant"
    assert found["hessian_trace"].verdict == "moved"
    assert any("rounds" in note for note in found.notes)


def test_what_one_sweep_gives_is_audited_by_default(tmp_path: Path) -> None:
    found = audit(mlp(), points(), elements=1)
    assert set(found) == {name for name, kind in MEASURES.items() if kind.cost == "sweep"}
    assert {*found, *found.left_out} == set(MEASURES)
    assert found.ok
    assert found["hessian_trace"].verdict == "moved"
    assert found["rho"].verdict == "invariant"
    models = 1 + sum(found.elements.values())
    assert found.left_out["kappa"] == models * MEASURES["kappa"]().price()
    line = r'about 780 gradients.*sf.audit\(model, data, measures=\["kappa"\]\), or measures="all"'
    with pytest.raises(NotMeasured, match=line):
        found["kappa"]
    assert "kappa (about 780 gradients)" in " ".join(str(found).split())
    loaded = Audit.load(found.save(tmp_path / "audit.json"))
    assert loaded == found
    assert loaded.left_out == found.left_out
    named = audit(mlp(), points(), measures=["rho"], elements=1)
    assert not named.left_out


def test_everything_is_audited_if_asked() -> None:
    found = audit(mlp(), points(), measures="all", elements=1, spread=10)
    assert {*found, *found.skipped} == set(MEASURES)
    assert "BatchNorm" in found.skipped["bn_sharpness"]
    assert found["kappa"]["layer"].verdict == "invariant"
    assert found["hessian_max_eigenvalue"].verdict == "moved"
    assert not found.left_out


def test_progress_tells_every_step() -> None:
    steps: list[tuple[str, int, int]] = []
    found = audit(
        mlp(),
        points(),
        measures=["hessian_trace"],
        elements=2,
        progress=lambda *step: steps.append(step),
    )
    done = [s[1] for s in steps[1:]]
    assert done == list(range(len(done)))
    assert steps[-1][2] == len(done) == 1 + sum(found.elements.values())
    # Three spreads of the first, the second, one unit and one layer both ways.
    assert found.elements == {"layer": 6, "neuron": 8}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"elements": 0}, InvalidValue, "elements must be"),
        ({"elements": True}, InvalidValue, "elements must be"),
        ({"spread": 1.0}, InvalidValue, "spread must be"),
        ({"spread": math.inf}, InvalidValue, "spread must be"),
        ({"measures": []}, InvalidValue, "nothing to measure"),
        ({"measures": ["rhoo"]}, InvalidValue, "'rho'"),
        ({"measures": "rho"}, InvalidType, "must be a list"),
        ({"functions": {"f": 3}}, InvalidType, "Got int for 'f'"),
        ({"functions": {"rho": len}}, InvalidValue, "another name"),
        ({"functions": {"f": lambda m, d: "x"}, "measures": []}, InvalidType, "a number"),
        ({"functions": {"f": lambda m, d: d[0]}, "measures": []}, InvalidType, "a number"),
        ({"seed": 0.5}, InvalidType, "seed"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[SaltflatError], match: str) -> None:
    with pytest.raises(error, match=match):
        audit(mlp(), points(), **options)


def test_a_model_must_be_one() -> None:
    with pytest.raises(InvalidType, match=r"torch\.nn\.Module"):
        audit(len, points())


def test_functions_need_names() -> None:
    with pytest.raises(InvalidType, match="names to callables"):
        audit(mlp(), points(), functions=[max])


def test_errors_of_functions_name_them() -> None:
    def wrong(model: nn.Module, data: Data) -> float:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError) as caught:
        audit(mlp(), points(), measures=[], functions={"mine": wrong})
    assert any("'mine'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("field", ["closed", "errors", "searched"])
def test_tolerances_are_numbers(field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        Tolerances(**{field: -1.0})


# Models of many sizes


class Detached(nn.Module):
    """Its backward pass is not the derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        out: Tensor = self.second(hidden + hidden.detach() ** 2)
        return out


def test_rescaled_networks_are_not_taken_for_wrong_ones() -> None:
    """Weights of 1e-3 beside ones of 1e3: differences cross kinks, and are not asked for there."""
    torch.manual_seed(0)
    model, x = zoo.lenet5(), torch.randn(2, 1, 28, 28)
    found = audit(model, (x, torch.tensor([0, 1])), measures=["hessian_trace", "rho"], elements=1)
    assert found["rho"].verdict == "invariant"
    assert found["hessian_trace"].verdict == "moved"
    with pytest.raises(ModelError, match="not the derivative"):
        audit(Detached(), (torch.randn(8, 4), torch.arange(8) % 3), measures=["rho"], elements=1)


def test_verdicts_hidden_by_noise_say_what_decides_them() -> None:
    """And it does: with the estimator that the note names, and by the Gauss–Newton matrix."""
    torch.manual_seed(0)
    hidden, last = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 3)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), hidden, last)
    data = torch.randn(10, 3), torch.arange(10) % 3

    def found(**options: Any) -> sf.Audit:
        return sf.audit(model, data, measures=["rho", "hessian_trace"], elements=1, **options)

    noisy = found(estimator=sf.ActivationProbes(8, seed=1), tolerances=sf.Tolerances(errors=40))
    assert "undecided" in noisy["rho"].verdict
    note = noisy.notes[0]
    assert note in " ".join(str(noisy).split())
    assert note in " ".join(noisy.sections()[0].notes)
    entries = sum(p.numel() for p in model.parameters())
    price = (1 + sum(noisy.elements.values())) * entries * 2.5
    assert note.startswith("Hidden by the errors of estimates: rho, hessian_trace. What decides: ")
    assert f"about {float(f'{price:.1e}'):,.0f} gradients: " in note
    assert f"estimator=saltflat.Hutchinson(probes={entries})" in note
    for options in ({"estimator": sf.Hutchinson(entries)}, {"curvature": "ggn"}):
        decided = found(**options)
        assert [row.verdict for row in decided.values()] == ["invariant", "moved"]
        assert not any("Hidden" in note for note in decided.notes)
    drawn = found(curvature="ggn", max_directions=1, tolerances=sf.Tolerances(errors=40))
    assert drawn.notes[0].endswith("A sweep over all directions has none: max_directions= above 1.")
