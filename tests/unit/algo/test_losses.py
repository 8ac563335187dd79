"""Losses and KL worked by hand and against the reference, with their gradients."""

import math

import pytest
import ref_grpo
import torch

from slime_core.algo.kl import kl
from slime_core.algo.losses import policy_loss, sft_loss

pytestmark = pytest.mark.unit


def t(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


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
    value, metrics = policy_loss(new, old, torch.tensor([advantage]).double(), eps_clip=0.2, eps_clip_high=0.3)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(slope)
    assert metrics["clip_fraction"].item() == float(slope == 0.0)
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio))


def test_old_log_probs_equal_to_the_current_give_the_policy_gradient():
    new = t(-1.0, -2.0)
    value, metrics = policy_loss(new, new.detach(), torch.tensor([3.0, -4.0]), eps_clip=0.2, eps_clip_high=0.2)
    value.sum().backward()
    assert value.tolist() == [-3.0, 4.0]
    assert new.grad.tolist() == [-3.0, 4.0]
    assert metrics["clip_fraction"].tolist() == [0.0, 0.0]


# d = log 2: k1 = 0.6931, k2 = 0.2402, k3 = 1/2 - 1 + 0.6931 = 0.1931; slopes 1, d, 1 - exp(-d) = 1/2
@pytest.mark.parametrize(
    ("kind", "value", "slope"), [("k1", 0.693147, 1.0), ("k2", 0.240227, 0.693147), ("k3", 0.193147, 0.5)]
)
def test_kl_estimators_and_their_slopes(kind, value, slope):
    new = t(math.log(2))
    found = kl(new, torch.zeros(1), kind)
    found.sum().backward()
    assert found.item() == pytest.approx(value, abs=1e-6)
    assert new.grad.item() == pytest.approx(slope, abs=1e-6)


def test_k3_is_exact_near_zero():
    d = torch.tensor([1e-4], dtype=torch.float32)
    assert kl(d, torch.zeros(1), "k3").item() == pytest.approx(5e-9, rel=0.05)


def test_an_unknown_kl_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl(t(0.0), t(0.0), "k4")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_loss_kl_and_entropy_equal_the_reference(kind):
    torch.manual_seed(0)
    new, old, ref, adv, h = (torch.randn(50, dtype=torch.float64) for _ in range(5))
    new.requires_grad_(), h.requires_grad_()
    value, metrics = policy_loss(
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
        policy_loss(t(0.0), t(0.0), t(0.0), eps_clip=0.2, eps_clip_high=0.2, **kwargs)


def test_supervised_loss_is_the_negative_log_prob():
    assert sft_loss(t(-1.5))[0].tolist() == [1.5]
