"""Every measure of curvature against the papers' formulas over dense Hessians."""

from __future__ import annotations

import copy
import warnings
from functools import cache, partial
from typing import Any

import networks as net
import papers
import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME, Case, classes, normal
from dense import Dense
from torch import Tensor, nn

import saltflat as sf
from saltflat.measures import (
    FisherRaoNorm,
    HessianMaxEigenvalue,
    Kappa,
    KappaTrace,
    MatrixNormalizedSharpness,
    Measure,
    NormalizedSharpness,
    NotApplicable,
    RelativeFlatness,
    Rho,
)

CURVED: list[str | Measure] = [
    "hessian_trace",
    "normalized_sharpness",
    "matrix_normalized_sharpness",
    "kappa_trace",
    "rho",
    RelativeFlatness(by_layer=True),
]


OWN = [
    Case(
        "convolutions",
        lambda: net.seq(
            nn.Conv2d(2, 3, 2),
            nn.ReLU(),
            nn.Conv2d(3, 2, 2, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2, 3),
        ),
        normal(2, 4, 4),
    ),
    Case(
        "normalized convolutions",
        lambda: net.classify(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 2)),
        normal(2, 4, 4),
        loss="normalized_cross_entropy",
        n=6,
    ),
]
TABLE = [
    *OWN,
    *[
        BY_NAME[name]
        for name in (
            "mlp",
            "mlp without bias",
            "conv2d stride uneven",
            "conv2d groups",
            "conv2d depthwise",
            "transposed 2d groups",
            "residual",
            "branches",
            "embedding",
            "sequences",
            "raw parameters",
            "frozen",
            "mse",
            "mse sum",
            "cross entropy sum",
            "cross entropy weights smoothing",
            "normalized cross entropy",
            "indefinite",
        )
    ],
]


# matrices that belong to no module: einsum("ntd,tde->nte") as it stands, and x @ out
OTHERS = {"mix": papers.plain(3, 4, 5), "out": papers.transposed(papers.plain(5, 3))}


@cache
def layers_of(case: Case) -> dict[str, papers.Layer]:
    return papers.layers(case.dense(), others=OTHERS)


@cache
def report(case: Case) -> sf.Report:
    return sf.measure(case.model(), case.data(), case.loss, measures=CURVED)


def close(got: float | Tensor, want: float | Tensor, scale: float = 0.0) -> None:
    """Equal to 1e-10, of the value itself or of what it was added up from."""
    got, want = (torch.as_tensor(v, dtype=torch.float64) for v in (got, want))
    assert got.shape == want.shape
    room = 1e-10 * max(float(want.abs().max()), scale)
    assert float((got - want).abs().max()) <= room, (got, want)


def same(m: sf.Measurement, want: dict[str, float]) -> None:
    """A sum over layers, exact, with the layers as views."""
    assert m.exact
    assert m.stderr == 0.0
    assert list(m.by_layer) == list(want)
    size = max(map(abs, want.values()))
    for name, value in want.items():
        close(m.by_layer[name], value, size)
    close(m.value, sum(want.values()), size)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_closed_forms(case: Case) -> None:
    found, layers = report(case), layers_of(case)
    same(found["kappa_trace"], {n: papers.kappa_trace(x) for n, x in layers.items()})
    same(
        found["matrix_normalized_sharpness"],
        {n: papers.matrix_normalized(x) for n, x in layers.items()},
    )
    flat = found["relative_flatness"]
    assert flat.exact
    for name, layer in layers.items():
        close(flat.by_layer[name], papers.relative_flatness(layer), layer.norm * abs(layer.trace))
    close(flat.value, flat.by_layer[flat.details["layer"]])


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_hessian_trace(case: Case) -> None:
    oracle, found = case.dense(), report(case)["hessian_trace"]
    blocks = {n: float(b.trace()) for n, b in oracle.blocks(oracle.hessian).items()}
    assert found.exact
    assert list(found.by_parameter) == list(blocks)
    size = max(map(abs, blocks.values()))
    for name, value in blocks.items():
        close(found.by_parameter[name], value, size)
    close(found.value, sum(blocks.values()), size)
    assert float(found) == found.value


SPECTRA = [
    c for c in TABLE if c.name in ("convolutions", "mlp", "residual", "mse sum", "indefinite")
]


@pytest.mark.parametrize("case", SPECTRA, ids=str)
def test_eigenvalues(case: Case) -> None:
    measures = [Kappa(tol=1e-9), HessianMaxEigenvalue(tol=1e-9, by_parameter=True)]
    both = sf.measure(case.model(), case.data(), case.loss, measures=measures)
    oracle, found, kappa = case.dense(), both["hessian_max_eigenvalue"], both["kappa"]
    spectrum = torch.linalg.eigvalsh(oracle.hessian)
    size = float(spectrum.abs().max())
    assert found.gap <= 1e-7 * size
    assert abs(found.value - float(spectrum[-1])) <= found.gap + 1e-10 * size
    for name, block in oracle.blocks(oracle.hessian).items():
        want = float(torch.linalg.eigvalsh(block)[-1])
        assert abs(found.by_parameter[name] - want) <= 1e-7 * size, name
    layers = layers_of(case)
    room = max(x.norm * float(x.hessian.abs().max()) for x in layers.values())
    assert kappa.gap <= 1e-6 * room
    total = sum(papers.kappa(x) for x in layers.values())
    assert abs(kappa.value - total) <= kappa.gap + 1e-10 * room
    for name, layer in layers.items():
        assert abs(kappa.by_layer[name] - papers.kappa(layer)) <= kappa.gap + 1e-10 * room


@pytest.mark.parametrize("side", ["columns", "rows"])
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_rho(case: Case, side: str) -> None:
    if side == "columns":
        found = report(case)["rho"]
    else:
        found = sf.measure(case.model(), case.data(), case.loss, measures=[Rho(side="rows")])["rho"]
    want = {name: papers.rho(x, side) for name, x in layers_of(case).items()}
    size = max(float(v.abs().max()) for v in want.values())
    assert list(found.by_neuron) == list(want)
    for name, values in want.items():
        close(found.by_neuron[name], values, size)
        close(found.by_layer[name], values.sum(), size)
        close(found.by_layer_max[name], values.max(), size)
    close(found.value, sum(float(v.sum()) for v in want.values()), size)
    close(found.max, max(float(v.max()) for v in want.values()), size)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_kappa_trace_of_neurons(case: Case) -> None:
    """‖w(j)‖² Tr H_jj of every column, which do not add up to ‖W‖² Tr H."""
    found, layers = report(case)["kappa_trace"], layers_of(case)
    assert list(found.by_neuron) == list(layers)
    for name, layer in layers.items():
        each = [papers.kappa_trace(x) for x in papers.neurons(layer)]
        want = torch.tensor(each, dtype=torch.float64)
        close(found.by_neuron[name], want, layer.norm * float(layer.hessian.abs().max()))
    close(found.max, max(map(papers.kappa_trace, layers.values())), abs(found.value))
    assert found.max > max(found.by_layer_max.values())


def test_kappa_trace_without_neurons() -> None:
    case = BY_NAME["mlp"]
    found = sf.measure(case.model(), case.data(), measures=[KappaTrace(neurons=False)])
    assert found["kappa_trace"].by_neuron == {}
    close(found["kappa_trace"].value, report(case)["kappa_trace"].value)
    assert KappaTrace(neurons=False).required() == {"trace"}


@pytest.mark.parametrize(
    "name", ["mlp", "conv2d groups", "transposed 2d groups", "embedding", "residual", "mlp GELU"]
)
def test_kappa_of_neurons(name: str) -> None:
    """‖w(j)‖² λ_max(H_jj) of every column; on the GELU network too, where products give it."""
    case = BY_NAME[name]
    model, layers = case.model(), layers_of(case)
    found = sf.measure(model, case.data(), case.loss, measures=[Kappa(tol=1e-12, neurons=True)])[
        "kappa"
    ]
    assert list(found.by_neuron) == list(layers)
    for layer_name, layer in layers.items():
        each = [papers.kappa(x) for x in papers.neurons(layer)]
        want = torch.tensor(each, dtype=torch.float64)
        close(found.by_neuron[layer_name], want, layer.norm * float(layer.hessian.abs().max()))
    close(found.max, max(map(papers.kappa, layers.values())))
    assert found.max > max(found.by_layer_max.values())


def test_kappa_of_a_column_of_zeros() -> None:
    case = BY_NAME["mlp"]
    model = case.model()
    with torch.no_grad():
        model[0].weight[:, 2] = 0.0
    found = sf.measure(model, case.data(), measures=[Kappa(neurons=True)])["kappa"]
    assert found.by_neuron["0"][2] == 0.0
    assert int((found.by_neuron["0"] > 0).sum()) == 3
    plain = sf.measure(model, case.data(), measures=["kappa"])["kappa"]
    assert plain.by_neuron == {}
    assert plain.value == found.value


def test_table_1() -> None:
    """The eleven rows of Petzka et al. 2019, Table 1, by where they are found in a report."""
    case = OWN[0]
    found, layers = report(case), layers_of(case)
    spectral = sf.measure(case.model(), case.data(), measures=[Kappa(tol=1e-9)])["kappa"]
    columns = {name: papers.rho(x, "columns") for name, x in layers.items()}
    kappa = {name: papers.kappa(x) for name, x in layers.items()}
    kappa_trace = {name: papers.kappa_trace(x) for name, x in layers.items()}
    views: list[tuple[Any, Any]] = [
        (spectral.by_layer, kappa),
        (found["kappa_trace"].by_layer, kappa_trace),
        (spectral.max, max(kappa.values())),
        (spectral.value, sum(kappa.values())),
        (found["kappa_trace"].max, max(kappa_trace.values())),
        (found["kappa_trace"].value, sum(kappa_trace.values())),
        (dict(found["rho"].by_neuron), columns),
        (found["rho"].by_layer_max, {n: float(v.max()) for n, v in columns.items()}),
        (found["rho"].by_layer, {n: float(v.sum()) for n, v in columns.items()}),
        (found["rho"].max, max(float(v.max()) for v in columns.values())),
        (found["rho"].value, sum(float(v.sum()) for v in columns.values())),
    ]
    for got, want in views:
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-12)
    singles = [v for v, _ in views if isinstance(v, float)]
    assert len({round(v, 9) for v in singles}) == len(singles), "views that cannot be told apart"


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_normalized_sharpness(case: Case) -> None:
    found, layers = report(case)["normalized_sharpness"], layers_of(case)
    want = {name: papers.normalized(x) for name, x in layers.items()}
    assert found.exact
    assert found.gap <= 1e-10 * found.value
    assert list(found.by_layer) == list(want)
    limits = " ".join(note for note in found.notes if "a limit, not attained" in note)
    for name, value in want.items():
        # L-BFGS stops above the infimum, never below; it creeps where that is not attained
        creeps = name in limits.partition(" in ")[2].split(", ")
        above = (value - found.by_layer[name]) / sum(want.values())
        assert -1e-9 <= above <= (1e-6 if creeps else 1e-9), name
    sums = [papers.clipped(x) for x in layers.values()]
    share = sum(a for a, _ in sums) / sum(b for _, b in sums)
    assert found.details["clipped"] == pytest.approx(share, rel=1e-9, abs=1e-15)
    told = any("negative and counts as zero" in note for note in found.notes)
    assert told == (share > 0)
    definite = case.loss not in ("normalized_cross_entropy", BY_NAME["indefinite"].loss)
    assert definite == (share < 1e-12), "the table must have both kinds"


def test_lam() -> None:
    """S(λ') = sqrt(λ/λ') S(λ), and the minimum of the sum with that λ."""
    case = BY_NAME["mlp"]
    layers = layers_of(case)
    for lam in (0.02, 1.0, 7.0):
        found = sf.measure(case.model(), case.data(), measures=[NormalizedSharpness(lam=lam)])
        want = sum(papers.normalized(x, lam) for x in layers.values())
        assert found["normalized_sharpness"].value == pytest.approx(want, rel=1e-9)
        half = report(case)["normalized_sharpness"].value
        assert found["normalized_sharpness"].value == pytest.approx(half * (0.5 / lam) ** 0.5)


# Relative flatness


class HeadFirst(nn.Module):
    """The layers are named in another order than they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.middle, self.body = nn.Linear(3, 2), nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.leaky_relu(self.middle(F.leaky_relu(self.body(x))), 0.3))


HEAD_FIRST = Case("head first", HeadFirst, targets=classes(2))


def test_last_linear_is_the_last_that_is_called() -> None:
    measures = [sf.measures.RelativeFlatness(by_layer=True)]
    found = sf.measure(HEAD_FIRST.model(), HEAD_FIRST.data(), measures=measures)
    flat, layers = found["relative_flatness"], layers_of(HEAD_FIRST)
    assert list(layers) == ["head", "middle", "body"]
    assert flat.details["layer"] == "head"
    assert "of layer 'head'" in flat.notes
    close(flat.value, papers.relative_flatness(layers["head"]))
    assert abs(flat.value - flat.by_layer["body"]) > 1e-3 * flat.value


def test_last_linear_of_a_network_that_ends_otherwise() -> None:
    model = net.seq(nn.Linear(4, 6), nn.ReLU(), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 3))
    model.append(nn.Flatten())
    found = sf.measure(model.double(), BY_NAME["mlp"].data(), measures=["relative_flatness"])
    assert found["relative_flatness"].details["layer"] == "0"


@pytest.mark.parametrize("name", ["head", "middle", "body"])
def test_relative_flatness_of_a_layer(name: str) -> None:
    layer = layers_of(HEAD_FIRST)[name]
    measures = partial(sf.measure, HEAD_FIRST.model(), HEAD_FIRST.data(), "cross_entropy")
    close(
        measures(measures=[RelativeFlatness(layer=name)])["relative_flatness"].value,
        papers.relative_flatness(layer),
    )
    simple = measures(measures=[RelativeFlatness(layer=name, simplified=True)])["relative_flatness"]
    close(simple.value, layer.norm * layer.trace)


def test_relative_flatness_of_no_linear_layer() -> None:
    case = Case("convolution", lambda: net.seq(nn.Conv1d(2, 3, 3), nn.Flatten()), normal(2, 3))
    with pytest.raises(NotApplicable, match="no Linear layer"):
        sf.measure(case.model(), case.data(), measures=["relative_flatness"])
    found = sf.measure(case.model(), case.data(), measures=[RelativeFlatness(layer="0")])
    layer = layers_of(case)["0"]
    close(found["relative_flatness"].value, papers.relative_flatness(layer))


def features(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The inputs of every Linear layer."""
    seen: dict[str, Tensor] = {}
    handles = [
        m.register_forward_pre_hook(lambda m, args, n=n: seen.update({n: args[0].detach()}))
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear)
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return seen


def test_normalized_features() -> None:
    case = Case("head first, more samples", HeadFirst, targets=classes(2), n=12)
    (x, _), layers = case.data(), layers_of(case)
    found = sf.measure(
        case.model(),
        case.data(),
        measures=[RelativeFlatness(normalize_features=True, by_layer=True)],
    )["relative_flatness"]
    for name, inputs in features(case.dense().model, x).items():
        spread = inputs.std(0, correction=0)
        assert bool((spread > 0).all()), "a dead unit: choose another case"
        close(found.by_layer[name], papers.relative_flatness(layers[name], spread))


def rescaled_unit(model: nn.Module, factor: float) -> nn.Module:
    """Another unit for a hidden feature: its incoming weights times the factor, outgoing over."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.middle.weight[1] *= factor
        model.middle.bias[1] *= factor
        model.head.weight[:, 1] /= factor
    return model


def test_normalized_features_do_not_depend_on_their_units() -> None:
    case = Case("head first, more samples", HeadFirst, targets=classes(2), n=12)
    model, data = case.model().eval(), case.data()
    other = rescaled_unit(model, 5.0)
    torch.testing.assert_close(model(data[0]), other(data[0]))

    def value(model: nn.Module, **settings: bool) -> float:
        found = sf.measure(model, data, measures=[RelativeFlatness(**settings)])
        return found["relative_flatness"].value

    assert value(other, normalize_features=True) == pytest.approx(
        value(model, normalize_features=True), rel=1e-9
    )
    assert value(other) != pytest.approx(value(model), rel=0.05)
    assert value(other, simplified=True) != pytest.approx(value(model, simplified=True), rel=0.05)


# Normalized Flat Minima, its running examples


def appendix_a(first: list[list[float]], second: list[list[float]]) -> nn.Sequential:
    model = net.seq(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(first, dtype=torch.float64))
        model[2].weight.copy_(torch.tensor(second, dtype=torch.float64))
    return model


def test_appendix_a() -> None:
    """Rows of W1 and columns of W2 rescaled: norms as printed, function and sharpness unchanged."""
    before = appendix_a([[1, 2], [3, 4]], [[5, 6], [7, 8]])
    after = appendix_a([[0.1, 0.2], [30, 40]], [[50, 0.6], [70, 0.8]])
    weights = [m[k].weight.detach() for m in (before, after) for k in (0, 2)]
    # (34), (36), (42); (44) prints 6101.13, which is what scaling the rows of W2 would give
    assert [float(w.norm() ** 2) for w in weights] == pytest.approx([30, 174, 2500.05, 7401])
    # (37), (43); (35) prints 5.48, which is sqrt(30), and (45) 78.11, again by rows
    spectral = [float(torch.linalg.matrix_norm(w, 2)) for w in weights]
    assert spectral == pytest.approx([5.465, 13.19, 50.00, 86.03], abs=5e-3)
    rows = torch.tensor([[50, 60], [0.7, 0.8]])
    assert float(rows.norm() ** 2) == pytest.approx(6101.13)
    assert float(torch.linalg.matrix_norm(rows, 2)) == pytest.approx(78.11, abs=5e-3)
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(9) % 2
    torch.testing.assert_close(before(x), after(x))
    names = ["normalized_sharpness", "rho", "matrix_normalized_sharpness", "hessian_trace"]
    was = sf.measure(before, (x, y), measures=names)
    now = sf.measure(after, (x, y), measures=names)
    for name in ("normalized_sharpness", "rho"):
        assert now[name].value == pytest.approx(was[name].value, rel=1e-9)
    for name in ("matrix_normalized_sharpness", "hessian_trace"):
        assert now[name].value != pytest.approx(was[name].value, rel=0.1)


class Sum(nn.Module):
    """y = ReLU(W1 x) + ReLU(W2 x), (26)."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 3, bias=False).double() for _ in range(2))
        with torch.no_grad():
            self.first.weight.copy_(first)
            self.second.weight.copy_(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).relu() + self.second(x).relu()


def test_section_7_3() -> None:
    """W/2 + W/2 against W + 0: what is kept, and what is not.

    The parameter-wise norm of (25) is half as large for the halves; going from them to W + 0, as
    (27) to (30) do, doubles it. Liang's own norm does not change.
    """
    g = torch.Generator().manual_seed(3)
    w = torch.randn(3, 4, generator=g, dtype=torch.float64)
    x, y = torch.randn(9, 4, generator=g, dtype=torch.float64), torch.arange(9) % 3
    halves, whole = Sum(w / 2, w / 2), Sum(w, 0 * w)
    torch.testing.assert_close(halves(x), whole(x))
    names = ["normalized_sharpness", "matrix_normalized_sharpness", "fisher_rao_norm", "rho"]
    a, b = (sf.measure(m, (x, y), measures=names) for m in (halves, whole))
    for name in ("normalized_sharpness", "matrix_normalized_sharpness"):
        assert a[name].value == pytest.approx(b[name].value, rel=1e-10), name
        assert b[name].by_layer["second"] == 0.0
    for name in ("fisher_rao_norm", "rho"):
        assert a[name].value == pytest.approx(b[name].value / 2, rel=1e-10), name
    liang = [FisherRaoNorm(form="liang")]
    a, b = (sf.measure(m, (x, y), measures=liang) for m in (halves, whole))
    assert a["fisher_rao_norm"].value == pytest.approx(b["fisher_rao_norm"].value, rel=1e-10)


# The Fisher–Rao norm


def by_samples(case: Case, names: list[str], loss: Any) -> tuple[Tensor, Tensor]:
    """Gradients of every sample's own loss, and the parameters, both flat."""
    model, (x, y) = case.model(), case.data()
    parameters = dict(model.named_parameters())
    theta = torch.cat([parameters[n].detach().flatten() for n in names])
    return papers.per_sample(model, x, y, loss, names), theta


def fisher(case: Case, form: str = "parameterwise") -> sf.Measurement:
    measures = [FisherRaoNorm(form=form)]
    return sf.measure(case.model(), case.data(), case.loss, measures=measures)["fisher_rao_norm"]


def plain_conv() -> nn.Module:
    return net.seq(
        nn.Conv2d(2, 3, 2, bias=False),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2, bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 3, bias=False),
    )


class SqueezedPlain(nn.Module):
    """Outputs of shape (n,), no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net.mlp(bias=False, k=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(-1)


PLAIN = [
    (BY_NAME["mlp without bias"], F.cross_entropy, 2),
    (Case("plain conv", plain_conv, normal(2, 5, 5)), F.cross_entropy, 3),
    (
        Case("plain mse", partial(net.mlp, bias=False), targets=normal(3), loss="mse"),
        F.mse_loss,
        2,
    ),
    (
        Case("plain sum", partial(net.mlp, bias=False), loss=nn.CrossEntropyLoss(reduction="sum")),
        F.cross_entropy,
        2,
    ),
    (Case("plain squeezed", SqueezedPlain, targets=normal(), loss="mse"), F.mse_loss, 2),
]


@pytest.mark.parametrize(("case", "loss", "degree"), PLAIN, ids=lambda v: str(v)[:20])
def test_fisher_rao_of_plain_networks(case: Case, loss: Any, degree: int) -> None:
    names = [n for n, _ in case.model().named_parameters()]
    gradients, theta = by_samples(case, names, loss)
    close(fisher(case).value, papers.fisher_rao(gradients, theta))
    liang = fisher(case, "liang")
    assert liang.exact
    assert liang.details["degree"] == degree
    close(liang.value, papers.fisher_rao_of_liang(gradients, theta))
    assert abs(liang.value - fisher(case).value) > 1e-3 * liang.value, "two different norms"


def test_fisher_rao_of_a_weighted_mean() -> None:
    """A sample's own loss is what the risk is the mean of: n w ℓ / Σ w."""
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    case = Case(
        "plain weights", partial(net.mlp, bias=False), loss=nn.CrossEntropyLoss(weight=weight)
    )
    y = case.data()[1]
    share = len(y) / float(weight[y].sum())

    def own(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, weight, reduction="sum") * share

    gradients, theta = by_samples(case, ["0.weight", "2.weight"], own)
    close(fisher(case).value, papers.fisher_rao(gradients, theta))
    close(fisher(case, "liang").value, papers.fisher_rao_of_liang(gradients, theta))


@pytest.mark.parametrize("name", ["mlp", "conv2d groups", "residual", "sequences", "mlp GELU"])
def test_fisher_rao_is_of_weight_matrices(name: str) -> None:
    case = BY_NAME[name]
    loss = case.dense_loss or F.cross_entropy
    found = fisher(case)
    assert found.exact
    for layer in layers_of(case):
        gradients, theta = by_samples(case, [f"{layer}.weight"], loss)
        close(found.by_layer[layer], papers.fisher_rao(gradients, theta), found.value)
    close(found.value, sum(found.by_layer.values()))


class Skip(nn.Module):
    """Of degree 1 and 2 at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.skip = net.mlp(bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.skip(x)


@pytest.mark.parametrize(
    "build",
    [net.mlp, Skip, lambda: net.mlp(nn.GELU, bias=False), lambda: nn.Sequential(Skip(), Tiny())],
    ids=["biases", "skip connection", "GELU", "tiny outputs"],
)
def test_liang_needs_a_homogeneous_network(build: Any) -> None:
    case = Case("not homogeneous", build)
    with pytest.raises(NotApplicable, match="not homogeneous in its weights"):
        fisher(case, "liang")


class Tiny(nn.Module):
    """Outputs far below any fixed tolerance."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-12


def test_liang_of_outputs_that_are_zero() -> None:
    case = Case("dead", partial(net.mlp, bias=False))
    model = case.model()
    with torch.no_grad():
        model[2].weight.zero_()
    with pytest.raises(NotApplicable, match="not homogeneous"):
        sf.measure(model, case.data(), measures=[FisherRaoNorm(form="liang")])


def test_samples_that_depend_on_each_other_have_no_fisher() -> None:
    case = BY_NAME["dice"]
    with pytest.raises(NotApplicable, match="gradients of single samples"):
        fisher(case)
    with pytest.raises(NotApplicable, match="not a mean or a sum over samples"):
        fisher(case, "liang")


def test_liang_with_nothing_to_average() -> None:
    case = BY_NAME["mlp without bias"]
    x, y = case.data()
    with pytest.raises(sf.DataError, match="nothing to average"):
        sf.measure(
            case.model(), (x, torch.full_like(y, -100)), measures=[FisherRaoNorm(form="liang")]
        )


# Networks that are not piecewise linear: estimates that say how far off they may be

BENT = {
    "mlp GELU": ("0", {}),
    "attention": ("attention.in_proj_weight", {"attention.in_proj_weight": papers.plain(12, 4)}),
}


def truth_of(name: str) -> dict[str, float]:
    layer, others = BENT[name]
    oracle = BY_NAME[name].dense()
    layers = papers.layers(oracle, others=others)
    every = layers.values()
    return {
        "hessian_trace": float(oracle.hessian.trace()),
        "kappa_trace": sum(map(papers.kappa_trace, every)),
        "rho": sum(float(papers.rho(x, "columns").sum()) for x in every),
        "relative_flatness": papers.relative_flatness(layers[layer]),
        "matrix_normalized_sharpness": sum(map(papers.matrix_normalized, every)),
        "normalized_sharpness": sum(map(papers.normalized, every)),
    }


#: minima over estimated curvature
MINIMA = ("matrix_normalized_sharpness", "normalized_sharpness")


@pytest.mark.parametrize("name", BENT)
def test_estimates(name: str) -> None:
    """Within 4.5 standard errors of the truth, and close enough for that to say something."""
    case, want = BY_NAME[name], truth_of(name)
    measures = [*CURVED[:-1], RelativeFlatness(layer=BENT[name][0])]
    few = sf.Hutchinson(probes=24 if name == "mlp GELU" else 50)  # fewer than entries
    with pytest.warns(UserWarning, match="estimated by Hutchinson"):
        found = sf.measure(case.model(), case.data(), case.loss, measures=measures, estimator=few)
    assert any("estimated by Hutchinson" in note for note in found.notes)
    assert list(found) == [*CURVED[:-1], "relative_flatness"]
    for key, m in found.items():
        assert not m.exact, key
        assert m.stderr > 0, key
        above = m.value - want[key]
        assert (m.bound == "upper") == (key in MINIMA), key
        assert above > -4.5 * m.stderr, (key, m.value, want[key], m.stderr)
        assert m.bound == "upper" or above < 4.5 * m.stderr, (key, m.value, want[key], m.stderr)
        assert f"± {m.stderr:.2g}" in str(m)
        assert any("an upper bound on average" in note for note in m.notes) == (key in MINIMA)
    assert found["hessian_trace"].stderr < 0.3 * want["hessian_trace"]
    exact = sf.measure(case.model(), case.data(), case.loss, measures=CURVED, curvature="ggn")
    assert all(m.exact for m in exact.values())
    assert not any(m.bound for m in exact.values())
    assert abs(exact["hessian_trace"].value - want["hessian_trace"]) > 0.01
    assert exact.provenance.curvature == "ggn"


def test_sketches() -> None:
    """Too many directions: sketched, and within 4.5 standard errors."""
    case = BY_NAME["mlp"]
    options = {"max_directions": 1, "estimator": sf.Hutchinson(probes=40)}
    with pytest.warns(UserWarning, match="sketched with 40 draws"):
        found = sf.measure(case.model(), case.data(), measures=CURVED, **options)
    for key, m in found.items():
        want = report(case)[key].value
        assert not m.exact
        assert 0 < m.stderr < want
        assert abs(m.value - want) < 4.5 * m.stderr, key


# Degenerate cases


def test_negative_traces() -> None:
    case = Case("concave", targets=normal(3), loss=lambda o, y: -F.mse_loss(o, y))
    with pytest.raises(NotApplicable, match="trace of every weight matrix is negative"):
        sf.measure(case.model(), case.data(), case.loss, measures=["matrix_normalized_sharpness"])
    found = sf.measure(case.model(), case.data(), case.loss, measures=["normalized_sharpness"])
    assert found["normalized_sharpness"].value == 0.0
    assert found["normalized_sharpness"].details["clipped"] == pytest.approx(1.0)
    some = report(BY_NAME["indefinite"])["matrix_normalized_sharpness"]
    layers = layers_of(BY_NAME["indefinite"])
    negative = [name for name, x in layers.items() if x.trace < 0]
    assert negative, "the case must have one"
    assert all(some.by_layer[name] == 0.0 for name in negative)
    assert any(negative[0] in note for note in some.notes)


def test_dead_layers_and_units() -> None:
    """All-zero layers, dead units and no curvature at all give numbers, and right ones."""
    case = BY_NAME["mlp"]
    for dead in ("unit", "first", "last"):
        model = case.model()
        with torch.no_grad():
            if dead == "unit":
                model[0].weight[1], model[0].bias[1] = 0.0, -1.0
            if dead == "first":
                model[0].weight.zero_()
            if dead == "last":
                model[2].weight.zero_()
        oracle = papers.layers(Dense(copy.deepcopy(model), *case.data()))
        found = sf.measure(model, case.data(), measures=[*CURVED, "kappa", "fisher_rao_norm"])
        close(found["normalized_sharpness"].value, sum(map(papers.normalized, oracle.values())))
        assert found["normalized_sharpness"].gap <= 1e-9 * found["normalized_sharpness"].value
        close(found["kappa_trace"].value, sum(map(papers.kappa_trace, oracle.values())))
        want = sum(map(papers.kappa, oracle.values()))
        assert found["kappa"].value == pytest.approx(want, rel=1e-6, abs=1e-12)


def test_pruned_layers_are_measured_too() -> None:
    """weight = mask · weight_orig: the layer must not drop out of the sums in silence."""
    case = BY_NAME["pruned"]
    found = report(case)["kappa_trace"]
    layers = papers.layers(case.dense(), others={"0.weight_orig": papers.plain(5, 4)})
    same(found, {name: papers.kappa_trace(x) for name, x in layers.items()})


# Settings that cannot be


def test_settings_are_checked() -> None:
    case = BY_NAME["mlp"]
    for lam in (0.0, -1.0, float("nan")):
        with pytest.raises(sf.InvalidValue, match="lam of NormalizedSharpness must be positive"):
            NormalizedSharpness(lam=lam)
    with pytest.raises(sf.InvalidValue, match="side of Rho must be"):
        Rho(side="diagonal")
    with pytest.raises(sf.InvalidValue, match="form of FisherRaoNorm must be"):
        FisherRaoNorm(form="rao")
    with pytest.raises(sf.InvalidValue, match="either simplified or normalises features"):
        RelativeFlatness(simplified=True, normalize_features=True)
    with pytest.raises(sf.InvalidValue, match="Got 'fc1'"):
        sf.measure(case.model(), case.data(), measures=[RelativeFlatness(layer="fc1")])
    with pytest.raises(sf.InvalidValue, match="tol must be a finite number at least 0"):
        sf.measure(case.model(), case.data(), measures=[Kappa(tol=-1.0)])
    with pytest.raises(sf.InvalidValue, match="hessian_trace has no values by layer"):
        _ = report(case)["hessian_trace"].max
    assert MatrixNormalizedSharpness().settings() == {}
    assert NormalizedSharpness(lam=2.0).settings()["lam"] == 2.0


def test_what_is_of_weight_matrices_alone() -> None:
    """As README and choose.md say: without biases and normalisations most measures are the same."""
    torch.manual_seed(0)
    parts = nn.Embedding(9, 4), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 6), nn.BatchNorm1d(6)
    model = net.seq(*parts, nn.ReLU(), nn.Linear(6, 3)).double()
    data = torch.randint(0, 9, (12, 2)), torch.arange(12) % 3
    matrices = [n for n, p in model.named_parameters() if p.ndim == 2]
    every = sf.measure(model, data, measures="all")
    fewer = sf.measure(model, data, measures="all", parameters=matrices)
    assert {n for n in every if fewer[n].value != pytest.approx(every[n].value, rel=1e-6)} == {
        "hessian_trace",
        "hessian_max_eigenvalue",
        "minimum_sharpness",
        "neuronwise_minimum_sharpness",
    }


def test_warnings_of_torch_about_itself_are_not_passed_on() -> None:
    """Of a recurrent layer in float32, which `vmap` takes sample by sample."""
    data = torch.randn(12, 3, 2), torch.arange(12) % 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sf.measure(net.Recurrent(nn.LSTM), data, measures=["fisher_rao_norm", "hessian_trace"])
    assert not [w for w in caught if "torch" in str(w.message) or "drop" in str(w.message)]


def test_a_network_that_takes_whole_graphs_only_is_measured() -> None:
    """The rescalings of one whose nodes are the samples were looked for on two of the nodes."""
    torch.manual_seed(0)
    model, data = net.Nodes().double(), (torch.randn(6, 3).double(), torch.arange(6) % 3)
    with pytest.raises(sf.ForwardError, match="failed on the example"):
        sf.symmetries(model, data[0][:2])
    twin = sf.symmetries(model, data[0]).random(seed=0, spread=10.0)(model)
    written_out = sf.Hutchinson(probes=sum(p.numel() for p in model.parameters()))
    names = ["hessian_trace", "relative_flatness", "neuronwise_minimum_sharpness"]
    one, other = (sf.measure(m, data, measures=names, estimator=written_out) for m in (model, twin))
    dense = Dense(model, *data)
    assert one["hessian_trace"].value == pytest.approx(float(dense.hessian.trace()), rel=1e-12)
    least = one["neuronwise_minimum_sharpness"].value
    assert least < one["hessian_trace"].value
    assert least == pytest.approx(other["neuronwise_minimum_sharpness"].value, rel=1e-8)
    sf.landscape(model, data, points=3, directions="balanced")
