"""The experiments of the papers from the command line: which there are, and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final, get_args

import typer
from rich.markup import escape
from rich.table import Table

from saltflat.bibliography import title
from saltflat.cli.running import Voice, saved
from saltflat.errors import SaltflatError, nearest
from saltflat.papers import EXPERIMENTS, Experiment, Size, reproduce
from saltflat.printed import Printed

ALL = "all"


@final
@dataclass(frozen=True, repr=False)
class Listing(Printed):
    """All experiments: name, title, paper and how long they are expected to take."""

    def content(self) -> dict[str, Any]:
        return {
            name: {"title": each.title, "paper": title(each.paper), "minutes": each.minutes}
            for name, each in EXPERIMENTS.items()
        }

    def table(self, width: int) -> Table:
        """By paper."""
        view, last = Table(caption_justify="left"), ""
        view.add_column("experiment", no_wrap=True)
        view.add_column("what", overflow="fold")
        view.add_column("minutes", justify="right", no_wrap=True)
        for name, each in EXPERIMENTS.items():
            paper, _, figure = name.partition("/")
            if paper != last:
                view.add_section()
                view.add_row(f"[bold]{paper}[/]", f"[bold]{escape(title(each.paper))}[/]")
            minutes = (f"{each.minutes[s]:g}" if s in each.minutes else "–" for s in get_args(Size))
            view.add_row(f"  /{figure}", escape(each.title), " / ".join(minutes))
            last = paper
        view.caption = (
            "Minutes: small, on two cores / full, on one GPU. One of them, all of a paper, or all: "
            "saltflat reproduce PAPER/EXPERIMENT, saltflat reproduce PAPER, saltflat reproduce all."
        )
        return view


def named(name: str) -> list[Experiment]:
    """The experiment of that name, those of a paper, or all."""
    found = [e for n, e in EXPERIMENTS.items() if name in (n, n.partition("/")[0], ALL)]
    if not found:
        papers = dict.fromkeys(each.partition("/")[0] for each in EXPERIMENTS)
        hint = nearest(name, [ALL, *papers, *EXPERIMENTS])
        raise typer.BadParameter(f"Unknown experiment {name!r}. {hint}", param_hint="NAME")
    return found


def run(voice: Voice, name: str, size: Size, folder: Path, how: Mapping[str, Any]) -> None:
    """Print what comes of each; one that fails does not stop the others."""
    wanted, failed, content = named(name), dict[str, SaltflatError](), dict[str, Any]()
    for each in wanted:
        try:
            result = reproduce(each, size, folder=folder, progress=not voice.quiet, **how)
        except SaltflatError as error:
            failed[each.name] = error
            continue
        except KeyboardInterrupt:
            voice.note(f"what is done is kept in {folder}; the same command goes on with it.")
            raise
        content[each.name] = saved(result) if voice.json else None
        if not voice.json:
            voice.result(result)
        voice.note(f"wrote results.json, table.md and figure.png in {folder / each.name / size}")
    if failed:
        words = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise SaltflatError(words) from next(iter(failed.values()))
    if voice.json:
        voice.result(None, lambda: content[wanted[0].name] if len(wanted) == 1 else content)
