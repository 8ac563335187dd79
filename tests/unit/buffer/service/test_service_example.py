"""The example's generator, with an engine that says what the test wants."""

import asyncio
from pathlib import Path

import httpx
import pytest

from slime_core.buffer.generator import Task
from slime_core.buffer.service import models
from slime_core.compat.locate import locate

pytestmark = pytest.mark.unit

EXAMPLE = Path(__file__).parents[4] / "examples" / "rollout_buffer"


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ((("54", "stop"), ("54", "stop")), 1.1),
        ((("11", "stop"), ("54", "stop")), 1.0),
        ((("54", "stop"), ("11", "stop")), 0.1),
        ((("54", "length"), ("54", "length")), 0.0),
    ],
    ids=["twice", "mended", "spoilt", "cut"],
)
def test_the_last_answer_counts(answers, reward):
    two_turns = locate(f"{EXAMPLE / 'generator.py'}:two_turns", "--function")
    asked = []

    def engine(request):
        text, finish = answers[len(asked)]
        asked.append(request)
        meta = {
            "output_token_logprobs": [[-0.5, 30 + len(asked), None]],
            "weight_versions": [2],
            "finish_reason": {"type": finish},
        }
        return httpx.Response(200, json={"text": text, "output_ids": [30 + len(asked)], "meta_info": meta})

    async def body():
        work = models.Work(
            id="grpo/1",
            lease="w1",
            run="run",
            tokens=[4, 5],
            label="54",
            samples=[],
            sampling=models.Sampling(max_new_tokens=6),
            version=2,
            engine=models.EngineDoor(url="http://127.0.0.1:1"),
        )
        async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as http:
            return await two_turns(Task(work, "grpo/1-0", 7, http))

    made = asyncio.run(body())
    assert made.reward == pytest.approx(reward)
    assert made.tokens == [4, 5, 31, 4, 5, 32]
    assert made.loss_mask == [1, 0, 0, 1]
    assert made.weight_versions == [2, -1, -1, 2]
