"""Random architectures: whatever hypothesis builds, the exact value is the dense one."""

from __future__ import annotations

from itertools import pairwise

import torch
from agree import agrees
from dense import Dense
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import saltflat as sf

ACTIVATIONS = {
    "relu": nn.ReLU,
    "in place": lambda: nn.ReLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.2),
    "hardtanh": nn.Hardtanh,
    "none": nn.Identity,
}
LOSSES = {
    "cross_entropy": "cross_entropy",
    "normalized": "normalized_cross_entropy",
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "smooth": nn.CrossEntropyLoss(label_smoothing=0.1),
    "sine": lambda o, y: (o.sin() * o.gather(1, y.unsqueeze(1))).mean(),
}
QUIET = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Block(nn.Module):
    """A layer and an activation; perhaps a normalisation, perhaps a shortcut around them."""

    def __init__(self, layer: nn.Module, norm: nn.Module, act: nn.Module, residual: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.act, self.residual = layer, norm, act, residual

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.layer(x))
        if self.residual and out.shape == x.shape:
            out += x
        return self.act(out)


class Parallel(nn.Module):
    """A weight that is tied between two branches, which are added or joined."""

    def __init__(self, layer: nn.Module, join: bool) -> None:
        super().__init__()
        self.layer, self.join = layer, join

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layer(x), self.layer(x.flip(-1)).relu()
        return torch.cat([a, b], 1) if self.join else a + b


activation = st.sampled_from(sorted(ACTIVATIONS))
width = st.integers(1, 4)


@st.composite
def mlps(draw) -> tuple[nn.Module, Tensor]:
    sizes = draw(st.lists(width, min_size=1, max_size=4))
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        norm = nn.BatchNorm1d(o) if draw(st.booleans()) else nn.Identity()
        act = ACTIVATIONS[draw(activation)]()
        layer = nn.Linear(i, o, bias=draw(st.booleans()))
        layers.append(Block(layer, norm, act, draw(st.booleans())))
    if draw(st.booleans()):
        layers.append(Parallel(nn.Linear(sizes[-1], draw(width)), draw(st.booleans())))
    return nn.Sequential(*layers), torch.randn(draw(st.integers(1, 4)), sizes[0])


@st.composite
def convnets(draw) -> tuple[nn.Module, Tensor]:
    rank, transposed = draw(st.integers(1, 2)), draw(st.booleans())
    conv = getattr(nn, f"{'ConvTranspose' if transposed else 'Conv'}{rank}d")
    groups = draw(st.integers(1, 2))
    channels = [groups * draw(st.integers(1, 2)) for _ in range(draw(st.integers(2, 3)))]
    layers: list[nn.Module] = []
    for i, o in pairwise(channels):
        layer = conv(
            i,
            o,
            draw(st.integers(1, 2)),
            stride=draw(st.integers(1, 2)),
            padding=0 if transposed else draw(st.integers(0, 1)),
            dilation=draw(st.integers(1, 2)),
            groups=groups,
            bias=draw(st.booleans()),
        )
        norm = [nn.Identity, nn.BatchNorm1d, nn.BatchNorm2d][draw(st.booleans()) and rank](o)
        layers.append(Block(layer, norm, ACTIVATIONS[draw(activation)](), draw(st.booleans())))
    layers.append(getattr(nn, f"AdaptiveMaxPool{rank}d")(2))
    if draw(st.booleans()):
        layers.append(
            Parallel(getattr(nn, f"Conv{rank}d")(channels[-1], 2, 1), draw(st.booleans()))
        )
    size = [draw(st.integers(1, 2) if transposed else st.integers(7, 8)) for _ in range(rank)]
    return nn.Sequential(*layers), torch.randn(draw(st.integers(1, 3)), channels[0], *size)


@given(
    drawn=st.one_of(mlps(), convnets()),
    loss=st.sampled_from(sorted(LOSSES)),
    measure=st.sampled_from([sf.trace, sf.diagonal]),
    cut=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@QUIET
def test_random_architectures(drawn, loss, measure, cut, seed) -> None:
    body, x = drawn
    k = 3  # two normalised logits are always ±1: nothing but rounding would be left
    torch.manual_seed(seed)
    x = torch.randn(x.shape, dtype=torch.float64)
    model = nn.Sequential(body, nn.Flatten(), nn.LazyLinear(k)).double().eval()
    with torch.no_grad():
        model(x)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.2)
                tensor.mul_(torch.ones_like(tensor).bernoulli_(0.7) * 2 - 1)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.abs_()
        largest = model(x).abs().max().clamp(min=2)
        for p in model[-1].parameters():  # autograd's own p (1 - p) cancels for confident samples
            p.mul_(2 / largest)
    y = torch.randint(k, (len(x),))
    oracle = Dense(model, x, y, LOSSES[loss])
    result = measure(model, list(zip(x.split(cut), y.split(cut), strict=True)), LOSSES[loss])
    assert result.exact, {n: d.reason for n, d in result.details.items() if not d.exact}
    agrees(result, oracle.blocks(oracle.hessian))
