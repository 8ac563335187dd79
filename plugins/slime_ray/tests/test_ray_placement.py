"""What is asked of a Ray cluster: bundles and placements of small layouts, worked out by hand."""

import pytest

from slime_core.config.load import load_config
from slime_core.errors import ConfigError
from slime_ray.placement import ProcessPlacement, RayPlan, lacking, oversize, plan, table
from slime_sglang.topology import topology

pytestmark = pytest.mark.unit


def placed(*flags, device="cuda", threads=2):
    given = ("--hf-checkpoint", ".", "--cluster", "ray", "--device", device, "--cpu-threads", threads, *flags)
    return plan(load_config(None, list(map(str, given))))


def test_colocated_engines_sit_on_the_gpus_of_the_ranks():
    found = placed("--actor-num-nodes", 2, "--actor-num-gpus-per-node", 4, "--rollout-num-gpus-per-engine", 2)
    assert found.bundles == ({"GPU": 4, "CPU": 4}, {"GPU": 4, "CPU": 4})
    assert found.ranks == tuple(ProcessPlacement(bundle=b, gpus=(g,)) for b in range(2) for g in range(4))
    assert found.engines == tuple(ProcessPlacement(bundle=b, gpus=g) for b in range(2) for g in ((0, 1), (2, 3)))


def test_disaggregated_engines_have_a_bundle_each():
    found = placed(
        "--actor-num-gpus-per-node", 2, "--no-colocate", "--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 2
    )
    assert found == RayPlan(
        bundles=({"GPU": 2, "CPU": 2}, {"GPU": 2, "CPU": 1}, {"GPU": 2, "CPU": 1}),
        ranks=(ProcessPlacement(bundle=0, gpus=(0,)), ProcessPlacement(bundle=0, gpus=(1,))),
        engines=(ProcessPlacement(bundle=1, gpus=(0, 1)), ProcessPlacement(bundle=2, gpus=(0, 1))),
    )


def test_on_a_cpu_bundles_are_threads_and_engines_share_the_ranks_or_have_their_own():
    shared = placed("--actor-num-gpus-per-node", 2, "--rollout-num-engines", 3, device="cpu")
    assert shared.bundles == ({"CPU": 4},)
    assert shared.engines == (ProcessPlacement(bundle=0),) * 3
    apart = placed("--no-colocate", "--rollout-num-engines", 2, device="cpu")
    assert apart.bundles == ({"CPU": 2}, {"CPU": 2}, {"CPU": 2})
    assert apart.engines == (ProcessPlacement(bundle=1), ProcessPlacement(bundle=2))


def served(*flags, **more):
    return placed("--rollout-engine", "sglang", *flags, **more)


def test_servers_sit_where_embedded_engines_would():
    """rollout_num_* describe them in the same words."""
    for flags in (
        ("--actor-num-nodes", 2, "--actor-num-gpus-per-node", 4, "--rollout-num-gpus-per-engine", 2),
        ("--actor-num-gpus-per-node", 2, "--no-colocate", "--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 2),
    ):
        assert served(*flags) == placed(*flags)
    for flags in (
        ("--actor-num-gpus-per-node", 2, "--rollout-num-engines", 3),
        ("--actor-num-nodes", 2, "--rollout-num-engines", 3),
        ("--no-colocate", "--rollout-num-engines", 2),
        ("--debug-rollout-only", "--rollout-num-engines", 2),
    ):
        assert served(*flags, device="cpu") == placed(*flags, device="cpu")
    assert served("--rollout-external-engine-addrs", "http://10.0.0.1:1").engines == ()


def test_servers_that_share_no_gpu_with_a_rank_have_a_bundle_of_their_own():
    found = served("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 6, "--rollout-num-gpus-per-engine", 2)
    assert found.bundles == ({"GPU": 2, "CPU": 2}, {"GPU": 2, "CPU": 1}, {"GPU": 2, "CPU": 1})
    assert found.engines == tuple(ProcessPlacement(bundle=b, gpus=(0, 1)) for b in range(3))
    alone = served("--debug-rollout-only", "--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 2)
    assert alone.bundles == ({"GPU": 2, "CPU": 1}, {"GPU": 2, "CPU": 1})


GROUPS = """
[[group]]
name = "prefill"
mode = "prefill"
gpus = 2

[[group]]
name = "decode"
mode = "decode"
count = 2

[[group]]
name = "judge"
role = "reward"
model = "."
"""


def test_groups_of_a_file_are_placed_server_by_server_whatever_they_are_for(tmp_path):
    (tmp_path / "groups.toml").write_text(GROUPS)
    flags = ("--engine-topology", tmp_path / "groups.toml", "--rollout-router", "sglang")
    shared = served(*flags, "--actor-num-gpus-per-node", 4)
    assert shared.bundles == ({"GPU": 4, "CPU": 4}, {"GPU": 1, "CPU": 1})
    placements = (
        ProcessPlacement(bundle=0, gpus=(0, 1)),
        ProcessPlacement(bundle=0, gpus=(2,)),
        ProcessPlacement(bundle=0, gpus=(3,)),
    )
    assert shared.engines == (*placements, ProcessPlacement(bundle=1, gpus=(0,)))
    apart = served(*flags, "--no-colocate")
    assert [bundle["GPU"] for bundle in apart.bundles] == [1, 2, 1, 1, 1]
    assert [placement.bundle for placement in apart.engines] == [1, 2, 3, 4]


def test_the_ranks_on_a_servers_gpus_are_told_by_the_same_numbers():
    """Handles of memory (tensor) go from rank n to the server whose placement has GPU n of the training machines."""
    words = ("--actor-num-nodes", 2, "--actor-num-gpus-per-node", 4, "--rollout-num-gpus-per-engine", 2)
    flags = ["--hf-checkpoint", ".", "--cluster", "ray", "--device", "cuda", "--rollout-engine", "sglang", *words]
    config = load_config(None, list(map(str, flags)))
    ranks, servers = plan(config).ranks, plan(config).engines
    beside = topology(config).beside(8)
    assert beside == {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}
    for number, near in beside.items():
        at = [(placement.bundle, *placement.gpus) for placement in (ranks[rank] for rank in near)]
        assert at == [(servers[number].bundle, gpu) for gpu in servers[number].gpus]


@pytest.mark.parametrize(
    ("each", "size", "total"), [(3, 2, 6), *(pytest.param(2, 4, n, marks=pytest.mark.nightly) for n in (4, 8))]
)
def test_a_server_that_would_lie_on_two_machines_is_refused(each, size, total):
    flags = ("--actor-num-nodes", 2, "--actor-num-gpus-per-node", each, "--rollout-num-gpus-per-engine", size)
    with pytest.raises(ConfigError, match="would lie on two machines") as caught:
        served(*flags, "--rollout-num-gpus", total)
    assert caught.value.code == "CFG04"
    assert f"each training machine has {each}" in caught.value.why
    apart = served(*flags, "--rollout-num-gpus", total, "--no-colocate")
    assert {bundle["GPU"] for bundle in apart.bundles} == {each, size}


def test_a_run_without_a_trainer_or_without_rollouts_asks_for_less():
    assert placed("--debug-rollout-only", device="cpu") == RayPlan(
        bundles=({"CPU": 2},), ranks=(), engines=(ProcessPlacement(bundle=0),)
    )
    only = placed("--debug-train-only", "--load-debug-rollout-data", ".", device="cpu")
    assert (only.bundles, len(only.ranks), only.engines) == (({"CPU": 2},), 1, ())


@pytest.mark.parametrize(("each", "size"), [(3, 2), (2, 4)])
def test_engines_that_would_lie_on_two_machines_are_refused(each, size):
    flags = ("--actor-num-nodes", 2, "--actor-num-gpus-per-node", each, "--rollout-num-gpus-per-engine", size)
    with pytest.raises(ConfigError) as caught:
        placed(*flags, "--rollout-num-engines", 2 * each // size)
    assert caught.value.code == "CFG04"
    assert f"each machine has {each}" in caught.value.why


def test_requests_that_find_no_room_are_known_before_anything_waits():
    four, one = {"GPU": 4, "CPU": 4}, {"GPU": 1, "CPU": 1}
    machines = {"a": {"GPU": 4, "CPU": 8}, "b": {"GPU": 2, "CPU": 8}}
    assert lacking([one, four, one], machines) == []
    assert lacking([four, four], machines) == [1]
    assert lacking([one] * 7, machines) == [6]
    assert lacking([{"CPU": 9}], machines) == [0]
    assert lacking([one], {}) == [0]
    assert machines["a"] == {"GPU": 4, "CPU": 8}, "it only looks"


def test_a_request_that_no_single_machine_can_hold_is_named():
    """An engine of 16 GPUs on machines of 8: more machines would not help."""
    machines = {"a": {"GPU": 8, "CPU": 64}, "b": {"GPU": 8, "CPU": 64}}
    told = oversize([{"GPU": 2, "CPU": 2}, {"GPU": 16, "CPU": 1}], machines)
    assert told == "an engine, or a machine's ranks, of 16 GPU lie within one machine: none has over 8"
    assert oversize([{"GPU": 8, "CPU": 8}] * 3, machines) == "", "a machine more would do"
    assert oversize([{"CPU": 65}], machines).endswith("none has over 64")
    assert oversize([{"GPU": 1}], {}).endswith("none has over 0")


def test_wanted_and_free_are_told_together():
    told = table([{"GPU": 4, "CPU": 4}] * 2 + [{"CPU": 1}], {"a": {"GPU": 4, "CPU": 8}, "b": {"CPU": 2}})
    assert told == "wanted: 2 x (4 GPU, 4 CPU), 1 x (1 CPU); free: a (4 GPU, 8 CPU), b (2 CPU)"
    assert table([{"CPU": 1}], {}) == "wanted: 1 x (1 CPU); free: no machine"
