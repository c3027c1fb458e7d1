"""Risk: the thing that is differentiated. A model, its data and a loss, as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.errors import DataError, InvalidType, InvalidValue, ModelError, nearest
from saltflat.losses import JointLoss, Loss, LossLike, resolve, scalar
from saltflat.session import RandomState, lend, modules_in
from saltflat.watch import Tally, Watch

Unpack = Callable[[Any], tuple[Any, Any]]
Output = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets of `size` samples; `where` says which they are in an error message."""

    inputs: Any
    targets: Any
    size: int
    where: str

    def part(self, start: int, stop: int) -> Batch:
        """The samples from `start` to `stop`; what is not per sample stays as it is."""
        if start == 0 and stop >= self.size:
            return self

        def cut(leaf: Any) -> Any:
            per_sample = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == self.size
            return leaf[start:stop] if per_sample else leaf

        inputs, targets = tree_map(cut, (self.inputs, self.targets))
        return Batch(inputs, targets, min(stop, self.size) - start, self.where)


def join(batches: Sequence[Batch]) -> Batch:
    """One batch that holds the samples of all."""
    if len(batches) == 1:
        return batches[0]
    sizes = [b.size for b in batches]

    def cat(*leaves: Any) -> Any:
        per_sample = all(
            isinstance(t, Tensor) and t.ndim > 0 and len(t) == size
            for t, size in zip(leaves, sizes, strict=True)
        )
        return torch.cat(leaves) if per_sample else leaves[0]

    inputs, targets = tree_map(cat, *[(b.inputs, b.targets) for b in batches])
    return Batch(inputs, targets, sum(sizes), "all batches")


@final
class Risk:
    """What `loss` would return on one batch that holds all of `data`, in evaluation mode.

    Attributes
    ----------
    parameters : the measured parameters by name, in `named_parameters` order.
    frozen : names of the parameters that are not measured because they do not require gradients.
    """

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
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidType(f"The model must be a torch.nn.Module. Got {type(model).__name__}.")
        self.model = unwrap(model)
        self.loss: Loss | JointLoss | Callable[..., Tensor] = resolve(loss)
        self._items = _items(data)
        self._unpack = unpack or split_item
        self.output = output or logits
        everything = dict(self.model.named_parameters())
        self.parameters = _choose(everything, parameters)
        check_parameters(everything, set(self.parameters))
        measured = {id(p) for p in self.parameters.values()}
        self.frozen = tuple(
            n for n, p in everything.items() if id(p) not in measured and not p.requires_grad
        )
        self.dtype = _compute_dtype(everything.values(), dtype)
        self.device = next(iter(self.parameters.values())).device
        check_finite(everything)
        self.watched = Watch()
        self._start: RandomState | None = None
        self._passes = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        """The context in which the model may be run; it leaves everything as it was found."""
        self._start = RandomState(self._items, self.device)
        self._passes = 0
        measured = {id(p) for p in self.parameters.values()}
        beside = modules_in(getattr(self.loss, "call", self.loss))
        lent = partial(lend, self.model, measured, self.dtype, beside)
        try:
            with lent() as loan:
                yield
            loan.check_steady(lent, self._answers)
        finally:
            self._start.restore()

    def _answers(self, samples: int | None) -> list[Tensor]:
        """Outputs, and a user's loss, on the first samples, or on all of the first batch."""
        whole = next(self.batches())
        batch = whole.part(0, samples or whole.size)
        with torch.no_grad():
            outputs = self.forward(batch)
            call = getattr(self.loss, "call", self.loss)
            value = [scalar(call, outputs, batch.targets)] if callable(call) else []
        return [outputs, *value]

    def batches(self) -> Iterator[Batch]:
        """One pass over the data, each batch on the model's device.

        Random generators are wound back first, so that every pass of a session sees the same
        samples in the same order, shuffled or not.
        """
        assert self._start is not None, "only inside a session"
        if self._passes > 0:
            self._start.restore()
        self._passes += 1
        empty = True
        tally = Tally()
        for index, item in enumerate(self._items):
            empty = False
            inputs, targets = self._unpack(item)
            batch = self._batch(inputs, targets, f"batch {index}")
            self.watched.see(tally, (batch.inputs, batch.targets), batch.size)
            yield batch
        if empty:
            raise DataError("The data are empty: there is no batch to measure.")
        self.watched.end(tally)

    def forward(self, batch: Batch) -> Tensor:
        """The model's outputs, one row a sample, checked."""
        inputs = batch.inputs
        if isinstance(inputs, Tensor):
            raw = self.model(inputs)
        elif isinstance(inputs, Mapping):
            raw = self.model(**inputs)
        else:
            raw = self.model(*inputs)
        outputs = self.output(raw)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            raise ModelError("The outputs must be a floating point tensor; pass output=callable.")
        if outputs.ndim == 0 or len(outputs) != batch.size:
            raise ModelError(
                f"The model's outputs must have one row a sample: {batch.size} in {batch.where}. "
                f"Got outputs of shape {tuple(outputs.shape)}; pass output=callable to choose them."
            )
        return outputs

    def check(self, outputs: Tensor, batch: Batch) -> None:
        """Refuse outputs that are not finite and targets that do not fit them."""
        if not torch.isfinite(outputs).all():
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

    def _batch(self, inputs: Any, targets: Any, where: str) -> Batch:
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        size = _size(inputs, targets, where)

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.is_inference():
                leaf = leaf.clone()  # autograd cannot save an inference tensor
            floating = self.dtype is not None and leaf.is_floating_point()
            return leaf.to(self.device, self.dtype if floating else None)

        inputs, targets = tree_map(place, (inputs, targets))
        return Batch(inputs, targets, size, where)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, DataParallel and DistributedDataParallel."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, parallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return model


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
    raise DataError(
        "A batch must be (inputs, targets) or a dict with 'labels'. Got "
        f"{type(item).__name__}"
        + (f" of length {len(item)}" if isinstance(item, tuple | list) else "")
        + "; pass unpack=lambda item: (inputs, targets)."
    )


def logits(raw: Any) -> Tensor:
    """The tensor in what a model returned: itself, `.logits` or `["logits"]`."""
    if isinstance(raw, Tensor):
        return raw
    found = raw.get("logits") if isinstance(raw, Mapping) else getattr(raw, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise ModelError(
        f"The model returned {type(raw).__name__}, which is neither a tensor nor has logits. "
        "Pass output=callable to choose the outputs, e.g. output=lambda out: out[0]."
    )


def _items(data: Any) -> Iterable[Any]:
    """The data as something that can be iterated again and again."""
    if isinstance(data, Tensor):
        raise InvalidType("The data need targets too. Got one tensor; pass (inputs, targets).")
    if isinstance(data, Mapping):
        return [data]
    if (
        isinstance(data, tuple | list)
        and len(data) == 2
        and any(isinstance(part, Tensor) for part in data)
    ):
        return [tuple(data)]
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


def _size(inputs: Any, targets: Any, where: str) -> int:
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim > 0]
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
    if size == 0:
        raise DataError(f"There are no samples in {where}.")
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
        names = list(choice)
        for name in names:
            if name not in everything:
                raise InvalidValue(f"Unknown parameter {name!r}. {nearest(name, everything)}")
        chosen = {n: p for n, p in everything.items() if n in names}
    if not chosen:
        raise ModelError("There are no parameters to measure.")
    return chosen


def check_parameters(everything: Mapping[str, Tensor], measured: set[str]) -> None:
    for name, p in everything.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(f"Parameter {name!r} is lazy: run the model once before measuring.")
        problem = (
            "a meta tensor without values"
            if p.is_meta
            else None
            if name not in measured
            else "quantised"
            if p.is_quantized
            else "complex"
            if p.is_complex()
            else f"of dtype {p.dtype}, which has no derivatives"
            if not p.is_floating_point()
            else "an inference tensor, which autograd cannot use; make the model outside of "
            "torch.inference_mode()"
            if p.is_inference()
            else None
        )
        if problem:
            raise ModelError(f"Parameter {name!r} cannot be measured: it is {problem}.")


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    alike: dict[Any, list[Tensor]] = {}
    for p in parameters.values():
        if p.is_floating_point():
            alike.setdefault((p.dtype, p.device), []).append(p.detach())
    # Norms are one launch and one answer from a GPU; if one overflows, look again.
    if all(torch.stack(torch._foreach_norm(each)).isfinite().all() for each in alike.values()):
        return
    for name, p in parameters.items():
        if p.is_floating_point() and not torch.isfinite(p).all():
            raise ModelError(f"Parameter {name!r} holds NaN or infinite values.")


def _compute_dtype(parameters: Iterable[Tensor], asked: torch.dtype | None) -> torch.dtype | None:
    """The dtype to convert to, or None to compute in the model's own: half precision is widened."""
    if asked is not None:
        if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
            raise InvalidValue(f"dtype must be a floating point dtype. Got {asked}.")
        return asked
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters)
    return torch.float32 if half else None
