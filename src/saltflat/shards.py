"""Shards: which samples of a dataset a rank reads, and a sampler that repeats none of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from saltflat.checks import check_integer
from saltflat.errors import DataError, InvalidValue

_DEPTH = 6  # of samplers in samplers


def _samplers(data: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The samplers of a loader, also those in other samplers, and of a loader in what reads it."""
    if depth == 0:
        return
    held = {"sampler": getattr(data, "sampler", None), **getattr(data, "__dict__", {})}
    held["batch_sampler"] = getattr(data, "batch_sampler", None)
    for each in {id(value): value for value in held.values()}.values():
        if isinstance(each, Sampler):
            yield each
        if isinstance(each, Sampler | DataLoader) or hasattr(each, "batch_sampler"):
            yield from _samplers(each, depth - 1)


def _split(data: Any) -> tuple[Any, int, int, str] | None:
    """The sampler by which ranks share the samples, its rank, the ranks and what it repeats."""
    for each in _samplers(data):
        if isinstance(each, DistributedSampler) and each.num_replicas > 1:
            length = len(each.dataset)  # type: ignore[arg-type]
            more = 0 if each.drop_last else each.total_size - length
            return each, each.rank, each.num_replicas, f"{more} of {length}" if more > 0 else ""
        if isinstance(each, ShardSampler) and each.world > 1:
            return each, each.rank, each.world, ""
        if _is_shard_of_batches(each) and each.num_processes > 1:
            return each, each.process_index, each.num_processes, _repeated_batches(each)
    return None


def _is_shard_of_batches(sampler: Any) -> bool:
    """Whether it is accelerate's `BatchSamplerShard`, or one that works as it does."""
    names = ("num_processes", "process_index", "even_batches", "split_batches", "batch_sampler")
    return all(hasattr(sampler, name) for name in names)


def _repeated_batches(shard: Any) -> str:
    """How many samples accelerate reads again from the beginning, to fill all ranks' batches."""
    inner: Any = getattr(shard.batch_sampler, "sampler", None)
    whole = isinstance(shard.batch_sampler, BatchSampler) and hasattr(inner, "__len__")
    if not shard.even_batches or shard.drop_last or not whole:
        return ""
    filled = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    more = -len(inner) % filled
    return f"{more} of {len(inner)}" if more else ""


def is_shard(data: Any) -> bool:
    """Whether a loader has a sampler that leaves samples to other ranks."""
    return _split(data) is not None


def one_shard(data: Any) -> str:
    """What is to be said of a loader of one process that gives the samples of one rank alone."""
    split = _split(data)
    if split is None:
        return ""
    sampler, rank, ranks, _ = split
    return (
        f"the loader has a {type(sampler).__name__}: these are the samples of rank {rank} of "
        f"{ranks} alone. Pass distributed=True on every rank to measure those of all, or a loader "
        "without it"
    )


def check_padding(data: Any) -> None:
    """Refuse a sampler that gives some samples twice, to make all shards equally long."""
    split = _split(data)
    if split is not None and split[3]:
        raise DataError(
            f"{type(split[0]).__name__} repeats {split[3]} samples to give all ranks as many, so "
            "that they would count twice. Use sampler=saltflat.ShardSampler(dataset), which gives "
            "every sample once."
        )


def check_reading(data: Any) -> None:
    """Refuse a loader of accelerate's in which ranks wait for each other whenever it is read."""
    loader = getattr(data, "loader", data)
    kinds = [kind.__name__ for kind in type(loader).__mro__]
    how = ""
    if "DataLoaderDispatcher" in kinds:
        how = "reads on one rank and sends to all"
    elif "DataLoaderShard" in kinds and getattr(loader, "rng_types", None):
        how = "takes the random state of rank 0 before it shuffles"
    if how and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise DataError(
            f"The loader was prepared by accelerate and {how}: a rank that reads it alone would "
            "wait for the others. Pass the loader that was not prepared, with distributed=True and "
            "sampler=saltflat.ShardSampler(dataset) for the samples of all ranks."
        )


def shard_of(data: Any, rank: int, ranks: int) -> dict[str, str]:
    """What must be the same on all ranks for their shards to be parts of one dataset."""
    split = _split(data)
    if split is None:
        return {"the sampler": "one that leaves nothing to other ranks"}
    sampler, own, world, _ = split
    if (own, world) != (rank, ranks):
        raise DataError(
            f"{type(sampler).__name__} gives the samples of rank {own} of {world}, and this is "
            f"rank {rank} of {ranks}, so that some would be left out or read twice. Make it for "
            f"num_replicas={ranks}, rank={rank}."
        )
    order = (getattr(sampler, name, None) for name in ("shuffle", "seed", "epoch"))
    return {"the sampler": f"{type(sampler).__name__}, shuffle, seed and epoch {tuple(order)}"}


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
        self.rank, self.world, length = rank, world, len(dataset)
        self.indices = range(length * rank // world, length * (rank + 1) // world)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
