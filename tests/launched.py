"""What the ranks of `saltflat … --distributed` do in its tests, in processes that torchrun would
start: one world after the other, for each of the commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from typer.testing import CliRunner

import saltflat as sf
from saltflat.cli import app

Command = Sequence[str]


# By these names they are models of the commands.
relu, tanh, normalised = ranks.relu, ranks.tanh, ranks.normalised


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(23, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(23) % 3)


def loader() -> Any:
    return DataLoader(dataset(), batch_size=4)


def many() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3000, 4, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(3000) % 3), batch_size=500)


def shuffled() -> Any:
    return DataLoader(dataset(), batch_size=4, shuffle=True)


def one_batch() -> Any:
    return DataLoader(dataset(), batch_size=100, shuffle=True)


def single() -> Any:
    return DataLoader(dataset(), batch_size=None, collate_fn=lambda s: (s[0][None], s[1][None]))


def batches() -> Any:
    return list(loader())


def rank_of() -> int:
    return int(os.environ.get("RANK", 0))


def otherwise_shuffled() -> Any:
    """Every rank shuffles in its own way."""
    generator = torch.Generator().manual_seed(rank_of())
    return DataLoader(dataset(), batch_size=4, shuffle=True, generator=generator)


def with_sampler() -> Any:
    sampler = sf.ShardSampler(dataset()) if dist.is_initialized() else None
    return DataLoader(dataset(), batch_size=4, sampler=sampler)


def by_rank(rank: int, world: int) -> Any:
    """Divides itself; the last rank has the most, and the first none."""
    x, y = dataset().tensors
    cuts = [0, 0, 23] if world == 2 else [0, 23]
    own = slice(cuts[rank], cuts[rank + 1])
    return [(x[own], y[own])] if len(x[own]) else []


def padded() -> Any:
    return DataLoader(dataset(), batch_size=4, sampler=DistributedSampler(dataset()))


def dropping() -> Any:
    return DataLoader(dataset(), batch_size=4, shuffle=True, drop_last=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(batches())


def stream() -> Any:
    return DataLoader(Stream(), batch_size=None)


def divided_in_secret() -> Any:
    return batches()[rank_of() :: 2]


def shorter_on_one() -> Any:
    return DataLoader(TensorDataset(*(t[rank_of() :] for t in dataset().tensors)), batch_size=4)


def leaving_on_one() -> Any:
    return batches() if rank_of() == 0 else sys.exit(7)


def broken_on_one() -> Any:
    if rank_of() == 1:
        raise FileNotFoundError("no such disk")
    return batches()


def nan_on_one() -> Any:
    x, y = dataset().tensors
    return x.where(torch.arange(23)[:, None] < 20, torch.nan), y


def other_on_one() -> nn.Module:
    model = relu()
    with torch.no_grad():
        next(model.parameters()).mul_(1 + rank_of())
    return model


def without_folder() -> Any:
    """What is to be written to, is there before the measurement alone."""
    if rank_of() == 0:
        Path("gone").rmdir()
        Path("gone").touch()
    return batches()


def interrupted_on_one() -> Any:
    if rank_of() == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return batches()


def killed_on_one(item: Any) -> Any:
    """Ends rank 1 amid a pass, as the system does for want of memory."""
    if rank_of() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


ME = f"{__file__}:"
FEW = ["--measures", "hessian_trace,rho,sam_sharpness"]
PARTS = ["--samples", "auto", "--tolerance", "0.1", "--measures", "hessian_trace"]
BATCHES = ["--measures", "rho,bn_sharpness,hessian_max_eigenvalue"]

# As one process says it.
SAME: dict[str, Command] = {
    "tensors": ["measure", f"{ME}relu", "--data", "data.npz", *FEW],
    "some tensors": ["measure", f"{ME}relu", "--data", "data.npz", "--samples", "9", *FEW],
    "estimates": ["measure", f"{ME}tanh", "--data", "data.npz", *FEW],
    "loader": ["measure", f"{ME}normalised", "--data", f"{ME}loader", *BATCHES],
    "first of a loader": ["measure", f"{ME}tanh", "--data", f"{ME}loader", "--samples", "11", *FEW],
    "shuffled": ["measure", f"{ME}tanh", "--data", f"{ME}shuffled", *FEW],
    "shuffled otherwise": ["measure", f"{ME}tanh", "--data", f"{ME}otherwise_shuffled", *FEW],
    "one batch": ["measure", f"{ME}relu", "--data", f"{ME}one_batch", *FEW],
    "single": ["measure", f"{ME}tanh", "--data", f"{ME}single", *FEW],
    "batches": ["measure", f"{ME}tanh", "--data", f"{ME}batches", *FEW],
    "dataset": ["measure", f"{ME}tanh", "--data", f"{ME}dataset", *FEW],
    "sampler": ["measure", f"{ME}tanh", "--data", f"{ME}with_sampler", *FEW],
    "by rank": ["measure", f"{ME}tanh", "--data", f"{ME}by_rank", *FEW],
    "tolerance": ["measure", f"{ME}tanh", "--data", f"{ME}loader", "--tolerance", "0.2", *FEW],
    "random part": ["measure", f"{ME}relu", "--data", f"{ME}many", *PARTS],
    "compare": ["compare", f"a={ME}relu", f"b={ME}tanh", "--data", f"{ME}shuffled", *FEW],
    "audit": ["audit", f"{ME}relu", "--data", f"{ME}loader", "--elements", "1", *FEW[:1], "rho"],
    "landscape": ["landscape", f"{ME}relu", "--data", f"{ME}loader", "--points", "3"],
}
# The exit code, and what is told, once.
REFUSED: dict[str, tuple[Command, int, str]] = {
    "no file": (["measure", f"{ME}relu", "--data", "none.npz"], 3, "There is no file none.npz"),
    "one file": (
        ["measure", f"{ME}relu", "--data", f"{ME}broken_on_one"],
        3,
        "no such disk (.*) This happened on rank 1 of 2",
    ),
    "exit": (["measure", f"{ME}relu", "--data", f"{ME}leaving_on_one"], 3, "SystemExit .* 7"),
    "length": (
        ["measure", f"{ME}relu", "--data", f"{ME}shorter_on_one"],
        1,
        "23 samples.* and rank 1 22 samples",
    ),
    "no data": (["measure", f"{ME}relu"], 2, "--data"),
    "padded": (["measure", f"{ME}relu", "--data", f"{ME}padded"], 1, "repeats 1 of 23"),
    "dropping": (["measure", f"{ME}relu", "--data", f"{ME}dropping"], 1, "drop_last"),
    "stream": (["measure", f"{ME}relu", "--data", f"{ME}stream"], 1, "parameters rank and world"),
    "secret": (
        ["measure", f"{ME}relu", "--data", f"{ME}divided_in_secret"],
        1,
        "All ranks must have the same data",
    ),
    "first of shuffled": (
        ["measure", f"{ME}relu", "--data", f"{ME}shuffled", "--samples", "9"],
        1,
        "differ between two passes",
    ),
    "some by rank": (
        ["measure", f"{ME}relu", "--data", f"{ME}by_rank", "--samples", "9"],
        2,
        "divides the data itself",
    ),
    "each": (["measure", f"{ME}relu", "--data", "data.npz", "--each", "*"], 2, "--workers"),
    "saved": (["compare", "a.json", "b.json"], 2, "has no use for it"),
    "nan": (["measure", f"{ME}relu", "--data", f"{ME}nan_on_one"], 1, "NaN.* on rank 1 of 2"),
    "models": (["measure", f"{ME}other_on_one", "--data", "data.npz"], 1, "not the same on rank 0"),
    "no folder": (
        ["measure", f"{ME}relu", "--data", f"{ME}without_folder", "--html", "gone/run.html"],
        1,
        "FileExistsError: .* on rank 0 of 2",
    ),
    "interrupted": (
        ["measure", f"{ME}relu", "--data", f"{ME}interrupted_on_one"],
        130,
        "saltflat: interrupted",
    ),
}

# After which rank 1 is not there for another one.
KILLED: Command = [
    *("measure", f"{ME}relu", "--data", f"{ME}batches", "--unpack", f"{ME}killed_on_one")
]


def launched(rank: int, folder: str, name: str, command: Command) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one of two processes, as torchrun starts them."""
    os.chdir(folder)
    port = json.loads(Path("ports.json").read_text())[name]
    # The store is the parent's, as it is that of torchrun's agent.
    store = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update({**store, **place, "MASTER_PORT": port})
    done = CliRunner().invoke(app, [*command, "--distributed"])
    return done.exit_code, done.stdout, done.stderr


TRACED: Command = ["measure", f"{ME}relu", "--data", f"{ME}broken_on_one", "--traceback"]


def work(rank: int, world: int, folder: str) -> None:
    """All commands of a rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    attempt = ranks.Attempts(f"{folder}/{rank}.pt")
    for name, command in SAME.items():
        saving = [*command, "--save", f"{name.replace(' ', '-')}-{rank}.json"]
        attempt(name, partial(launched, rank, folder, name, saving))
    for name, (command, _, _) in REFUSED.items():
        attempt(name, partial(launched, rank, folder, name, command))
    attempt("traced", partial(launched, rank, folder, "traced", TRACED))
    attempt("killed", partial(launched, rank, folder, "killed", KILLED))
