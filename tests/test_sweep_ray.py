"""Sweeps on a Ray cluster of two nodes, each a set of processes of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sweeps
import torch

import saltflat as sf
from saltflat.sweep import Folder, grid, sweep


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the workers know by the environment, which nodes hand down to them."""
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    paths = [str(Path(sf.__file__).parent.parent), str(Path(__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths), prepend=os.pathsep)
    return tmp_path


@pytest.fixture
def cluster(marks: Path) -> Iterator[None]:
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
    """All in one test, for one cluster."""
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


def test_ray_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(sf.MissingDependency, match="pip install ray"):
        sweep(grid(x=[1]), sweeps.quick, Folder(tmp_path), on="ray", progress=False)
