"""Several processes, each with samples of its own: what they find, put together in one place.

Every process (a rank of torch's default process group) makes the same calls. What it computes of
its own samples goes through `Reduction.each` or `Reduction.totals` and comes out the same on every
rank, so that all of them take the same decisions afterwards. An error of one rank is one of all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import nan
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, Sampler

from saltflat.checks import check_integer
from saltflat.errors import DataError, DistributedError, InvalidType, InvalidValue, ModelError

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


class Reduction:
    """One process alone: what it finds is all there is.

    Attributes
    ----------
    ranks, rank : how many processes there are, and which one this is.
    """

    ranks = 1
    rank = 0

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
def reduction(distributed: bool) -> Iterator[Reduction]:
    """What sums go through during a call: over all ranks, or of this process alone."""
    if not isinstance(distributed, bool):
        raise InvalidType(f"distributed must be True or False. Got {type(distributed).__name__}.")
    if not distributed:
        yield LOCAL
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidValue(
            "distributed=True needs a process group: start the program with torchrun, and call "
            "torch.distributed.init_process_group() first. Without one, leave distributed out."
        )
    together = Ranks()
    try:
        yield together
        together.each(_nothing)
    except BaseException as error:
        together.leave(error)
        raise


def _nothing() -> None:
    """At the end of a call: all ranks must have come that far."""


_DONE, _FAILED, _LEFT = "done", "failed", "left"


@final
class Ranks(Reduction):
    """All processes of the default group."""

    def __init__(self) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self._group = _for_objects()
        self._closed = ""  # why nothing can be exchanged any more
        self._working = False

    def each(self, work: Callable[[], Result]) -> list[Result]:
        assert not self._working, "a rank's own work cannot wait for the others"
        own: BaseException | None = None
        place = f"{work.__module__}.{work.__qualname__}"
        self._working = True
        try:
            said = pickle.dumps((_DONE, place, work()))
        except Exception as error:
            own = _portable(error)
            said = pickle.dumps((_FAILED, place, own))
        except BaseException as error:  # an interruption, which is nobody's to catch
            own = error
            said = pickle.dumps((_LEFT, place, _portable(error)))
        self._working = False
        return self._agreed(self._exchanged(said), own)

    def leave(self, error: BaseException) -> None:
        """This rank raises, and the others, wherever they are, are to do so too."""
        if self._closed:
            return
        with suppress(DistributedError):  # the others are gone already
            self._exchanged(pickle.dumps((_LEFT, "", _portable(error))))
        self._closed = f"rank {self.rank} has stopped"

    def totals(self, sums: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
        shapes: dict[Key, torch.Size] = {}
        for known in self.each(lambda: {key: value.shape for key, value in sums.items()}):
            for key, shape in known.items():
                if shapes.setdefault(key, shape) != shape:
                    raise DataError(
                        f"The ranks' parts of a sum do not fit: {tuple(shapes[key])} and "
                        f"{tuple(shape)}. Give every rank samples of the same kind."
                    )
        on_device = device.type == "cuda" and "nccl" in str(dist.get_backend_config())
        options: dict[str, Any] = {
            "device": device if on_device else torch.device("cpu"),
            "dtype": torch.float64,
        }
        parts = [
            sums[key].detach().to(**options).reshape(-1)
            if key in sums
            else torch.zeros(shape.numel(), **options)
            for key, shape in shapes.items()
        ]
        if not parts:
            return {}
        flat = torch.cat(parts)
        self._call(lambda: dist.all_reduce(flat, group=None if on_device else self._group))
        totals = flat.to(device).split([shape.numel() for shape in shapes.values()])
        return {
            key: total.reshape(shape).clone()
            for (key, shape), total in zip(shapes.items(), totals, strict=True)
        }

    def _agreed(self, answers: list[tuple[str, str, Any]], own: BaseException | None) -> list[Any]:
        """The results, if there is one on every rank."""
        states = [status for status, _, _ in answers]
        for bad in (_LEFT, _FAILED):
            if bad in states:
                who = states.index(bad)
                self._closed = f"rank {who} has stopped" if bad == _LEFT else ""
                interrupted = own is not None and not isinstance(own, Exception)
                if own is not None and (interrupted or who == self.rank):
                    raise own
                answers[who][2].add_note(f"This happened on rank {who} of {self.ranks}.")
                raise answers[who][2]
        places = [place for _, place, _ in answers]
        if len(set(places)) > 1:
            self._closed = "the ranks have lost each other"
            other = next(k for k, place in enumerate(places) if place != places[0])
            raise DistributedError(
                f"The ranks do not do the same: rank 0 is at {places[0]} and rank {other} at "
                f"{places[other]}. All must make the same call, with the same model and options."
            )
        return [result for _, _, result in answers]

    def _exchanged(self, said: bytes) -> list[Any]:
        """What every rank says."""
        if self._closed:
            raise DistributedError(f"Nothing more can be reduced over the ranks: {self._closed}.")
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        mine = torch.tensor([len(own)])
        self._call(lambda: dist.all_gather(sizes, mine, group=self._group))
        longest = int(max(sizes))
        padded = torch.cat([own, own.new_zeros(longest - len(own))])
        rows = [padded.new_empty(longest) for _ in range(self.ranks)]
        self._call(lambda: dist.all_gather(rows, padded, group=self._group))
        return [
            pickle.loads(row[: int(size)].numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _call(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except (RuntimeError, ValueError) as error:
            self._closed = "a rank is gone"
            raise DistributedError(
                "A rank is gone, or does not answer: its process has ended, perhaps for want of "
                f"memory, or the network failed (rank {self.rank} of {self.ranks} was told: "
                f"{str(error).partition('. This')[0]}). Look at the other ranks' output."
            ) from error


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same, where it cannot be sent to other processes."""
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever a class of the user's does when it is pickled
        pass
    told = DistributedError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


@contextmanager
def aligned(model: nn.Module, reduction: Reduction) -> Iterator[list[str]]:
    """All ranks have the model of the first: parameters must agree, buffers are taken over.

    DistributedDataParallel leaves every rank with the running statistics of its own batches. The
    names are those of the buffers that differ.
    """
    if reduction.ranks == 1:
        yield []
        return
    prints = reduction.each(lambda: _prints(model))
    first = prints[0][0]
    for rank, (norms, _) in enumerate(prints):
        for name in dict.fromkeys((*first, *norms)):
            own, its = (each.get(name, nan) for each in (first, norms))
            if not abs(own - its) <= 1e-6 * abs(own):
                raise ModelError(
                    f"Parameter {name!r} is not the same on rank 0 and rank {rank}: every rank "
                    "must have the same model. Load the same weights, or wrap it in "
                    "DistributedDataParallel, which sends those of rank 0 to all."
                )
    buffers = dict(model.named_buffers())
    names = [n for n in buffers if len({sums.get(n) for _, sums in prints}) > 1]
    told = {n: buffers[n].detach().cpu() for n in names if reduction.rank == 0}
    theirs = reduction.each(lambda: told)[0]
    before = {n: buffers[n].data for n in names}
    try:
        for name, data in before.items():
            buffers[name].data = theirs[name].to(data.device)
        yield names
    finally:
        for name, data in before.items():
            buffers[name].data = data


def _prints(model: nn.Module) -> tuple[dict[str, float], dict[str, int]]:
    """By which models are told apart: the norms of parameters, and checksums of buffers."""
    norms = {
        name: float(torch.linalg.vector_norm(p.detach().double()))
        for name, p in model.named_parameters()
    }
    sums = {
        name: crc32(b.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, b in model.named_buffers()
        if b.layout == torch.strided and b.numel()
    }
    return norms, sums


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


def _sampler(data: Any) -> DistributedSampler[Any] | None:
    """The DistributedSampler of a loader, if it has one that leaves samples to other ranks."""
    batches = getattr(data, "batch_sampler", None)
    for each in (getattr(data, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(each, DistributedSampler) and each.num_replicas > 1:
            return each
    return None


def one_shard(data: Any) -> str:
    """What is to be said of a loader of one process that gives the samples of one rank alone."""
    sampler = _sampler(data)
    if sampler is None:
        return ""
    return (
        f"the loader has a DistributedSampler: these are the samples of rank {sampler.rank} of "
        f"{sampler.num_replicas} alone. Pass distributed=True on every rank to measure those of "
        "all, or a loader without it"
    )


def check_padding(data: Any) -> None:
    """Refuse a sampler that gives some samples twice, to make all shards equally long."""
    sampler = _sampler(data)
    if sampler is None:
        return
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.drop_last and sampler.total_size > length:
        raise DataError(
            f"DistributedSampler repeats {sampler.total_size - length} of {length} samples to give "
            "all ranks as many, so that they would count twice. Use sampler=saltflat.ShardSampler("
            "dataset), which gives every sample once."
        )


@final
class ShardSampler(Sampler[int]):
    """The samples of one rank: a stretch of the dataset, each sample on one rank and once.

    Torch's `DistributedSampler` repeats samples until all ranks have as many, and these would count
    twice. Here the first ranks' stretches are as long as the others' or one sample shorter, and
    put one after the other they are the dataset in its order.

    Parameters
    ----------
    dataset : anything with a length.
    rank, world : which shard of how many; by default those of the process group.

    Examples
    --------
    >>> import saltflat as sf
    >>> [list(sf.ShardSampler("abcdefg", rank=k, world=3)) for k in range(3)]
    [[0, 1], [2, 3], [4, 5, 6]]
    """

    def __init__(self, dataset: Any, rank: int | None = None, world: int | None = None) -> None:
        if (rank is None) != (world is None):
            raise InvalidValue(
                f"ShardSampler takes rank and world, or neither. Got {rank=}, {world=}."
            )
        if rank is None or world is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise InvalidValue(
                    "ShardSampler needs a process group to know its rank: call "
                    "torch.distributed.init_process_group() first, or pass rank= and world=."
                )
            rank, world = dist.get_rank(), dist.get_world_size()
        check_integer("world", world)
        if not 0 <= check_integer("rank", rank, least=0) < world:
            raise InvalidValue(f"rank must be less than world, {world}. Got {rank}.")
        length = len(dataset)
        self.indices = range(length * rank // world, length * (rank + 1) // world)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
