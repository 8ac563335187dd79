"""[[stage]] tables: resolved in order, overridden by flags, checked like everything else."""

import pytest

from slime_core.config.dump import to_toml
from slime_core.config.load import load_config, stage_name, stages
from slime_core.config.presets import settle

pytestmark = pytest.mark.unit

TWO = """
name = "demo"
[train]
lr = 1e-4
[rollout]
num_rollout = 50
rollout_batch_size = 8

[[stage]]
name = "warmup"
loss_type = "sft_loss"
lr = 5e-3
num_rollout = 3
n_samples_per_prompt = 1

[[stage]]
name = "grpo"
rollout.rollout_stop = ["x"]
[stage.train]
clip_grad = 0.5
[stage.plugin.any]
level = 2
"""


def test_a_config_without_stages_is_one_stage_called_main(recipe):
    config = load_config(recipe("seed = 1\n"))
    assert stages(config) == [config.model_copy(update={"train": settle(config.train)})]
    assert stages(stages(config)[0]) == stages(config), "resolving a resolved stage changes nothing"
    assert stage_name(config) == "main"


def test_each_stage_overrides_flat_keys_or_section_tables(recipe):
    first, second = stages(load_config(recipe(TWO)))
    assert [stage_name(first), stage_name(second)] == ["warmup", "grpo"]
    assert (first.name, second.name) == ("demo", "demo")
    assert (first.train.loss_type, first.train.lr, first.rollout.num_rollout) == ("sft_loss", 5e-3, 3)
    assert (second.train.loss_type, second.train.lr, second.rollout.num_rollout) == ("policy_loss", 1e-4, 50)
    assert (first.rollout.rollout_stop, second.rollout.rollout_stop) == ((), ("x",))
    assert (first.train.clip_grad, second.train.clip_grad) == (1.0, 0.5)
    assert (first.plugin, second.plugin) == ({}, {"any": {"level": 2}})
    assert first.rollout.rollout_batch_size == second.rollout.rollout_batch_size == 8


def test_resolving_a_resolved_stage_changes_nothing(recipe):
    first, second = stages(load_config(recipe(TWO)))
    assert stages(first) == [first]
    assert stages(second) == [second]


def test_num_rollout_counts_in_the_last_stage(recipe):
    first, second = stages(load_config(recipe(TWO), ["--num-rollout", "7"]))
    assert (first.rollout.num_rollout, second.rollout.num_rollout) == (3, 7)


def test_any_other_flag_stands_before_the_values_of_all_stages(recipe):
    first, second = stages(load_config(recipe(TWO), ["--lr", "0.5", "train.clip_grad=0.25"]))
    assert (first.train.lr, second.train.lr) == (0.5, 0.5)
    assert (first.train.clip_grad, second.train.clip_grad) == (0.25, 0.25)


def test_a_flag_can_aim_at_one_stage(recipe):
    first, second = stages(load_config(recipe(TWO), ["stage.warmup.lr=0.5", "stage.warmup.num_rollout=1"]))
    assert (first.train.lr, second.train.lr) == (0.5, 1e-4)
    assert (first.rollout.num_rollout, second.rollout.num_rollout) == (1, 50)


def test_the_name_of_the_run_does_not_rename_stages(recipe):
    config = load_config(recipe(TWO), ["--name", "other"])
    assert config.name == "other"
    assert [stage_name(stage) for stage in stages(config)] == ["warmup", "grpo"]


@pytest.mark.parametrize(
    ("text", "code", "what", "line"),
    [
        pytest.param("[[stage]]\nlr = 1.0\n", "CFG02", "stage 1 has no name", 1, id="no name"),
        pytest.param("[[stage]]\nname = 'a b'\n", "CFG02", "cannot be used", 2, id="name with a space"),
        pytest.param(
            "[[stage]]\nname = 'a'\n[[stage]]\nname = 'a'\n", "CFG04", "two stages are named 'a'", 1, id="twice"
        ),
        pytest.param("[[stage]]\nname = 'a'\nlr = 'x'\n", "CFG02", "train.lr", 3, id="type"),
        pytest.param("[[stage]]\nname = 'a'\nlr = -1.0\n", "CFG03", "train.lr = -1.0", 3, id="range"),
        pytest.param("[[stage]]\nname = 'a'\nseed = 3\n", "CFG01", "seed", 3, id="key of the run"),
        pytest.param("[[stage]]\nname = 'a'\nhf_checkpoint = './m'\n", "CFG04", "cannot differ", 3, id="model"),
        pytest.param("[[stage]]\nname = 'a'\ncluster.device = 'cpu'\n", "CFG04", "cannot differ", 3, id="cluster"),
        pytest.param(
            "[[stage]]\nname = 'a'\nrollout_temperature = 0\n", "CFG03", "rollout_temperature = 0", 3, id="rule"
        ),
        pytest.param("stage = 3\n", "CFG02", "stage = 3", 1, id="no table"),
    ],
)
def test_a_wrong_stage_is_refused_with_its_line(recipe, refused, text, code, what, line):
    error = refused(recipe(text))
    assert error.code == code
    assert what in error.what
    assert error.where.split(", ")[0] == f"recipe.toml:{line}"


def test_what_is_built_once_a_run_cannot_differ_between_stages(recipe, refused):
    keys = {
        "init_weights = 'random'",
        "trust_remote_code = true",
        "rollout_engine = 'sglang'",
        "train_backend = 'megatron'",
        "dtype = 'float32'",
        "debug_rollout_only = true",
        "debug_train_only = true",
    }
    error = refused(recipe("[[stage]]\nname = 'a'\n" + "\n".join(keys)))
    names = {line.partition(" = ")[0] for line in keys}
    assert [name for name in names if f"stage[0].{name} cannot differ between stages" not in error.why] == []


def test_problems_of_all_stages_are_named_at_once(recipe, refused):
    error = refused(recipe("[[stage]]\nname = 'a'\nlr = -1.0\n[[stage]]\nname = 'b'\nclip_grad = -1.0\n"))
    assert "train.lr = -1.0" in error.why
    assert "train.clip_grad = -1.0" in error.why
    assert error.where == "recipe.toml:3, recipe.toml:6"


def test_stages_survive_the_run_directory(recipe):
    config = load_config(recipe(TWO))
    again = load_config(recipe(to_toml(config), name="config.toml"))
    assert again == config
    assert stages(again) == stages(config)
