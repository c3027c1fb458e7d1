"""The networks of the papers: sizes that are printed somewhere, and shapes that go through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import saltflat as sf
from saltflat import zoo

# Parameters: LeNet-5 and WideResNets as their authors count them (61,706; 2.75 and 36.5 million),
# ResNet-18 and VGG-11 with BatchNorm as common reimplementations for CIFAR-10 do; others by hand.
SIZES = [
    (zoo.ibayashi_mlp, {}, (1, 28, 28), 784 * 20 + 20 + 20 * 20 + 20 + 20 * 10 + 10),
    (
        zoo.ibayashi_fcnn,
        {},
        (1, 28, 28),
        785 * 512 + 513 * 128 + 129 * 512 + 513 * 10,
    ),
    (zoo.petzka_mlp, {}, (1, 28, 28), 785 * 50 + 51 * 50 + 51 * 50 + 51 * 30 + 31 * 10),
    (zoo.lenet5, {}, (1, 28, 28), 61_706),
    (zoo.lenet5, {"channels": 3}, (3, 32, 32), 61_706 + 2 * 6 * 25),
    (
        zoo.lenet5,
        {"channels": 3, "batch_norm": True},
        (3, 32, 32),
        61_706 + 2 * 6 * 25 + 2 * (6 + 16 + 120 + 84),
    ),
    (zoo.vgg11, {}, (3, 32, 32), 9_231_114),
    (zoo.resnet18, {}, (3, 32, 32), 11_173_962),
    (zoo.resnet18, {"channels": 1}, (1, 28, 28), 11_173_962 - 2 * 64 * 9),
    (zoo.wide_resnet16_4, {}, (3, 32, 32), 2_748_890),
    (zoo.wide_resnet28_10, {}, (3, 32, 32), 36_479_194),
    (
        zoo.wide_resnet28_10,
        {"feature_layer": 64},
        (3, 32, 32),
        36_479_194 - 641 * 10 + 641 * 64 + 65 * 10,
    ),
]


@pytest.mark.parametrize(("make", "settings", "shape", "size"), SIZES)
def test_sizes(make, settings, shape, size) -> None:
    model = make(**settings).eval()
    assert sum(each.numel() for each in model.parameters()) == size
    with torch.no_grad():
        assert model(torch.zeros(1, *shape)).shape == (1, 10)


def test_classes() -> None:
    for make in (zoo.vgg11, zoo.resnet18):
        with torch.no_grad():
            assert make(classes=100).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 100)


def test_every_layer_of_the_normalized_lenet_but_the_last_is_normalized() -> None:
    layers = list(zoo.lenet5(3, batch_norm=True))
    after = {
        i: isinstance(layers[i + 1], nn.BatchNorm1d | nn.BatchNorm2d)
        for i, layer in enumerate(layers[:-1])
        if isinstance(layer, nn.Linear | nn.Conv2d)
    }
    assert list(after.values()) == [True] * 4


def test_the_feature_layer_is_the_last_but_one() -> None:
    model = zoo.wide_resnet28_10(feature_layer=64)
    assert [m.weight.shape for m in model if isinstance(m, nn.Linear)] == [(64, 640), (10, 64)]


def test_the_auto_encoder_is_what_the_paper_says() -> None:
    model = zoo.shape_autoencoder()
    kinds = [type(m) for m in model if not isinstance(m, nn.ReLU | nn.Flatten | nn.Unflatten)]
    assert kinds == [nn.Conv3d] * 5 + [nn.Linear] * 2 + [nn.ConvTranspose3d] * 5
    assert model[12].weight.shape == (64, 8)
    assert 0.9e6 < sum(each.numel() for each in model.parameters()) < 1.1e6
    with torch.no_grad():
        assert model(torch.zeros(1, 1, 64, 64, 64)).shape == (1, 1, 64, 64, 64)


@pytest.mark.parametrize("side", [8, 16, 32])
def test_smaller_auto_encoders_have_its_linear_layers(side: int) -> None:
    model, volume = zoo.shape_autoencoder(side), torch.zeros(2, 1, side, side, side)
    linear = [m.weight.shape for m in model if isinstance(m, nn.Linear)]
    assert linear == [m.weight.shape for m in zoo.shape_autoencoder() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        assert model(volume).shape == volume.shape


def test_the_auto_encoder_has_no_other_sides() -> None:
    with pytest.raises(sf.InvalidValue, match="side must be 8, 16, 32 or 64"):
        zoo.shape_autoencoder(48)
