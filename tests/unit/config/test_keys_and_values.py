"""Keys and values: unknown, of the wrong type, out of range; flags, their types, their precedence."""

import pytest

from slime_core.config.fields import core_keys, section_model
from slime_core.config.load import load_config, read, split
from slime_core.config.schema import SECTIONS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "key", "line", "fix"),
    [
        pytest.param("[train]\nlerning_rate = 1\n", "train.lerning_rate", 2, "slime config keys train", id="no near"),
        pytest.param(
            "[train]\n\nclip_gard = 1.0\n", "train.clip_gard", 3, "did you mean 'train.clip_grad'?", id="typo"
        ),
        pytest.param("[trian]\nlr = 1.0\n", "trian", 1, "did you mean 'train'?", id="table"),
        pytest.param("[rollout]\nlr = 1.0\n", "rollout.lr", 2, "it is train.lr: put it under [train]", id="section"),
        pytest.param("lr = 1.0\n", "lr", 1, "it is train.lr: put it under [train]", id="top"),
        pytest.param(
            "[data]\ntasks = [\n {name = 'a'},\n {name = 'b', wieght = 2.0}]\n",
            "data.tasks[1].wieght",
            4,
            "did you mean 'data.tasks[1].weight'?",
            id="task",
        ),
        pytest.param("[[stage]]\nname = 'a'\nlrr = 1.0\n", "stage[0].lrr", 3, "stage[0].lr", id="stage"),
        pytest.param("[[stage]]\nname = 'a'\ntrain.lrr = 1.0\n", "stage[0].train.lrr", 3, "train.lr'?", id="dotted"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(recipe, refused, text, key, line, fix):
    error = refused(recipe(text))
    assert error.code == "CFG01"
    assert f"unknown key '{key}'" in error.what
    assert error.where == f"recipe.toml:{line}"
    assert fix in error.fix


@pytest.mark.parametrize(
    ("text", "shown", "why", "fix"),
    [
        pytest.param(
            '[train]\nlr = "1e-3"\n', 'train.lr = "1e-3"', "a string", "without quotes: 0.001", id="text for number"
        ),
        pytest.param(
            "[rollout]\nrollout_top_k = true\n", "rollout_top_k = true", "a boolean", "write 1", id="bool for int"
        ),
        pytest.param("[train]\nlr = true\n", "train.lr = true", "a boolean", "write 1", id="bool for number"),
        pytest.param("[cluster]\ncolocate = 1\n", "colocate = 1", "an integer", "write true", id="int for bool"),
        pytest.param("[rollout]\nrollout_batch_size = 2.5\n", "= 2.5", "a number", "give an integer", id="fraction"),
        pytest.param('plugins = "rm_math"\n', 'plugins = "rm_math"', "a string", '["rm_math"]', id="text for array"),
        pytest.param("name = 3\n", "name = 3", "an integer", "a string", id="int for text"),
        pytest.param("[train]\nloss_type = ['a']\n", 'loss_type = ["a"]', "an array", "a string", id="array for text"),
        pytest.param("train = 3\n", "train = 3", "an integer", "a table", id="int for table"),
        pytest.param("[data]\nrollout_shuffle = 'yes'\n", '= "yes"', "a string", "true or false", id="yes"),
        pytest.param(
            "[rollout]\nrollout_stop = ['a', 1]\n", "rollout_stop[1] = 1", "an integer", "a string", id="element"
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_it_is_and_should_be(recipe, refused, text, shown, why, fix):
    error = refused(recipe(text))
    assert error.code == "CFG02"
    assert shown in error.what
    assert why in error.why
    assert fix in error.fix
    assert error.where.startswith("recipe.toml:")


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        pytest.param("[train]\nlr = -1e-6\n", ">= 0", id="negative learning rate"),
        pytest.param("[rollout]\nn_samples_per_prompt = 0\n", ">= 1", id="empty group"),
        pytest.param("[train]\neps_clip = 1.5\n", "<= 1", id="clip of one"),
        pytest.param("[rollout]\nrollout_top_p = 0.0\n", "> 0", id="empty nucleus"),
        pytest.param("[rollout]\nrollout_top_p = 1.01\n", "<= 1", id="nucleus above one"),
        pytest.param("[cluster]\ndevice = 'gpu'\n", "one of auto, cpu, cuda", id="choice"),
        pytest.param("name = 'a/b'\n", "matching", id="name"),
        pytest.param("seed = -1\n", ">= 0", id="seed"),
        pytest.param("[[data.tasks]]\nname = 'a'\nweight = 0.0\n", "> 0", id="task weight"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_bound(recipe, refused, text, bound):
    error = refused(recipe(text))
    assert error.code == "CFG03"
    assert bound in error.why
    assert error.where.startswith("recipe.toml:")
    assert error.fix


def test_a_choice_that_is_nearly_right_is_suggested(recipe, refused):
    assert "did you mean 'cosine'?" in refused(recipe("[train]\nlr_decay_style = 'cosin'\n")).fix


def test_all_wrong_keys_and_values_are_named_at_once(recipe, refused):
    error = refused(recipe("[train]\nlrr = 1.0\nlr = -1.0\nclip_grad = 'x'\n"))
    assert error.what == "3 problems in the configuration"
    for part in ("CFG01 unknown key 'train.lrr'", "CFG03 train.lr = -1.0", "CFG02 train.clip_grad"):
        assert part in error.why
    assert error.exit_code == 2


def test_a_secret_of_the_wrong_type_is_not_printed(recipe, refused):
    error = refused(recipe('[train]\nlr = "hf_abcdefghijklmnopqrstuvwxyz0123"\n'))
    assert "abcdefgh" not in str(error)


def test_a_value_that_configs_of_older_runs_have_is_the_one_that_took_its_place(recipe):
    assert load_config(recipe('train.lora_export = "both"\n')).train.lora_export == "auto"


def test_key_names_are_unique_over_all_sections():
    names = [name for section in SECTIONS for name in section_model(section).model_fields]
    assert len(names) == len(set(names))
    assert len(core_keys()) == len(names) + 4  # schema_version name seed plugins


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        pytest.param(["--rollout-batch-size", "4"], "rollout.rollout_batch_size", 4, id="dashes"),
        pytest.param(["--rollout_batch_size=4"], "rollout.rollout_batch_size", 4, id="underscores and equals"),
        pytest.param(["rollout.rollout_batch_size=4"], "rollout.rollout_batch_size", 4, id="dotted"),
        pytest.param(["--rollout.rollout-batch-size", "4"], "rollout.rollout_batch_size", 4, id="dotted flag"),
        pytest.param(["rollout_batch_size=4"], "rollout.rollout_batch_size", 4, id="bare assignment"),
        pytest.param(["--lr", "1e-3"], "train.lr", 1e-3, id="float"),
        pytest.param(["--lr", "1"], "train.lr", 1.0, id="int for float"),
        pytest.param(["--entropy-coef", "-0.5"], "train.entropy_coef", -0.5, id="negative"),
        pytest.param(["--no-colocate"], "cluster.colocate", False, id="no flag"),
        pytest.param(["--rollout-shuffle"], "data.rollout_shuffle", True, id="bare bool"),
        pytest.param(["--rollout-shuffle", "false"], "data.rollout_shuffle", False, id="bool with word"),
        pytest.param(["--rollout-shuffle=true"], "data.rollout_shuffle", True, id="bool with equals"),
        pytest.param(["--rollout-stop", "a", "b"], "rollout.rollout_stop", ("a", "b"), id="several words"),
        pytest.param(["--rollout-stop", "12"], "rollout.rollout_stop", ("12",), id="one word stays text"),
        pytest.param(['--rollout-stop=["a", "b"]'], "rollout.rollout_stop", ("a", "b"), id="array"),
        pytest.param(["--rollout-stop-token-ids", "1", "2"], "rollout.rollout_stop_token_ids", (1, 2), id="integers"),
        pytest.param(["--name", "true"], "name", "true", id="text that looks like a bool"),
        pytest.param(["--ray-address", "nan"], "cluster.ray_address", "nan", id="text that looks like nan"),
        pytest.param(["--ray-address", "[1]"], "cluster.ray_address", "[1]", id="text that looks like an array"),
        pytest.param(["--seed", "7"], "seed", 7, id="top key"),
        pytest.param(
            ["--apply-chat-template-kwargs", '{"enable_thinking": false}'],
            "data.apply_chat_template_kwargs",
            {"enable_thinking": False},
            id="json table",
        ),
        pytest.param(["--plugin", "a", "--plugin", "b", "--plugin", "a"], "plugins", ("a", "b"), id="plugins"),
    ],
)
def test_every_core_key_is_a_flag_typed_by_the_schema(recipe, flags, path, value):
    recipe()
    config = load_config(None, flags)
    found = config
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("flags", "code", "what", "fix"),
    [
        pytest.param(["--rollout-batch-siz", "4"], "CFG01", "'rollout_batch_siz'", "--rollout-batch-size", id="typo"),
        pytest.param(["train.lrr=1"], "CFG01", "'train.lrr'", "train.lr", id="dotted typo"),
        pytest.param(["trian.lr=1"], "CFG01", "'trian.lr'", "did you mean 'train'?", id="section typo"),
        pytest.param(["data.lr=1"], "CFG01", "'data.lr'", "put it under [train]", id="wrong section"),
        pytest.param(["--lr", "fast"], "CFG02", 'train.lr = "fast"', "a number", id="word for number"),
        pytest.param(["--seed", "1.5"], "CFG02", 'seed = "1.5"', "an integer", id="fraction for integer"),
        pytest.param(["--seed", "1e3"], "CFG02", 'seed = "1e3"', "an integer", id="exponent for integer"),
        pytest.param(["--colocate=maybe"], "CFG02", "colocate", "true or false", id="word for bool"),
        pytest.param(["--lr"], "CFG02", "--lr needs a value", "--lr VALUE", id="no value at the end"),
        pytest.param(
            ["--lr", "--seed", "1"], "CFG02", "--lr needs a value", "--lr VALUE", id="no value before a flag"
        ),
        pytest.param(["--num-layers"], "CFG02", "--num-layers needs a value", "--num-layers VALUE", id="of a trainer"),
        pytest.param(["--no-lr"], "CFG02", "not a yes-or-no key", "--lr", id="no of a number"),
        pytest.param(["--lr", "-3"], "CFG03", "train.lr = -3.0", ">= 0", id="range"),
        pytest.param(["stage.warmup.lr=1"], "CFG01", "no stage 'warmup'", "stage", id="no such stage"),
        pytest.param(
            ["data.tasks.0.weight=2"], "CFG01", "data.tasks.0.weight", "slime config keys", id="into an array"
        ),
        pytest.param(["-x"], "CFG01", "unexpected argument '-x'", "--key VALUE", id="one dash"),
    ],
)
def test_wrong_flags_are_refused_where_they_stand(recipe, refused, flags, code, what, fix):
    recipe()
    error = refused(None, *flags)
    assert error.code == code
    assert what in error.what
    assert fix in error.fix
    assert error.where.startswith("command line: ")


def test_wrong_flags_are_reported_all_at_once(recipe, refused):
    recipe()
    error = refused(None, "--lrr", "1", "--lr", "--no-seed", "trian.lr=1")
    assert error.what == "4 problems in the configuration"
    for part in ("unknown key 'lrr'", "--lr needs a value", "seed is not a yes-or-no key", "unknown key 'trian.lr'"):
        assert part in error.why


@pytest.mark.parametrize("text", ["[[train]]\nlr = 1.0\n", "train = 3\n", "train = []\n"])
def test_a_flag_into_a_table_that_is_none_leaves_the_error_to_the_recipe(recipe, refused, text):
    error = refused(recipe(text), "--lr", "0.5")
    assert (error.code, error.where) == ("CFG02", "recipe.toml:1")
    assert error.what.startswith("train = ")


def test_a_recipe_may_follow_a_flag_that_takes_no_value():
    for flag in ("--no-colocate", "--colocate"):
        words = split([flag, "rm_math/default", "--seed", "1"])
        assert words.recipe == "rm_math/default"
        assert [word.name for word in words.overrides] == ["colocate", "seed"]


def test_a_flag_stands_before_the_recipe_and_the_recipe_before_the_default(recipe):
    path = recipe("plugins = ['one']\n[train]\nlr = 0.5\nclip_grad = 2.0\n")
    config = load_config(path, ["--lr", "0.25", "--plugin", "two"])
    assert (config.train.lr, config.train.clip_grad, config.train.adam_beta1) == (0.25, 2.0, 0.9)
    assert config.plugins == ("one", "two")


def test_the_last_of_two_flags_of_one_key_holds_and_a_notice_says_so(recipe):
    recipe()
    loaded = read(None, ["--seed", "1", "train.lr=1e-6", "--seed", "2", "--lr", "1e-6"])
    assert loaded.config.seed == 2
    assert loaded.notices == ("notice: --seed is given twice: 1, then 2; the last one holds",)
    (named,) = read(None, ["plugin.judge.api_key=canary-123456", "plugin.judge.api_key=canary-7"]).notices[1:]
    assert "canary" not in named


def test_cluster_is_short_for_cluster_backend(recipe):
    recipe()
    assert load_config(None, ["--cluster", "local"]).cluster.cluster_backend == "local"


def test_a_pasted_secret_is_warned_about_with_its_line_and_not_shown(recipe):
    loaded = read(recipe('seed = 1\n[plugin.judge]\napi_key = "canary-1234567"\n'))
    (notice,) = loaded.notices
    assert "CFG10" in notice
    assert "plugin.judge.api_key" in notice
    assert "recipe.toml:3" in notice
    assert "canary" not in notice
    assert "canary-1234567" in loaded.secrets


def test_a_secret_on_the_command_line_is_warned_about(recipe):
    recipe()
    (notice,) = read(None, ["plugin.judge.api_key=canary-1234567"]).notices
    assert "CFG10" in notice
    assert "canary" not in notice


def test_a_secret_that_the_environment_brought_is_known_and_not_warned_about(recipe, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "canary-998")
    loaded = read(recipe('[plugin.judge]\naccess = "${JUDGE_TOKEN}"\n'))
    assert loaded.notices == ()
    assert "canary-998" in loaded.secrets


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        pytest.param(["--tasks", "a:0.5, b"], [("a", 0.5), ("b", 1.0)], id="commas"),
        pytest.param(["--tasks", "a:0.5", "b:2"], [("a", 0.5), ("b", 2.0)], id="words"),
        pytest.param(["--tasks", '{name="a", weight=2.0}', "b"], [("a", 2.0), ("b", 1.0)], id="a table and a name"),
        pytest.param(["data.tasks=['a', {name='b', weight=0.5}]"], [("a", 1.0), ("b", 0.5)], id="an array"),
    ],
)
def test_tasks_are_named_in_short(words, tasks):
    config = load_config(None, [*words, "--eval-tasks", "c.1,d"])
    assert [(task.name, task.weight) for task in config.data.tasks] == tasks
    assert [task.name for task in config.eval.eval_tasks] == ["c.1", "d"]


def test_a_task_that_is_no_name_and_number_is_refused(refused):
    for words in ("a:x", "a,", '{name = "a", weight = }'):
        error = refused(None, "--tasks", words)
        assert "NAME:WEIGHT" in error.what + error.why
