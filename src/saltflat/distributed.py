"""Several processes, each with samples of its own: what they find, put together in one place.

Every process (a rank of torch's default process group) makes the same calls. What it computes of
its own samples goes through `Reduction.each` or `Reduction.totals` and comes out the same on every
rank, so that all of them take the same decisions afterwards. An error of one rank is one of all.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saltflat.errors import (
    DataError,
    DistributedError,
    InvalidType,
    InvalidValue,
    ModelError,
    uninterrupted,
)
from saltflat.prints import in_words, of_buffers, of_modules, of_parameters
from saltflat.sharded import Served, Stopped

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


class Reduction:
    """One process alone: what it finds is all there is.

    Attributes
    ----------
    ranks, rank : how many processes there are, and which one this is.
    device : where the model is.
    asked : the call and its options, in words.
    """

    ranks = 1
    rank = 0
    device = torch.device("cpu")

    def __init__(self, asked: Mapping[str, str] | None = None) -> None:
        self.asked = dict(asked or {})

    def each(self, work: Callable[[], Result]) -> list[Result]:
        """What the work gave on every rank, in their order; it may not reduce anything itself.

        Where it fails on some rank, all raise what the first of these did.
        """
        return [work()]

    def totals(self, sums: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
        """The sums over all ranks, in float64; what a rank does not have counts as zeros."""
        return dict(sums)


LOCAL = Reduction()


@contextmanager
def reduction(distributed: bool, call: str, **options: object) -> Iterator[Reduction]:
    """What sums go through during a call: over all ranks, or of this process alone.

    All ranks must make the same `call` with the same `options`.
    """
    if not isinstance(distributed, bool):
        raise InvalidType(f"distributed must be True or False. Got {type(distributed).__name__}.")
    asked = {"call": call} | {name: in_words(value) for name, value in options.items()}
    if not distributed:
        yield Reduction(asked)
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidValue(
            "distributed=True needs a process group: start the program with torchrun, and call "
            "torch.distributed.init_process_group() first. Without one, leave distributed out."
        )
    together = Ranks(asked)
    try:
        agree({}, together)
        yield together
        together.end()
    except Stopped as error:
        raise together.stopped() from error
    except BaseException as error:
        together.leave(error)
        raise


def _nothing() -> None:
    """What a rank does that only waits for the others."""


def agree(told: Mapping[str, str], reduction: Reduction) -> None:
    """Refuse to go on where ranks were asked for something else, or tell something else."""
    if reduction.ranks == 1:
        return
    first, *others = reduction.each(lambda: {**reduction.asked, **told})
    for rank, its in enumerate(others, 1):
        if first["call"] != its["call"]:
            raise DistributedError(
                f"The ranks do not do the same: rank 0 calls {first['call']} and rank {rank} calls "
                f"{its['call']}. {_SAME}"
            )
        for name in dict.fromkeys((*first, *its)):
            if first.get(name) != its.get(name):
                one, other = (_short(each.get(name, "nothing")) for each in (first, its))
                raise InvalidValue(
                    f"The ranks do not ask for the same: {name} is {one} on rank 0 and {other} on "
                    f"rank {rank}. {_SAME}"
                )


_ELSEWHERE = "Another rank has raised an error: look at the output of the others"
_SAME = "All must make the same call, with the same model and options."


def _short(words: str) -> str:
    return words if len(words) <= 200 else f"{words[:200]}…"


_DONE, _FAILED, _LEFT, _STOPPED = "done", "failed", "left", "stopped"


@final
class Ranks(Reduction):
    """All processes of the default group."""

    def __init__(self, asked: Mapping[str, str] | None = None) -> None:
        super().__init__(asked)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self._closed = ""  # why nothing can be exchanged any more
        self._working = False
        self.service: Served | None = None
        with uninterrupted():
            self._group: Any = self.call(_for_objects)

    def each(self, work: Callable[[], Result]) -> list[Result]:
        assert not self._working, "a rank's own work cannot wait for the others"
        own: BaseException | None = None
        place = f"{work.__module__}.{work.__qualname__}"
        if self.service is not None:
            self.service.meet()
        self._working = True
        try:
            said = _packed((_DONE, place, work()))
        except Stopped:
            own = DistributedError(f"{_ELSEWHERE}.")
            said = pickle.dumps((_STOPPED, place, own))
        except Exception as error:
            own = _portable(error)
            said = pickle.dumps((_FAILED, place, own))
        except BaseException as error:  # an interruption, which is nobody's to catch
            own = error
            said = pickle.dumps((_LEFT, place, _portable(error)))
        self._working = False
        if own is not None and self._closed:
            raise own  # what has closed it, amid the work
        with uninterrupted():  # until it is known who has stopped
            return self._agreed(self._exchanged(said, own is not None), own)

    def end(self) -> None:
        """The end of a call: all ranks must have come that far."""
        with uninterrupted():
            self.each(_nothing)
            self._closed = "the call is over"  # nobody waits for what a rank raises now

    def leave(self, error: BaseException) -> None:
        """This rank raises, and the others, wherever they are, are to do so too."""
        if self._closed:
            return
        with suppress(DistributedError):  # the others are gone already
            said = pickle.dumps((_LEFT, "", _portable(error)))
            self._place(error, self.rank, self._exchanged(said, failed=True))
        self._closed = f"rank {self.rank} has stopped"

    def stopped(self) -> BaseException:
        """What the rank has raised because of which this one cannot go on."""
        own: BaseException = DistributedError(f"{_ELSEWHERE}.")
        try:
            self._agreed(self._exchanged(pickle.dumps((_STOPPED, "", own)), failed=True), own)
        except BaseException as error:
            own, self._closed = error, self._closed or f"rank {self.rank} has stopped"
        return own

    def told(self, number: int) -> list[int]:
        """A number of every rank, also amid its work."""
        self._check_open()
        own = torch.tensor([number])
        numbers = [torch.zeros_like(own) for _ in range(self.ranks)]
        self.call(lambda: dist.all_gather(numbers, own, group=self._group))
        return [int(each) for each in numbers]

    @uninterrupted()
    def totals(self, sums: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
        shapes, on_device = self._outline(sums, device)
        if not shapes:
            return {}
        options: dict[str, Any] = {
            "device": device if on_device else torch.device("cpu"),
            "dtype": torch.float64,
        }
        rows: list[Tensor] = []

        def line_up() -> None:
            zeros = (torch.zeros(shape, **options) for shape in shapes.values())
            parts = (sums.get(key, zero) for key, zero in zip(shapes, zeros, strict=True))
            rows.append(torch.cat([part.detach().to(**options).reshape(-1) for part in parts]))

        self.each(line_up)  # a rank without memory for it must not leave the others waiting
        self.call(lambda: dist.all_reduce(rows[0], group=None if on_device else self._group))
        totals = rows[0].to(device).split([shape.numel() for shape in shapes.values()])
        return {
            key: total.reshape(shape).clone()
            for (key, shape), total in zip(shapes.items(), totals, strict=True)
        }

    def _outline(
        self, sums: Mapping[Key, Tensor], device: torch.device
    ) -> tuple[dict[Key, torch.Size], bool]:
        """The shapes of all sums that a rank has, and whether all ranks have nccl for them."""
        fast = device.type == "cuda" and "nccl" in str(dist.get_backend_config())
        told = self.each(lambda: ({key: value.shape for key, value in sums.items()}, fast))
        shapes: dict[Key, torch.Size] = {}
        for known, _ in told:
            for key, shape in known.items():
                if shapes.setdefault(key, shape) != shape:
                    raise DataError(
                        f"The ranks' parts of a sum do not fit: {tuple(shapes[key])} and "
                        f"{tuple(shape)}. Give every rank samples of the same kind."
                    )
        return shapes, all(fast for _, fast in told)

    def _agreed(self, answers: list[tuple[str, str, Any]], own: BaseException | None) -> list[Any]:
        """The results, if there is one on every rank."""
        states = [status for status, _, _ in answers]
        places = [place for _, place, _ in answers]
        for bad in (_LEFT, _FAILED, _STOPPED):
            if bad in states:
                who = states.index(bad)
                gone = bad == _LEFT or "" in places
                self._closed = f"rank {who} has stopped" if gone else ""
                if own is not None and not isinstance(own, Exception):
                    raise own  # an interruption
                error: BaseException = answers[who][2]
                error = own if own is not None and who == self.rank else error
                self._place(error, who, answers)
                raise error
        if len(set(places)) > 1:
            self._closed = "the ranks have lost each other"
            other = next(k for k, place in enumerate(places) if place != places[0])
            raise DistributedError(
                f"The ranks do not do the same: rank 0 is at {places[0]} and rank {other} at "
                f"{places[other]}. {_SAME}"
            )
        return [result for _, _, result in answers]

    def _place(self, error: BaseException, who: int, answers: list[tuple[str, str, Any]]) -> None:
        """Say where it happened, unless all raise the same."""
        if any(s not in (_LEFT, _FAILED) or str(e) != str(error) for s, _, e in answers):
            error.add_note(f"This happened on rank {who} of {self.ranks}.")

    def _check_open(self) -> None:
        if self._closed:
            raise DistributedError(f"Nothing more can be reduced over the ranks: {self._closed}.")

    @uninterrupted()
    def _exchanged(self, said: bytes, failed: bool = False) -> list[Any]:
        """What every rank says, once all of them have done their work."""
        self._check_open()
        if self.service is not None:
            self.service.rest(failed)
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        mine = torch.tensor([len(own)])
        self.call(lambda: dist.all_gather(sizes, mine, group=self._group))
        longest = int(max(sizes))
        padded = torch.cat([own, own.new_zeros(longest - len(own))])
        rows = [padded.new_empty(longest) for _ in range(self.ranks)]
        self.call(lambda: dist.all_gather(rows, padded, group=self._group))
        return [
            _Unpickler(BytesIO(row[: int(size)].numpy().tobytes()), self.device).load()
            for row, size in zip(rows, sizes, strict=True)
        ]

    def call(self, collective: Callable[[], Result]) -> Result:
        """What a collective gives, if all ranks take part in it."""
        try:
            return collective()
        except (RuntimeError, ValueError) as error:
            self._closed = "a rank is gone"
            raise DistributedError(
                "A rank is gone, or does not answer: its process has ended, perhaps for want of "
                f"memory, or the network failed (rank {self.rank} of {self.ranks} was told: "
                f"{str(error).partition('. This')[0]}). Look at the other ranks' output."
            ) from error


@final
class _Pickler(pickle.Pickler):
    """Tensors go as their values: by default a few rows take the rest of their storage along, and
    come out on the device, by its number, that the sender has."""

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        values = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return values.numpy().tobytes(), obj.dtype, obj.shape, obj.device.type == "cpu"


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> Tensor:
        content, dtype, shape, on_cpu = pid
        values = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0)
        return values.to(dtype).reshape(shape).to("cpu" if on_cpu else self._device)


def _packed(content: Any) -> bytes:
    file = BytesIO()
    _Pickler(file).dump(content)
    return file.getvalue()


def origin(error: BaseException) -> str:
    """The traceback of an error on the rank that raised it."""
    known: str | None = getattr(error, _ORIGIN, None)
    return known or "".join(traceback.format_exception(error))


_ORIGIN = "_saltflat_origin"  # an attribute, for a traceback is not sent along


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same, where it cannot be sent to other processes."""
    sent = _sendable(error)
    sent.__dict__.setdefault(_ORIGIN, origin(error))
    return sent


def _sendable(error: BaseException) -> BaseException:
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever a class of the user's does when it is pickled
        pass
    told = DistributedError(f"{type(error).__name__}: {error}")
    told.__cause__, told.interrupted = error, isinstance(error, KeyboardInterrupt)
    return told


@contextmanager
def aligned(model: nn.Module, told: Mapping[str, str], reduction: Reduction) -> Iterator[list[str]]:
    """All ranks have the model of the first: parameters must agree, buffers are taken over.

    DistributedDataParallel leaves every rank with the running statistics of its own batches. The
    names are those of the buffers that differ. What is `told` of the rest must agree too.
    """
    if reduction.ranks == 1:
        yield []
        return
    with uninterrupted():  # prints of shards are made by those that share them
        agree(told, reduction)
        prints = reduction.each(
            lambda: (of_modules(model), of_parameters(model), of_buffers(model))
        )
    _check_alike([modules for modules, _, _ in prints], "Module {!r}")
    _check_alike([values for _, values, _ in prints], "Parameter {!r}")
    buffers = dict(model.named_buffers())
    names = [n for n in buffers if len({sums.get(n) for _, _, sums in prints}) > 1]
    first = {n: buffers[n].detach().cpu() for n in names if reduction.rank == 0}
    theirs = reduction.each(lambda: first)[0]
    before = {n: buffers[n].data for n in names}
    try:
        for name, data in before.items():
            buffers[name].data = theirs[name].to(data.device)
        yield names
    finally:
        for name, data in before.items():
            buffers[name].data = data


def _check_alike(prints: list[dict[str, str]], what: str) -> None:
    """Refuse ranks that have something else than the first."""
    for rank, its in enumerate(prints):
        for name in dict.fromkeys((*prints[0], *its)):
            if prints[0].get(name) != its.get(name):
                raise ModelError(
                    f"{what.format(name)} is not the same on rank 0 and rank {rank}: every rank "
                    "must have the same model, to the last bit. Load the same weights, or wrap it "
                    "in DistributedDataParallel, which sends those of rank 0 to all."
                )


_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _for_objects() -> Any:
    """A group whose processes exchange bytes on the CPU, where a lost connection shows at once.

    The default group, or beside one of nccl alone another one, which is made once.
    """
    world = dist.group.WORLD
    if "gloo" in str(dist.get_backend_config()):
        return world
    if world not in _GROUPS:
        _GROUPS[world] = dist.new_group(backend="gloo")
    return _GROUPS[world]
