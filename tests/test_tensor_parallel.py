"""Tensor-parallel models: whatever is measured of them is what one process finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import ranks
import tensor_parallel
import torch
import torch.nn.functional as F
from ranks import differences
from tensor_parallel import OF_FOUR, SAME, data_of
from test_sharded import dense

import saltflat as sf
from saltflat.session import Likeness

pytestmark = pytest.mark.filterwarnings("ignore")

Worlds = Callable[[int], list[dict[Any, Any]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """The results of all jobs in a world of so many ranks, which is started once."""
    return cache(
        lambda count: ranks.started(count, tmp_path_factory.mktemp("world"), tensor_parallel.work)
    )


@pytest.mark.parametrize(
    ("count", "job"), [*((2, job) for job in SAME), *((4, job) for job in OF_FOUR)]
)
def test_ranks_that_share_a_model_give_what_one_process_gives(
    worlds: Worlds, count: int, job: str
) -> None:
    alone = (SAME | OF_FOUR)[job](False)
    for rank, results in enumerate(worlds(count)):
        assert not differences(alone, results[job], f"{job} on rank {rank}")


@pytest.mark.parametrize(("count", "job"), [(2, "left_as_found"), (4, "two_ways_as_found")])
def test_models_are_left_as_found(worlds: Worlds, count: int, job: str) -> None:
    for results in worlds(count):
        *served, refused = results[job]
        assert served == [("KeyError", True, True)] * 2
        assert refused == ("ModelError", False, True)


@pytest.mark.parametrize(
    ("count", "job"), [(2, "layers_as_found"), (4, "two_ways_layers_as_found")]
)
def test_models_are_left_as_found_by_layers(worlds: Worlds, count: int, job: str) -> None:
    for rank, results in enumerate(worlds(count)):
        said, same = zip(*results[job], strict=True)
        assert all(same)
        *served, failed = said
        half = len(served) // 2
        assert served[:half] == ["served"] * half
        assert all("gives other outputs" in each for each in served[half:])
        assert "ValueError: no such pass" in failed
        assert rank == count - 1 or f"rank {count - 1} of {count}" in failed


def test_weights_are_gathered_layer_by_layer(worlds: Worlds) -> None:
    for results in worlds(2):
        amid, after, difference, slope = results["held_by_graphs"]
        own = {"4.weight", "4.bias"}  # which every process has for itself
        assert after == [own, own]
        assert amid == own | {"2.weight", "2.bias"}
        assert difference < 1e-12 < slope


def test_graphs_that_were_there_before_are_used_afterwards(worlds: Worlds) -> None:
    model, (x, y) = dense(), data_of(dense())
    (F.cross_entropy(model(x), y) + model[2].weight.pow(2).sum()).backward()
    parts = [results["amid_a_pass"] for results in worlds(2)]
    whole = torch.cat([torch.tensor(part, dtype=torch.float64) for part in parts], 1)
    assert torch.allclose(whole, model[2].weight.grad, rtol=1e-12)


def test_models_are_let_go(worlds: Worlds) -> None:
    assert all(results["let_go"] is True for results in worlds(2))


def test_one_process_may_measure_by_itself(worlds: Worlds) -> None:
    first, second = (results["by_itself"] for results in worlds(2))
    assert not differences(first, dict(sf.trace(dense(), data_of(dense()), curvature="ggn")))
    assert second is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("heads", "gives other outputs"),
        ("heads, hidden", "gives other outputs"),
        ("local", "cannot be run (RuntimeError"),
        ("part", "gives outputs of shapes (8, 4), (8, 4) and not (8, 2), (8, 2)"),
        ("copies", "it "),
        ("one fails", "it "),
        ("no example", "Pass saltflat.gathered an example"),
        ("other example", "do not run it on the same samples"),
        ("half", "parameters in torch.bfloat16: too few digits"),
        ("until", "not kept gathered"),
        ("heads, layers", "gives other outputs"),
        ("heads, ranks", "gives other outputs"),
        ("part, layers", "gives outputs of shapes (8, 4), (8, 4) and not (8, 2), (8, 2)"),
        ("heads, blank", "gives other outputs"),
        ("unlike", "do not have the same one"),
        ("unlike, layers", "do not have the same one"),
        ("buffers", "do not have the same one"),
        ("buffers, fully_shard", "have not the same buffers"),
        ("read", "takes a weight of a module that is not running"),
        ("borrowed", "saltflat.gathered(model, example_inputs)"),
        ("borrowed, gathered", "True"),
        ("other samples", "do not run it on the same samples"),
        ("tied", "gathered(model, example_inputs)"),
        ("eigenvalues", "gathered(model, example_inputs)"),
        ("audit", "gathered(model, example_inputs)"),
        ("dtype", "before fully_shard"),
        ("inputs", "The inputs are integers"),
        ("checkpoint", "Switch checkpointing off"),
        ("afterwards", "True"),
    ],
)
def test_what_cannot_be_served_is_refused(worlds: Worlds, name: str, words: str) -> None:
    said = [results["refusals"][name] for results in worlds(2)]
    assert all(words in each for each in said), said
    if name == "one fails":
        assert "fails in another process" in said[0]
        assert "IndexError: pop from empty list" in said[1]
    if name == "copies":
        assert "gives other outputs" in said[1]


@pytest.mark.parametrize("version", ["2.6.0", "2.8.0+cu128", "2.10.1"])
def test_versions_of_torch_that_are_not_tested_are_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions, by which 2.8 comes before 2.11."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    with pytest.raises(sf.ModelError, match=rf"2\.11 or newer.*Got torch {re.escape(version)}"):
        Likeness(dense(), torch.ones(1), lambda: None)
