"""`measure --each`: the checkpoints that patterns match, measured one by one into one table."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, final

import typer
from torch import nn

import saltflat as sf
from saltflat.cli.data import BUILT_IN, load_data
from saltflat.cli.models import load_model
from saltflat.cli.named import is_named, named
from saltflat.cli.options import Request, usable


def matching(patterns: list[str]) -> list[Path]:
    """The files, each once: pattern by pattern, within one by name, where 9 is before 10."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        whole = Path(pattern).expanduser()
        names = [str(whole)] if whole.is_file() else glob(str(whole), recursive=True)
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            raise typer.BadParameter(f"No file matches {pattern!r}.", param_hint="--each")
        found |= dict.fromkeys(sorted(files, key=_natural))
    return list(found)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Numbers in names by their size."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


@final
@dataclass(frozen=True)
class _Maker:
    """Makes the model that was named, in whatever process."""

    text: str
    seed: int

    def __call__(self) -> nn.Module:
        model = load_model(self.text, seed=self.seed)
        # A module that lies in a file is the same one every time.
        same = is_named(self.text) and isinstance(named(self.text), nn.Module)
        return copy.deepcopy(model) if same else model


def _anywhere(text: str) -> str:
    """The name of a file or of code in a file, for processes in another folder."""
    place, _, name = text.rpartition(":")
    if place.endswith(".py"):
        return f"{Path(place).expanduser().absolute()}:{name}"
    return text if text in BUILT_IN or not Path(text).exists() else str(Path(text).absolute())


def measured(
    request: Request, model: str, patterns: list[str], names: Any, **how: Any
) -> sf.Comparison:
    """All that match; model and data are looked at before, so that their faults are told once."""
    files, data = matching(patterns), request.load_data()
    options = {**request.sampling(), **request.arguments(load_model(model, seed=request.seed))}
    options.pop("progress", None)
    alone = how["on"] == "here" and how["workers"] == 1
    assert request.data is not None
    return sf.measure_many(
        files,
        data if alone else partial(load_data, _anywhere(request.data), request.first),
        model=_Maker(_anywhere(model), request.seed),
        measures=names,
        device=usable(request.device),
        strict=not request.lenient,
        progress=False if request.quiet else None,
        **how,
        **options,
    )
