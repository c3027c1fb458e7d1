"""What experiments with partly random labels share: their data, their batches, and what is tested.

All of it follows from a network's own seed, whatever other networks are trained beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saltflat.datasets import Data, cifar10, mnist, noisy

RATIOS = tuple(k / 10 for k in range(11))  # of labels that are random
_SOURCES = {"mnist": mnist, "cifar10": cifar10}
_CLASSES = 10
_CHUNK = 5_000


@lru_cache(maxsize=4)
def images(name: str, train: int, test: int, device: torch.device) -> Data:
    """So many images, scaled to [-1, 1]; the labels as they are."""
    return _SOURCES[name]().first(train, test).scaled(-1, 1).to(device)


def with_noise(data: Data, ratio: float, seed: int, how: str = "permute") -> Data:
    """The labels of a random part of the training set made random; the test set as it is."""
    return data._replace(train_y=noisy(data.train_y, ratio, seed, classes=_CLASSES, how=how))


def started(make: Callable[[], nn.Module], seed: int, device: torch.device) -> nn.Module:
    """A network with the weights that the seed gives on every device."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return make().to(device)


class Order:
    """The samples of every member's batch at every step: each epoch in a new order.

    Members of one seed see the same order. What is left over at an epoch's end is dropped.
    """

    def __init__(
        self, seeds: Sequence[int], samples: int, batch: int, device: torch.device
    ) -> None:
        self.seeds, self.samples, self.batch, self.device = seeds, samples, batch, device
        self.epoch_steps = samples // batch
        self.generators = {seed: torch.Generator().manual_seed(seed) for seed in seeds}
        self.rows = torch.empty(0)

    def __call__(self, step: int) -> Tensor:
        """(members, batch); to be asked for one step after the other."""
        place = step % self.epoch_steps
        if place == 0:
            drawn = {
                s: torch.randperm(self.samples, generator=g) for s, g in self.generators.items()
            }
            self.rows = torch.stack([drawn[seed] for seed in self.seeds]).to(self.device)
        return self.rows[:, place * self.batch : (place + 1) * self.batch]


def scores(model: nn.Module, data: Data) -> dict[str, float]:
    """Loss and accuracy in training and test, their gap, and whether the network has collapsed.

    It has where it gives all training samples one label, or where its loss is not finite.
    """
    train = _Tally(model, data.train_x, data.train_y)
    test = _Tally(model, data.test_x, data.test_y)
    return {
        "train_loss": train.loss,
        "test_loss": test.loss,
        "train_accuracy": train.accuracy,
        "test_accuracy": test.accuracy,
        "gap": train.accuracy - test.accuracy,
        "collapsed": float(train.constant or not train.finite),
    }


class _Tally:
    @torch.no_grad()
    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        outputs = torch.cat(list(_outputs(model.eval(), x)))
        labels = outputs.argmax(1)
        self.loss = float(F.cross_entropy(outputs, y))
        self.accuracy = float((labels == y).float().mean())
        self.constant = bool((labels == labels[0]).all())
        self.finite = bool(outputs.isfinite().all())


def _outputs(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    for part in x.split(_CHUNK):
        yield model(part)
