"""The example in every hook's text is a complete plugin that loads, and its sentence says what it may do."""

import inspect
from types import ModuleType

import pytest

from slime_core import hookspecs
from slime_core.backends import ClusterBackend, EngineBackend, TrainerBackend
from slime_core.config.schema import Config
from slime_core.hookspecs import HOOKS
from slime_core.plugins.boundary import Provider
from slime_core.plugins.load import hooks_of

pytestmark = pytest.mark.unit


def example(hook):
    """The text of a file."""
    return inspect.getdoc(getattr(hookspecs, hook)).partition("\n\n")[2]


def plugin_of(hook):
    module = ModuleType("example")
    module.__file__ = "example.py"
    exec(compile(example(hook), f"<example of {hook}>", "exec"), vars(module))
    return module


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_every_hook_is_a_plugin_that_loads(hook):
    provider = Provider(name="example", origin="docs", source="plugin")
    assert set(hooks_of(provider, plugin_of(hook))) == {hook}


@pytest.mark.parametrize("hook", [hook for hook, info in HOOKS.items() if info.may_await])
def test_a_hook_that_may_be_async_says_so(hook):
    text = inspect.getdoc(getattr(hookspecs, hook)).partition("\n\n")[0]
    assert "may be async" in text


def test_every_spec_is_in_the_table_and_the_other_way_round():
    specs = {name for name in dir(hookspecs) if name.startswith("slime_")}
    assert specs == set(HOOKS)


def test_the_examples_that_answer_from_values_do_what_they_say(group):
    reward = vars(plugin_of("slime_reward"))["slime_reward"]
    group.samples[0].response = "2"
    assert reward(group, None) == [1.0, 0.0]
    drop = vars(plugin_of("slime_filter"))["slime_filter"]
    for sample in group.samples:
        sample.reward = 1.0
    assert drop(group, None).reason == "zero_std"
    for hook, backend in (("engine", EngineBackend), ("trainer", TrainerBackend), ("cluster", ClusterBackend)):
        (brought,) = vars(plugin_of(f"slime_{hook}"))[f"slime_{hook}"]()
        assert (type(brought), brought.name) == (backend, "mine")
    (problem,) = vars(plugin_of("slime_config_rules"))["slime_config_rules"](
        Config(rollout={"n_samples_per_prompt": 1})
    )
    assert problem.keys == (("rollout", "n_samples_per_prompt"),)
