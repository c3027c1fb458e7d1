"""The entry point of the command, beside the package: to import that takes seconds, most of them
torch's, and Ctrl-C in them is no error."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command `saltflat`."""
    try:
        from saltflat.cli import main as command
    except KeyboardInterrupt:
        print("saltflat: interrupted before there was a result.", file=sys.stderr)
        sys.exit(130)
    command()
