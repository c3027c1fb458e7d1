"""The entry point of the command, beside the package: to import that takes seconds, most of them
torch's, and Ctrl-C in them is no error."""

from __future__ import annotations

import os
import signal
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"saltflat: interrupted before there was a result.\n")
    os._exit(130)


def main() -> None:
    """Run the command `saltflat`."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:  # at once: a KeyboardInterrupt may be lost in the imports of compiled modules
        signal.signal(signal.SIGINT, _leave)
    from saltflat.cli import main as command

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
