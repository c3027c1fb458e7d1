"""What saltflat returns: values that say how exact they are, and print themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Generic, TypeVar, cast, final

from rich.table import Table
from torch import Tensor

from saltflat.printing import plain_text

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


class Results(Mapping[str, Entry]):
    """A dataclass as a read-only mapping, of what its first field maps, that prints itself."""

    @property
    def _entries(self) -> Any:
        return getattr(self, fields(cast(Any, self))[0].name)

    def __getitem__(self, name: str) -> Entry:
        return cast(Entry, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _width(self) -> int:
        return 100

    def __str__(self) -> str:
        return plain_text(cast(Any, self), self._width())

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class _Blocks(Results[Value]):
    """A read-only mapping from parameter names to values, in `named_parameters` order.

    `total` is the sum of all, `stderr` its standard error and `degrees` the degrees of freedom of
    that: 0.0 and inf if all is exact.
    """

    details: Mapping[str, Detail[Value]]
    total: float
    stderr: float
    curvature: str
    certificate: Certificate | None = None
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    degrees: float = inf

    def __getitem__(self, name: str) -> Value:
        return self.details[name].value

    @property
    def exact(self) -> bool:
        """True iff every entry is exact."""
        return all(d.exact for d in self.details.values())

    def _columns(self, name: str) -> tuple[str, ...]:
        raise NotImplementedError

    def __rich__(self) -> Table:
        table = Table(title=f"{type(self).__name__} of the {self.curvature}", title_justify="left")
        for column, justify in (("parameter", "left"), ("value", "right"), ("", "left")):
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("rule")
        for name, detail in self.details.items():
            table.add_row(name, *self._columns(name), detail.rule)
        exact = "exact" if self.exact else f"± {self.stderr:.2g}"
        table.add_section()
        table.add_row("total", f"{self.total:.6g}", exact, "")
        captions = [*self.notes]
        if self.frozen:
            captions.append(f"frozen, not measured: {', '.join(self.frozen)}")
        table.caption = "\n".join(captions) or None
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
        shown = "exact" if detail.exact else f"± {detail.stderr:.2g}"
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
@dataclass(frozen=True, slots=True)
class Eigenvalue:
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
