"""Sweeps on a Ray cluster of two nodes, each a set of processes of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import many
import pytest
import sweeps
import torch

import saltflat as sf
from saltflat.sweep import Folder, grid, sweep


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that the workers know by the environment, which nodes hand down to them."""
    folder = tmp_path_factory.mktemp("marks")
    paths = [str(Path(sf.__file__).parent.parent), str(Path(__file__).parent)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARKS", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(paths), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def cluster(marks: Path) -> Iterator[None]:
    """One for all tests: it takes seconds to start."""
    ray, utilities = pytest.importorskip("ray"), pytest.importorskip("ray.cluster_utils")
    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    head = {**node, "include_dashboard": False}
    nodes = utilities.Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(**node)
    ray.init(address=nodes.address, log_to_driver=False)
    assert len(ray.nodes()) == 2
    yield
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.usefixtures("cluster")
def test_ray_does_killed_jobs_again_and_finds_what_is_found_here(
    marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saltflat.sweep.cluster.TRIES", 2)
    good = [{"x": x, "how": "works"} for x in range(4)] + [{"x": 4, "how": "dies once"}]
    bad = [{"x": x, "how": how} for x, how in enumerate(["raises", "stubborn", "dies"])]
    folder = Folder(marks / "ray")
    with pytest.raises(sf.SaltflatError, match="3 of 8 jobs failed") as caught:
        sweep(bad + good, sweeps.troubled, folder, on="ray", progress=False)
    assert "{'x': 0, 'how': 'raises'}: ValueError: no such luck" in str(caught.value)
    assert "{'x': 1, 'how': 'stubborn'}: Stubborn: not to be pickled" in str(caught.value)
    assert "{'x': 2, 'how': 'dies'}: WorkerCrashedError" in str(caught.value)
    assert (marks / "died-4").exists()
    found = sweep(good, sweeps.troubled, folder, progress=False)
    here = sweep(good, sweeps.troubled, Folder(marks / "here"), progress=False)
    assert [run.outcome for run in found] == [run.outcome for run in here]

    device = torch.device("cuda")
    with pytest.raises(sf.InvalidValue, match="has no GPU"):
        sweep(grid(x=[1]), sweeps.quick, Folder(marks), on="ray", device=device, progress=False)


@pytest.mark.usefixtures("cluster")
def test_ray_measures_checkpoints(marks: Path) -> None:
    """One of them in a worker that is killed, one without weights that fit."""
    files = many.saved(marks / "weights", 2)
    files.append(many.misfit(marks / "weights"))
    options: dict[str, Any] = {"measures": ["rho"], "progress": False}
    found = sf.measure_many(files, many.data, model=many.killed_once, on="ray", **options)
    assert (marks / "made-once").exists()
    here = sf.measure_many(files, many.data(), model=many.make, **options)
    assert [*found] == [*here] == ["epoch-0", "epoch-1"]
    assert all(found[name]["rho"] == here[name]["rho"] for name in here)
    assert found["epoch-0"]["rho"].value != found["epoch-1"]["rho"].value
    assert found.failed == here.failed
    assert "does not fit the model" in found.failed["misfit"]


def test_ray_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(sf.MissingDependency, match="pip install ray"):
        sweep(grid(x=[1]), sweeps.quick, Folder(tmp_path), on="ray", progress=False)
