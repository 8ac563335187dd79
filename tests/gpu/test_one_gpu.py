"""What only a GPU can tell: packed attention there, the embedded engine there, and whole runs in bfloat16.

The contract suites run on a GPU too: `pytest -m gpu tests/contract tests/gpu`.
"""

import asyncio
import json

import numpy as np
import pytest
import torch

from slime_core.config.load import load_config
from slime_core.engines.local import LocalEngine
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.trainers.batch import make_batch
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import GenerateRequest, Group, Prompt, Sample, SamplingParams, Status, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 2e-4, "bfloat16": 6e-2}


def _groups(lengths, vocab):
    rng = np.random.default_rng(0)
    groups = []
    for position, (prompt, response) in enumerate(lengths):
        sample = Sample(id=f"main/{position}-0", tokens=rng.integers(1, vocab, prompt).tolist(), group_index=position)
        sample.append_response(rng.integers(1, vocab, response).tolist(), [-1.0] * response, version=0)
        sample.reward, sample.status = float(position), Status.COMPLETED
        prompt_row = Prompt(id=f"main/{position}", position=position)
        groups.append(Group(prompt=prompt_row, samples=[sample], rollouts={position: [0]}))
    return groups


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_packed_log_probs_equal_one_sequence_at_a_time(family, dtype, tmp_path):
    path = tiny_model(tmp_path / "model", family=family)
    folder = ModelFolder.open(path)
    config = load_config(None, ["--hf-checkpoint", str(path), "--dtype", dtype, "--device", "cuda"])
    groups = _groups([(3, 40), (1, 7), (17, 1), (5, 64), (2, 2)], folder.vocab_size)
    batch = make_batch(0, "main", groups)
    thread = TorchThread(1)
    trainer = FsdpTrainer(config, load_plugins(config), folder, thread=thread, device="cuda")

    async def scored():
        await trainer.begin(config)
        return (await trainer.score(batch, frozenset({"policy"})))["policy"]["log_probs"]

    got = asyncio.run(scored())
    thread.close()
    model = folder.build_model("float32").double().cuda()
    want = []
    with torch.no_grad():
        for group in groups:
            tokens = torch.tensor(group.samples[0].tokens, device="cuda")
            logits = model(tokens[None]).logits[0].log_softmax(-1)
            picked = logits[:-1].gather(1, tokens[1:, None])[:, 0]
            want.append(picked[-group.samples[0].response_length :].cpu().numpy())
    np.testing.assert_allclose(got, np.concatenate(want), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    folder = ModelFolder.open(tiny_model(tmp_path / "model", family=family))
    model = folder.build_model("float32").cuda()
    prompts = [[3, 4, 5], [7], [2, 9, 4, 4, 8, 3]]

    async def generate():
        thread = TorchThread(1)
        engine = LocalEngine(folder, slots=2, context_len=64, dtype="float32", device="cuda", thread=thread)
        await engine.load(WeightUpdate(version=1, epoch=1, transport="tensors", tensors=dict(model.state_dict())))
        params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
        requests = [GenerateRequest(id=str(i), tokens=p, params=params, seed=i) for i, p in enumerate(prompts)]
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        thread.close()
        return [out.tokens for out in done]

    got = asyncio.run(generate())
    for prompt, tokens in zip(prompts, got):
        ids = torch.tensor([prompt], device="cuda")
        want = model.generate(
            ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_arithmetic_recipe_runs_on_the_gpu(dtype, slime, tmp_path):
    done = slime(
        *(
            "run",
            "--plugin",
            "rm_math",
            "--run-dir",
            "out",
            "--device",
            "cuda",
            "--dtype",
            dtype,
            "--num-rollout",
            "3",
        ),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line.get("kind") == "eval"]
    assert evaluated
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()
