"""Checks of what a user sets."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from saltflat.checks import check_choice, check_integer, check_number, check_seed
from saltflat.errors import InvalidType, InvalidValue
from saltflat.measures import BNSharpness, DeltaSharpness, SamSharpness


@pytest.mark.parametrize("value", [0, 1, 2.5, np.float32(2.5), np.int64(3)])
def test_numbers(value: Any) -> None:
    assert check_number("x", value) == float(value)
    assert type(check_number("x", value)) is float


@pytest.mark.parametrize("value", [-1, nan, inf, "1", None, True])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"x must be a finite number at least 0\. Got"):
        check_number("x", value)


def test_a_number_above() -> None:
    with pytest.raises(InvalidValue, match=r"x must be a finite number above 2\. Got 2"):
        check_number("x", 2, least=2, above=True)


@pytest.mark.parametrize("value", [1, 7, np.int32(3)])
def test_integers(value: Any) -> None:
    assert check_integer("x", value) == value
    assert type(check_integer("x", value)) is int


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_what_is_no_integer(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"x must be an integer of at least 1\. Got"):
        check_integer("x", value)


def test_choices_and_seeds() -> None:
    check_choice("x", "a", ("a", "b"))
    with pytest.raises(InvalidValue, match=r"x must be 'a' or 'b'. Got 'c'."):
        check_choice("x", "c", ("a", "b"))
    assert check_seed(-3) == -3
    for seed in (1.0, True, "1"):
        with pytest.raises(InvalidType, match="seed must be an integer"):
            check_seed(seed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamSharpness(steps=1.5), "steps must be an integer"),
        (lambda: SamSharpness(restarts=-1), "restarts must be an integer of at least 0"),
        (lambda: DeltaSharpness(delta=inf), "delta must be a finite number above 0"),
        (lambda: BNSharpness(p=0.5), "p must be a finite number at least 1"),
        (lambda: BNSharpness(nodes=0), "nodes must be an integer of at least 1"),
    ],
)
def test_measures_check_their_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make()
