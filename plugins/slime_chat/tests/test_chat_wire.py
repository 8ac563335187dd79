"""OpenAI's words: what is served, in which shape, and what is refused."""

import json

import httpx
import pytest

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.types import SamplingParams

pytestmark = pytest.mark.unit

HI = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def events(answer):
    """The JSON values of a stream, whose last line ends it."""
    assert answer.headers["content-type"] == "text/event-stream"
    *lines, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_has_openais_shape(context, talk):
    async def agent(client, session):
        answer = (await client.post([HI], logprobs=True)).json()
        (choice,) = answer["choices"]
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        assert (answer["model"], answer["system_fingerprint"]) == ("policy", "version-3")
        assert choice["message"] == {"role": "assistant", "content": "4", "refusal": None}
        assert (choice["index"], choice["finish_reason"]) == (0, "stop")
        assert choice["logprobs"]["content"] == [
            {"token": "4", "logprob": -0.001, "bytes": [52], "top_logprobs": []},
            {"token": "|", "logprob": -0.002, "bytes": [124], "top_logprobs": []},
        ]
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}

    talk(context("4|"), agent)


def test_a_stream_brings_the_same_in_chunks(context, talk):
    ctx = context(f"<think>hm</think>so{CALL}|", f"so{CALL}|")

    async def agent(client, session):
        chunks = events(await client.post([HI], tools=TOOLS, stream=True, stream_options={"include_usage": True}))
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        *parts, last = chunks
        deltas = [part["choices"][0]["delta"] for part in parts]
        assert deltas[:3] == [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm"},
            {"content": "so"},
        ]
        (call,) = deltas[3]["tool_calls"]
        assert (call["index"], call["function"]) == (0, {"name": "add", "arguments": '{"a": 1}'})
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, None, None, "tool_calls"]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(ctx.engine.script[0]))
        assert all("usage" not in chunk for chunk in events(await client.post([HI], stream=True)))

    talk(ctx, agent)


def test_a_stop_text_ends_the_content_and_stays_in_the_ids(context, talk, letters):
    async def agent(client, session):
        assert (await client.say([HI], stop=["END"]))["content"] == "fo"

    ctx = context("foEND|")
    (sample,) = talk(ctx, agent).samples()
    assert ctx.engine.requests[0].params.stop == ("END",)
    assert letters.decode(sample.response_tokens, False) == "foEND|"


def test_a_limit_may_only_lower_the_runs_own_and_a_cut_answer_says_length(context, talk):
    ctx = context("four")

    async def agent(client, session):
        for given in ({"max_tokens": 7}, {"max_completion_tokens": 5, "max_tokens": 7}, {"max_tokens": 1000}, {}):
            answer = (await client.post([HI], **given)).json()
            assert answer["choices"][0]["finish_reason"] == "length"

    talk(ctx, agent)
    assert [request.params.max_new_tokens for request in ctx.engine.requests] == [7, 5, 64, 64]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"model": "run/a b"}, "model"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"tools": [{"name": "add"}]}, "tools"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": float("nan")}, "n"),
        ({"max_tokens": float("inf")}, "max_tokens"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"stream_options": 5}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"seed": "x"}, "seed"),
        ({"made_up": 1}, "made_up"),
        ({"messages": []}, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": "4"}]}, "messages"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages[0]"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "name": "\ud800"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, HI]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}, HI]}, "messages[0]"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else value,
)
def test_a_parameter_that_is_not_served_and_would_change_the_result_is_refused_by_name(context, talk, given, param):
    ctx = context("4|")

    async def agent(client, session):
        answer = await client.http.post("/chat/completions", content=json.dumps({"messages": [HI], **given}))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert set(error) == {"message", "type", "param", "code"}
        assert param in error["message"]
        assert answer.headers["x-should-retry"] == "false"

    talk(ctx, agent)
    assert not ctx.engine.requests


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"seed": %s}' % (b"9" * 5000), b"[" * 100_000], ids=lambda body: str(body[:9])
)
def test_a_body_that_is_no_json_is_refused_as_such(context, talk, body):
    async def agent(client, session):
        answer = await client.http.post("/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert answer.json()["error"]["message"].startswith("the body is not JSON: ")

    talk(context("4|"), agent)


def test_a_call_whose_arguments_say_half_a_character_may_come_back(context, talk):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}

    async def agent(client, session):
        answer = await client.post([HI, {"role": "assistant", "content": "x", "tool_calls": [call]}, HI])
        assert answer.status_code == 200, answer.text

    talk(context("4|"), agent)


def test_parameters_that_change_nothing_are_accepted(context, talk):
    async def agent(client, session):
        for given in (
            {"user": "me", "store": True, "metadata": {"a": "b"}},
            {"temperature": 1, "top_p": 1.0, "top_k": -1, "n": 1.0, "stop": None, "seed": None, "tools": []},
            {"frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "top_logprobs": 0},
            {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        ):
            assert (await client.say([HI], **given))["content"] == "4"

    assert talk(context("4|"), agent).samples()[0].metadata["chat"]["left_out"] == 0


def test_a_task_may_let_the_runs_values_replace_the_agents_and_it_is_counted(context, talk):
    ctx = context("4|", sampling=SamplingParams(max_new_tokens=8, temperature=0.8))

    async def agent(client, session):
        await client.say([HI], temperature=0, reasoning_effort="low")
        await client.say([HI], top_p=1)

    session = talk(ctx, agent, leave_out=("temperature", "reasoning_effort"))
    assert [request.params.temperature for request in ctx.engine.requests] == [0.8, 0.8]
    assert session.samples()[0].metadata["chat"]["left_out"] == 2
    assert session.samples()[0].temperature == 0.8


def test_an_evaluation_honours_what_training_refuses(context, talk):
    ctx = context("4|", evaluation=True)

    async def agent(client, session):
        await client.say([HI], temperature=0, top_p=0.5, top_k=3)

    talk(ctx, agent)
    params = ctx.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.5, 3)


def test_without_tools_or_with_tool_choice_none_a_call_is_text(context, talk):
    async def agent(client, session):
        assert (await client.say([HI]))["content"] == CALL
        said = await client.say([HI], tools=TOOLS, tool_choice="none")
        assert (said["content"], "tool_calls" in said) == (CALL, False)

    talk(context(CALL + "|"), agent)


def test_developers_are_system_and_parts_are_lines(context, talk, letters):
    ctx = context("4|")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    async def agent(client, session):
        await client.say([{"role": "developer", "content": "be"}, {"role": "user", "content": parts}])

    talk(ctx, agent)
    assert letters.decode(ctx.engine.requests[0].tokens, False) == "Sbe|Ua\nb|A"


def test_calls_that_are_not_well_formed_are_content(context, talk):
    async def agent(client, session):
        message = await client.say([HI], tools=TOOLS)
        assert (message["content"], message.get("tool_calls")) == (CALL + "<tool_call>{add", None)

    talk(context(CALL + "<tool_call>{add|"), agent)


def test_a_parser_is_named_or_given(context, talk):
    async def agent(client, session):
        (call,) = (await client.say([HI], tools=TOOLS))["tool_calls"]
        assert call["function"] == {"name": "shout", "arguments": "X"}

    talk(context("x|"), agent, tool_parser=lambda text: ("", [("shout", text.upper())]))
    with pytest.raises(ValueError, match="tool_parser is 'hermse'; known are hermes, qwen_xml, glm, "):
        talk(context("x|"), agent, tool_parser="hermse")


def test_models_are_listed_and_other_paths_are_not_served(context, talk):
    async def agent(client, session):
        (model,) = (await client.http.get("/models")).json()["data"]
        assert model["id"] == "policy"
        assert (await client.http.get("/models/policy")).json() == model
        assert (await client.http.post("/completions", json={})).status_code == 404
        assert (await client.http.get("/chat/completions")).status_code == 405

    talk(context("x|"), agent)


def test_a_prompt_that_fills_the_context_is_told_in_openais_words(context, talk):
    from slime_core.errors import EngineError

    ctx = context(EngineError("the prompt has 9 tokens and the context 8", code="ENG72"), "4|")

    async def agent(client, session):
        error = (await client.post([HI])).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "the context 8" in error["message"]
        assert (await client.say([HI]))["content"] == "4"

    assert len(talk(ctx, agent).samples()) == 1


@pytest.mark.parametrize("key", ["y", "x", "slime-0-", "slime-9-ab", "slime-0-" + "0" * 64, "slime-²-a"])
def test_a_session_refuses_another_key(context, talk, key):
    async def agent(client, session):
        url = f"{session.base_url}/chat/completions"
        async with httpx.AsyncClient(trust_env=False) as stranger:
            headers = {"authorization": b"Bearer " + key.encode("latin-1")}
            answer = await stranger.post(url, json={"messages": [HI]}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")

    ctx = context("4|")
    talk(ctx, agent)
    assert not ctx.engine.requests


def test_arguments_of_the_template_are_the_configs_and_the_tasks(context, talk, letters, monkeypatch):
    given, render = [], type(letters).apply_chat_template

    def apply(self, messages, **options):
        given.append({name: options[name] for name in ("mood", "depth") if name in options})
        return render(self, messages, **options)

    monkeypatch.setattr(type(letters), "apply_chat_template", apply)
    config = Config.model_validate({"data": {"apply_chat_template_kwargs": {"mood": "calm", "depth": 1}}})

    async def agent(client, session):
        await client.say([HI])

    talk(context("4|", config=config), agent, template_kwargs={"depth": 2})
    assert given
    assert all(options == {"mood": "calm", "depth": 2} for options in given)


def test_a_context_without_an_engine_serves_no_agent(letters, talk):
    with pytest.raises(RuntimeError, match="no engine"):
        talk(Context(config=Config(), tokenizer=letters), None)
