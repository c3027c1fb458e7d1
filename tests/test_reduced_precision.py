"""TensorFloat-32, simulated on the CPU: operands of products lose thirteen of their digits.

What it does to outputs must neither be taken for samples that depend on each other nor hide such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import saltflat as sf
from saltflat.curvature import curvature, plan, sweep
from saltflat.risk import Risk

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}


class Rounded(TorchDispatchMode):
    """Products of tensors in float32 see ten digits (and the leading one), while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.seen = (
            True,
            list[tuple[int, bool]](),
        )  # samples of a pass, and whether it was on

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.on and op in PRODUCTS:
            args = tuple(map(rounded, args))
        return op(*args, **(kwargs or {}))


def rounded(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounded]:
    """TensorFloat-32 for the length of a test; how many samples each forward pass has, and how."""
    mode = Rounded()

    @contextmanager
    def in_full(_: torch.device) -> Iterator[None]:
        before, mode.on = mode.on, False
        try:
            yield
        finally:
            mode.on = before

    forward = Risk.forward

    def counted(self: Risk, batch: Any, *args: Any) -> Tensor:
        mode.seen.append((batch.size, mode.on))
        return forward(self, batch, *args)

    for module in (plan, sweep):
        monkeypatch.setattr(module, "full_precision", in_full)
    for module in (plan, curvature):
        monkeypatch.setattr(module, "reduced_precision", lambda _: mode.on)
    monkeypatch.setattr(Risk, "forward", counted)
    with mode:
        yield mode


class Coupled(nn.Module):
    """Samples move each other's outputs, where there are more than `least` of them."""

    def __init__(self, how: Callable[[Tensor], Tensor], share: float, least: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(16, 64), *[nn.Linear(64, 64) for _ in range(10)], nn.Linear(64, 4)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight)
        self.body = nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())][:-1])
        self.how, self.share, self.least = how, share, least

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.body(x) - self.body(0.9 * x)  # of which rounding is a larger part
        if len(x) <= self.least:
            return outputs
        with torch.no_grad():
            others = self.how(outputs / outputs.abs().max())
        return outputs + self.share * outputs.detach().abs().max() * others


def data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 16, generator=generator), torch.arange(n) % 4


HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(0),
    "those before": lambda h: h.cumsum(0) / len(h),
    "those after": lambda h: h.flip(0).cumsum(0).flip(0) / len(h),
}


def parts(n: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(each.split(size) for each in data(n)), strict=True))


def test_rounding_is_not_company(tf32: Rounded) -> None:
    """Nor is the chunk put through the model once more: some of its samples are, in full."""
    model = Coupled(HOW["mean"], 0.0, 0)
    found = sf.trace(model, data(200))
    assert found.exact
    assert (200, False) not in tf32.seen
    assert any(64 <= size < 80 and not on for size, on in tf32.seen)
    tf32.on = False
    truth = sf.trace(model, data(200), dtype=torch.float64)
    assert found.total == pytest.approx(truth.total, rel=2e-2)
    assert found.total != pytest.approx(truth.total, rel=1e-6)
    tf32.on = True
    tf32.seen.clear()
    assert sf.trace(model, parts(200, 100)).exact
    assert (100, False) not in tf32.seen


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("share", [0.005, 0.01])
def test_company_of_the_size_of_rounding_is_seen(tf32: Rounded, share: float, how: str) -> None:
    """A dependence that samples have among more than those of the look, of one batch."""
    found = sf.trace(Coupled(HOW[how], share, 20), data(80), estimator=sf.Hutchinson(probes=4))
    assert "depend on the other samples" in found.details["body.0.weight"].reason


@pytest.mark.parametrize("how", HOW)
def test_company_of_other_batches_is_seen(tf32: Rounded, how: str) -> None:
    """The look is at a whole batch of five, and six samples are put together."""
    found = sf.trace(Coupled(HOW[how], 0.01, 5), parts(15, 5), estimator=sf.Hutchinson(probes=4))
    assert "depend on the other samples" in found.details["body.0.weight"].reason


def test_rounding_is_not_company_where_gradients_are_written_out(tf32: Rounded) -> None:
    """Of a parameter without a rule samples are asked by one alone and the others without it."""

    class Mixed(Coupled):
        def __init__(self) -> None:
            super().__init__(HOW["mean"], 0.0, 0)
            self.mix = nn.Parameter(torch.eye(16))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.einsum("ni,io->no", x, self.mix))

    found = sf.trace(Mixed(), data(20))
    assert found.details["mix"].rule == "per-sample"
    assert found.exact
