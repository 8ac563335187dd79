"""The core's losses as the trainer calls them: keys of [train], columns of a micro-batch, against the reference."""

import math

import numpy as np
import pytest
import ref_losses as ref
import torch
from hypothesis import given, settings, strategies as st

from slime_core.builtin.losses import MEAN_WEIGHT, losses
from slime_core.config.presets import settle
from slime_core.config.sections.train import TrainSection
from slime_core.errors import TrainerError

pytestmark = pytest.mark.unit

POLICY, SFT, _ = losses()
OFF_POLICY = {"policy", "rollout_log_probs", "reference"}


def section(**keys):
    return settle(TrainSection(**keys))


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def step(rows, without=()):
    """Columns of (sequence, mask, new, policy, engine, reference, advantage) rows; the new log-probs are a leaf."""
    names = ("sample", "loss_mask", "new", "policy", "rollout_log_probs", "reference", "advantages")
    found = {name: column(*(row[k] for row in rows)) for k, name in enumerate(names)}
    found["sample"] = found["sample"].long()
    new = found.pop("new").requires_grad_()
    return new, {name: values for name, values in found.items() if name not in without}


def run(train, new, columns):
    return POLICY.fn(new, torch.ones_like(new), columns, train)


ONE = [(0, 1, -1.0, -1.2, -1.5, -2.0, 2.0)]


@pytest.mark.parametrize(
    ("keys", "without", "old"),
    [
        ({}, (), -1.2),
        ({}, ("policy",), -1.0),
        ({"use_rollout_logprobs": True}, (), -1.5),
        ({"use_rollout_logprobs": True}, ("policy",), -1.5),
    ],
    ids=["scored", "of the forward pass", "the engine's", "the engine's, nothing scored"],
)
def test_old_log_probs_are_the_ones_that_the_keys_name(keys, without, old):
    loss, metrics = run(section(eps_clip=1.0, eps_clip_high=5.0, **keys), *step(ONE, without))
    assert loss.item() == pytest.approx(-math.exp(-1.0 - old) * 2.0)
    assert metrics["ppo_kl"].item() == pytest.approx(old + 1.0)


def test_the_algorithm_sets_what_the_section_leaves_open():
    # gspo: the sequence's ratio exp(0.0003) lies within 1 - 3e-4 and 1 + 4e-4, exp(0.001) does not
    for gap, clipped in ((0.0003, 0.0), (0.001, 1.0)):
        rows = [(0, 1, gap * 2, 0.0, 0.0, 0.0, 1.0), (0, 1, 0.0, 0.0, 0.0, 0.0, 1.0)]
        _, metrics = run(section(advantage_estimator="gspo"), *step(rows, ("reference",)))
        assert metrics["clip_fraction"].tolist() == [clipped, clipped]
    loss, _ = run(section(advantage_estimator="cispo"), *step(ONE))
    assert loss.item() == pytest.approx(-math.exp(0.2) * 2.0 * -1.0)


@pytest.mark.parametrize(
    ("keys", "roles"),
    [
        ({}, set()),
        ({"num_steps_per_rollout": 2}, {"policy"}),
        ({"global_batch_size": 8}, {"policy"}),
        ({"num_steps_per_rollout": 2, "use_rollout_logprobs": True}, set()),
        ({"num_steps_per_rollout": 2, "use_rollout_logprobs": True, "use_rs": True}, {"policy"}),
        ({"use_tis": True}, set()),
        ({"use_tis": True, "tis_batch_normalize": True}, {"policy"}),
        ({"tis_batch_normalize": True}, set()),
        ({"kl_loss_coef": 0.1}, {"reference"}),
    ],
    ids=str,
)
def test_passes_before_the_first_optimizer_step_are_asked_for_only_where_needed(keys, roles):
    assert POLICY.needs_when(section(**keys)) == roles


WHOLE = [  # keys that read a whole sequence
    {"advantage_estimator": "gspo"},
    {"importance_level": "sequence_token"},
    {"use_tis": True, "tis_level": "sequence"},
    {"use_tis": True, "tis_level": "geometric"},
    {"use_rs": True},
    {"rs_veto_threshold": 0.9},
    {"use_opsm": True},
]
ALONE = [
    {},
    {"advantage_estimator": "cispo"},
    {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5},
    {"use_tis": True, "tis_batch_normalize": True},
    {"use_rs": True, "rs_level": "token"},
    {"kl_loss_coef": 0.1, "use_unbiased_kl": True, "entropy_coef": 0.1, "eps_clip_c": 3.0},
    {"tis_level": "sequence", "rs_level": "sequence"},  # of corrections that are off
]
SEQUENCE = [
    (0, 1, -1.0, -1.3, -0.5, -1.0, -1.0),
    (0, 1, -1.0, -0.8, -0.9, -1.4, -1.0),
    (0, 0, -9.0, -0.1, -0.2, -0.3, -1.0),
    (0, 1, -0.4, -0.7, -0.6, -0.5, -1.0),
]


def in_blocks(train, size):
    """Loss and gradient of SEQUENCE taken ``size`` tokens at a time."""
    new, columns = step(SEQUENCE)
    columns |= tensors(POLICY.prepare(arrays(columns), train))
    parts = [slice(i, i + size) for i in range(0, len(SEQUENCE), size)]
    blocks = [run(train, new[p], {name: values[p] for name, values in columns.items()})[0] for p in parts]
    loss = torch.cat(blocks)
    return loss.detach(), torch.autograd.grad(loss.sum(), new)[0]


def arrays(columns):
    return {name: values.numpy() for name, values in columns.items()}


def tensors(columns):
    return {name: torch.from_numpy(values) for name, values in columns.items()}


@pytest.mark.parametrize("keys", ALONE, ids=str)
def test_a_local_loss_is_the_same_in_blocks_of_any_size(keys):
    train = section(**keys)
    assert POLICY.local(train)
    for size in (1, 3):
        torch.testing.assert_close(in_blocks(train, size), in_blocks(train, 4))


@pytest.mark.parametrize("keys", WHOLE, ids=str)
def test_a_loss_that_reads_whole_sequences_says_so(keys):
    train = section(eps_clip=0.9, eps_clip_high=0.9, **keys)
    assert not POLICY.local(train)
    (whole, slope), (cut, other) = in_blocks(train, 4), in_blocks(train, 1)
    assert not (torch.allclose(whole, cut) and torch.allclose(slope, other))


def test_supervised_loss_is_local_and_leaves_masked_tokens_out():
    assert SFT.local(section())
    new, columns = step(SEQUENCE)
    assert SFT.fn(new, None, columns, section())[0].tolist() == [1.0, 1.0, 0.0, 0.4]


def test_weights_have_mean_one_over_the_optimizer_step_whatever_the_micro_batches():
    train = section(use_tis=True, tis_batch_normalize=True, tis_clip=1.5)
    rows = [*SEQUENCE, (1, 1, -1.0, -0.1, -2.0, 0.0, 1.0), (1, 1, -1.0, -1.0, -1.0, 0.0, 1.0)]
    new, columns = step(rows)
    columns |= tensors(POLICY.prepare(arrays(columns), train))
    parts = (slice(0, 4), slice(4, 6))
    found = [run(train, new[p], {n: v[p] for n, v in columns.items()})[1]["tis_weight"] for p in parts]
    weights = torch.cat(found)[columns["loss_mask"] > 0]
    assert weights.mean().item() == pytest.approx(1.0, abs=1e-6)
    assert weights.std().item() > 0.1


def test_nothing_is_prepared_where_nothing_is_normalised():
    assert POLICY.prepare({}, section(tis_batch_normalize=True)) == {}


@pytest.mark.parametrize(
    "keys", [{"use_tis": True}, {"use_rs": True}, {"rs_veto_threshold": 0.1}, {"use_rollout_logprobs": True}], ids=str
)
def test_a_correction_without_the_engines_log_probs_is_refused_by_name(keys):
    (key,) = keys
    with pytest.raises(TrainerError, match=f"rollout_log_probs, which train.{key} reads"):
        run(section(**keys), *step(ONE, ("rollout_log_probs",)))


def test_a_mean_weight_without_the_trainers_log_probs_is_refused():
    _, columns = step(ONE, ("policy",))
    with pytest.raises(TrainerError, match=r"no column policy, which train\.tis_batch_normalize reads"):
        POLICY.prepare(arrays(columns), section(use_tis=True, tis_batch_normalize=True))


def test_every_metric_is_a_number_a_token_without_gradient():
    train = section(
        use_tis=True, tis_level="sequence", use_rs=True, rs_veto_threshold=0.5, use_opsm=True, kl_loss_coef=0.1,
        eps_clip_c=3.0, entropy_coef=0.1,
    )  # fmt: skip
    new, columns = step(SEQUENCE)
    _, metrics = run(train, new, columns)
    assert set(metrics) == {
        "clip_fraction", "dual_clip_fraction", "ppo_kl", "kl_loss", "ratio_overflow", "tis_weight", "tis_clip_fraction",
        "rs_fraction", "veto_fraction", "opsm_fraction", "train_rollout_logprob_abs_diff", "mismatch_k3",
    }  # fmt: skip
    assert all(m.shape == new.shape and m.dtype == new.dtype and not m.requires_grad for m in metrics.values())


def test_a_correction_that_overflows_is_counted_with_the_ratios():
    rows = [
        (0, 1, -1.0, -1.0, -900.0, 0.0, 1.0),
        (1, 1, -1.0, -900.0, -900.0, 0.0, 1.0),
        (2, 1, -1.0, -1.0, -1.0, 0.0, 1.0),
    ]
    new, columns = step(rows, ("reference",))
    loss, metrics = run(section(use_tis=True, tis_clip=1e9), new, columns)
    loss.sum().backward()
    assert metrics["ratio_overflow"].tolist() == [1.0, 1.0, 0.0]
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("keys", [*WHOLE, *ALONE], ids=str)
@pytest.mark.parametrize("junk", [float("nan"), -5000.0], ids=str)
def test_masked_tokens_change_nothing_whatever_they_hold(keys, junk):
    train, found = section(**keys), []
    for filler in (-1.0, junk):
        rows = [row if row[1] else (0, 0, *[filler] * 5) for row in SEQUENCE]
        new, columns = step(rows)
        columns |= tensors(POLICY.prepare(arrays(columns), train))
        loss, metrics = run(train, new, columns)
        loss.sum().backward()
        seen = columns["loss_mask"] > 0
        found.append([loss.tolist(), new.grad.tolist(), {n: m[seen].tolist() for n, m in metrics.items()}])
    assert found[0] == found[1]
    assert (found[0][0][2], found[0][1][2]) == (0.0, 0.0)


@pytest.mark.parametrize("keys", [*WHOLE, *ALONE], ids=str)
@pytest.mark.parametrize(
    "rows", [[], [(0, 0, *row[2:]) for row in SEQUENCE], SEQUENCE[:1]], ids=["no", "masked", "one"]
)
def test_no_tokens_only_masked_ones_and_a_single_one_are_defined(keys, rows):
    train = section(**keys)
    new, columns = step(rows)
    columns |= tensors(POLICY.prepare(arrays(columns), train))
    loss, _ = run(train, new, columns)
    loss.sum().backward()
    assert loss.shape == (len(rows),)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()
    if not any(row[1] for row in rows):
        assert (loss == 0).all()
        assert (new.grad == 0).all()


LOGS = st.floats(-1.5, 0)
ROW = st.tuples(st.integers(0, 3), st.integers(0, 1), LOGS, LOGS, LOGS, LOGS, st.floats(-2, 2))
KEYS = st.fixed_dictionaries(
    {
        "policy_objective": st.sampled_from(["clip", "cispo"]),
        "importance_level": st.sampled_from(["token", "sequence", "sequence_token"]),
        "use_rollout_logprobs": st.booleans(),
        "use_tis": st.booleans(),
        "tis_level": st.sampled_from(["token", "sequence", "geometric"]),
        "tis_mode": st.sampled_from(["truncate", "clip", "mask"]),
        "tis_clip_low": st.sampled_from([0.0, 0.61]),
        "tis_clip": st.sampled_from([1.19, 2.7]),
        "tis_batch_normalize": st.booleans(),
        "use_rs": st.booleans(),
        "rs_level": st.sampled_from(["token", "sequence", "geometric"]),
        "rs_lower_bound": st.sampled_from([0.0, 0.31]),
        "rs_upper_bound": st.sampled_from([1.57, 3.1]),
        "rs_veto_threshold": st.sampled_from([0.0, 0.43]),
        "use_opsm": st.booleans(),
        "opsm_delta": st.sampled_from([0.0101, 0.307]),
        "kl_loss_coef": st.sampled_from([0.0, 0.1]),
        "kl_loss_type": st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
        "use_unbiased_kl": st.booleans(),
        "entropy_coef": st.sampled_from([0.0, 0.05]),
    }
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(ROW, min_size=1, max_size=10), KEYS)
def test_any_step_under_any_keys_equals_the_reference_in_micro_batches(rows, keys):
    train = section(**keys)
    new, columns = step(rows)
    columns |= tensors(POLICY.prepare(arrays(columns), train))
    total = torch.zeros((), dtype=torch.float64)
    for sequences in ((0, 2), (1, 3)):  # two micro-batches of whole sequences
        mine = torch.tensor([i for i, row in enumerate(rows) if row[0] in sequences], dtype=torch.int64)
        loss, _ = run(train, new[mine], {name: values[mine] for name, values in columns.items()})
        total = total + (loss * (mine + 1)).sum()
    theirs = column(*(row[2] for row in rows)).requires_grad_()
    want = reference(rows, theirs, train)
    torch.testing.assert_close(total, want, rtol=1e-6, atol=1e-7)  # the mean weight is a float32 column
    got = torch.autograd.grad(total, new)
    torch.testing.assert_close(got, torch.autograd.grad(want + 0 * theirs.sum(), theirs), rtol=1e-6, atol=1e-7)


def reference(rows, theirs, train):
    both = train.tis_mode == "truncate" and train.tis_clip_low > 0  # a lower bound that is set holds
    mode = "clip" if both else train.tis_mode
    chosen = ref.Settings(
        objective=train.policy_objective, level=train.importance_level, low=train.eps_clip, high=train.eps_clip_high,
        tis=(train.tis_level, mode, train.tis_clip_low, train.tis_clip) if train.use_tis else None,
        normalize=train.tis_batch_normalize, opsm=train.opsm_delta if train.use_opsm else None,
        rs=(train.rs_level, train.rs_lower_bound, train.rs_upper_bound) if train.use_rs else None,
        veto=train.rs_veto_threshold, kl_coef=train.kl_loss_coef, kl_kind=train.kl_loss_type,
        unbiased=train.use_unbiased_kl, entropy_coef=train.entropy_coef,
    )  # fmt: skip
    tokens = []
    for i, (_, mask, _, policy, engine, reference_log_prob, advantage) in enumerate(rows):
        old = engine if train.use_rollout_logprobs else policy
        tokens.append(ref.Token(mask, theirs[i], old, advantage, policy, engine, reference_log_prob, 1.0))
    of = {s: [token for token, row in zip(tokens, rows) if row[0] == s] for s in {row[0] for row in rows}}
    whole = list(of.values())
    values = [ref.token_loss(token, of[row[0]], chosen, whole) for token, row in zip(tokens, rows)]
    return sum((i + 1) * value for i, value in enumerate(values))


def test_the_mean_weight_is_a_column_a_token():
    train = section(use_tis=True, tis_batch_normalize=True)
    found = POLICY.prepare(arrays(step(SEQUENCE)[1]), train)
    assert set(found) == {MEAN_WEIGHT}
    assert (found[MEAN_WEIGHT].shape, found[MEAN_WEIGHT].dtype) == ((4,), np.float32)


def test_kl_in_the_loss_without_a_reference_is_an_error_that_names_the_key():
    new, columns = step(ONE, without={"reference"})
    with pytest.raises(TrainerError, match=r"no column reference, which train\.kl_loss_coef reads"):
        run(section(kl_loss_coef=0.1), new, columns)
