"""Risk: the thing that is differentiated. A model, its data and a loss, as one value."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial, reduce
from itertools import chain, islice
from math import isfinite
from operator import length_hint
from os import PathLike
from typing import Any, final
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from saltflat.distributed import LOCAL, Ranks, Reduction, aligned
from saltflat.errors import (
    DataError,
    ForwardError,
    InvalidType,
    InvalidValue,
    ModelError,
    listed,
    nearest,
    uninterrupted,
)
from saltflat.losses import (
    CrossEntropy,
    JointLoss,
    Loss,
    LossLike,
    reached_from,
    refuse_parameters,
    resolve,
    scalar,
    summary,
    with_settings,
)
from saltflat.memory import halving, keep_blocks, ordinary
from saltflat.prints import in_words, of_buffers
from saltflat.session import Likeness, RandomState, end_checkpoints, lend, modules_in
from saltflat.sharded import (
    ADVICE,
    Gathering,
    Served,
    Together,
    is_sharded,
    layered,
    parallel_tensors,
    parameters_of,
    refuse_flattened,
    refuse_precision,
    settled,
)
from saltflat.shards import check_padding, check_reading, one_shard, shard_of
from saltflat.vectors import bounds, total_norm
from saltflat.watch import Kept, Tally, Watch, in_memory, kept, second_reading
from saltflat.work import Work

_NO_MODE = nullcontext()
# Samples by which a tensor-parallel model is compared with a plain one: on blank ones alone, where
# all that is attended to is the same, these give the same whatever the code is.
_ALIKE = 8
_BORROWED = (
    "If a module uses weights of another one, which has them only while it runs itself, measure "
    "the model within `with saltflat.gathered(model, example_inputs):`. Otherwise: "
)

Unpack = Callable[[Any], tuple[Any, Any]]
Chooser = Callable[[Any], Any]  # of the outputs, in what a model returned
Output = str | int | Chooser  # as a user says it


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets of `size` samples; `where` says which they are in an error message.

    `rows` tells, for every leaf of inputs and targets, whether it holds one row a sample; what does
    not (a mask for all samples) is never cut. Where it is not given, the leaves' lengths tell.
    """

    inputs: Any
    targets: Any
    size: int
    where: str
    rows: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not self.rows:
            found = (has_rows(leaf, self.size) for leaf in self.leaves())
            object.__setattr__(self, "rows", tuple(found))

    def leaves(self) -> list[Any]:
        return [*leaves_of(self.inputs), *leaves_of(self.targets)]

    def part(self, start: int, stop: int) -> Batch:
        """The samples from `start` to `stop`."""
        if start == 0 and stop >= self.size:
            return self
        return self._cut(slice(start, stop), min(stop, self.size) - start)

    def spread(self, count: int) -> Batch:
        """Some samples from all over the batch, the first among them: data often come sorted."""
        if count >= self.size:
            return self
        return self.take(self.places(count))

    def take(self, which: list[int]) -> Batch:
        """Some samples by their places in the batch."""
        return self._cut(which, len(which))

    def places(self, count: int) -> list[int]:
        """Where the samples of `spread` are: one in each stretch, at no regular distance."""
        width = max(1, self.size // count)
        return [k * self.size // count + int(k * 0.618 % 1 * width) for k in range(count)]

    def _cut(self, which: slice | list[int], size: int) -> Batch:
        rows = iter(self.rows)

        def cut(leaf: Any) -> Any:
            return leaf[which] if next(rows) else leaf

        inputs, targets = mapped(cut, self.inputs), mapped(cut, self.targets)
        return Batch(inputs, targets, size, self.where, self.rows)

    def on(self, device: torch.device) -> Batch:
        """The same samples on another device."""
        moved = tree_map_only(Tensor, lambda leaf: leaf.to(device), (self.inputs, self.targets))
        return replace(self, inputs=moved[0], targets=moved[1])

    def equals(self, other: Batch) -> bool:
        """Whether another batch holds the same."""
        mine, its = self.leaves(), other.leaves()
        return len(mine) == len(its) and all(map(_same, mine, its))

    def answered(self, outputs: Tensor) -> Batch:
        """The same samples with outputs in the place of inputs."""
        behind = len(leaves_of(self.inputs))
        return Batch(outputs, self.targets, self.size, self.where, (True, *self.rows[behind:]))


@final
class Entries(list[Any]):
    """A list with one entry a sample, lengths or words, cut and joined as tensors are."""

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, list):
            return Entries(self[k] for k in which)
        entries = super().__getitem__(which)
        return Entries(entries) if isinstance(which, slice) else entries


def leaves_of(content: Any) -> list[Any]:
    """The leaves of inputs or targets, in order; most often these are one tensor."""
    return [content] if isinstance(content, Tensor) else tree_leaves(content)


def mapped(function: Callable[[Any], Any], content: Any) -> Any:
    """Inputs or targets with a function of each leaf in its place, applied in order."""
    return function(content) if isinstance(content, Tensor) else tree_map(function, content)


def has_rows(leaf: Any, size: int) -> bool:
    """Whether a leaf is as long as there are samples."""
    if isinstance(leaf, Tensor):
        return leaf.ndim > 0 and len(leaf) == size
    return isinstance(leaf, Entries) and len(leaf) == size


def with_entries(content: Any, size: int) -> Any:
    """The lists and tuples among inputs or targets that hold one entry a sample, as `Entries`.

    One that holds tensors of the batch's own length, however deep, is a structure.
    """
    if isinstance(content, Tensor):
        return content

    def is_list(node: Any) -> bool:
        return (
            node is not content
            and type(node) in (list, tuple)
            and len(node) == size
            and not any(has_rows(leaf, size) for leaf in tree_leaves(node))
        )

    return tree_map(lambda n: Entries(n) if is_list(n) else n, content, is_leaf=is_list)


def join(batches: Sequence[Batch]) -> Batch:
    """One batch that holds the samples of all.

    What is not per sample (a mask) is that of the first: it must be the same in all, because two
    graphs, say, with edges of their own do not make one by putting their nodes together.
    """
    if len(batches) == 1:
        return batches[0]
    if not alike(batches):
        raise DataError(
            f"The batches cannot be taken as one: {batches[0].where} and another hold something "
            "that is neither one row a sample nor the same in both, among "
            f"{summary((batches[0].inputs, batches[0].targets))}. Samples that depend on each "
            "other, and losses over all samples, need one batch; pass a single one."
        )

    together = _rows(batches)
    structure = tree_flatten((batches[0].inputs, batches[0].targets))[1]
    content = zip(*[b.leaves() for b in batches], strict=True)
    joined = [_put(each) if yes else each[0] for each, yes in zip(content, together, strict=True)]
    inputs, targets = tree_unflatten(joined, structure)
    return Batch(inputs, targets, sum(b.size for b in batches), "all batches", together)


def _put(leaves: Sequence[Any]) -> Any:
    """Rows of several batches, one after another."""
    if isinstance(leaves[0], Tensor):
        return torch.cat(tuple(leaves))
    return Entries(entry for leaf in leaves for entry in leaf)


def alike(batches: Sequence[Batch]) -> bool:
    """Whether what is not per sample is the same in all batches, so that they can be joined."""
    content = [b.leaves() for b in batches]
    if len({len(leaves) for leaves in content}) > 1:
        return False
    return all(
        yes or all(_same(leaf, leaves[0]) for leaf in leaves[1:])
        for leaves, yes in zip(zip(*content, strict=True), _rows(batches), strict=True)
    )


def _rows(batches: Sequence[Batch]) -> tuple[bool, ...]:
    """Which leaves hold one row a sample in all of the batches."""
    return tuple(map(all, zip(*[b.rows for b in batches], strict=True)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a is b or (type(a) is type(b) and bool(a == b))


@final
class Risk:
    """What `loss` would return on one batch that holds all of `data`, in evaluation mode.

    Of several ranks, each with data of its own, it is that of one batch with the data of all, in
    the order of the ranks: what is summed over samples goes through `reduction`.

    Attributes
    ----------
    parameters : the measured parameters by name, in `named_parameters` order.
    sharded : whether processes share the model, each with a part of its parameters.
    frozen : names of the parameters that are not measured because they do not require gradients.
    notes : what was found out about the loss, for whoever reads the result.
    """

    _alike = False  # whether a tensor-parallel model is known to compute what a plain one does

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: LossLike = "cross_entropy",
        *,
        parameters: str | Iterable[str] = "trainable",
        dtype: torch.dtype | None = None,
        unpack: Unpack | None = None,
        output: Output | None = None,
        reduction: Reduction = LOCAL,
    ) -> None:
        self.model = unwrap(model)
        self.reduction = reduction
        self.loss: Loss | JointLoss | Callable[..., Tensor] = resolve(loss)
        self.notes: list[str] = []
        self._items = kept(items_of(data))
        self._unpack = unpack or split_item
        self.output = answer_of(output)
        everything = parameters_of(self.model)
        self.parameters = _choose(everything, parameters)
        check_parameters(everything, set(self.parameters))
        measured = {id(p) for p in self.parameters.values()}
        self.frozen = tuple(
            n for n, p in everything.items() if id(p) not in measured and not p.requires_grad
        )
        self.dtype = _compute_dtype(everything.values(), dtype)
        self.device = next(iter(self.parameters.values())).device
        self.gathering: Gathering | None = None  # in a session, of a model that processes share
        self.sharded = any(map(is_sharded, everything.values()))
        with uninterrupted():  # norms of shards are made by those that share them
            self._check_sharded(everything)
            check_finite(everything)
        _check_buffers(self.model)
        if isinstance(self.loss, Loss):
            _hold_fixed(self.loss, self.parameters)
        self._steady = unpack is None and in_memory(self._items)
        self.watched = Watch(on=not self._steady)
        self.work = Work()
        self.differentiable = False  # whether it is known that the backward pass is the derivative
        self.plans: dict[Hashable, Any] = {}  # what this call has found out about the model
        self._counted: dict[int, str] = {}  # leaf -> the batch that showed a row for each sample
        self._shared: set[int] = set()  # leaves that samples share
        self._leaves: int | None = None  # of the first batch
        self._next_token: bool | None = None  # what labels stand for; None until a batch tells
        self._start: RandomState | None = None
        self._passes = 0
        self._own: int | None = None  # samples here, once they were all read
        self._sizes: list[int] = []  # samples of every rank, once it was asked for
        self._first: tuple[int, Batch] | None = None  # of several ranks: whose it is, and it
        self._look_at_sampler()

    @contextmanager
    def session(self) -> Iterator[None]:
        """The context in which the model may be run; it leaves everything as it was found."""
        if self.device.type == "cpu":
            keep_blocks()
        self._start = RandomState(self._items, self.device)
        self._passes = 0
        measured = {id(p) for p in self.parameters.values()}
        beside = modules_in(getattr(self.loss, "call", self.loss))
        self._note_switches()
        lent = partial(lend, self.model, measured, self.dtype, beside)
        same = aligned(self.model, self._told(), self.reduction)
        try:
            with settled(self.model), same as taken:
                if taken and (note := _TAKEN + listed(taken)) not in self.notes:
                    self.notes.append(note)
                with self._gathered():
                    with lent() as loan:
                        yield
                    loan.check_steady(lent, self._answers)
        finally:
            self._start.restore()

    def _told(self) -> dict[str, str]:
        """What must be the same in all processes, beside the model and what was asked for."""
        told = {"the loss": with_settings(self.loss), "parameters": ", ".join(self.parameters)}
        told["dtype"] = str(self.dtype)
        if self.reduction.ranks > 1:
            told |= shard_of(self._items, self.reduction.rank, self.reduction.ranks)
        return told

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """What gathers the weights that processes share: for the same passes, or on request."""
        with ExitStack() as stack:
            if self.sharded and parallel_tensors(self.model):
                stack.enter_context(self._layered())
            if self.sharded and isinstance(self.reduction, Ranks) and self.reduction.ranks > 1:
                with uninterrupted():  # from one exchange to where all tell what they need
                    self.reduction.each(_comes_so_far)
                    served = Served(self.model, self.reduction)
                    self.gathering = stack.enter_context(served.open())
            elif self.sharded:
                told = in_words({**self.reduction.asked, **self._told()})
                buffers = 0
                if not self._alike:  # which says that outputs are the same, but for rounding
                    buffers = crc32(in_words(of_buffers(self.model)).encode())
                self.gathering = Together(self.model, crc32(told.encode()), buffers)
            try:
                yield
            finally:
                self.gathering = None

    @contextmanager
    def _layered(self) -> Iterator[None]:
        """Within, a tensor-parallel model is run as a plain one, which is found to be the same."""
        likeness: Likeness | None = None
        if not self._alike:
            batch = self.first().spread(_ALIKE)
            likeness = Likeness(self.model, batch.inputs, partial(self._returned, batch))
        with layered(self.model):
            if likeness is not None:
                self.gathering = Together(self.model, 0)
                try:
                    likeness.check(_BORROWED)
                finally:
                    self.gathering = None
                self._alike = True
            yield

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The measured parameters as autograd knows them."""
        if self.gathering is None:
            return dict(self.parameters)
        known = self.gathering.leaves
        return {name: known.get(id(p), p) for name, p in self.parameters.items()}

    def agreed(self, number: int) -> int:
        """The least of what processes that share the model have of a number."""
        return number if self.gathering is None else self.gathering.least(number)

    def meet(self) -> None:
        """Before a portion of work: processes that share the model gather less if they begin at
        the same time."""
        if self.gathering is not None:
            self.gathering.meet()

    def _check_sharded(self, everything: Mapping[str, Tensor]) -> None:
        refuse_precision(self.model)
        if not self.sharded:
            return
        if self.dtype is not None and any(p.dtype != self.dtype for p in everything.values()):
            raise ModelError(
                f"A sharded model is computed in the dtype of its parameters, not in {self.dtype}. "
                "Convert it before fully_shard is applied."
            )
        world = self.reduction.ranks
        meshes = {p.device_mesh.size() for p in everything.values() if is_sharded(p)}
        # On a row or a column of a mesh of all ranks, each of which has a copy, as is found by what
        # the copies compute.
        parts = max(meshes) == world and parallel_tensors(self.model)
        if world > 1 and meshes != {world} and not parts:
            raise ModelError(
                f"With distributed=True all {world} ranks gather the model together, and it is "
                f"sharded over a mesh of {min(meshes)}. Leave distributed=True out, and give all "
                f"ranks of the mesh the same data. {ADVICE}"
            )
        self.reduction.each(_comes_so_far)  # before anything is gathered

    def _passing(self, batch: Batch) -> AbstractContextManager[None]:
        """What a forward pass runs in. Processes that must all do the same go by a checksum."""
        if self.gathering is None:
            return nullcontext()
        return self.gathering.passing(lambda: crc32(in_words(batch.leaves()).encode()))

    def _look_at_sampler(self) -> None:
        """See to the samples that a sampler repeats, or leaves to other ranks, and to these."""
        check_reading(self._items)
        if self.reduction.ranks > 1:
            self.reduction.device = self.device
            check_padding(self._items)
        elif note := one_shard(self._items):
            self.notes.append(note)

    def narrow(self, names: Iterable[str]) -> None:
        """Measure some of the parameters alone from here on, inside a session.

        The others are constants: autograd keeps nothing of what comes before the first of `names`.
        """
        assert self._start is not None, "the session gives gradients back to the others"
        self.parameters = _choose(self.parameters, names)
        measured = {id(p) for p in self.parameters.values()}
        for p in self.model.parameters():
            if id(p) not in measured and p.requires_grad:
                p.requires_grad_(False)
        self.plans.clear()

    def _note_switches(self) -> None:
        """Say which modules do more than set a flag when they are put into evaluation mode."""
        own = [
            name or type(module).__name__
            for name, module in self.model.named_modules()
            if module.training
            and (type(module).train, type(module).eval) != (nn.Module.train, nn.Module.eval)
        ]
        note = (
            f"in training mode, with a train() or eval() of their own, which was not called: "
            f"{listed(own)}; call model.eval() first if they do more than set a flag"
        )
        if own and note not in self.notes:
            self.notes.append(note)

    def _answers(self, samples: int | None) -> list[Tensor]:
        """Outputs, and a user's loss, on the first samples, or on all of the first batch."""
        whole = next(self.batches(), None)
        if whole is None:
            return []  # of several ranks, one without samples

        def run(size: int) -> list[Tensor]:
            batch = whole.part(0, size)
            with torch.no_grad():
                outputs = self.forward(batch)
                call = getattr(self.loss, "call", self.loss)
                value = [scalar(call, outputs, batch.targets)] if callable(call) else []
            return [outputs, *value]

        return halving(run, min(samples or whole.size, whole.size))

    def batches(self) -> Iterator[Batch]:
        """One pass over the data, each batch on the model's device.

        Random generators are wound back first, so that every pass of a session sees the same
        samples in the same order, shuffled or not. That hides augmentation which draws from them:
        after the first full pass the data are therefore read once more from another random state,
        and must be the same samples. Only data held in a list or a tuple are not read twice, and
        what worker processes have read comes from memory after that, where it fits.
        """
        assert self._start is not None, "only inside a session"
        if self._passes > 0:
            self._start.restore()
        self._passes += 1
        count, tally = 0, Tally()
        for batch in self._announced(self._read(self._items, tally)):
            count += batch.size
            yield batch
        if self.gathering is not None:
            self.gathering.end(count)
        if not count and self.reduction.ranks == 1:
            raise DataError(_EMPTY)
        self._own = count
        if self.watched.end(tally) and not self._steady:
            again = Tally()
            for _ in self._read(second_reading(self._items, self._start), again):
                pass
            self._start.restore()
            self.watched.end(again)
            if isinstance(self._items, Kept):
                self._items.settle()

    def first(self) -> Batch:
        """The first batch of the data; of several ranks, the first samples of it."""
        if self.reduction.ranks == 1:
            return next(self.batches())
        return self._opened()[1]

    def some(self, samples: int) -> Batch:
        """A few samples of the first batch to look at, or all of it where the model cannot be run
        on a part, as on a part of a graph's nodes."""
        first = self.first()
        few = first.part(0, samples)
        if few.size == first.size or self.sharded:  # a pass that is not measured would gather
            return few
        try:
            with torch.no_grad():
                self.forward(few)
        except ModelError:
            return first  # which fails in the same way if it was not for the part
        return few

    def begun(self) -> tuple[Batch, Iterable[Batch]]:
        """The first batch of the data, and all of this process."""
        if self.reduction.ranks > 1:
            return self.first(), self.batches()
        batches = self.batches()
        first = next(batches)
        return first, chain([first], batches)

    @property
    def opens(self) -> bool:
        """Whether the first batch of the data is the first here."""
        return self.reduction.ranks == 1 or self._opened()[0] == self.reduction.rank

    def _opened(self) -> tuple[int, Batch]:
        """The first rank that has samples, and the first of them."""
        if self._first is None:
            own = self.reduction.each(self._begins)
            if not any(begins for begins, _ in own):
                raise DataError(_EMPTY)
            if {True, False} <= {shifted for _, shifted in own}:
                raise DataError(
                    "The labels are the inputs of the model on some ranks, where each is compared "
                    "with the next token, and not on others. Shift those of all ranks, or of none."
                )
            who = [begins for begins, _ in own].index(True)
            mine = who == self.reduction.rank
            told = self.reduction.each(lambda: self._shown(1, _SHOWN) if mine else [])
            self._first = who, told[who][0].on(self.device)
        return self._first

    def _begins(self) -> tuple[bool, bool | None]:
        """Whether there are samples here, and what their labels stand for."""
        return next(self.batches(), None) is not None, self._next_token

    def opening(self, count: int) -> Iterator[Batch]:
        """The first batches of the data, so many; of several ranks, as many samples of each."""
        if self.reduction.ranks == 1:
            return islice(self.batches(), count)
        told = self.reduction.each(lambda: self._shown(count, count))
        return (batch.on(self.device) for batch in islice(chain.from_iterable(told), count))

    def _shown(self, batches: int, samples: int) -> list[Batch]:
        """The first samples here, as they are sent to other ranks."""
        cpu = torch.device("cpu")
        return [b.part(0, samples).on(cpu) for b in islice(self.batches(), batches)]

    @property
    def offset(self) -> int:
        """How many samples there are on the ranks before this one."""
        return 0 if self.reduction.ranks == 1 else sum(self.sizes[: self.reduction.rank])

    @property
    def sizes(self) -> list[int]:
        """How many samples every rank has; that takes a pass, unless one was made."""
        self._sizes = self._sizes or self.reduction.each(self._length)
        return self._sizes

    def _length(self) -> int:
        if self._own is None:
            for _ in self.batches():
                pass
        assert self._own is not None
        return self._own

    def seen(self) -> Tally:
        """What a whole pass sees, on all ranks together; only where the data are watched."""
        parts = self.reduction.each(self._seen)
        if len(parts) > 1:
            sizes = " + ".join(str(part.samples) for part in parts)
            self.notes.append(f"over {len(parts)} ranks with {sizes} samples")
            if len({part.checksum for part in parts}) == 1:
                self.notes.append(
                    "every rank gave the same samples, so that each counts as often as there are "
                    "ranks: give each rank its own, by saltflat.ShardSampler"
                )
        return reduce(Tally.joined, parts)

    def _seen(self) -> Tally:
        if self.watched.first is None:  # nothing needed a whole pass
            for _ in self.batches():
                pass
        assert self.watched.first is not None, "they are watched"
        return self.watched.first

    def insist_on_one_rank(self, why: str) -> None:
        """Refuse to go on with several ranks where all samples must be together."""
        if self.reduction.ranks > 1:
            raise DataError(
                f"distributed=True cannot be used here: {why}, so that all samples must be in one "
                "process. Measure on one rank, with all data and without distributed=True."
            )

    def samples(self, first: Batch) -> int | None:
        """About how many there are, if the data tell their length."""
        if self._own is not None and self.reduction.ranks == 1:
            return self._own
        if isinstance(getattr(self._items, "dataset", None), IterableDataset):
            return None
        try:
            return length_hint(self._items) * first.size * self.reduction.ranks or None
        except NotImplementedError:  # a length of the user's, who has not written it
            return None

    def whole(self, first: Batch) -> int | None:
        """The same, but of several ranks exactly, and on all of them: ask on all."""
        return sum(self.sizes) if self.reduction.ranks > 1 else self.samples(first)

    def chunks(self, size: int | None) -> Iterator[Batch]:
        """The batches in portions of so many samples; all of them as one for None."""
        if size is None:
            self.insist_on_one_rank("outputs of a sample depend on the other samples of its batch")
            yield join(list(self.batches()))
            return
        for batch in self.batches():
            for start in range(0, batch.size, size):
                yield batch.part(start, start + size)

    def _read(self, items: Iterable[Any], tally: Tally) -> Iterator[Batch]:
        ranks = self.reduction
        whose = f" of rank {ranks.rank}" if ranks.ranks > 1 else ""
        for index, item in enumerate(items):
            batch = self._batch(item, f"batch {index}{whose}")
            if not batch.size:
                continue
            self.watched.see(tally, (batch.inputs, batch.targets), batch.size)
            yield batch

    def _announced(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same; of an error in reading them, processes that share the model are told."""
        try:
            yield from batches
        except Exception:
            if self.gathering is not None:
                self.gathering.leave()
            raise

    def forward(self, batch: Batch, mode: AbstractContextManager[Any] = _NO_MODE) -> Tensor:
        """The model's outputs, one row a sample, checked; the model runs in `mode`.

        What torch raises in the model becomes a `ForwardError`, which is a `RuntimeError` too; want
        of memory and errors of the user's own making pass as they are.
        """
        outputs = self._returned(batch, mode)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            raise ModelError(
                f"The outputs must be a floating point tensor. Got {summary(outputs)}; pass "
                "output= the name of the entry that is, or a callable."
            )
        if outputs.ndim == 0 or len(outputs) != batch.size:
            raise ModelError(
                f"The model's outputs must have one row a sample: {batch.size} in {batch.where}. "
                f"Got outputs of shape {tuple(outputs.shape)}; pass output= to choose others."
            )
        return outputs

    def _returned(self, batch: Batch, mode: AbstractContextManager[Any] = _NO_MODE) -> Any:
        inputs = batch.inputs
        try:
            with self._passing(batch), mode:
                return self.output(self._call(inputs))
        except Exception as error:
            if not ordinary(error):
                raise
            raise ForwardError(
                f"The model failed on {batch.where}, given {summary(inputs)}: "
                f"{type(error).__name__}: {error}{self._advice(str(error), inputs)}"
            ) from error

    def _call(self, inputs: Any, **options: Any) -> Any:
        try:
            if isinstance(inputs, Mapping):
                return self.model(**inputs, **options)
            return self.model(*((inputs,) if isinstance(inputs, Tensor) else inputs), **options)
        except BaseException as error:
            end_checkpoints(error)
            raise

    def _advice(self, words: str, inputs: Any) -> str:
        """What to do about dtypes that do not go together, if that is what torch complains of."""
        if not _DTYPES.search(words):
            return ""
        own = self.dtype or next(p.dtype for p in self.parameters.values())
        given = {t.dtype for t in tree_leaves(inputs) if isinstance(t, Tensor)} - {torch.bool}
        if "indices" in words:
            return "\nToken ids and other indices must be int64: convert them with .long()."
        if given and not any(dtype.is_floating_point for dtype in given):
            return (
                f"\nThe inputs are integers and the model computes in {own}: convert them, e.g. "
                "images by x.float() / 255."
            )
        if other := [d for d in given if d.is_floating_point and d != own]:
            return (
                f"\nThe inputs are {other[0]} and the model computes in {own}: convert them, or "
                f"pass dtype={other[0]} to compute in that."
            )
        return (
            f"\nThe model casts to another dtype in its forward pass and cannot be measured in "
            f"{own}: cast to that of the weights instead, as in x.to(self.weight.dtype), or pass "
            "dtype= the one that it computes in."
        )

    def check(self, outputs: Tensor, batch: Batch) -> None:
        """Refuse outputs that are not finite and targets that do not fit them."""
        if outputs.numel() and not all(map(isfinite, bounds(outputs))):
            raise DataError(self._blame(batch))
        if isinstance(self.loss, Loss):
            self.loss.check(outputs, batch.targets, batch.where)

    def _blame(self, batch: Batch) -> str:
        for leaf in tree_leaves(batch.inputs):
            if isinstance(leaf, Tensor) and not torch.isfinite(leaf).all():
                return f"The inputs of {batch.where} hold NaN or infinite values."
        return (
            f"The model's outputs on {batch.where} are NaN or infinite though weights and inputs "
            "are finite: it overflows. Measure it in a wider dtype (dtype=torch.float64)."
        )

    def _batch(self, item: Any, where: str) -> Batch:
        inputs, targets = self._split(item, where)
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        inputs = mapped(lambda leaf: self._place(leaf, f"inputs of {where}"), inputs)
        targets = mapped(lambda leaf: self._place(leaf, f"targets of {where}"), targets)
        inputs = with_decoder_inputs(self.model, inputs, targets)
        size = size_of(inputs, targets, where)
        if size == 0 and self.reduction.ranks == 1:
            raise DataError(f"There are no samples in {where}.")
        lists = with_entries(inputs, size), with_entries(targets, size)
        leaves = [leaf for part in lists for leaf in leaves_of(part)]
        if self._leaves is None:
            self._leaves = len(leaves)
        if len(leaves) == self._leaves:
            inputs, targets = lists
        else:  # there are as many samples as shared numbers
            leaves = [*leaves_of(inputs), *leaves_of(targets)]
        rows = self._rows(leaves, size, where)
        return self._as_the_model_does(Batch(inputs, targets, size, where, rows))

    def _as_the_model_does(self, batch: Batch) -> Batch:
        """The batch with the labels of the next token, where the model itself shifts them.

        That is asked of the first batch that tells: one with labels that are its own inputs, but
        for those that are ignored.
        """
        loss, labels, tokens = self.loss, batch.targets, token_ids(batch.inputs)
        if not isinstance(loss, CrossEntropy) or not isinstance(labels, Tensor) or tokens is None:
            return batch
        if labels.shape != tokens.shape or self._next_token is False:
            return batch
        counts = labels != loss.ignore_index
        if not counts[:, 1:].any():
            return batch
        own = bool((labels == tokens)[counts].all())
        if self._next_token is None:
            self._next_token = own and self._shifts_labels(batch, counts)
            self.notes += [_NEXT_TOKEN] if self._next_token else []
        elif not own:
            raise DataError(
                f"The labels of {batch.where} are not its inputs, as those of the batches before "
                "were, which are compared with the next token. Shift the labels of all batches, or "
                "of none."
            )
        shifted = next_token(labels, loss.ignore_index) if self._next_token else labels
        return replace(batch, targets=shifted)

    def _shifts_labels(self, batch: Batch, counts: Tensor) -> bool:
        """Whether the model's own loss compares every position with the label of the next."""
        config = getattr(self.model, "config", None)
        if not hasattr(self.model, "loss_type") and not getattr(config, "is_decoder", False):
            return False
        first = int(counts[:, 1:].any(1).int().argmax())
        one = batch.part(first, first + 1)
        with torch.no_grad():
            answer = self._call(one.inputs, labels=one.targets)
        return compares_next(answer["loss"], answer["logits"], one.targets)

    def _rows(self, leaves: Sequence[Any], size: int, where: str) -> tuple[bool, ...]:
        """Which leaves hold one row a sample: those that are as long as every batch that is read.

        One batch may have as many samples as something that they share has entries.
        """
        long = [has_rows(leaf, size) for leaf in leaves]
        for k, (leaf, yes) in enumerate(zip(leaves, long, strict=True)):
            if not yes and self._counted.get(k, where) != where:
                raise DataError(
                    f"Part {k} of a batch has one row for each sample in {self._counted[k]}, but "
                    f"not in {where}, where it is {summary(leaf)} for {size} samples. If all "
                    "samples share it, pass first a batch of another size, or hold it in the model."
                )
            if not yes:
                self._shared.add(k)
            elif size > 1 and k not in self._shared:
                self._counted.setdefault(k, where)
        return tuple(yes and k not in self._shared for k, yes in enumerate(long))

    def _split(self, item: Any, where: str) -> tuple[Any, Any]:
        try:
            pair = self._unpack(item)
        except Exception as error:
            if not ordinary(error):
                raise
            raise DataError(
                f"unpack failed on {where}, given {summary(item)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"unpack must return (inputs, targets). Got {summary(pair)}.")
        return pair[0], pair[1]

    def _place(self, leaf: Any, what: str) -> Any:
        """A tensor or numpy array, on the model's device and in the dtype of the computation."""
        if isinstance(leaf, np.ndarray):
            leaf = _from_numpy(leaf, what)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            raise DataError(f"The {what} are meta tensors, which have no values.")
        if leaf.grad_fn is not None:
            leaf = self._constant(leaf, what)
        if leaf.is_inference():
            leaf = leaf.clone()  # autograd cannot save an inference tensor
        floating = self.dtype is not None and leaf.is_floating_point()
        placed = leaf.to(self.device, self.dtype if floating else None)
        # A loader may write its next batch to the same memory.
        return placed.clone() if placed is leaf and not self._steady else placed

    def _constant(self, leaf: Tensor, what: str) -> Tensor:
        """The tensor without its graph, which must not come from the measured parameters."""
        if names := reached_from(leaf, self.parameters):
            raise DataError(
                f"The {what} are computed from parameters that are measured: {listed(names)}. "
                "Data are constants: compute them under torch.no_grad(), or inside the model."
            )
        return leaf.detach()


def _comes_so_far() -> None:
    """Where a rank has failed before, all stop."""


_EMPTY = "The data are empty: there is no batch to measure."
_TAKEN = "buffers that differ between ranks were taken from rank 0: "
_SHOWN = 32  # samples of one rank that all ranks look at

# How torch says that dtypes do not go together, in its many operations.
_DTYPES = re.compile(r"dtype|scalar type|data type|[Ii]nput type|not implemented for '|same type")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, DataParallel and DistributedDataParallel."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"The model must be a torch.nn.Module. {_instead(model)}")
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, parallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return model


def _instead(given: Any) -> str:
    """What was given for a model, and what to do about it."""
    got = f"Got {type(given).__name__}"
    if isinstance(given, type):
        return f"Got the class {given.__name__}; pass an instance, {given.__name__}(…)."
    if isinstance(given, DataLoader | Tensor | np.ndarray | Dataset):
        return f"{got}; the model comes first, then the data."
    if isinstance(given, Mapping) and any(isinstance(v, Tensor) for v in given.values()):
        return f"{got} of weights; make the model and call its load_state_dict."
    if isinstance(given, list | tuple | Mapping) and given:
        items = given.values() if isinstance(given, Mapping) else given
        if all(isinstance(each, nn.Module) for each in items):
            return f"{got} of models; saltflat.compare takes several, by name."
        return f"{got}; the model comes first, then the data."
    if isinstance(given, str | PathLike):
        return f"{got} {str(given)!r}; make the model and load its weights first."
    return f"{got}."


def split_item(item: Any) -> tuple[Any, Any]:
    """A batch as it comes from the data: `(inputs, targets)`, or a dict with `labels`."""
    if isinstance(item, Mapping):
        if "labels" not in item:
            raise DataError(
                "A batch that is a dict needs the key 'labels'. Got "
                f"{sorted(map(str, item))}; pass unpack=lambda item: (inputs, targets)."
            )
        return {k: v for k, v in item.items() if k != "labels"}, item["labels"]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, str):
        raise DataError(
            "A batch must be (inputs, targets) or a dict with 'labels', of tensors. Got the text "
            f"{item[:40]!r}; make tensors of texts first, e.g. by a tokenizer."
        )
    raise DataError(
        "A batch must be (inputs, targets) or a dict with 'labels'. Got "
        f"{type(item).__name__}"
        + (f" of length {len(item)}" if isinstance(item, tuple | list) else "")
        + "; pass unpack=lambda item: (inputs, targets)."
    )


_NEXT_TOKEN = (
    "the labels are the inputs of a causal model: every position is compared with the next token, "
    "as in the model's own loss"
)


def token_ids(inputs: Any) -> Tensor | None:
    """The tokens among a model's inputs, if it has them."""
    ids: Any = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    whole = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.ndim == 2
    return ids if whole else None


def next_token(labels: Tensor, ignored: int = -100) -> Tensor:
    """The label of the next position for every position; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=ignored)


def compares_next(loss: Tensor, outputs: Tensor, labels: Tensor) -> bool:
    """Whether a model's own loss compares the outputs of a position with the label of the next."""
    shifted, plain = (
        abs(float(F.cross_entropy(outputs.detach().flatten(0, 1), each.flatten()) - loss.detach()))
        for each in (next_token(labels), labels)
    )
    return shifted < plain


def with_decoder_inputs(model: nn.Module, inputs: Any, labels: Any) -> Any:
    """The inputs of an encoder-decoder, with those of its decoder, which it makes of the labels."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    given = ("decoder_input_ids", "decoder_inputs_embeds")
    whole = not isinstance(inputs, dict) or any(inputs.get(name) is not None for name in given)
    if prepare is None or whole or not isinstance(labels, Tensor) or labels.ndim != 2:
        return inputs
    return {**inputs, given[0]: prepare(labels=labels)}


def logits(raw: Any) -> Tensor:
    """The tensor in what a model returned: itself, `.logits` or `["logits"]`."""
    if isinstance(raw, Tensor):
        return raw
    found = raw.get("logits") if isinstance(raw, Mapping) else getattr(raw, "logits", None)
    if isinstance(found, Tensor):
        return found
    names = _names_in(raw)
    held = f" It holds {listed(map(repr, names))}." if names else ""
    raise ModelError(
        f"The model returned {type(raw).__name__}, which is neither a tensor nor has logits.{held} "
        "Pass output= to choose the outputs, by name or by a callable"
        + (f", e.g. output={names[0]!r}." if names else ".")
    )


@dataclass(frozen=True)
class Entry:
    """Chooses the outputs by their name in what a model returned: a key, an attribute, a place."""

    name: str | int

    def __call__(self, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            with suppress(LookupError, TypeError):  # those of transformers also have places
                return raw[self.name]
        elif isinstance(raw, tuple | list) and (place := _integer(self.name)) is not None:
            with suppress(IndexError):
                return raw[place]
        elif isinstance(self.name, str) and not isinstance(raw, Tensor):
            chosen = getattr(raw, self.name, None)
            if chosen is not None and not callable(chosen):
                return chosen
        raise ModelError(
            f"output: the model returned {type(raw).__name__}, which has no {self.name!r}. "
            + self._advice(raw)
        )

    def _advice(self, raw: Any) -> str:
        if isinstance(raw, Tensor):
            return "It is the outputs: leave out output=."
        names = _names_in(raw)
        close = get_close_matches(str(self.name), map(str, names), n=1)
        held = f"It holds {listed(map(repr, names))}" if names else "It holds nothing with a name"
        return f"{held}; nearest is {close[0]!r}." if close else f"{held}."


def _integer(name: str | int) -> int | None:
    """The place that a name says, also in digits, as it comes from a command line."""
    if isinstance(name, int):
        return name
    return int(name) if name.removeprefix("-").isdecimal() else None


def _names_in(raw: Any) -> list[Any]:
    """By what the parts of something that a model returned are chosen."""
    if isinstance(raw, Tensor):
        return []
    if isinstance(raw, Mapping):
        return list(raw)
    if isinstance(raw, tuple | list):
        return list(getattr(raw, "_fields", range(len(raw))))
    if is_dataclass(raw):
        return [field.name for field in fields(raw)]
    return [name for name in getattr(raw, "__dict__", ()) if not name.startswith("_")]


def answer_of(output: Output | None) -> Chooser:
    """What takes the outputs out of what a model returned: by a name, a callable, or `logits`."""
    if output is None:
        return logits
    if isinstance(output, str | int) and not isinstance(output, bool):
        return Entry(output)
    if not callable(output):
        raise InvalidType(
            "output must be the name of an entry or attribute of what the model returned, the "
            f"place in a tuple, or a callable that is given what it returned. Got {output!r}."
        )
    return output


def items_of(data: Any) -> Iterable[Any]:
    """The data as something that can be iterated again and again."""
    if isinstance(data, Tensor | np.ndarray):
        kind = type(data).__name__
        raise InvalidType(f"The data need targets too. Got one {kind}; pass (inputs, targets).")
    if isinstance(data, nn.Module):
        raise InvalidType(
            "The data must be a DataLoader, a pair (inputs, targets) or a list of such pairs. Got "
            f"the module {type(data).__name__}; the model comes first, then the data."
        )
    if isinstance(data, str | PathLike):
        raise InvalidType(
            "The data must be a DataLoader, a pair (inputs, targets) or a list of such pairs. Got "
            f"{str(data)!r}; load what is there first."
        )
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, tuple) and len(data) > 2 and all(isinstance(t, Tensor) for t in data):
        raise InvalidType(
            f"The data must be a pair (inputs, targets). Got {len(data)} tensors; several inputs "
            "are a tuple themselves: ((a, b), targets)."
        )
    pair = isinstance(data, tuple | list) and len(data) == 2
    if pair and any(isinstance(part, Tensor | np.ndarray) for part in data):
        return [tuple(data)]
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _loader(data)
    if isinstance(data, Iterator):
        raise InvalidType(
            f"The data must be iterable more than once. Got {type(data).__name__}, which can be "
            "read only once; pass list(data), or the DataLoader itself."
        )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise InvalidType(
            "The data must be a DataLoader, a pair (inputs, targets) or a list of such pairs. "
            f"Got {type(data).__name__}."
        )
    items: Iterable[Any] = data
    return items


def _loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    """A dataset that comes without a loader, in batches."""
    if not hasattr(dataset, "__len__"):
        raise InvalidType(
            f"A dataset must have a length to be read. {type(dataset).__name__} has none; pass a "
            "DataLoader with a sampler."
        )
    return DataLoader(dataset, batch_size=_DATASET_BATCH, collate_fn=_collated)


_DATASET_BATCH = 128  # samples


def _collated(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"The samples of the dataset do not make a batch: {error}. Got {summary(samples[0])} "
            "as the first; pass a DataLoader with a collate_fn."
        ) from error


def _from_numpy(array: np.ndarray[Any, Any], what: str) -> Tensor:
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except TypeError as error:
        raise DataError(
            f"The {what} are a numpy array that cannot be a tensor. Got dtype {array.dtype}; "
            "convert it to numbers."
        ) from error


def size_of(inputs: Any, targets: Any, where: str) -> int:
    leaves = [t for t in leaves_of(inputs) if isinstance(t, Tensor) and t.ndim > 0]
    if not leaves:
        raise DataError(f"The inputs of {where} hold no tensor with a sample dimension.")
    if isinstance(targets, Tensor) and targets.ndim > 0:
        size = len(targets)
        if all(len(t) != size for t in leaves):
            raise DataError(
                f"Inputs and targets of {where} do not fit: the first dimension must be the "
                f"samples. Got inputs of {[tuple(t.shape) for t in leaves]} and targets of "
                f"{tuple(targets.shape)}."
            )
    else:
        size = len(leaves[0])
    return size


def _choose(
    everything: dict[str, nn.Parameter], choice: str | Iterable[str]
) -> dict[str, nn.Parameter]:
    if choice == "all":
        chosen = everything
    elif choice == "trainable":
        chosen = {n: p for n, p in everything.items() if p.requires_grad}
        if everything and not chosen:
            raise ModelError(
                "Every parameter of the model is frozen (requires_grad=False), so there is "
                "nothing to measure. Pass parameters='all' to measure them all the same."
            )
    elif isinstance(choice, str):
        raise InvalidValue(
            "parameters must be 'trainable', 'all' or a list of parameter names. "
            f"Got {choice!r}; for one parameter pass [{choice!r}]."
        )
    else:
        names: list[Any] = list(choice)
        for name in names:
            if not isinstance(name, str):
                own = next((n for n, p in everything.items() if p is name), "fc.weight")
                raise InvalidType(
                    f"parameters are chosen by name. Got a {type(name).__name__}; pass [{own!r}]."
                )
            if name not in everything:
                inside = [each for each in everything if each.startswith(f"{name}.")]
                hint = f"It is a module: pass {inside}." if inside else nearest(name, everything)
                raise InvalidValue(f"Unknown parameter {name!r}. {hint}")
        chosen = {n: p for n, p in everything.items() if n in names}
    if not chosen:
        raise ModelError("There are no parameters to measure.")
    return chosen


def check_parameters(everything: Mapping[str, Tensor], measured: set[str]) -> None:
    refuse_flattened(everything.values())
    for name, p in everything.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(f"Parameter {name!r} is lazy: run the model once before measuring.")
        if problem := _problem(p, name in measured):
            raise ModelError(f"Parameter {name!r} cannot be measured: it is {problem}.")


def _problem(p: Tensor, measured: bool) -> str:
    """What is wrong with a parameter, if something is."""
    if p.is_meta:
        return "a meta tensor without values"
    if not measured:
        return ""
    if p.is_quantized:
        return "quantised"
    if p.is_complex():
        return "complex"
    if not p.is_floating_point():
        return f"of dtype {p.dtype}, which has no derivatives"
    if p.is_inference():
        return (
            "an inference tensor, which autograd cannot use; make the model outside of "
            "torch.inference_mode()"
        )
    return ""


def _check_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(f"Buffer {name!r} is a meta tensor without values: load the model.")


def _hold_fixed(loss: Loss, measured: Mapping[str, Tensor]) -> None:
    """Take the tensors of a loss (class weights) for constants, which they must be."""
    for name, value in vars(loss).items():
        if isinstance(value, Tensor):
            if any(value is p for p in measured.values()) or value.grad_fn is not None:
                refuse_parameters(loss.name, value, measured)
            setattr(loss, name, value.detach())


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    parameters = {n: total_norm([p]) if is_sharded(p) else p for n, p in parameters.items()}
    alike: dict[Any, list[Tensor]] = {}
    for p in parameters.values():
        if p.is_floating_point():
            alike.setdefault((p.dtype, p.device), []).append(p.detach())
    # Norms are one launch and one answer from a GPU; if one overflows, look again.
    norms = (torch.stack(torch._foreach_norm(each)).tolist() for each in alike.values())
    if all(map(isfinite, chain.from_iterable(norms))):
        return
    for name, p in parameters.items():
        if p.is_floating_point() and not torch.isfinite(p).all():
            raise ModelError(f"Parameter {name!r} holds NaN or infinite values.")


def _compute_dtype(parameters: Iterable[Tensor], asked: torch.dtype | None) -> torch.dtype | None:
    """The dtype to convert to, or None to compute in the model's own: half precision is widened."""
    if asked is not None:
        if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
            hint = "; pass torch.float32 or torch.float64" if isinstance(asked, str) else ""
            raise InvalidValue(f"dtype must be a floating point dtype. Got {asked!r}{hint}.")
        return asked
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters)
    return torch.float32 if half else None
