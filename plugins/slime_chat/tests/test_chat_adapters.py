"""Agents of a run with several adapters: a request's model chooses who answers, and who learns from the answer."""

import pytest

from slime_core.config.schema import Config
from slime_core.config.sections.train import TrainSection

pytestmark = pytest.mark.unit
TWO = Config(train=TrainSection(lora_rank=4, lora_sync="adapter", lora_adapters=("solver", "critic")))
HI = {"role": "user", "content": "hi"}


def test_the_model_of_a_request_is_the_adapter_that_answers_and_learns(context, talk, letters):
    ctx = context("one|", "two|", "three|", config=TWO)

    async def agent(client, session):
        first = await client.say([HI], model="solver")
        said = [HI, first, {"role": "user", "content": "ok?"}]
        second = await client.speak("messages", said, model="critic")
        await client.speak("responses", [*said, second, {"role": "user", "content": "so"}], model="solver")

    solver, critic = talk(ctx, agent).samples()
    assert [request.adapter for request in ctx.engine.requests] == ["solver", "critic", "solver"]
    assert [sample.model for sample in (solver, critic)] == ["solver", "critic"]
    trained = [
        "".join(
            letters.decode([token], False) for token, kept in zip(sample.response_tokens, sample.loss_mask) if kept
        )
        for sample in (solver, critic)
    ]
    assert trained == ["one|three|", "two|"]


@pytest.mark.parametrize("api", ["chat/completions", "messages", "responses"])
def test_an_unknown_model_is_refused_with_the_adapters_that_there_are(context, talk, api):
    async def agent(client, session):
        body = {"max_tokens": 8} if api == "messages" else {}
        body |= {"input": "hi"} if api == "responses" else {"messages": [HI]}
        answer = await client.http.post(f"/{api}", json={"model": "gpt-5", **body})
        assert answer.status_code == 404
        assert "'gpt-5': adapters are solver, critic; policy is the sample's own" in answer.json()["error"]["message"]

    assert talk(context("one|", config=TWO), agent).counts["left_out"] == 0


def test_other_names_are_the_samples_own_adapter_and_all_are_listed(context, talk, issue):
    ctx, sample = context("one|", config=TWO), issue().samples[0]
    sample.model = "critic"

    async def agent(client, session):
        await client.say([HI], model="policy")
        await client.say([{"role": "user", "content": "again"}], model="run/coder")
        listed = (await client.http.get("/models")).json()["data"]
        assert [one["id"] for one in listed] == ["policy", "solver", "critic"]
        assert (await client.http.get("/models/critic")).json()["id"] == "critic"

    samples = talk(ctx, agent, sample=sample).samples()
    assert [(sample.role, sample.model) for sample in samples] == [("policy", "critic"), ("coder", "critic")]
    assert {request.adapter for request in ctx.engine.requests} == {"critic"}
