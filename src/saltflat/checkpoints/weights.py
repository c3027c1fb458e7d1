"""Weights from a file into a model: names made to fit, and a list of all that does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from saltflat.checkpoints.files import tensors
from saltflat.errors import LoadError

# What wrappers put before names: DataParallel, Lightning modules and trainers, torch.compile.
PREFIXES = ("module.", "model.", "_orig_mod.", "net.", "network.")
# Where checkpoints of training programs keep the weights.
_FOLDERS = ("state_dict", "model_state_dict", "model", "net", "weights")
_SHOWN = 8

Names = Callable[[str], str]


def load_weights(
    model: nn.Module, source: Path | Mapping[str, Any], *, strict: bool = True
) -> list[str]:
    """Put the weights of a file, or a state dict, into the model; notes on what made them fit.

    `strict` insists that the file has all of the model's weights and no others.
    """
    if isinstance(source, Mapping):
        path, state = "The state dict", _state("The state dict", source)
    else:
        path, state = str(source), _state(str(source), tensors(source))
    wanted = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    state, notes = _renamed(state, wanted)
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    wrong = [n for n, value in state.items() if n in wanted and value.shape != wanted[n].shape]
    if wrong or (strict and (missing or unexpected)) or len(missing) == len(wanted):
        raise LoadError(_mismatch(path, model, state, wanted, missing, unexpected, wrong))
    notes += _left(missing, "not in the file, left as the model was made")
    notes += _left(unexpected, "in the file, not in the model")
    notes += _rounding(state, wanted)
    model.load_state_dict(state, strict=False)
    return notes


def _state(path: str, content: Any) -> dict[str, Tensor]:
    """The tensors by name: the file itself, or what it keeps under a usual name."""
    places = [content]
    if isinstance(content, Mapping):
        places = [content[name] for name in _FOLDERS if name in content] + places
    for place in places:
        if isinstance(place, Mapping) and place and _all_tensors(place):
            return dict(place)
    inside = ", ".join(map(repr, list(content)[:_SHOWN])) if isinstance(content, Mapping) else ""
    raise LoadError(
        f"{path} holds no weights by name. Got "
        f"{'the entries ' + inside if inside else type(content).__name__}; expected what "
        f"model.state_dict() returns, alone or under one of {', '.join(_FOLDERS)}."
    )


def _all_tensors(place: Mapping[Any, Any]) -> bool:
    return all(isinstance(k, str) and isinstance(v, Tensor) for k, v in place.items())


def _renamed(
    state: dict[str, Tensor], wanted: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """With prefixes taken off or put on as the model's names ask; nothing if that helps nothing."""

    def score(rename: Names) -> int:
        return sum(name in wanted for name in {rename(name) for name in state})

    best: Names = str
    for rename in (_bare, *(_under(prefix) for prefix in PREFIXES)):
        if score(rename) > score(best):
            best = rename
    renamed = {best(name): value for name, value in state.items()}
    if best is str or len(renamed) < len(state):
        return state, []
    changed = [name for name in state if best(name) != name]
    pair = f"{changed[0]} is {best(changed[0])}"
    return renamed, [f"{len(changed)} names of weights were made to fit, e.g. {pair}"]


def _bare(name: str) -> str:
    """Without what wrappers put before names, and what torch.compile puts between."""
    name = name.replace("._orig_mod.", ".")
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name


def _under(prefix: str) -> Names:
    return lambda name: prefix + _bare(name)


def _left(names: list[str], words: str) -> list[str]:
    return [f"weights {words} ({len(names)}): {_few(names)}"] if names else []


def _rounding(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Which weights lose digits on their way into the model."""
    pairs = Counter(
        (value.dtype, wanted[name].dtype)
        for name, value in state.items()
        if name in wanted and value.is_floating_point() and wanted[name].is_floating_point()
    )
    return [
        f"{count} weights are {a} in the file and were rounded to the model's {b}"
        for (a, b), count in pairs.items()
        if a.itemsize > b.itemsize
    ]


def _mismatch(
    path: str,
    model: nn.Module,
    state: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    missing: list[str],
    unexpected: list[str],
    wrong: list[str],
) -> str:
    """What does not fit, a line each."""
    lines = [f"{path} does not fit the model {type(model).__name__}."]
    lines += _section(
        "in another shape",
        (f"{n}: {tuple(state[n].shape)}, not {tuple(wanted[n].shape)}" for n in wrong),
    )
    lines += _section("missing", (_with_nearest(n, unexpected) for n in missing))
    lines += _section("not in the model", (_with_nearest(n, missing) for n in unexpected))
    if not wrong and len(missing) < len(wanted):
        lines.append(
            "With strict=False (--no-strict), what fits is loaded and the rest left as it is."
        )
    else:
        lines.append("Is it a checkpoint of this model, made with the same settings?")
    return "\n".join(lines)


def _section(title: str, entries: Iterable[str]) -> list[str]:
    shown = list(entries)
    if not shown:
        return []
    rest = [f"    and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return [f"  {title} ({len(shown)}):", *(f"    {entry}" for entry in shown[:_SHOWN]), *rest]


def _with_nearest(name: str, others: list[str]) -> str:
    close = get_close_matches(name, others, n=1)
    return f"{name} (nearest: {close[0]})" if close else name


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
