"""The embedded engine on a GPU: captured decode steps, pages, and draws that the host reads one pass late."""

import asyncio

import numpy as np
import pytest
import torch
import transformers

from slime_core.engines.local import LocalEngine
from slime_core.testing import tiny_model
from slime_core.testing.models import char_tokenizer
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.gpu

PROMPTS = [[3 + (7 * i + j) % 60 for j in range(5 + 19 * (i % 4))] for i in range(12)]


def served(folder, model, go, *, slots=8, dtype="float32", version=1):
    """Run ``go(engine)`` with an engine that serves the model's weights."""

    async def run():
        thread = TorchThread(1)
        engine = LocalEngine(folder, slots=slots, context_len=512, dtype=dtype, device="cuda", thread=thread)
        try:
            await engine.load(update(model, version))
            return await go(engine)
        finally:
            await engine.close()
            thread.close()

    return asyncio.run(run())


def update(model, version):
    return WeightUpdate(version=version, epoch=1, transport="tensors", tensors=dict(model.state_dict()))


def asks(new=48, **params):
    sampling = SamplingParams(**({"max_new_tokens": new, "ignore_eos": True} | params))
    return [GenerateRequest(id=str(i), tokens=p, params=sampling, seed=i) for i, p in enumerate(PROMPTS)]


@pytest.fixture
def qwen3(tmp_path):
    folder = ModelFolder.open(tiny_model(tmp_path / "model", family="qwen3"))
    return folder, folder.build_model("float32").cuda()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_log_probs_are_the_models_own_captured_and_in_chunks(family, dtype, tmp_path, monkeypatch):
    from slime_core.engines.local import paged

    monkeypatch.setattr(paged, "PASS_ROWS", 64)
    folder = ModelFolder.open(tiny_model(tmp_path / "model", family=family))
    model = folder.build_model("float32").cuda()

    async def go(engine):
        done = await asyncio.gather(*(engine.generate(r) for r in asks(temperature=0.8, top_p=0.95)))
        assert engine._scheduler.served.plan.name == "lean"
        assert engine._scheduler._runner._graphs, "no decode step was captured"
        scored = await engine.score([*PROMPTS[3], *done[3].tokens], len(PROMPTS[3]))
        np.testing.assert_allclose(scored, done[3].plain_log_probs, atol=2e-3 if dtype == "float32" else 0.15)
        return done

    done = served(folder, model, go, slots=5, dtype=dtype)
    exact = model.double()
    for prompt, one in zip(PROMPTS, done, strict=True):
        tokens = torch.tensor([[*prompt, *one.tokens]], device="cuda")
        with torch.no_grad():
            logits = exact(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, -1)[torch.arange(48), torch.tensor(one.tokens)].cpu()
        apart = np.abs(np.array(one.plain_log_probs) - own.numpy())
        assert apart.max() < (2e-3 if dtype == "float32" else 0.25), apart.max()


class ConfigFolder:
    """What the engine reads of a model folder, from a config alone."""

    def __init__(self, config):
        self.config, self.vocab_size, self.context_len = config, config.vocab_size, 512
        self.eos_token_ids, self.trust_remote_code = (1,), False

    def tokenizer(self):
        return char_tokenizer()


OTHERS = {
    "Gemma2Config": {"head_dim": 16, "sliding_window": 24},
    "GPTNeoXConfig": {},
    "Qwen3MoeConfig": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GptOssConfig": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_run_their_own_code_over_pages(kind):
    """Greedy tokens of float32 are those of the module itself, whether or not its steps can be captured."""
    config = getattr(transformers, kind)(
        vocab_size=84, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, **OTHERS[kind],
    )  # fmt: skip
    folder = ConfigFolder(config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").cuda().eval()

    async def go(engine):
        assert engine._scheduler.served.plan.name == "packed"
        done = await asyncio.gather(*(engine.generate(r) for r in asks(32, temperature=0.0)))
        print(kind, "captured" if engine._scheduler._runner._graphs else "not captured")
        return done

    done = served(folder, model, go, slots=4)
    for prompt, one in zip(PROMPTS, done, strict=True):
        tokens = torch.tensor([[*prompt, *one.tokens]], device="cuda")
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        best, at = logits.max(-1).values, logits[torch.arange(32), torch.tensor(one.tokens)]
        assert float((best - at).abs().max()) < 2e-3


def test_draws_repeat_for_any_company_and_their_samples_share_pages(qwen3):
    folder, model = qwen3

    async def go(engine):
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        asked = [GenerateRequest(id=str(i), tokens=list(range(3, 60)), params=params, seed=i) for i in range(16)]
        alone = [await engine.generate(one) for one in asked[:3]]
        await engine.load(update(model, 2))
        together = await asyncio.gather(*(engine.generate(one) for one in asked))
        assert [one.tokens for one in alone] == [one.tokens for one in together[:3]]
        assert len({tuple(one.tokens) for one in together}) == 16
        pool = engine._scheduler._pool
        assert pool.available == pool.count - 1
        await engine.load(update(model, 3))
        return alone

    served(folder, model, go)


def test_graphs_follow_new_weights_longer_requests_and_a_pause(qwen3):
    folder, model = qwen3

    async def go(engine):
        first = await asyncio.gather(*(engine.generate(r) for r in asks(temperature=0.0)))
        tasks = [asyncio.create_task(engine.generate(r)) for r in asks(300, temperature=0.0)]
        await asyncio.sleep(0.05)
        await engine.pause("retract")
        await engine.release({"kv", "weights"})
        await engine.reacquire({"weights"})
        await engine.load(update(model, 2))
        await engine.reacquire({"kv"})
        await engine.resume()
        longer = await asyncio.gather(*tasks)
        assert [one.tokens for one in first] == [one.tokens[:48] for one in longer]
        halved = {name: tensor / 2 for name, tensor in model.state_dict().items()}
        await engine.load(WeightUpdate(version=3, epoch=1, transport="tensors", tensors=halved))
        other = await asyncio.gather(*(engine.generate(r) for r in asks(temperature=0.0)))
        assert [one.tokens for one in first] != [one.tokens for one in other]
        await engine.load(WeightUpdate(version=4, epoch=1, transport="shared", tensors=dict(model.state_dict())))
        again = await asyncio.gather(*(engine.generate(r) for r in asks(temperature=0.0)))
        assert [one.tokens for one in first] == [one.tokens for one in again]

    served(folder, model, go)
