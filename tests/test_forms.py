"""Forms of the curvature with the weight (ρ, relative flatness, Fisher) against dense matrices."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, CASES, Case
from dense import gradient
from papers import Layer, relative_flatness
from torch import Tensor, nn
from units import Units, matrices, units

from saltflat.curvature.curvature import Curvature, Findings
from saltflat.curvature.estimators import Hutchinson
from saltflat.curvature.plan import Settings
from saltflat.curvature.sweep import Kind
from saltflat.result import Detail
from saltflat.risk import Risk

FORMS: frozenset[Kind] = frozenset({"columns", "rows", "flatness"})


def found_for(case: Case, kinds: frozenset[Kind] = FORMS, probes: int = 20, **settings) -> Findings:
    risk = Risk(case.model(), case.data(), case.loss)
    with risk.session():
        strategy = Hutchinson(probes)
        whole = Curvature(risk, "hessian", strategy, Settings(**settings))
        return whole.find(kinds, groups=5)


def details(found: Findings, kind: Kind) -> list[Detail[Tensor]]:
    return list(found.quantities[kind].details(Tensor.cpu).values())


def flatness(w: Tensor, u: Units, block: Tensor, scale: Tensor | None = None) -> Tensor:
    return block.new_tensor(relative_flatness(Layer(w.reshape(-1), u, block), scale))


def truth(case: Case, scales: dict[str, Tensor] | None = None) -> dict[Kind, dict[str, Tensor]]:
    oracle = case.dense()
    blocks = oracle.blocks(oracle.hessian)
    found: dict[Kind, dict[str, Tensor]] = {kind: {} for kind in FORMS}
    found["normalized_flatness"] = {}
    for name, u in matrices(oracle.model).items():
        if name not in blocks:
            continue
        w, block = oracle.parameters[name].detach(), blocks[name]
        found["columns"][name] = u.columns(w, block)
        found["rows"][name] = u.rows(w, block)
        found["flatness"][name] = flatness(w, u, block)
        if scales:
            found["normalized_flatness"][name] = flatness(w, u, block, scales[name])
    return found


def agrees(found: Findings, want: dict[Kind, dict[str, Tensor]], kinds: frozenset[Kind]) -> int:
    compared = 0
    for kind in kinds:
        for name, value in want[kind].items():
            quantity = found.quantities[kind]
            if name not in quantity.values:
                assert found.rules[name] == "unused", name
                continue
            entry = quantity.details(Tensor.cpu)[name]
            error = (entry.value.cpu() - value.reshape(entry.value.shape)).abs()
            room = 1e-10 * value.abs().max() + 1e-15
            if not entry.exact:
                room = room + 6 * entry.stderr
                torch.testing.assert_close(quantity.draws[name].mean(0), entry.value)
            assert bool((error <= room).all()), (kind, name, entry.value, value)
            compared += 1
    return compared


WITH_MATRICES = [case for case in CASES if matrices(case.model())]


@pytest.mark.parametrize("case", WITH_MATRICES, ids=str)
def test_forms(case: Case) -> None:
    found = found_for(case)
    agrees(found, truth(case), FORMS)


def test_the_table_has_every_kind_of_layer() -> None:
    names = ("mlp", "conv2d padding", "transposed 2d groups", "embedding", "pruned")
    rules = set()
    for name in names:
        rules |= {e.rule for e in details(found_for(BY_NAME[name]), "rows") if e.exact}
    assert rules >= {"linear", "conv", "conv_transpose", "embedding", "per-sample"}


@pytest.mark.parametrize("name", ["mlp", "conv2d padding", "conv2d groups"])
def test_oracle_tells_units_apart(name: str) -> None:
    """A negative control: columns are not rows, and relative flatness is neither's sum."""
    case = BY_NAME[name]
    want = truth(case)
    for key, columns in want["columns"].items():
        rows, flat = want["rows"][key], want["flatness"][key]
        assert abs(float(columns.sum() - rows.sum())) > 1e-6 * float(rows.sum())
        assert abs(float(flat - rows.sum())) > 1e-6 * float(rows.sum())


@pytest.mark.parametrize("name", ["mlp", "conv2d padding", "residual"])
def test_chunks_do_not_matter(name: str) -> None:
    case = BY_NAME[name]
    agrees(found_for(case, memory_budget=1), truth(case), FORMS)


@pytest.mark.parametrize("name", ["mlp Tanh", "mlp GELU", "rnn relu", "module called in a chain"])
def test_curved_blocks_in_full(name: str) -> None:
    """As many probes as there are entries: exact, though the blocks are not piecewise linear."""
    case = BY_NAME[name]
    found = found_for(case, probes=2000)
    assert any(e.rule == "products" for e in details(found, "rows"))
    assert all(e.exact for kind in FORMS for e in details(found, kind))
    assert agrees(found, truth(case), FORMS) > 0


def test_curved_blocks_in_full_with_normalised_features() -> None:
    case = BY_NAME["mlp Tanh"]
    seen = inputs_of(case.dense().model, case.data()[0])
    scales = {key: x.std(0, unbiased=False) for key, x in seen.items()}
    kinds: frozenset[Kind] = frozenset({"normalized_flatness"})
    found = found_for(case, kinds, probes=2000)
    assert all(e.exact for e in details(found, "normalized_flatness"))
    assert agrees(found, truth(case, scales), kinds) > 0


def test_sketched_forms() -> None:
    case = BY_NAME["mlp"]
    found = found_for(case, max_directions=1)
    assert not any(e.exact for e in details(found, "columns"))
    assert agrees(found, truth(case), FORMS) > 0


def inputs_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Every layer's input units over samples and positions, (rows, units)."""
    seen: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach()
            seen[f"{name}.weight"] = x if x.ndim == 2 else x.movedim(1, -1).flatten(0, -2)

        return hook

    handles = [
        m.register_forward_pre_hook(keep(n))
        for n, m in model.named_modules()
        if hasattr(m, "weight")
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ["mlp", "conv2d padding", "conv2d groups"])
def test_normalised_features(name: str) -> None:
    case = BY_NAME[name]
    seen = inputs_of(case.dense().model, case.data()[0])
    scales = {key: x.std(0, unbiased=False) for key, x in seen.items()}
    scales = {key: torch.where(s > 1e-9, s, 0.0) for key, s in scales.items()}
    kinds: frozenset[Kind] = frozenset({"normalized_flatness", "flatness"})
    found = found_for(case, kinds)
    want = truth(case, scales)
    assert agrees(found, want, kinds) > 0
    key = next(iter(want["flatness"]))
    plain, normal = want["flatness"][key], want["normalized_flatness"][key]
    assert abs(float(plain - normal)) > 1e-6 * float(plain)


def test_fisher() -> None:
    """Σ_i θ_i² mean (∂ℓ/∂θ_i)², sample by sample, for several losses."""
    for name in ("mlp", "conv2d padding", "residual", "mse", "embedding", "attention"):
        case = BY_NAME[name]
        found = found_for(case, frozenset({"fisher"}))
        oracle = case.dense()
        for key, value in found.quantities["fisher"].values.items():
            p = oracle.parameters[key]
            total = torch.zeros_like(p)
            samples = len(oracle.y)
            for i in range(samples):
                # the sample's share of the risk, times n: what the risk is the mean of
                (g,) = torch.autograd.grad(
                    oracle.loss(oracle.outputs, oracle.y), oracle.outputs, retain_graph=True
                )
                part = torch.zeros_like(g)
                part[i] = g[i] * samples
                total += gradient_of(oracle.outputs, p, part).square()
            want = (p.detach().square() * total / samples).sum()
            torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-14)


def gradient_of(outputs: Tensor, p: Tensor, cotangent: Tensor) -> Tensor:
    return gradient((outputs * cotangent).sum(), [p], retain_graph=True).reshape(p.shape)


def test_units_of_a_grouped_convolution() -> None:
    """The oracle's own table, by hand: four inputs in two groups, two outputs a group."""
    u: Units = units(nn.Conv1d(4, 4, 1, groups=2))
    assert u.out.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert u.into.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
