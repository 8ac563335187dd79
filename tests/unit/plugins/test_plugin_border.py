"""What comes out of a hook is checked; what goes wrong in it is told with plugin, hook, prompt and place."""

import asyncio
import threading

import pytest

from slime_cli.failure import exit_refused
from slime_core.errors import EngineError, PluginError
from slime_core.types import Reward

pytestmark = pytest.mark.unit

REWARD = "@slime_core.hookimpl\ndef slime_reward(group, ctx):\n    {body}\n"


def reward(load, ask, body, **sections):
    plugins = load(dict(sections), geo=REWARD.format(body=body))
    return ask(plugins, "reward", plugins=("geo",), **sections)


def broken(load, ask, body, **sections):
    with pytest.raises(PluginError) as caught:
        reward(load, ask, body, **sections)
    return caught.value


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("return [0.5, 1]", [0.5, 1.0]),
        ("return (True, False)", [1.0, 0.0]),
        ("import numpy as np; return [np.float32(0.25), np.int64(3)]", [0.25, 3.0]),
    ],
    ids=["float and int", "bool in a tuple", "numpy scalars"],
)
def test_documented_reward_types_become_rewards(load, ask, body, values):
    found = reward(load, ask, body)
    assert found == [Reward(value=v) for v in values]
    assert all(type(r.value) is float for r in found)


def test_a_reward_object_keeps_its_kind_terms_and_reason(load, ask):
    body = "from slime_core.types import Reward; return [Reward(value=1, terms={'a': 2}, reason='x'), Reward(value=0.0, kind='infra_error')]"
    first, second = reward(load, ask, body)
    assert first == Reward(value=1.0, terms={"a": 2.0}, reason="x")
    assert second.kind == "infra_error"


def test_a_dict_reward_needs_reward_key_and_keeps_other_numbers_as_terms(load, ask):
    body = "return [{'score': 1.0, 'format': True, 'text': 'no'}, {'score': 0}]"
    found = reward(load, ask, body, reward={"reward_key": "score"})
    assert found == [Reward(value=1.0, terms={"format": 1.0}), Reward(value=0.0)]


def test_a_dict_reward_without_reward_key_is_told_the_key_to_set(load, ask):
    error = broken(load, ask, "return [{'score': 1.0}, {'score': 0}]")
    assert error.code == "PLG57"
    assert "reward.reward_key=score" in error.fix


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("None", "None"),
        ("'0.5'", "a str '0.5'"),
        ("__import__('torch').tensor(1.0)", "a torch Tensor"),
        ("__import__('numpy').ones(1)", "a numpy ndarray"),
        ("[1.0]", "a list"),
        ("1j", "a complex"),
    ],
    ids=["None", "string", "torch scalar", "numpy array", "list", "complex"],
)
def test_anything_else_is_refused_with_the_sample(load, ask, value, shown):
    error = broken(load, ask, f"return [1.0, {value}]")
    assert error.code == "PLG57"
    assert f"returned {shown}" in error.what
    assert "sample 'main/3-1'" in error.what
    assert "geo (dist-geo==1.0)" in error.where


@pytest.mark.parametrize(
    "value", ["float('nan')", "float('inf')", "-1e31", "10**400"], ids=["nan", "inf", "huge", "int"]
)
def test_numbers_that_cannot_train_are_refused_with_the_sample(load, ask, value):
    error = broken(load, ask, f"return [{value}, 0.0]")
    assert error.code == "PLG58"
    assert "sample 'main/3-0'" in error.what


def test_a_term_that_is_not_finite_is_refused_by_name(load, ask):
    body = "return [{'score': 1.0, 'speed': float('nan')}, {'score': 1.0}]"
    error = broken(load, ask, body, reward={"reward_key": "score"})
    assert error.code == "PLG58"
    assert "'speed' = nan" in error.what


@pytest.mark.parametrize("body", ["return [1.0]", "return [1.0] * 3", "return []"], ids=["short", "long", "empty"])
def test_a_list_of_another_length_is_refused_before_any_use(load, ask, group, body):
    error = broken(load, ask, body)
    assert error.code == "PLG59"
    assert "not 2" in error.what
    assert [sample.reward for sample in group.samples] == [None, None]


@pytest.mark.parametrize("body", ["return None", "return 1.0", "return {'a': 1}", "return 'ab'"])
def test_an_answer_that_is_no_list_is_refused(load, ask, body):
    assert broken(load, ask, body).code == "PLG57"


@pytest.mark.parametrize("kind", ["def", "async def"], ids=["sync", "async"])
def test_an_exception_is_told_with_plugin_hook_prompt_and_line(load, ask, kind):
    source = REWARD.format(body="return helper(group)").replace("def slime", f"{kind} slime")
    source += "\ndef helper(group):\n    return [{}['missing']]\n"
    plugins = load(geo=source)
    with pytest.raises(PluginError) as caught:
        ask(plugins, "reward", plugins=("geo",))
    error = caught.value
    assert error.code == "PLG56"
    assert "geo.slime_reward failed for prompt 'main/3'" in error.what
    assert "KeyError: 'missing'" in error.what
    assert "geo (dist-geo==1.0)" in error.where
    assert "geo_plugin_module.py:7" in error.where
    assert "rollout.on_plugin_error=drop" in error.fix


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise Odd", "Odd: (its message cannot be read: ZeroDivisionError)"),
        ("raise ValueError('x' * 5_000_000)", "xx "),
    ],
    ids=["no message", "a huge one"],
)
def test_an_exception_is_told_whatever_its_message_is(load, ask, body, part):
    odd = "class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\n"
    plugins = load(geo=odd + REWARD.format(body=body))
    with pytest.raises(PluginError) as caught:
        ask(plugins, "reward", plugins=("geo",))
    assert caught.value.code == "PLG56"
    assert part in caught.value.what
    assert len(caught.value.what) < 3000


@pytest.mark.parametrize("kind", ["def", "async def"], ids=["sync", "async"])
@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "import sys; sys.exit(1)", "import os; os._exit(0)"])
def test_a_hook_cannot_end_the_process(load, ask, kind, ending):
    plugins = load(geo=REWARD.format(body=ending).replace("def slime", f"{kind} slime"))
    with pytest.raises(PluginError) as caught, exit_refused():
        ask(plugins, "reward", plugins=("geo",))
    assert caught.value.code == "PLG62"
    assert "geo_plugin_module.py:4" in caught.value.where


@pytest.mark.parametrize("error", ["StopIteration()", "TimeoutError('own')", "RuntimeError('x')"])
def test_exceptions_that_asyncio_treats_apart_are_the_plugins_too(load, ask, error):
    assert broken(load, ask, f"raise {error}").code == "PLG56"


def test_a_sync_hook_that_hangs_meets_its_deadline_with_the_line_where_it_stood(load, ask):
    error = broken(load, ask, "import threading; threading.Event().wait(20)", reward={"reward_timeout": 0.2})
    assert error.code == "PLG60"
    assert "did not answer in 0.2 s" in error.what
    assert "geo_plugin_module.py:4" in error.where
    assert "reward.reward_timeout=0.4" in error.fix


def test_an_async_hook_that_hangs_meets_its_deadline(load, ask):
    source = REWARD.format(body="import asyncio; await asyncio.Event().wait()").replace("def slime", "async def slime")
    plugins = load(geo=source)
    with pytest.raises(PluginError) as caught:
        ask(plugins, "reward", plugins=("geo",), reward={"reward_timeout": 0.1})
    assert caught.value.code == "PLG60"


def test_a_sync_hook_runs_beside_the_loop_and_not_in_it(load, group, ctx):
    names = []
    plugins = load(
        geo=REWARD.format(
            body="import threading; return [1.0, float(threading.current_thread() is threading.main_thread())]"
        )
    )

    async def both():
        names.append(threading.current_thread().name)
        return await plugins.reward(group, ctx)

    assert [r.value for r in asyncio.run(both())] == [1.0, 0.0]


def test_a_plain_function_that_returns_a_coroutine_is_awaited_where_the_hook_may_be_async(load, ask):
    source = "async def answer(group):\n    return [1.0, 2.0]\n" + REWARD.format(body="return answer(group)")
    plugins = load(geo=source)
    assert [r.value for r in ask(plugins, "reward", plugins=("geo",))] == [1.0, 2.0]


def test_a_plain_function_that_returns_a_coroutine_is_refused_where_it_may_not(load, group, ctx):
    source = "async def later():\n    return None\n@slime_core.hookimpl\ndef slime_sampling(prompt, ctx):\n    return later()\n"
    plugins = load(geo=source)
    with pytest.raises(PluginError) as caught:
        plugins.sampling(group.prompt, ctx)
    assert caught.value.code == "PLG66"
    assert "def slime_sampling(prompt, ctx)" in caught.value.fix


@pytest.mark.parametrize(
    ("hook", "method", "body"),
    [
        ("slime_generate", "generate", "return None"),
        ("slime_generate", "generate", "return group.samples"),
        ("slime_filter", "filter", "return True"),
        ("slime_filter", "filter", "return 'bad'"),
    ],
)
def test_other_hooks_answers_are_checked_too(load, ask, hook, method, body):
    plugins = load(geo=f"@slime_core.hookimpl\ndef {hook}(group, ctx):\n    {body}\n")
    with pytest.raises(PluginError) as caught:
        ask(plugins, method, plugins=("geo",))
    assert caught.value.code == "PLG57"


def test_the_cores_own_errors_pass_a_plugin_unchanged(load, group, ctx):
    source = "@slime_core.hookimpl\nasync def slime_generate(group, ctx):\n    await ctx.generate(group.samples[0])\n"
    plugins = load(geo=source)
    ctx.engine.version = -1  # no weights are loaded
    with pytest.raises(EngineError):
        asyncio.run(plugins.generate(group, ctx))


def test_any_drop_wins_and_the_reason_is_kept(load, ask):
    keep = "@slime_core.hookimpl\ndef slime_filter(group, ctx):\n    return None\n"
    drop = "@slime_core.hookimpl\nasync def slime_filter(group):\n    return slime_core.Drop(reason='short')\n"
    plugins = load(one=keep, two=drop)
    assert ask(plugins, "filter", plugins=("one", "two")).reason == "short"


def test_sampling_answers_reach_the_core(load, group, ctx):
    source = "import dataclasses\n@slime_core.hookimpl\ndef slime_sampling(prompt, ctx):\n    return dataclasses.replace(ctx.sampling, temperature=0.5)\n"
    assert load(geo=source).sampling(group.prompt, ctx).temperature == 0.5


def test_every_listener_is_told_of_a_sample(load, group, ctx):
    source = "@slime_core.hookimpl\ndef slime_sample_done(sample):\n    sample.metadata['seen'] = sample.metadata.get('seen', 0) + 1\n"
    plugins = load(one=source, two=source.replace("def", "async def"))
    asyncio.run(plugins.sample_done(group.samples[0], ctx))
    assert group.samples[0].metadata["seen"] == 2


def test_state_round_trips_by_plugin(load):
    source = (
        "class Holder:\n    level = 1\n    def state(self):\n        return {'level': self.level}\n"
        "    def load(self, state):\n        self.level = state['level']\nholder = Holder()\n"
        "@slime_core.hookimpl\ndef slime_state():\n    return holder\n"
    )
    plugins = load(geo=source)
    assert plugins.state() == {"geo": {"level": 1}}
    plugins.load_state({"geo": {"level": 4}})
    assert plugins.state() == {"geo": {"level": 4}}
