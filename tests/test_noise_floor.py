"""Entries of h that are zero up to rounding: normalized sharpness does not see which way they fell.

An indefinite loss adds terms of both signs to an entry of the Hessian's diagonal. Where they cancel
in exact arithmetic, a machine leaves a few units of rounding of what was added, of either sign, by
its instruction set and the order of its sums; and h enters under a square root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch
from cases import BY_NAME, Case, normal, sine
from dense import jacobian, second_derivatives
from networks import classify
from torch import Tensor, nn

import saltflat as sf
from saltflat.curvature.contractions import (
    Bias,
    Deltas,
    Explicit,
    Layout,
    Lookup,
    Outer,
    RankOne,
    Term,
)
from saltflat.curvature.curvature import Layer
from saltflat.curvature.sweep import reduce
from saltflat.geometry import Matrix
from saltflat.measures.base import Context, Measure
from saltflat.measures.normalized_sharpness import balance_layer


def problem(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Layer, Tensor, Tensor]:
    """A layer, an h in which a row and a column are 0, and what was added up for it."""
    generator = torch.Generator().manual_seed(seed)
    h, magnitude = torch.rand(2, 6, 7, generator=generator, dtype=torch.float64)
    h, magnitude = h**3 - 0.02, magnitude + 1.0
    h[2], h[:, 3] = 0.0, 0.0
    weight = torch.randn(6, 7, generator=generator, dtype=torch.float64).to(dtype)
    return Layer("fc", "fc.weight", Matrix(), weight, "linear"), h, magnitude


def moved(h: Tensor, magnitude: Tensor, size: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    noise = torch.randn(h.shape, generator=generator, dtype=torch.float64)
    return h + size * magnitude * noise.clamp(-3, 3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("dtype", "rounding", "stable"), [(torch.float64, 1e-15, 1e-9), (torch.float32, 5e-7, 1e-4)]
)
def test_rounding_moves_nothing(
    seed: int, dtype: torch.dtype, rounding: float, stable: float
) -> None:
    layer, h, magnitude = problem(seed, dtype)
    value = balance_layer(layer, h, magnitude).value
    bare = balance_layer(layer, h).value
    changes, control = [], []
    for k in range(10):
        other = moved(h, magnitude, rounding, k)
        found = balance_layer(layer, other, magnitude)
        changes.append(abs(found.value / value - 1))
        control.append(abs(balance_layer(layer, other).value / bare - 1))
        assert not found.slopes[2].any(), "what is zero has no part in the error either"
        assert found.negative == pytest.approx(balance_layer(layer, h).negative, rel=1e-4)
    assert max(changes) < stable
    assert max(control) > 5 * stable, "the control: without a floor the roots of rounding count"


def test_what_is_not_rounding_stays() -> None:
    """An entry far above rounding counts, however small beside what was added."""
    layer, h, magnitude = problem(0)
    h[2] = 1e-11
    floored, bare = balance_layer(layer, h, magnitude), balance_layer(layer, h)
    assert floored.value == bare.value
    # terms of one sign: nothing cancels, and the least entry is as good as the largest
    layer, h, _ = problem(0)
    h = h.abs()
    h[2] = 1e-30
    assert balance_layer(layer, h, torch.zeros(())).value == balance_layer(layer, h).value


# The magnitudes themselves


@final
@dataclass(frozen=True)
class Magnitude(Measure):
    """Shows what the sweep gave."""

    seen: list[dict[str, Tensor]]
    name: ClassVar[str] = "magnitude"
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    needs: ClassVar[frozenset] = frozenset({"diagonal", "magnitude", "trace"})
    invariant_to: ClassVar[frozenset] = frozenset()

    def compute(self, context: Context) -> sf.Measurement:
        self.seen.append(dict(context.quantities["magnitude"].values))
        return self.measurement(value=0.0, exact=True, stderr=0.0)


def magnitudes(case: Case) -> dict[str, Tensor]:
    """mean Σ_c |λ_c| (∂⟨u_c, o⟩/∂w)², by the oracle's Jacobian."""
    oracle = case.dense()
    free = oracle.outputs.detach().requires_grad_()
    curvature = second_derivatives(oracle.loss(free, oracle.y), [free])
    rows = jacobian(oracle.outputs, [*oracle.parameters.values()])
    values, vectors = torch.linalg.eigh(curvature)  # samples do not interact
    total = values.abs() @ (vectors.T @ rows).square()
    sizes = [p.numel() for p in oracle.parameters.values()]
    parts = dict(zip(oracle.names, total.split(sizes), strict=True))
    return {name: parts[name].reshape(oracle.parameters[name].shape) for name in parts}


SIGNED = [
    BY_NAME["indefinite"],
    BY_NAME["normalized cross entropy"],
    Case(
        "convolutions",
        lambda: classify(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 4, 2)),
        normal(2, 4, 4),
        loss=sine,
        n=5,
    ),
]


@pytest.mark.parametrize("case", SIGNED, ids=str)
def test_sweep_adds_up_magnitudes(case: Case) -> None:
    seen: list[dict[str, Tensor]] = []
    sf.measure(case.model(), case.data(), case.loss, measures=[Magnitude(seen)])
    want = magnitudes(case)
    (found,) = seen
    assert found
    for name, value in found.items():
        assert torch.allclose(value, want[name], rtol=1e-8, atol=1e-12), name


def test_one_sign_needs_none() -> None:
    seen: list[dict[str, Tensor]] = []
    case = BY_NAME["mlp"]
    sf.measure(case.model(), case.data(), case.loss, measures=[Magnitude(seen)])
    assert seen
    assert all(v.ndim == 0 and v == 0 for v in seen[0].values())


def _terms() -> dict[str, Callable[[], Term]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    index = torch.randint(-1, 6, (4, 5), generator=generator)
    return {
        "written out": lambda: Explicit(draw(3, 4, 2, 5)),
        "one row": lambda: RankOne(Deltas(draw(3, 4, 5)), draw(4, 6), Layout()),
        "bias": lambda: Bias(Deltas(draw(3, 4, 5))),
        "pairs": lambda: Outer(list(draw(3, 4, 1, 5, 3)), draw(4, 1, 6, 3), Layout()),
        "groups": lambda: Outer(list(draw(3, 4, 2, 5, 3)), draw(4, 2, 6, 3), Layout((1,), 2)),
        "gradients": lambda: Outer(list(draw(3, 4, 1, 5, 20)), draw(4, 1, 6, 20), Layout()),
        "rows of a table": lambda: Lookup(index, list(draw(3, 4, 5, 2)), 6),
    }


@pytest.mark.parametrize("name", list(_terms()))
def test_terms(name: str) -> None:
    """Both sums from one term, each of its own signs."""
    term = _terms()[name]()
    sign = torch.tensor([[1, -1, 1, 1], [-1, -1, 0, 1], [1, 1, -1, -1]], dtype=torch.float64)
    found = dict(reduce(term, frozenset({"diagonal", "magnitude", "trace"}), None, sign))
    g = term.gradient()
    weights = sign.reshape(3, 4, *[1] * (g.ndim - 2))
    diagonal = (weights * g.square()).sum((0, 1))
    assert torch.allclose(found["diagonal"], diagonal, atol=1e-12)
    assert torch.allclose(found["trace"], diagonal.sum(), atol=1e-12)
    assert torch.allclose(found["magnitude"], g.square().sum((0, 1)), atol=1e-12)
    assert torch.allclose(term.trace(sign), diagonal.sum(), atol=1e-12)
    assert "magnitude" not in dict(reduce(term, frozenset({"magnitude"}), None, None))


@pytest.mark.parametrize("case", SIGNED[:1], ids=str)
def test_order_of_samples(case: Case) -> None:
    """Other orders of the same sums: other roundings, one value."""
    x, y = case.data()
    values = []
    for seed in range(6):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        report = sf.measure(
            case.model(), (x[rows], y[rows]), case.loss, measures=["normalized_sharpness"]
        )
        values.append(report["normalized_sharpness"].value)
    assert max(values) - min(values) < 1e-9 * max(values)
