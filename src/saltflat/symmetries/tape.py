"""What a network computes, as a list of operations on numbered tensors."""

from __future__ import annotations

import linecache
import operator
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.graph_module import _loader
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from saltflat.errors import ModelError
from saltflat.session import end_checkpoints

_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_BATCH_NORM_OF_STATISTICS = torch.ops.aten._native_batch_norm_legit_no_training.default


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor on the tape."""

    index: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What is known of a tensor: its shape, and its value where it is part of the model.

    `parameter` is its name in `named_parameters`, `buffer` its name in `named_buffers`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None = None
    parameter: str | None = None
    buffer: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: Refs stand where tensors were, `outputs` is a Ref, a list of them, or None."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any


@final
@dataclass
class Tape:
    """Slots, the calls between them in order, and the tensors that are the answer.

    `recorded` is True where only the branches that the example takes were seen.
    """

    slots: list[Slot] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    answers: list[Ref] = field(default_factory=list)
    recorded: bool = False

    def add(self, slot: Slot) -> Ref:
        self.slots.append(slot)
        return Ref(len(self.slots) - 1)

    def live(self) -> list[Call]:
        """The calls that the answers depend on."""
        wanted = {r.index for r in self.answers}
        calls = []
        for call in reversed(self.calls):
            outputs = {r.index for r in refs(call.outputs)}
            # What hands a value to Python (`.item()`) has no outputs, and decides what comes next.
            if wanted & outputs or (not outputs and "_assert" not in str(call.op)):
                calls.append(call)
                wanted |= {r.index for r in refs((call.args, call.kwargs))}
        return calls[::-1]


def refs(tree: Any) -> list[Ref]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Ref)]


class Answer(nn.Module):
    """The model followed by the choice of its outputs."""

    def __init__(self, model: nn.Module, output: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        output = self._output(self.model(*args, **kwargs))
        answers = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if not answers:
            raise ModelError("The model's outputs hold no tensor; pass output= to choose others.")
        return answers


def record(
    answer: Answer, args: tuple[Any, ...], kwargs: dict[str, Any], known: Container[Any] = ()
) -> Tape:
    """The tape of one forward pass: exported, or recorded where export cannot follow.

    Where all operations are among the `known` ones, what was exported is run once and recorded:
    that takes operations apart as the exporter would, in a tenth of the time.

    Export fails where Python looks at values (`if x.sum() > 0`). The recording follows the branch
    that the example takes; an operation that hands a value to Python pins what it looked at.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _swept_up():
                # A context of its own, as the exporter leaves variables behind in the one it has.
                return copy_context().run(_followed, answer, args, kwargs, known)
        except Exception as error:
            # Whatever the reason was: if the model runs at all, the recording follows it.
            end_checkpoints(error)
            tape = _recorded(answer, _Names(answer.model), args, kwargs)
            tape.recorded = True
            return tape


def _followed(
    answer: Answer, args: tuple[Any, ...], kwargs: dict[str, Any], known: Container[Any]
) -> Tape:
    """The tape as the exporter has it."""
    # Of a view the exporter would follow the base too, and never let go of it (torch 2.13).
    args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    # Before it gives up the exporter prints what it has got so far.
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        program = torch.export.export(answer, args, kwargs, strict=False)
        tape = _known(program, answer, args, kwargs, known)
        return tape or _exported(program.run_decompositions(), answer)


@contextmanager
def _swept_up() -> Iterator[None]:
    """Forget the sources of the code that the exporter generates, which are kept for tracebacks."""
    sources = _loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for name in sources.keys() - before:
            del sources[name]
            linecache.cache.pop(name, None)


def _known(
    program: Any, answer: Answer, args: Any, kwargs: Any, known: Container[Any]
) -> Tape | None:
    """What a program of nothing but known operations does on the example."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    for leaf in tree_leaves([node.meta.get("val") for node in calls]):
        sizes = leaf.shape if isinstance(leaf, Tensor) else [leaf]
        if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
            raise ModelError("Sizes depend on the data.")
    # Other targets are branches and loops that the data decide.
    plain = (isinstance(n.target, torch._ops.OpOverload | type(operator.getitem)) for n in calls)
    if not all(plain):
        return None
    tape = _recorded(program.module(), _Names(answer.model), args, kwargs)
    return tape if all(call.op in known for call in tape.live()) else None


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """How far the exporter takes operations apart."""
    return dict(torch.export.default_decompositions().items())


@final
class _Names:
    """Names of parameters and buffers by identity: a tied weight has one, whatever it is called."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {id(p): n for n, p in model.named_parameters()}
        self.buffers = {id(b): n for n, b in model.named_buffers()}

    def slot(self, tensor: Tensor) -> Slot:
        parameter, buffer = self.parameters.get(id(tensor)), self.buffers.get(id(tensor))
        return Slot(tuple(tensor.shape), tensor.dtype, tensor, parameter, buffer)


def _exported(program: Any, answer: Answer) -> Tape:
    tape, env = Tape(), dict[Any, Any]()
    names = _Names(answer.model)
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    for node in program.graph.nodes:
        if node.op == "placeholder":
            tensor: Any = None
            if node.name in targets:
                tensor = operator.attrgetter(targets[node.name])(answer)
            elif node.name in constants:
                tensor = program.constants[constants[node.name]]
            meta = node.meta.get("val")
            if isinstance(tensor, Tensor):
                env[node] = tape.add(names.slot(tensor))
            else:
                env[node] = tape.add(_slot(meta)) if isinstance(meta, Tensor) else meta
        elif node.op == "call_function":
            env[node] = _call(tape, node, env)
        elif node.op == "get_attr":
            env[node] = None  # the branch of a conditional, which is not looked into
        elif node.op == "output":
            count = len(signature.user_outputs)
            outputs = [env.get(n) for n in node.args[0]][-count:] if count else []
            tape.answers = refs(outputs)
    return tape


def _slot(tensor: Tensor) -> Slot:
    return Slot(tuple(tensor.shape), tensor.dtype)


def _call(tape: Tape, node: Any, env: dict[Any, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
    if node.target is operator.getitem:
        return args[0][args[1]]
    meta = node.meta.get("val")
    outputs = tree_map(lambda t: tape.add(_slot(t)) if isinstance(t, Tensor) else t, meta)
    tape.calls.append(Call(node.target, tuple(args), kwargs, outputs))
    return outputs


@final
class _TapeWriter(TorchDispatchMode):
    """Writes every operation down, decomposed as far as the exporter would."""

    def __init__(self, tape: Tape, names: _Names) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self.names = tape, names
        self.known: dict[int, Ref] = {}
        self.alive: list[Any] = []  # the id of a tensor is its own only while it lives
        self.table = _decompositions()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if op is _BATCH_NORM and not args[5]:
            op, args = _BATCH_NORM_OF_STATISTICS, (*args[:5], *args[6:])
        if op in self.table:
            with self:
                done = self.table[op](*args, **kwargs)
            if done is not NotImplemented:
                return done
        result = op(*args, **kwargs)
        inputs = tree_map(self.ref, (args, kwargs))
        outputs = tree_map(self.new, result)
        self.tape.calls.append(Call(op, inputs[0], inputs[1], outputs))
        return result

    def ref(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.known:  # made before the recording: part of the model
            self.known[id(leaf)] = self.tape.add(self.names.slot(leaf))
            self.alive.append(leaf)
        return self.known[id(leaf)]

    def new(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        self.alive.append(leaf)
        self.known[id(leaf)] = self.tape.add(_slot(leaf))
        return self.known[id(leaf)]


def _recorded(
    module: nn.Module, names: _Names, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tape:
    tape = Tape()
    writer = _TapeWriter(tape, names)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for leaf in tree_leaves((args, kwargs)):
        writer.new(leaf)

    def run(state: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        try:
            return torch.func.functional_call(module, state, args, kwargs)
        except BaseException as error:
            end_checkpoints(error)
            raise

    # The writer sees what functionalisation makes of in-place operations. Nothing goes backwards
    # here, and what is saved for it would hold on to itself through the aliases (torch 2.13).
    with saved_tensors_hooks(_nothing, _nothing), writer:
        results = torch.func.functionalize(run)(state, args, kwargs)
    answers = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
    tape.answers = [writer.ref(t) for t in answers]
    return tape


def _nothing(_: Any) -> Any:
    """What a recording saves for a backward pass."""
