"""Dialogues of a run whose judge is a service: a verdict a turn, each candidate once; what is lost is masked."""

import asyncio

import pytest
from dialogue_actors import context, fenced, pending
from judge_services import TOKEN, judged, service
from speakers import speaker

from slime_core.testing.fakes import ScriptedEngine
from slime_kernelbench.options import Options
from slime_kernelbench.run import KernelbenchRun

pytestmark = pytest.mark.integration
TOKENIZER = speaker("qwen3")


def play(folder, monkeypatch, *answers):
    """A dialogue of these answers before a served judge that does what they say: statuses, and rewards."""
    monkeypatch.setenv("SLIME_KERNELBENCH_TOKEN", TOKEN)
    turns = iter(answers)

    def say(request):
        return [*TOKENIZER.encode(fenced(next(turns)), add_special_tokens=False), TOKENIZER.eos_token_id], "stop"

    async def whole():
        run = KernelbenchRun()
        async with service(folder) as (url, _, _):
            engine = ScriptedEngine(say, vocab_size=len(TOKENIZER))
            ctx = context(engine, TOKENIZER, Options(judge_url=url, judge_retries=1), new_tokens=4096)
            try:
                done = await run.generate(pending(TOKENIZER), ctx)
                return done, await run.reward(done, ctx)
            finally:
                await run.aclose()

    group, rewards = asyncio.run(whole())
    return [sample.metadata["kernelbench"]["verdict"]["status"] for sample in group.samples], rewards


def test_each_turn_is_judged_once_by_the_service(folder, monkeypatch):
    statuses, rewards = play(folder, monkeypatch, "wrong one", "runtime_error two", "correct three")
    assert statuses == ["wrong", "runtime_error", "correct"]
    assert [reward.kind for reward in rewards] == ["score", "failed", "score"]
    assert [word for _, word in judged(folder)] == ["wrong", "runtime_error", "correct"]


def test_a_turn_that_the_service_could_not_judge_is_masked_and_never_scored(folder, monkeypatch):
    statuses, rewards = play(folder, monkeypatch, "wrong one", "die two", "correct three")
    assert statuses[:2] == ["wrong", "infra"]
    assert {reward.kind for reward in rewards[:2]} == {"infra_error"}  # the first turn's return holds the second's
