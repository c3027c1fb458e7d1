"""Tables as plain text, for `str` and `repr`."""

from __future__ import annotations

from rich.console import Console, RenderableType


def plain_text(renderable: RenderableType, width: int = 100) -> str:
    """What rich would print, without colours."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip()
