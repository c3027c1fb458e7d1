"""The command `saltflat`, also `python -m saltflat`."""

from saltflat.cli.app import app, main

__all__ = ["app", "main"]
