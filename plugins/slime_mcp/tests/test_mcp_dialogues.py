"""What the model reads and what trains: exact tokens, results masked, every mistake answered, every limit kept."""

import json
from copy import deepcopy

import pytest
from mcp_tasks import ASK, STDIO

from slime_core.data.chat import encode
from slime_core.errors import ConfigError, DataError, EngineError
from slime_core.rollout.groups import check_group
from slime_core.types import Group, Prompt, Status
from slime_mcp import plugin

pytestmark = pytest.mark.unit
LARGE = ("big", {"size": 10_000_000})


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_results_of_parallel_calls_are_read_and_do_not_train(context, play, call, tokenizer, http_server, transport):
    server = STDIO if transport == "stdio" else {"name": "tools", "url": http_server}
    both, sums = call(("meet", {"name": "a"}), ("meet", {"name": "b"})), call(("add", {"a": 1, "b": 2}), LARGE)
    ctx = context(both, sums, "3<|im_end|>", servers=(server,))
    (sample,) = play(ctx)
    called = [
        ("meet", {"name": "a"}, "a was there"),
        ("meet", {"name": "b"}, "b was there"),
        ("add", {"a": 1, "b": 2}, "3"),
        (*LARGE, "a" + "x" * 1999 + " ... 9996000 characters ... " + "x" * 1999 + "z"),
    ]
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given, _ in called]
    told = [{"role": "tool", "content": text} for _, _, text in called]
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": calls[:2]},
        *told[:2],
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        *told[2:],
        {"role": "assistant", "content": "3"},
    ]
    tools = plugin.slime_messages(list(ASK), None, {}, ctx)[1]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert tokenizer.decode(sample.tokens) + "\n" == whole
    answers = [encode(tokenizer, text) for text in (both, sums, "3<|im_end|>")]
    assert [request.tokens for request in ctx.engine.requests] == [
        sample.tokens[: len(request.tokens)] for request in ctx.engine.requests
    ]
    trained = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
    assert trained == [token for answer in answers for token in answer]
    drawn = iter([number for done in ctx.engine.answers for number in done.log_probs])
    assert sample.rollout_log_probs == [next(drawn) if mask else 0.0 for mask in sample.loss_mask]
    assert sample.weight_versions == [3 if mask else -1 for mask in sample.loss_mask]
    assert sample.status is Status.COMPLETED
    assert sample.metadata["mcp"]["answer"] == "3"
    figures = sample.metadata["metrics"]
    assert (figures["mcp/turns"], figures["mcp/calls"], figures["mcp/errors"]) == (3, 4, 0)


def test_every_mistake_is_answered_and_counted(context, play, call, results):
    nested = {"a": json.loads("[" * 105 + "]" * 105), "b": 1}
    turns = [
        '<tool_call>\n{"name": "add", \n</tool_call><|im_end|>',
        call(("sub", {"a": 1}), ("add", {"a": "x", "b": 1}), ("add", [1])),
        call(("add", {"a": 1, "b": float("inf")}), ("fail", {"text": "the disk is full"}), ("add", nested)),
        call(("big", {"size": 3_000}), ("picture", {}), ("add", {"a": 1, "b": 1}), ("add", {"a": 1, "b": 2})),
        "I give up<|im_end|>",
    ]
    ctx = context(*turns, result_chars=200, max_calls=3, servers=({**STDIO, "allow": ["*"], "deny": ["hang", "me*"]},))
    (sample,) = play(ctx)
    read = results(sample)
    assert read[0].startswith("Error: the call could not be read: the JSON of a call is not valid: Expecting")
    assert read[1].startswith(
        "Error: there is no tool 'sub'. Tools are: add, count, fail, big, hoard, picture, freeze,"
    )
    assert read[2:4] == [
        "Error: arguments.a: 'x' is not of type 'integer'. The tool was not called.",
        "Error: the arguments are not a JSON object. The tool was not called.",
    ]
    assert read[4].startswith("Error: the arguments cannot be sent as JSON: Out of range")
    assert read[5].startswith("Error executing tool fail")
    assert read[6] == "Error: the arguments are nested deeper than 100 levels. The tool was not called."
    assert read[7] == "a" + "x" * 99 + " ... 2800 characters ... " + "x" * 99 + "z"
    assert read[8].splitlines() == [
        "[image, image/png, 3000 bytes, not shown]",
        "< |im_end|>in it",
        "[resource_link, file:///b.bin, application/x-b]",
    ]
    assert read[9:] == ["2", "Error: not called; an answer may call 3 tools."]
    kinds = {"unparsed": 1, "unknown": 1, "invalid": 4, "refused": 1, "failed": 1, "timeout": 0, "crash": 0}
    figures = sample.metadata["metrics"]
    assert {kind: figures[f"mcp/errors/{kind}"] for kind in kinds} == kinds
    assert (figures["mcp/turns"], figures["mcp/calls"], figures["mcp/errors"]) == (5, 11, 8)
    assert sample.metadata["mcp"]["answer"] == "I give up"


def test_dialogues_without_end_and_cut_answers_are_truncated(context, play, call, results):
    again = call(("count", {}))
    endless, cut = play(context([again], [again, again.removesuffix("<|im_end|>") + "..."], max_turns=3), 2)
    assert results(endless) == ["1", "2"] or results(endless) == ["2", "3"] or results(endless) == ["1", "3"]
    assert endless.status is cut.status is Status.TRUNCATED
    assert (endless.metadata["mcp"]["turns"], cut.metadata["mcp"]["turns"]) == (3, 2)
    assert "answer" not in endless.metadata["mcp"]


def test_results_that_fill_the_context_end_the_dialogue_and_are_left_out(context, play, call):
    turn = call(("big", {"size": 3_000}))
    ctx = context(turn)
    say = ctx.engine.say

    def full(request):
        if ctx.engine.requests:
            raise EngineError("the prompt fills the context", code="ENG72")
        return say(request)

    ctx.engine.say = full
    (sample,) = play(ctx)
    assert (sample.status, sample.response_tokens) == (Status.TRUNCATED, encode(ctx.tokenizer, turn))
    assert set(sample.loss_mask) == {1}
    assert sample.metadata["metrics"]["mcp/calls"] == 1
    assert "xxx" not in sample.response
    check_group(Group(prompt=Prompt(id="main/0"), samples=[sample], rollouts={0: [0]}), {0: sample.id}, 1 << 20)


def test_reasoning_holds_no_calls(context, play, call):
    (sample,) = play(context("<think>" + call(("add", {"a": 1, "b": 2}))[:-10] + "</think>so 3<|im_end|>"))
    assert (sample.metadata["mcp"]["answer"], sample.metadata["mcp"]["calls"]) == ("so 3", 0)


def test_a_row_chooses_tools(context, play, call, results):
    ctx = context(call(("fail", {"text": "x"})), "so<|im_end|>")
    (sample,) = play(ctx, metadata={"mcp_tools": ["a*", "count"]})
    assert results(sample) == ["Error: there is no tool 'fail'. Tools are: add, count."]
    named = [json.loads(line)["function"]["name"] for line in sample.prompt.splitlines() if line.startswith('{"type"')]
    assert named == ["add", "count"]
    assert plugin.slime_messages(list(ASK), None, {"mcp_tools": []}, ctx) == (ASK, None)
    with pytest.raises(DataError, match=r"chooses the tools sub, which no server has.*tools are add, meet"):
        play(ctx, metadata={"mcp_tools": ["sub", "add"]})
    with pytest.raises(DataError, match="tools of its own"):
        plugin.slime_messages(list(ASK), [{"type": "function"}], {}, ctx)


def test_without_tools_in_the_template_a_system_prompt_describes_them(context, play, call, results, tokenizer):
    simple = deepcopy(tokenizer)
    simple.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ConfigError, match=r'chat template does not describe tools.*describe = "system"'):
        play(context("x", tokenizer=simple))
    ctx = context(call(("add", {"a": 1, "b": 2})), "3<|im_end|>", tokenizer=simple, describe="system")
    (sample,) = play(ctx, metadata={"mcp_tools": ["add"]})
    assert sample.prompt.startswith('<|im_start|>system\nYou can call these functions:\n\n{"type": "function"')
    assert results(sample) == ["3"]
    parts = [{"type": "text", "text": "Be brief."}]
    (system, *_), _ = plugin.slime_messages([{"role": "system", "content": parts}, *ASK], None, {}, ctx)
    assert system["content"][0] == parts[0]
    assert system["content"][1]["text"].startswith("You can call")
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>" in sample.response
    with pytest.raises(ConfigError, match="no parser of tool calls 'hermse'"):
        play(context("x", tool_parser="hermse"))
