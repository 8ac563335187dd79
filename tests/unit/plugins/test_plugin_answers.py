"""Rewards that do not repeat, states that cannot be kept, and what hooks of steps are told."""

import pytest
from hooked import TAKES, WATCHED, ask, hook

from slime_core.errors import PluginError
from slime_core.seeds import seed_of
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.unit


def positions(seed, judged):
    return [p for p in range(1000) if (seed_of(seed, "twice", p) % 100 == 0) == judged]


def numbered(position):
    prompt = Prompt(id=f"main/{position}", position=position, prompt="1", tokens=[1])
    samples = [Sample(id=f"main/{position}-{j}", tokens=[1]) for j in range(2)]
    return Group(prompt=prompt, samples=samples, rollouts={0: [0], 1: [1]})


UNSTABLE = "calls = []\n" + hook("slime_reward", "group", "calls.append(1); return [0.5, float(len(calls))]")


def test_one_group_in_a_hundred_is_judged_twice_and_a_difference_is_told_and_counted(load, ctx, said):
    """A notice with plugin and sample ids and a metric, never an error."""
    plugins = load(geo=UNSTABLE)
    position = positions(0, True)[0]
    found = ask(plugins, "slime_reward", numbered(position), ctx, **WATCHED)
    assert [r.value for r in found] == [0.5, 1.0], "the first judgement counts"
    assert len(said) == 1
    assert f"geo.slime_reward judged main/{position}-1 twice" in said[0]
    assert "had 1, then 2" in said[0]
    assert plugins.pop_metrics() == {"reward/judged_twice": 1.0, "reward/unstable": 1.0}
    assert plugins.pop_metrics() == {}


def test_most_groups_and_every_group_of_an_unwatched_or_free_run_are_judged_once(load, ctx, said):
    """The choice is a function of seed and position."""
    twice, once = positions(0, True), positions(0, False)
    assert len(twice) == pytest.approx(10, abs=8)
    assert twice != positions(1, True)
    free = {"rollout": {"max_staleness": 1, "async_schedule": "free"}}
    plugins = load(geo=UNSTABLE)
    for position, sections in ((once[0], WATCHED), (twice[0], {}), (twice[0], {**WATCHED, **free})):
        ask(plugins, "slime_reward", numbered(position), ctx, **sections)
        assert plugins.pop_metrics() == {}
    assert said == []


def test_a_reward_that_repeats_is_counted_and_not_told(load, ctx, said):
    """Nor does it see what its first call left in the group."""
    body = "group.samples[0].metadata['n'] = group.samples[0].metadata.get('n', 0) + 1; "
    body += "return [float(group.samples[0].metadata['n']), 0.0]"
    plugins = load(geo=hook("slime_reward", "group", body))
    ask(plugins, "slime_reward", numbered(positions(0, True)[0]), ctx, **WATCHED)
    assert plugins.pop_metrics() == {"reward/judged_twice": 1.0, "reward/unstable": 0.0}
    assert said == []


@pytest.mark.parametrize(
    ("holder", "told"),
    [
        ("class H:\n    def load(self, s): pass\n", "returned a H without state()"),
        ("class H:\n    state = {}\n    load = None\n", "returned a H without state and load()"),
        ("class H:\n    def state(self): return 3\n    def load(self, s): pass\n", "returned a int"),
        ("class H:\n    def state(self): return {}['a']\n    def load(self, s): pass\n", "KeyError: 'a'"),
    ],
)
def test_a_state_that_cannot_be_kept_is_named_with_its_plugin(load, holder, told):
    """The holder's side; what is no JSON is the checkpoint's side."""
    plugins = load(geo=holder + hook("slime_state", "", "return H()"))
    with pytest.raises(PluginError) as caught:
        plugins.state()
    assert caught.value.code == "PLG64"
    assert told in caught.value.what
    assert "geo" in caught.value.where


def test_a_state_that_cannot_be_loaded_is_named_with_its_plugin(load):
    """load() raises on what an older version kept."""
    source = "class H:\n    def state(self): return {}\n    def load(self, s): self.level = s['level']\n"
    plugins = load(geo=source + hook("slime_state", "", "return H()"))
    plugins.load_state({"geo": {"level": 1}})
    plugins.load_state({"other": {}})
    with pytest.raises(PluginError) as caught:
        plugins.load_state({"geo": {}})
    assert caught.value.code == "PLG64"
    assert "geo.slime_state failed for load(state): KeyError: 'level'" in caught.value.what
    assert "geo_plugin_module.py:4" in caught.value.where


@pytest.mark.parametrize(("name", "helps"), [("slime_reward", True), ("slime_sampling", True), ("slime_batch", False)])
def test_hooks_of_steps_are_not_told_to_drop_groups(load, generated, ctx, name, helps):
    """The fix that is named is one that helps."""
    plugins = load(geo=hook(name, TAKES.get(name, "group, ctx"), "raise ValueError('no')"))
    with pytest.raises(PluginError) as caught:
        ask(plugins, name, generated, ctx)
    assert caught.value.code == "PLG56"
    assert ("on_plugin_error=drop" in caught.value.fix) == helps
