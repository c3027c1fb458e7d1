"""Every refusal names what was wrong, and is both a SaltflatError and what Python users expect."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from agree import agrees
from cases import BY_NAME
from dense import Dense
from networks import mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import saltflat as sf
from saltflat.errors import ForwardError, ModelError
from saltflat.moved import PLACES

X, Y = BY_NAME["mlp"].data(n=6)
BATCHES = [(X[:2], Y[:2]), (X[2:4], Y[2:4]), (X[4:], Y[4:])]


def model() -> Any:
    return BY_NAME["mlp"].model()


def refuses(kind: type[Exception], *words: str, call=sf.trace, **arguments) -> None:
    """The call raises `kind`, as a SaltflatError, with a message that holds all the words."""
    arguments = {"model": model(), "data": (X, Y), **arguments}
    with pytest.raises(sf.SaltflatError) as caught:
        call(arguments.pop("model"), arguments.pop("data"), **arguments)
    assert isinstance(caught.value, kind)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# arguments

ARGUMENTS = [
    (ValueError, {"loss": "cross_entrpy"}, ["cross_entrpy", "'cross_entropy'"]),
    (TypeError, {"loss": 3}, ["loss", "int"]),
    (ValueError, {"loss": nn.CrossEntropyLoss(reduction="none")}, ["none", "mean", "sum"]),
    (ValueError, {"loss": nn.MSELoss(reduction="none")}, ["none"]),
    (ValueError, {"loss": nn.BCEWithLogitsLoss(reduction="none")}, ["none"]),
    (ValueError, {"loss": lambda o, y: (o**2).sum(1)}, ["one element"]),
    (ValueError, {"curvature": "hesian"}, ["hesian", "hessian"]),
    (ValueError, {"curvature": "fisher"}, ["fisher", "hessian", "ggn"]),
    (ValueError, {"certify": "maybe"}, ["maybe", "proof", "probe"]),
    (TypeError, {"estimator": "hutchinson"}, ["estimator", "Hutchinson"]),
    (ValueError, {"max_directions": 0}, ["max_directions", "0"]),
    (ValueError, {"max_directions": True}, ["max_directions", "True"]),
    (ValueError, {"memory_budget": 0}, ["memory_budget", "0"]),
    (ValueError, {"memory_budget": "1GB"}, ["memory_budget", "'1GB'"]),
    (ValueError, {"memory_budget": float("nan")}, ["memory_budget", "nan"]),
    (ValueError, {"tolerance": 0}, ["tolerance", "above 0"]),
    (ValueError, {"tolerance": "1%"}, ["tolerance", "'1%'"]),
    (ValueError, {"dtype": torch.int64}, ["dtype", "int64"]),
    (ValueError, {"dtype": "float64"}, ["'float64'", "torch.float64"]),
    (TypeError, {"output": True}, ["name", "place", "callable", "True"]),
    (TypeError, {"output": ["scores"]}, ["name", "place", "callable", "['scores']"]),
    (ValueError, {"output": "scores"}, ["Tensor", "no 'scores'", "leave out output="]),
    (ValueError, {"output": 0}, ["Tensor", "no 0", "leave out output="]),
    (ValueError, {"parameters": ["0.wieght"]}, ["0.wieght", "'0.weight'"]),
    (ValueError, {"parameters": "0.weight"}, ["0.weight", "trainable", "all"]),
    (ValueError, {"parameters": []}, ["parameters"]),
    (TypeError, {"model": lambda x: x}, ["Module"]),
]


@pytest.mark.parametrize(("kind", "arguments", "words"), ARGUMENTS)
def test_arguments(kind, arguments, words) -> None:
    refuses(kind, *words, **arguments)
    refuses(kind, *words, call=sf.diagonal, **arguments)


@pytest.mark.parametrize("probes", [0, -1, 1, 2, 3, 4.0, True])
def test_probes(probes: object) -> None:
    """One probe has no standard error, and a few have one that does not hold."""
    with pytest.raises(ValueError, match=r"probes .* at least 4: the samples share") as caught:
        sf.Hutchinson(probes=probes)
    assert isinstance(caught.value, sf.SaltflatError)


@pytest.mark.parametrize("name", ["zzz", "ce"])
def test_an_unknown_loss(name: str) -> None:
    """All are named: 'ce' looks like 'bce', which is another loss."""
    refuses(ValueError, "'cross_entropy'", "'mse'", "'bce'", loss=name)


# names that results do not have


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    network, data = model(), (X, Y)
    report = sf.measure(network, data)
    return {
        "report": report,
        "trace": sf.trace(network, data),
        "diagonal": sf.diagonal(network, data),
        "comparison": report.compare(report, ("sgd", "sam")),
        "audit": sf.audit(network, data, measures=["rho"], elements=1),
    }


UNKNOWN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda r: r["report"]["rho"].by_neuron["0.weight"], "rho.by_neuron has no '0.weight'. Known"),
    (lambda r: r["report"]["rho"].by_layer["9"], "rho.by_layer has no '9'. Known: '0', '2'"),
    (lambda r: r["report"]["hessian_trace"].by_parameter["0.wieght"], "Nearest is '0.weight'"),
    (lambda r: r["report"]["hessian_trace"].by_neuron["0"], "hessian_trace.by_neuron .* is empty"),
    (lambda r: r["report"]["minimum_sharpness"].details["alpah"], "details .* Nearest is 'alpha'"),
    (lambda r: r["trace"]["0.wieght"], "Trace has no '0.wieght'. Nearest is '0.weight'"),
    (lambda r: r["trace"].details["0.wieght"], "Trace.details has no .* Nearest is '0.weight'"),
    (lambda r: r["diagonal"]["0.wieght"], "Diagonal has no '0.wieght'. Nearest is '0.weight'"),
    (lambda r: r["comparison"]["adam"], "Comparison has no 'adam'. Known: 'sgd', 'sam'|'sam'"),
    (lambda r: r["comparison"].verdict("rho", "sgd", "x"), "Comparison has no 'x'"),
    (lambda r: r["audit"]["rho"]["neuronn"], "The audit of rho has no .* Nearest is 'neuron'"),
]


@pytest.mark.parametrize(("look", "words"), UNKNOWN)
def test_unknown_names_are_answered_with_known_ones(look, words, results) -> None:
    with pytest.raises(sf.NotMeasured, match=words) as caught:
        look(results)
    assert isinstance(caught.value, KeyError)


def test_results_are_mappings_as_before(results: dict[str, Any]) -> None:
    """What asks politely gets its default, and they survive copies and files."""
    m = results["report"]["rho"]
    assert "9" not in m.by_layer
    assert m.by_layer.get("9") is None
    assert m.by_layer == dict(m.by_layer)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), replace(m, value=m.value)):
        assert other == m
        with pytest.raises(sf.NotMeasured, match=r"rho\.by_layer has no '9'"):
            other.by_layer["9"]
    assert results["trace"].get("9") is None


# one thing in the place of another


def swapped(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: sf.measure(*arguments, **options)


NUMBERS: list[Any] = [1]  # for names
MISUSES: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    (swapped(nn.Linear, (X, Y)), TypeError, ["the class Linear", "Linear(…)"]),
    (swapped((X, Y), model()), TypeError, ["Got tuple", "the model comes first"]),
    (swapped(DataLoader([(X, Y)]), model()), TypeError, ["DataLoader", "the model comes first"]),
    (swapped(X, Y), TypeError, ["Got Tensor", "the model comes first"]),
    (swapped(model().state_dict(), (X, Y)), TypeError, ["of weights", "load_state_dict"]),
    (swapped([model(), model()], (X, Y)), TypeError, ["list of models", "saltflat.compare"]),
    (swapped("model.pt", (X, Y)), TypeError, ["str 'model.pt'", "load its weights"]),
    (swapped(3, (X, Y)), TypeError, ["torch.nn.Module. Got int."]),
    (swapped(model(), model()), TypeError, ["the module Sequential", "the model comes first"]),
    (swapped(model(), "data.pt"), TypeError, ["'data.pt'", "load what is there"]),
    (swapped(model(), Path("data.pt")), TypeError, ["'data.pt'", "load what is there"]),
    (swapped(model(), ["a cat", "a dog"]), ValueError, ["text 'a cat'", "tokenizer"]),
    (swapped(model(), (X, X, Y)), TypeError, ["3 tensors", "((a, b), targets)"]),
    (swapped(model(), (X, Y), measures="rho"), TypeError, ["Got 'rho'; pass ['rho']"]),
    (swapped(model(), (X, Y), measures="hessian_trce"), TypeError, ["pass ['hessian_trace']"]),
    (swapped(model(), (X, Y), measures="zzz"), TypeError, ["Got 'zzz'", "Known: 'hessian_trace'"]),
    (swapped(model(), (X, Y), parameters=["0"]), ValueError, ["module", "'0.weight'", "'0.bias'"]),
    (
        lambda: (lambda m: sf.measure(m, (X, Y), parameters=[m[2].weight]))(model()),
        TypeError,
        ["by name", "Got a Parameter", "pass ['2.weight']"],
    ),
    (lambda: sf.EntropySGD(model()), TypeError, ["Got Sequential", "model.parameters()"]),
    (lambda: sf.EntropySGD(model().parameters()), ValueError, ["lr must be", "Got None"]),
    (lambda: sf.symmetries(model(), X).random(seed="a"), TypeError, ["seed", "'a'"]),
    (lambda: sf.Comparison([1, 2]), TypeError, ["mapping from names to reports", "Got list"]),
    (lambda: sf.hessian(model(), (X, Y)) @ [1.0, 2.0], ValueError, ["entries", "shape (2,)"]),
    (lambda: sf.hessian(model(), (X, Y)) @ np.ones(2), ValueError, ["entries", "shape (2,)"]),
    (lambda: sf.gathered((X, Y)).__enter__(), TypeError, ["torch.nn.Module. Got tuple."]),
    (lambda: sf.symmetries(model(), X[:, :3]), RuntimeError, ["on the example", "(6, 3)"]),
    (lambda: sf.symmetries(model(), X).random()(X), TypeError, ["torch.nn.Module. Got Tensor"]),
    (lambda: sf.audit(model(), (X[:, :3], Y)), RuntimeError, ["failed on batch 0", "(6, 3)"]),
    (
        lambda: (lambda m: sf.eigenvalues(m, (X, Y), block=m[0].weight))(model()),
        TypeError,
        ["by name", "Got a Parameter", "block='0.weight'"],
    ),
    (lambda: sf.compare(dict.fromkeys(NUMBERS, model()), (X, Y)), TypeError, ["strings. Got 1"]),
    (lambda: sf.Tolerances(closed="a"), ValueError, ["closed of Tolerances", "'a'"]),
    (lambda: sf.load("report.html"), ValueError, ["is a page", ".json"]),
]


@pytest.mark.parametrize(("misuse", "kind", "words"), MISUSES)
def test_one_thing_in_the_place_of_another(misuse, kind, words) -> None:
    with pytest.raises(sf.SaltflatError) as caught:
        misuse()
    assert isinstance(caught.value, kind)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_report_is_compared_with_a_report(results: dict[str, Any]) -> None:
    with pytest.raises(sf.InvalidType, match=r"another report. Got Sequential; .*sf.compare"):
        results["report"].compare(model())


# data


@pytest.mark.parametrize("once", [lambda: iter(BATCHES), lambda: (b for b in BATCHES)])
def test_one_shot_iterators(once) -> None:
    refuses(TypeError, "once", data=once())


@pytest.mark.parametrize("empty", [[], (X[:0], Y[:0]), [(X[:0], Y[:0])]])
def test_empty(empty) -> None:
    refuses(ValueError, "no", data=empty)


@pytest.mark.parametrize("data", [X, 3, None, [X], [(X,)], [(X, Y, Y)], [{"x": X}], [(X, Y[:3])]])
def test_malformed(data) -> None:
    with pytest.raises(sf.SaltflatError):
        sf.trace(model(), data)


def test_a_dict_without_labels_names_unpack() -> None:
    refuses(ValueError, "labels", "unpack", data=[{"input": X, "target": Y}])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_data_that_are_not_finite_name_the_batch(bad: float) -> None:
    spoilt = X[2:4].clone()
    spoilt[1, 2] = bad
    refuses(ValueError, "batch 1", data=[BATCHES[0], (spoilt, Y[2:4]), BATCHES[2]])


def test_targets_that_are_not_finite_name_the_batch() -> None:
    spoilt = torch.full((2, 3), torch.nan, dtype=torch.float64)
    fine = torch.zeros(2, 3, dtype=torch.float64)
    data = [(X[:2], fine), (X[2:4], fine), (X[4:], spoilt)]
    refuses(ValueError, "batch 2", data=data, loss="mse")


@pytest.mark.parametrize("target", [3, -1, 1000])
def test_targets_out_of_range(target: int) -> None:
    spoilt = Y[4:].clone()
    spoilt[0] = target
    refuses(ValueError, str(target), "batch 2", data=[*BATCHES[:2], (X[4:], spoilt)])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_everything_ignored(reduction: str) -> None:
    """The mean over nothing is not a number; the sum over nothing is zero."""
    loss, data = nn.CrossEntropyLoss(reduction=reduction), (X, torch.full_like(Y, -100))
    if reduction == "mean":
        refuses(ValueError, loss=loss, data=data)
    else:
        assert sf.trace(model(), data, loss).total == 0


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("cross_entropy", Y.double()),
        ("cross_entropy", Y.unsqueeze(1)),
        ("cross_entropy", torch.zeros(6, 4, dtype=torch.float64)),
        ("mse", torch.zeros(6, dtype=torch.float64)),
        ("mse", torch.zeros(6, 1, dtype=torch.float64)),
        ("mse", torch.zeros(1, 3, dtype=torch.float64)),
        ("bce", torch.zeros(6, 1, dtype=torch.float64)),
        ("bce", torch.full((6, 3), 1.5, dtype=torch.float64)),
    ],
)
def test_targets_of_a_wrong_shape_or_kind(loss: str, targets: Tensor) -> None:
    with pytest.raises(sf.SaltflatError):
        sf.trace(model(), (X, targets), loss)


def test_class_indices_that_are_floats() -> None:
    """Probabilities are floats too, and stay fine."""
    data = [*BATCHES[:2], (X[4:], Y[4:].float())]
    for loss in ("cross_entropy", nn.CrossEntropyLoss(), "normalized_cross_entropy"):
        refuses(ValueError, "int64", "float32", "targets.long()", "batch 2", data=data, loss=loss)
    probabilities = nn.functional.one_hot(Y, 3).double()
    soft = sf.trace(model(), (X, probabilities))
    assert soft.total == pytest.approx(sf.trace(model(), (X, Y)).total, rel=1e-12)


def test_negative_probabilities() -> None:
    refuses(ValueError, "negative", data=(X, torch.rand(6, 3).double() - 1))


@pytest.mark.parametrize("targets", [[0, 1, 2, 0, 1, 2], None, "labels"])
def test_targets_that_are_no_tensor(targets: object) -> None:
    refuses(TypeError, type(targets).__name__, "one tensor", data=[(X, targets)])


def test_meta_inputs_and_targets() -> None:
    refuses(ValueError, "inputs of batch 0", "meta", data=(X.to("meta"), Y))
    refuses(ValueError, "targets of batch 0", "meta", data=(X, Y.to("meta")))


@pytest.mark.parametrize("bad", [np.array([["a"] * 4] * 6), np.full((6, 4), None)])
def test_numpy_arrays_that_hold_no_numbers(bad: np.ndarray) -> None:
    refuses(ValueError, "inputs of batch 0", "numpy", str(bad.dtype), data=(bad, Y))


def test_an_array_without_targets() -> None:
    refuses(TypeError, "ndarray", "targets", data=X.numpy())


class Samples(Dataset[tuple[object, Tensor]]):
    """One target, and inputs of some kind."""

    def __init__(self, *inputs: object) -> None:
        self.inputs = inputs

    def __getitem__(self, index: int) -> tuple[object, Tensor]:
        return self.inputs[index], Y[index]


class Sized(Samples):
    def __len__(self) -> int:
        return len(self.inputs)


def test_datasets_that_make_no_batch() -> None:
    refuses(TypeError, "length", "Samples", "DataLoader", data=Samples(X[0], X[1]))
    refuses(ValueError, "no batch", data=Sized())
    for second in (object(), X[1, :3]):
        refuses(ValueError, "do not make a batch", "collate_fn", data=Sized(X[0], second))
    assert sf.trace(model(), Sized(*X)).total == pytest.approx(sf.trace(model(), (X, Y)).total)


def test_data_that_are_computed_from_the_model() -> None:
    """Under no_grad they are constants, and so is what other parameters gave."""
    own, teacher = model(), model()
    learned = {"model": own, "loss": "mse"}
    refuses(ValueError, "targets of batch 0", "0.weight", data=[(X, own(X))], **learned)
    for targets in (own(X).detach(), teacher(X) + 1):
        found = sf.trace(own, [(X, targets)], "mse")
        oracle = Dense(own, X, targets.detach(), "mse")
        agrees(found, oracle.blocks(oracle.hessian))


def test_unpack_that_fails() -> None:
    words = "unpack failed on batch 0", "(float64 (6, 4), int64 (6,))", "IndexError"
    refuses(ValueError, *words, unpack=lambda item: item[2])
    refuses(ValueError, "(inputs, targets)", "float64 (6, 4)", unpack=lambda item: item[0])


def test_ambiguous_class_dimension() -> None:
    """(n, K, K) outputs: torch means dimension 1, language models the last."""
    square = nn.Sequential(nn.Linear(4, 9), nn.Unflatten(1, (3, 3))).double()
    targets = torch.zeros(6, 3, dtype=torch.long)
    refuses(ValueError, "ambiguous", model=square, data=(X, targets))
    assert sf.trace(square, (X, targets), nn.CrossEntropyLoss()).exact


# the loss


def test_loss_that_is_not_finite() -> None:
    refuses(ValueError, "loss", loss=lambda o, y: o.sum() * torch.nan)


def test_targets_that_a_module_cannot_take() -> None:
    refuses(TypeError, "unpack", data=[(X, {"y": Y})], loss=nn.MSELoss())


def test_too_few_class_weights() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(2, dtype=torch.float64))
    refuses(ValueError, "2", "3", loss=loss)


def test_constant_logits_have_no_normalisation() -> None:
    constant = nn.Linear(4, 3).double()
    nn.init.zeros_(constant.weight)
    nn.init.ones_(constant.bias)
    refuses(ValueError, "spread", model=constant, loss="normalized_cross_entropy")


# the model


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_parameters_that_are_not_finite_are_named(bad: float) -> None:
    spoilt = model()
    spoilt[2].bias.data[1] = bad
    refuses(ValueError, "2.bias", model=spoilt)


def test_buffers_that_are_not_finite() -> None:
    spoilt = BY_NAME["batch norm 1d"].model()
    spoilt[1].running_var.fill_(torch.nan)
    refuses(ValueError, model=spoilt, data=BY_NAME["batch norm 1d"].data())


def test_everything_frozen() -> None:
    refuses(ValueError, "frozen", "parameters='all'", model=model().requires_grad_(False))


def test_a_model_without_parameters() -> None:
    refuses(ValueError, "parameters", model=nn.Identity())


class Odd(nn.Module):
    """A good network with one more parameter of an odd kind."""

    def __init__(self, odd: nn.Parameter) -> None:
        super().__init__()
        self.body, self.odd = mlp().double(), odd

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def inference_parameter() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("odd", "word"),
    [
        (lambda: nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False), "int"),
        (lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex128)), "complex"),
        (lambda: nn.Parameter(torch.zeros(2, device="meta")), "meta"),
        (nn.UninitializedParameter, "lazy"),
        (inference_parameter, "inference"),
    ],
)
def test_odd_parameters_are_named(odd, word: str) -> None:
    refuses(ValueError, "odd", word, model=Odd(odd()), parameters="all")


class Answers(nn.Module):
    """A network whose answer goes through a function first."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.body, self.answer = model(), answer

    def forward(self, x: Tensor):
        return self.answer(self.body(x))


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (lambda o: (o, o), "output="),
        (lambda o: {"prediction": o}, "It holds 'prediction'."),
        (lambda o: {"prediction": o}, "e.g. output='prediction'."),
        (lambda o: (o, o), "It holds 0, 1."),
        (lambda o: None, "output="),
        (lambda o: o.argmax(1), "floating point tensor. Got int64 (6,)"),
        (lambda o: o.mean(), "one row"),
        (lambda o: o[:-1], "one row"),
        (lambda o: o.T, "one row"),
        (lambda o: o.repeat(2, 1), "one row"),
    ],
)
def test_outputs_of_an_unknown_kind(answer, word: str) -> None:
    refuses(ValueError, word, model=Answers(answer))


class Pair(NamedTuple):
    scores: Tensor
    features: Tensor


class Slots:
    """With attributes, methods, and a name of its own class."""

    kind = "classifier"

    def __init__(self, outputs: Tensor) -> None:
        self.scores, self._hidden = outputs, outputs

    def softmax(self) -> Tensor:
        return self.scores.softmax(-1)


CONTAINERS = [
    (lambda o: {"scores": o, "features": 2 * o}, "scores"),
    (lambda o: {7: o}, 7),
    (lambda o: (2 * o, o), 1),
    (lambda o: [2 * o, o], -1),
    (lambda o: (2 * o, o), "1"),  # as it comes from a command line
    (lambda o: Pair(o, 2 * o), "scores"),
    (lambda o: Pair(o, 2 * o), 0),
    (lambda o: Slots(o), "scores"),
    (lambda o: torch.max(torch.stack([o, o]), dim=0), "values"),
]


@pytest.mark.parametrize(("answer", "name"), CONTAINERS)
def test_outputs_by_name(answer, name) -> None:
    """They are what the model without the container around its answer has."""
    found = sf.trace(Answers(answer), (X, Y), output=name)
    plain = sf.trace(Answers(lambda o: o), (X, Y))
    assert dict(found) == pytest.approx(dict(plain), rel=1e-12)


@pytest.mark.parametrize(
    ("answer", "name", "words"),
    [
        (lambda o: {"scores": o}, "scorse", ["dict", "no 'scorse'", "'scores'; nearest is"]),
        (lambda o: {"scores": o, "b": o}, "x", ["dict", "no 'x'", "It holds 'scores', 'b'."]),
        (lambda o: {"scores": o}, "keys", ["no 'keys'", "'scores'"]),
        (lambda o: {"scores": o}, 0, ["no 0", "'scores'"]),
        (lambda o: (o, o), 2, ["tuple", "no 2", "0, 1"]),
        (lambda o: (o, o), "count", ["tuple", "no 'count'", "0, 1"]),
        (lambda o: Pair(o, o), "score", ["Pair", "'scores', 'features'"]),
        (lambda o: Slots(o), "score", ["Slots", "It holds 'scores'; nearest is 'scores'."]),
        (lambda o: Slots(o), "softmax", ["Slots", "no 'softmax'", "'scores'"]),
        (lambda o: None, "scores", ["NoneType", "nothing with a name"]),
        (lambda o: {"scores": "text"}, "scores", ["floating point tensor", "Got str"]),
    ],
)
def test_names_that_are_not_there(answer, name, words) -> None:
    refuses(ModelError, *words, model=Answers(answer), output=name)


def test_outputs_by_name_are_taken_everywhere() -> None:
    """One word means one thing: every call of the library that runs a model takes the name."""
    pair, plain = Answers(lambda o: {"scores": o, "other": 3 * o}), Answers(lambda o: o)
    data = (X, Y)

    def both(call, *arguments, **options):
        return call(pair, *arguments, output="scores", **options), call(
            plain, *arguments, **options
        )

    for call in (
        sf.trace,
        sf.diagonal,
        sf.eigenvalues,
        sf.density,
        sf.landscape,
        sf.hessian,
        sf.ggn,
    ):
        both(call, data)
    named, given = both(sf.measure, data, measures=["hessian_trace", "rho"])
    assert named["rho"].value == pytest.approx(given["rho"].value, rel=1e-12)
    assert len(both(sf.symmetries, X)[0]) == len(sf.symmetries(plain, X))
    audits = both(sf.audit, data, measures=["rho"], elements=1)
    assert audits[0]["rho"].verdict == audits[1]["rho"].verdict == "invariant"
    compared = sf.compare({"a": pair, "b": pair}, data, output="scores", measures=["rho"])
    assert compared["a"]["rho"].value == pytest.approx(given["rho"].value, rel=1e-12)
    weights = {"a": pair.state_dict()}
    many = sf.measure_many(weights, data, model=pair, output="scores", measures=["rho"])
    assert many["a"]["rho"].value == pytest.approx(given["rho"].value, rel=1e-12)
    sf.Monitor(pair, data, output="scores")
    fam = sf.FAM(pair, layer="body.2", strength=1.0, output="scores")
    pair(X)
    penalty = fam(Y)
    fam.remove()
    other = sf.FAM(plain, layer="body.2", strength=1.0)
    plain(X)
    assert penalty.item() == pytest.approx(other(Y).item(), rel=1e-12)


class Tokens(nn.Module):
    """Sorts out ids in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))


class Bytes(nn.Module):
    """Takes images as they are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.to(self.head.weight.dtype) / 255)


class Halved(nn.Module):
    """Casts to bfloat16 whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.bfloat16()).float()


class Careful(Halved):
    """Casts to what its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.to(self.head.weight.dtype)).float()


IDS = torch.arange(18).reshape(6, 3) % 9
IMAGES = torch.randint(256, (6, 3, 4, 4), generator=torch.Generator().manual_seed(0))


def images(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))


FORWARD = {
    "uint8 to Linear": (mlp, X.to(torch.uint8), ["uint8 (", "x.float() / 255"]),
    "int64 to Linear": (mlp, X.long(), ["int64 (", "convert"]),
    "uint8 to a convolution": (
        lambda: images(nn.Conv2d(3, 2, 3)),
        IMAGES.to(torch.uint8),
        ["uint8 (", "x.float() / 255"],
    ),
    "uint8 to BatchNorm": (
        lambda: images(nn.BatchNorm2d(3)),
        IMAGES.to(torch.uint8),
        ["uint8 (", "x.float() / 255"],
    ),
    "floats to an embedding": (Tokens, IDS.float(), ["float32 (", ".long()"]),
    "bytes to an embedding": (Tokens, IDS.to(torch.uint8), ["uint8 (", ".long()"]),
    "ids out of range": (Tokens, IDS + 9, ["IndexError", "int64 ("]),
    "float64 to float32": (mlp, X, ["float64 (", "dtype=torch.float64"]),
    "a wrong width": (mlp, X[:, :3].float(), ["float32 (", "shapes cannot be multiplied"]),
    "too many arguments": (mlp, (X, X), ["(float64 (", "TypeError"]),
    "a wrong name": (mlp, {"pixels": X}, ["{pixels: float64 (", "TypeError"]),
    "a cast in the model": (Halved, X.float(), ["casts", "self.weight.dtype", "torch.float32"]),
}


@pytest.mark.parametrize(("make", "inputs", "words"), FORWARD.values(), ids=FORWARD)
def test_models_that_fail_say_on_what(make, inputs: object, words: list[str]) -> None:
    net = make()
    if any(isinstance(p, nn.UninitializedParameter) for p in net.parameters()):
        net(IMAGES.float())
    data = [(inputs, Y)]
    for call in (sf.trace, sf.measure):
        refuses(ForwardError, "batch 0", *words, model=net, data=data, call=call)
    with pytest.raises(RuntimeError) as caught:
        sf.trace(net, data)
    assert isinstance(caught.value, sf.ModelError)
    assert isinstance(caught.value, sf.DataError)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("net", "inputs"),
    [
        (Tokens(), IDS),
        (Tokens(), IDS.int()),
        (Bytes(), IMAGES[:, 0, 0].to(torch.uint8)),
        (Careful(), X.float()),
        (Careful().bfloat16(), X.bfloat16()),
        (Halved().bfloat16(), X.bfloat16()),
    ],
)
def test_what_the_model_takes_is_fine(net: nn.Module, inputs: Tensor) -> None:
    asked = torch.bfloat16 if type(net) is Halved else None
    assert sf.trace(net, (inputs, Y), dtype=asked).total > 0


def test_a_model_that_fails_on_a_later_batch() -> None:
    data = [BATCHES[0], (X[2:4, :3], Y[2:4])]
    refuses(ForwardError, "batch 1", "float64 (2, 3)", data=data)


def test_an_output_that_fails() -> None:
    refuses(ForwardError, "batch 0", "IndexError", output=lambda out: [out][1])


class Own(RuntimeError):
    """Of the user's own making."""


@pytest.mark.parametrize("error", [KeyError("mine"), Own("mine")], ids=repr)
@pytest.mark.parametrize("where", ["output", "unpack", "loss"])
def test_errors_of_the_users_own_making_pass_as_they_are(where: str, error: Exception) -> None:
    def fails(*_: object) -> Tensor:
        raise error

    with pytest.raises(type(error), match="mine"):
        sf.trace(model(), (X, Y), **{where: fails})


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("none left"), MemoryError(), RuntimeError("allocate memory")]
)
def test_want_of_memory_passes_as_it_is(error: Exception) -> None:
    def answer(_: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        sf.trace(Answers(answer), (X, Y))
    assert caught.value is error


def test_meta_buffers_are_named() -> None:
    odd = Odd(nn.Parameter(torch.zeros(2)))
    odd.register_buffer("mean", torch.zeros(2, device="meta"))
    refuses(ValueError, "mean", "meta", model=odd)


def test_detached_outputs() -> None:
    refuses(ValueError, "autograd does not reach", model=Answers(Tensor.detach))


def test_a_model_that_is_random_in_eval_mode() -> None:
    noisy = Answers(lambda o: o * (1 + torch.rand_like(o)))
    refuses(ValueError, "random", model=noisy)
    for seed in range(40):  # the masks of three outputs agree by chance, one time in eight
        torch.manual_seed(seed)
        refuses(ValueError, "random", model=Answers(lambda o: nn.functional.dropout(o, 0.5)))


def test_batch_statistics_in_eval_mode_are_right_or_refused() -> None:
    """track_running_stats=False mixes samples: silence would be a wrong answer."""

    def mixing() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(5, track_running_stats=False)
        return nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU(), nn.Linear(5, 3)).double()

    oracle = Dense(mixing(), X, Y)
    try:
        result = sf.trace(mixing(), (X, Y))
    except sf.SaltflatError as error:
        assert "sample" in str(error)  # noqa: PT017
    else:
        agrees(result, oracle.blocks(oracle.hessian))


class Pairs(nn.Module):
    """Samples 2k and 2k+1 of a batch see each other, and nobody else does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp().double()

    def forward(self, x: Tensor) -> Tensor:
        other = (torch.arange(len(x)) ^ 1).clamp(max=len(x) - 1)
        return self.body(x) + self.body(0.5 * x[other]).relu()


def test_samples_that_meet_in_pairs_are_right_or_refused() -> None:
    torch.manual_seed(0)
    pairs = Pairs()
    oracle = Dense(copy.deepcopy(pairs), X, Y)
    try:
        result = sf.trace(pairs, (X, Y))
    except sf.SaltflatError as error:
        assert "sample" in str(error)  # noqa: PT017
    else:
        agrees(result, oracle.blocks(oracle.hessian))


def test_errors_form_one_tree() -> None:
    assert issubclass(sf.SaltflatError, Exception)
    with pytest.raises(ValueError, match="Unknown loss"):
        sf.trace(model(), (X, Y), "nonsense")


def test_measures_in_the_place_of_the_loss() -> None:
    with pytest.raises(sf.InvalidType, match="measures=\\[…\\]"):
        sf.measure(nn.Linear(2, 2), (torch.zeros(3, 2), torch.zeros(3).long()), ["rho"])


def test_every_error_is_exported() -> None:
    waiting = [sf.SaltflatError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        assert getattr(sf, kind.__name__) is kind
        assert kind.__name__ in sf.__all__


@pytest.mark.parametrize("name", ["XTrace", "data"])
def test_names_that_are_gone_say_what_took_their_place(name: str) -> None:
    with pytest.raises(AttributeError, match=r"is gone\. Use saltflat"):
        getattr(sf, name)
    with pytest.raises(AttributeError, match="no attribute 'Hutchison'"):
        sf.Hutchison  # noqa: B018


@pytest.mark.parametrize("name", PLACES)
def test_imports_of_names_that_are_gone(name: str) -> None:
    """Each of them fails with the new name, which is there."""
    module, _, last = name.rpartition(".")
    for statement in (f"import {name}", f"from {module} import {last}"):
        # `verify` is a function now, which takes the place of the module.
        if statement != "from saltflat.symmetries import verify":
            with pytest.raises(ImportError, match=re.escape(f"{name} is gone. Use saltflat")):
                exec(statement)
    for new in re.findall(r"saltflat\.[\w.]*\w", PLACES[name]):
        pkgutil.resolve_name(new)


def test_imports_that_never_were_fail_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'saltflat\.never'"):
        importlib.import_module("saltflat.never")
    with pytest.raises(ImportError, match="is gone"):
        importlib.import_module("saltflat.data.digits")
