"""Who answers an owner hook: path > the task's own choice > owner > a plugin that owns nothing > core."""

import asyncio

import pytest

from slime_core.config.schema import Config
from slime_core.config.sections.data import DataSection, DataTask
from slime_core.config.sections.evaluation import EvalSection, EvalTask
from slime_core.config.sections.reward import RewardSection
from slime_core.config.sections.train import TrainSection
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins import load_plugins
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.unit


def reward_of(value):
    return f"@slime_core.hookimpl\ndef slime_reward(group, ctx):\n    return [{value} for s in group.samples]\n"


PROMPTS = (
    "from slime_core.types import Prompt\nclass Rows:\n    def __len__(self):\n        return 3\n"
    "    def at(self, position):\n        return Prompt(id='', position=position, prompt='x')\n"
    "    def state(self):\n        return {}\n"
    "@slime_core.hookimpl\ndef slime_prompts(task, ctx):\n    return Rows()\n"
)


def provider(plugins, hook, task="default"):
    rows = [row for row in plugins.routing() if row["hook"] == hook and row["task"] == task]
    return rows[0]["provider"] if rows else None


def value(plugins, ctx, config, task="default", evaluation=False):
    prompt = Prompt(id="p/0", task=task)
    group = Group(prompt=prompt, samples=[Sample(id="p/0-0", task=task)], rollouts={0: [0]})
    used = type(ctx)(config=config, evaluation=evaluation)
    return asyncio.run(plugins.reward(group, used))[0].value


def test_core_answers_where_nobody_else_does(load):
    plugins = load()
    assert provider(plugins, "slime_generate") == "core"
    assert provider(plugins, "slime_prompts") is None


def test_a_plugin_that_owns_nothing_stands_before_core(load):
    assert provider(load(geo=reward_of(1)), "slime_reward") == "geo (dist-geo==1.0)"


def test_two_plugins_of_equal_rank_are_an_error_at_start(load):
    with pytest.raises(PluginError) as caught:
        load(one=reward_of(1), two=reward_of(2))
    assert caught.value.code == "PLG52"
    assert "one (dist-one==1.0) and two (dist-two==1.0)" in caught.value.what
    assert 'plugin = "two"' in caught.value.fix


def test_an_owner_stands_before_a_plugin_that_owns_nothing_and_only_in_its_task(load, ctx):
    config = Config(
        plugins=("one", "two"), data=DataSection(tasks=(DataTask(name="a", plugin="one"), DataTask(name="b")))
    )
    plugins = load({"data": config.data}, one=reward_of(1), two=reward_of(2))
    assert value(plugins, ctx, config, "a") == 1
    assert value(plugins, ctx, config, "b") == 2


def test_a_plugin_that_owns_another_task_does_not_answer_here(load):
    data = DataSection(tasks=(DataTask(name="a", plugin="one"), DataTask(name="b")))
    plugins = load({"data": data}, one=reward_of(1))
    assert provider(plugins, "slime_reward", "a") == "one (dist-one==1.0)"
    assert provider(plugins, "slime_reward", "b") == "core"


def test_the_only_plugin_that_brings_prompts_owns_the_default_task(load, ctx):
    plugins = load(one=reward_of(1) + PROMPTS, two=reward_of(2))
    assert value(plugins, ctx, Config(plugins=("one", "two"))) == 1
    assert len(plugins.prompts(DataTask(name="default"), ctx)) == 3


def test_a_file_of_prompts_stands_before_a_plugins(load, ctx):
    plugins = load({"data": DataSection(prompt_data="my.jsonl")}, one=reward_of(1) + PROMPTS)
    used = type(ctx)(config=Config(plugins=("one",), data=DataSection(prompt_data="my.jsonl")))
    assert plugins.prompts(DataTask(name="default", prompt_data="my.jsonl"), used) is None


def test_two_plugins_that_bring_prompts_need_a_task_each(load):
    with pytest.raises(PluginError) as caught:
        load(one=PROMPTS, two=PROMPTS)
    assert caught.value.code == "PLG52"
    assert "data.tasks" in caught.value.fix


def test_a_task_of_a_plugin_that_is_not_loaded_is_refused(load):
    with pytest.raises(ConfigError) as caught:
        load({"data": DataSection(tasks=(DataTask(name="a", plugin="gel"),))}, geo=reward_of(1))
    assert caught.value.code == "CFG04"
    assert "did you mean 'geo'?" in caught.value.fix


def test_the_tasks_own_function_stands_before_its_owner(load, ctx, tmp_path):
    (tmp_path / "mine.py").write_text("def judge(sample):\n    return 5\n")
    data = DataSection(tasks=(DataTask(name="a", plugin="one", reward=f"{tmp_path}/mine.py:judge"),))
    config = Config(plugins=("one",), data=data)
    plugins = load({"data": data}, one=reward_of(1))
    assert value(plugins, ctx, config, "a") == 5
    assert provider(plugins, "slime_reward", "a") == f"custom_rm_path ({tmp_path}/mine.py:judge)"


def test_a_function_for_the_run_stands_before_the_tasks_own(load, ctx, tmp_path):
    (tmp_path / "mine.py").write_text("def judge(sample):\n    return 5\ndef run(sample):\n    return 6\n")
    config = Config(
        data=DataSection(tasks=(DataTask(name="a", reward=f"{tmp_path}/mine.py:judge"),)),
        reward=RewardSection(custom_rm_path=f"{tmp_path}/mine.py:run"),
    )
    plugins = load_plugins(config)
    assert value(plugins, ctx, config, "a") == 6
    plugins.close()


TYPES = "@slime_core.hookimpl\ndef slime_reward_types():\n    return {'exact': lambda s, c: 3.0, 'close': near}\nasync def near(sample, ctx):\n    return 4.0\n"


@pytest.mark.parametrize(("name", "expected"), [("exact", 3.0), ("close", 4.0)], ids=["sync", "async"])
def test_a_reward_is_found_by_rm_type(load, ctx, name, expected):
    config = Config(plugins=("geo",), reward=RewardSection(rm_type=name))
    assert value(load({"reward": config.reward}, geo=TYPES), ctx, config) == expected


def test_a_task_may_name_an_rm_type_of_its_own_and_a_row_another(load, ctx):
    config = Config(plugins=("geo",), data=DataSection(tasks=(DataTask(name="a", reward="close"),)))
    plugins = load({"data": config.data}, geo=TYPES)
    assert value(plugins, ctx, config, "a") == 4.0
    row = Sample(id="p/0-0", task="a", metadata={"rm_type": "exact"})
    group = Group(prompt=Prompt(id="p/0", task="a"), samples=[row], rollouts={0: [0]})
    assert asyncio.run(plugins.reward(group, type(ctx)(config=config)))[0].value == 3.0


@pytest.mark.parametrize(
    ("sections", "nearest", "where"),
    [
        ({"reward": RewardSection(rm_type="exakt")}, "did you mean 'exact'?", "reward.rm_type"),
        (
            {"data": DataSection(tasks=(DataTask(name="a", reward="exac"),))},
            "did you mean 'exact'?",
            "of the task 'a'",
        ),
        ({"train": TrainSection(advantage_estimator="grop")}, "did you mean 'grpo'?", "train.advantage_estimator"),
        ({"train": TrainSection(loss_type="policy_los")}, "did you mean 'policy_loss'?", "train.loss_type"),
    ],
    ids=["rm_type", "rm_type of a task", "estimator", "loss"],
)
def test_an_unknown_name_is_an_error_at_start(load, sections, nearest, where):
    with pytest.raises(ConfigError) as caught:
        load(sections, geo=TYPES)
    assert caught.value.code == "CFG04"
    assert nearest in caught.value.fix
    assert caught.value.where.endswith(where)


def test_without_any_reward_the_error_names_the_keys(load, ctx):
    with pytest.raises(ConfigError) as caught:
        value(load(), ctx, Config())
    assert "reward.custom_rm_path" in caught.value.fix
    assert "reward.rm_type" in caught.value.fix


def test_an_estimator_named_like_one_of_the_cores_is_an_error(load):
    source = (
        "from slime_core.protocols import Estimator\n@slime_core.hookimpl\ndef slime_advantage():\n"
        "    return [Estimator(name='grpo', fn=lambda batch, train: {})]\n"
    )
    with pytest.raises(PluginError) as caught:
        load(one=source)
    assert caught.value.code == "PLG52"
    assert "the advantage estimator 'grpo' is registered by one (dist-one==1.0) and by" in caught.value.what
    assert "rename" in caught.value.fix


def test_a_name_registered_twice_is_an_error_naming_both(load):
    with pytest.raises(PluginError) as caught:
        load(one=TYPES, two=TYPES)
    assert caught.value.code == "PLG52"
    assert "one (dist-one==1.0)" in caught.value.what
    assert "two (dist-two==1.0)" in caught.value.what


def test_an_evaluation_set_without_a_plugin_follows_the_default_task(load, ctx):
    config = Config(plugins=("one",), eval=EvalSection(eval_tasks=(EvalTask(name="held", prompt_data="x.jsonl"),)))
    plugins = load({"eval": config.eval}, one=reward_of(1) + PROMPTS)
    assert value(plugins, ctx, config, "held", evaluation=True) == 1


def test_the_supervised_loss_alone_makes_core_replace_the_rollout(load):
    plugins = load()
    assert not plugins.replaces_rollout("default", Config())
    supervised = Config(train=TrainSection(loss_type="sft_loss"))
    assert plugins.replaces_rollout("default", supervised)
    assert not plugins.replaces_rollout("default", supervised, evaluation=True)


def test_stages_have_routes_of_their_own(tmp_path, ctx):
    (tmp_path / "mine.py").write_text("def one(sample):\n    return 1\ndef two(sample):\n    return 2\n")
    from slime_core.config.stages import stages

    paths = [f"{tmp_path}/mine.py:{name}" for name in ("one", "two")]
    config = Config(stage=tuple({"name": f"s{i}", "custom_rm_path": path} for i, path in enumerate(paths)))
    plugins = load_plugins(config)
    assert [value(plugins, ctx, stage) for stage in stages(config)] == [1, 2]
    plugins.close()


def test_fingerprints_follow_the_sources_and_the_routes(load, install_plugin, tmp_path):
    site = install_plugin("geo", "import slime_core\n" + reward_of(1))
    config = Config(plugins=("geo",))
    first = load_plugins(config).fingerprint()
    assert load_plugins(config).fingerprint() == first
    assert load_plugins(Config(plugins=("geo",), train=TrainSection(loss_type="sft_loss"))).fingerprint() != first
    module = site / "geo_plugin_module.py"
    module.write_text(module.read_text() + "\n# changed\n")
    assert load_plugins(config).fingerprint() != first
