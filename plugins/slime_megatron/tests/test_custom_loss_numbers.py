"""Custom loss, TIS, reducer and advantage functions against formulas in float64, from a model's tokens to gradients.

Fast: functions with slime's signatures, named by path, in the trainers: FSDP, and Megatron with context parallel size 1
and 2. Slow: transformers' model in float64, one sample at a time, and this file's own formulas, token by token. They
share nothing of slime's losses.

    r = exp(new - old)            policy loss = max(-A r, -A clip(r, 0.8, 1.28))         PPO with clip-higher
    w = exp(old - rollout)        policy loss * min(w, 1.1)                              truncated importance sampling
    d = ref - new                 KL = exp(d) - d - 1                                    k3
    a TIS function's masks            in the sums of the policy loss, KL and entropy, in no denominator
    mean over rollouts of the mean of a rollout's trainable tokens, or the mean of all trainable tokens
"""

import json
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_ranks import answer, config_of, make_worker, run_ranks
from splits import with_roles
from trainer_bench import Bench, batch_of

from slime_core import Context
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.trainers.verify import Slow, compared

pytestmark = pytest.mark.integration

FUNCTIONS = """
import torch


def loss(args, batch, logits, sum_of_sample_mean):
    new, old, advantages = (torch.cat(batch[name]) for name in ("log_probs", "old_log_probs", "advantages"))
    entropy = sum_of_sample_mean(torch.cat(batch["entropy"]))
    return sum_of_sample_mean(-advantages * torch.exp(new - old)) - 0.02 * entropy, {}


def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs):
    weight = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    masks = [mask * (part < 1.2) for mask, part in zip(loss_masks, weight.split(response_lengths))]
    return pg_loss * weight.clamp(0.9, 1.05), masks, {"weight": weight}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(values):
        return sum((part * mask).sum() for part, mask in zip(values.split(response_lengths), loss_masks)) / 64

    return reduce


def advantage(args, data):
    data["advantages"] = [
        reward - args.kl_coef * kl.flip(0).cumsum(0).flip(0) for reward, kl in zip(data["rewards"], data["kl"], strict=True)
    ]
"""
KEYS = {
    "loss": "custom_loss_function_path",
    "tis": "custom_tis_function_path",
    "reducer": "custom_pg_loss_reducer_function_path",
    "advantage": "custom_advantage_function_path",
}
PATHS = {"none": (), "loss": ("loss",), "tis": ("tis",), "reducer": ("reducer",), "advantage": ("advantage",)}
PATHS |= {"tis and reducer": ("tis", "reducer")}
CASES = [(name, tis, mean) for name in PATHS for tis in (False, True) for mean in ("rollout_mean", "token_mean")]
MEANS = ("none", "tis and reducer")
BY_DAY = [case for case in CASES if case[2] == "rollout_mean" or (case[0] in MEANS and case[1])]
"""The mean of all tokens in what the trainer reduces, and in what a function does; at night everything."""
NIGHT = pytest.mark.nightly
COMMON = {"eps_clip": 0.2, "eps_clip_high": 0.28, "tis_clip": 1.1, "kl_loss_coef": 0.05, "kl_loss_type": "k3"}


def train_of(case, root):
    """The [train] section of a case; the functions are in a file of the folder."""
    name, tis, mean = case
    paths = {KEYS[part]: f"{root / 'functions.py'}:{part}" for part in PATHS[name]}
    clip = {} if tis else {"tis_clip": 2.0}
    kl = {"kl_coef": 0.1, "kl_loss_coef": 0.0} if name == "advantage" else {"kl_coef": 0.0}
    return COMMON | {"entropy_coef": 0.01, "use_tis": tis, "loss_aggregation": mean} | kl | paths | clip


def loss_of(case, rows, rollouts, new, entropy):
    """A step's loss from its trainable tokens: float64 scalars of log-prob and entropy, numbers of all else."""
    name, tis, mean = case
    size = {rollout: sum(row["rollout"] == rollout for row in rows) for rollout in rollouts}
    total = 0.0
    for row, log_prob, spread in zip(rows, new, entropy, strict=True):
        weight = 1 / len(rows) if mean == "token_mean" else 1 / (len(rollouts) * size[row["rollout"]])
        ratio, advantage = torch.exp(log_prob - row["old"]), row["advantage"]
        if name == "loss":
            total = total + weight * (-advantage * ratio - 0.02 * spread)
            continue
        policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        importance, kept = np.exp(row["old"] - row["engine"]), 1.0
        if "tis" in PATHS[name]:
            policy, kept = policy * float(np.clip(importance, 0.9, 1.05)), float(importance < 1.2)
        elif tis:
            policy = policy * min(importance, 1.1)
        share = (
            1 / (64 * (len(rows) if mean == "token_mean" else len(rollouts))) if "reducer" in PATHS[name] else weight
        )
        gap, coefficient = row["reference"] - log_prob, 0.0 if name == "advantage" else 0.05
        rest = coefficient * (torch.exp(gap) - gap - 1) - 0.01 * spread
        total = total + kept * share * policy + kept * weight * rest
    return total


def advantages_of(batch):
    """What the advantage function makes of a step: group-normalised rewards, less 0.1 times the KL that is to come."""
    reward = {rollout: batch.reward[batch.rollout == rollout][0] for rollout in batch.rollout}
    group = dict(zip(batch.rollout, batch.group))
    made = []
    for i, rollout in enumerate(batch.rollout):
        rivals = [value for other, value in reward.items() if group[other] == group[rollout]]
        own = (reward[rollout] - np.mean(rivals)) / (np.std(rivals, ddof=1) + 1e-6)
        at = slice(batch.response_offsets[i], batch.response_offsets[i + 1])
        gap = batch.columns["policy"][at].astype(np.float64) - batch.columns["reference"][at]
        made += [own - 0.1 * gap[step:].sum() for step in range(len(gap))]
    return np.array(made)


@dataclass(slots=True, frozen=True)
class Reference(Slow):
    """The slow way with this file's loss in place of the trainer's."""

    case: tuple = ()

    def _loss(self, batch, rollouts, tokens, both):
        names = {"old": "policy", "reference": "reference", "engine": "rollout_log_probs", "advantage": "advantages"}
        places = np.flatnonzero(tokens & (batch.loss_mask > 0))
        owners = batch.rollout[batch.sample_of_token()]
        rows = [
            {"rollout": owners[place], **{key: float(batch.columns[name][place]) for key, name in names.items()}}
            for place in places
        ]
        leaves = both.clone().requires_grad_()
        total = loss_of(self.case, rows, list(rollouts), leaves[0][places], leaves[1][places])
        (slopes,) = torch.autograd.grad(total, leaves)
        return float(total.detach()), 1.0, slopes


def errors_of(worker, config, case):
    """Errors of one step's loss and gradients of a worker against the reference."""
    batch = with_roles(batch_of(groups=2, rollouts=3))
    batch.reward[:] = batch.rollout * batch.rollout % 5  # one a rollout, fanned out or not
    if "advantage" in PATHS[case[0]]:
        scores = {role: {"log_probs": batch.columns[role].copy()} for role in ("policy", "reference")}
        batch = worker.plugins.advantage(batch, scores, config.train)
        assert np.abs(batch.columns["advantages"] - advantages_of(batch)).max() < 1e-5
    worker.plugins.batch(batch, Context(config=config))
    partitioner = worker.partitioner()
    batch = partitioner.prepare(batch)
    rank_batch = partitioner.partition(batch)[worker.dp_rank.number]
    slow = worker.slow_way()
    reference = Reference(**{field.name: getattr(slow, field.name) for field in fields(Slow)}, case=case)
    errors = compared(batch, worker.packs(rank_batch), partial(worker.gradients, rank_batch), reference)
    return {name: errors[name] for name in ("loss", "loss_error", "gradient_error", "float64")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and the functions."""
    root = tmp_path_factory.mktemp("place")
    tiny_model(root / "model", tied=True)
    (root / "functions.py").write_text(FUNCTIONS)
    return root


def agree(errors):
    """Fail where a case differs."""
    for case, error in errors.items():
        assert error["float64"] == 1
        assert max(error["loss_error"], error["gradient_error"]) < 1e-5, (case, error)


@pytest.mark.parametrize("cases", [BY_DAY, pytest.param(CASES, marks=NIGHT)], ids=["day", "night"])
def test_fsdp_trains_on_what_the_formulas_say(place, cases):
    bench, errors = Bench(place / "model", **train_of(CASES[0], place)), {}
    for case in cases:
        config = bench.config.model_copy(
            update={"train": type(bench.config.train)(dtype="float32", lr=1e-3, **train_of(case, place))}
        )
        bench.worker.plugins = load_plugins(config)
        bench.call("begin", config)
        errors[json.dumps(case)] = bench.thread.call(errors_of, bench.worker, config, case)
    agree(errors)
    losses = {tuple(json.loads(case)): error["loss"] for case, error in errors.items()}
    for name in PATHS:
        same = losses[name, False, "rollout_mean"] == losses[name, True, "rollout_mean"]
        assert same == (name == "loss" or "tis" in PATHS[name]), "use_tis counts unless a function replaces it"


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, BY_DAY), pytest.param(1, CASES, marks=NIGHT), pytest.param(2, CASES, marks=NIGHT)],
    ids=["2", "1, night", "2, night"],
)
def test_megatron_trains_on_what_the_formulas_say_at_each_context_parallel_size(place, zygote, tmp_path, size, cases):
    half = [case for case in cases if cases is CASES or case[1]]
    for errors in run_ranks(zygote, tmp_path, measured, size, tmp_path, str(place), size, half):
        agree(errors)


def measured(rank, root, place, size, cases):
    """Errors of the cases, by their JSON."""
    place, errors = Path(place), {}
    megatron = {"context_parallel_size": size}
    worker = make_worker(config_of(place / "model", megatron), rank, size, root / "meeting")
    for case in cases:
        config = config_of(place / "model", megatron, **train_of(case, place))
        worker.plugins = load_plugins(config)
        worker.begin(config)
        errors[json.dumps(case)] = errors_of(worker, config, case)
    return errors


if __name__ == "__main__":
    answer(measured)
