"""Python objects that a user names: `package.module:object` or `path/to/file.py:object`.

Importing a module runs it. That is what the user asks for by naming it; no other source of a model,
of weights or of data runs anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from saltflat.errors import LoadError, nearest


def is_named(text: str) -> bool:
    """Whether this is the name of a Python object."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module) and all(part.isidentifier() for part in name.split("."))


def named(text: str) -> Any:
    """The object of that name."""
    place, _, name = text.rpartition(":")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n in dir(found) if not n.startswith("_")]
            raise LoadError(f"{place} has no {part!r}. {nearest(part, public)}")
        found = getattr(found, part)
    return found


def called(text: str, what: str, found: Any, **given: int) -> Any:
    """What the user's callable returns, called with what is given, or without arguments."""
    try:
        return found(**given)
    except (Exception, SystemExit) as error:
        how = " and ".join(f"{name}={value}" for name, value in given.items())
        raise LoadError(
            f"{text} raised {type(error).__name__} when it was called with{how and f' {how}'}"
            f"{'' if how else 'out arguments'} to make {what}: {_words(error)}"
        ) from error


def _file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise LoadError(f"There is no file {path}.")
    _search(path.parent)  # as `python path` does, for the modules beside it
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Under its own name, so that classes and dataclasses in it find their module.
    known: Mapping[str, ModuleType] = sys.modules
    if path.stem in known:
        if getattr(known[path.stem], "__file__", None) == str(path):
            return known[path.stem]
        raise LoadError(
            f"{path.name} has the name of a module that is loaded already, {path.stem!r}. Give it "
            "another name."
        )
    sys.modules[path.stem] = module
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        raise _failed(str(path), error) from error
    return module


def _module(name: str) -> ModuleType:
    _search(Path.cwd())  # as `python -m` does
    if not all(part.isidentifier() for part in name.split(".")):
        raise LoadError(
            f"{name!r} is no module's name. Write package.module:object or path/to/file.py:object."
        )
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _failed(name: str, error: BaseException) -> LoadError:
    return LoadError(f"{name} cannot be imported: {type(error).__name__}: {_words(error)}")


def _words(error: BaseException) -> str:
    """The message, and the line of the user's code that it came from, if it did."""
    lines = traceback.extract_tb(error.__traceback__)
    own = [f for f in lines if f.filename != __file__ and not f.filename.startswith("<frozen")]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{str(error).strip() or 'no message'}{where}"
