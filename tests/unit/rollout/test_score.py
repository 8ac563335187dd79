"""Rewards become numbers on samples, and what cannot train is dropped with its reason."""

import asyncio
from types import SimpleNamespace

import pytest

from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.plugins import load_plugins
from slime_core.rollout.groups import pending_group
from slime_core.rollout.score import score_group
from slime_core.types import Drop, Prompt, Status

pytestmark = pytest.mark.unit

PLUGIN = """
import slime_core
from slime_core import Drop, Reward


@slime_core.hookimpl
def slime_sample_done(sample, ctx):
    sample.metadata["seen"] = True


@slime_core.hookimpl
def slime_reward(group, ctx):
    assert all(sample.metadata["seen"] for sample in group.samples)
    return [ctx_rewards[sample.response] for sample in group.samples]


@slime_core.hookimpl
def slime_filter(group, ctx):
    return Drop(reason="equal") if len({s.reward for s in group.samples}) == 1 else None


ctx_rewards = {
    "good": Reward(value=1.0, terms={"exact": 1.0}),
    "bad": Reward(value=0.0, kind="failed", reason="no answer"),
    "late": Reward(value=0.0, kind="infra_error", reason="the judge timed out"),
    "": Reward(value=0.0),
}
"""


@pytest.fixture
def score(install_plugin):
    install_plugin("scores", PLUGIN)
    config = load_config(None, ["--plugin", "scores", "--hf-checkpoint", "."])
    plugins = load_plugins(config)

    def run(texts, statuses=None):
        group = pending_group(Prompt(id="main/0", tokens=[1], prompt="x"), config, count=len(texts))
        for sample, text in zip(group.samples, texts):
            sample.append_response([1] * len(text), log_probs=[-0.1] * len(text), text=text)
            sample.status = Status.COMPLETED
        for index, status in (statuses or {}).items():
            group.samples[index].status = status
        scored, drops = asyncio.run(score_group(group, plugins, Context(config=config)))
        return SimpleNamespace(group=scored, drops=drops)

    return run


def _ids(samples):
    return [sample.id for sample in samples]


def test_scores_and_failures_train_and_keep_their_terms(score):
    scored = score(["good", "bad"])
    assert scored.drops == []
    assert [s.reward for s in scored.group.samples] == [1.0, 0.0]
    assert scored.group.samples[0].metadata["reward_terms"] == {"exact": 1.0}
    assert scored.group.samples[1].metadata["reward_kind"] == "failed"


def test_an_infrastructure_error_never_trains(score):
    scored = score(["good", "late", "bad"])
    assert [(_ids(samples), drop) for samples, drop in scored.drops] == [(["main/0-1"], Drop(reason="infra_error"))]
    assert _ids(scored.group.samples) == ["main/0-0", "main/0-2"]
    assert scored.group.rollouts == {0: [0], 2: [1]}


def test_empty_failed_and_aborted_samples_are_dropped_each_with_its_reason(score):
    scored = score(["good", "", "bad", "bad", "good", "bad"], {2: Status.FAILED, 3: Status.ABORTED})
    reasons = {drop.reason: _ids(samples) for samples, drop in scored.drops}
    assert reasons == {"empty": ["main/0-1"], "failed": ["main/0-2"], "aborted": ["main/0-3"]}
    assert _ids(scored.group.samples) == ["main/0-0", "main/0-4", "main/0-5"]


def test_a_filter_drops_what_is_left_of_the_group(score):
    scored = score(["good", "good", "late"])
    assert scored.group is None
    assert [(_ids(s), d.reason) for s, d in scored.drops] == [
        (["main/0-2"], "infra_error"),
        (["main/0-0", "main/0-1"], "equal"),
    ]


def test_a_group_with_nothing_left_is_not_shown_to_filters(score):
    scored = score(["late", "late"])
    assert scored.group is None
    assert [d.reason for _, d in scored.drops] == ["infra_error"]
