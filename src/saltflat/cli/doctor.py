"""What is installed, what is missing, and whether a computation comes out right here."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, final

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table
from torch import nn

import saltflat as sf
from saltflat.cli.options import devices
from saltflat.printed import USUAL, plain_text
from saltflat.session import SHARDED_SINCE

_NEEDED = ("torch", "numpy", "scipy", "rich", "typer", "jinja2", "plotly", "safetensors")
# package -> what it is for, and the line that installs it
_OPTIONAL = {
    "scikit-learn": ("the digits and `saltflat demo`", "pip install 'saltflat[demo]'"),
    "matplotlib": ("pictures", "pip install 'saltflat[plots]'"),
    "transformers": ("Hugging Face folders and Trainer", "pip install 'saltflat[transformers]'"),
    "lightning": ("the Lightning callback", "pip install 'saltflat[lightning]'"),
    "ray": ("sweeps on a cluster", "pip install 'saltflat[ray]'"),
    "pandas": ("Report.to_pandas", "pip install pandas"),
}


@final
@dataclass(frozen=True)
class Findings:
    """Versions by package, None for what is missing; devices; what there is for several processes;
    what is wrong."""

    versions: Mapping[str, str | None]
    devices: Mapping[str, str]
    processes: Mapping[str, str]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def content(self) -> dict[str, Any]:
        missing = {p: line for p, (_, line) in _OPTIONAL.items() if self.versions[p] is None}
        return {
            "versions": dict(self.versions),
            "devices": dict(self.devices),
            "processes": dict(self.processes),
            "missing": missing,
            "problems": list(self.problems),
        }

    def __rich__(self) -> Table:
        table = Table(show_header=False, caption_justify="left")
        table.add_column(no_wrap=True)
        table.add_column()
        for package, number in self.versions.items():
            use, line = _OPTIONAL.get(package, ("what is central", f"pip install {package}"))
            missing = f"[yellow]missing[/], for {use}: {escape(line)}"
            table.add_row(package, number or missing)
        for rows in (self.devices, self.processes):
            table.add_section()
            for name, words in rows.items():
                table.add_row(name, words)
        table.caption = "\n".join(self.problems) or (
            "A trace computed here agrees with autograd's Hessian."
        )
        return table

    def __str__(self) -> str:
        return plain_text(self, USUAL)


def examine() -> Findings:
    """Look at this machine."""
    versions = {"saltflat": sf.__version__, "python": platform.python_version()}
    installed = {package: _version(package) for package in (*_NEEDED, *_OPTIONAL)}
    problems = [f"{p} is missing: pip install {p}" for p in _NEEDED if installed[p] is None]
    seen = {device: _described(device) for device in devices()}
    tried = (*problems, *_tried(list(seen)))
    return Findings({**versions, **installed}, seen, _processes(), tried)


def _processes() -> dict[str, str]:
    """What `distributed=True` and sharded models can have here, and who this is under torchrun."""
    if not dist.is_available():
        return {"processes": "one alone: this torch has no torch.distributed"}
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    known = " and ".join(name for name, there in backends.items() if there) or "no gloo and no nccl"
    found = {"processes": f"several, through {known}"}
    if torch.__version__ < SHARDED_SINCE:  # compared as versions are
        found["sharded"] = f"fully_shard and tensor parallel need torch {SHARDED_SINCE}"
    else:
        found["sharded"] = "models of fully_shard (FSDP2), tensor-parallel models"
    if "RANK" in os.environ:
        rank, world = os.environ["RANK"], os.environ.get("WORLD_SIZE", "?")
        found["rank"] = f"{rank} of {world}, as torchrun says"
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _described(device: str) -> str:
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device == "cpu":
        words = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use"
        return f"{words}, {platform.machine()}, {sys.platform}"
    return "no float64: audits run on the CPU" if device == "mps" else ""


def _tried(names: list[str]) -> list[str]:
    """What does not work: the trace of a small network on every device, against autograd's."""
    problems = []
    for name in names:
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(name)
        x = torch.randn(5, 3, generator=generator).to(name)
        y = (torch.arange(5) % 2).to(name)
        found, truth = sf.trace(model, (x, y)).total, _trace(model, x, y)
        if not abs(found - truth) <= 1e-3 * abs(truth):
            problems.append(f"On {name} the trace of a small network is {found}, not {truth}.")
    return problems


def _trace(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The trace of the Hessian, written out entry by entry by autograd."""
    parameters = list(model.parameters())
    loss = nn.functional.cross_entropy(model(x), y)
    total = 0.0
    for p, slope in zip(
        parameters, torch.autograd.grad(loss, parameters, create_graph=True), strict=True
    ):
        for index in range(p.numel()):
            (row,) = torch.autograd.grad(slope.view(-1)[index], p, retain_graph=True)
            total += float(row.view(-1)[index])
    return total
