"""DPO: numbers worked by hand, and the gradient of the paper's loss by autograd over whole sequences."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from slime_core.algorithms.dpo import advantages
from slime_core.algorithms.shared.aggregate import token_weights
from slime_core.algorithms.shared.losses import dpo_loss
from slime_core.errors import TrainerError
from slime_core.types import Batch

pytestmark = pytest.mark.unit


def settings(objective="sigmoid", beta=0.5, smoothing=0.0):
    return SimpleNamespace(dpo_objective=objective, dpo_beta=beta, dpo_label_smoothing=smoothing)


def batch(lengths, group, reward, mask, policy, reference):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Batch(
        version=0,
        sample_ids=[str(n) for n in range(len(lengths))],
        tasks=["t"] * len(lengths),
        group=np.array(group),
        rollout=np.arange(len(lengths)),
        reward=np.array(reward, float),
        tokens=np.zeros(sum(lengths) + len(lengths), np.int32),
        offsets=offsets + np.arange(len(lengths) + 1),
        loss_mask=np.array(mask, np.float32),
        response_offsets=offsets,
        columns={"policy": np.array(policy, np.float32), "reference": np.array(reference, np.float32)},
    )


def test_one_pair_by_hand():
    # chosen: log-ratios 1 and 1, rejected: 0.5 and a masked token; margin 0.5 (2 - 0.5) = 0.75
    pair = batch([2, 2], [3, 3], [1, 0], [1, 1, 1, 0], [-1, -1, -0.5, 9], [-2, -2, -1, 0])
    columns = advantages(pair, settings())
    slope = 0.5 / (1 + math.exp(0.75))
    # rollout_mean weighs the chosen tokens 1/4 each and the rejected one 1/2: times 4 and 2 each is the slope
    np.testing.assert_allclose(columns["advantages"][:3], [4 * slope, 4 * slope, -2 * slope], rtol=1e-6)
    np.testing.assert_allclose(columns["returns"], 0.75, rtol=1e-6)
    loss, metrics = dpo_loss(torch.zeros(4), *map(torch.from_numpy, columns.values()), settings())
    np.testing.assert_allclose(loss.numpy(), math.log(1 + math.exp(-0.75)), rtol=1e-6)
    assert metrics["dpo/accuracy"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("arguments", [("sigmoid", 0.3, 0.0), ("sigmoid", 0.3, 0.2), ("ipo", 0.7, 0.0)])
def test_loss_and_gradient_are_the_papers_over_whole_sequences(arguments):
    objective, beta, smoothing = arguments
    draw = np.random.default_rng(0)
    lengths, group, reward = [3, 5, 2, 4, 1, 6], [8, 8, 2, 2, 5, 5], [0, 1, 1, 0, 1, 0]
    mask = draw.integers(0, 2, sum(lengths))
    mask[np.cumsum([0, *lengths[:-1]])] = 1
    policy, reference = (-draw.random(sum(lengths)).astype(np.float32) for _ in range(2))
    log_probs = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    gaps = ((log_probs - torch.tensor(reference)) * torch.tensor(mask)).split(lengths)
    counts = [int(part.sum()) for part in torch.tensor(mask).split(lengths)]
    losses = []
    for chosen, rejected in ((1, 0), (2, 3), (4, 5)):
        if objective == "ipo":
            gap = gaps[chosen].sum() / counts[chosen] - gaps[rejected].sum() / counts[rejected]
            losses.append((gap - 1 / (2 * beta)) ** 2)
        else:
            gap = beta * (gaps[chosen].sum() - gaps[rejected].sum())
            losses.append(-(1 - smoothing) * logsigmoid(gap) - smoothing * logsigmoid(-gap))
    expected = torch.stack(losses).mean()
    expected.backward()

    train = settings(*arguments)
    step = batch(lengths, group, reward, mask, policy, reference)
    columns = advantages(step, train)
    weights = token_weights(step.loss_mask, step.rollout[step.sample_of_token()], len(lengths), "rollout_mean")
    ours = torch.tensor(policy, requires_grad=True)
    values, _ = dpo_loss(ours, *map(torch.from_numpy, columns.values()), train)
    loss = (values * torch.from_numpy(weights)).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(ours.grad.numpy(), log_probs.grad.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("group", "reward"), [([0, 0, 0], [1, 0, 0]), ([0, 1], [1, 0]), ([0, 0], [1, 1])])
def test_groups_that_are_no_pairs_are_refused(group, reward):
    count = len(group)
    step = batch([1] * count, group, reward, [1] * count, [0.0] * count, [0.0] * count)
    with pytest.raises(TrainerError, match="not a pair"):
        advantages(step, settings())
