"""What a page shows of measurements, spectra, diagonals and the history of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log10, nan
from typing import Any, Protocol

import torch
from torch import Tensor

from saltflat.measurement import Measurement
from saltflat.report.html import Cell, Figure, Section, Table, label, number, ticks
from saltflat.report.provenance import Provenance
from saltflat.report.standing import Standing
from saltflat.report.words import absent, explanation, gradients, invariance, settings
from saltflat.result import Density, Diagonal

# The most columns of a heat map, points of a curve, and parameters of a list of intervals.
_MOST_NEURONS = 256
_MOST_POINTS = 2000
_MOST_PARAMETERS = 40
# Powers of ten that the colours of a heat map tell apart.
_DECADES = 6


class Moment(Protocol):
    """One record of a monitor."""

    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def values(self) -> Mapping[str, float]: ...
    @property
    def stderr(self) -> Mapping[str, float]: ...
    @property
    def skipped(self) -> str | None: ...


class Monitored(Protocol):
    """A monitor, or the callback of a framework that holds one."""

    @property
    def history(self) -> Sequence[Moment]: ...


def further(parts: Mapping[str, Any]) -> list[Section]:
    """What is shown beside the measures of a model, in this order."""
    found: list[Section] = []
    if "comparison" in parts:
        found += parts["comparison"].sections()
    if "diagonal" in parts:
        found.append(distribution(parts["diagonal"]))
    if "density" in parts:
        found.append(spectrum(parts["density"]))
    if "audit" in parts:
        found += parts["audit"].sections()
    landscapes = parts.get("landscape", ())
    for each in landscapes if isinstance(landscapes, list | tuple) else [landscapes]:
        found += each.sections()
    if "history" in parts:
        records = parts["history"]
        found.append(training(getattr(records, "history", records)))
    return found


# The model, the data and the measures.


def summary(source: Provenance, standing: Standing | None, notes: Sequence[str]) -> Section:
    """What was measured on what, and whether that is a minimum."""
    facts = {
        "model": f"{source.model}, {source.parameters:,} parameters",
        "data": f"{source.used}, batch size {source.batch_size:,}"
        + (f", over {source.ranks} ranks" if source.ranks > 1 else ""),
        "loss": source.loss,
        "curvature": _MATRICES[source.curvature],
        **({} if standing is None else _stands(standing)),
        "computed in": f"{source.dtype} on {source.device}",
        "measured": source.created.replace("T", " ").removesuffix("+00:00") + " UTC",
    }
    if source.frozen:
        facts["frozen, not measured"] = ", ".join(source.frozen)
    text = "" if standing is None else f"{standing.verdict[0].upper()}{standing.verdict[1:]}."
    return Section("Summary", text, facts, notes=notes)


_MATRICES = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix"}


def _stands(standing: Standing) -> dict[str, str]:
    """Where a model stands, as facts."""
    error = "" if standing.sampling is None else f" ± {standing.sampling:.2g} for the population"
    facts = {"loss at the model": f"{standing.loss:.4g}{error}"}
    if standing.accuracy is not None:
        facts["accuracy on these data"] = f"{standing.accuracy:.2%}"
    if standing.chance is not None:
        facts["loss of constant outputs"] = f"{standing.chance:.4g}"
    return facts | {"length of the gradient": f"{standing.gradient_norm:.3g}"}


def measures(
    measurements: Mapping[str, Measurement],
    skipped: Mapping[str, str],
    left_out: Mapping[str, float],
    spent: Mapping[str, float],
) -> Section:
    """The table of measures."""
    rows = [
        [
            Cell(m.name, detail=explanation(m.name)),
            number(m.value),
            Cell(m.certainty, m.stderr),
            Cell(m.sampled, "" if m.sampling is None else m.sampling / (abs(m.value) or 1.0)),
            Cell(invariance(m.invariant_to)),
            Cell(gradients(spent.get(m.name)), spent.get(m.name, 0.0)),
            Cell(settings(m)),
        ]
        for m in measurements.values()
    ]
    for name, reason in skipped.items():
        rows.append(_without(name, absent(reason), Cell("")))
    for name, price in left_out.items():
        rows.append(_without(name, "not computed", Cell(f"about {price:.0f}", price)))
    head = ["measure", "value", "certainty", "sampling", "invariant to", "cost, gradients", "with"]
    text = "Every value says how certain it is and which rescalings of the weights leave it alone."
    if any(m.sampling is not None for m in measurements.values()):
        text += " Sampling is the standard error for the population that the samples come from."
    else:
        head.pop(_SAMPLING)
        rows = [[*row[:_SAMPLING], *row[_SAMPLING + 1 :]] for row in rows]
    if spent:
        shared = gradients(spent["curvature"])
        text += f" In all it took {sum(spent.values()):.0f} gradients"
        text += f", {shared} of them for what the measures share." if shared else "."
    notes = [f"{m.name}: {note}" for m in measurements.values() for note in m.notes]
    notes += [f"{name} {absent(reason)}: {reason}" for name, reason in skipped.items()]
    numeric = frozenset(k for k, name in enumerate(head) if name in _NUMBERS)
    return Section("Measures", text, table=Table(head, rows, numeric), notes=notes)


_SAMPLING = 3  # the column
_NUMBERS = ("value", "sampling", "cost, gradients")


def _without(name: str, words: str, cost: Cell) -> list[Cell]:
    """The row of a measure that has no value."""
    empty = Cell("")
    return [
        Cell(name, detail=explanation(name)),
        number(None),
        Cell(words),
        empty,
        empty,
        cost,
        empty,
    ]


def layers(measurements: Mapping[str, Measurement]) -> list[Section]:
    """Bars of every measure that has values by layer."""
    shown = [m for m in measurements.values() if len(m.by_layer) > 1]
    if not shown:
        return []
    text = "From the first layer, on top, to the last. Every measure has a scale of its own."
    return [Section("By layer", text, figures=[_bars(m.name, m.by_layer) for m in shown])]


def _bars(name: str, values: Mapping[str, float]) -> Figure:
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": list(values.values()),
        "y": [label(layer) for layer in values],
        "marker": {"color": "@0"},
        "hovertemplate": "%{y}: %{x:.5g}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": label(name)}, "nticks": 5},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
        "bargap": 0.35,
    }
    columns: dict[str, Any] = {"layer": list(values), name: list(values.values())}
    height = min(90 + 24 * len(values), 620)
    return Figure(name, "", [bars], layout, columns, height=height, small=True)


def neurons(measurements: Mapping[str, Measurement]) -> list[Section]:
    """A heat map of every measure that has values by neuron."""
    shown = [m for m in measurements.values() if m.by_neuron]
    if not shown:
        return []
    text = "One row a layer, one cell a unit; darker is flatter, and an empty cell is zero."
    return [Section("By neuron", text, figures=[_heat_map(m) for m in shown])]


def _heat_map(m: Measurement) -> Figure:
    """Logarithms of the values, where all are positive; of wide layers the largest of blocks."""
    width = max(len(values) for values in m.by_neuron.values())
    block = ceil(width / _MOST_NEURONS)
    rows = {name: _blocks(values.double(), block) for name, values in m.by_neuron.items()}
    everything = torch.cat(list(m.by_neuron.values())).double()
    logarithmic = bool((everything >= 0).all() and (everything > 0).any())
    heights = [(row.log10() if logarithmic else row).tolist() for row in rows.values()]
    longest = max(map(len, heights))
    heat = {
        "type": "heatmap",
        "z": [row + [nan] * (longest - len(row)) for row in heights],
        "x": [i * block for i in range(longest)],
        "y": [label(name) for name in rows],
        "text": [[f"{v:.5g}" for v in row.tolist()] for row in rows.values()],
        "colorscale": "Cividis",
        "ygap": 2,
        "hoverongaps": False,
        "colorbar": {
            "title": {"text": "log₁₀" if logarithmic else "value", "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
        "hovertemplate": "%{y}, unit %{x}: %{text}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": m.neurons or "unit"}, "showgrid": False},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
    }
    pairs = [(name, i, v) for name, t in m.by_neuron.items() for i, v in enumerate(t.tolist())]
    names, units, values = zip(*pairs, strict=True)
    columns = {"layer": names, "unit": units, m.name: values}
    caption = f"Each cell is the largest of {block} neighbouring units. " if block > 1 else ""
    if logarithmic:  # a few units that hardly matter would take all the colours
        top = log10(float(everything.max()))
        heat |= {"zmax": top, "zmin": max(top - _DECADES, min(h for row in heights for h in row))}
        caption += f"Colours end at most {_DECADES} decades below the largest value."
    height = min(100 + 34 * len(rows), 640)
    return Figure(m.name, caption, [heat], layout, columns, height=height)


def _blocks(values: Tensor, size: int) -> Tensor:
    """The largest of every block of so many."""
    return torch.stack([part.max() for part in values.flatten().split(size)])


# Curvature.


def spectrum(density: Density) -> Section:
    """The spectral density with its band."""
    of = f"block of {density.block}" if density.block else "all parameters"
    mean, error = density.moment(1)
    facts = {
        "matrix": f"{_MATRICES[density.curvature]}, {of}",
        "eigenvalues": f"{density.size:,}",
        "their mean": f"{mean:.4g} ± {error:.2g}",
        "probes": f"{len(density.nodes)} of {density.steps} steps",
        "kernel width": f"{density.width:.3g}",
    }
    return Section("Spectral density", "", facts, figures=[_spectrum(density)])


def _spectrum(density: Density) -> Figure:
    grid, values, error = density.grid, density.density, density.error
    if len(grid) > _MOST_POINTS:  # the highest point of every stretch, so that no peak is lost
        size = ceil(len(grid) / _MOST_POINTS)
        starts = range(0, len(grid), size)
        kept = torch.tensor([s + int(values[s : s + size].argmax()) for s in starts])
        grid, values, error = grid[kept], values[kept], error[kept]
    floor = 1e-3 / (density.size * density.width)  # below what one eigenvalue adds
    x = grid.tolist()
    low, high = ((values + k * error).clamp_min(floor).tolist() for k in (-2, 2))
    band = {
        "type": "scatter",
        "x": x + x[::-1],
        "y": high + low[::-1],
        "fill": "toself",
        "line": {"width": 0},
        "mode": "lines",
        "fillcolor": "rgba(86,180,233,0.35)",
        "hoverinfo": "skip",
    }
    curve = {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": values.clamp_min(floor).tolist(),
        "line": {"color": "@0", "width": 1.8},
        "hovertemplate": "at %{x:.4g}: density %{y:.3g}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": f"eigenvalue of the {_MATRICES[density.curvature]}"}},
        "yaxis": {"title": {"text": "density"}, "type": "log", "exponentformat": "power"},
    }
    columns = {"eigenvalue": x, "density": values.tolist(), "standard error": error.tolist()}
    caption = "The band is two standard errors wide to either side."
    return Figure("Density of the eigenvalues", caption, [band, curve], layout, columns)


def distribution(diagonal: Diagonal) -> Section:
    """The sizes of the diagonal's entries: of all, and of every parameter."""
    everything = torch.cat([values.flatten().double() for values in diagonal.values()])
    positive = everything[everything > 0]
    signs = {
        "entries": f"{len(everything):,}",
        "positive": f"{len(positive):,}",
        "zero": f"{int((everything == 0).sum()):,}",
        "negative": f"{int((everything < 0).sum()):,}",
        "sum": f"{float(everything.sum()):.6g}",
    }
    figures = []
    if len(positive):
        figures = [_histogram(positive), *_intervals(diagonal)]
    of = _MATRICES[diagonal.curvature]
    text = f"How the entries of the diagonal of the {of} are spread over sizes."
    title = "Distribution of the diagonal"
    return Section(title, text, signs, figures=figures, notes=diagonal.notes)


def _sizes(title: str) -> dict[str, Any]:
    """A logarithmic axis."""
    return {"title": {"text": title}, "type": "log", "exponentformat": "power", "nticks": 8}


def _histogram(positive: Tensor) -> Figure:
    logs = positive.log10()
    low, high = float(logs.min()), float(logs.max())
    edges = torch.linspace(low, max(high, low + 1e-9), 61, dtype=torch.float64)
    counts = torch.histogram(logs.cpu(), edges).hist.long().tolist()
    centers = (10 ** ((edges[1:] + edges[:-1]) / 2)).tolist()
    bars = {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hvh", "color": "@0", "width": 1.5},
        "fill": "tozeroy",
        "fillcolor": "rgba(86,180,233,0.25)",
        "x": centers,
        "y": counts,
        "hovertemplate": "near %{x:.2g}: %{y} entries<extra></extra>",
    }
    layout = {
        "xaxis": _sizes("entry of the diagonal"),
        "yaxis": {"title": {"text": "entries"}, "rangemode": "tozero"},
    }
    columns = {"entry, middle of the bin": centers, "entries": counts}
    caption = "Positive entries in 60 bins of equal ratio."
    return Figure("Positive entries of all parameters", caption, [bars], layout, columns)


def _intervals(diagonal: Diagonal) -> list[Figure]:
    """The 5th, 25th, 50th, 75th and 95th percentile of every parameter's positive entries."""
    shown = {n: v.double()[v > 0].cpu() for n, v in diagonal.items() if bool((v > 0).any())}
    largest = sorted(shown, key=lambda n: -shown[n].numel())[:_MOST_PARAMETERS]
    names = [name for name in shown if name in largest]
    quantiles = [_percentiles(shown[name]) for name in names]
    places = [label(name) for name in names]
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [x for q in quantiles for x in (q[low], q[high], nan)],
            "y": [y for place in places for y in (place, place, place)],
            "line": {"color": "@0", "width": width},
            "hoverinfo": "skip",
        }
        for low, high, width in ((0, 4, 2), (1, 3, 7))
    ]
    middle = {
        "type": "scatter",
        "mode": "markers",
        "x": [q[2] for q in quantiles],
        "y": places,
        "marker": {"color": "@1", "size": 9},
        "hovertemplate": "%{y}: median %{x:.3g}<extra></extra>",
    }
    layout = {
        "xaxis": _sizes("positive entries"),
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
    }
    columns: dict[str, Sequence[Any]] = {"parameter": names}
    for k, percent in enumerate((5, 25, 50, 75, 95)):
        columns[f"{percent} %"] = [q[k] for q in quantiles]
    caption = "Median, the middle half, and the middle nine tenths."
    if len(names) < len(shown):
        caption += f" The {len(names)} largest of {len(shown)} parameters."
    height = min(90 + 24 * len(names), 900)
    return [Figure("By parameter", caption, [*lines, middle], layout, columns, height=height)]


def _percentiles(values: Tensor) -> list[float]:
    """By sorting: torch.quantile refuses large tensors."""
    ordered = values.sort().values
    last = len(ordered) - 1
    return [float(ordered[round(share * last)]) for share in (0.05, 0.25, 0.5, 0.75, 0.95)]


# Training.


def training(records: Sequence[Moment]) -> Section:
    """Curves of every measure that a monitor recorded."""
    stepwise = any(record.step for record in records)
    names = list(dict.fromkeys(name for record in records for name in record.values))
    figures = [_course(name, records, stepwise) for name in names]
    left = sum(record.skipped is not None for record in records)
    notes = [f"{left} of {len(records)} measurements were skipped to keep the budget"]
    text = f"{len(records)} records of a monitor; bars are two standard errors to either side."
    return Section("Training", text, figures=figures, notes=notes if left else ())


def _course(name: str, records: Sequence[Moment], stepwise: bool) -> Figure:
    seen = [record for record in records if name in record.values]
    x = [record.step if stepwise else record.epoch for record in seen]
    y = [record.values[name] for record in seen]
    errors = [record.stderr.get(name, 0.0) for record in seen]
    unit = "step" if stepwise else "epoch"
    curve: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": x,
        "y": y,
        "line": {"color": "@0", "width": 2},
        "marker": {"color": "@0", "size": 5},
        "hovertemplate": f"{unit} %{{x}}: %{{y:.5g}}<extra></extra>",
    }
    if any(errors):
        curve["error_y"] = {"array": [2 * e for e in errors], "color": "@0", "thickness": 1}
    positive = all(value > 0 for value in y) and max(y) > 20 * min(y)
    layout = {
        "xaxis": {"title": {"text": unit}},
        "yaxis": {
            "title": {"text": label(name)},
            **({"type": "log", **ticks(y)} if positive else {}),
        },
    }
    columns: dict[str, Any] = {unit: x, name: y, "standard error": errors}
    return Figure(name, "", [curve], layout, columns, height=300, small=True)


# Several models.


def comparison(
    reports: Mapping[str, Mapping[str, Measurement]],
    verdicts: Mapping[str, str],
    standings: Mapping[str, Standing | None],
    notes: Sequence[str],
) -> Section:
    """Several models side by side, and each relative to the first; `verdicts` by measure."""
    rows = []
    for name, verdict in verdicts.items():
        found = [report.get(name) for report in reports.values()]
        one = next(m for m in found if m is not None)
        cells = [
            number(None) if m is None else Cell(f"{m.value:.5g}", m.value, detail=m.certainty)
            for m in found
        ]
        words = Cell(verdict), Cell(invariance(one.invariant_to))
        rows.append([Cell(name, detail=explanation(name)), *cells, *words])
    head = ["measure", *reports, "verdict", "invariant to"]
    table = Table(head, rows, frozenset(range(1, len(reports) + 1)))
    facts = {
        name: f"loss {s.loss:.4g}"
        + ("" if s.accuracy is None else f", accuracy {100 * s.accuracy:.4g} %")
        + f"; a minimum? {s.word}"
        for name, s in standings.items()
        if s is not None
    }
    figures = [_relative(reports, list(verdicts))] if len(reports) > 1 else []
    return Section("Comparison", "", facts, table=table, figures=figures, notes=notes)


def _relative(reports: Mapping[str, Mapping[str, Measurement]], names: Sequence[str]) -> Figure:
    first, *_ = reports
    known = [n for n in names if n in reports[first] and reports[first][n].value > 0]
    traces: list[dict[str, Any]] = []
    columns: dict[str, Sequence[Any]] = {"measure": known}
    for index, (model, report) in enumerate(reports.items()):
        ratios = [report[n].value / reports[first][n].value if n in report else nan for n in known]
        columns[f"{model} / {first}"] = ratios
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(model),
                "x": ratios,
                "y": [label(n) for n in known],
                "marker": {"size": 10, "color": f"@{index}", "symbol": index},
                "hovertemplate": "%{fullData.name}, %{y}: ×%{x:.4g}<extra></extra>",
            }
        )
    layout = {
        "xaxis": {
            "title": {"text": f"value, relative to {label(first)}"},
            "type": "log",
            **ticks([x for trace in traces for x in trace["x"]]),
        },
        "yaxis": {"autorange": "reversed", "type": "category"},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    height = 120 + 30 * len(known)
    return Figure(f"Relative to {first}", "", traces, layout, columns, height=height)
