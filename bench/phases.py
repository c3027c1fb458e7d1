"""Where the time of an exact trace goes: forward, directions' backward, contraction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

_FORWARD = "bench::forward"
_BACKWARD = "autograd::engine::evaluate_function"


class Marked(nn.Module):
    """The model with its forward pass marked for the profiler."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with record_function(_FORWARD):
            result: Tensor = self.model(x)
            return result


def split(run: Callable[[], object], device: str) -> tuple[dict[str, float], str]:
    """Milliseconds of every phase, and the profiler's table of the dearest operations.

    An operation belongs to the forward pass if the marked model called it, to the backward pass if
    autograd's engine did, else to the contraction. On CUDA these are the kernels' times, on a CPU
    the operations' own.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    times = {"forward": 0.0, "directions' backward": 0.0, "contraction": 0.0}
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CPU:
            times[_phase(event)] += getattr(event, own) / 1e3
    return times, profiler.key_averages().table(sort_by=own, row_limit=25)


def _phase(event: FunctionEvent) -> str:
    caller: FunctionEvent | None = event
    while caller is not None:
        if caller.name == _FORWARD:
            return "forward"
        if caller.name.startswith(_BACKWARD):
            return "directions' backward"
        caller = caller.cpu_parent
    return "contraction"
