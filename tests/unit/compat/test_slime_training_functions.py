"""Reward post-processing, conversion, advantages, losses, corrections and reducers with slime's signatures.

Losses are compared with slime's own scalars, worked out sample by sample, over any split into micro-batches.
"""

import numpy as np
import pytest
import torch

from slime_core.config.presets import settle
from slime_core.errors import PluginError
from slime_core.plugins.locate import locate
from slime_core.trainers.data_parallel import BatchSplit, pack
from slime_core.types import Batch, Status
from slime_core.weights.flops import Flops

pytestmark = pytest.mark.unit

LENGTHS = (1, 2, 1, 3)


def step(mask=None):
    """Two groups of two samples with one prompt token each; rewards 1, 0, 2, 2."""
    offsets = np.concatenate([[0], np.cumsum([n + 1 for n in LENGTHS])])
    rng = np.random.default_rng(3)
    return Batch(
        version=2,
        sample_ids=[f"main/{i // 2}-{i % 2}" for i in range(4)],
        tasks=["default"] * 4,
        group=np.array([0, 0, 1, 1]),
        rollout=np.arange(4),
        reward=np.array([1.0, 0.0, 2.0, 2.0]),
        tokens=np.arange(11, dtype=np.int32),
        offsets=offsets,
        loss_mask=np.array([1, 1, 1, 1, 1, 0, 1] if mask is None else mask, np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(LENGTHS)]),
        columns={"rollout_log_probs": rng.normal(-1, 0.3, 7).astype(np.float32)},
    )


def sections(by, source, **keys):
    return by("import torch\n" + source, **keys)


def advantages(plugins, config, batch=None, scores=None):
    return plugins.advantage(batch or step(), scores or {}, config.train).columns


def test_post_processed_rewards_take_the_place_of_group_normalisation(by, connect):
    source = "def fn(args, samples):\n    raw = [s.reward for s in samples]\n    return raw, [2 * r - s.group_index for r, s in zip(raw, samples)]\n"
    config = sections(by, source, custom_reward_post_process_path=True)
    plugins, _ = connect(config)
    assert advantages(plugins, config)["advantages"].tolist() == [2, 0, 0, 3, 3, 3, 3]


@pytest.mark.parametrize("key", ["custom_reward_post_process_path", "custom_advantage_function_path"])
def test_distillation_and_whitening_follow_a_function_as_in_slime(by, connect, key):
    """Advantages 1 for sample 0, else 0; less the gap 2 at token 0 times 1/2; then mean 0 over trainable tokens."""
    source = (
        "def fn(args, data):\n"
        "    if isinstance(data, list):\n        return [s.reward for s in data], [1.0, 0.0, 0.0, 0.0]\n"
        "    data['advantages'] = [torch.full((n,), float(i == 0)) for i, n in enumerate(data['response_lengths'])]\n"
    )
    config = sections(by, source, **{key: True}, opd_kl_coef=0.5, normalize_advantages=True, kl_coef=0.0)
    plugins, _ = connect(config)
    assert plugins.needs(config.train) == {"policy"}
    batch = step()
    batch.columns["teacher_log_probs"] = np.full(7, -1.0, np.float32)
    scores = {"policy": {"log_probs": np.array([1, -1, -1, -1, -1, -1, -1], np.float32)}}
    found = advantages(plugins, config, batch, scores)["advantages"]
    assert found.tolist() == [0.0] * 7  # 1 - 1 = 0 as all the others
    scores["policy"]["log_probs"][1] = 0.0
    found = advantages(plugins, config, batch, scores)["advantages"]
    trained = found[batch.loss_mask > 0].astype(np.float64)
    assert trained.mean() == pytest.approx(0, abs=1e-6)
    assert trained.std(ddof=1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "body", ["return [1.0], [1.0]", "return [0.0] * 4, [float('nan')] * 4"], ids=["length", "nan"]
)
def test_post_processed_rewards_are_checked(by, connect, body):
    config = sections(by, f"def fn(args, samples):\n    {body}\n", custom_reward_post_process_path=True)
    plugins, _ = connect(config)
    with pytest.raises(PluginError) as caught:
        advantages(plugins, config)
    assert caught.value.code in ("PLG56", "PLG58")


def test_an_advantage_function_reads_normalised_rewards_and_scores_and_sets_lists(by, connect):
    """Group 0 has rewards 1 and 0: (1 - 0.5) / (sqrt(0.5) + 1e-6); group 1 ties."""
    source = (
        "def fn(args, data):\n"
        "    data['advantages'] = [r * torch.ones(n) + kl for r, n, kl in zip(data['rewards'], data['response_lengths'], data['kl'])]\n"
        "    data['returns'] = [lp * 2 for lp in data['log_probs']]\n"
    )
    config = sections(by, source, custom_advantage_function_path=True)
    plugins, _ = connect(config)
    assert plugins.needs(config.train) == {"policy"}
    scores = {"policy": {"log_probs": np.full(7, -1.0, np.float32)}}
    found = advantages(plugins, config, scores=scores)
    high = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert found["advantages"] == pytest.approx([high, -high, -high, 0, 0, 0, 0])
    assert found["returns"].tolist() == [-2.0] * 7


@pytest.mark.parametrize(
    ("estimator", "rewards"),
    [
        *((name, [np.sqrt(0.5), -np.sqrt(0.5), 0, 0]) for name in ("grpo", "gspo", "cispo")),
        ("reinforce_plus_plus_baseline", [0.5, -0.5, 0, 0]),
        *((name, [1, 0, 2, 2]) for name in ("reinforce_plus_plus", "ppo")),
    ],
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_functions_read_rewards_and_kl_as_slimes_estimators_do(by, connect, estimator, rewards, kl_coef):
    """Rewards 1, 0 and 2, 2; KL by k2 of a gap of 2, masked tokens too. An advantage of r + KL at every token."""
    source = (
        "def fn(args, data):\n"
        "    kl = enumerate(data['kl'])\n"
        "    data['advantages'] = [data['rewards'][i] + part for i, part in kl]\n"
    )
    keys = {"advantage_estimator": estimator, "kl_coef": kl_coef, "kl_reward_type": "k2"}
    config = sections(by, source, custom_advantage_function_path=True, **keys)
    plugins, _ = connect(config)
    scores = {role: {"log_probs": np.full(7, at, np.float32)} for role, at in (("policy", -1), ("reference", -3))}
    found = advantages(plugins, config, scores=scores)["advantages"]
    assert found == pytest.approx(np.repeat(rewards, LENGTHS) + (2 if kl_coef else 0), abs=1e-5)


FACTS = (
    "def fn(args, rollout_id, data):\n"
    "    args.facts = {k: data[k] for k in ('truncated', 'rollout_mask_sums', 'source_names', 'rewards', 'raw_reward')}\n"
)


@pytest.mark.parametrize("replaced", [False, True], ids=["normalised", "post-processed"])
def test_post_processing_of_a_step_reads_what_its_samples_say(by, write, connect, make_group, replaced):
    """Samples 0 and 1 are one rollout's with 1 + 2 trainable tokens; the last two have 1 + 2 of 1 + 3."""
    rewards = "def fn(args, samples):\n    return [0] * 4, [float(i) for i in range(4)]\n"
    config = sections(
        by,
        FACTS,
        rollout_data_postprocess_path=True,
        custom_reward_post_process_path=f"{write(rewards, 'rewards.py')}:fn" if replaced else "",
        disable_grpo_std_normalization=True,
    )
    plugins, ctx = connect(config)
    groups = [make_group(position=0), make_group(position=1)]
    groups[0].samples[1].status = Status.TRUNCATED
    groups[1].samples[0].metadata["source_name"] = "books"
    for group in groups:
        plugins.note_group(group, config)
    batch = step()
    batch.rollout[:] = [0, 0, 2, 3]
    plugins.batch(plugins.advantage(batch, {}, config.train), ctx)
    args = plugins._functions._session.args(config)
    assert args.facts == {
        "truncated": [0, 1, 0, 0],
        "rollout_mask_sums": [3, 3, 1, 2],
        "source_names": ["unknown", "unknown", "books", "unknown"],
        "rewards": [0, 1, 2, 3] if replaced else [0.5, -0.5, 0, 0],
        "raw_reward": [1, 0, 2, 2],
    }


def test_an_advantage_function_that_sets_nothing_is_refused(by, connect):
    config = sections(by, "def fn(args, data):\n    pass\n", custom_advantage_function_path=True)
    plugins, _ = connect(config)
    with pytest.raises(PluginError) as caught:
        advantages(plugins, config, scores={"policy": {"log_probs": np.zeros(7, np.float32)}})
    assert "rollout_data['advantages'] was not set" in caught.value.what


CONVERT = (
    "def fn(args, samples):\n"
    "    return {'tokens': [s.tokens for s in samples], 'rewards': [5.0 * i for i, s in enumerate(samples)],\n"
    "            'loss_masks': [[0] * s.response_length for s in samples]}\n"
)


def test_a_conversion_sets_rewards_and_masks(by, connect):
    config = sections(by, CONVERT, custom_convert_samples_to_train_data_path=True)
    plugins, _ = connect(config)
    batch = step()
    assert advantages(plugins, config, batch)["advantages"].tolist() == [0, 5, 5, 10, 15, 15, 15]
    assert batch.loss_mask.tolist() == [0.0] * 7


def test_a_conversions_columns_are_taken_and_unknown_keys_refused(by, connect):
    source = "def fn(args, samples):\n    return {'teacher_log_probs': [[-2.0] * s.response_length for s in samples], **EXTRA}\n"
    config = sections(by, "EXTRA = {}\n" + source, custom_convert_samples_to_train_data_path=True)
    plugins, _ = connect(config)
    assert advantages(plugins, config)["teacher_log_probs"].tolist() == [-2.0] * 7
    locate(config.train.custom_convert_samples_to_train_data_path, "key").__globals__["EXTRA"]["loss_mask"] = []
    with pytest.raises(PluginError) as caught:
        advantages(plugins, config)
    assert "'loss_mask'" in caught.value.what
    assert "loss_masks" in caught.value.what


def test_a_conversion_may_not_touch_tokens(by, connect):
    source = CONVERT.replace("s.tokens for", "s.tokens[::-1] for")
    config = sections(by, source, custom_convert_samples_to_train_data_path=True)
    plugins, _ = connect(config)
    with pytest.raises(PluginError) as caught:
        advantages(plugins, config)
    assert "tokens" in caught.value.what


def test_post_processing_of_the_steps_columns_may_change_masks_and_advantages(by, connect):
    source = (
        "def fn(args, rollout_id, data):\n    assert rollout_id == 2\n"
        "    data['loss_masks'] = [m * 0 for m in data['loss_masks']]\n    data['advantages'][0] += 1\n"
    )
    config = sections(by, source, rollout_data_postprocess_path=True)
    plugins, ctx = connect(config)
    batch = plugins.advantage(step(), {}, config.train)
    before = batch.columns["advantages"].copy()
    plugins.batch(batch, ctx)
    assert batch.loss_mask.tolist() == [0.0] * 7
    assert (batch.columns["advantages"] - before).tolist() == [1, 0, 0, 0, 0, 0, 0]


def packed(batch, max_tokens, **settings):
    (rank_batch,) = BatchSplit(flops=Flops(token=1.0, pair=0.0), max_tokens=max_tokens, **settings).partition(batch)
    return pack(rank_batch, max_tokens=max_tokens)


def trained(plugins, config, ctx, max_tokens, sums=None, batch=None):
    """The loss of one optimizer step as the trainer sums it, and its gradient by the log-probs; metrics in ``sums``."""
    sums = {} if sums is None else sums
    batch = plugins.advantage(batch or step(), {}, config.train)
    plugins.batch(batch, ctx)
    loss = plugins.loss(config.train.loss_type)
    assert all(name in batch.columns for name in loss.columns)
    given = torch.tensor(batch.columns["rollout_log_probs"] + 0.1, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    (micros,) = packed(batch, max_tokens, aggregation=settle(config.train).loss_aggregation)
    for micro in micros:
        columns = {name: torch.from_numpy(value) for name, value in micro.columns.items()}
        mine = given[torch.from_numpy(micro.response)]
        values, metrics = loss.fn(mine, torch.zeros_like(mine), columns, settle(config.train))
        for name, metric in metrics.items():
            assert metric.shape == mine.shape
            sums[name] = sums.get(name, 0.0) + (metric * torch.from_numpy(micro.weight)).sum().item()
        total = total + (values * torch.from_numpy(micro.weight)).sum()
    total.backward()
    return total.item(), given.grad, batch, given.detach()


def test_a_section_that_a_trainer_changed_has_the_same_args_in_all_micro_batches(by, connect):
    source = "NAMESPACES = []\ndef fn(args, batch, logits, mean):\n    NAMESPACES.append(vars(args))\n    return batch['log_probs'][0].sum(), {}\n"
    config = sections(by, source, custom_loss_function_path=True)
    plugins, ctx = connect(config)
    batch = plugins.advantage(step(), {}, config.train)
    plugins.batch(batch, ctx)
    loss, changed = plugins.loss("policy_loss"), settle(config.train).model_copy(update={"lr": 9.0})
    columns = {name: torch.from_numpy(value) for name, value in packed(batch, 100)[0][0].columns.items()}
    for _ in range(3):
        loss.fn(columns["slime_weight"], None, columns, changed)
    namespaces = locate(config.train.custom_loss_function_path, "key").__globals__["NAMESPACES"]
    assert all(namespace is namespaces[0] for namespace in namespaces)
    assert namespaces[0]["lr"] == 9.0


SPLITS = pytest.mark.parametrize("max_tokens", [100, 5, 1], ids=["one pack", "some", "one sample each"])


@SPLITS
@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean"])
def test_a_custom_losss_scalar_is_what_the_trainer_sums(by, connect, max_tokens, aggregation):
    """Mean over the four rollouts of their means of log-prob squared, or the mean over the six trainable tokens."""
    source = (
        "def fn(args, batch, logits, sum_of_sample_mean):\n"
        "    log_probs = torch.cat(batch['log_probs'])\n"
        "    loss = sum_of_sample_mean(log_probs ** 2)\n"
        "    return loss, {'tokens': log_probs.detach(), 'scalar': loss, 'number': loss.item()}\n"
    )
    config = sections(by, source, custom_loss_function_path=True, loss_aggregation=aggregation)
    plugins, ctx = connect(config)
    sums = {}
    total, grad, batch, x = trained(plugins, config, ctx, max_tokens, sums=sums)
    assert sums["scalar"] == pytest.approx(total, rel=1e-5)
    assert sums["number"] == pytest.approx(total, rel=1e-5)
    mask = torch.from_numpy(batch.loss_mask).double()
    parts = torch.split(x**2 * mask, LENGTHS)
    masks = torch.split(mask, LENGTHS)
    if aggregation == "rollout_mean":
        expected = sum(p.sum() / m.sum() for p, m in zip(parts, masks, strict=True)) / 4
        share = torch.cat([m / m.sum() for m in masks]) / 4
    else:
        expected, share = sum(p.sum() for p in parts) / 6, mask / 6
    assert total == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(grad, 2 * x * share, rtol=1e-5)


def test_a_custom_loss_reads_slimes_keys(by, connect):
    """Its own reduction by ``rollout_mask_sums``, of every column: old is new where no pass of its own scored it."""
    source = (
        "def fn(args, batch, logits, sum_of_sample_mean):\n"
        "    assert sorted(batch) == sorted(args.keys)\n"
        "    for new, old in zip(batch['log_probs'], batch['old_log_probs']):\n"
        "        assert torch.equal(new, old) and new.requires_grad and not old.requires_grad\n"
        "    parts = zip(batch['log_probs'], batch['ref_log_probs'], batch['teacher_log_probs'], batch['loss_masks'], batch['rollout_mask_sums'])\n"
        "    return sum((new * ref * teacher * mask).sum() / total for new, ref, teacher, mask, total in parts), {}\n"
    )
    config = sections(by, source, custom_loss_function_path=True)
    plugins, ctx = connect(config)
    plugins._functions._session.args(config).keys = [
        *("log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs", "advantages"),
        *("entropy", "loss_masks", "rollout_mask_sums", "response_lengths", "total_lengths"),
    ]
    batch = step()
    batch.rollout[:] = [0, 0, 2, 3]
    batch.columns |= {"reference": np.full(7, 2.0, np.float32), "teacher_log_probs": np.full(7, 5.0, np.float32)}
    total, _, _, x = trained(plugins, config, ctx, 5, batch=batch)
    mask = torch.from_numpy(batch.loss_mask).double()
    sums = torch.tensor([3, 3, 3, 1, 2, 2, 2])
    assert total == pytest.approx((10 * x * mask / sums).sum().item() / 3, rel=1e-5)


def test_a_metric_of_another_shape_is_refused_by_name(by, connect):
    source = (
        "def fn(args, batch, logits, mean):\n    return mean(torch.cat(batch['log_probs'])), {'mine': [1.0, 2.0]}\n"
    )
    config = sections(by, source, custom_loss_function_path=True)
    plugins, ctx = connect(config)
    with pytest.raises(PluginError, match="metric 'mine'"):
        trained(plugins, config, ctx, 100)


def test_a_custom_loss_that_reaches_for_logits_is_told_what_there_is(by, connect):
    source = "def fn(args, batch, logits, sum_of_sample_mean):\n    return logits.sum(), {}\n"
    config = sections(by, source, custom_loss_function_path=True)
    plugins, ctx = connect(config)
    with pytest.raises(PluginError) as caught:
        trained(plugins, config, ctx, 100)
    assert "batch['log_probs']" in caught.value.what
    assert "mine.py:3" in caught.value.where


REDUCER = """
def fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert sum(response_lengths) == sum(len(m) for m in loss_masks)
    def reduce(values):
        return sum((v * m).sum() for v, m in zip(values.split(response_lengths), loss_masks)) / 10
    return reduce
"""


@SPLITS
@pytest.mark.parametrize(("aggregation", "denominator"), [("rollout_mean", 4), ("token_mean", 6)])
def test_a_constant_divisor_reducer_makes_the_loss_of_dr_grpo(by, connect, max_tokens, aggregation, denominator):
    """Sum over trainable tokens of -A, over the constant 10 and the step's 4 rollouts or 6 tokens; the ratio is 1."""
    config = sections(by, REDUCER, custom_pg_loss_reducer_function_path=True, loss_aggregation=aggregation)
    plugins, ctx = connect(config)
    total, grad, batch, _ = trained(plugins, config, ctx, max_tokens)
    weighted = torch.from_numpy(batch.columns["advantages"] * batch.loss_mask).double()
    assert total == pytest.approx(-weighted.sum().item() / (10 * denominator), abs=1e-7)
    assert torch.allclose(grad, -weighted / (10 * denominator), atol=1e-7)


@SPLITS
def test_a_reducer_leaves_kl_and_entropy_to_the_usual_one(by, connect, max_tokens):
    source = (
        "def fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    return lambda values: values.sum() * 0\n"
    )
    config = sections(by, source, custom_pg_loss_reducer_function_path=True, entropy_coef=0.5)
    plugins, ctx = connect(config)
    batch = plugins.advantage(step(), {}, config.train)
    plugins.batch(batch, ctx)
    loss = plugins.loss("policy_loss")
    total = 0.0
    for micro in packed(batch, max_tokens)[0]:
        columns = {name: torch.from_numpy(value) for name, value in micro.columns.items()}
        values, _ = loss.fn(
            torch.zeros(len(micro.response)), torch.ones(len(micro.response)), columns, settle(config.train)
        )
        total += float((values * torch.from_numpy(micro.weight)).sum())
    assert total == pytest.approx(-0.5)


def test_a_reducer_that_is_not_linear_is_refused(by, connect):
    source = (
        "def fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    return lambda values: (values ** 2).sum() + 1\n"
    )
    config = sections(by, source, custom_pg_loss_reducer_function_path=True)
    plugins, ctx = connect(config)
    with pytest.raises(PluginError) as caught:
        trained(plugins, config, ctx, 100)
    assert "not linear" in caught.value.what


@SPLITS
@pytest.mark.parametrize(
    "own",
    [{}, {"use_tis": True}, {"use_tis": True, "tis_batch_normalize": True}, {"use_rs": True, "rs_upper_bound": 1.01}],
    ids=str,
)
def test_a_tis_function_weighs_tokens_and_its_masks_count_in_the_numerator_alone(by, connect, max_tokens, own):
    """Weight 3 everywhere, second sample masked away: its rollout still counts among the four.

    The function stands in the place of ``use_tis``, whose weight would be exp(0.1) a token, and of ``use_rs``.
    """
    source = (
        "def fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kw):\n"
        "    assert total_lengths == [n + 1 for n in response_lengths]\n"
        "    ratio = torch.cat([t - r for t, r in zip(train_log_probs, rollout_log_probs)])\n"
        "    masks = [m * (n != 2) for m, n in zip(loss_masks, response_lengths)]\n"
        "    return pg_loss * 3, masks, {'ratio': ratio, 'scalar': ratio.sum()}\n"
    )
    config = sections(by, source, custom_tis_function_path=True, **own)
    plugins, ctx = connect(config)
    assert plugins.needs(config.train) == {"policy"}
    scores = {"policy": {"log_probs": step().columns["rollout_log_probs"] + np.float32(0.1)}}
    batch = plugins.advantage(step(), scores, config.train)
    plugins.batch(batch, ctx)
    loss = plugins.loss("policy_loss")
    total, ratio = 0.0, 0.0
    for micro in packed(batch, max_tokens)[0]:
        columns = {name: torch.from_numpy(value) for name, value in micro.columns.items()}
        values, metrics = loss.fn(columns["policy"].clone().requires_grad_(), None, columns, settle(config.train))
        total += float((values * torch.from_numpy(micro.weight)).sum().detach())
        ratio += float((metrics["tis/ratio"] * torch.from_numpy(micro.weight)).sum())
        scalar = columns["policy"] - columns["rollout_log_probs"]
        assert metrics["tis/scalar"].tolist() == pytest.approx([scalar.sum().item()] * len(scalar))
    high = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert total == pytest.approx(3 * -high / 4, rel=1e-5)
    assert ratio == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(
    "key",
    [
        "custom_reward_post_process_path",
        "custom_advantage_function_path",
        "custom_convert_samples_to_train_data_path",
    ],
)
def test_a_function_before_training_that_raises_is_told_with_its_line(by, connect, key):
    config = sections(by, "def fn(args, data):\n    return [][1]\n", **{key: True})
    plugins, _ = connect(config)
    with pytest.raises(PluginError) as caught:
        advantages(plugins, config, scores={"policy": {"log_probs": np.zeros(7, np.float32)}})
    assert caught.value.code == "PLG56"
    assert "mine.py:3" in caught.value.where
    assert key in caught.value.what
