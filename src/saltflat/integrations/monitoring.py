"""What the callbacks of all frameworks share: a Monitor that is made when training starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from saltflat.checks import check_options
from saltflat.measure import chosen_measures
from saltflat.measures import Measure
from saltflat.training import CHEAP, Monitor, Record, monitor_options


class MonitorCallback:
    """Holds the arguments of a `Monitor` until there is a model."""

    def __init__(
        self,
        data: Any,
        measures: Iterable[str | Measure] = CHEAP,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        **options: Any,
    ) -> None:
        own = {"every_n_epochs": "every", "every_n_steps": "steps"}
        known = [*own, *(name for name in monitor_options() if name not in own.values())]
        check_options(type(self).__name__, options, known)
        when = {"every": every_n_epochs, "steps": every_n_steps}
        self._data = data
        self._options = {**options, **when, "measures": chosen_measures(measures)}
        self.monitor: Monitor | None = None

    @property
    def history(self) -> list[Record]:
        """The records of the monitor."""
        return [] if self.monitor is None else self.monitor.history

    def _start(self, model: nn.Module) -> None:
        self.monitor = Monitor(model, self._data, **self._options)

    def _stop(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
