"""Small networks with every kind of rescaling symmetry, and a brute-force count of them.

Nothing here knows how saltflat finds symmetries: the count is the dimension of a null space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Case:
    """A network, how to draw inputs for it, and the dimension where it is known by hand."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[], Any]
    dimension: int | None = None


def act() -> nn.Module:
    # The same symmetries as ReLU, and no unit that is dead at random parameters.
    return nn.LeakyReLU(0.2)


def tensor(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, dtype=torch.float64)


def tokens(length: int, vocabulary: int, batch: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocabulary, (batch, length))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 5), act(), nn.Linear(5, 6, bias=False), act(), nn.Linear(6, 2)
    )


def vgg_bn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        act(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 5),
        act(),
        nn.Linear(5, 2),
    )


class PostActivation(nn.Module):
    """conv-BN-act-conv-BN + shortcut, act; once as identity, once with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        self.conv1, self.bn1 = nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.conv3, self.skip = nn.Conv2d(3, 2, 3, stride=2), nn.Conv2d(3, 2, 3, stride=2)
        self.fc, self.act = nn.Linear(2, 2), nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn0(self.stem(x)))
        out = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        out += x
        x = self.act(out)
        return self.fc(self.act(self.conv3(x) + self.skip(x)).mean((2, 3)))


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 1)
        self.bn1, self.conv1 = nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(2), nn.Conv2d(2, 3, 1)
        self.bn3, self.fc, self.act = nn.BatchNorm2d(3), nn.Linear(3, 2), act()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv2(self.act(self.bn2(self.conv1(self.act(self.bn1(x))))))
        return self.fc(F.adaptive_avg_pool2d(self.act(self.bn3(x)), 1).flatten(1))


class Dense(nn.Module):
    """Every layer sees all earlier ones, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(5, 2, 3, padding=1)
        self.bn, self.fc, self.act = nn.BatchNorm2d(7), nn.Linear(7, 2), act()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.act(self.conv1(x))], 1)
        x = torch.cat([x, self.act(self.conv2(x))], 1)
        return self.fc(self.act(self.bn(x)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)
        self.up1, self.up2 = nn.ConvTranspose2d(3, 2, 2, stride=2), nn.Conv2d(4, 3, 3, padding=1)
        self.mix, self.out, self.act = nn.Conv2d(3, 3, 1), nn.Conv2d(6, 1, 1), act()

    def forward(self, x: Tensor) -> Tensor:
        a = self.act(self.down1(x))
        b = self.act(self.down2(F.max_pool2d(a, 2)))
        c = self.act(self.up2(torch.cat([a, self.act(self.up1(b))], 1)))
        wide = F.interpolate(self.act(self.mix(b)), scale_factor=2, mode="bilinear")
        return self.out(torch.cat([c, wide], 1))


def separable() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 1),
        act(),
        nn.Conv2d(4, 4, 3, groups=4),
        act(),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.BatchNorm2d(4),
        act(),
        nn.Conv2d(4, 4, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.act = nn.Linear(3, 5), nn.Linear(5, 4), act()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.act(self.body(a)), self.act(self.body(b))
        return torch.einsum("ni,nj->nij", self.head(a), self.head(b)).flatten(1)


class Encoder(nn.Module):
    """A transformer encoder layer with its norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            4, 2, 3, activation=F.leaky_relu, batch_first=True, norm_first=True
        )
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.layer(x)))


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3))


class Llama(nn.Module):
    """Rotary positions, two query heads on one key head, a gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.q, self.k, self.v = (nn.Linear(4, n, bias=False) for n in (8, 4, 4))
        self.o, self.norm1, self.norm2 = nn.Linear(8, 4, bias=False), RMSNorm(4), RMSNorm(4)
        self.gate, self.up, self.down = (
            nn.Linear(4, 3, bias=False),
            nn.Linear(4, 3, bias=False),
            nn.Linear(3, 4, bias=False),
        )
        self.norm3, self.head = RMSNorm(4), nn.Linear(4, 5, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.1]).double()
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        n, t, _ = x.shape
        h = self.norm1(x)
        q = self.rotate(self.q(h).view(n, t, 2, 4).transpose(1, 2))
        k = self.rotate(self.k(h).view(n, t, 1, 4).transpose(1, 2))
        k, v = k.expand(n, 2, t, 4), self.v(h).view(n, t, 1, 4).transpose(1, 2).expand(n, 2, t, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(n, t, 8))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norm3(x))


class Parts(nn.Module):
    """Parameters used in ways that no layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.scale = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.slope, self.fc, self.table = nn.PReLU(4), nn.Linear(4, 3), nn.Linear(3, 2)
        self.group, self.unused = nn.GroupNorm(2, 4), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm((x @ torch.eye(4, dtype=x.dtype) * self.scale) + self.position)
        h = self.slope(h.transpose(1, 2)).transpose(1, 2)
        h = torch.stack([h, h.flip(1)]).amax(0).cumsum(1)
        h = self.group(torch.where(h > 0, h, 0.3 * h).transpose(1, 2)).transpose(1, 2)
        return self.table(self.fc(h.abs()).sum(1) / 3)


class Spread(nn.Module):
    """A convolution on an image made by a Linear: scales may differ from place to place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.conv, self.fc2 = nn.Linear(3, 8), nn.Conv1d(2, 2, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.fc1(x), 0.2).view(-1, 2, 4)
        return self.fc2(F.leaky_relu(self.conv(h), 0.2).flatten(1))


def low_rank() -> nn.Module:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4, 2))
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.leaky_relu(F.linear(x, self.b @ self.a), 0.2))

    return LowRank()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=5, n_positions=4, n_embd=4, n_layer=1, n_head=2, n_inner=3)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(  # type: ignore[call-arg]
            vocab_size=5,
            hidden_size=4,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=3,
            max_position_embeddings=3,
            type_vocab_size=1,
            num_labels=2,
            layer_norm_eps=0.1,
            pad_token_id=None,
        )
    )


CASES = [
    Case("mlp", mlp, tensor(20, 3), 11),
    Case("vgg_bn", vgg_bn, tensor(40, 2, 4, 4), 19),
    Case("post_activation", PostActivation, tensor(40, 2, 4, 4)),
    Case("pre_activation", PreActivation, tensor(30, 2, 3, 3)),
    Case("dense", Dense, tensor(40, 2, 3, 3)),
    Case("unet", UNet, tensor(4, 1, 4, 4), 13),
    Case("separable", separable, tensor(30, 2, 4, 4), 20),
    Case("siamese", Siamese, lambda: (tensor(6, 3)(), tensor(6, 3)()), 5),
    Case("encoder", Encoder, tensor(6, 3, 4)),
    Case("llama", Llama, tokens(4, 5)),
    Case("parts", Parts, tensor(16, 3, 4)),
    Case("spread", Spread, tensor(12, 3)),
    Case("low_rank", low_rank, tensor(12, 3)),
    Case("gpt2", gpt2, tokens(4, 5, 6)),
    Case("bert", bert, tokens(3, 5, 30)),
]
BY_NAME = {case.name: case for case in CASES}


def randomise(model: nn.Module, seed: int) -> None:
    """Generic parameters and statistics, in float64, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        for module in model.modules():
            if isinstance(module, BATCH_NORMS):
                size = module.running_mean.shape
                module.running_mean.copy_(
                    torch.randn(size, generator=generator, dtype=torch.float64)
                )
                module.running_var.copy_(
                    torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
                )


def answer(model: nn.Module, example: Any) -> Tensor:
    raw = model(*example) if isinstance(example, tuple) else model(example)
    return raw if isinstance(raw, Tensor) else raw.logits


def plain_batch_norm(m: nn.Module, x: Tensor) -> Tensor:
    """What BatchNorm computes in evaluation mode, differentiable by its statistics."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, var, weight, bias = (
        t.view(shape) for t in (m.running_mean, m.running_var, m.weight, m.bias)
    )
    return (x - mean) / (var + m.eps).sqrt() * weight + bias


def log_jacobian(model: nn.Module, example: Any) -> Tensor:
    """d outputs / d log-scales: a column for each entry of a parameter and each BatchNorm channel.

    A channel's column scales running mean and √(running var + eps) together.
    """
    norms = [m for m in model.modules() if isinstance(m, BATCH_NORMS)]
    parameters = list(model.parameters())
    statistics = [t for m in norms for t in (m.running_mean, m.running_var)]
    for t in statistics:
        t.requires_grad_(True)
    for m in norms:
        m.forward = partial(plain_batch_norm, m)
    outputs = answer(model, example).flatten()
    for m in norms:
        del m.forward
    grads = torch.autograd.grad(
        outputs,
        [*parameters, *statistics],
        torch.eye(len(outputs), dtype=outputs.dtype),
        allow_unused=True,
        is_grads_batched=True,
    )
    columns = [
        torch.zeros(len(outputs), p.numel()) if g is None else (g * p).flatten(1)
        for g, p in zip(grads, parameters, strict=False)
    ]
    for i, m in enumerate(norms):
        mean, var = grads[len(parameters) + 2 * i : len(parameters) + 2 * i + 2]
        columns.append(mean * m.running_mean + 2 * var * (m.running_var + m.eps))
    for t in statistics:
        t.requires_grad_(False)
    return torch.cat(columns, 1).detach()


def brute_force(case: Case, points: int = 4) -> int:
    """The dimension of the common null space over random parameters, without idle entries."""
    torch.manual_seed(0)
    model = case.make()
    blocks = []
    for seed in range(points):
        randomise(model, seed)
        blocks.append(log_jacobian(model, case.draw()))
    jacobian = torch.cat(blocks)
    jacobian = jacobian / jacobian.norm(dim=1, keepdim=True)
    jacobian = jacobian[:, jacobian.norm(dim=0) > 1e-12]
    assert len(jacobian) > jacobian.shape[1], "more outputs are needed than there are parameters"
    singular = torch.linalg.svdvals(jacobian)
    null = int((singular < 1e-9 * singular[0]).sum())
    rest = singular[: len(singular) - null]
    assert float(rest[-1]) > 1e-7 * float(singular[0]), "no gap in the spectrum"
    return null


def ready(case: Case, seed: int = 0) -> tuple[nn.Module, Any]:
    """The network of a case at generic parameters, and an example."""
    torch.manual_seed(seed)
    model = case.make()
    randomise(model, seed)
    return model, case.draw()


class RandomGraph(nn.Module):
    """A chain of random steps on three features, which may look back at earlier features."""

    STEPS = (
        "linear", "act", "norm", "batch", "residual", "concat", "gate", "slice", "prelu", "scale",
        "shared", "maxout", "tanh", "constant", "conv", "outer", "gram",
        "bilinear",
    )  # fmt: skip

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps, self.parts = steps, nn.ModuleDict()
        for i, step in enumerate(steps):
            self.parts[str(i)] = self.part(step)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def part(self, step: str) -> nn.Module:
        linear = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, bias=False)])
        return {
            "linear": linear[0],
            "norm": nn.LayerNorm(3, eps=0.1),
            "batch": nn.BatchNorm1d(3),
            "residual": linear,
            "concat": nn.Linear(6, 3),
            "gate": linear,
            "prelu": nn.PReLU(),
            "scale": nn.Linear(1, 3, bias=False),
            "shared": linear[0],
            "maxout": nn.Linear(3, 6),
            "conv": nn.Conv1d(1, 1, 1),
            "outer": linear,
            "gram": nn.Linear(3, 2, bias=False),
            "bilinear": nn.Bilinear(3, 3, 3),
        }.get(step, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        before, h = x, self.first(x)
        for i, step in enumerate(self.steps):
            before, h = h, self.step(step, self.parts[str(i)], before, h)
        return self.last(h)

    def step(self, step: str, part: Any, before: Tensor, h: Tensor) -> Tensor:
        match step:
            case "act":
                return F.leaky_relu(h, 0.2)
            case "residual":
                return h + part[1](F.leaky_relu(part[0](h), 0.2))
            case "concat":
                return part(torch.cat([before, h], 1))
            case "gate":
                return part[0](h) * part[1](h)
            case "slice":
                return torch.cat([h[:, 1:], h[:, :1]], 1).flip(1)
            case "scale":
                return h * part.weight[:, 0]
            case "shared":
                return F.leaky_relu(part(h), 0.2) + part(before)
            case "maxout":
                return part(h).view(-1, 3, 2).amax(2)
            case "tanh":
                return torch.tanh(h)
            case "constant":
                return h + torch.tensor([0.0, 0.0, 0.5], dtype=h.dtype)
            case "conv":
                return part(h[:, None]).flatten(1)
            case "gram":
                return h @ (part.weight.T @ part.weight)
            case "bilinear":
                return part(before, h)
            case "outer":
                return torch.einsum("ni,nj->nij", part[0](h), part[1](h)).sum(2)
        return part(h)
