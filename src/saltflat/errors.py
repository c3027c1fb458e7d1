"""The exceptions that saltflat raises.

Every one derives from `SaltflatError`. A bad value is a `ValueError` too and a bad type a
`TypeError` too, so that code which knows nothing of saltflat still catches what it expects.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from importlib import import_module
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


class SaltflatError(Exception):
    """Anything that saltflat refuses to do."""


class InvalidValue(SaltflatError, ValueError):
    """An argument has the right type and a wrong value."""


class InvalidType(SaltflatError, TypeError):
    """An argument has the wrong type."""


class ModelError(InvalidValue):
    """The model cannot be measured: its parameters or its outputs are not what they must be."""


class DataError(InvalidValue):
    """The data are empty, not finite, or do not fit the model or the loss."""


class LossError(InvalidValue):
    """The loss cannot be used: unknown name, not a scalar, random, dependent on parameters."""


class ForwardError(ModelError, DataError, RuntimeError):
    """The model failed on the user's data; what torch raised is the `__cause__`.

    Whether the model or the data are wrong cannot be known, so it is both. It is a `RuntimeError`
    too, as most of what torch raises: code that runs a model on part of a batch, or laid out anew,
    and goes another way when the model does not bear that, catches it as one. Running out of
    memory is never wrapped, nor are errors of the user's own making.
    """


class CriterionError(LossError, DataError, RuntimeError):
    """A user's loss failed on the outputs and targets; its own error is the `__cause__`."""


class NoSecondDerivative(ModelError, LossError):
    """An operation of the model or of the loss has no second derivative, which a Hessian needs.

    What needs none can still be measured.
    """


class NegativeCurvature(ModelError):
    """Some parameters have negative curvature, so that the least trace may be −∞."""


class NotApplicable(SaltflatError, ValueError):
    """The measure is not defined for this model; the message says why and what to do."""


class NotMeasured(SaltflatError, KeyError):
    """A report has no value for this measure; the message says why and what to write."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show it with quotes around


class ChangedData(DataError):
    """The data were not the same on two passes."""


class LoadError(InvalidValue):
    """A model, weights or data that a user named cannot be loaded, or not without danger."""


class MissingData(LoadError):
    """A data set is not on this machine and could not be fetched; the message says what to run."""


class DistributedError(SaltflatError, RuntimeError):
    """The processes of a call with distributed=True cannot go on together: one of them is gone, or
    they do not do the same.

    `interrupted` says whether one was, as by Ctrl-C, which the others are told of.
    """

    interrupted = False


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, once there was something to keep: `partial` is a result that says what it lacks.

    It is a `KeyboardInterrupt` like any other for code that does not ask for more.

    Examples
    --------
    >>> import saltflat as sf
    >>> stop = sf.Interrupted("the report so far")
    >>> isinstance(stop, KeyboardInterrupt), stop.partial
    (True, 'the report so far')
    """

    def __init__(self, partial: Any) -> None:
        super().__init__("interrupted")
        self.partial = partial


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, Ctrl-C waits: what is to be done about it is done at the end.

    For what processes do together in several steps: where one stops between two of them, the others
    take what it says next for the step that it owes.
    """
    with ExitStack() as stack:
        if current_thread() is main_thread():  # where Python calls handlers, and takes new ones
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.enter_context(_held_back(number))
        yield


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    handler, frames = signal.getsignal(number), list[FrameType | None]()
    if not callable(handler):
        yield
        return
    try:
        signal.signal(number, lambda _, frame: frames.append(frame))
        yield
    finally:
        signal.signal(number, handler)
        if frames:
            handler(number, frames[0])


class MissingDependency(SaltflatError, ImportError):
    """An optional package is needed and is not installed."""


def optional(module: str, use: str) -> Any:
    """A module of a package that need not be installed, for a `use` in words."""
    package = module.split(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"{use} needs {package}, which is not installed. Install it with: pip install {package}"
        ) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint for a mistyped name: `Nearest is 'fc1.weight'.`, or the whole list."""
    names = list(known)
    if close := nearest_of(name, names):
        return f"Nearest is {close!r}."
    return "Known: " + ", ".join(map(repr, names[:20])) + ("." if len(names) <= 20 else ", ….")


def nearest_of(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant; nothing if none is like it."""
    return next(iter(get_close_matches(name, list(known), n=1)), "")


def listed(names: Iterable[str]) -> str:
    """The first few names."""
    shown = list(names)
    rest = len(shown) - 5
    return ", ".join(shown[:5]) + (f" and {rest} more" if rest > 0 else "")
