"""The embedded engine in the arithmetic of a trainer with true_on_policy_mode, by the kernels' references."""

import asyncio

import numpy as np
import pytest
import torch

from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_log_probs_are_the_models_own_and_rows_are_independent(bench, ask, name):
    async def go(b):
        asked = [ask(str(i), range(3, 8 + 23 * (i % 3)), new=12, temperature=0.7) for i in range(5)]
        async with b.engine(paged=True, exact=True) as engine:
            assert "batch_invariant" in engine.abilities
            plan = engine._scheduler.served.plan
            assert plan.name == "lean"
            assert plan.invariant
            return asked, await asyncio.gather(*(engine.generate(r) for r in asked))

    b = bench(name)
    for request, one in zip(*b.run(go), strict=True):
        tokens = torch.tensor([[*request.tokens, *one.tokens]])
        with torch.no_grad():
            logits = b.model(tokens, use_cache=False).logits[0, len(request.tokens) - 1 : -1]
        chosen = torch.log_softmax(logits / 0.7, -1)[torch.arange(12), torch.tensor(one.tokens)]
        np.testing.assert_allclose(one.log_probs, chosen, atol=3e-4)


def test_a_family_that_is_not_written_out_is_refused(bench):
    async def go(b):
        async with b.engine(load=False, paged=True, exact=True) as engine:
            with pytest.raises(ConfigError, match="true_on_policy_mode"):
                await engine.load(b.update())

    bench("gpt2").run(go)
