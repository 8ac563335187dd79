"""What cannot hold where a run lives on a Ray cluster."""

import pytest

from slime_core.config.load import load_config
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit

RAY = ("--hf-checkpoint", ".", "--cluster", "ray", "--rollout-engine", "sglang", "--device", "cuda")


@pytest.mark.parametrize(("road", "place"), [("tensor", "--colocate"), ("nccl", "--no-colocate")])
def test_without_ranks_weights_cannot_come_from_a_gpu_of_the_driver(road, place):
    given = [*RAY, place, "--rollout-num-gpus", "1", "--update-weight-transport", road]
    assert load_config(None, given).rollout.update_weight_transport == road
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*given, "--debug-rollout-only"])
    assert caught.value.code == "CFG04"
    assert f"update_weight_transport = {road} with debug_rollout_only" in caught.value.what
    assert "disk" in caught.value.fix
    local = [word if word != "ray" else "local" for word in given]
    assert load_config(None, [*local, "--debug-rollout-only"]).rollout.debug_rollout_only


def test_servers_on_a_ray_cluster_are_a_run_like_any_other():
    assert load_config(None, list(RAY)).cluster.cluster_backend == "ray"
