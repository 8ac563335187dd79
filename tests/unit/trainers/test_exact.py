"""The policy's pass through the engine's kernels, by their references: the numbers and gradients of transformers."""

import numpy as np
import pytest
import torch
import transformers

from slime_core.errors import ConfigError
from slime_core.trainers.fsdp.attention import PackSegments
from slime_core.trainers.fsdp.exact import ExactPass
from slime_core.trainers.fsdp.model import FsdpPolicy, ResponseTokens

pytestmark = pytest.mark.unit

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}
LENGTHS, PREFIX = (5, 3, 4, 6), (-1, 0, 0, -1)
"""Segments of a pack; two of them go on from the first."""
PREDICT = (4, 5, 6, 4, 8, 9, 10, 12, 13, 14)


def _policy(family, **more):
    config = getattr(transformers, f"{family}Config")(**SHAPE, **FAMILIES.get(family, {}), **more)
    torch.manual_seed(0)
    policy = FsdpPolicy(getattr(transformers, f"{family}ForCausalLM")(config).eval(), chunk=0)
    policy.try_model()
    return policy


def _outcome(policy):
    """Log-probs, entropies and gradients of a pack with a shared prompt."""
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 97, (sum(LENGTHS),), generator=draws)
    target = torch.randint(0, 97, (len(PREDICT),), generator=draws)
    positions = torch.cat([torch.arange(n) + (5 if p >= 0 else 0) for n, p in zip(LENGTHS, PREFIX)])
    segments = PackSegments.of(np.concatenate([[0], np.cumsum(LENGTHS)]), PREFIX, "cpu")
    rows = ResponseTokens(torch.tensor(PREDICT), target, torch.full((len(PREDICT),), 0.7))
    log_probs, entropy = policy(tokens, positions, segments, rows)
    total = (log_probs * torch.arange(len(PREDICT))).sum() + entropy.sum()
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(total, list(policy.hf.parameters()))]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_module(family):
    policy = _policy(family)
    reference = _outcome(policy)
    policy.exact = ExactPass(policy)
    outcome = _outcome(policy)
    for one, other in zip(outcome, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    policy.recompute = 2
    assert all(torch.equal(one, other) for one, other in zip(_outcome(policy), outcome, strict=True))


def test_a_family_that_is_not_written_out_is_refused():
    policy = _policy("Gemma2", query_pre_attn_scalar=16)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM cannot be trained"):
        ExactPass(policy)
