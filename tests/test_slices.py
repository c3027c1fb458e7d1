"""The loss along lines and planes, against the model run at shifted parameters."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread
from scaling_networks import mlp, vgg_bn
from torch import Tensor, nn
from torch.func import functional_call
from untouched import assert_untouched, dressed, fingerprint

import saltflat as sf
from saltflat.slices.twin import balanced_twin

KINDS = ["random", "filter", "balanced", "eigenvectors"]


def network(make: Any = mlp, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = make().double()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(m.weight, 0.5, 1.5)
    return model.eval()


def points(*shape: int, classes: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    return x, torch.randint(classes, shape[:1], generator=g)


DATA = points(12, 3)


def at(model: nn.Module, shift: dict[str, Tensor], data: Any = DATA) -> float:
    moved = {n: p.detach() + shift.get(n, 0.0) for n, p in model.named_parameters()}
    return F.cross_entropy(functional_call(model, moved, (data[0],)), data[1]).item()


def drawn(parameters: dict[str, Tensor], count: int, seed: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(p.shape, generator=g, dtype=torch.float64) for n, p in parameters.items()}
        for _ in range(count)
    ]


def total(vector: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(v.detach().square().sum()) for v in vector.values()))


def check(found: sf.Landscape, model: nn.Module, vectors: list[dict[str, Tensor]]) -> None:
    for index, coordinates in enumerate(product(*found.axes)):
        shift = {
            n: sum(c * v[n] for c, v in zip(coordinates, vectors, strict=True)) for n in vectors[0]
        }
        assert found.losses[index] == pytest.approx(at(model, shift), rel=1e-11)


def test_random_directions_are_as_long_as_the_parameters() -> None:
    model = network()
    parameters = dict(model.named_parameters())
    found = sf.landscape(model, DATA, directions="random", points=3, seed=4)
    vectors = drawn(parameters, 2, 4)
    scaled = [{n: v * total(parameters) / total(d) for n, v in d.items()} for d in vectors]
    check(found, model, scaled)
    assert found.lengths == pytest.approx([total(parameters)] * 2, rel=1e-12)
    cosine = sum(float((scaled[0][n] * scaled[1][n]).sum()) for n in parameters)
    assert found.cosine == pytest.approx(cosine / total(parameters) ** 2, rel=1e-10)
    assert found.moving == found.parameters == sum(p.numel() for p in parameters.values())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, groups=2)
        self.up = nn.ConvTranspose2d(4, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.up(torch.relu(self.conv(x)))).mean((2, 3)))


def test_filters_have_the_length_of_the_weights_filters() -> None:
    """Li et al. 2018, written out unit by unit; biases and BatchNorm stay where they are."""
    model, data = network(Convolutions), points(6, 2, 5, 5)
    weights = {n: dict(model.named_parameters())[f"{n}.weight"] for n in ("conv", "up", "fc")}
    vectors = drawn({f"{n}.weight": w for n, w in weights.items()}, 2, 0)
    for vector in vectors:
        for name, w in weights.items():
            d = vector[f"{name}.weight"]
            for unit in range(w.shape[1] if name == "up" else w.shape[0]):
                here = (slice(None), unit) if name == "up" else (unit,)
                d[here] *= w[here].norm().detach() / d[here].norm()
    found = sf.landscape(model, data, points=3, span=0.5)
    for index, (a, b) in enumerate(product(*found.axes)):
        shift = {n: a * vectors[0][n] + b * vectors[1][n] for n in vectors[0]}
        assert found.losses[index] == pytest.approx(at(model, shift, data), rel=1e-11)
    assert found.moving == sum(w.numel() for w in weights.values())


def test_eigenvectors_bend_the_loss_as_their_eigenvalues_say() -> None:
    """A linear model with a squared loss is a parabola: L + ½ λ ‖θ‖² t² + slope t."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    x *= torch.tensor([3.0, 1.5, 1.0, 0.5])
    full = torch.cat([x, torch.ones(20, 1)], 1).double()
    values, vectors = torch.linalg.eigh(2 / 20 * full.T @ full)
    found = sf.landscape(model, (x, y), "mse", directions="eigenvectors", points=5, span=1.0)
    theta = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    slope = 2 / 20 * full.T @ (full @ theta - y[:, 0])
    top = [vectors[:, -1], vectors[:, -2]]
    top = [v * v[v.abs().argmax()].sign() * theta.norm() for v in top]
    for index, (a, b) in enumerate(product(*found.axes)):
        d = a * top[0] + b * top[1]
        bend = theta.norm() ** 2 * (a**2 * values[-1] + b**2 * values[-2]) / 2
        expected = (full @ theta - y[:, 0]).square().mean() + slope @ d + bend
        assert found.losses[index] == pytest.approx(float(expected), rel=1e-3)
    assert found.eigenvalues == pytest.approx(values[[-1, -2]].tolist(), rel=1e-4)
    assert found.standing.gradient_norm == pytest.approx(float(slope.norm()), rel=1e-12)


def test_directions_of_ones_own() -> None:
    one, other = network(), network(seed=1)
    difference = {
        n: q.detach() - p.detach()
        for (n, p), q in zip(one.named_parameters(), other.parameters(), strict=True)
    }
    found = sf.landscape(one, DATA, directions=difference, dimensions=1, points=5)
    assert found.losses[-1] == pytest.approx(at(other, {}), rel=1e-12)
    check(found, one, [difference])


# Rescaling


def pictures(directions: str, make: Any, data: Any, spread: float) -> tuple[Tensor, Tensor]:
    model = network(make)
    moved = sf.symmetries(model, data[0]).random(seed=3, spread=spread)(model)
    options = {"directions": directions, "points": 5, "span": 0.7}
    before, after = (sf.landscape(m, data, **options) for m in (model, moved))
    assert after.center == pytest.approx(before.center, rel=1e-9)
    return before.values, after.values


def half_dead() -> nn.Module:
    """With a unit that no sample activates."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].bias[0] = -100.0
    return model


@pytest.mark.parametrize(
    ("make", "data"),
    [(mlp, DATA), (vgg_bn, points(12, 2, 4, 4)), (half_dead, DATA)],
    ids=["mlp", "batchnorm", "dead units"],
)
def test_the_picture_of_the_balanced_twin_does_not_change(make: Any, data: Any) -> None:
    before, after = pictures("balanced", make, data, 10.0)
    assert float(before.max() - before.min()) > 1e-2
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def test_units_whose_scale_nothing_decides_are_told() -> None:
    """Where all weights that leave a unit are zero, both trace and length shrink with it."""
    model = network(half_dead)
    with torch.no_grad():
        model[2].weight[:, 1] = 0.0
    found = sf.landscape(model, DATA, directions="balanced", points=3)
    assert any("are left as they are" in note for note in found.notes)


@pytest.mark.parametrize("directions", ["random", "filter", "eigenvectors"])
def test_other_pictures_change(directions: str) -> None:
    before, after = pictures(directions, mlp, DATA, 10.0)
    assert float((after - before).abs().max()) > 1e-2


def imbalance(model: nn.Module) -> Tensor:
    """Of every hidden unit: the slope of Tr G + ‖θ‖² as what enters it grows and what leaves it
    shrinks, from the Gauss–Newton matrix written out, relative to the largest part of the sum."""
    (x, y), parameters = DATA, {n: p.detach() for n, p in model.named_parameters()}
    rows = torch.func.jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    p = functional_call(model, parameters, (x,)).softmax(1)
    bend = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    slopes = {
        n: values**2 - torch.einsum("nkl,nk...,nl...->...", bend, rows[n], rows[n]) / len(y)
        for n, values in parameters.items()
    }
    enters = [slopes["0.weight"].sum(1) + slopes["0.bias"], slopes["2.weight"].sum(1)]
    leaves = [slopes["2.weight"].sum(0), slopes["4.weight"].sum(0)]
    assert "2.bias" not in slopes
    return (torch.cat(enters) - torch.cat(leaves)).abs() / max(map(torch.max, leaves))


def test_the_twin_is_balanced() -> None:
    model = network()
    group = sf.symmetries(model, DATA[0])
    twin, _ = balanced_twin(group, model, DATA, "cross_entropy", {})
    assert float(imbalance(twin).max()) < 1e-6
    assert float(imbalance(model).max()) > 1e-2
    torch.testing.assert_close(twin(DATA[0]), model(DATA[0]), rtol=1e-10, atol=1e-12)


def test_the_twin_is_told() -> None:
    found = sf.landscape(network(), DATA, directions="balanced", points=3)
    assert found.notes == ("balanced over 11 rescalings",)
    assert found.center == pytest.approx(at(network(), {}), rel=1e-12)


# What comes with it


@pytest.mark.parametrize("directions", KINDS)
def test_the_model_is_left_as_found(directions: Any) -> None:
    model = dressed(network(vgg_bn))
    before = fingerprint(model)
    sf.landscape(model, points(6, 2, 4, 4), directions=directions, points=3)
    assert_untouched(model, before)

    def refuse(step: str, done: int, total: int) -> None:
        if step == "landscape" and done == 4:
            raise KeyboardInterrupt

    data = points(6, 2, 4, 4)
    with pytest.raises(KeyboardInterrupt):
        sf.landscape(model, data, directions=directions, points=3, progress=refuse)
    assert_untouched(model, before)


def test_accuracy() -> None:
    model, (x, y) = network(), DATA
    step = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    found = sf.landscape(model, DATA, directions=step, dimensions=1, points=5, accuracy=True)
    for a, share in zip(found.axes[0], found.accuracies, strict=True):
        moved = {n: p + a for n, p in model.named_parameters()}
        right = functional_call(model, moved, (x,)).argmax(1) == y
        assert share == pytest.approx(float(right.double().mean()))
    assert len(set(found.accuracies)) > 1
    assert found.standing.accuracy == found.accuracy[2]
    with pytest.raises(sf.LossError, match=r"needs a cross-entropy.*Got mse"):
        sf.landscape(nn.Linear(3, 1), (x.float(), x[:, :1].float()), "mse", accuracy=True)
    with pytest.raises(sf.InvalidValue, match="no accuracies"):
        _ = sf.landscape(model, DATA, points=2).accuracy


def test_batches_do_not_matter() -> None:
    model, (x, y) = network(), DATA
    loader = [(x[:5], y[:5]), (x[5:6], y[5:6]), (x[6:], y[6:])]
    whole, parts = (sf.landscape(model, data, points=3) for data in (DATA, loader))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-12)
    narrow = sf.landscape(model, DATA, points=3, memory_budget=1)
    assert narrow.losses == pytest.approx(whole.losses, rel=1e-12)


def test_overflow_is_told() -> None:
    model = network()
    step = {n: torch.full_like(p, 1e200) for n, p in model.named_parameters()}
    found = sf.landscape(model, DATA, directions=step, dimensions=1, points=3)
    assert [value is not None and math.isfinite(value) for value in found.losses] == [
        False,
        True,
        False,
    ]
    assert "the loss overflows at 2 points" in repr(found)
    assert found.complete


# Files


def test_an_interrupted_landscape_is_continued(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "plane.json"
    options: dict[str, Any] = {"points": 5, "accuracy": True}
    expected = sf.landscape(model, DATA, **options)

    def stop(step: str, done: int, total: int) -> None:
        if step == "landscape" and done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sf.landscape(model, DATA, path=path, progress=stop, **options)
    partial = sf.Landscape.load(path)
    assert partial.losses == expected.losses[:7] + (None,) * 18
    assert not partial.complete
    assert "18 of 25 points are not computed yet" in str(partial)
    steps: list[int] = []
    report = lambda step, done, total: steps.append(done) if step == "landscape" else None  # noqa: E731
    found = sf.landscape(model, DATA, path=path, progress=report, **options)
    assert steps == list(range(7, 25))
    assert found == expected == sf.Landscape.load(path)
    steps.clear()
    assert sf.landscape(model, DATA, path=path, progress=report, **options) == expected
    assert steps == []


KILLED = """
import os, signal, sys, torch, saltflat as sf
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
def stop(step, done, total):
    if step == "landscape" and done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
sf.landscape(model, (torch.eye(3), torch.arange(3) % 2), points=3, path=sys.argv[1], progress=stop)
"""


def test_a_killed_process_loses_one_point(tmp_path: Path) -> None:
    path = tmp_path / "plane.json"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [value is not None for value in sf.Landscape.load(path).losses] == [True] * 5 + [
        False
    ] * 4
    assert [each.name for each in tmp_path.iterdir()] == ["plane.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "the seed differ"),
        ({"directions": "random"}, "the directions differ"),
        ({"points": 4}, "the grid differ"),
        ({"accuracy": True}, "accuracy differ"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "the loss differ"),
        ({"data": (DATA[0] + 1, DATA[1])}, "the data differ"),
        ({"model": network(seed=1)}, "the model differ"),
        ({"parameters": [next(n for n, _ in network().named_parameters())]}, "the parameters"),
        ({"output": torch.Tensor.neg}, "the loss at the model differ"),
    ],
    ids=str,
)
def test_a_file_of_something_else_is_not_continued(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "plane.json"
    usual = {"model": network(), "data": DATA, "points": 3, "path": path}
    sf.landscape(**usual)
    before = path.read_bytes()
    with pytest.raises(sf.InvalidValue, match=f"landscape of something else: {words}"):
        sf.landscape(**{**usual, **change})
    assert path.read_bytes() == before


def test_files_that_are_no_landscapes(tmp_path: Path) -> None:
    found = sf.landscape(network(), DATA, points=3)
    with pytest.raises(sf.InvalidValue, match=r"saved as .json or .html. Got 'plane.txt'"):
        found.save(tmp_path / "plane.txt")
    with pytest.raises(sf.InvalidValue, match=r"path must be a .json file. Got 'plane.html'"):
        sf.landscape(network(), DATA, path=tmp_path / "plane.html")
    path = tmp_path / "report.json"
    sf.measure(network(), DATA, measures=["hessian_trace"]).save(path)
    with pytest.raises(sf.InvalidValue, match="is not a landscape"):
        sf.Landscape.load(path)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_pictures(dimensions: int, tmp_path: Path) -> None:
    found = sf.landscape(network(), DATA, dimensions=dimensions, points=5)
    path = found.plot(tmp_path / "new" / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    drawn = found._drawn()
    drawn.draw_without_rendering()
    whole = drawn.get_tightbbox()  # with the names of the axes, which a layout may push out
    height, width = imread(path).shape[:2]
    assert width >= 160 * whole.width
    assert height >= 160 * whole.height
    assert found._repr_html_().startswith('<img src="data:image/png;base64,')
    assert len(repr(found)) < 250
    empty = replace(found, losses=(None,) * len(found.losses), model="<b>&")
    with pytest.raises(sf.InvalidValue, match="nothing to draw"):
        empty.plot(path)
    assert "&lt;b&gt;&amp;" in empty._repr_html_()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"directions": "filters"}, "directions must be one of 'random', 'filter'"),
        ({"dimensions": 3}, r"1, for a line, or 2, for a plane. Got 3"),
        ({"span": 0.0}, "span must be a finite number above 0"),
        ({"points": 1}, "points must be an integer of at least 2"),
        ({"directions": 3}, "directions must be 'random'"),
        ({"directions": [{"0.weight": torch.ones(5, 3)}]}, "needs as many directions. Got 1"),
        ({"directions": {"0.wight": torch.ones(5, 3)}, "dimensions": 1}, "Nearest is '0.weight'"),
        ({"directions": {"0.weight": torch.ones(3)}, "dimensions": 1}, r"of shape \(5, 3\)"),
        ({"directions": {"0.weight": torch.zeros(5, 3)}, "dimensions": 1}, "it moves nothing"),
        ({"directions": "filter", "parameters": ["0.bias"]}, "no filters. Use directions='random'"),
        ({"directions": "balanced", "parameters": ["0.bias"]}, "must be 'trainable' or 'all'"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises((sf.InvalidValue, sf.InvalidType), match=words):
        sf.landscape(network(), DATA, **options)


def test_weights_of_zero_have_no_length() -> None:
    model = network()
    for p in model.parameters():
        nn.init.zeros_(p)
    for directions in ("random", "filter", "eigenvectors"):
        with pytest.raises(sf.ModelError, match="zero, so that no direction is as long"):
            sf.landscape(model, DATA, directions=directions)
    one = nn.Linear(1, 1, bias=False)
    with pytest.raises(sf.InvalidValue, match="A plane needs two parameters"):
        sf.landscape(one, (torch.ones(2, 1), torch.ones(2, 1)), "mse", directions="eigenvectors")
