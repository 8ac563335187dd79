"""The number that trains: hand-worked, against float64 references, and through reward hooks as they answer."""

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.shaping import group_normalised, soft_overlong, weighed
from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.errors import PluginError
from slime_core.evaluate import Evaluator
from slime_core.plugins import load_plugins
from slime_core.report.metrics import evaluation_metrics, rollout_metrics
from slime_core.rollout.groups import pending_group
from slime_core.rollout.score import score_group
from slime_core.trainers.batch import make_batch
from slime_core.types import Prompt, Status

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parents[2] / "reference" / "ref_shaping.py"
SPEC = importlib.util.spec_from_file_location("ref_shaping", REFERENCE)
ref = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ref)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


# -- numbers


def test_the_overlong_punishment_of_the_paper():
    """DAPO's own setting: 16384 expected tokens, a cache of 4096, so at most 20480."""
    lengths = np.array([0, 16384, 16385, 18432, 20480, 20481, 99999])
    found = soft_overlong(lengths, 20480, 4096, 1.0)
    assert found.tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0]
    assert found.dtype == np.float64
    assert not np.signbit(found[:2]).any()


def test_no_buffer_is_no_punishment_and_an_impossible_one_is_refused():
    assert soft_overlong(np.array([5, 50]), 10, 0, 1.0).tolist() == [0.0, 0.0]
    assert soft_overlong(np.array([], dtype=np.int64), 10, 3, 1.0).tolist() == []
    with pytest.raises(ValueError, match="does not fit"):
        soft_overlong(np.array([5]), 10, 11, 1.0)


@FEW
@given(st.lists(st.integers(0, 80), max_size=9), st.integers(1, 64), st.data(), st.floats(0, 8, allow_subnormal=False))
def test_the_punishment_follows_the_reference(lengths, limit, data, factor):
    buffer = data.draw(st.integers(0, limit))
    found = soft_overlong(np.array(lengths, dtype=np.int64), limit, buffer, factor)
    np.testing.assert_allclose(found, [ref.overlong(n, limit, buffer, factor) for n in lengths], rtol=1e-12, atol=0)


def test_terms_are_normalised_in_their_group_by_hand():
    correct, rollout = np.array([1.0, 0.0, 0.0, 1.0]), np.arange(4)
    deviation = np.sqrt(1 / 3)
    want = np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-6)
    np.testing.assert_allclose(group_normalised(correct, rollout), want, rtol=1e-14)
    length = np.array([100.0, 300.0, 200.0, 200.0])
    slope = np.array([-100, 100, 0, 0]) / (np.sqrt(20000 / 3) + 1e-6)
    total = weighed(np.stack([correct, length]), np.array([1.0, -0.5]), rollout, normalize=True)
    np.testing.assert_allclose(total, want - 0.5 * slope, rtol=1e-14)
    plain = weighed(np.stack([correct, length]), np.array([2.0, -0.5]), rollout, normalize=False)
    assert plain.tolist() == [-48.0, -150.0, -100.0, -98.0]


def test_fan_out_siblings_count_once():
    found = group_normalised(np.array([1.0, 0.0, 0.0, 0.0]), np.array([7, 8, 8, 8]))
    np.testing.assert_allclose(found, np.array([0.5, -0.5, -0.5, -0.5]) / (np.sqrt(0.5) + 1e-6), rtol=1e-14)


def test_siblings_that_alone_differ_are_not_blown_up():
    """Three tenths in another order: the rollouts' means differ in the last bit at most."""
    values, rollout = np.array([0.1, 0.2, 0.3, 0.3, 0.1, 0.2, 0.2]), np.array([4, 4, 4, 5, 5, 5, 6])
    np.testing.assert_allclose(group_normalised(values, rollout), values - 0.2, atol=1e-15)


@pytest.mark.parametrize("values", [[0.1] * 3, [0.3], [], [1e30] * 5], ids=["ties", "one", "none", "huge ties"])
def test_ties_and_groups_of_one_are_exactly_zero(values):
    assert group_normalised(np.array(values), np.arange(len(values))).tolist() == [0.0] * len(values)


@FEW
@given(
    st.lists(
        st.tuples(*[st.one_of(st.floats(-1e3, 1e3), st.sampled_from([0.0, 1.0, 0.1]))] * 3), min_size=1, max_size=8
    ),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
    st.tuples(*[st.floats(-3, 3)] * 3),
    st.booleans(),
)
def test_weighed_terms_follow_the_reference(rows, rollouts, weights, normalize):
    rollouts = rollouts[: len(rows)]
    terms = {name: [row[k] for row in rows] for k, name in enumerate("abc")}
    want = ref.weighed(terms, dict(zip("abc", weights)), rollouts, normalize)
    found = weighed(np.array(list(terms.values())), np.array(weights), np.array(rollouts), normalize=normalize)
    scale = 1e-9 * (1 + max(map(abs, want)))
    np.testing.assert_allclose(found, want, rtol=1e-7, atol=scale)


# -- hooks


PLUGIN = """
import slime_core
from slime_core import Drop, Reward

answers = {}
shown = []


@slime_core.hookimpl
def slime_reward(group, ctx):
    return [answers[sample.response] for sample in group.samples]


@slime_core.hookimpl
def slime_filter(group, ctx):
    shown.extend(s.reward for s in group.samples)
"""
WEIGHTS = ("--reward-weights", "{ correct = 1.0, format = 0.25 }")


@pytest.fixture
def score(install_plugin):
    """Score a group: ``score(flags, [(text, answer, status or length), ...])``."""
    install_plugin("shapes", PLUGIN)

    def run(flags, rows, evaluation=False):
        flags = ["--plugin", "shapes", "--hf-checkpoint", ".", "--rollout-max-response-len", "10", *flags]
        config = load_config(None, flags)
        plugins = load_plugins(config)
        import sys

        module = sys.modules["shapes_plugin_module"]
        module.answers.clear()
        module.shown.clear()
        group = pending_group(Prompt(id="main/0", tokens=[1], prompt="x"), config, count=len(rows))
        for number, (sample, (answer, length, *status)) in enumerate(zip(group.samples, rows)):
            text = f"{number}"
            module.answers[text] = answer
            sample.append_response([1] * length, log_probs=[-0.1] * length, text=text)
            sample.loss_mask, sample.weight_versions = [1] * length, [0] * length
            sample.status = status[0] if status else Status.COMPLETED
        ctx = Context(config=config)
        if evaluation:
            return asyncio.run(_evaluated(group, plugins, ctx))
        scored, drops = asyncio.run(score_group(group, plugins, ctx))
        return SimpleNamespace(group=scored, drops=drops), module.shown

    return run


async def _evaluated(group, plugins, ctx):
    class Filled:
        """The plugins, with a group that is generated already."""

        def __getattr__(self, name):
            return getattr(plugins, name)

        async def generate(self, group, ctx):
            return group

    return await Evaluator._one(_evaluator(Filled(), ctx), group, ctx)


def _evaluator(plugins, ctx):
    made = Evaluator.__new__(Evaluator)
    made._vocab_size, made._plugins, made._ctx, made._judged_count = 10, plugins, ctx, 0
    plugins.sampling = lambda prompt, ctx: None
    return made


def _terms(**terms):
    from slime_core.types import Reward

    return Reward(value=99.0, terms=terms)


def _rewards(scored):
    return [sample.reward for sample in scored.group.samples]


def test_terms_are_weighed_and_raw_terms_become_metrics(score):
    scored, shown = score(WEIGHTS, [(_terms(correct=1, format=1), 3), (_terms(correct=0, format=1), 3)])
    assert _rewards(scored) == [1.25, 0.25] == shown
    assert scored.group.samples[0].metadata["reward_terms"] == {"correct": 1.0, "format": 1.0}
    metrics = rollout_metrics([scored.group], 0, {}, 1)
    assert (metrics["reward/correct/mean"], metrics["reward/format/mean"]) == (0.5, 1.0)
    assert metrics["reward/mean"] == 0.75


def test_terms_are_normalised_in_their_group_before_they_are_weighed(score):
    rows = [(_terms(correct=c, format=f), 3) for c, f in [(1, 0), (0, 0), (0, 1), (1, 0.5)]]
    scored, _ = score((*WEIGHTS, "--reward-terms-normalize"), rows)
    terms = {"correct": [1, 0, 0, 1], "format": [0, 0, 1, 0.5]}
    want = ref.weighed(terms, {"correct": 1.0, "format": 0.25}, range(4), True)
    np.testing.assert_allclose(_rewards(scored), want, rtol=1e-12)
    assert scored.group.samples[2].metadata["reward_terms"] == {"correct": 0.0, "format": 1.0}, "raw terms are kept"


def test_samples_that_nobody_judged_are_not_in_the_statistics(score):
    from slime_core.types import Reward

    rows = [(_terms(correct=c, format=0), 3) for c in (1, 0)]
    rows.insert(1, (Reward(value=0.0, kind="infra_error"), 3))
    scored, _ = score((*WEIGHTS, "--reward-terms-normalize"), rows)
    np.testing.assert_allclose(_rewards(scored), ref.normalised([1, 0], [0, 1]), rtol=1e-12)
    assert [drop.reason for _, drop in scored.drops] == ["infra_error"]


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"correct": 1.0}, ["lacks format", "its terms are correct (kind score)"]),
        ({}, ["lacks correct, format", "its terms are none"]),
        ({"correct": 1.0, "format": 0.0, "style": 1.0}, ["has style, which have no weight", "correct, format"]),
    ],
    ids=["missing", "none", "unknown"],
)
def test_terms_that_are_not_those_of_the_weights_are_an_error_that_names_them(score, terms, words):
    with pytest.raises(PluginError) as caught:
        score(WEIGHTS, [(_terms(correct=1, format=1), 3), (_terms(**terms), 3)])
    assert caught.value.code == "PLG57"
    assert "sample main/0-1" in caught.value.where
    for text in words:
        assert text in str(caught.value)


def test_the_overlong_punishment_is_added_reported_and_seen_by_filters(score):
    flags = ("--overlong-buffer-len", "4", "--overlong-penalty-factor", "2")
    scored, shown = score(flags, [(1.0, 6), (1.0, 7), (1.0, 8), (0.0, 10), (0.0, 12)])
    assert _rewards(scored) == [1.0, 0.5, 0.0, -2.0, -2.0] == shown
    assert [s.metadata["reward_terms"]["overlong"] for s in scored.group.samples] == [0.0, -0.5, -1.0, -2.0, -2.0]
    metrics = rollout_metrics([scored.group], 0, {}, 1)
    assert metrics["reward/overlong/mean"] == -1.1
    assert metrics["raw_reward/mean"] == 0.6


def test_a_term_of_the_same_name_is_refused(score):
    with pytest.raises(PluginError, match="named 'overlong'"):
        score(("--overlong-buffer-len", "4"), [(_terms(overlong=1.0), 3)])


def test_truncated_samples_do_not_train_but_count(score):
    rows = [(1.0, 3), (0.0, 10, Status.TRUNCATED), (0.0, 4)]
    scored, _ = score(("--mask-truncated",), rows)
    assert _rewards(scored) == [1.0, 0.0, 0.0]
    batch = make_batch(0, "main", [scored.group])
    masks = np.split(batch.loss_mask, batch.response_offsets[1:-1])
    assert [mask.tolist() for mask in masks] == [[1.0] * 3, [0.0] * 10, [1.0] * 4]
    assert batch.reward.tolist() == [1.0, 0.0, 0.0]
    plain, _ = score((), rows)
    assert not any(s.remove_sample for s in plain.group.samples)


def test_a_plain_reward_stays_as_it_is(score):
    scored, _ = score((), [(1, 3), (0.5, 3), (True, 10, Status.TRUNCATED)])
    assert _rewards(scored) == [1.0, 0.5, 1.0]
    assert all("reward_terms" not in s.metadata and "raw_reward" not in s.metadata for s in scored.group.samples)


def test_evaluation_shows_the_weighed_value_without_any_shaping(score):
    flags = (*WEIGHTS, "--reward-terms-normalize", "--overlong-buffer-len", "10", "--mask-truncated")
    rows = [(_terms(correct=1, format=1), 10, Status.TRUNCATED), (_terms(correct=0, format=1), 3)]
    group = score(flags, rows, evaluation=True)
    assert [s.reward for s in group.samples] == [1.25, 0.25]
    assert not any(s.remove_sample for s in group.samples)
    metrics = evaluation_metrics([group])
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/correct/mean"] == 0.5
    assert "reward/overlong/mean" not in metrics
