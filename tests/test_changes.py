"""A model that changes between calls: every answer is that of the model as it stands.

A state machine changes weights, buffers, attributes, modules, modes, dtype, hooks and frozen flags,
in whatever order, and asks for traces and diagonals now and then. What is called exact must equal
the dense Hessian; nothing of an earlier call may show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from agree import TOLERANCE
from dense import Dense
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor, nn

import saltflat as sf

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.3),
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "hardswish": nn.Hardswish,
    "identity": nn.Identity,
}


class Config:
    __slots__ = ("power",)

    def __init__(self) -> None:
        self.power = 1


class Changing(nn.Module):
    """Everything that decides linearity is somewhere else: modules, buffers, slots, the class."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 6)
        self.fc = nn.Linear(6, 3)
        self.act: nn.Module = nn.ReLU()
        self.gate = nn.Parameter(torch.zeros(6))
        self.register_buffer("mix", torch.zeros(()))
        self.config, self.list = Config(), [F.relu]

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        h = h + self.gate * torch.sin(h)
        h = torch.lerp(h, h * h.tanh(), self.mix) if bool(self.mix != 0) else h
        h = self.list[0](self.b(h)) * self.factor
        if self.config.power != 1:
            h = h**self.config.power
        result: Tensor = self.fc(h)
        return result


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Changing().double()
        self.x = torch.randn(10, 3, dtype=torch.float64)
        self.y = torch.arange(10) % 3
        self.handles: list[Any] = []
        self.output: Callable[[Tensor], Tensor] | None = None

    @rule(name=st.sampled_from(sorted(ACTIVATIONS)))
    def exchange_a_module(self, name: str) -> None:
        self.model.act = ACTIVATIONS[name]()

    @rule(function=st.sampled_from([F.relu, torch.tanh, torch.abs, F.softplus]))
    def change_a_plain_list(self, function: Callable[[Tensor], Tensor]) -> None:
        self.model.list[0] = function

    @rule(value=st.sampled_from([0.0, 0.7]))
    def open_a_gate(self, value: float) -> None:
        with torch.no_grad():
            self.model.gate.fill_(value)

    @rule(value=st.sampled_from([0.0, 0.5]))
    def write_a_buffer(self, value: float) -> None:
        self.model.mix.fill_(value)

    @rule(power=st.sampled_from([1, 2]))
    def write_a_slot(self, power: int) -> None:
        self.model.config.power = power

    @rule(shift=st.sampled_from([-30.0, -0.2, 0.1, 30.0]))
    def move_the_weights(self, shift: float) -> None:
        with torch.no_grad():
            self.model.a.bias.uniform_(-0.5, 0.5).add_(shift)

    @rule()
    def add_a_hook(self) -> None:
        hook = self.model.b.register_forward_hook(lambda m, args, out: out + out.sin())
        self.handles.append(hook)

    @precondition(lambda self: self.handles)
    @rule()
    def remove_a_hook(self) -> None:
        self.handles.pop().remove()

    @rule(name=st.sampled_from(["a.weight", "b.bias", "gate"]), flag=st.booleans())
    def freeze(self, name: str, flag: bool) -> None:
        self.model.get_parameter(name).requires_grad_(flag)

    @rule(mode=st.booleans())
    def change_the_mode(self, mode: bool) -> None:
        self.model.train(mode)

    @rule(dtype=st.sampled_from([torch.float32, torch.float64]))
    def change_the_dtype(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)
        self.x = self.x.to(dtype)

    @rule(bent=st.booleans())
    def choose_outputs(self, bent: bool) -> None:
        self.output = torch.tanh if bent else None

    @rule(measure=st.sampled_from([sf.trace, sf.diagonal]))
    def measure(self, measure: Callable[..., Any]) -> None:
        few = sf.Hutchinson(probes=4)
        found = measure(self.model, (self.x, self.y), output=self.output, estimator=few)
        model = copy.deepcopy(self.model).double()
        oracle = Dense(model, self.x.double(), self.y, output=self.output or (lambda o: o))
        for name, block in oracle.blocks(oracle.hessian).items():
            if found.details[name].exact:
                truth = block.trace() if measure is sf.trace else block.diagonal()
                value = torch.as_tensor(found[name], dtype=torch.float64).reshape(truth.shape)
                scale = float(block.abs().max()) + 1e-9
                assert float((value - truth).abs().max()) <= TOLERANCE[self.x.dtype] * scale * 10


TestChanges = Machine.TestCase
TestChanges.settings = settings(
    max_examples=15,
    stateful_step_count=14,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
