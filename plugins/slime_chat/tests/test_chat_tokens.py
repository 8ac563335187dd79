"""What the engine is asked and what it answers are the samples' ids, letter by letter."""

import numpy as np
import pytest

pytestmark = pytest.mark.unit

HI = {"role": "user", "content": "hi"}


def user(text):
    return {"role": "user", "content": text}


def shown(sample, letters):
    """Prompt, response and mask of a sample, as texts."""
    text = letters.decode(sample.tokens, skip_special_tokens=False)
    cut = sample.prompt_length
    return text[:cut], text[cut:], "".join(map(str, sample.loss_mask))


def test_a_dialogue_is_one_sample_of_the_engines_own_ids(context, talk, letters):
    ctx = context("one|", "two")

    async def agent(client, session):
        first = await client.say([HI])
        second = await client.say([HI, first, user("go")])
        assert (first["content"], second["content"]) == ("one", "two")

    (sample,) = talk(ctx, agent).samples()
    assert [letters.decode(r.tokens, skip_special_tokens=False) for r in ctx.engine.requests] == [
        "Uhi|A",
        "Uhi|Aone|Ugo|A",
    ]
    assert shown(sample, letters) == ("Uhi|A", "one|Ugo|Atwo", "111100000111")
    assert sample.rollout_log_probs == pytest.approx(
        [-0.001, -0.002, -0.003, -0.004, 0, 0, 0, 0, 0, -1.001, -1.002, -1.003]
    )
    assert sample.weight_versions == [3, 3, 3, 3, -1, -1, -1, -1, -1, 3, 3, 3]
    assert (sample.status, sample.response) == ("truncated", "oneUgoAtwo")


def test_the_experts_of_a_dialogue_are_those_that_were_chosen_first(context, talk, letters):
    """One layer, one expert: the second request routes the first turn's tokens anew."""
    ctx = context("one|", "two")

    async def agent(client, session):
        first = await client.say([HI])
        await client.say([HI, first, user("go")])
        for number, node in enumerate(session._tree.nodes):
            count = len(node.tokens()) - 1
            node.done.routed_experts = np.full((count, 1, 1), number, dtype=np.uint8)

    (sample,) = talk(ctx, agent).samples()
    assert sample.rollout_routed_experts.ravel().tolist() == [0] * len("Uhi|Aone") + [1] * len("|Ugo|Atw")


def asked(ctx, letters):
    return [letters.decode(request.tokens, skip_special_tokens=False) for request in ctx.engine.requests]


def test_the_same_request_twice_is_a_fork_and_its_prompt_trains_once(context, talk, letters):
    ctx = context("one|", "uno|", "two|", "dos|")

    async def agent(client, session):
        first, again = await client.say([HI]), await client.say([HI])
        await client.say([HI, again, user("b")])
        await client.say([HI, first, user("a")])

    made = talk(ctx, agent).samples()
    assert [shown(sample, letters) for sample in made] == [
        ("Uhi|A", "uno|Ub|Atwo|", "1111" + "0000" + "1111"),
        ("Uhi|A", "one|Ua|Ados|", "1111" + "0000" + "1111"),
    ]
    assert [sample.id for sample in made] == ["main/5-0", "main/5-0.1"]
    facts = {name: made[0].metadata["chat"][name] for name in ("calls", "branches", "roots", "forks", "rewritten")}
    assert facts == {"calls": 4, "branches": 2, "roots": 1, "forks": 1, "rewritten": 0}


def test_a_shared_beginning_is_trained_in_one_branch_and_prompt_of_the_other(context, talk, letters):
    ctx = context("one|", "two|", "dos|")

    async def agent(client, session):
        first = await client.say([HI])
        await client.say([HI, first, user("a")])
        await client.say([HI, first, user("b")])

    assert [shown(sample, letters) for sample in talk(ctx, agent).samples()] == [
        ("Uhi|A", "one|Ua|Atwo|", "111100001111"),
        ("Uhi|Aone|Ub|A", "dos|", "1111"),
    ]


def test_a_rewritten_answer_is_prompt_and_the_others_are_reused(context, talk, letters):
    ctx = context("one|", "two|", "three|")

    async def agent(client, session):
        first = await client.say([HI])
        await client.say([HI, first, user("a")])
        await client.say([HI, first, user("a"), {"role": "assistant", "content": "TWO"}, user("b")])

    made = talk(ctx, agent).samples()
    assert asked(ctx, letters)[2] == "Uhi|Aone|Ua|ATWO|Ub|A"
    assert [shown(sample, letters) for sample in made] == [
        ("Uhi|A", "one|Ua|Atwo|", "111100001111"),
        ("Uhi|Aone|Ua|ATWO|Ub|A", "three|", "111111"),
    ]
    assert made[0].metadata["chat"]["rewritten"] == 1


def test_a_compacted_context_is_a_root_of_its_own(context, talk, letters):
    ctx = context("one|", "two|")

    async def agent(client, session):
        await client.say([HI])
        await client.say([user("in short"), {"role": "assistant", "content": "one"}, user("go")])

    made = talk(ctx, agent).samples()
    assert [shown(sample, letters) for sample in made] == [
        ("Uhi|A", "one|", "1111"),
        ("Uin short|Aone|Ugo|A", "two|", "1111"),
    ]
    assert (made[1].metadata["chat"]["roots"], made[1].metadata["chat"]["forks"]) == (2, 0)


def test_an_answer_that_was_cut_is_closed_by_the_prompt_that_follows(context, talk, letters):
    ctx = context("on", "two|")

    async def agent(client, session):
        await client.say([HI, await client.say([HI]), user("go")])

    assert [shown(sample, letters) for sample in talk(ctx, agent).samples()] == [
        ("Uhi|A", "on|Ugo|Atwo|", "11" + "000000" + "1111")
    ]


def test_several_answers_to_one_request_are_siblings(context, talk, letters):
    ctx = context("one|", "uno|", "two|")

    async def agent(client, session):
        answer = (await client.post([HI], n=2)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "uno"]
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
        await client.say([HI, answer["choices"][0]["message"], user("go")])

    assert [shown(sample, letters) for sample in talk(ctx, agent).samples()] == [
        ("Uhi|A", "uno|", "1111"),
        ("Uhi|A", "one|Ugo|Atwo|", "111100000" + "1111"),
    ]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def lossy(message, **changes):
    """What a careless client keeps of a message with a tool call."""
    (call,) = message["tool_calls"]
    return {"role": "assistant", "tool_calls": [{**call, "function": {**call["function"], **changes}}]}


@pytest.mark.parametrize(
    "sent",
    [
        lambda m: m,
        lambda m: lossy(m, arguments='{"b":[2], "a":1}'),
        lambda m: {**lossy(m), "content": ""},
        lambda m: {**lossy(m), "content": None},
        lambda m: {**m, "tool_calls": [{"type": "function", "function": m["tool_calls"][0]["function"]}]},
        lambda m: {**m, "content": [{"type": "text", "text": "  "}]},
    ],
    ids=["as it came", "keys reordered", "empty content", "null content", "no id", "parts"],
)
def test_a_tool_call_is_known_again_whatever_the_client_did_to_it(context, talk, letters, sent):
    ctx = context(CALL + "|", "3|")

    async def agent(client, session):
        first = await client.say([HI], tools=TOOLS)
        assert first["content"] is None
        assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": [2]}'}
        result = {"role": "tool", "tool_call_id": "x", "content": "3"}
        await client.say([HI, sent(first), result], tools=TOOLS)

    (sample,) = talk(ctx, agent).samples()
    prompt, response, mask = shown(sample, letters)
    assert response == f"{CALL}|T3|A3|"
    assert mask == "1" * (len(CALL) + 1) + "0000" + "11"
    assert prompt.startswith('F[{"type": "function"')


@pytest.mark.parametrize(
    "arguments", ['"{\\"a\\": 1}"', '""', "null", "7", '"x"', '"\\"7\\""', '"7"', "[1]", '"null"']
)
def test_odd_arguments_are_known_again_too(context, talk, arguments):
    ctx = context(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>|', "3|")

    async def agent(client, session):
        first = await client.say([HI], tools=TOOLS)
        assert isinstance(first["tool_calls"][0]["function"]["arguments"], str)
        await client.say([HI, first, user("go")], tools=TOOLS)

    (sample,) = talk(ctx, agent).samples()
    assert sample.metadata["chat"]["rewritten"] == 0


@pytest.mark.parametrize(
    "changed",
    [{"arguments": '{"a": 2, "b": [2]}'}, {"name": "sub"}, {"arguments": "not json"}],
    ids=["other value", "other name", "no JSON"],
)
def test_a_tool_call_that_says_something_else_is_a_rewrite(context, talk, changed):
    ctx = context(CALL + "|", "3|")

    async def agent(client, session):
        first = await client.say([HI], tools=TOOLS)
        await client.say([HI, lossy(first, **changed), user("go")], tools=TOOLS)

    first, second = talk(ctx, agent).samples()
    assert first.metadata["chat"]["rewritten"] == 1
    assert sum(second.loss_mask) == 2


def test_other_tools_begin_another_dialogue(context, talk):
    ctx = context("one|")

    async def agent(client, session):
        await client.say([HI], tools=TOOLS)
        await client.say([HI])

    assert talk(ctx, agent).samples()[0].metadata["chat"]["roots"] == 2


@pytest.mark.parametrize("kept", [("content",), ("content", "reasoning_content")], ids=["dropped", "sent back"])
def test_reasoning_stays_in_the_ids_whether_the_client_keeps_it_or_not(context, talk, letters, kept):
    ctx = context("<think>hm</think>\n\n4|", "5|")

    async def agent(client, session):
        first = await client.say([HI])
        assert (first["reasoning_content"], first["content"]) == ("hm", "4")
        await client.say([HI, {"role": "assistant", **{name: first[name] for name in kept}}, user("go")])

    (sample,) = talk(ctx, agent).samples()
    assert shown(sample, letters)[1] == "<think>hm</think>\n\n4|Ugo|A5|"


def test_ids_of_tool_calls_tell_like_answers_apart(context, talk, letters):
    ctx = context("<think>a</think>" + CALL + "|", "<think>b</think>" + CALL + "|", "3|")

    async def agent(client, session):
        first, _ = [await client.say([HI], tools=TOOLS) for _ in range(2)]
        await client.say([HI, {**first, "content": None}, user("go")], tools=TOOLS)

    made = talk(ctx, agent).samples()
    texts = [shown(sample, letters)[1] for sample in made]
    assert texts == [f"<think>b</think>{CALL}|", f"<think>a</think>{CALL}|Ugo|A3|"]


def test_another_temperature_trains_in_a_sample_of_its_own(context, talk, letters):
    ctx = context("one|", "two|", "six|")

    async def agent(client, session):
        said = [HI]
        for temperature in (1.0, 0.5, None):
            said += [await client.say(said, temperature=temperature), user("go")]

    made = talk(ctx, agent).samples()
    assert [(*shown(sample, letters), sample.temperature) for sample in made] == [
        ("Uhi|A", "one|Ugo|Atwo|Ugo|Asix|", "1111" + "00000" + "0000" + "00000" + "1111", 1.0),
        ("Uhi|Aone|Ugo|A", "two|", "1111", 0.5),
    ]
    assert [request.params.temperature for request in ctx.engine.requests] == [1.0, 0.5, 1.0]


def test_an_evaluation_has_the_last_dialogue_alone_unless_it_wants_all(context, talk, letters):
    async def agent(client, session):
        await client.say([HI])
        await client.say([HI], temperature=0)

    (last,) = talk(context("one|", "two|", evaluation=True), agent).samples()
    assert shown(last, letters)[1] == "two|"
    assert len(talk(context("one|", "two|", evaluation=True), agent, branches="all").samples()) == 2


def test_an_agent_that_asks_nothing_leaves_its_sample_without_a_response(context, talk, letters):
    async def agent(client, session):
        pass

    (sample,) = talk(context("one|"), agent).samples()
    assert (letters.decode(sample.tokens, False), sample.response_length, sample.status) == ("Uhi|A", 0, "completed")
    assert sample.metadata["chat"]["calls"] == 0
