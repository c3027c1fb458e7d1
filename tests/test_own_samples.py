"""Sharded models with samples of every rank's own: all ranks find what one process finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import own_samples
import pytest
import ranks
import torch
from dense import Dense
from own_samples import JOBS, OTHERS, SAME, Shard
from ranks import differences
from test_sharded import dense, samples, straight

import saltflat as sf

pytestmark = pytest.mark.filterwarnings("ignore")

Worlds = Callable[[int], list[dict[Any, Any]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """The results of all jobs in a world of so many ranks, which is started once."""
    return cache(
        lambda count: ranks.started(count, tmp_path_factory.mktemp("world"), own_samples.work)
    )


@pytest.mark.parametrize(("count", "job"), [(n, job) for n in JOBS for job in JOBS[n]])
def test_ranks_that_share_a_model_give_what_one_process_gives(
    worlds: Worlds, count: int, job: str
) -> None:
    alone = SAME[job](Shard(count, None))
    for rank, results in enumerate(worlds(count)):
        assert not differences(alone, results[job], f"{job} on rank {rank}")


def test_some_are_exact_and_some_are_drawn() -> None:
    exact, drawn = (SAME[job](Shard(2, None)) for job in ("exact", "drawn"))
    assert exact["straight"][-1]
    assert drawn["own"][1] > 0


@pytest.mark.parametrize("count", JOBS)
def test_against_the_dense_oracle(worlds: Worlds, count: int) -> None:
    model = straight().eval()
    x, y = map(torch.cat, zip(*Shard(count, None)(model), strict=True))
    oracle = Dense(model, x, y)
    for results in worlds(count):
        for name, block in oracle.blocks(oracle.hessian).items():
            got = torch.tensor(results["exact"]["straight", "hessian"][name], dtype=torch.float64)
            torch.testing.assert_close(got.flatten(), block.diagonal(), rtol=1e-10, atol=1e-13)


def test_what_takes_the_whole_model_is_skipped_on_all_ranks(worlds: Worlds) -> None:
    alone = sf.measure(straight(), Shard(2, None)(straight()))
    for results in worlds(2):
        found, skipped, source = results["default"]
        assert source == (12, 2)
        assert "hessian_trace" in found
        assert all("gathered(model)" in why for why in skipped.values())
        assert found.keys() | skipped.keys() >= set(alone)
        for name, (value, *_) in found.items():
            assert value == pytest.approx(alone[name].value, rel=1e-10)


def test_a_rank_that_runs_out_of_memory_takes_fewer_samples(worlds: Worlds) -> None:
    alone = dict(sf.trace(straight(), Shard(2, None)(straight())))
    for rank, results in enumerate(worlds(2)):
        found, failed = results["short_of_memory"]
        assert not differences(alone, found)
        assert len(failed) == rank


def test_the_model_is_left_as_found(worlds: Worlds) -> None:
    alone = dict(sf.trace(dense(), samples(dense())))
    for results in worlds(2):
        same, found = results["left_as_found"]
        assert same
        assert not differences(alone, found)


@pytest.mark.parametrize("count", JOBS)
def test_a_model_that_was_gathered_is_gathered_again(worlds: Worlds, count: int) -> None:
    alone = dict(sf.trace(dense(), Shard(count, None)(dense()), curvature="ggn"))
    for results in worlds(count):
        kinds = []
        for same, names, found, _ in results["as_gathered"]:
            assert same == [True] * 3
            assert not differences(alone, found)  # what counts are the shards
            kinds.append(names)
        assert kinds == [
            {"Parameter", "DTensor"},
            {"Parameter"},
            {"DTensor" if count == 4 else "Parameter"},
        ]
        plain = results["as_gathered"][1][-1]
        assert results["as_gathered"][2][-1] == pytest.approx(plain, rel=1e-12)
        assert results["as_gathered"][0][-1] != pytest.approx(plain, rel=1e-2)


def test_small_curved_blocks_are_drawn(worlds: Worlds) -> None:
    """One process writes them out, by products with whole parameters."""
    model = own_samples.bent()
    oracle = Dense(model, *map(torch.cat, zip(*Shard(2, None)(dense()), strict=True)))
    blocks = {n: float(b.trace()) for n, b in oracle.blocks(oracle.hessian).items()}
    blocks[""] = sum(blocks.values())
    for results in worlds(2):
        found = results["small"]
        assert found.keys() == blocks.keys()
        for name, (value, stderr, rule) in found.items():
            assert rule in ("propagated", "activation probes")
            assert value == pytest.approx(blocks[name], abs=4 * stderr + 1e-10)
    assert max(stderr for _, stderr, _ in found.values()) > 0


@pytest.mark.parametrize("count", JOBS)
def test_layers_whose_inputs_are_0_against_the_dense_oracle(worlds: Worlds, count: int) -> None:
    data = own_samples.darkened(Shard(count, None)(dense()), but=1)
    x, y = map(torch.cat, zip(*data, strict=True))
    traces = []
    for bend in (False, True):
        oracle = Dense(own_samples.Dark(bend), x, y)
        traces.append({n: float(b.trace()) for n, b in oracle.blocks(oracle.hessian).items()})
    straight, curved = traces
    for results in worlds(count):
        values, stderr, *_ = results["dark"][0]
        assert stderr == 0
        assert values == pytest.approx(straight, rel=1e-10, abs=1e-13)
        drawn = results["dark_and_curved"]
        assert drawn.keys() == curved.keys()
        for name, (value, error) in drawn.items():
            assert value == pytest.approx(curved[name], abs=4 * error + 1e-10)
    assert straight["never.weight"] == 0
    assert min(traces[k]["late.weight"] for k in (0, 1)) > 0


def test_a_gathered_model_is_not_asked_for(worlds: Worlds) -> None:
    alone = dict(sf.trace(dense(), Shard(2, None)(dense()), curvature="ggn"))
    assert all(not differences(alone, results["gathered"]) for results in worlds(2))


def test_noise_goes_by_the_place_of_a_sample(worlds: Worlds) -> None:
    """A negative control."""
    for results in worlds(2):
        assert differences(results["drawn"]["propagated"][0], results["without_places"])


def test_a_look_at_derivatives_moves_the_weights_of_one_rank_alone(worlds: Worlds) -> None:
    """A negative control: moved for all, a rank's own slopes are not those of the model."""
    for results in worlds(2):
        kind, words = results["moved_for_all"]
        assert kind == "ModelError"
        assert "is not the derivative" in words


def test_ranks_that_wait_for_each_other_gather_less(worlds: Worlds) -> None:
    for results in worlds(2):
        (one, other), (waiting, not_waiting) = results["without_meeting"]
        assert not differences(one, other)
        assert 0 < waiting < not_waiting


REFUSALS = {
    "nan": ("DataError", "batch 0 of rank 1 hold NaN"),
    "no_data": ("InvalidType", "The data must be a DataLoader"),
    "unread": ("OSError", "the disk is gone"),
    "detached": ("ModelError", "is not the derivative"),
    "eigenvalues": ("ModelError", "gathered(model)"),
    "no_rule": ("ModelError", "No fast rule serves mix.attend.in_proj_weight"),
    "coupled": ("DataError", "depend on the other samples"),
    "other_seed": ("InvalidValue", "seed is 0 on rank 0 and 1 on rank 1"),
    "other_weights": ("ModelError", "'0.weight' is not the same on rank 0 and rank 1"),
    "other_copies": ("ModelError", "'0.weight' is not the same on rank 0 and rank 1"),
    "probed": ("ModelError", "Probes take second derivatives in whole parameters"),
}


@pytest.mark.parametrize("job", REFUSALS)
def test_an_error_of_one_rank_is_one_of_all(worlds: Worlds, job: str) -> None:
    kind, words = REFUSALS[job]
    for results in worlds(2):
        assert results[job][0] == kind
        assert words in results[job][1]


@pytest.mark.parametrize("job", ["failing", "failing_early"])
def test_a_rank_that_fails_in_a_pass_stops_the_others_at_once(worlds: Worlds, job: str) -> None:
    for rank, results in enumerate(worlds(2)):
        kind, words, passes, sharded = results[job]
        assert kind == "ForwardError"
        assert "ValueError: no such pass" in words
        assert rank == 1 or "rank 1 of 2" in words
        assert passes < 60  # of more than a hundred
        assert sharded


def test_an_interruption_of_one_rank_stops_the_others(worlds: Worlds) -> None:
    (first, said, passes, _), (second, _, _, _) = (r["interrupted"] for r in worlds(2))
    assert first == "DistributedError"
    assert "KeyboardInterrupt: enough" in said
    assert passes < 60
    assert second == "KeyboardInterrupt"


def test_ctrl_c_that_comes_while_a_rank_waits_stops_the_others(worlds: Worlds) -> None:
    for rank, results in enumerate(worlds(2)):
        said, seconds, same, sharded = results["waiting"]
        assert said.startswith("Interrupted: SIGINT")
        assert rank == 0 or "rank 0 of 2" in said
        assert 1.0 < seconds < 60
        assert same
        assert sharded


def test_ranks_go_on_after_errors(worlds: Worlds) -> None:
    alone = dict(sf.trace(straight(), Shard(2, None)(straight())))
    assert list(OTHERS)[-1] == "afterwards"
    assert all(not differences(alone, results["afterwards"]) for results in worlds(2))


def test_copies_of_shards_that_differ_are_refused(worlds: Worlds) -> None:
    for results in worlds(4):
        kind, words = results["other_copies"]
        assert kind == "ModelError"
        assert "'0.weight' is not the same on rank 0 and rank 2" in words


def test_a_mesh_of_some_ranks_is_refused(worlds: Worlds) -> None:
    for results in worlds(4):
        kind, words = results["of_a_part"]
        assert kind == "ModelError"
        assert "sharded over a mesh of 2" in words


@pytest.mark.parametrize("count", JOBS)
def test_a_rank_that_is_killed_stops_the_others(worlds: Worlds, count: int) -> None:
    *others, last = worlds(count)
    assert "killed" not in last
    for results in others:
        assert results["killed"][0] == "DistributedError"
        assert "rank is gone" in results["killed"][1]
        assert results["seconds", "killed"] < 60
