"""Model folders without files, from transformers configs, and engines that serve them."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
import transformers

from slime_core.engines.local import LocalEngine
from slime_core.testing.models import char_tokenizer
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate

VOCAB = 84
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCAB, "initializer_range": 0.2}
CONFIGS = {
    "qwen3": ("Qwen3Config", COMMON | GROUPED),
    "qwen3-wide": ("Qwen3Config", COMMON | {"hidden_size": 256, "intermediate_size": 333, "vocab_size": 101, "head_dim": 48, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", COMMON | {"num_key_value_heads": 4, "attention_bias": True}),
    "mistral": ("MistralConfig", COMMON | GROUPED | {"sliding_window": 24}),
    "neox": ("GPTNeoXConfig", COMMON),
    "gemma2": ("Gemma2Config", COMMON | GROUPED | {"sliding_window": 24}),
    "gpt2": ("GPT2Config", GPT2 | {"bos_token_id": None, "eos_token_id": 1}),
    "qwen3-moe": ("Qwen3MoeConfig", COMMON | GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gpt-oss": ("GptOssConfig", COMMON | GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "mamba": ("MambaConfig", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 1}),
}  # fmt: skip


class ConfigFolder:
    """What the engine reads of a model folder, from a config alone."""

    def __init__(self, name, **changes):
        kind, values = CONFIGS[name]
        self.config = getattr(transformers, kind)(**(values | changes))
        self.vocab_size, self.context_len = self.config.vocab_size, 512
        self.eos_token_ids, self.trust_remote_code = (1,), False

    def tokenizer(self):
        return char_tokenizer()

    def model(self, seed=0, dtype=torch.float32):
        """The module as transformers makes it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval().requires_grad_(False)


class Bench:
    """A folder, its module, the torch thread, and engines that are closed in the end."""

    def __init__(self, name, *, threads=1, seed=0, **changes):
        self.folder = ConfigFolder(name, **changes)
        self.thread = TorchThread(threads)
        self.model = self.thread.call(self.folder.model, seed)

    def update(self, version=0, transport="tensors", tensors=None):
        return WeightUpdate(
            version=version, epoch=0, transport=transport, tensors=dict(tensors or self.model.state_dict())
        )

    @asynccontextmanager
    async def engine(self, *, slots=4, context_len=256, dtype="float32", load=True, epoch=0):
        engine = LocalEngine(
            self.folder,
            slots=slots,
            context_len=context_len,
            dtype=dtype,
            device="cpu",
            thread=self.thread,
            epoch=epoch,
        )
        try:
            if load:
                await engine.load(self.update())
            yield engine
        finally:
            await engine.close()

    def run(self, go):
        """Run ``go(bench)``, then end the thread."""
        try:
            return asyncio.run(go(self))
        finally:
            self.thread.close()


@pytest.fixture
def bench():
    """`bench(name)` makes a Bench; its thread ends with the test."""
    made = []

    def make(name="qwen3", **options):
        made.append(Bench(name, **options))
        return made[-1]

    yield make
    for one in made:
        one.thread.close()


@pytest.fixture
def ask():
    """`ask(name, tokens, new=, **sampling)` makes a request that ignores the end token unless told otherwise."""

    def make(name="a", tokens=(5, 6, 7), *, new=12, seed=None, kept=0, **params):
        sampling = SamplingParams(**({"max_new_tokens": new, "ignore_eos": True} | params))
        seed = sum(name.encode()) if seed is None else seed
        return GenerateRequest(id=name, tokens=list(tokens), params=sampling, seed=seed, kept=kept)

    return make
