"""Adapters beside the base on a GPU: captured decode steps of several adapters, and updates that leave them valid."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core.engines.local import LocalEngine
from slime_core.lora.folder import factors_of, to_peft
from slime_core.lora.layers import attach
from slime_core.lora.spec import LoraSpec
from slime_core.testing import tiny_model
from slime_core.threads import TorchThread
from slime_core.types import AdapterUpdate, GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.gpu

NAMES = ("solver", "critic")
TOLERANCE = {"float32": 5e-3, "bfloat16": 0.25}


def moved(adapters, seed):
    """Adapters of random factors, as an update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    config = adapters.spec.to_peft("base")
    tensors = {name: to_peft(factors_of(adapters, name)) for name in adapters.names}
    return {name: AdapterUpdate(config=config, tensors=tensors[name]) for name in adapters.names}


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", [NAMES, NAMES[:1]], ids=["two", "one"])
def test_captured_steps_compute_each_row_with_its_adapter_before_and_after_an_update(tmp_path, names, dtype, dora):
    folder = ModelFolder.open(tiny_model(tmp_path / "model", family="qwen3"))
    base = {name: tensor.cuda() for name, tensor in folder.build_model("float32").state_dict().items()}
    model = folder.build_model("float32").cuda()
    adapters = attach(model, LoraSpec(rank=8, alpha=16, use_dora=dora), seed=0, names=names)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    requests = [
        GenerateRequest(
            id=f"{number}-{name}", tokens=list(range(3, 40 + number)), params=params, seed=number, adapter=name
        )
        for number in range(4)
        for name in (*names, "base")
    ]

    def expected(request, tokens):
        with torch.no_grad(), adapters.using(None if request.adapter == "base" else request.adapter):
            logits = model(torch.tensor([[*request.tokens, *tokens]], device="cuda")).logits[0].double()
        rows = torch.log_softmax(logits[len(request.tokens) - 1 : -1], -1)
        return rows[range(len(tokens)), tokens].cpu().numpy()

    async def run():
        thread = TorchThread(1)
        engine = LocalEngine(folder, slots=16, context_len=128, dtype=dtype, device="cuda", thread=thread)
        update = WeightUpdate(version=0, epoch=1, transport="tensors", tensors=base)
        try:
            for version in range(2):
                changes = {"version": version, "adapters": moved(adapters, version)}
                await engine.load(replace(update, **changes, **({} if version == 0 else {"tensors": {}})))
                for _ in range(2):  # captured the second time
                    done = await asyncio.gather(*map(engine.generate, requests))
                graphs = dict(engine._scheduler._runner._graphs)
                assert graphs, "nothing was captured"
                for request, one in zip(requests, done, strict=True):
                    far = np.abs(one.plain_log_probs - expected(request, one.tokens))
                    assert far.max() < TOLERANCE[dtype], (version, request.id, far.max())
                scored = await engine.score([*request.tokens, *one.tokens], len(request.tokens), adapter="base")
                assert np.abs(scored - one.plain_log_probs).max() < TOLERANCE[dtype]
        finally:
            await engine.close()
            thread.close()

    asyncio.run(run())
