"""The exact trace of a small network beside a Hutchinson estimate, and the time of each."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import saltflat as sf
from saltflat.demo import accuracy, samples, sgd, train

Result = TypeVar("Result")
PROBES = 100


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def table(exact: sf.Trace, estimate: sf.Trace) -> Table:
    """Both traces side by side; the last column is their distance in standard errors."""
    view = Table(title="Trace of the Hessian, block by block", title_justify="left")
    for column in ("parameter", "exact", f"Hutchinson, {PROBES} probes", "off by"):
        view.add_column(column, justify="left" if column == "parameter" else "right")
    for name, d in estimate.details.items():
        view.add_row(name, *_cells(exact[name], d.value, float(d.stderr)))
    view.add_section()
    view.add_row("total", *_cells(exact.total, estimate.total, estimate.stderr))
    return view


def _cells(exact: float, value: float, error: float) -> tuple[str, str, str]:
    off = (value - exact) / error
    return f"{exact:.6g}", f"{value:.4g} ± {error:.2g}", f"{off:+.1f} s.e."


def run(console: Console, model: nn.Module) -> None:
    """The network is trained first."""
    train_x, train_y, test_x, test_y = samples()
    console.print(f"Training a ReLU network 64-64-32-10 on {len(train_x)} handwritten digits …")
    train(model, train_x, train_y, sgd(model), epochs=40)
    right = accuracy(model, test_x, test_y)
    console.print(f"Test accuracy {right:.1%} on {len(test_x)} held-out digits.\n")

    data = (train_x, train_y)
    parameters = list(model.parameters())

    def gradient() -> None:
        torch.autograd.grad(F.cross_entropy(model(train_x), train_y), parameters)

    gradient()
    _, one = timed(gradient)
    exact, exact_time = timed(lambda: sf.trace(model, data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this is an estimate; so does the table
        estimate, estimate_time = timed(
            lambda: sf.trace(model, data, certify="none", estimator=sf.Hutchinson(PROBES))
        )
    console.print(table(exact, estimate))
    assert exact.exact
    console.print(
        "\nThe network is piecewise linear in every parameter, so the first column is exact.\n"
        f"Time: exact {exact_time * 1e3:.1f} ms, the check of that included, "
        f"{PROBES} probes {estimate_time * 1e3:.0f} ms, one gradient {one * 1e3:.1f} ms.\n"
    )
