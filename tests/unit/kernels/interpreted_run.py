"""In Triton's interpreter, engine and trainer go through two versions, and their log-probs have the same bits."""

import asyncio
from pathlib import Path

import numpy as np

from slime_core.config.load import load_config
from slime_core.engines.local import LocalEngine
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.trainers.batch import make_batch
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import GenerateRequest, Group, Prompt, Sample, SamplingParams, Status
from slime_core.weights.folder import ModelFolder

PARAMS = SamplingParams(max_new_tokens=5, temperature=0.8, ignore_eos=True)
PROMPT = [5, 6, 7]


async def group(engine, version):
    """Two samples of one prompt."""
    requests = [GenerateRequest(id=str(n), tokens=PROMPT, params=PARAMS, seed=n) for n in range(2)]
    samples = []
    for number, done in enumerate(await asyncio.gather(*map(engine.generate, requests))):
        sample = Sample(id=f"main/0-{number}", tokens=list(PROMPT), group_index=0)
        sample.append_response(list(done.tokens), list(done.log_probs), version=version)
        sample.reward, sample.status, sample.temperature = float(number), Status.COMPLETED, PARAMS.temperature
        samples.append(sample)
    return Group(prompt=Prompt(id="main/0", position=0), samples=samples, rollouts={0: [0], 1: [1]})


async def apart(path, thread):
    """Of each of two versions, how far the trainer's log-probs are from the engine's; the weights change between."""
    folder = ModelFolder.open(path)
    config = load_config(
        None, ["--hf-checkpoint", str(path), "--dtype", "float32", "--lr", "0.01", "--true-on-policy-mode"]
    )
    trainer = FsdpTrainer(config, load_plugins(config), folder, thread=thread, device="cpu")
    await trainer.begin(config)
    options = {"slots": 2, "context_len": 32, "dtype": "float32", "device": "cpu"}
    engine = LocalEngine(folder, thread=thread, paged=True, exact=True, **options)
    gaps = []
    for version in range(2):
        await engine.load(await trainer.publish(version))
        batch = make_batch(version, "main", [await group(engine, version)])
        batch.columns["advantages"] = np.where(np.arange(len(batch.loss_mask)) % 2, 1.0, -0.5).astype(np.float32)
        metrics = await trainer.step(batch)
        assert metrics["grad_norm"] > 0
        gaps.append(metrics["train_rollout_logprob_abs_diff"])
    await engine.close()
    return gaps


def check():
    worker = TorchThread(1)
    assert asyncio.run(apart(tiny_model(Path("model"), hidden=160, layers=1), worker)) == [0.0, 0.0]
    worker.close()
