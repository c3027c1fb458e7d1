"""distributed=True: several processes give what one gives that has all their samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import BytesIO
from math import isclose
from typing import Any

import pytest
import ranks
import torch
from dense import Dense
from ranks import differences
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import saltflat as sf
from saltflat.distributed import _packed, _Unpickler
from saltflat.measures import MEASURES
from saltflat.prints import checksum

pytestmark = pytest.mark.filterwarnings("ignore")


Results = list[dict[Any, Any]]
Worlds = Callable[[int], Results]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """The results of all jobs in a world of so many ranks, which is started once."""
    return cache(lambda count: ranks.started(count, tmp_path_factory.mktemp("world")))


@pytest.mark.parametrize(("count", "job"), [(n, job) for n in ranks.JOBS for job in ranks.JOBS[n]])
def test_several_ranks_give_what_one_process_gives(worlds: Worlds, count: int, job: str) -> None:
    alone = ranks.SAME[job](ranks.all_batches(count), False)
    for rank, results in enumerate(worlds(count)):
        assert not differences(alone, results[job], f"{job} on rank {rank}")


def test_every_measure_is_among_them(worlds: Worlds) -> None:
    found = worlds(2)[0]
    assert set(found["straight"]["measures"]) == set(MEASURES)
    assert not found["straight"]["measures"]["hessian_trace"][1]  # exact …
    assert found["curved"]["measures"]["hessian_trace"][1] > 0  # … and estimated


def test_dense_hessian(worlds: Worlds) -> None:
    """Against somebody else than ourselves: the Hessian written out, of all samples."""
    x, y = map(torch.cat, zip(*ranks.all_batches(2), strict=True))
    dense = Dense(ranks.relu(), x, y)
    blocks = dense.blocks(dense.hessian)
    for results in worlds(2):
        for name, block in blocks.items():
            diagonal = torch.tensor(results["curvature"]["diagonal"][name], dtype=torch.float64)
            torch.testing.assert_close(diagonal.flatten(), block.diagonal(), rtol=1e-10, atol=1e-13)


def test_noise_goes_by_the_place_of_a_sample_and_sums_by_all_ranks(worlds: Worlds) -> None:
    """Negative controls: without either, the numbers are others."""
    for results in worlds(2):
        assert differences(results["curvature"]["propagated"][0], results["without_places"])
        summed = {
            n: sum(map(sum, d)) if isinstance(d[0], list) else sum(d)
            for n, d in results["curvature"]["diagonal"].items()
        }
        assert all(results["without_sums"][n] < 0.9 * total for n, total in summed.items())


REFUSALS = {
    "nan": ("DataError", "batch 0 of rank 1 hold NaN"),
    "wrong_shape": ("ForwardError", "batch 0 of rank 0"),
    "wrong_on_one": ("ForwardError", "batch 0 of rank 1"),
    "unsent": ("DistributedError", "Unsent: no luck"),
    "coupled": ("DataError", "depend on the other samples"),
    "joint": ("DataError", "is not a mean or a sum over samples"),
    "joint_over_ranks": ("DataError", "is not a mean or a sum over samples"),
    "other_model": ("ModelError", "'0.weight' is not the same on rank 0 and rank 1"),
    "other_order": ("ModelError", "'0.weight' is not the same on rank 0 and rank 1"),
    "other_sign": ("ModelError", "'2.weight' is not the same on rank 0 and rank 1"),
    "other_module": ("ModelError", "Module '1' is not the same on rank 0 and rank 1"),
    "other_frozen": ("InvalidValue", "parameters is 0.weight, 0.bias, 2.weight, 2.bias on rank 0"),
    "other_seed": ("InvalidValue", "seed is 0 on rank 0 and 1 on rank 1"),
    "other_measures": ("InvalidValue", "measures is [Rho("),
    "other_loss": ("InvalidValue", "the loss is cross_entropy on rank 0 and cross_entropy(mean="),
    "other_curvature": ("InvalidValue", "curvature is 'hessian' on rank 0 and 'ggn' on rank 1"),
    "other_picture": ("InvalidValue", "seed=1) on rank 1"),
    "other_call": ("DistributedError", "All must make the same call"),
    "other_vector": ("InvalidValue", "all must have the same"),
    "other_place": ("InvalidValue", "all must have the same"),
    "padded": ("DataError", "repeats 1 of 7 samples"),
    "padded_inside": ("DataError", "DistributedSampler repeats 1 of 7 samples"),
    "padded_parts": ("DataError", "DistributedSampler repeats 1 of 1001 samples"),
    "padded_batches": ("DataError", "BatchSamplerShard repeats 1 of 7 samples"),
    "shuffled_otherwise": ("InvalidValue", "seed and epoch (True, 0, 0) on rank 0"),
    "of_another_world": ("DataError", "of 2, so that some would be left out"),
    "heavy": ("OutOfMemoryError", "out of memory"),
    "functions": ("InvalidValue", "functions cannot be audited"),
    "nothing": ("DataError", "The data are empty"),
}


@pytest.mark.parametrize("job", REFUSALS)
def test_an_error_of_one_rank_is_one_of_all(worlds: Worlds, job: str) -> None:
    kind, words = REFUSALS[job]
    for results in worlds(2):
        assert results[job][0] == kind
        assert words in results[job][1]


def test_an_interruption_of_one_rank_stops_the_others(worlds: Worlds) -> None:
    first, second = (results["between"] for results in worlds(2))
    assert first[0] == "KeyboardInterrupt"
    assert second[0] == "DistributedError"
    assert "KeyboardInterrupt" in second[1]
    assert "rank 0 of 2" in second[1]


def test_ctrl_c_that_comes_while_a_rank_waits_stops_the_others(worlds: Worlds) -> None:
    """Amid an exchange it waits for the end of that: what a rank says next would be taken for the
    rest of it."""
    for rank, results in enumerate(worlds(2)):
        said, seconds, same = results["waiting"]
        assert said.startswith("Interrupted: SIGINT")
        assert rank == 0 or "rank 0 of 2" in said
        assert 1.0 < seconds < 60
        assert same


@pytest.mark.parametrize("count", ranks.JOBS)
def test_a_rank_that_dies_stops_the_others(worlds: Worlds, count: int) -> None:
    *others, last = worlds(count)
    assert "dies" not in last
    for results in others:
        assert results["dies"][0] == "DistributedError"
        assert "A rank is gone" in results["dies"][1]
        assert results["seconds", "dies"] < 60


def test_beside_nccl(worlds: Worlds) -> None:
    alone = dict(sf.trace(ranks.relu(), ranks.all_batches(2)))
    for results in worlds(2):
        assert not differences([alone, alone], results["beside_nccl"])


def test_all_ranks_skip_by_one_clock(worlds: Worlds) -> None:
    first, second = (results["clock"] for results in worlds(2))
    assert first == second


def test_shards_of_a_dataset(worlds: Worlds) -> None:
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(7, 4, generator=g).double(), torch.arange(7) % 3
    alone = sf.measure(ranks.relu(), (x, y), measures=["hessian_trace"])["hessian_trace"].value
    for results in worlds(2):
        value, samples, count, notes = results["sharded"]
        assert isclose(value, alone, rel_tol=1e-10)
        assert (samples, count) == (7, 2)
        assert "over 2 ranks with 3 + 4 samples" in notes


def test_a_rank_without_samples(worlds: Worlds) -> None:
    alone = dict(sf.trace(ranks.relu(), ranks.batches([4])))
    for results in worlds(2):
        assert not differences(alone, results["nobody"])


def test_the_same_samples_on_all_ranks_are_told(worlds: Worlds) -> None:
    for results in worlds(2):
        assert any("every rank gave the same samples" in note for note in results["same_samples"])


def test_without_distributed_a_rank_is_alone(worlds: Worlds) -> None:
    samples, count, notes = worlds(2)[0]["alone"]
    assert (samples, count) == (4, 1)
    assert any("samples of rank 0 of 2 alone. Pass distributed=True" in note for note in notes)


def test_a_shard_in_one_process_is_told() -> None:
    dataset = TensorDataset(torch.randn(8, 4).double(), torch.arange(8) % 3)
    loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, num_replicas=4, rank=1))
    notes = sf.audit(ranks.relu(), loader, measures=["hessian_trace"], elements=1).notes
    assert any("samples of rank 1 of 4 alone" in note for note in notes)


def test_a_part_of_a_shard_in_one_process_is_told() -> None:
    dataset = TensorDataset(torch.randn(4000, 4).double(), torch.arange(4000) % 3)
    sampler: Any = DistributedSampler(dataset, num_replicas=4, rank=1)
    loader = DataLoader(dataset, 100, sampler=sampler)
    trace = sf.trace(ranks.relu(), loader, samples="auto", tolerance=0.5)
    assert any("samples of rank 1 of 4 alone" in note for note in trace.notes)
    assert any("of 1,000 samples, drawn at random" in note for note in trace.notes)


@pytest.mark.parametrize("job", ["sent", "shuffled_together", "with_workers"])
def test_a_loader_that_ranks_cannot_read_alone(worlds: Worlds, job: str) -> None:
    found = worlds(2)[0][job]
    assert found[0] == "DataError"
    assert "a rank that reads it alone would wait for the others" in found[1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(8.0),
        torch.arange(9, dtype=torch.float32)[1:],
        torch.tensor(3, dtype=torch.int16),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.bfloat16).mT,
        torch.ones(3, dtype=torch.complex64),
        torch.empty(0, 4),
    ],
)
def test_tensors_are_sent_without_the_rest_of_their_storage(tensor: torch.Tensor) -> None:
    sent = _packed({"few": tensor})
    got = _Unpickler(BytesIO(sent), torch.device("cpu")).load()["few"]
    assert got.dtype == tensor.dtype
    torch.testing.assert_close(got, tensor, rtol=0, atol=0)
    few = torch.zeros(100_000, dtype=torch.float64)[:2]
    assert len(_packed(few)) < 1000


def test_checksums() -> None:
    """What a sum, a norm, or a weighted sum of words does not tell."""
    x = torch.randn(6, 4, dtype=torch.float64)
    tensors = [x, -x, x.flip(0), x.mT.contiguous().reshape(6, 4), x + 0.0, x * (1 + 2**-52)]
    tensors += [x.float(), -x.float(), x[1:], x.bfloat16(), -x.bfloat16(), x.roll(1, 0)]
    long = torch.zeros(1 << 21)
    long[-1] = 1.0
    tensors += [long, long.roll(1), long.roll(1 << 20), torch.zeros(1 << 21)]
    sums = [checksum(t) for t in tensors]
    assert sums[4] == sums[0]
    assert len(set(sums)) == len(sums) - 1
    strided = torch.stack([x, x], 2)[..., 0]
    assert checksum(strided) == checksum(x)


def test_no_process_group() -> None:
    with pytest.raises(sf.InvalidValue, match="needs a process group: start the program with"):
        sf.measure(ranks.relu(), ranks.batches([3]), distributed=True)
    with pytest.raises(sf.InvalidType, match="distributed must be True or False"):
        sf.trace(ranks.relu(), ranks.batches([3]), distributed="yes")


@pytest.mark.parametrize("length", [0, 3, 10])
def test_shards_hold_every_sample_once(length: int) -> None:
    shards = [list(sf.ShardSampler(range(length), rank=k, world=4)) for k in range(4)]
    assert [i for shard in shards for i in shard] == list(range(length))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_shards_of_no_rank() -> None:
    with pytest.raises(sf.InvalidValue, match="needs a process group"):
        sf.ShardSampler([1, 2])
    with pytest.raises(sf.InvalidValue, match="rank and world, or neither"):
        sf.ShardSampler([1, 2], rank=0)
    with pytest.raises(sf.InvalidValue, match="rank must be less than world, 2"):
        sf.ShardSampler([1, 2], rank=2, world=2)
