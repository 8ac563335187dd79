"""Sizes of an FSDP trainer's groups of ranks that cannot hold, before anything starts."""

import pytest

from slime_core.config.load import load_config
from slime_core.errors import ConfigError
from slime_core.trainers.rank_grid import RankGrid

pytestmark = pytest.mark.unit

RANKS = ("--actor-num-gpus-per-node", "4")


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--context-parallel-size", "3"], "do not divide into groups", "--actor-num-gpus-per-node 6"),
        (["--context-parallel-size", "4", "--tensor-parallel-size", "2"], "tensor_parallel_size = 8", "8"),
        (["--fsdp-shard-size", "3"], "fsdp_shard_size = 3 does not fit", "multiple of 1 that divides 4"),
        (["--fsdp-shard-size", "1", "--tensor-parallel-size", "2"], "fsdp_shard_size = 1", "multiple of 2"),
        (
            ["--context-parallel-size", "2", "--true-on-policy-mode", "--rollout-engine", "local"],
            "true_on_policy_mode with ranks that share sequences",
            "--no-true-on-policy-mode",
        ),
    ],
)
def test_sizes_that_cannot_hold_are_refused_with_what_can(words, what, fix):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [*RANKS, *words])
    assert refused.value.code == "CFG04"
    assert what in refused.value.what
    assert fix in refused.value.fix
    assert f"command line: {words[0]}" in refused.value.where


def test_ranks_of_a_group_follow_each_other():
    config = load_config(None, ["--actor-num-gpus-per-node", "8", "--context-parallel-size", "2", *SIZES])
    grid = RankGrid.of(config, 8)
    assert (grid.sequence, grid.data, grid.shards) == (4, 2, 4)
    assert RankGrid(world=8).shards == 8


SIZES = ("--tensor-parallel-size", "2", "--fsdp-shard-size", "4")
