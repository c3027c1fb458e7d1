"""The code of the README and of the docstrings runs as it stands."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saltflat
from saltflat.measures import table

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PUBLIC = {name: getattr(saltflat, name) for name in saltflat.__all__}
EXCEPTIONS = {n for n, o in PUBLIC.items() if isinstance(o, type) and issubclass(o, Exception)}


class Net(nn.Module):
    """Has the names that the README uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fc1, self.bn, self.fc = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn(self.fc1(x))))


def namespace() -> dict[str, Any]:
    """What the README takes for granted."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 6), torch.arange(12) % 3
    model, criterion = Net(0), nn.CrossEntropyLoss()
    base = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        base.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    return {
        "torch": torch,
        "sf": __import__("saltflat"),
        "model": model,
        "model_a": model,
        "model_b": Net(1),
        "loader": DataLoader(TensorDataset(x, y), batch_size=5),
        "x": x,
        "y": y,
        "criterion": criterion,
        "closure": closure,
        "base": base,
        "my_sharpness": lambda model, data: sum(
            float(p.detach().norm()) for p in model.parameters()
        ),
    }


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            id=block.splitlines()[0][:40],
            marks=[pytest.mark.slow] if "audit(" in block else [],
        )
        for block in BLOCKS
    ],
)
def test_code_blocks(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), namespace())


def test_the_table_of_measures_is_what_they_say() -> None:
    """Print it anew with `python -c "from saltflat.measures import table; print(table())"`."""
    assert table() in README


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - EXCEPTIONS - {"__version__"}))
def test_examples_of_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public name has an example, which prints what it says."""
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(PUBLIC[name].__doc__, {}, name, None, None)
    assert example.examples
    report: list[str] = []
    assert not doctest.DocTestRunner().run(example, out=report.append).failed, "".join(report)
