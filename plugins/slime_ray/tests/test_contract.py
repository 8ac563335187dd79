"""A Ray cluster keeps the contract of clusters, with its rank and its engine in processes that Ray's hosts start."""

import asyncio

import pytest
from cluster_case import keeps
from ray_nodes import ray_cluster

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from slime_core.testing.contracts import CLUSTER_CHECKS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def nodes():
    """A head of two processors, which the process of these tests joins once a check; Ray's token has its tests elsewhere."""
    with ray_cluster(RAY_AUTH_MODE="disabled") as found:
        yield found


@pytest.mark.nightly  # by day the runs of test_ray_run and test_ray_servers start clusters, and lose parts of them
@pytest.mark.parametrize("check", CLUSTER_CHECKS, ids=lambda check: check.__name__)
def test_ray_cluster(check, nodes, tmp_path):
    flags = ("--cluster", "ray", "--ray-address", nodes.address)
    asyncio.run(keeps(check, tmp_path, *flags, alive=lambda: nodes.pids(words="slime_core.clusters.")))
