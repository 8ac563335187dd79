"""What is asked of a Ray cluster: bundles and seats of small layouts, worked out by hand."""

import pytest

from slime_core.clusters.ray.placement import Plan, Seat, lacking, plan, table
from slime_core.config.load import load_config
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit


def placed(*flags, device="cuda", threads=2):
    given = ("--hf-checkpoint", ".", "--cluster", "ray", "--device", device, "--cpu-threads", threads, *flags)
    return plan(load_config(None, list(map(str, given))))


def test_colocated_engines_sit_on_the_gpus_of_the_ranks():
    found = placed("--actor-num-nodes", 2, "--actor-num-gpus-per-node", 4, "--rollout-num-gpus-per-engine", 2)
    assert found.bundles == ({"GPU": 4, "CPU": 4}, {"GPU": 4, "CPU": 4})
    assert found.ranks == tuple(Seat(bundle=b, gpus=(g,)) for b in range(2) for g in range(4))
    assert found.engines == tuple(Seat(bundle=b, gpus=g) for b in range(2) for g in ((0, 1), (2, 3)))


def test_disaggregated_engines_have_a_bundle_each():
    found = placed(
        "--actor-num-gpus-per-node", 2, "--no-colocate", "--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 2
    )
    assert found == Plan(
        bundles=({"GPU": 2, "CPU": 2}, {"GPU": 2, "CPU": 1}, {"GPU": 2, "CPU": 1}),
        ranks=(Seat(bundle=0, gpus=(0,)), Seat(bundle=0, gpus=(1,))),
        engines=(Seat(bundle=1, gpus=(0, 1)), Seat(bundle=2, gpus=(0, 1))),
    )


def test_on_a_cpu_bundles_are_threads_and_engines_share_the_ranks_or_have_their_own():
    shared = placed("--actor-num-gpus-per-node", 2, "--rollout-num-engines", 3, device="cpu")
    assert shared.bundles == ({"CPU": 4},)
    assert shared.engines == (Seat(bundle=0),) * 3
    apart = placed("--no-colocate", "--rollout-num-engines", 2, device="cpu")
    assert apart.bundles == ({"CPU": 2}, {"CPU": 2}, {"CPU": 2})
    assert apart.engines == (Seat(bundle=1), Seat(bundle=2))


def test_a_run_without_a_trainer_or_without_rollouts_asks_for_less():
    assert placed("--debug-rollout-only", device="cpu") == Plan(
        bundles=({"CPU": 2},), ranks=(), engines=(Seat(bundle=0),)
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


def test_what_finds_no_room_is_known_before_anything_waits():
    four, one = {"GPU": 4, "CPU": 4}, {"GPU": 1, "CPU": 1}
    machines = {"a": {"GPU": 4, "CPU": 8}, "b": {"GPU": 2, "CPU": 8}}
    assert lacking([one, four, one], machines) == []
    assert lacking([four, four], machines) == [1]
    assert lacking([one] * 7, machines) == [6]
    assert lacking([{"CPU": 9}], machines) == [0]
    assert lacking([one], {}) == [0]
    assert machines["a"] == {"GPU": 4, "CPU": 8}, "it only looks"


def test_wanted_and_free_are_told_together():
    told = table([{"GPU": 4, "CPU": 4}] * 2 + [{"CPU": 1}], {"a": {"GPU": 4, "CPU": 8}, "b": {"CPU": 2}})
    assert told == "wanted: 2 x (4 GPU, 4 CPU), 1 x (1 CPU); free: a (4 GPU, 8 CPU), b (2 CPU)"
    assert table([{"CPU": 1}], {}) == "wanted: 1 x (1 CPU); free: no machine"
