"""Model folders without files, from transformers configs, and engines that serve them."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
import transformers

from slime_core.engines.local import LocalEngine
from slime_core.testing.families import family_config
from slime_core.testing.models import char_tokenizer
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate

VOCAB = 84
WIDE = {"hidden_size": 256, "intermediate_size": 333, "vocab_size": 101, "head_dim": 48, "num_key_value_heads": 1}
MAMBA = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 1}


def config_of(name, changes):
    """The config of a family, or of one of two more."""
    if name == "mamba":
        return transformers.MambaConfig(**(MAMBA | changes))
    family, more = ("qwen3", WIDE) if name == "qwen3-wide" else (name, {"vocab_size": VOCAB})
    return family_config(family, **(more | changes))


class ConfigFolder:
    """What the engine reads of a model folder, from a config alone."""

    def __init__(self, name, **changes):
        self.config = config_of(name, changes)
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
    async def engine(self, *, slots=4, context_len=256, dtype="float32", load=True, epoch=0, **more):
        engine = LocalEngine(
            self.folder,
            slots=slots,
            context_len=context_len,
            dtype=dtype,
            device="cpu",
            thread=self.thread,
            epoch=epoch,
            **more,
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
