"""Core's own answers: one turn a sample, labels as responses, group-relative advantages, the two losses."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from slime_core.config.presets import settle
from slime_core.config.schema import Config
from slime_core.config.sections.reward import RewardSection
from slime_core.config.sections.rollout import RolloutSection
from slime_core.config.sections.train import TrainSection
from slime_core.errors import ConfigError, DataError, PluginError
from slime_core.types import Batch, Group, Prompt, Sample, Status

pytestmark = pytest.mark.unit


def step(rewards=(1.0, 0.0, 2.0, 2.0), lengths=(1, 2, 1, 3)):
    """Two groups of two samples, one prompt token each."""
    offsets = np.concatenate([[0], np.cumsum([n + 1 for n in lengths])])
    return Batch(
        version=4,
        sample_ids=[f"main/{i}-0" for i in range(len(lengths))],
        tasks=["default"] * len(lengths),
        group=np.array([0, 0, 1, 1]),
        rollout=np.arange(len(lengths)),
        reward=np.array(rewards),
        tokens=np.zeros(offsets[-1], np.int32),
        offsets=offsets,
        loss_mask=np.ones(sum(lengths), np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )


def test_generate_fills_pending_samples_and_leaves_finished_ones(load, group, ctx):
    group.samples[1].status = Status.COMPLETED
    done = asyncio.run(load().generate(group, ctx))
    assert done.samples[0].response_length > 0
    assert done.samples[0].status in (Status.COMPLETED, Status.TRUNCATED)
    assert done.samples[1].response_length == 0


def test_a_reward_that_generation_set_is_kept(load, group, ctx):
    for sample, value in zip(group.samples, (0.25, {"score": 1.0}), strict=True):
        sample.reward = value
    used = replace(ctx, config=Config(reward=RewardSection(reward_key="score")))
    assert [r.value for r in asyncio.run(load().reward(group, used))] == [0.25, 1.0]


def test_in_a_supervised_stage_the_label_and_the_end_become_the_response(load, group, ctx):
    ctx.tokenizer.eos_token_id = 0
    used = replace(ctx, config=Config(train=TrainSection(loss_type="sft_loss")))
    (done,) = asyncio.run(load().rollout([group], used))
    label = ctx.tokenizer.encode("2")
    for sample in done.samples:
        assert sample.response_tokens == [*label, 0]
        assert sample.loss_mask == [1] * (len(label) + 1)
        assert (sample.reward, sample.status, sample.response) == (0.0, Status.COMPLETED, "2")


@pytest.mark.parametrize("label", [None, 7, ""], ids=["none", "number", "empty"])
def test_a_supervised_stage_refuses_a_row_without_a_text(load, group, ctx, label):
    for sample in group.samples:
        sample.label = label
    used = replace(ctx, config=Config(train=TrainSection(loss_type="sft_loss")))
    with pytest.raises(DataError) as caught:
        asyncio.run(load().rollout([group], used))
    assert "data.label_key" in caught.value.fix


def test_a_supervised_row_beyond_the_context_is_refused_with_both_lengths(load, group, ctx):
    ctx.tokenizer.eos_token_id = 0
    config = Config(train=TrainSection(loss_type="sft_loss"), rollout=RolloutSection(rollout_max_context_len=5))
    with pytest.raises(DataError) as caught:
        asyncio.run(load().rollout([group], replace(ctx, config=config)))
    assert caught.value.code == "DAT26"
    assert "4 prompt and 2 label tokens" in caught.value.what


def test_grpo_centres_and_divides_in_the_group():
    """Rewards 1 and 0: mean 1/2, deviation with ddof 1 sqrt(1/2); rewards 2 and 2 tie."""
    from slime_core.plugins import load_plugins

    train = TrainSection()
    done = load_plugins(Config()).advantage(step(), {}, train)
    high = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert np.allclose(done.columns["advantages"], [high, -high, -high, 0, 0, 0, 0], rtol=1e-6)
    plain = load_plugins(Config()).advantage(step(), {}, TrainSection(disable_grpo_std_normalization=True))
    assert np.allclose(plain.columns["advantages"][:3], [0.5, -0.5, -0.5])


def test_the_supervised_loss_has_an_advantage_of_one():
    from slime_core.plugins import load_plugins

    done = load_plugins(Config()).advantage(step(), {}, TrainSection(loss_type="sft_loss"))
    assert done.columns["advantages"].tolist() == [1.0] * 7


def test_roles_scores_become_columns_by_role(load):
    scores = {
        "policy": {"log_probs": np.full(7, -1.0, np.float32), "entropy": np.ones(7, np.float32)},
        "values": {"values": np.zeros(7, np.float32)},
    }
    found = load().advantage(step(), scores, TrainSection()).columns
    assert {"policy", "policy_entropy", "values", "advantages"} <= set(found)


@pytest.mark.parametrize(
    ("train", "roles"),
    [
        ({}, set()),
        ({"num_steps_per_rollout": 2}, {"policy"}),
        ({"global_batch_size": 4}, {"policy"}),
        ({"kl_loss_coef": 0.1}, {"reference"}),
        ({"loss_type": "sft_loss", "num_steps_per_rollout": 2}, set()),
    ],
)
def test_only_the_roles_that_are_read_are_asked_for(load, train, roles):
    assert load().needs(TrainSection(**train)) == roles


ESTIMATOR = (
    "import numpy as np\nfrom slime_core.protocols import Estimator\n"
    "@slime_core.hookimpl\ndef slime_advantage():\n"
    "    return [Estimator(name='mine', fn=lambda batch, train: {answer})]\n"
)


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        ("np.ones(7)", "PLG57", "returned a ndarray"),
        ("{'returns': np.ones(7)}", "PLG57", "returned ['returns']"),
        ("{'advantages': 'x'}", "PLG57", "object"),
        ("{'advantages': np.ones(7), 'other': np.ones(7)}", "PLG57", "'other'"),
        ("{'advantages': np.ones(4)}", "PLG59", "shape (4,), not (7,)"),
        ("{'advantages': np.array([0, 0, 0, 0, np.nan, 0, 0])}", "PLG58", "token 0 of sample 'main/3-0'"),
        ("{'advantages': np.array([0, 0, np.inf, 0, 0, 0, 0])}", "PLG58", "token 1 of sample 'main/1-0'"),
    ],
    ids=["no dict", "no advantages", "text", "unknown column", "length", "nan", "inf"],
)
def test_an_estimators_answer_is_checked(load, answer, code, told):
    plugins = load(geo=ESTIMATOR.replace("{answer}", answer))
    with pytest.raises(PluginError) as caught:
        plugins.advantage(step(), {}, TrainSection(advantage_estimator="mine"))
    assert caught.value.code == code
    assert told in caught.value.what


def test_an_estimator_of_a_plugin_is_used_by_name(load):
    plugins = load(geo=ESTIMATOR.replace("{answer}", "{'advantages': batch.reward[batch.sample_of_token()]}"))
    done = plugins.advantage(step(), {}, TrainSection(advantage_estimator="mine"))
    assert done.columns["advantages"].tolist() == [1, 0, 0, 2, 2, 2, 2]
    assert done.columns["advantages"].dtype == np.float32


def test_a_plugins_estimator_gets_kl_distillation_and_whitening_like_the_cores(load):
    """Rewards 1 0 2 2 of responses of 1 2 1 3 tokens; KL 0.5 a token, gap to the teacher 0.25, both by k1."""
    plugins = load(geo=ESTIMATOR.replace("{answer}", "{'advantages': batch.reward[batch.sample_of_token()]}"))
    terms = TrainSection(advantage_estimator="mine", kl_coef=0.5, opd_kl_coef=2.0, teacher_load="t")
    assert plugins.needs(terms) == {"policy", "reference", "teacher"}
    scores = {
        role: {"log_probs": np.full(7, value, np.float32)}
        for role, value in (("policy", -1.0), ("reference", -1.5), ("teacher", -1.25))
    }
    done = plugins.advantage(step(), scores, terms).columns["advantages"]
    # 1 - 0.5 * 0.5 - 2 * 0.25 = 0.25 for the reward 1
    assert done.tolist() == [0.25, -0.75, -0.75, 1.25, 1.25, 1.25, 1.25]
    white = TrainSection(advantage_estimator="mine", normalize_advantages=True)
    assert plugins.needs(white) == frozenset()
    whitened = plugins.advantage(step(), {}, white).columns["advantages"]
    # mean 9/7, variance (4 * (5/7)^2 + (2/7)^2 + 2 * (9/7)^2) / 6 = 19 / 21
    assert whitened == pytest.approx((np.array([1, 0, 0, 2, 2, 2, 2]) - 9 / 7) / (19 / 21) ** 0.5, abs=1e-6)


def test_the_policy_loss_of_one_step_has_the_gradient_of_the_advantage(load):
    """Ratio 1: d loss / d log-prob = -A, whatever the clip."""
    import torch

    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = {"advantages": torch.tensor([1.0, -0.5]), "loss_mask": torch.ones(2), "sample": torch.tensor([0, 1])}
    loss, metrics = load().loss("policy_loss").fn(log_probs, torch.zeros(2), columns, settle(TrainSection()))
    loss.sum().backward()
    assert log_probs.grad.tolist() == [-1.0, 0.5]
    assert metrics["clip_fraction"].tolist() == [0.0, 0.0]


def test_the_policy_loss_clips_against_the_scored_policy(load):
    """Old log-prob -1, new log-prob -0.5: ratio 1.65, clipped to 1.2, so the loss is -1.2 and has no gradient."""
    import torch

    log_probs = torch.tensor([-0.5], requires_grad=True)
    columns = {"advantages": torch.tensor([1.0]), "policy": torch.tensor([-1.0])}
    columns |= {"loss_mask": torch.ones(1), "sample": torch.tensor([0])}
    loss, metrics = load().loss("policy_loss").fn(log_probs, torch.zeros(1), columns, settle(TrainSection()))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-1.2)
    assert log_probs.grad.tolist() == [0.0]
    assert metrics["clip_fraction"].tolist() == [1.0]


def test_the_supervised_loss_is_the_negative_log_prob(load):
    import torch

    columns = {"loss_mask": torch.ones(2)}
    loss, _ = load().loss("sft_loss").fn(torch.tensor([-1.5, -0.25]), torch.zeros(2), columns, settle(TrainSection()))
    assert loss.tolist() == [1.5, 0.25]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("[]", "missing: main/3"),
        ("groups * 2", "returned twice"),
        ("[*groups, slime_core.Group(prompt=slime_core.Prompt(id='x'), samples=[], rollouts={})]", "never issued"),
    ],
    ids=["lost", "doubled", "invented"],
)
def test_a_rollout_returns_every_group_once(load, group, ctx, answer, why):
    plugins = load(geo=f"@slime_core.hookimpl\ndef slime_rollout(groups, ctx):\n    return {answer}\n")
    with pytest.raises(PluginError) as caught:
        asyncio.run(plugins.rollout([group], ctx))
    assert caught.value.code == "PLG59"
    assert why in caught.value.why


def test_the_whole_rollout_keeps_the_given_order_over_tasks(load, ctx):
    source = "@slime_core.hookimpl\ndef slime_rollout(groups, ctx):\n    return list(reversed(groups))\n"
    groups = [Group(prompt=Prompt(id=f"p/{i}", position=i), samples=[Sample()], rollouts={i: [0]}) for i in range(3)]
    done = asyncio.run(load(geo=source).rollout(groups, ctx))
    assert [group.id for group in done] == ["p/0", "p/1", "p/2"]


def test_names_that_nobody_registers_are_config_errors(load):
    with pytest.raises(ConfigError):
        load().needs(TrainSection(advantage_estimator="nothing"))
    with pytest.raises(ConfigError):
        load().loss("nothing")


def test_a_plugins_loss_that_raises_is_told_with_plugin_and_line(load):
    source = (
        "from slime_core.protocols import Loss\ndef bad(log_probs, entropy, columns, train):\n    return 1 / 0\n"
        "@slime_core.hookimpl\ndef slime_loss():\n    return [Loss(name='bad', fn=bad)]\n"
    )
    with pytest.raises(PluginError) as caught:
        load(geo=source).loss("bad").fn(None, None, {}, TrainSection(loss_type="bad"))
    assert caught.value.code == "PLG56"
    assert "geo_plugin_module.py:4" in caught.value.where
