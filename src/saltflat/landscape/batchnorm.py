"""Batch normalisation: batch statistics in evaluation mode, and which units feed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from saltflat.errors import DataError
from saltflat.landscape.spheres import Filters

_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training")


@final
class BatchStatistics(TorchFunctionMode):
    """Every batch normalisation in a forward pass takes the statistics of the batch.

    The running statistics are not handed on, so they stay as they are. Whoever calls
    `F.batch_norm` is seen, a user's own module too.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        names = (*_BATCH_NORM, "momentum", "eps")
        bound = dict(zip(names, args, strict=False)) | kwargs
        x = bound["input"]
        if x.numel() == x.shape[1]:
            raise DataError(
                f"BatchNorm sees one value a channel in {self.where}, which has no spread. Batch "
                "statistics need two samples or more; leave that batch out or make it larger."
            )
        return func(**bound | {"running_mean": None, "running_var": None, "training": True})


@contextmanager
def batch_mode(model: nn.Module) -> Iterator[None]:
    """Torch's BatchNorm modules take the statistics of the batch, and keep no record of them.

    For the backward pass: checkpointing runs the model again there, unseen by a function mode.
    """
    modules = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [(m, m.running_mean, m.running_var) for m in modules]
    try:
        # Not by training mode, in which SyncBatchNorm waits for other processes.
        for m in modules:
            m.running_mean = m.running_var = None
        yield
    finally:
        for m, mean, variance in before:
            m.running_mean, m.running_var = mean, variance


_UNITS: dict[Any, int] = {  # operation -> dimension of its output units
    F.linear: -1,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), 1),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1),
}

# What hands entries on, each as it is or times a number that is not its unit's.
_PASSING = frozenset(
    {
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "clone",
        "cat",
        "concat",
        "concatenate",
        "chunk",
        "split",
        "narrow",
        "select",
        "__getitem__",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
    }
)


@final
class Feeds(TorchFunctionMode):
    """Watch a forward pass and find the units whose output goes to BatchNorm and nowhere else.

    Every output of a layer is accompanied by the numbers of its units, a tensor of the same
    shape, and what passes entries on is carried out on the numbers too. A unit counts if it has
    channels of BatchNorm to itself and is used by nothing else; scaling its weights by a > 0 then
    changes nothing, whatever its bias.
    """

    def __init__(self, filters: Mapping[str, Filters], *, training: bool = False) -> None:
        """`filters`: of every weight. `training`: running statistics do not count."""
        super().__init__()
        self.training = training
        self.paused = False  # while something runs whose own calls do not count
        self.ranges: dict[str, range] = {}  # parameter -> the numbers of its units
        self.weights: dict[int, range] = {}  # the same by the id of the parameter
        count = 1  # 0: not the output of a layer
        for name, f in filters.items():
            self.ranges[name] = self.weights[id(f.weight)] = range(count, count + f.count)
            count += f.count
        self.fed = torch.zeros(count, dtype=torch.bool)
        self.elsewhere = torch.zeros(count, dtype=torch.bool)
        self.numbers: dict[int, Tensor] = {}
        self.alive: list[Any] = []  # an id is good as long as its tensor lives

    def units(self) -> dict[str, Tensor]:
        """For every layer, by parameter: which of its units feed BatchNorm."""
        good = self.fed & ~self.elsewhere
        return {name: good[r.start : r.stop] for name, r in self.ranges.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.paused or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            return output  # the latter: a shape, a flag
        name = getattr(func, "__name__", "")
        if func in _UNITS:
            self._layer(func, args, kwargs, output)
        elif func is F.batch_norm:
            bound = dict(zip(_BATCH_NORM, args, strict=False)) | kwargs
            x = bound.pop("input")
            if self.training and not bound.get("training", False):
                self.use(x)
            else:
                self.normalise(x)
            self.use(bound)
        elif name in _PASSING:
            self._pass_on(func, args, kwargs, output)
        else:
            self.use((args, kwargs))
        return output

    def _layer(self, func: Any, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> None:
        bound = {name: args[k] for k, name in enumerate(("input", "weight")[: len(args)])} | kwargs
        self.use([args[2:], {k: v for k, v in kwargs.items() if k != "weight"}, bound["input"]])
        known = self.weights.get(id(bound["weight"]))
        if known is None:
            return
        dim = _UNITS[func]
        units = torch.arange(known.start, known.stop, device=output.device)
        shape = [1] * output.ndim
        shape[dim] = -1
        self._keep(output, units.view(shape).expand(output.shape))

    def normalise(self, x: Tensor) -> None:
        """BatchNorm takes this."""
        numbers = self.numbers.get(id(x))
        if numbers is None:
            return
        for dim in range(numbers.ndim):
            if dim != 1 and numbers.stride(dim) == 0:  # the same along it: one will do
                numbers = numbers.narrow(dim, 0, 1)
        channels = numbers.movedim(1, 0).flatten(1).cpu()
        alone = (channels == channels[:, :1]).all(1)
        self.fed[channels[alone, 0]] = True
        self.elsewhere[channels[~alone].flatten()] = True
        self.fed[0] = self.elsewhere[0] = False

    def _pass_on(self, func: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        if not any(id(leaf) in self.numbers for leaf in leaves):
            self.use((args, kwargs))
            return
        if "dropout" in func.__name__:
            self._keep(output, self.numbers[id(args[0] if args else kwargs["input"])])
            return

        def number(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            other = torch.zeros((), dtype=torch.int64, device=leaf.device).expand(leaf.shape)
            return self.numbers.get(id(leaf), other)

        moved = func(*tree_map(number, args), **tree_map(number, kwargs))
        for out, numbers in zip(tree_leaves(output), tree_leaves(moved), strict=True):
            self._keep(out, numbers)

    def _keep(self, output: Tensor, numbers: Tensor) -> None:
        self.alive.append(output)
        self.numbers[id(output)] = numbers

    def use(self, arguments: Any) -> None:
        """Something else takes these: their units are not BatchNorm's alone."""
        for leaf in tree_leaves(arguments):
            if id(leaf) in self.numbers:
                self.elsewhere[self.numbers[id(leaf)].flatten().cpu()] = True
            elif id(leaf) in self.weights:
                numbers = self.weights[id(leaf)]
                self.elsewhere[numbers.start : numbers.stop] = True
        self.elsewhere[0] = False
