"""Adapters on a real SGLang server on a GPU: its kernels (csgmv), CUDA graphs, host memory that the server maps.

A server of its own: adapters are settled at its start.
"""

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest
import torch

from slime_core.plugins import load_plugins
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import GenerateRequest, SamplingParams
from slime_core.weights.folder import ModelFolder
from slime_core.weights.logprob_check import probe
from slime_core.weights.update import sync_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(480)]

BAND = 0.05  # mean difference of log-probs, bfloat16 on both sides
FLAGS = ("--dtype", "bfloat16", "--save-interval", "0", "--lora-rank", "32", "--lora-sync", "adapter")
OPTIONS = {"mem_fraction_static": 0.3, "max_running_requests": 64, "cuda_graph_max_bs": 16}


@pytest.fixture(scope="module")
def adapted(place, folder, loop):
    """An engine over a server with room for an adapter, and a trainer of it."""
    module, found = place
    on_gpu = found.device == "cuda"
    flags = FLAGS if on_gpu else ("--dtype", "float32", *FLAGS[2:])
    config = found.config(folder, *flags, sglang=OPTIONS if on_gpu else None)
    thread, stack = TorchThread(4), AsyncExitStack()
    one = loop.run(stack.enter_async_context(module.serving(config, folder.parent / "adapters")))
    model = ModelFolder.open(folder)
    trainer = FsdpTrainer(one.config, load_plugins(config), model, thread=thread, device=one.device, epoch=1)
    loop.run(trainer.begin(one.config))
    yield one, trainer
    loop.run(stack.aclose())
    thread.close()


def move(trainer, seed):
    """Other factors, large enough to change what is drawn."""
    torch.manual_seed(seed)
    for name, parameter in trainer._worker.policy.adapters.parameters().items():
        torch.nn.init.normal_(parameter, std=0.05 if ".lora_B." in name else 0.1)


async def both(engine, trainer):
    """Log-probs of the same text by the trainer and by the server, [R] each."""
    batch = probe(np.arange(5, 261), 4096)
    trained = (await trainer.score(batch, frozenset({"policy"})))["policy"]["log_probs"]
    parts = [batch.tokens[a:b].tolist() for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
    return trained, np.concatenate(await asyncio.gather(*(engine.score(tokens, 1) for tokens in parts)))


def test_the_base_crosses_once_and_each_version_is_the_trainers(adapted, loop):
    served, trainer = adapted

    async def work():
        bases, before = [], None
        for version in (1, 2, 3):
            route = await served.engine.route("none")
            bases.append(route.base)
            move(trainer, version)
            await sync_weights(trainer, served.engine, version, check="all")
            trained, served_now = await both(served.engine, trainer)
            assert np.abs(trained - served_now).mean() < BAND
            if before is not None:
                assert np.abs(served_now - before).mean() > 3 * BAND, "the adapter changed nothing"
            before = served_now
        assert bases == [True, False, False]

    loop.run(asyncio.wait_for(work(), 240))


def test_a_decoded_token_is_scored_as_it_was_drawn_also_from_cached_pages(adapted, loop):
    """Decoding in CUDA graphs against one prefill of the same tokens, before and after an update."""
    served, trainer = adapted

    async def work():
        for version in (4, 5):
            move(trainer, version)
            await sync_weights(trainer, served.engine, version, check="all")
            params = SamplingParams(max_new_tokens=32, ignore_eos=True)
            prompt = list(range(7, 71))
            asked = [GenerateRequest(id=f"{version}-{n}", tokens=prompt, params=params, seed=n) for n in range(16)]
            for done in await asyncio.gather(*map(served.engine.generate, asked)):
                assert list(done.versions) == [version] * 32
                scored = await served.engine.score([*prompt, *done.tokens], len(prompt))
                assert np.abs(scored - np.asarray(done.log_probs)).mean() < BAND

    loop.run(asyncio.wait_for(work(), 240))
