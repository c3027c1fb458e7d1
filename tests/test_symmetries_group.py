"""The group as a thing to use: elements, named members, subgroups, printing, errors."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scaling_networks import BY_NAME, answer, ready
from torch import Tensor, nn
from untouched import assert_untouched, fingerprint

from saltflat import InvalidType, InvalidValue, ModelError, zoo
from saltflat.symmetries import Group, symmetries, verify


def two_layers() -> nn.Sequential:
    """The example of Normalized Flat Minima, appendix A.1."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model[2].weight.copy_(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    return model


@cache
def group_of(name: str) -> tuple[nn.Module, Any, Group]:
    model, example = ready(BY_NAME[name])
    return model, example, symmetries(model, example)


def test_exponents_say_what_elements_do() -> None:
    model, _, group = group_of("vgg_bn")
    e = group.exponents()
    assert e.matrix.shape[1] == len(group)
    element = group.random(3, 2.0)
    moved = element(model)
    factor = np.exp(e.matrix @ element.logs.numpy())
    after = {**dict(moved.named_parameters()), **dict(moved.named_buffers())}
    for name, p in model.named_parameters():
        assert e.classes[name].shape == p.shape
        assert torch.allclose(p * torch.from_numpy(factor[e.classes[name]]), after[name])
    before = dict(model.named_buffers())
    for name, c in e.means.items():
        assert torch.allclose(before[name] * torch.from_numpy(factor[c]), after[name])
    for name, c in e.deviations.items():
        eps = e.eps[name]
        wanted = (before[name] + eps) * torch.from_numpy(factor[c]) ** 2 - eps
        assert torch.allclose(wanted, after[name])
    assert set(e.means) == {"1.running_mean", "5.running_mean"}
    assert torch.allclose(
        dict(element.inverse()(moved).named_parameters())["0.weight"], model[0].weight
    )


def test_random_factors_are_log_uniform_and_reproducible() -> None:
    _, _, group = group_of("mlp")
    logs = torch.stack([group.random(seed, 5.0).logs for seed in range(300)])
    assert float(logs.abs().max()) <= math.log(5.0)
    assert abs(float(logs.mean())) < 0.05
    assert abs(float(logs.std()) - math.log(5.0) / math.sqrt(3)) < 0.05
    assert torch.equal(group.random(1).logs, group.random(1).logs)
    assert not torch.equal(group.random(1).logs, group.random(2).logs)


def test_row_and_column_of_normalized_flat_minima() -> None:
    model = two_layers()
    group = symmetries(model, torch.randn(3, 2))
    moved = group.row_column("0", 0, 10.0)(model)
    assert torch.allclose(moved[0].weight, torch.tensor([[0.1, 0.2], [3.0, 4.0]]))
    assert torch.allclose(moved[2].weight, torch.tensor([[50.0, 6.0], [70.0, 8.0]]))
    moved = group.row_column("0", 1, 0.1)(moved)
    assert torch.allclose(moved[0].weight, torch.tensor([[0.1, 0.2], [30.0, 40.0]]))
    assert torch.allclose(moved[2].weight, torch.tensor([[50.0, 0.6], [70.0, 0.8]]))


def test_alpha_scaling_of_minimum_sharpness() -> None:
    model, x = zoo.mlp([3, 4, 5, 2]).double(), torch.randn(6, 3).double()
    group = symmetries(model, x)
    moved = group.alpha_scaling({"1.weight": 2.0, "3.weight": 5.0, "5.weight": 0.1})(model)
    for i, weight, bias in ((1, 2.0, 2.0), (3, 5.0, 10.0), (5, 0.1, 1.0)):
        assert torch.allclose(moved[i].weight, weight * model[i].weight)
        assert torch.allclose(moved[i].bias, bias * model[i].bias)
    assert torch.allclose(moved(x), model(x))
    with pytest.raises(InvalidValue, match="product of all factors must be 1"):
        group.alpha_scaling({"1.weight": 2.0, "3.weight": 5.0})
    with pytest.raises(InvalidValue, match=r"no weight '1.wait'. Nearest is '1.weight'"):
        group.alpha_scaling({"1.wait": 2.0})
    with pytest.raises(InvalidValue, match=r"must be positive. Got -1"):
        group.alpha_scaling({"1.weight": -1.0})


def test_uniform_factors_of_petzka() -> None:
    model, example, group = group_of("mlp")
    element = group.uniform(seed=1)
    factors = element.logs.exp()
    assert float(factors.min()) >= 5
    assert float(factors.max()) <= 25
    assert len(factors.unique()) == len(group)
    verify(model, element, example)


def test_filters_of_bn_sharpness() -> None:
    model, example, group = group_of("vgg_bn")
    a = torch.tensor([2.0, 3.0, 0.5])
    moved = group.filters({"0": a, "4": 7.0})(model)
    assert torch.allclose(moved[0].weight, a[:, None, None, None] * model[0].weight)
    assert torch.allclose(moved[0].bias, a * model[0].bias)
    assert torch.allclose(moved[4].weight, 7 * model[4].weight)
    for i in (1, 5, 9, 11):
        assert torch.equal(moved[i].weight, model[i].weight)
    assert torch.allclose(answer(moved, example), answer(model, example), rtol=1e-12)
    with pytest.raises(InvalidValue, match="No layer '9' has filters that feed BatchNorm"):
        group.filters({"9": 2.0})
    with pytest.raises(InvalidValue, match="Factors must be positive"):
        group.filters({"0": torch.tensor([1.0, 0.0, 1.0])})


def test_kinds() -> None:
    _, _, vgg = group_of("vgg_bn")
    assert {k: len(vgg.only(k)) for k in ("neuron", "batchnorm", "attention")} == {
        "neuron": 12,
        "batchnorm": 7,
        "attention": 0,
    }
    _, _, encoder = group_of("encoder")
    # two heads of two: queries with keys, and values
    assert len(encoder.only("attention")) == 8
    model, example, bert = group_of("bert")
    assert len(bert.only("attention")) == 8
    assert bert.dead == ("bert.encoder.layer.0.attention.self.key.bias",)
    verify(model, bert.only("attention").random(0, 1e3), example)


def test_layers_move_as_one() -> None:
    _, _, group = group_of("post_activation")
    layers = group.only("layer")
    assert {g.kind for g in layers} == {"layer"}
    assert len({g.name for g in layers}) == len(layers)
    factors = layers.random(0, 5.0).factors()
    for name in ("stem.weight", "conv1.weight", "conv2.weight", "fc.weight"):
        assert float(factors[name].std()) < 1e-12
    # three filters that feed BatchNorm, bn0 with bn2, bn1, and conv3 with skip
    assert len(layers) == 6


def test_layer_wise_dimension_of_a_chain() -> None:
    for depth in (2, 3, 5):
        model = zoo.mlp([3] * (depth + 1))
        assert len(symmetries(model, torch.randn(2, 3)).only("layer")) == depth - 1


def test_moved_parameters_are_named() -> None:
    _, _, group = group_of("parts")
    assert group.dead == ("unused",)
    assert "fc.weight" in group.parameters()
    assert "slope.weight" not in group.parameters()
    assert "unused" not in group.parameters()


def test_it_prints() -> None:
    _, _, group = group_of("llama")
    text = str(group)
    assert f"{len(group)} rescalings keep the function" in text
    assert "attention" in text
    assert "eps" in text
    assert "_softmax" in text
    assert repr(group.random(0, 2.0)).startswith(f"Element of {len(group)} factors")


def test_norms_are_approximate_and_never_drawn() -> None:
    class Normed(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.fc1, self.norm, self.fc2 = nn.Linear(3, 4), norm, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.norm(self.fc1(x)[:, :, None]).flatten(1))

    for norm, approximate in (
        (nn.GroupNorm(2, 4), 2),
        (nn.LayerNorm((4, 1)), 1),
        (nn.RMSNorm((4, 1), eps=1e-5), 1),
        (nn.BatchNorm1d(4, track_running_stats=False), 4),
        (nn.Tanh(), 0),
    ):
        model, example = Normed(norm), torch.randn(5, 3)
        group = symmetries(model, example)
        assert len(group.approximate) == approximate, norm
        assert "fc1.weight" not in group.parameters()
        verify(model, group.random(0, 1e3), example)


def test_tiny_variances_are_clipped_and_said() -> None:
    model, example = ready(BY_NAME["vgg_bn"])
    model[1].running_var.copy_(torch.tensor([1e-7, 1.0, 1e-12]))
    group = symmetries(model, example)
    down = group.element(torch.full((len(group),), -math.log(1e3)))
    assert down.notes == ("7 factors clipped: a running variance would be negative.",)
    moved = down(model)
    assert float(moved[1].running_var.min()) >= 0
    verify(model, down, example)
    assert group.element(torch.ones(len(group))).notes == ()
    other, _ = ready(BY_NAME["vgg_bn"])
    other[1].running_var.zero_()
    with pytest.raises(ModelError, match="would become negative"):
        group.filters({"0": 0.1})(other)


def test_the_model_is_left_as_found() -> None:
    model = zoo.BasicBlock(2, 3, 1).train()
    example = torch.randn(2, 2, 5, 5)
    before = fingerprint(model)
    group = symmetries(model, example, output=lambda out: out)
    assert_untouched(model, before)
    element = group.random()
    moved = element(model)
    verify(model, element, example)
    assert_untouched(model, before)
    assert moved.training

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(1)
            raise RuntimeError("no")

    broken = Fails().train()
    before = fingerprint(broken)
    with pytest.raises(RuntimeError, match="no"):
        symmetries(broken, torch.ones(2, 2))
    assert_untouched(broken, before)


class Branching(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.fc1, self.fc2, self.other = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        if h.sum() > self.limit:
            h[:, 0] += h[:, 1]
            h.mul_(2)
        else:
            h = self.other(h)
        return self.fc2(h)


def test_control_flow_is_recorded() -> None:
    torch.manual_seed(0)
    model, example = Branching(0.0), torch.randn(5, 3)
    group = symmetries(model, example)
    # the first two units are added up, and a sum that is compared with zero ties all four
    assert len(group) == 1
    assert "other.weight" in group.notes[0]
    assert group.dead == ()
    verify(model, group.random(0, 1e3), example)
    # compared with anything else it pins them
    assert len(symmetries(Branching(1e-3), example)) == 0


def test_forms_of_examples_and_outputs() -> None:
    model, example = ready(BY_NAME["siamese"])
    assert len(symmetries(model, {"a": example[0], "b": example[1]})) == 5

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = F.relu(self.fc1(x))
            return {"hidden": h, "logits": self.fc2(h)}

    x = torch.randn(4, 3)
    assert len(symmetries(Two(), x)) == 4
    # hidden features that are part of the answer are pinned
    assert len(symmetries(Two(), x, output=lambda out: list(out.values()))) == 0


def test_frozen_parameters() -> None:
    model, x = zoo.mlp([3, 4, 5, 2]), torch.randn(4, 3)
    model[1].requires_grad_(False)
    assert len(symmetries(model, x)) == 9
    group = symmetries(model, x, parameters="trainable")
    assert len(group) == 5
    assert "1.weight" not in group.parameters()
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="no floating point parameters"):
        symmetries(model, x, parameters="trainable")


def test_weights_kept_elsewhere_stay() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)
            self.kept = [self.fc2.weight.detach()]

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.fc1(x))
            return self.fc2(h) + F.linear(h, self.kept[0])

    model, x = Kept(), torch.randn(4, 3)
    group = symmetries(model, x)
    assert len(group) == 0
    verify(model, group.random(), x)


def test_positions_beyond_the_example_follow() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(6, 3))
            self.fc0, self.fc = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.relu(self.fc0(x) + self.position[: x.shape[1]]))

    model = Positions()
    group = symmetries(model, torch.randn(2, 4, 3))
    assert len(group) == 3
    verify(model, group.random(0, 1e3), torch.randn(2, 6, 3))


def test_errors() -> None:
    model, x = two_layers(), torch.randn(3, 2)
    group = symmetries(model, x)
    with pytest.raises(InvalidType, match=r"must be a torch.nn.Module"):
        symmetries(torch.relu, x)
    with pytest.raises(InvalidValue, match="'all' or 'trainable'"):
        symmetries(model, x, parameters="some")
    with pytest.raises(ModelError, match="no floating point parameters"):
        symmetries(nn.ReLU(), x)
    with pytest.raises(ModelError, match="lazy"):
        symmetries(nn.LazyLinear(3), x)
    with pytest.raises(ModelError, match="hold no tensor"):
        symmetries(model, x, output=lambda out: None)
    with pytest.raises(InvalidValue, match="kind must be one of layer, neuron"):
        group.only("row")
    with pytest.raises(InvalidValue, match="spread must be a finite number"):
        group.random(0, 0.5)
    with pytest.raises(InvalidValue, match="2 finite numbers"):
        group.element([1.0])
    with pytest.raises(InvalidValue, match="2 finite numbers"):
        group.element([1.0, math.nan])
    with pytest.raises(InvalidValue, match="0 < low ≤ high"):
        group.uniform(0, 3.0, 2.0)
    with pytest.raises(InvalidValue, match=r"No generator is named 1\[0\]"):
        group.row_column("1", 0, 2.0)
    with pytest.raises(InvalidValue, match="must be positive"):
        group.row_column("0", 0, 0.0)
    with pytest.raises(ModelError, match="not the one that the group was found for"):
        group.random()(nn.Linear(2, 2))
