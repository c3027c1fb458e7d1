"""A log-softmax at the end of a model and a negative log-likelihood are one cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agree import agrees
from dense import Dense
from torch import Tensor, nn

import saltflat as sf

CLASSES = 4
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.7], dtype=torch.float64)


class Digits(nn.Module):
    """PyTorch's own MNIST example, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(12, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class Ending(nn.Module):
    """A convolution without a nonlinearity of its own, and what is done to its outputs."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end
        self.first, self.last = nn.Conv2d(2, 5, 1), nn.Conv2d(5, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(self.first(x).relu()))


def made(model: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    return model.double(), torch.randn(6, *shape).double()


def labels(*shape: int) -> Tensor:
    y = torch.arange(6 * torch.Size(shape).numel()).reshape(6, *shape) % CLASSES
    y.view(-1)[1] = -100
    return y


def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """For the oracle: of outputs that are not contiguous, torch has no gradient of images'."""
    return F.nll_loss(outputs.contiguous(), targets)


LOSSES = {
    "module": nn.NLLLoss(),
    "function": F.nll_loss,
    "weights": nn.NLLLoss(WEIGHTS),
    "sum": nn.NLLLoss(reduction="sum"),
    "ignored class": nn.NLLLoss(ignore_index=2),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_example_of_pytorch_is_exact(loss) -> None:
    model, x = made(Digits(), 1, 8, 8)
    y = labels() if loss is not LOSSES["ignored class"] else torch.arange(6) % CLASSES
    dense = Dense(model, x, y, loss)
    blocks = dense.blocks(dense.hessian)
    result, diagonal = sf.trace(model, (x, y), loss), sf.diagonal(model, (x, y), loss)
    assert result.exact
    assert diagonal.exact
    for name, block in blocks.items():
        assert "proved" in result.details[name].reason
        assert result[name] == pytest.approx(float(block.trace()), rel=1e-10)
        own = diagonal[name].flatten()
        torch.testing.assert_close(own, block.diagonal(), rtol=1e-9, atol=1e-13)


def test_what_is_made_of_products() -> None:
    model, x = made(Digits(), 1, 8, 8)
    y = labels()
    dense = Dense(model, x, y, F.nll_loss)
    largest = float(torch.linalg.eigvalsh(dense.hessian)[-1])
    pairs = sf.eigenvalues(model, (x, y), F.nll_loss, k=1, tol=1e-8)
    assert float(pairs.values[0]) == pytest.approx(largest, rel=1e-8)
    v = torch.randn(len(dense.hessian), dtype=torch.float64)
    product = sf.hessian(model, (x, y), F.nll_loss) @ v
    torch.testing.assert_close(product, dense.hessian @ v)
    cross_entropy = Dense(model, x, y, F.cross_entropy)
    torch.testing.assert_close(sf.ggn(model, (x, y), F.nll_loss) @ v, cross_entropy.ggn @ v)


def test_the_report_says_so() -> None:
    model, x = made(Digits(), 1, 8, 8)
    report = sf.measure(model, (x, labels()), F.nll_loss, measures=["hessian_trace"])
    assert any("log-softmax" in note for note in report.notes)
    plain, x = made(nn.Sequential(nn.Linear(3, CLASSES)), 3)
    report = sf.measure(plain, (x, labels()), F.nll_loss, measures=["hessian_trace"])
    assert not any("log-softmax" in note for note in report.notes)


def test_a_cross_entropy_after_it() -> None:
    model, x = made(Digits(), 1, 8, 8)
    y = labels()
    loss = nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)
    dense = Dense(model, x, y, loss)
    result = sf.trace(model, (x, y), loss)
    assert result.exact
    for name, block in dense.blocks(dense.hessian).items():
        assert "proved" in result.details[name].reason
        assert result[name] == pytest.approx(float(block.trace()), rel=1e-10)


def by_rows(z: Tensor) -> Tensor:
    n, classes, *positions = z.shape
    rows = z.permute(0, 2, 3, 1).reshape(-1, classes)
    return F.log_softmax(rows, -1).view(n, *positions, classes).permute(0, 3, 1, 2)


SAME = {
    "pixels": lambda z: F.log_softmax(z, 1),
    "from the end": lambda z: F.log_softmax(z, -3),
    "last, then moved": lambda z: F.log_softmax(z.movedim(1, -1), -1).movedim(-1, 1),
    "transposed": lambda z: F.log_softmax(z.transpose(1, 3), 3).transpose(3, 1),
    "rows of positions": by_rows,
    "a copy": lambda z: F.log_softmax(z, 1).clone(),
    "flat positions": lambda z: F.log_softmax(z.flatten(2), 1).reshape(z.shape),
    "squeezed": lambda z: F.log_softmax(z.unsqueeze(1), 2).squeeze(1),
}
OTHER = {
    "another dimension": lambda z: F.log_softmax(z, 2),
    "the last dimension": lambda z: F.log_softmax(z, -1),
    "moved away": lambda z: F.log_softmax(z, 1).transpose(1, 2),
    "scaled": lambda z: 2 * F.log_softmax(z, 1),
    "with a rest": lambda z: F.log_softmax(z, 1) + z,
    "twice used": lambda z: F.log_softmax(z, 1) + F.log_softmax(z, 1),
    "parts": lambda z: torch.cat([F.log_softmax(p, 1) for p in z.chunk(2, 1)], 1),
    "in between": lambda z: F.log_softmax(z, 1).relu() - z,
    "mixed classes": lambda z: F.log_softmax(z, 1).roll(1, 1).cumsum(1),
    "written into": lambda z: F.log_softmax(z, 1).index_fill(1, torch.tensor([0]), -1.0),
    "reshaped across": lambda z: F.log_softmax(z.permute(0, 2, 1, 3), 2).reshape(z.shape),
}
assert CLASSES == 4  # as many as there are rows and columns, so that shapes do not give it away


@pytest.mark.parametrize("end", SAME.values(), ids=SAME)
def test_layouts_of_the_same(end) -> None:
    model, x = made(Ending(end), 2, 4, 4)
    y = labels(4, 4)
    dense = Dense(model, x, y, likelihood)
    result = sf.trace(model, (x, y), F.nll_loss)
    for name, block in dense.blocks(dense.hessian).items():
        assert "proved" in result.details[name].reason
        assert result[name] == pytest.approx(float(block.trace()), rel=1e-10)


@pytest.mark.parametrize("end", OTHER.values(), ids=OTHER)
def test_what_is_no_cross_entropy(end) -> None:
    model, x = made(Ending(end), 2, 4, 4)
    y = labels(4, 4)
    dense = Dense(model, x, y, likelihood)
    result = sf.trace(model, (x, y), F.nll_loss, estimator=sf.Hutchinson(256))
    assert not any("proved" in detail.reason for detail in result.details.values())
    agrees(result, dense.blocks(dense.hessian))


class Sometimes(nn.Module):
    """Leaves its log-softmax out, or takes another way to it, where there are two positions."""

    def __init__(self, otherwise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.otherwise = nn.Linear(3, CLASSES), otherwise

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x).sum(1)
        return self.otherwise(z) if x.shape[1] == 2 else F.log_softmax(z, 1)


@pytest.mark.parametrize("otherwise", [lambda z: z, lambda z: z.softmax(1).log()])
@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_only_some_batches_with_it(otherwise, by_products: bool, first: bool) -> None:
    model, x = made(Sometimes(otherwise), 3, 3)
    y = torch.arange(6) % CLASSES
    batches = [(x[:2], y[:2]), (x[2:4, :1], y[2:4]), (x[4:, :2], y[4:])]
    batches = batches if first else batches[::-1]
    parts = [Dense(model, *batch, nn.NLLLoss(reduction="sum")).hessian for batch in batches]
    hessian = sum(parts) / 6
    if by_products:
        v = torch.randn(len(hessian), dtype=torch.float64)
        product = sf.hessian(model, batches, F.nll_loss) @ v
        torch.testing.assert_close(product, hessian @ v)
    else:
        result = sf.trace(model, batches, F.nll_loss)
        assert result.total == pytest.approx(float(hessian.trace()), rel=1e-9)


def test_curved_layers_below_it() -> None:
    body = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, CLASSES), nn.LogSoftmax(1))
    model, x = made(body, 3)
    y = torch.arange(6) % CLASSES
    dense = Dense(model, x, y, F.nll_loss)
    result = sf.trace(model, (x, y), F.nll_loss, estimator=sf.PropagatedCurvature(20))
    assert {name for name in result if result.details[name].exact} == {"2.weight", "2.bias"}
    agrees(result, dense.blocks(dense.hessian))


def test_targets_must_be_classes() -> None:
    model, x = made(Digits(), 1, 8, 8)
    with pytest.raises(sf.DataError, match="needs classes as targets"):
        sf.trace(model, (x, torch.rand(6, CLASSES)), nn.NLLLoss())
