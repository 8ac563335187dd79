"""Losses worked by hand and against the references, with their gradients."""

import math

import numpy as np
import pytest
import ref_grpo
import ref_losses as ref
import torch
from hypothesis import given, settings, strategies as st

from slime_core.algorithms.shared.aggregate import MODES, token_weights
from slime_core.algorithms.shared.losses import PolicyTerms, policy_loss, sft_loss, value_loss
from slime_core.algorithms.shared.ratios import LEVELS

pytestmark = pytest.mark.unit

NAN = float("nan")


def t(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


TENSORS = {"mask", "sample", "weights", "rejected", "ref_log_probs", "entropy"}


def loss_of(new, old, advantages, **keys):
    """`policy_loss`, its terms and its tensors by name."""
    tensors = {name: keys.pop(name) for name in TENSORS & set(keys)}
    return policy_loss(new, old, advantages, PolicyTerms(**keys), **tensors)


# ratio 1.5 and 0.5, bounds 0.8 and 1.3: (ratio, advantage) -> loss, slope by log-prob
CASES = [
    (1.5, 2.0, -2.6, 0.0),  # rising too far on a good token: bounded at 1.3, no gradient
    (1.5, -2.0, 3.0, 3.0),  # rising on a bad token: full
    (0.5, 2.0, -1.0, -1.0),  # falling on a good token: full
    (0.5, -2.0, 1.6, 0.0),  # falling too far on a bad token: bounded at 0.8, no gradient
    (1.1, 2.0, -2.2, -2.2),  # inside the bounds
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), CASES, ids=str)
def test_the_clip_takes_the_worse_side(ratio, advantage, loss, slope):
    new, old = t(math.log(ratio)), t(0.0).detach()
    value, metrics = loss_of(new, old, torch.tensor([advantage]).double(), eps_clip=0.2, eps_clip_high=0.3)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(slope)
    assert metrics["clip_fraction"].item() == float(slope == 0.0)
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio))


def test_old_log_probs_equal_to_the_current_give_the_policy_gradient():
    new = t(-1.0, -2.0)
    value, metrics = loss_of(new, new.detach(), torch.tensor([3.0, -4.0]), eps_clip=0.2, eps_clip_high=0.2)
    value.sum().backward()
    assert value.tolist() == [-3.0, 4.0]
    assert new.grad.tolist() == [-3.0, 4.0]
    assert metrics["clip_fraction"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_loss_kl_and_entropy_equal_the_reference(kind):
    torch.manual_seed(0)
    new, old, ref, adv, h = (torch.randn(50, dtype=torch.float64) for _ in range(5))
    new.requires_grad_(), h.requires_grad_()
    value, metrics = loss_of(
        new, old, adv, eps_clip=0.2, eps_clip_high=0.28,
        ref_log_probs=ref, kl_coef=0.1, kl_type=kind, entropy=h, entropy_coef=0.01,
    )  # fmt: skip
    got = torch.autograd.grad(value.sum(), [new, h])
    rows = [
        ref_grpo.token_loss(
            new[i], old[i], adv[i], 0.2, 0.28, ref=ref[i], kl_coef=0.1, kind=kind, entropy=h[i], entropy_coef=0.01
        )
        for i in range(50)
    ]
    torch.testing.assert_close(value, torch.stack(rows))
    want = torch.autograd.grad(sum(rows), [new, h])
    torch.testing.assert_close(got, want)
    assert not metrics["kl_loss"].requires_grad


@pytest.mark.parametrize(
    ("kwargs", "says"), [({"kl_coef": 0.1}, "reference"), ({"entropy_coef": 0.1}, "entropy")], ids=["kl", "entropy"]
)
def test_a_coefficient_without_its_tensor_is_refused(kwargs, says):
    with pytest.raises(ValueError, match=says):
        loss_of(t(0.0), t(0.0), t(0.0), eps_clip=0.2, eps_clip_high=0.2, **kwargs)


def test_supervised_loss_is_the_negative_log_prob_and_0_where_masked():
    assert sft_loss(t(-1.5))[0].tolist() == [1.5]
    new = t(-1.5, NAN)
    loss, _ = sft_loss(new, torch.tensor([1.0, 0.0]))
    loss.sum().backward()
    assert (loss.tolist(), new.grad.tolist()) == ([1.5, 0.0], [-1.0, 0.0])


def run(new, advantages, **keys):
    """The loss of tokens whose old log-prob is 0, and its slope by log-prob."""
    new = t(*new)
    value, metrics = loss_of(new, torch.zeros(len(new)).double(), t(*advantages).detach(), **(BOUNDS | keys))
    (slope,) = torch.autograd.grad(value.sum(), new)
    return value.tolist(), slope.tolist(), {name: m.tolist() for name, m in metrics.items()}


BOUNDS = {"eps_clip": 0.2, "eps_clip_high": 0.3}


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    # ratios 5, 2 and 5 with advantages -2, -2 and 2; c = 3
    loss, slope, metrics = run([math.log(5), math.log(2), math.log(5)], [-2, -2, 2], eps_clip_c=3.0)
    assert loss == pytest.approx([6.0, 4.0, -2.6])
    assert slope == pytest.approx([0.0, 4.0, 0.0])
    assert metrics["dual_clip_fraction"] == [1.0, 0.0, 0.0]
    assert metrics["clip_fraction"] == [0.0, 0.0, 1.0]


def test_cispo_keeps_every_tokens_gradient_under_a_bounded_weight():
    # ratios 2, 1/10 and 1.1; bounds 0 and 1.3
    new = [math.log(2), math.log(0.1), math.log(1.1)]
    loss, slope, metrics = run(new, [2, 2, -1], objective="cispo", eps_clip=1.0)
    weights = [1.3, 0.1, 1.1]
    assert slope == pytest.approx([-w * a for w, a in zip(weights, [2, 2, -1])])
    assert loss == pytest.approx([-w * a * p for w, a, p in zip(weights, [2, 2, -1], new)])
    assert metrics["clip_fraction"] == [1.0, 0.0, 0.0]


def test_a_sequences_ratio_is_clipped_as_one():
    # mean log-ratio (0.6 + 0) / 2 = 0.3 is above log 1.3, so neither token of the good sequence has a gradient
    sample = torch.tensor([4, 4, 1])
    loss, slope, metrics = run([0.6, 0.0, 0.1], [1, 1, 1], level="sequence", sample=sample)
    assert loss == pytest.approx([-1.3, -1.3, -math.exp(0.1)])
    assert slope == pytest.approx([0.0, 0.0, -math.exp(0.1)])
    assert metrics["clip_fraction"] == [1.0, 1.0, 0.0]
    assert metrics["ppo_kl"] == pytest.approx([-0.6, 0.0, -0.1])


def test_weights_touch_the_objective_alone_and_rejected_tokens_lose_everything():
    entropy, reference = t(0.5, 0.5, 0.5).detach(), t(-1.0, -1.0, -1.0).detach()
    keys = {"entropy": entropy, "entropy_coef": 0.1, "ref_log_probs": reference, "kl_coef": 0.2, "kl_type": "k1"}
    loss, slope, _ = run(
        [0.0] * 3, [3.0] * 3, weights=t(1, 0, 1).detach(), rejected=torch.tensor([0, 0, 1]) > 0, **keys
    )
    rest = 0.2 * 1.0 - 0.1 * 0.5
    assert loss == pytest.approx([-3 + rest, rest, 0.0])
    assert slope == pytest.approx([-3 + 0.2, 0.2, 0.0])


@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("junk", [NAN, float("inf"), -float("inf"), -5000.0], ids=str)
def test_masked_tokens_have_no_loss_and_no_gradient_whatever_they_hold(objective, level, junk):
    keys = BOUNDS | {
        "objective": objective, "level": level, "sample": torch.tensor([0, 0, 0]), "mask": torch.tensor([1.0, 0.0, 1.0]),
        "kl_coef": 0.1, "kl_type": "k3", "unbiased_kl": True, "entropy_coef": 0.1,
    }  # fmt: skip
    found = []
    for filler in (-1.0, junk):
        new, entropy = t(0.1, filler, 0.3), t(1.0, filler, 2.0)
        value, metrics = loss_of(
            new, t(0.0, filler, 0.0).detach(), t(1.0, filler, -1.0).detach(),
            ref_log_probs=t(-0.2, filler, -0.1).detach(), entropy=entropy, **keys,
        )  # fmt: skip
        grads = torch.autograd.grad(value.sum(), [new, entropy])
        found.append([value.tolist(), *(g.tolist() for g in grads), *(m.tolist() for m in metrics.values())])
    assert found[0] == found[1]
    assert [column[1] for column in found[0][:3]] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize("advantage", [-3.0, 3.0])
def test_a_ratio_beyond_the_range_of_exp_is_counted_and_stays_finite(objective, advantage):
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    old, reference = torch.tensor([-400.0, -1.0]), torch.tensor([-1.0, 300.0])
    value, metrics = loss_of(
        new, old, torch.full((2,), advantage), **BOUNDS, objective=objective,
        ref_log_probs=reference, kl_coef=0.1, unbiased_kl=True,
    )  # fmt: skip
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(new.grad).all()
    assert metrics["ratio_overflow"].tolist() == [1.0, 1.0]  # of the ratio, and of the KL estimate


@pytest.mark.parametrize("level", LEVELS)
def test_no_tokens_give_no_loss_and_a_gradient(level):
    new = t()
    value, _ = loss_of(new, t().detach(), t().detach(), **BOUNDS, level=level, sample=torch.zeros(0).long())
    value.sum().backward()
    assert value.shape == new.grad.shape == (0,)


@pytest.mark.parametrize(
    ("keys", "says"),
    [({"eps_clip_c": 0.9}, "dual clip"), ({"objective": "hinge"}, "hinge"), ({"level": "turn"}, "turn")],
    ids=str,
)
def test_names_and_bounds_without_meaning_are_refused(keys, says):
    with pytest.raises(ValueError, match=says):
        run([0.0], [1.0], **keys)


# old 1, target 3, bound 0.5: values that stay, leave upward, leave downward; the larger error counts
@pytest.mark.parametrize(
    ("value", "loss", "slope", "cut"),
    [(1.2, 1.8**2 / 2, -1.8, 0), (2.0, 1.5**2 / 2, 0.0, 1), (0.0, 9 / 2, -3.0, 0)],
)
def test_the_value_loss_takes_the_larger_error(value, loss, slope, cut):
    new = t(value)
    found, metrics = value_loss(new, t(1.0).detach(), t(3.0).detach(), 0.5)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(slope)
    assert metrics["value_clip_fraction"].item() == cut
    assert metrics["value_error"].item() == pytest.approx(abs(value - 3))


def test_a_value_clip_of_0_is_off():
    found, metrics = value_loss(t(9.0), t(1.0), t(3.0), 0.0)
    assert found.item() == 18.0
    assert "value_clip_fraction" not in metrics


def test_masked_values_have_no_loss():
    new = t(1.0, NAN)
    found, _ = value_loss(new, t(1.0, NAN).detach(), t(3.0, NAN).detach(), 0.2, torch.tensor([1.0, 0.0]))
    found.sum().backward()
    assert (found.tolist(), new.grad.tolist()) == ([2.0, 0.0], [-2.0, 0.0])


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=8), st.sampled_from([0.0, 0.31]))
def test_any_values_equal_the_reference(rows, clip):
    new, theirs = t(*(r[0] for r in rows)), t(*(r[0] for r in rows))
    found, _ = value_loss(new, *(t(*(r[k] for r in rows)).detach() for k in (1, 2)), clip)
    want = torch.stack([ref.value_loss(theirs[i], r[1], r[2], clip) for i, r in enumerate(rows)])
    torch.testing.assert_close(found, want)
    got = torch.autograd.grad(found.sum(), new)[0]
    slopes = torch.autograd.grad(want.sum() + 0 * theirs.sum(), theirs)[0]
    torch.testing.assert_close(got, slopes)


LOGS = st.floats(-1.5, 0)
TOKENS = st.tuples(st.integers(0, 1), LOGS, LOGS, LOGS, st.floats(-2, 2), st.floats(0, 2))
SEQUENCES = st.lists(st.tuples(st.integers(0, 2), st.lists(TOKENS, max_size=4)), min_size=1, max_size=5)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    SEQUENCES,
    st.sampled_from(["clip", "cispo"]),
    st.sampled_from(LEVELS),
    st.sampled_from([0.0, 1.7]),
    st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
    st.booleans(),
    st.sampled_from(MODES),
)
def test_any_step_and_its_gradient_equal_the_reference(sequences, objective, level, dual, kind, unbiased, mode):
    flat = [(i, *token) for i, (_, tokens) in enumerate(sequences) for token in tokens]
    columns = [t(*(row[k] for row in flat)) for k in range(1, 7)]
    mask, new, old, reference, advantages, entropy = columns
    theirs = [t(*(row[k] for row in flat)) for k in (2, 6)]
    rollouts = [rollout for rollout, _ in sequences]
    value, _ = loss_of(
        new, old.detach(), advantages.detach(), eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=dual,
        objective=objective, level=level, mask=mask.detach(), sample=torch.tensor([row[0] for row in flat], dtype=torch.int64),
        ref_log_probs=reference.detach(), kl_coef=0.1, kl_type=kind, unbiased_kl=unbiased, entropy=entropy, entropy_coef=0.05,
    )  # fmt: skip
    of_token = np.array([rollouts[row[0]] for row in flat], dtype=np.int64)
    weights = token_weights(mask.detach().numpy(), of_token, len(set(rollouts)), mode, 8)
    total = (value * torch.from_numpy(weights)).sum()
    chosen = ref.Settings(
        objective=objective, level=level, high=0.28, dual=dual if objective == "clip" else 0.0,
        kl_coef=0.1, kl_kind=kind, unbiased=unbiased, entropy_coef=0.05,
    )  # fmt: skip
    want = reference_total(flat, theirs, rollouts, chosen, mode)
    torch.testing.assert_close(total, want, rtol=1e-6, atol=1e-7)  # weights are float32
    if flat:
        got = torch.autograd.grad(total, [new, entropy])
        slopes = torch.autograd.grad(want + 0 * (theirs[0].sum() + theirs[1].sum()), theirs)
        torch.testing.assert_close(got, slopes, rtol=1e-6, atol=1e-7)


def reference_total(flat, leaves, rollouts, chosen, mode):
    step = [[] for _ in rollouts]
    for j, (i, mask, _, old, reference, advantage, _) in enumerate(flat):
        step[i].append(ref.Token(mask, leaves[0][j], old, advantage, ref=reference, entropy=leaves[1][j]))
    losses = [[ref.token_loss(token, s, chosen, step) for token in s] for s in step]
    return ref.aggregate(losses, [[token.mask for token in s] for s in step], rollouts, mode, 8)
