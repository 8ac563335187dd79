"""Any way an agent goes about it: every token of the engine trains once, and samples are what it read and made."""

import asyncio
from collections import Counter

import pytest
from agent_session import Client, LetterTokenizer, LineEngine
from hypothesis import HealthCheck, given, settings, strategies as st

from slime_chat import open_session

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
ANSWERS = st.lists(st.text(alphabet="ab ", max_size=3).map(lambda text: text + "|"), min_size=1, max_size=4)


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
    return [*messages, answer, new], 2 if kind == "both" else 1


async def walk(session, steps):
    asked = []
    async with Client(session) as client:
        for number, step in enumerate(steps):
            messages, n = history_of(step, asked)
            given = {"temperature": 0.5} if number % 4 == 3 else {}
            answer = await client.post(messages, n=n, **given)
            assert answer.status_code == 200, answer.text
            asked += [(messages, choice["message"]) for choice in answer.json()["choices"]]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, answers=ANSWERS)
def test_every_token_trains_once_and_samples_are_what_the_engine_read_and_made(issue, context, steps, answers):
    letters, ctx = LetterTokenizer(), context(*answers)
    made = []  # (asked, answered, log-probs, temperature), as the engine saw it

    class Recording(LineEngine):
        async def generate(self, request):
            done = await super().generate(request)
            made.append((tuple(request.tokens), tuple(done.tokens), tuple(done.log_probs), request.params.temperature))
            return done

    ctx = type(ctx)(config=ctx.config, engine=Recording(letters, answers), tokenizer=letters, sampling=ctx.sampling)

    async def run():
        async with open_session(issue().samples[0], ctx) as session:
            await walk(session, steps)
        return session.samples()

    samples = asyncio.run(run())
    trained = Counter()
    for sample in samples:
        wholes = [(*asked, *answered) for asked, answered, _, _ in made]
        assert tuple(sample.tokens) in wholes  # exactly one request and its answer
        place, end = sample.prompt_length, len(sample.tokens)
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == end - place
        while place < end:
            if not sample.loss_mask[place - sample.prompt_length]:
                place += 1
                continue
            value = sample.rollout_log_probs[place - sample.prompt_length]
            (turn,) = [turn for turn in made if turn[2] and turn[2][0] == value]
            asked, answered, log_probs, temperature = turn
            assert tuple(sample.tokens[:place]) == asked
            span = slice(place - sample.prompt_length, place - sample.prompt_length + len(answered))
            assert tuple(sample.tokens[place : place + len(answered)]) == answered
            assert tuple(sample.rollout_log_probs[span]) == log_probs
            assert set(sample.loss_mask[span]) == {1}
            assert sample.temperature == temperature
            trained[turn] += 1
            place += len(answered)
    assert trained == Counter(made)
