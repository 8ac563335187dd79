"""What the engine says, against the model's own forward pass as transformers runs it."""

import asyncio
import logging

import numpy as np
import pytest
import torch

from slime_core.testing.families import FAMILIES, RECURRENT

pytestmark = pytest.mark.unit

PLANS = {
    **dict.fromkeys(FAMILIES, "packed"),
    **dict.fromkeys(["qwen3", "qwen3-wide", "qwen2", "llama", "mistral"], "lean"),
    **dict.fromkeys(["mamba", *RECURRENT], "rescan"),
}
ROUTED = {"qwen3-moe", "qwen3-next", "gpt-oss", "deepseek-v2"}
DTYPES = {"float32": (torch.float32, 2e-4), "bfloat16": (torch.bfloat16, 0.25)}


def own_log_probs(model, tokens, start, temperature=1.0):
    """[len(tokens) - start, V] of the module itself, float64."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, start - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLANS)
def test_log_probs_are_the_models_own(bench, ask, name, dtype):
    kind, tolerance = DTYPES[dtype]
    b = bench(name)
    if name == "gemma2":
        b.model.set_attn_implementation("eager")  # sdpa leaves the soft cap out

    async def go(b):
        asked = [ask(str(i), range(3, 8 + 17 * i), new=16, temperature=0.7) for i in range(3)]
        async with b.engine(dtype=dtype) as engine:
            assert engine._scheduler.served.plan.name == PLANS[name]
            return asked, await asyncio.gather(*(engine.generate(r) for r in asked))

    asked, done = b.run(go)
    model = b.model.to(kind)
    for r, one in zip(asked, done, strict=True):
        tokens = [*r.tokens, *one.tokens]
        at = (np.arange(len(one.tokens)), one.tokens)
        plain = own_log_probs(model, tokens, len(r.tokens))[at]
        drawn = own_log_probs(model, tokens, len(r.tokens), 0.7)[at]
        far = np.abs(one.plain_log_probs - plain) > tolerance
        far |= np.abs(one.log_probs - drawn) > tolerance / 0.7
        flips = 2 if name in ROUTED and dtype == "bfloat16" else 0  # rounding may send a token to another expert
        assert far.sum() <= flips, (one.plain_log_probs, plain)


def test_greedy_is_what_transformers_generates(bench, ask):
    b = bench("qwen3", initializer_range=1.0)

    async def go(b):
        async with b.engine(context_len=128) as engine:
            return await engine.generate(ask("a", range(3, 20), new=40, temperature=0))

    done = b.run(go)
    with torch.no_grad():
        own = b.model.generate(
            torch.tensor([list(range(3, 20))]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert done.tokens == own[0, 17:].tolist()
    assert done.log_probs == [0.0] * 40


def test_samples_follow_the_models_distribution(bench, ask):
    """2,000 first tokens of one prompt against its softmax: chi square over ids that are expected often enough."""
    b = bench("qwen3", initializer_range=0.5)

    async def go(b):
        asked = [ask(str(i), [5, 9, 11], new=1, seed=i) for i in range(2000)]
        async with b.engine(slots=64, context_len=32) as engine:
            return [one.tokens[0] for one in await asyncio.gather(*(engine.generate(r) for r in asked))]

    counts = np.bincount(b.run(go), minlength=84)
    expected = 2000 * np.exp(own_log_probs(b.model, [5, 9, 11, 3], 3)[0])
    often = expected > 8
    assert often.sum() > 10
    chi = ((counts - expected) ** 2 / expected)[often].sum()
    assert chi < often.sum() + 5 * np.sqrt(2 * often.sum())


@pytest.mark.parametrize("name", ["qwen3", "neox", "mamba"])
def test_score_gives_the_plain_log_probs_of_any_tokens(bench, name):
    b = bench(name)
    tokens = [(11 * i) % 80 + 3 for i in range(90)]

    async def go(b):
        async with b.engine(context_len=100) as engine:
            assert (await engine.score(tokens, 90)).shape == (0,)
            return await engine.score(tokens, 1), await engine.score(tokens, 60)

    all_rows, part = b.run(go)
    own = own_log_probs(b.model, tokens, 1)[np.arange(89), tokens[1:]]
    assert all_rows.dtype == np.float32
    np.testing.assert_allclose(all_rows, own, atol=2e-4, rtol=0)
    assert (all_rows[59:] == part).all()


def test_a_long_window_is_kept_by_the_lean_plan(bench, ask):
    """Qwen2 with a sliding window in its second layer only."""
    b = bench("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1)
    assert b.folder.config.layer_types == ["full_attention", "sliding_attention"]
    tokens = [(11 * i) % 80 + 3 for i in range(90)]

    async def go(b):
        async with b.engine(context_len=100) as engine:
            assert engine._scheduler.served.plan.name == "lean"
            return await engine.score(tokens, 1)

    np.testing.assert_allclose(
        b.run(go), own_log_probs(b.model, tokens, 1)[np.arange(89), tokens[1:]], atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaled_rotary_frequencies_are_the_models_own(bench, kind):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    b = bench("llama", rope_parameters=scaling, max_position_embeddings=256)
    tokens = [(11 * i) % 80 + 3 for i in range(120)]

    async def go(b):
        async with b.engine(context_len=128) as engine:
            assert engine._scheduler.served.plan.name == "lean"
            return await engine.score(tokens, 1)

    own = own_log_probs(b.model, tokens, 1)[np.arange(119), tokens[1:]]
    np.testing.assert_allclose(b.run(go), own, atol=2e-4, rtol=0)


def test_frequencies_that_follow_the_longest_sequence_are_recomputed(bench, ask):
    """Each length has its own, whatever longer sequences were served before."""
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    b = bench("llama", rope_parameters=scaling, max_position_embeddings=32)

    async def go(b):
        async with b.engine(context_len=64) as engine:
            assert engine._scheduler.served.plan.name == "rescan"
            await engine.generate(ask("longer", range(3, 60), new=2))
            return await engine.generate(ask("a", range(3, 43), new=3))

    done = b.run(go)
    for count in range(3):
        tokens = [*range(3, 43), *done.tokens[:count]]
        fresh = b.folder.model()
        with torch.no_grad():
            own = torch.log_softmax(fresh(torch.tensor([tokens])).logits[0, -1], -1)[done.tokens[count]]
        assert done.plain_log_probs[count] == pytest.approx(float(own), abs=1e-4)


def test_a_plan_whose_logits_are_wrong_is_not_used(bench, ask, caplog, monkeypatch):
    from slime_core.engines.local import lean

    monkeypatch.setattr(lean, "_gated", lambda gate, up: gate)
    caplog.set_level(logging.INFO)

    async def go(b):
        async with b.engine() as engine:
            return engine._scheduler.served.plan.name

    assert bench("qwen3").run(go) == "packed"
    assert "logits differ from the model's own" in caplog.text


def test_rounding_that_sends_a_token_to_another_expert_rejects_no_plan(bench):
    """With this seed one of three sequences has other experts in the packed pass."""
    b = bench("qwen3-moe", seed=7, num_hidden_layers=4, num_experts=16)

    async def go(b):
        async with b.engine(dtype="bfloat16") as engine:
            return engine._scheduler.served.plan.name

    assert b.run(go) == "packed"


def test_a_long_context_costs_what_its_sequences_need(bench, ask):
    """A model of 32,768 positions, 64 slots: one prompt of 4,000 tokens among short ones."""
    b = bench("qwen3", max_position_embeddings=32768)
    tokens = [(11 * i) % 80 + 3 for i in range(4000)]

    async def go(b):
        async with b.engine(slots=64, context_len=32768) as engine:
            asked = [ask("long", tokens, new=2), *(ask(str(i), [5, 6, 7], new=2) for i in range(8))]
            done = await asyncio.gather(*(engine.generate(r) for r in asked))
            return done[0], engine._scheduler.tokens

    done, slot = b.run(go)
    assert 4002 <= slot < 8192
    own = own_log_probs(b.model, [*tokens, *done.tokens], 4000)[np.arange(2), done.tokens]
    np.testing.assert_allclose(done.plain_log_probs, own, atol=2e-4, rtol=0)
