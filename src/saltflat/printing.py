"""What is shown: tables as plain text, and the progress of a measurement."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from saltflat.errors import InvalidType

# Called with the step at hand, how many are done, and how many there are.
Callback = Callable[[str, int, int], None]


def plain_text(renderable: RenderableType, width: int = 100) -> str:
    """What rich would print, without colours."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip()


@contextmanager
def reporting(progress: bool | Callback | None) -> Iterator[Callback]:
    """What to call at every step: a bar in a terminal, silence elsewhere, or a user's callback.

    `None` shows a bar if the error stream is a terminal.
    """
    if callable(progress):
        yield progress
        return
    if progress is not None and not isinstance(progress, bool):
        raise InvalidType(
            "progress must be True, False, None or a callable of (step, done, total). "
            f"Got {type(progress).__name__}."
        )
    wanted = sys.stderr.isatty() if progress is None else progress
    if not wanted:
        yield lambda step, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda step, done, total: bar.update(
            task, description=step, completed=done, total=total
        )
