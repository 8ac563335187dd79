"""Prompts of many thousand tokens: computed in chunks within memory, once for all samples, refused by name."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_core.engines.local import paged
from slime_core.engines.local.pages import PAGE, pages_of
from slime_core.errors import EngineError

pytestmark = pytest.mark.unit

SAMPLES, NEW, TAIL = 4, 6, 5
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": None}


def resident(field):
    """Bytes of this process in memory: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize(("length", "chunk"), [(1 << 13, 1 << 11)], ids=["8k"])
def test_samples_of_a_long_prompt_share_chunks_of_it_within_memory(bench, ask, monkeypatch, length, chunk):
    """Pages for one prompt and a few more: four samples run at once, and a longer prompt is refused."""
    monkeypatch.setattr(paged, "PASS_ROWS", chunk)
    b = bench("qwen3", max_position_embeddings=2 * length, **ONE_LAYER)
    prompt = np.random.default_rng(3).integers(3, b.folder.vocab_size, length + TAIL).tolist()
    requests = [ask(str(i), prompt, new=NEW) for i in range(SAMPLES)]

    async def go(b):
        async with b.engine(slots=SAMPLES, context_len=2 * length, paged=True, share=1.0) as engine:
            plan, rows = engine._scheduler.served.plan, []
            forward = plan.forward
            plan.forward = lambda packed, *args, **more: rows.append(len(packed)) or forward(packed, *args, **more)
            size = engine._scheduler.served.position_bytes * PAGE
            pages = pages_of(length) + 2 * SAMPLES + 1
            monkeypatch.setattr(paged, "free_memory", lambda device, own: pages * size)
            forget_peak()
            before = resident("VmRSS")
            done = await asyncio.gather(*(engine.generate(one) for one in requests))
            growth = resident("VmHWM") - before
            assert engine._scheduler._pool.count == pages
            assert max(rows) == chunk
            assert sum(rows) <= length + SAMPLES * (TAIL + NEW + 2)
            assert growth < 3 << 26, f"{growth >> 20} MiB"
            with pytest.raises(EngineError, match=r"ENG05.*GiB are free"):
                await engine.generate(ask("longer", prompt + prompt[: length // 2], new=1))
            assert (await engine.generate(requests[0])).tokens == done[0].tokens
            return done

    check_log_probs(b.model, prompt, b.run(go))


@pytest.mark.parametrize(
    ("length", "heads", "mib"),
    [
        (1 << 13, 4, 120),
        pytest.param(1 << 17, 1, 512, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
    ],
    ids=["8k", "128k"],
)
def test_slots_compute_a_long_prompt_once_in_chunks_within_memory(bench, ask, length, heads, mib):
    """The second layer needs what the first one's attention computes of the prompt."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": 1, "layer_types": None}
    b = bench("qwen3", max_position_embeddings=2 * length, **shape)
    prompt = np.random.default_rng(3).integers(3, b.folder.vocab_size, length).tolist()

    async def go(b):
        async with b.engine(slots=SAMPLES, context_len=length + NEW, share=1.0) as engine:
            served, rows = engine._scheduler.served, []
            forward = served.plan.forward
            served.plan.forward = lambda packed, *args, **more: (
                rows.append(len(packed)) or forward(packed, *args, **more)
            )
            forget_peak()
            before = resident("VmRSS")
            done = await asyncio.gather(*(engine.generate(ask(str(i), prompt, new=NEW)) for i in range(SAMPLES)))
            growth = resident("VmHWM") - before
            assert max(rows) == served.counts.most
            assert sum(rows) == length + NEW * served.counts.pad(SAMPLES)
            assert growth < mib << 20, f"{growth >> 20} MiB"
            return done

    check_log_probs(b.model, prompt, b.run(go))


def check_log_probs(model, prompt, done):
    """Compare what completions of one prompt say with one forward of the module over it, and one over each of them."""
    with torch.no_grad():
        cache = model(torch.tensor([prompt[:-1]]), use_cache=True, logits_to_keep=1).past_key_values
    for one in done:
        tokens = torch.tensor([[prompt[-1], *one.tokens[:-1]]])
        with torch.no_grad():
            logits = model(tokens, past_key_values=cache).logits[0]
        cache.crop(len(prompt) - 1)
        at = (torch.arange(NEW), torch.tensor(one.tokens))
        np.testing.assert_allclose(one.plain_log_probs, torch.log_softmax(logits, -1)[at], atol=2e-4)
