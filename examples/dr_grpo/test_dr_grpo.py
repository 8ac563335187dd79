"""The plugin's numbers by hand and against the core's own Dr. GRPO: the same bits; nightly: it learns."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import slime_dr_grpo
from slime_core import ConfigError
from slime_core.algorithms.shared.aggregate import token_weights
from slime_core.algorithms.shared.losses import PolicyTerms, policy_loss
from slime_core.testing.plugins import check_plugin

pytestmark = pytest.mark.system

RECIPE = Path(__file__).with_name("recipe.toml")
SHORT = ("stage.warmup.num_rollout=20", "stage.dr_grpo.num_rollout=1", "plugin.rm_math.heldout_rows=20")
IMITATED, LEARNT = 0.5, 0.75  # held-out reward: at most after the warm-up, at least at the end


def settings(**keys):
    return SimpleNamespace(**{
        "loss_aggregation": "rollout_sum", "loss_divisor": 4, "eps_clip": 0.2, "eps_clip_high": 0.0,
        "num_steps_per_rollout": 1, "global_batch_size": 0, **keys,
    })  # fmt: skip


def batch(group, reward, lengths):
    """What the estimator reads of a Batch; the sample of each token follows from the lengths."""
    of_token = np.repeat(np.arange(len(reward)), lengths)
    return SimpleNamespace(
        group=np.array(group), reward=np.array(reward, dtype=float), sample_of_token=lambda: of_token
    )


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("dr_grpo") if finding.status == "fail"] == []


def test_advantages_are_centred_and_not_scaled():
    """Two groups: rewards 1 0 0 0 with mean 1/4 and 1 1 with mean 1; the third response has three tokens."""
    step = batch([0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 1, 1], [1, 1, 3, 1, 1, 2])
    found = slime_dr_grpo.centred(step, settings())["advantages"]
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25, -0.25, -0.25, 0, 0, 0]
    assert found.dtype == np.float32


def test_a_token_weighs_the_same_in_a_short_response_and_in_a_long_one():
    """At advantage 1 and ratio 1 loss and gradient of a token are -1/4, whatever the lengths; GRPO divides by them."""
    log_probs = torch.full((4,), -0.5, requires_grad=True)
    loss, _ = slime_dr_grpo.surrogate(log_probs, None, {"advantages": torch.ones(4)}, settings())
    loss.sum().backward()
    assert loss.tolist() == [-0.25] * 4
    assert log_probs.grad.tolist() == [-0.25] * 4


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [(1.5, 1.0, -1.2, 0), (1.5, -1.0, 1.5, 1.5), (0.5, 1.0, -0.5, -0.5), (0.5, -1.0, 0.8, 0), (1.25, 2.0, -2.5, -2.5)],
    ids=["raised enough", "raised and wrong", "lowered and right", "lowered enough", "within the higher bound"],
)
def test_the_clip_is_the_paper_s(ratio, advantage, loss, slope):
    """min(rho A, clip(rho, 0.8, 1.2) A), negated; d rho / d log pi is rho. The last has eps_clip_high = 0.28."""
    high = 0.28 if ratio == 1.25 else 0.0
    log_probs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    columns = {"policy": torch.tensor([-np.log(ratio)]), "advantages": torch.tensor([advantage], dtype=torch.float64)}
    found, _ = slime_dr_grpo.surrogate(log_probs, None, columns, settings(loss_divisor=1, eps_clip_high=high))
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert log_probs.grad.item() == pytest.approx(slope)


def test_losses_and_gradients_are_those_of_the_core():
    """200 random responses of 1 to 30 tokens, some masked, with ratios beyond the clip on both sides; to the bit."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 31, 200)
    sample = np.repeat(np.arange(200), lengths)
    mask = (draw.random(len(sample)) < 0.9).astype(np.float32)
    new, old, advantages = torch.from_numpy(draw.normal(size=(3, len(sample))).astype(np.float32)) * 0.3

    def gradient(loss_of, mode, divisor):
        log_probs = new.clone().requires_grad_()
        weights = torch.from_numpy(token_weights(mask, sample, 200, mode, divisor))
        loss = (loss_of(log_probs) * weights).sum()
        loss.backward()
        return loss.item(), log_probs.grad

    columns = {"policy": old, "advantages": advantages}
    ours = gradient(lambda lp: slime_dr_grpo.surrogate(lp, None, columns, settings())[0], "rollout_sum", 1)
    terms = PolicyTerms(eps_clip=0.2, eps_clip_high=0.2)
    core = gradient(
        lambda lp: policy_loss(lp, old, advantages, terms, mask=torch.from_numpy(mask))[0],
        *("constant", 4),
    )
    assert ours[0] == core[0] != 0
    assert torch.equal(ours[1], core[1])
    assert 0 < (ours[1] == 0).float().mean() < 0.9, "nothing was clipped, or all"


@pytest.mark.parametrize("keys", [{"loss_aggregation": "rollout_mean"}, {"loss_divisor": 0}], ids=["mean", "no L"])
def test_a_length_is_not_let_in_by_a_setting(keys):
    with pytest.raises(ConfigError, match="divides by a constant"):
        slime_dr_grpo.surrogate(torch.zeros(1), None, {"advantages": torch.zeros(1)}, settings(**keys))


@pytest.mark.nightly
def test_a_run_with_the_plugin_learns(train, scores):
    before, after = scores(train(RECIPE), "arithmetic_heldout")
    assert before <= IMITATED
    assert after >= LEARNT


def test_a_run_by_the_plugin_ends_in_the_weights_of_one_by_the_core(train):
    """Two steps of two updates each, from the weights of a short run: samples, losses and weights to the bit."""
    start = train(RECIPE, *SHORT)
    going_on = (
        *("--hf-checkpoint", start / "final", "--init-weights", "load", "stage.warmup.num_rollout=0"),
        *("--num-rollout", 2, "stage.dr_grpo.lr_warmup_iters=0", "plugin.rm_math.heldout_rows=20"),
    )
    core = (
        *("stage.dr_grpo.advantage_estimator=dr_grpo", "stage.dr_grpo.loss_type=policy_loss"),
        *("stage.dr_grpo.loss_aggregation=constant",),
    )
    ours, theirs = train(RECIPE, *going_on), train(RECIPE, *going_on, *core)
    assert losses(ours) == losses(theirs)
    assert len(losses(ours)) == 2
    assert weights(ours) == weights(theirs) != weights(start)


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "clip_fraction", "reward/mean")
    return [[row["metrics"][name] for name in names] for row in rows if row["kind"] == "step"]


def weights(run):
    return (run / "final" / "model.safetensors").read_bytes()
