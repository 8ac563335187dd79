"""One optimizer step's loss, metrics and every gradient."""

import numpy as np
import torch

from slime_core.trainers.batch import prepared
from slime_core.trainers.fsdp.shards import full, local, own_part
from slime_core.trainers.optimizer_step import LossSums

SETTINGS = {
    "clip": {"eps_clip_high": 0.28, "kl_loss_coef": 0.05, "entropy_coef": 0.01},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.2, "eps_clip_high": 0.25, "loss_aggregation": "token_mean"},
    "tis": {"use_tis": True, "tis_batch_normalize": True, "use_rs": True, "rs_upper_bound": 1.2, "eps_clip_c": 3.0},
    "lora": {"lora_rank": 4, "kl_loss_coef": 0.05},
    "lora_dropout": {"lora_rank": 4, "lora_dropout": 0.2, "lora_use_dora": True, "gradient_checkpointing": True},
}


def with_roles(batch, seed=5):
    """Advantages and log-probs of several policies near those of an untrained model, some of them beyond the clip."""
    draw = np.random.default_rng(seed)
    count = len(batch.loss_mask)
    near = np.full(count, -4.1) + draw.normal(size=count) * 0.2
    batch.columns["advantages"] = draw.normal(size=count).astype(np.float32)
    for name in ("policy", "reference", "rollout_log_probs"):
        batch.columns[name] = (near + draw.normal(size=count) * 0.15).astype(np.float32)
    return batch


def fill_adapters(worker):
    """Give adapters, whose B is 0 at the start, numbers on which all of their gradients depend."""
    if worker.policy.adapters is None:
        return
    for number, (name, p) in enumerate(sorted(worker.actor.parameters().items())):
        if ".lora_B." in name:
            values = torch.sin(torch.arange(p.numel()) * 1.7 + number).view(p.shape) / 10
            local(p.detach()).copy_(own_part(values, p))


def rank_batch_of(worker, batch):
    """What a rank trains on of a whole batch, whose columns are not checked."""
    return worker.partitioner().partition(batch)[worker.dp_rank.number]


def step_of(worker, batch, loss=None):
    """Totals of the first optimizer step (``loss`` and metrics) and whole gradients in float64; nothing is stepped.

    ``loss`` stands in for the worker's own.
    """
    own = worker.loss
    worker.loss = loss or own
    try:
        rank_batch = rank_batch_of(worker, prepared(batch, worker.loss, worker.stage.train))
        sums = LossSums(rank_batch, worker.device)
        worker.run_backward(worker.packs(rank_batch)[0], sums)
        totals, _ = sums.finish(worker.world)
        grads = {}
        found = worker.actor.gradients()
        for name, p in worker.actor.parameters().items():
            grads[name] = full(found.get(name, torch.zeros_like(p)).detach()).double().clone()
        return totals, grads
    finally:
        worker.zero_grad()
        worker.loss = own


def difference(got, want):
    """The largest error of totals and of gradients, each relative to its own size."""
    errors = {name: abs(got[0][name] - value) / max(abs(value), 1e-2) for name, value in want[0].items()}
    for name, grad in want[1].items():
        errors[name] = float((got[1][name] - grad).abs().max() / grad.abs().max().clamp(min=1e-6))
    assert got[0].keys() == want[0].keys()
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
