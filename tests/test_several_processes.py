"""The page on several processes: its program runs as written; what some ranks skip is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import saltflat as sf


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (
            {},
            {"rho": "out of memory"},
            "rho was skipped on rank 1 and not on rank 0, .*: out of memory",
        ),
        ({"rho": "too large"}, {}, "rho was skipped on rank 0 and not on rank 1, .*: too large"),
    ],
)
def test_a_measure_that_some_ranks_skip(own: Any, other: Any, words: str) -> None:
    """Which they can do without waiting for each other, so that it shows at the end alone."""
    check = sys.modules["saltflat.measure"]._check_agreement
    both = SimpleNamespace(each=lambda work: [work(), other])
    with pytest.raises(sf.DistributedError, match=words):
        check(SimpleNamespace(reduction=both), own)
    check(SimpleNamespace(reduction=both), other)


OWN_CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()

def make_dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(21, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(21) % 3)
"""


@pytest.mark.slow
def test_the_page_s_program_runs_as_it_is_written(tmp_path: Path) -> None:
    """With a model and data of the reader's own, also where there is no GPU."""
    page = (Path(__file__).parent.parent / "docs" / "several-processes.md").read_text()
    (tmp_path / "measure.py").write_text(page.split("```python\n")[1].split("```")[0])
    (tmp_path / "mine.py").write_text(OWN_CODE)
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "measure.py"
    done = subprocess.run(
        [sys.executable, *launch], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    own: dict[str, Any] = {}
    exec(OWN_CODE, own)
    alone = sf.measure(own["make_model"](), own["make_dataset"]())
    found = sf.Report.load(tmp_path / "report.json")
    assert found.provenance.ranks == 2
    values = {name: m.value for name, m in alone.items()}
    assert {name: m.value for name, m in found.items()} == pytest.approx(values, rel=1e-10)
