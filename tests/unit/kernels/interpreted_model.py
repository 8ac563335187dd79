"""In Triton's interpreter, one layer of Qwen3 in a pack, prefilled and decoded has the same bits."""

import numpy as np
import torch
import transformers

from slime_core.engines.local.joined import JoinedPlan
from slime_core.engines.local.pages import PagedCache, PagedTokens, lay_out, paged_rows
from slime_core.kernels.attention import AttentionBatch
from slime_core.kernels.sampling import log_softmax_at
from slime_core.trainers.fsdp.attention import PackSegments
from slime_core.trainers.fsdp.exact import ExactPass
from slime_core.trainers.fsdp.model import FsdpPolicy, ResponseTokens

LENGTHS = 9, 3


@torch.no_grad()
def trained(hf, tokens, rows):
    """Log-probs of a pack of both sequences."""
    policy = FsdpPolicy(hf, chunk=0)
    policy.packs = policy.linear_head = True
    policy.exact = ExactPass(policy)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    segments = PackSegments.of(np.concatenate([[0], np.cumsum(LENGTHS)]), np.full(2, -1), "cpu")
    return policy(tokens, positions, segments, rows)[0]


@torch.no_grad()
def sampled(hf, tokens, rows):
    """The same from the engine's plan: all but the last tokens as prompts, then one decode step."""
    plan = JoinedPlan(hf, exact=True)
    plan.reach(16)
    tables = np.arange(1, 3)[:, None]
    cache = PagedCache(plan.shapes, 3, torch.float32, "cpu")
    ends = np.cumsum(LENGTHS) - 1
    before = np.delete(np.arange(sum(LENGTHS)), ends)
    counts = np.array(LENGTHS) - 1
    layout = lay_out(np.arange(2), np.zeros(2, np.int64), counts, tables)
    positions, places, bounds = map(torch.from_numpy, (layout.positions, layout.places, layout.bounds))
    columns = torch.from_numpy(tables).int()
    batch = AttentionBatch(bounds.int(), torch.from_numpy(counts).int(), columns, int(counts.max()))
    prompts = plan.forward(PagedTokens(tokens[before], positions, places, batch, None, True), cache)
    step = paged_rows(tokens[ends], torch.tensor(LENGTHS) - 1, columns)
    step.invariant = True
    logits = torch.empty(sum(LENGTHS), prompts.shape[1])
    logits[before], logits[ends] = prompts, plan.forward(step, cache)
    return log_softmax_at(logits, rows.target, rows.temperature)


def check():
    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen3Config(
        vocab_size=50, num_hidden_layers=1, head_dim=16, initializer_range=0.2, tie_word_embeddings=True, **shape
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    count = sum(LENGTHS)
    ids, targets = torch.randint(0, 50, (2, count)).unbind()
    response = ResponseTokens(torch.arange(count), targets, torch.full((count,), 0.7))
    assert torch.equal(trained(model, ids, response), sampled(model, ids, response))
