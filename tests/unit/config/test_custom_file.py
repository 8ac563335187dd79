"""slime's file of custom keys: laid over the config where it names a key, whatever recipe and flags say."""

import pytest

from slime_core.compat.flat import flat
from slime_core.config.load import load_config, read
from slime_core.config.sections.train import TrainSection
from slime_core.config.stages import stages
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.fixture
def custom(tmp_path):
    """Writes a file of custom keys; returns its path."""

    def custom(text, name="custom.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return custom


def test_custom_keys_hold_before_recipe_and_flags_and_the_override_is_told_once(custom, tmp_path):
    path = custom("lr: 1e-5\neps_clip: 1\nrollout_stop: [a, b]\nrm_type: null\nmax_turns: 3\nuse_kl_loss: true\n")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[train]\neps_clip = 0.3\n[reward]\nrm_type = "math"\n')
    loaded = read(recipe, ["--lr", "3", "--custom-config-path", path])
    config, args = loaded.config, flat(loaded.config)
    assert (config.train.lr, config.train.eps_clip, config.rollout.rollout_stop) == (1e-5, 1.0, ("a", "b"))
    assert config.reward.rm_type == "", "null is the default"
    assert (args["lr"], args["rm_type"], args["max_turns"], args["use_kl_loss"]) == (1e-5, None, 3, True)
    assert config.train.kl_loss_coef == TrainSection().kl_loss_coef
    (line,) = [text for text in loaded.notices if path in text]
    assert "train.lr (over command line: --lr), train.eps_clip (over " in line
    assert f"{recipe}:2" in line or "recipe.toml:2" in line
    assert "max_turns" not in line


def test_a_custom_key_is_checked_like_any_other_with_its_file_as_the_place(custom):
    path = custom("rollout_batch_size: -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["--custom-config-path", path])
    assert (caught.value.code, caught.value.where) == ("CFG03", path)


def test_a_custom_key_of_the_trainer_goes_to_its_table(custom):
    words = ["--custom-config-path", custom("tensor_model_parallel_size: 2\n"), "--actor-num-gpus-per-node", "2"]
    assert load_config(None, words).table("megatron") == {}
    words += ["--train-backend", "megatron", "--tensor-model-parallel-size", "1"]
    assert read(None, words, check=True).config.table("megatron") == {"tensor_model_parallel_size": 2}


def test_a_stage_may_name_a_file_of_its_own(custom, tmp_path):
    recipe = tmp_path / "recipe.toml"
    for name, text in (("one.toml", "lr = 2.0"), ("two.toml", "lr = 3.0")):
        custom(text, name)
    recipe.write_text(
        'rollout.custom_config_path = "one.toml"\n[[stage]]\nname = "a"\nlr = 9.0\n'
        '[[stage]]\nname = "b"\ncustom_config_path = "two.toml"\n'
    )
    assert [stage.train.lr for stage in stages(load_config(recipe))] == [2.0, 3.0]


def test_an_old_runs_config_is_read_without_its_file(custom):
    path = custom("lr: 1e-5\n")
    assert read(None, ["--custom-config-path", path], check=False).config.train.lr == TrainSection().lr
