"""What saltflat returns: values that say how exact they are, and print themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil, inf, sqrt
from typing import Any, Generic, TypeVar, cast, final, overload

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from saltflat.checks import check_number
from saltflat.errors import optional
from saltflat.measurement import Named, unknown, with_error
from saltflat.printed import Printed, Told

Value = TypeVar("Value", float, Tensor)
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Detail(Generic[Value]):
    """One parameter's value and where it came from.

    `stderr` is 0.0 for an exact value, else the standard error of it (entry by entry for a
    diagonal), and `degrees` its degrees of freedom for Student's t, inf for an exact value. `rule`
    names what computed it and `reason` says why that and not another.

    Examples
    --------
    >>> import saltflat as sf
    >>> sf.Detail(2.0, exact=False, stderr=0.25, rule="probes", reason="tanh").exact
    False
    """

    value: Value
    exact: bool
    stderr: float | Tensor
    rule: str
    reason: str
    degrees: float = inf


@dataclass(frozen=True, slots=True)
class Certificate:
    """Which parameters the outputs are proved piecewise linear in, on `samples` samples.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    >>> trace = sf.trace(model, (torch.eye(2), torch.zeros(2, 1)), "mse")
    >>> bool(trace.certificate), trace.certificate.piecewise_linear["2.weight"]
    (False, True)
    """

    samples: int
    piecewise_linear: Mapping[str, bool]
    reasons: Mapping[str, str]

    def __bool__(self) -> bool:
        return all(self.piecewise_linear.values())


class Results(Printed, Mapping[str, Entry]):
    """A dataclass as a read-only mapping, of what its first field maps, that prints itself."""

    @property
    def _entries(self) -> Any:
        return getattr(self, fields(cast(Any, self))[0].name)

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise unknown(type(self).__name__, name, self._entries)
        return cast(Entry, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, repr=False)
class _Blocks(Results[Value]):
    """A read-only mapping from parameter names to values, in `named_parameters` order.

    `total` is the sum of all, `stderr` its standard error and `degrees` the degrees of freedom of
    that: 0.0 and inf if all is exact. Of a total on some of the samples (`samples="auto"`),
    `interval` holds the one on all of them with a probability of 95 %.
    """

    details: Mapping[str, Detail[Value]]
    total: float
    stderr: float
    curvature: str
    certificate: Certificate | None = None
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    degrees: float = inf
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        named = Named(self.details, f"{type(self).__name__}.details")
        object.__setattr__(self, "details", named)

    def __getitem__(self, name: str) -> Value:
        if name not in self.details:
            raise unknown(type(self).__name__, name, self.details)
        return self.details[name].value

    @property
    def exact(self) -> bool:
        """True iff every entry is exact."""
        return all(d.exact for d in self.details.values())

    def _columns(self, name: str) -> tuple[str, ...]:
        raise NotImplementedError

    def table(self, width: int) -> Table:
        table = Table(title=f"{type(self).__name__} of the {self.curvature}", title_justify="left")
        table.add_column("parameter", overflow="fold")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("rule")
        for name, detail in self.details.items():
            table.add_row(escape(name), *self._columns(name), detail.rule)
        exact = "exact" if self.exact else with_error(self.total, self.stderr, self.degrees)
        if self.interval is not None:
            exact = f"{self.interval[0]:.4g} to {self.interval[1]:.4g}"
        table.add_section()
        table.add_row("total", f"{self.total:.6g}", exact, "")
        captions = [*self.notes]
        if self.frozen:
            captions.append(f"frozen, not measured: {', '.join(self.frozen)}")
        table.caption = escape("\n".join(captions)) or None
        table.caption_justify = "left"
        return table


@final
class Trace(_Blocks[float]):
    """Traces of the diagonal blocks of the curvature, one a parameter.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> round(sf.trace(model, (x, y), "mse").total, 4)
    2.0
    """

    def _columns(self, name: str) -> tuple[str, ...]:
        detail = self.details[name]
        assert isinstance(detail.stderr, float)
        error = with_error(detail.value, detail.stderr, detail.degrees)
        shown = "exact" if detail.exact else error
        return f"{detail.value:.6g}", shown


@final
class Diagonal(_Blocks[Tensor]):
    """The diagonal of the curvature, a float64 tensor of each parameter's shape.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> sf.diagonal(model, (x, y), "mse").exact
    True
    """

    def _columns(self, name: str) -> tuple[str, ...]:
        detail = self.details[name]
        shown = "exact" if detail.exact else "estimated"
        return f"sum {float(detail.value.sum()):.6g}, max {float(detail.value.max()):.3g}", shown


@final
@dataclass(frozen=True, slots=True, repr=False)
class Eigenvalue(Told):
    """The largest eigenvalue; `residual` is ‖Hv − λv‖ for the unit vector `vector`.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> sf.max_eigenvalue(model, (x, y), "mse").residual < 1e-6
    True
    """

    value: float
    residual: float
    vector: Mapping[str, Tensor]
    curvature: str

    def __str__(self) -> str:
        return f"{self.value:.6g} (residual {self.residual:.1e})"


@final
@dataclass(frozen=True, repr=False)
class Eigenvalues(Printed, Sequence[Eigenvalue]):
    """The largest eigenvalues, from the largest on, each with its eigenvector and residual norm.

    `values`, `residuals` and `vectors` are those of all of them. `block` is the parameter whose
    block they belong to, or None for all measured parameters together.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> found = sf.eigenvalues(model, (x, y), "mse", k=2)
    >>> len(found), [round(value, 4) for value in found.values]
    (2, [1.0, 1.0])
    >>> found[0].vector["weight"].shape
    torch.Size([1, 2])
    """

    pairs: tuple[Eigenvalue, ...]
    curvature: str
    block: str | None = None

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(pair.value for pair in self.pairs)

    @property
    def residuals(self) -> tuple[float, ...]:
        return tuple(pair.residual for pair in self.pairs)

    @property
    def vectors(self) -> tuple[Mapping[str, Tensor], ...]:
        return tuple(pair.vector for pair in self.pairs)

    @overload
    def __getitem__(self, index: int) -> Eigenvalue: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Eigenvalue, ...]: ...
    def __getitem__(self, index: int | slice) -> Eigenvalue | tuple[Eigenvalue, ...]:
        return self.pairs[index]

    def __len__(self) -> int:
        return len(self.pairs)

    def table(self, width: int) -> Table:
        of = f"the block of {self.block}" if self.block else "the whole matrix"
        table = Table(title=f"Eigenvalues of the {self.curvature}, {of}", title_justify="left")
        for column in ("", "eigenvalue", "residual"):
            table.add_column(column, justify="right", no_wrap=True)
        for index, pair in enumerate(self.pairs):
            table.add_row(str(index), f"{pair.value:.6g}", f"{pair.residual:.1e}")
        return table


@final
@dataclass(frozen=True, repr=False)
class Density(Told):
    """How many of the eigenvalues lie where, smoothed by a Gaussian kernel; it integrates to one.

    `density` on `grid` is the mean over probes of Σ_j w_j N(t; θ_j, width²), and `error` its
    standard error, point by point. Nodes θ and weights w are kept of every probe, so that
    `smoothed` draws the same with another kernel.

    Attributes
    ----------
    nodes, weights : of every probe.
    width : the standard deviation of the kernel.
    size : of the matrix.
    steps : products with every probe.

    Examples
    --------
    >>> import torch, saltflat as sf
    >>> model, x, y = torch.nn.Linear(2, 1, bias=False), torch.eye(2), torch.zeros(2, 1)
    >>> density = sf.density(model, (x, y), "mse", width=0.1)
    >>> peak = density.grid[density.density.argmax()]
    >>> round(float(peak), 2), density.size
    (1.0, 2)
    """

    nodes: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    width: float
    size: int
    steps: int
    curvature: str
    block: str | None = None

    @cached_property
    def grid(self) -> Tensor:
        """Points from five widths below the lowest node to five above the highest."""
        low = float(min(nodes.min() for nodes in self.nodes)) - 5 * self.width
        high = float(max(nodes.max() for nodes in self.nodes)) + 5 * self.width
        count = min(max(1001, ceil(4 * (high - low) / self.width)), 100_001)
        return torch.linspace(low, high, count, dtype=torch.float64)

    @cached_property
    def _draws(self) -> Tensor:
        """The density that every probe sees."""
        scale = self.width * sqrt(2 * torch.pi)
        pairs = zip(self.nodes, self.weights, strict=True)
        far = [((self.grid[:, None] - nodes) / self.width, weights) for nodes, weights in pairs]
        return torch.stack([(z.square() / -2).exp() @ weights / scale for z, weights in far])

    @property
    def density(self) -> Tensor:
        """The density on `grid`."""
        return self._draws.mean(0)

    @property
    def error(self) -> Tensor:
        """The standard error of `density`, point by point."""
        return self._draws.std(0) / sqrt(len(self.nodes))

    def moment(self, order: int) -> tuple[float, float]:
        """The mean of the eigenvalues' powers, Tr H^order / size, and its standard error."""
        pairs = zip(self.nodes, self.weights, strict=True)
        draws = torch.stack([(weights * nodes**order).sum() for nodes, weights in pairs])
        return float(draws.mean()), float(draws.std()) / sqrt(len(draws))

    def smoothed(self, width: float) -> Density:
        """The same with another kernel; one much narrower than the default shows single nodes."""
        return replace(self, width=check_number("width", width, above=True))

    def plot(self, ax: Any = None) -> Any:
        """Draw the density with a band of two standard errors; the axes, for `.figure.savefig`."""
        if ax is None:
            figure = optional("matplotlib.figure", "A picture").Figure(layout="constrained")
            ax = figure.subplots()
        x, y, error = (t.numpy() for t in (self.grid, self.density, self.error))
        floor = 1e-3 / (self.size * self.width)  # below what one eigenvalue adds
        ax.fill_between(
            x, (y - 2 * error).clip(floor), (y + 2 * error).clip(floor), color="#88CCEE", lw=0
        )
        ax.plot(x, y.clip(floor), color="#332288", lw=1.2)
        ax.set_yscale("log")
        ax.set_xlabel(f"eigenvalue of the {self.curvature}")
        ax.set_ylabel(f"density (kernel width {self.width:.2g})")
        return ax

    def __str__(self) -> str:
        low, high = (float(self.grid[end]) - by * self.width for end, by in ((0, -5), (-1, 5)))
        mean, error = self.moment(1)
        of = f" of {self.block}" if self.block else ""
        return (
            f"Spectral density of the {self.curvature}{of}, {self.size} eigenvalues: "
            f"{len(self.nodes)} probes of {self.steps} steps, kernel width {self.width:.3g}; "
            f"nodes from {low:.4g} to {high:.4g}, mean {mean:.4g} ± {error:.2g}"
        )
