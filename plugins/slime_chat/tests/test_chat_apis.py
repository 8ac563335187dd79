"""Anthropic's Messages and OpenAI's Responses: the same dialogues in other words, and the official clients' reading."""

import asyncio
import json
import os

import pytest

from slime_chat import open_session

HI = {"role": "user", "content": "hi"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
THOUGHT = f"<think>hm</think>so{CALL}|"


def events(answer):
    """The values of a stream of named events."""
    assert answer.headers["content-type"] == "text/event-stream"
    pairs = [event.split("\n") for event in answer.text.split("\n\n") if event]
    values = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {value['type']}" for value in values]
    return values


def asked(ctx, letters):
    return [letters.decode(request.tokens, skip_special_tokens=False) for request in ctx.engine.requests]


@pytest.mark.unit
def test_messages_are_one_dialogue_in_anthropics_words(context, talk, letters):
    ctx = context(THOUGHT, "four", "4END|", f"{CALL}{CALL}|")
    head = {"model": "run/coder", "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]}
    head |= {"max_tokens": 60, "tools": [TOOL], "stop_sequences": ["END"], "thinking": {"type": "adaptive"}}

    async def agent(client, session):
        async def ask(messages, **more):
            answer = await client.http.post("/messages", json={**head, "messages": messages, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await ask([HI])
        thinking, text, use = first["content"]
        assert thinking == {"type": "thinking", "thinking": "hm", "signature": "slime"}
        assert text == {"type": "text", "text": "so"}
        assert use == {"type": "tool_use", "id": use["id"], "name": "add", "input": {"a": 1}}
        assert (first["type"], first["role"], first["model"]) == ("message", "assistant", "run/coder")
        assert (first["stop_reason"], first["stop_sequence"]) == ("tool_use", None)
        assert first["usage"]["output_tokens"] == len(THOUGHT)
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "1"}]}
        parts = [{"role": "assistant", "content": [text]}, {"role": "assistant", "content": [use]}]
        said = [HI, *parts, {"role": "user", "content": [result, {"type": "text", "text": "go"}]}]
        counted = (await client.http.post("/messages/count_tokens", json={**head, "messages": said})).json()
        second = await ask(said)
        assert second["stop_reason"] == "max_tokens"
        assert counted == {"input_tokens": second["usage"]["input_tokens"]}
        said += [{"role": "assistant", "content": second["content"]}, {"role": "user", "content": "on"}]
        third = await ask([*said, {"role": "user", "content": "now"}])
        assert (third["content"][0]["text"], third["stop_reason"], third["stop_sequence"]) == (
            "4",
            "stop_sequence",
            "END",
        )
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        (only,) = (await ask([HI, *parts[:1], HI], tool_choice=alone))["content"]
        assert only["text"] == CALL + CALL, "two calls where one is allowed are text"

    first, second = talk(ctx, agent).samples()
    assert asked(ctx, letters)[2].endswith(f"A{THOUGHT}T1|Ugo|Afour|Uon\nnow|A")
    assert sum(first.loss_mask) == len(THOUGHT) + len("four") + len("4END|")
    assert [sample.role for sample in (first, second)] == ["coder", "coder"]


@pytest.mark.unit
def test_messages_are_streamed_as_anthropics_events(context, talk):
    ctx = context(THOUGHT)

    async def agent(client, session):
        body = {"messages": [HI], "max_tokens": 9, "stream": True, "tools": [TOOL]}
        start, *middle, delta, stop = events(await client.http.post("/messages?beta=true", json=body))
        prompt = len(ctx.engine.requests[0].tokens)
        assert (start["message"]["content"], start["message"]["usage"]["input_tokens"]) == ([], prompt)
        assert [event["type"] for event in middle].count("content_block_stop") == 3
        deltas = [event["delta"] for event in middle if event["type"] == "content_block_delta"]
        assert deltas == [
            {"type": "thinking_delta", "thinking": "hm"},
            {"type": "signature_delta", "signature": "slime"},
            {"type": "text_delta", "text": "so"},
            {"type": "input_json_delta", "partial_json": '{"a": 1}'},
        ]
        assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert (delta["usage"]["output_tokens"], stop) == (len(THOUGHT), {"type": "message_stop"})

    talk(ctx, agent)


@pytest.mark.unit
def test_responses_are_one_dialogue_in_openais_words(context, talk, letters):
    ctx = context(THOUGHT, "four", "5|", "six|")
    head = {"instructions": "be", "tools": [FUNCTION], "parallel_tool_calls": False, "store": False}
    head |= {"max_output_tokens": 60, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}

    async def agent(client, session):
        async def ask(given, **more):
            answer = await client.http.post("/responses", json={**head, "input": given, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await ask("hi")
        reasoning, message, call = first["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert message["content"] == [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a": 1}')
        assert (first["object"], first["status"], first["incomplete_details"]) == ("response", "completed", None)
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        second = await ask([result], previous_response_id=first["id"])
        assert (second["status"], second["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        said = [{"role": "user", "content": "hi"}, *first["output"], result, *second["output"]]
        third = await ask([*said, {"role": "developer", "content": "on"}])
        assert third["usage"]["total_tokens"] == third["usage"]["input_tokens"] + 2
        await ask([{"role": "user", "content": "go"}], previous_response_id=third["id"])
        lost = await client.http.post("/responses", json={"input": "hi", "previous_response_id": "resp_7"})
        assert (lost.status_code, lost.json()["error"]["param"]) == (404, "previous_response_id")

    (sample,) = talk(ctx, agent).samples()
    assert asked(ctx, letters)[3].endswith(f"|Sbe|Uhi|A{THOUGHT}T1|Afour|Son|A5|Ugo|A")
    assert sum(sample.loss_mask) == len(THOUGHT) + len("four") + len("5|") + len("six|")


@pytest.mark.unit
def test_responses_are_streamed_as_openais_events(context, talk):
    async def agent(client, session):
        body = {"input": [{"type": "message", **HI}], "tools": [FUNCTION], "stream": True}
        values = events(await client.http.post("/responses", json=body))
        assert [value["sequence_number"] for value in values] == list(range(len(values)))
        *_, last = values
        assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")
        done = [value["item"] for value in values if value["type"] == "response.output_item.done"]
        assert done == last["response"]["output"]
        texts = [value["delta"] for value in values if value["type"].endswith(".delta")]
        assert texts == ["hm", "so", '{"a": 1}']
        cut = events(await client.http.post("/responses", json=body))
        assert cut[-1]["type"] == "response.incomplete"

    talk(context(THOUGHT, "cut"), agent)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("messages", {"messages": "hi"}, "messages"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0]"),
        ("messages", {"messages": [{"role": "user", "content": [5]}]}, "messages[0]"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0]"),
        ("messages", {"system": 5}, "system"),
        ("messages", {"stop_sequences": [1]}, "stop_sequences"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ("messages", {"tools": [{"input_schema": {}}]}, "tools"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("messages", {"thinking": {"type": "much"}}, "thinking"),
        ("messages", {"top_k": 5}, "top_k"),
        ("messages", {"context_management": {"edits": []}}, "context_management"),
        ("messages", {"messages": [HI, {"role": "assistant", "content": "so"}]}, "messages"),
        ("responses", {"input": 5}, "input"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ("responses", {"input": [{"role": "poet", "content": "x"}]}, "input[0]"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ("responses", {"input": [5]}, "input[0]"),
        ("responses", {"instructions": 5}, "instructions"),
        ("responses", {"include": ["file_search_call.results"]}, "include"),
        ("responses", {"include": 5}, "include"),
        ("responses", {"previous_response_id": ["x"]}, "previous_response_id"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
        ("responses", {"tools": 5}, "tools"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"reasoning": {"effort": "low"}}, "reasoning"),
        ("responses", {"input": [{"type": "reasoning", "content": 5}, HI]}, "input[0]"),
        ("responses", {"input": [{"type": "function_call", "name": 5}, HI]}, "messages[0]"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else value,
)
def test_what_is_not_served_is_refused_by_name(context, talk, path, given, param):
    ctx = context("4|")
    body = {"messages": {"messages": [HI], "max_tokens": 9}, "responses": {"input": "hi"}}[path]

    async def agent(client, session):
        answer = await client.http.post(f"/{path}", json=body | given)
        error = answer.json()["error"]
        assert (answer.status_code // 100, error["param"], answer.json()["type"]) == (4, param, "error")

    talk(ctx, agent)
    assert not ctx.engine.requests


@pytest.mark.unit
def test_a_full_context_is_told_in_the_words_that_agents_compact_it_by(context, talk):
    from slime_core.errors import EngineError

    async def agent(client, session):
        answer = await client.http.post("/messages", json={"messages": [HI], "max_tokens": 9})
        assert answer.json()["error"]["message"].startswith("prompt is too long: ")

    talk(context(EngineError("the prompt has 9 tokens and the context 8", code="ENG72")), agent)


@pytest.mark.unit
def test_roles_of_one_dialogue_are_samples_of_their_own(context, talk, letters):
    async def agent(client, session):
        first = await client.say([HI])
        client.http.headers["x-slime-role"] = "reviewer"
        await client.speak("messages", [HI, first, {"role": "user", "content": "ok?"}])

    coder, reviewer = talk(context("one|", "two|"), agent).samples()
    assert (coder.role, coder.loss_mask) == ("policy", [1, 1, 1, 1])
    assert (reviewer.role, letters.decode(reviewer.response_tokens, False)) == ("reviewer", "two|")
    assert letters.decode(reviewer.tokens, False) == "Uhi|Aone|Uok?|Atwo|"


@pytest.mark.unit
def test_a_compacted_agent_with_parallel_sub_agents_trains_every_token_once(context, talk):
    """As coding agents go about it: two sub-agents at once, a note put into the history, a summary in its place."""
    ctx = context("one|")

    async def agent(client, session):
        async def sub(role, turns):
            messages = [{"role": "user", "content": role}]
            for _ in range(turns):
                messages += [await client.speak("messages", messages, model=f"run/{role}"), HI]

        main = [{"role": "system", "content": "be"}, HI]
        for _ in range(3):
            main += [await client.speak("messages", main), {"role": "user", "content": "go"}]
        await asyncio.gather(sub("reviewer", 4), sub("searcher", 2), client.speak("messages", main))
        await client.speak("messages", [*main[:3], {"role": "user", "content": "go (note)"}])
        await client.speak("messages", [main[0], {"role": "user", "content": "in short: hi"}])

    samples = talk(ctx, agent).samples()
    turns = sorted((sample.role, sum(sample.loss_mask) // len("one|")) for sample in samples)
    assert turns == [("policy", 1), ("policy", 1), ("policy", 4), ("reviewer", 4), ("searcher", 2)]
    facts = samples[0].metadata["chat"]
    assert (facts["calls"], facts["branches"], facts["roots"], facts["forks"], facts["rewritten"]) == (12, 5, 4, 1, 0)
    assert len(ctx.engine.requests) * len("one|") == sum(sum(sample.loss_mask) for sample in samples)


CLIENTS = """
import json

import anthropic
import openai

TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": TOOL}
QUESTION = {"role": "user", "content": "hi"}

client = openai.OpenAI()
messages = [QUESTION]
for _ in range(2):
    with client.chat.completions.stream(
        model="policy", messages=messages, tools=[{"type": "function", "function": FUNCTION}]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert message.content == "so", message
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "1"}]

function, last, items = {"type": "function", "strict": False, **FUNCTION}, None, [QUESTION]
for turn in range(2):
    with client.responses.stream(
        model="run/planner", input=items[-1:] if last else items, tools=[function], previous_response_id=last
    ) as stream:
        response = stream.get_final_response()
    reasoning, text, call = response.output
    assert (response.output_text, call.arguments) == ("so", '{"a": 1}'), response
    assert [event.type for event in [reasoning, text, call]] == ["reasoning", "message", "function_call"]
    last = response.id
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "1"})
try:
    client.responses.create(model="policy", input="hi", top_logprobs=3)
except openai.BadRequestError as error:
    assert error.param == "top_logprobs", error

client, messages = anthropic.Anthropic(), [QUESTION]
tools = [{"name": "add", "input_schema": TOOL}]
for _ in range(2):
    with client.messages.stream(model="run/reviewer", max_tokens=99, messages=messages, tools=tools) as stream:
        message = stream.get_final_message()
    thinking, text, use = message.content
    assert (thinking.thinking, text.text, use.input, message.stop_reason) == ("hm", "so", {"a": 1}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "1"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model="policy", messages=messages, tools=tools).input_tokens
plain = client.messages.create(model="run/reviewer", max_tokens=99, messages=messages, tools=tools)
assert plain.usage.input_tokens == counted, plain
try:
    client.messages.create(model="policy", max_tokens=9, messages=messages, extra_body={"top_k": 3})
except anthropic.BadRequestError as error:
    assert "top_k" in str(error), error
print("done")
"""


@pytest.mark.integration
@pytest.mark.environments
def test_the_official_clients_lead_dialogues_over_every_api(context, issue, environments_python):
    ctx = context(THOUGHT)

    async def run():
        async with open_session(issue().samples[0], ctx) as session:
            env = {**os.environ, **session.env, "PYTHONPATH": ""}
            process = await asyncio.create_subprocess_exec(
                environments_python, "-c", CLIENTS, env=env, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            assert out == b"done\n"
        return session.samples()

    samples = asyncio.run(run())
    turns = {sample.role: sum(sample.loss_mask) // len(THOUGHT) for sample in samples}
    assert turns == {"policy": 2, "planner": 2, "reviewer": 3}
    assert len(samples) == 3, "every API knows its own dialogue again"


@pytest.mark.unit
def test_any_client_finds_the_endpoint_in_the_environment(context, talk):
    async def agent(client, session):
        env = session.env
        assert env["ANTHROPIC_BASE_URL"] + "/v1" == env["OPENAI_BASE_URL"] == session.base_url
        assert env["ANTHROPIC_API_KEY"] == env["ANTHROPIC_AUTH_TOKEN"] == session.api_key
        client.http.headers["x-api-key"] = client.http.headers.pop("authorization").removeprefix("Bearer ")
        assert (await client.speak("messages", [HI]))["content"] == "4"

    talk(context("4|"), agent)
