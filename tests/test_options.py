"""An option that is not understood is an error at once, and the error names the nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import saltflat as sf

X, Y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])


def lightning_callback(**options: Any) -> Any:
    pytest.importorskip("lightning")
    from saltflat.integrations import SharpnessCallback

    return SharpnessCallback((X, Y), **options)


def transformers_callback(**options: Any) -> Any:
    pytest.importorskip("transformers")
    from saltflat.integrations import SharpnessTrainerCallback

    return SharpnessTrainerCallback((X, Y), **options)


def sam(**options: Any) -> Any:
    return sf.SAM(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), **options)


def balance(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    return sf.symmetries(model, X).balance(model, (X, Y), **options)


ENTRIES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "Monitor": (lambda **o: sf.Monitor(nn.Linear(2, 2), (X, Y), **o), "sed", "seed"),
    "compare": (lambda **o: sf.compare({"a": nn.Linear(2, 2)}, (X, Y), **o), "mesures", "measures"),
    "measure_many": (
        lambda **o: sf.measure_many(["a.pt"], (X, Y), model=nn.Linear(2, 2), **o),
        "tolerence",
        "tolerance",
    ),
    "SharpnessCallback": (lightning_callback, "every_steps", "every_n_steps"),
    "SharpnessTrainerCallback": (transformers_callback, "bugdet", "budget"),
    "SAM": (sam, "adaptiv", "adaptive"),
    "balance": (balance, "curvatur", "curvature"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_error_names_the_nearest(name: str) -> None:
    call, wrong, right = ENTRIES[name]
    with pytest.raises(
        sf.InvalidType, match=f"{name} has no option '{wrong}'. Nearest is '{right}'"
    ):
        call(**{wrong: 1})


@pytest.mark.parametrize(
    "call",
    [
        lambda **o: sf.audit(nn.Linear(2, 2), (X, Y), **o),
        lambda **o: sf.measure(nn.Linear(2, 2), (X, Y), **o),
        lambda **o: sf.symmetries(nn.Linear(2, 2), X, **o),
        lambda **o: sf.trace(nn.Linear(2, 2), (X, Y), **o),
        lambda **o: sf.FAM(nn.Linear(2, 2), "", **o),
        lambda **o: sf.SharpnessPenalty(nn.Linear(2, 2), (X, Y), **o),
        lambda **o: sf.EntropySGD(nn.Linear(2, 2).parameters(), lr=0.1, **o),
    ],
)
def test_what_is_spelt_out_is_checked_by_python(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="sed"):
        call(sed=1)


@pytest.mark.parametrize("call", [lightning_callback, transformers_callback])
def test_callbacks_check_their_measures_when_they_are_made(call: Callable[..., Any]) -> None:
    with pytest.raises(sf.InvalidValue, match="Nearest is 'hessian_trace'"):
        call(measures=["hessian_trac"])
