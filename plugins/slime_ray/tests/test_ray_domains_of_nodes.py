"""On a real cluster bundles go to the machines of one NVLink domain."""

import json
import os
import subprocess
import sys

import pytest
import ray_nodes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

DRIVER = """
import asyncio, json, sys
import ray
from ray.util.placement_group import placement_group_table
from slime_ray.joining import reserve

ray.init(sys.argv[1], log_to_driver=False)
names = {node["NodeID"]: node["Labels"].get("nvidia.com/gpu.clique", "") for node in ray.nodes()}
group = asyncio.run(reserve([{"CPU": 2}, {"CPU": 1}], 60, ranks=1))
print(json.dumps([names[node] for node in placement_group_table(group)["bundles_to_node_id"].values()]))
"""


def test_bundles_of_a_run_share_a_domain(tmp_path):
    """Alone, Ray puts the second bundle on the larger machine outside of the domain."""
    with ray_nodes.ray_cluster(processors=1) as nodes:
        join, label = f"--address={nodes.address}", "--labels=nvidia.com/gpu.clique=one"
        outside = nodes.node("outside", join, processors=2)
        with outside, nodes.node("a", join, label, processors=2), nodes.node("b", join, label):
            done = subprocess.run(
                [sys.executable, "-c", DRIVER, nodes.address],
                env={**os.environ, **nodes.env},
                capture_output=True,
                text=True,
                timeout=200,
            )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == ["one", "one"]
