"""The experiments of the FAM paper: what is run, on little data, and what is made of it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

import saltflat as sf
from saltflat import zoo
from saltflat.datasets import RTE, Data, Pairs
from saltflat.measures import RelativeFlatness
from saltflat.papers import EXPERIMENTS, reproduce
from saltflat.papers.columns import (
    differences,
    label_decades,
    largest,
    mean_and_error,
    mean_row,
)
from saltflat.papers.relative_flatness import figure_4, figure_5, table_1, table_2, table_3
from saltflat.papers.relative_flatness.shapes import synthetic_shapes
from saltflat.papers.trained import last_linear
from saltflat.sweep import Run, Settings

CPU = torch.device("cpu")


def test_means_and_paired_differences() -> None:
    mean, error = mean_and_error([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [mean, error] == pytest.approx([3.0, math.sqrt(2.5 / 5)])
    for lost in (math.nan, math.inf):
        assert mean_row("a", [1.0, 2.0, lost, 3.0, 4.0]).cells[2] == "nan"
    assert mean_and_error([1.0, 2.0, 3.0, 4.0]) == (2.5, None)  # too few for an error
    assert mean_row("a", [4.0], 3.0, "b").cells == ("a", "3", "4", "1", "b")
    assert math.isnan(mean_row("a", []).ours)
    assert math.isnan(largest([1.0, math.nan, 2.0]))
    some = [Run({"seed": s}, {"a": 10.0 + s}) for s in (2, 0, 1)]
    others = [Run({"seed": s}, {"a": 2.0 * s}) for s in (0, 1)]
    assert differences(some, others, "a") == [10.0, 9.0]


# Table 1


def tiny() -> Data:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 10
    x = torch.rand(60, 1, 28, 28, generator=generator) + y[:, None, None, None] / 10
    return Data(x[:40], y[:40], x[40:], y[40:])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Table 1 on little data, in place of Fashion-MNIST."""
    task = table_1.TASKS["fashion_mnist"]
    fields = {name: getattr(task, name) for name in task.__dataclass_fields__}
    monkeypatch.setitem(table_1.TASKS, "fashion_mnist", table_1.Task(**{**fields, "load": tiny}))
    table_1._load.cache_clear()
    yield
    table_1._load.cache_clear()


def micro(method: str, **changes: float) -> Settings:
    return {
        "data": "fashion_mnist",
        "network": "LeNet-5",
        **{"train": 40, "test": 20, "epochs": 2, "lr": 0.02, "batch": 16},
        "method": method,
        "seed": 0,
        **table_1.METHODS[method],
        **changes,
    }


@pytest.mark.parametrize("name", ["table-1", "table-1-fashion-mnist"])
def test_table_1_goes_seed_by_seed(name: str) -> None:
    experiment = EXPERIMENTS[f"relative-flatness/{name}"]
    full, small = experiment.runs("full"), experiment.runs("small")
    assert [run["seed"] for run in full] == [seed for seed in range(5) for _ in range(4)]
    assert {run["method"] for run in full[:4]} == set(table_1.METHODS)
    assert {run["network"] for run in full} == {"ResNet-18"}
    assert {run["seed"] for run in small} == set(range(5))


def test_table_1_trains_each_method_in_its_own_way(loaded) -> None:
    state = torch.get_rng_state()
    outcomes = {m: table_1.work([micro(m)], CPU)[0] for m in table_1.METHODS}
    assert torch.equal(state, torch.get_rng_state())
    assert len({outcome["train_loss"] for outcome in outcomes.values()}) == len(table_1.METHODS)
    again = table_1.work([micro("SAM, ρ 0.05")], CPU)[0]
    assert again["losses"] == outcomes["SAM, ρ 0.05"]["losses"]
    strong = micro("FAM, strength 0.001", strength=1.0, epochs=6)
    plain = micro("SGD", epochs=6)
    flatness = [table_1.work([each], CPU)[0]["relative_flatness"] for each in (strong, plain)]
    assert flatness[0] < 0.7 * flatness[1]


def test_table_1_keeps_networks_that_diverged(loaded) -> None:
    (outcome,) = table_1.work([micro("SGD", lr=1e30)], CPU)
    assert math.isnan(outcome["train_loss"])
    assert math.isnan(outcome["relative_flatness"])


def made_up(better: float) -> list[Run]:
    """Accuracies with a large effect of the seed, and the gain of every method over SGD."""
    return [
        Run(
            {**settings},
            {
                "accuracy": 80.0
                + 3 * settings["seed"]
                + better * place
                + 0.01 * (place + seed) ** 2,
                "relative_flatness": 10.0 / (1 + place),
            },
        )
        for seed in range(5)
        for place, method in enumerate(table_1.METHODS)
        for settings in [micro(method, seed=seed)]
    ]


def test_table_1_compares_seed_by_seed() -> None:
    rows = {row.what: row for row in table_1.rows(made_up(0.5))}
    accuracy = rows["Fashion-MNIST, SGD: test accuracy, %"]
    assert accuracy.published == 94.57
    assert accuracy.error == pytest.approx(math.sqrt(9 * 2.5 / 5), rel=0.02)
    assert "LeNet-5" in accuracy.note
    assert "WideResNet28-10" in accuracy.note
    gain = rows["Fashion-MNIST, SAM, ρ 0.05: more than SGD's accuracy, points"]
    assert gain.ours == pytest.approx(0.55)
    assert gain.error < 0.05  # the seeds' own effect is gone
    assert gain.published == pytest.approx(0.42)
    assert rows["Fashion-MNIST, SGD: relative flatness of the last layer"].ours == 10.0


def test_table_1_of_a_part_of_the_runs() -> None:
    some = [run for run in made_up(0.5) if run["method"] != "SGD"][:2]
    assert len(table_1.rows(some)) == 4
    assert len(table_1.draw(some).axes) == 2


def test_table_1_draws_every_run() -> None:
    left, right = table_1.draw(made_up(0.5)).axes
    points = [x for line in left.lines if line.get_marker() == "o" for x in line.get_xdata()]
    assert len(points) == 20
    assert right.get_ylim()[0] == 0


def test_table_1_goes_on_where_it_stopped(loaded, tmp_path: Path, monkeypatch) -> None:
    experiment = EXPERIMENTS["relative-flatness/table-1-fashion-mnist"]
    done: list[str] = []

    def work(settings, device):
        done.extend(each["method"] for each in settings)
        return [{"accuracy": 90.0, "relative_flatness": 1.0} for _ in settings]

    short = replace(experiment, work=work, runs=lambda _: [micro(m) for m in table_1.METHODS])
    for _ in range(2):
        result = reproduce(short, folder=tmp_path, progress=False)
    assert done == list(table_1.METHODS)
    assert len(result.rows) == 11


# Figures 4 and 5

SHORT = {"rounds": 3, "seconds": 1.0}


def bars(figure: Figure) -> list[ErrorbarContainer]:
    return [each for each in figure.axes[0].containers if isinstance(each, ErrorbarContainer)]


def test_figure_4_times_all_ways_to_one_number() -> None:
    (outcome,) = figure_4.work([{"size": 4, "batch": 16, **SHORT}], CPU)
    assert outcome["fam_error"] < 1e-5
    assert all(len(outcome[method]) == 3 for method in figure_4.METHODS)
    assert min(outcome["rows"]) > max(outcome["vectorized"])
    layer = figure_4.Layer.of_size(4, 16, CPU)
    measure = RelativeFlatness(layer=figure_4.LAYER)
    report = sf.measure(layer.model, (layer.x, layer.y), measures=[measure], progress=False)
    assert report["relative_flatness"].value == pytest.approx(outcome["relative_flatness"], 1e-5)


def test_figure_4_reads_ratios_off_one_run() -> None:
    same = {"vectorized": [3.0, 6.0, 3.0], "functorch": [6.0, 12.0, 6.0], "fam": [2.0, 4.0, 3.0]}
    runs = [
        Run({"size": m}, {"rows": [9.0 * m, 18.0 * m], **same, "fam_error": error})
        for m, error in ((2, 1e-7), (4, math.nan))
    ]
    rows = {row.what: row for row in figure_4.rows(runs)}
    assert rows["row by row / vectorized, largest ratio"].ours == 12.0
    assert rows["vectorized / functorch, 4×4 weights"].ours == 0.5
    assert rows["functorch / κ without the Hessian, 4×4 weights"].ours == 3.0
    assert rows["4×4 weights, functorch"].ours == 6.0
    assert "quartiles 6 to 9 of 3 rounds" in rows["4×4 weights, functorch"].note
    assert math.isnan(rows["κ without the Hessian, largest relative difference"].ours)
    *_, fam = bars(figure_4.draw(runs))
    assert list(fam.lines[0].get_ydata()) == [3.0, 3.0]
    assert fam.has_yerr


@pytest.mark.parametrize(("low", "high", "shown"), [(15, 95, "20 50"), (2, 3e4, "10 100 1000 1e4")])
def test_a_logarithmic_axis_has_numbers_to_read(low: float, high: float, shown: str) -> None:
    """Matplotlib gives one of less than a decade a power of ten at most."""
    axes = Figure().subplots()
    axes.set(yscale="log", ylim=(low, high))
    label_decades(axes.yaxis)
    axes.figure.draw_without_rendering()
    labels = [
        t.get_text() for t in axes.yaxis.get_majorticklabels() if low < t.get_position()[1] < high
    ]
    assert list(map(float, labels)) == list(map(float, shown.split()))
    assert not any(tick.get_text() for tick in axes.yaxis.get_minorticklabels())


def test_figure_5_estimates_what_it_knows_exactly() -> None:
    common = {"batch": 16, "probes": 50, **SHORT}
    both = [{"size": 4, "dense": True, **common}, {"size": 6, "dense": False, **common}]
    outcomes = figure_5.work(both, CPU)
    assert outcomes[0]["exact"]
    assert outcomes[0]["ours_error"] < 1e-5
    assert outcomes[1]["functorch"] is None
    layer = figure_4.Layer.of_size(4, 16, CPU)
    estimates = figure_5._estimates(layer, layer.weight, 400, torch.Generator().manual_seed(1))
    error = float(estimates.std()) / 20
    assert abs(float(estimates.mean()) - outcomes[0]["trace"]) < 4 * error < outcomes[0]["trace"]
    runs = [Run(s, o) for s, o in zip(both, outcomes, strict=True)]
    assert len(figure_5.rows(runs)) == 8
    functorch, *_ = bars(figure_5.draw(runs))
    assert len(functorch.lines[0].get_xdata()) == 1


# Table 2


def test_synthetic_shapes_lack_what_they_are_said_to_lack() -> None:
    shapes = synthetic_shapes(3, 2, seed=1)
    again = synthetic_shapes(3, 2, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(shapes, again, strict=True))
    assert shapes.train.shape == (3, 1, 64, 64, 64)
    for whole, lacking in [
        (shapes.train, shapes.train_defective),
        (shapes.test, shapes.test_defective),
        (shapes.test, shapes.test_otherwise),
    ]:
        assert whole.unique().tolist() == [0.0, 1.0]
        assert (lacking <= whole).all()
        kept = lacking.sum((1, 2, 3, 4)) / whole.sum((1, 2, 3, 4))
        assert (kept > 0.5).all()
        assert (kept < 0.99).all()
    missing = [
        (shapes.test - some).flatten(1) for some in (shapes.test_defective, shapes.test_otherwise)
    ]
    assert (missing[0] * missing[1]).sum() < 0.2 * missing[0].sum()  # at another place


def test_shapes_are_the_same_in_coarser_volumes() -> None:
    fine, coarse = synthetic_shapes(2, 1), synthetic_shapes(2, 1, side=32)
    for one, other in zip(fine, coarse, strict=True):
        assert other.shape[1:] == (1, 32, 32, 32)
        share, expected = (each.mean((1, 2, 3, 4)) for each in (other, one))  # of all voxels
        assert torch.allclose(share, expected, rtol=0.1)


def test_table_2_regularizes_what_decodes_the_latent_variables() -> None:
    for side in (8, 64):
        model = zoo.shape_autoencoder(side)
        assert model.get_parameter(f"{last_linear(model)}.weight").shape == (64, 8)
    micro = {"train": 3, "test": 2, "epochs": 2, "batch": 2, "lr": 1e-3, "side": 16, "seed": 0}
    settings = [{**micro, "strength": strength} for strength in (0.0, 1e4)]
    plain, regularized = table_2.work(settings, CPU)
    assert plain["losses"][1] != regularized["losses"][1]
    assert {f"dsc_{n}{when}" for n in (1, 2) for when in ("", "_half")} <= set(plain)


def test_scores_of_two_cubes() -> None:
    one, other = np.zeros((2, 12, 12, 12), dtype=bool)
    one[2:6, 2:6, 2:6] = True
    other[2:6, 2:6, 5:9] = True
    assert table_2.scored(one, one) == (1.0, 0.0, 0.0)
    dice, distance, most = table_2.scored(one, other)
    assert dice == pytest.approx(0.25)
    assert distance == 3.0
    assert most == 3.0  # a quarter of either lies that far from the other
    nothing = table_2.scored(np.zeros_like(one), one)
    assert nothing[0] == 0.0
    assert math.isnan(nothing[1])


def test_what_the_mean_of_the_training_shapes_has() -> None:
    """As it is said of the small size."""
    small = table_2.runs("small")[0]
    shapes = synthetic_shapes(small["train"], small["test"], side=small["side"])
    mean = (shapes.train.mean(0) > 0.5)[0].numpy()
    dice = np.mean([table_2.scored(mean, shape[0].numpy() > 0)[0] for shape in shapes.test])
    assert round(float(dice), 2) == 0.42
    assert "has 0.42" in table_2.TABLE_2.changed[-1]


def test_dice_loss_is_one_less_the_similarity() -> None:
    shapes = synthetic_shapes(2, 1).train
    sure = 100.0 * (2 * shapes - 1)
    assert table_2.dice_loss(sure, shapes).item() == pytest.approx(0.0, abs=1e-6)
    assert table_2.dice_loss(-sure, shapes).item() == pytest.approx(1.0, abs=1e-6)


def made_up_shapes() -> list[Run]:
    return [
        Run(
            {"train": 5, "epochs": 2, "side": 64, "strength": strength, "seed": seed},
            {
                f"{name}_{number}{when}": 0.6 + 0.1 * seed + strength
                for name in table_2.TITLES
                for number in (1, 2)
                for when in ("", "_half")
            },
        )
        for seed in range(5)
        for strength in table_2.PUBLISHED
    ]


def test_table_2_names_its_shapes_synthetic() -> None:
    rows = table_2.rows(made_up_shapes())
    assert all("synthetic" in row.what for row in rows)
    gain = {row.what: row for row in rows}[
        "synthetic shapes, FAM λ = 0.02: more Dice similarity, set 1 than the baseline"
    ]
    assert gain.ours == pytest.approx(0.02)
    assert gain.error == pytest.approx(0.0, abs=1e-9)
    assert gain.published == pytest.approx(0.0712)
    figure = table_2.draw(made_up_shapes())
    assert len(figure.axes) == 3
    assert len(bars(figure)) == 2 * len(table_2.PUBLISHED)  # of both sets
    line, _, (spread,) = bars(figure)[2]
    assert line.get_ydata()[0] == pytest.approx(0.8 + 0.002)
    assert np.diff(spread.get_segments()[0][:, 1]) == pytest.approx(2 * 0.1 * (2.5 / 5) ** 0.5)
    assert [run["seed"] for run in table_2.runs("full")] == [s for s in range(5) for _ in range(3)]


# Table 3


class Encoder(torch.nn.Module):
    """What an encoder of transformers looks like from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.classifier = torch.nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask, token_type_ids):
        mask = attention_mask[..., None].float()
        words = self.embedding(input_ids) * (1 + token_type_ids[..., None])
        return SimpleNamespace(logits=self.classifier((words * mask).sum(1) / mask.sum(1)))


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs whose label is in their tokens, and an encoder that can learn it."""
    ids = torch.randint(20, (60, 3, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 1], ids[:, 2] = 1, 0
    labels = (ids[:, 0].sum(1) > 57).long()
    data = Data(ids[:40], labels[:40], ids[40:], labels[40:])

    def pretrained(seed: int) -> table_3.Entailment:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return table_3.Entailment(Encoder())

    monkeypatch.setattr(table_3, "_load", lambda *_: data)
    monkeypatch.setattr(table_3, "pretrained", pretrained)


def test_table_3_fine_tunes_with_and_without_fam(pairs) -> None:
    micro = {"train": 40, "dev": 20, "length": 6, "epochs": 12, "lr": 0.1, "batch": 8, "seed": 0}
    micro["frozen"] = False
    settings = [{**micro, "method": method} for method in table_3.METHODS]
    plain, regularized = table_3.work(settings, CPU)
    assert len(plain["dev_losses"]) == len(plain["losses"]) == 12
    assert plain["losses"][-1] < plain["losses"][0]
    assert plain["losses"] != regularized["losses"]
    assert plain["train_accuracy"] > 80
    runs = [Run(s, o) for s, o in zip(settings, (plain, regularized), strict=True)]
    rows = {row.what: row for row in table_3.rows(runs)}
    assert rows["RTE, baseline: accuracy, %, mean"].published == 67.364
    assert "MiniLM" in rows["RTE, baseline: accuracy, %, mean"].note
    gain = rows["RTE, FAM: more than the baseline's accuracy, points"]
    assert gain.ours == pytest.approx(regularized["accuracy"] - plain["accuracy"])
    rises = [each["dev_losses"][-1] - min(each["dev_losses"]) for each in (plain, regularized)]
    assert rows["RTE, baseline: rise of the development loss"].ours == pytest.approx(rises[0])
    more = rows["RTE, FAM: more than the baseline's rise of the development loss"]
    assert more.ours == pytest.approx(rises[1] - rises[0])
    assert len(table_3.draw(runs).axes[0].lines) == 2


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small encoder with its tokenizer, in place of MiniLM."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(words), intermediate_size=16, **sizes)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(tmp_path)
    monkeypatch.setattr(table_3, "_folder", lambda: tmp_path)
    return tmp_path


def test_a_frozen_encoder_embeds_each_sentence_by_itself(encoder: Path) -> None:
    """Sentences of many lengths at once, as one after the other without any padding."""
    from transformers import AutoModel, AutoTokenizer

    first = ["a b c d e f", "a", "h g f e d c b a", "b b"]
    pairs = Pairs(first, ["c", "a b", "h g", "d d d d d"], torch.tensor([0, 1, 0, 1]))
    x, labels = table_3.embedded(pairs, 3, 6)
    assert labels.tolist() == [0, 1, 0]
    model, tokenizer = (kind.from_pretrained(encoder) for kind in (AutoModel, AutoTokenizer))

    def alone(sentence: str) -> torch.Tensor:
        tokens = tokenizer(sentence, truncation=True, max_length=6, return_tensors="pt")
        with torch.no_grad():
            mean = model.eval()(**tokens).last_hidden_state[0].mean(0)
        return mean / mean.norm()

    for row, one, other in zip(x, pairs.first, pairs.second, strict=False):
        u, v = alone(one), alone(other)
        expected = 8**0.5 * torch.cat([(u - v).abs(), u * v])
        assert torch.allclose(row, expected, atol=1e-5)


def test_table_3_trains_two_layers_on_a_frozen_encoder(encoder: Path, monkeypatch) -> None:
    monkeypatch.setattr(table_3, "rte", lambda: RTE(*[_sentences(seed) for seed in (0, 1)]))
    table_3._load.cache_clear()
    small = {"train": 40, "dev": 20, "length": 8, "frozen": True, "batch": 8, "seed": 0}
    settings = [{**small, "epochs": 10, "lr": 0.01, "method": m} for m in table_3.METHODS]
    plain, regularized = table_3.work(settings, CPU)
    table_3._load.cache_clear()
    assert plain["losses"] != regularized["losses"]
    assert plain["losses"][-1] < plain["losses"][0]
    runs = [Run(s, o) for s, o in zip(settings, (plain, regularized), strict=True)]
    assert "frozen" in table_3.rows(runs)[0].note


def _sentences(seed: int) -> Pairs:
    """Pairs of which the second is a part of the first, or of other letters."""
    draw = random.Random(seed)
    firsts = [" ".join(draw.sample("abcdefgh", 4)) for _ in range(40)]
    labels = [k % 2 for k in range(40)]
    others = ["".join(set("abcdefgh") - set(first)) for first in firsts]
    seconds = [o[0] if y else f[0] for f, o, y in zip(firsts, others, labels, strict=True)]
    return Pairs(firsts, seconds, torch.tensor(labels))


def test_table_3_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_3, "find_spec", lambda name: None)
    table_3._folder.cache_clear()
    with pytest.raises(sf.MissingDependency, match=r"pip install saltflat\[transformers\]"):
        table_3.pretrained(0)


# End to end, as the command runs them


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["table-1", "table-1-fashion-mnist", "table-2", "table-3", "figure-4", "figure-5"]
)
def test_the_small_size(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[f"relative-flatness/{name}"]
    try:
        result = reproduce(experiment, folder=tmp_path, progress=False)
    except sf.SaltflatError as error:
        missing = re.search(r"Missing(?:Data|Dependency): .*", str(error))  # within a run
        if missing:
            pytest.skip(missing[0])
        raise
    assert len(result.runs) == len(experiment.runs("small"))
    assert all(math.isfinite(row.ours) for row in result.rows)
    assert (tmp_path / experiment.name / "small" / "figure.png").exists()
