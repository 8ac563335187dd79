"""Steps on samples with pictures: log-probs and gradients are transformers' own, whatever lies in a pack."""

import numpy as np
import pytest
import ref_grpo
import torch
from pictures import FAMILIES, forward_of, picture_batch
from transformers import AutoModelForImageTextToText

from slime_core.testing import tiny_vision_model

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: tiny_vision_model(tmp_path_factory.mktemp(family) / "model", family) for family in FAMILIES}


def reference(folder, batch):
    """Log-probs of response tokens, and loss and gradients, by transformers in float64, one sample at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    losses, masks, rows = [], [], []
    for i in range(len(batch)):
        count, start = int(batch.response_lengths[i]), int(batch.response_offsets[i])
        targets = torch.from_numpy(batch.tokens[batch.offsets[i + 1] - count : batch.offsets[i + 1]].astype(np.int64))
        log_probs = forward_of(model, batch, i)[-count - 1 : -1].log_softmax(-1)[torch.arange(count), targets]
        advantages = batch.columns["advantages"][start : start + count]
        losses.append([ref_grpo.token_loss(p, p.detach(), float(a), 0.2, 0.28) for p, a in zip(log_probs, advantages)])
        masks.append(batch.loss_mask[start : start + count].tolist())
        rows.append(log_probs.detach())
    total = ref_grpo.mean_over_rollouts(losses, masks, batch.rollout.tolist())
    names, parameters = zip(*model.named_parameters())
    return torch.cat(rows), total.item(), dict(zip(names, torch.autograd.grad(total, parameters)))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers(bench, folders, family):
    one = bench(folder=folders[family], eps_clip_high=0.28, max_tokens_per_gpu=64, freeze_vision_tower=False)
    batch = picture_batch(family, one.folder.config)
    log_probs, loss, gradients = reference(folders[family], batch)
    scored = one.call("score", batch, frozenset({"policy"}))["policy"]["log_probs"]
    np.testing.assert_allclose(scored, log_probs, atol=3e-5)
    total, grads = one.gradient(batch)
    assert total == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert grads.keys() == gradients.keys()
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        error = float((grads[name].double() - gradient).abs().max() / gradient.abs().max().clamp(min=least))
        assert error < 1e-4, (name, error)
