"""Any way an agent goes about it: every token of the engine trains once, and samples are what it read and made."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from agent_session import Client, LetterTokenizer, LineEngine
from hypothesis import HealthCheck, given, settings, strategies as st

from slime_chat import open_session
from slime_core.types import SamplingParams

pytestmark = pytest.mark.unit

WORDS = st.text(alphabet="ab ", min_size=1, max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("on"), st.integers(0, 9), WORDS),  # go on from some answer
        st.tuples(st.just("again"), st.integers(0, 9), st.just("")),  # ask the same as some request did
        st.tuples(st.just("edit"), st.integers(0, 9), WORDS),  # change a message of a history
        st.tuples(st.just("anew"), st.just(0), WORDS),
        st.tuples(st.just("both"), st.integers(0, 9), WORDS),  # two answers to one request
    ),
    min_size=1,
    max_size=9,
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    "messages": [{"name": "add", "input_schema": {}}],
    "responses": [{"type": "function", "name": "add", "parameters": {}}],
}
TEXTS = st.one_of(st.text(alphabet="ab ", max_size=3), st.sampled_from([CALL, f"a{CALL}", CALL + CALL]))
ANSWERS = st.lists(TEXTS.map(lambda text: text + "|"), min_size=1, max_size=4)
APIS = st.lists(st.sampled_from(sorted(TOOLS)), min_size=9, max_size=9)
ROLES = st.lists(st.sampled_from(["policy", "policy", "reviewer"]), min_size=9, max_size=9)


def history_of(step, asked):
    """The messages of a step, and whether ``n`` is 2; ``asked`` are (messages, answer) of earlier requests."""
    kind, number, text = step
    new = {"role": "user", "content": text}
    if kind == "anew" or not asked:
        return [new], 1
    messages, answer = asked[number % len(asked)]
    if kind == "again":
        return messages, 1
    if kind == "edit":
        place = number % len(messages)
        return [*messages[:place], {**messages[place], "content": text}, *messages[place + 1 :]], 1
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in answer.get("tool_calls", ())]
    return [*messages, answer, *(results or [new])], 2 if kind == "both" else 1


async def walk(session, steps, apis, roles, playing):
    """Take the steps, each over its API and in its role, which ``playing`` holds meanwhile."""
    asked = []
    async with Client(session) as client:
        for number, (step, api, role) in enumerate(zip(steps, apis, roles, strict=False)):
            messages, n = history_of(step, asked)
            api = "chat" if n > 1 else api
            given = {"temperature": 0.5} if number % 4 == 3 else {}
            given |= {"tools": TOOLS[api]} | ({} if role == "policy" else {"model": f"run/{role}"})
            playing[:] = [role]
            if n > 1:
                answer = (await client.post(messages, n=n, **given)).json()
                asked += [(messages, choice["message"]) for choice in answer["choices"]]
            else:
                asked.append((messages, await client.speak(api, messages, **given)))


def played(issue, context, steps, answers, apis, roles):
    """What the engine read and made, (asked, answered, log-probs, temperature, role) each, and the samples."""
    letters, ctx = LetterTokenizer(), context(*answers, sampling=SamplingParams(max_new_tokens=200))
    made, playing = [], []

    class Recording(LineEngine):
        async def generate(self, request):
            done = await super().generate(request)
            asked, answered = tuple(request.tokens), tuple(done.tokens)
            made.append((asked, answered, tuple(done.log_probs), request.params.temperature, *playing))
            return done

    async def run():
        engine = Recording(letters, answers)
        async with open_session(issue().samples[0], replace(ctx, engine=engine)) as session:
            await walk(session, steps, apis, roles, playing)
        return session.samples()

    samples = asyncio.run(run())
    return made, samples


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, answers=ANSWERS, apis=APIS, roles=ROLES)
def test_every_token_trains_once_and_samples_are_what_the_engine_read_and_made(
    issue, context, steps, answers, apis, roles
):
    made, samples = played(issue, context, steps, answers, apis, roles)
    plain, same = played(issue, context, steps, answers, ["chat"] * len(apis), roles)
    assert [turn[:2] for turn in made] == [turn[:2] for turn in plain]
    assert [sample.to_dict() for sample in samples] == [sample.to_dict() for sample in same], "an API has another tree"
    trained = Counter()
    for sample in samples:
        wholes = [(*asked, *answered) for asked, answered, *_ in made]
        assert tuple(sample.tokens) in wholes  # exactly one request and its answer
        place, end = sample.prompt_length, len(sample.tokens)
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == end - place
        while place < end:
            if not sample.loss_mask[place - sample.prompt_length]:
                place += 1
                continue
            value = sample.rollout_log_probs[place - sample.prompt_length]
            (turn,) = [turn for turn in made if turn[2] and turn[2][0] == value]
            asked, answered, log_probs, temperature, role = turn
            assert tuple(sample.tokens[:place]) == asked
            span = slice(place - sample.prompt_length, place - sample.prompt_length + len(answered))
            assert tuple(sample.tokens[place : place + len(answered)]) == answered
            assert tuple(sample.rollout_log_probs[span]) == log_probs
            assert set(sample.loss_mask[span]) == {1}
            assert (sample.temperature, sample.role) == (temperature, role)
            trained[turn] += 1
            place += len(answered)
    assert trained == Counter(made)
