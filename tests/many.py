"""Networks and checkpoints for tests of `measure_many`, where other processes can import them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def make(seed: int | None = None) -> nn.Module:
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def killed_once() -> nn.Module:
    """The first process that makes a network is killed; the folder comes by the environment."""
    mark = Path(os.environ["MARKS"]) / "made-once"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return make()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(12) % 3


def saved(folder: Path, count: int) -> list[Path]:
    """Checkpoints of networks, each another one, of all kinds of files."""
    folder.mkdir(exist_ok=True)
    files = []
    for seed in range(count):
        state = make(seed).state_dict()
        file = folder / f"epoch-{seed}{('.pt', '.safetensors', '.ckpt')[seed % 3]}"
        if file.suffix == ".safetensors":
            save_file(state, file)
        else:
            named = {f"model.{name}": value for name, value in state.items()}
            torch.save({"state_dict": named} if file.suffix == ".ckpt" else state, file)
        files.append(file)
    return files


def misfit(folder: Path) -> Path:
    torch.save(nn.Sequential(nn.Linear(4, 6)).state_dict(), folder / "misfit.pt")
    return folder / "misfit.pt"


def not_numbers(folder: Path) -> Path:
    state = make(9).state_dict()
    state["0.weight"][0, 0] = torch.nan
    torch.save(state, folder / "nan.pt")
    return folder / "nan.pt"
