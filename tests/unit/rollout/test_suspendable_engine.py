"""The engine that suspends requests between two tokens: they stop at a limit and continue with what they have."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from slime_core.ledger.codec import decode_turns, encode_turns
from slime_core.plugins.boundary import Deadline
from slime_core.protocols import RequestTurn
from slime_core.rollout.suspendable_engine import SuspendableEngine
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import Completion, GenerateRequest, Media, SamplingParams, WeightUpdate

pytestmark = pytest.mark.unit


def _request(name="a", new=12, stop=(), kept=0):
    params = SamplingParams(max_new_tokens=new, stop=stop)
    return GenerateRequest(id=name, tokens=[1, 2, 3], params=params, seed=9, kept=kept)


def _suspendable(work, engine=None):
    async def main():
        served = engine or FakeEngine(vocab_size=16, stop_token=99)
        await served.load(WeightUpdate(version=0, epoch=1, transport="tensors"))
        suspendable = SuspendableEngine(served, CharTokenizer(), lambda: None)
        return await asyncio.wait_for(work(suspendable, served), 10)

    return asyncio.run(main())


async def _until(condition):
    while not condition():
        await asyncio.sleep(0)  # the fakes are one turn a token: no thread computes here


def test_a_sample_stops_at_the_limit_and_continues_with_the_next_round():
    async def work(suspendable, engine):
        whole = await engine.generate(_request())
        suspendable.begin(5)
        suspendable.watch(["a"])
        task = asyncio.create_task(suspendable.generate(_request()))
        await _until(lambda: "a" in suspendable.suspended)
        assert not suspendable.busy
        await engine.load(WeightUpdate(version=1, epoch=1, transport="tensors"))
        suspendable.more(4)
        await _until(lambda: "a" in suspendable.suspended)
        suspendable.more(40)
        done = await task
        assert done.tokens == whole.tokens
        assert done.versions == [0] * 5 + [1] * 7
        assert len(done.log_probs) == len(done.plain_log_probs) == 12
        assert done.finish == "length"
        assert suspendable.forget(["a"]) == 12

    _suspendable(work)


def test_closing_keeps_the_tokens_so_far_wherever_a_sample_is():
    async def work(suspendable, engine):
        suspendable.begin(None)
        suspendable.watch(["a", "b"])
        task = asyncio.create_task(suspendable.generate(_request(new=400)))
        await _until(lambda: engine._running.get("a") is not None and len(engine._running["a"].tokens) == 7)
        await suspendable.close()
        await _until(lambda: "a" in suspendable.suspended)
        late = asyncio.create_task(
            suspendable.generate(_request("b", new=3))
        )  # a next turn, requested while it is closed
        for _ in range(50):
            await asyncio.sleep(0)
        assert not engine._running
        assert suspendable.suspended == {"a", "b"}
        suspendable.begin(None)
        assert len((await task).tokens) == 400
        assert len((await late).tokens) == 3

    _suspendable(work)


def test_an_abort_from_outside_ends_the_request():
    async def work(suspendable, engine):
        suspendable.begin(None)
        suspendable.watch(["a"])
        task = asyncio.create_task(suspendable.generate(_request(new=400)))
        await _until(lambda: engine._running.get("a") is not None)
        await suspendable.abort(["a"])
        assert (await task).finish == "abort"

    _suspendable(work)


def test_requests_of_samples_that_are_not_watched_pass_through():
    async def work(suspendable, engine):
        assert len((await suspendable.generate(_request("door/1"))).tokens) == 12

    _suspendable(work)


def test_a_context_that_is_full_at_the_limit_ends_the_response():
    class Short(FakeEngine):
        async def generate(self, request):
            from slime_core.errors import EngineError

            if len(request.tokens) >= 8:
                raise EngineError("full", code="ENG72")
            room = min(request.params.max_new_tokens, 8 - len(request.tokens))
            params = SamplingParams(max_new_tokens=room)
            return await super().generate(GenerateRequest(id=request.id, tokens=request.tokens, params=params, seed=9))

    async def work(suspendable, engine):
        for limit in (5, 3):
            suspendable.begin(limit)
            suspendable.watch(["a"])
            task = asyncio.create_task(suspendable.generate(_request()))
            await _until(lambda task=task: task.done() or "a" in suspendable.suspended)
            suspendable.more(10)
            done = await task
            assert (len(done.tokens), done.finish) == (5, "length")
            suspendable.forget(["a"])

    _suspendable(work, Short(vocab_size=16, stop_token=99))


def test_a_stop_string_across_two_pieces_is_cut_from_the_text():
    class Stops(FakeEngine):
        async def generate(self, request):
            done = await super().generate(request)
            done.finish = "stop" if len(done.tokens) < 4 else done.finish
            return done

    async def work(suspendable, engine):
        suspendable.begin(4)
        suspendable.watch(["a"])
        whole = (await FakeEngine.generate(engine, _request(new=6))).tokens
        text = CharTokenizer().decode(whole)
        task = asyncio.create_task(suspendable.generate(_request(new=6, stop=(text[3:5],))))
        await _until(lambda: "a" in suspendable.suspended)
        suspendable.more(10)
        done = await task
        assert done.finish == "stop"
        assert done.text == text[: text.find(text[3:5])]

    _suspendable(work, Stops(vocab_size=16, stop_token=99))


def test_the_hooks_deadline_does_not_count_while_it_waits():
    async def work(suspendable, engine):
        suspendable.begin(2)
        suspendable.watch(["a"])
        async with Deadline(30) as deadline:
            task = asyncio.create_task(suspendable.generate(_request()))
            await _until(lambda: "a" in suspendable.suspended)
            assert not deadline.runs
            suspendable.more(20)
            await task
            assert deadline.runs

    _suspendable(work)


@pytest.mark.parametrize("by", ["file", "arrays"])
def test_a_stored_answer_serves_a_request_with_the_same_picture_and_no_other(by):
    """Both pictures take the same tokens; a ledger of before pictures had digests serves by tokens and seed."""

    def asking(picture):
        pixels = {"pixel_values": np.full((4, 3), picture, dtype=np.float32)}
        media = Media(images=(bytes([picture]),), arrays=pixels) if by == "file" else Media(arrays=pixels)
        return replace(_request(new=2), media=media)

    async def work(suspendable, engine):
        stored = Completion(
            id="a", tokens=[7, 7], log_probs=[-1.0] * 2, plain_log_probs=[], finish="length", versions=[0, 0]
        )
        turn = RequestTurn(request=asking(1), pieces=[stored], finish="length")
        (kept,) = decode_turns(b"".join(bytes(part) for part in encode_turns([turn])))
        answers = []
        for restored, picture in ((kept, 1), (kept, 2), (replace(kept, media=None), 2)):
            suspendable.begin(None)
            suspendable.watch(["a"])
            suspendable.restore({"a": [restored]})
            answers.append((await suspendable.generate(asking(picture))).tokens)
            suspendable.forget(["a"])
        assert [tokens == [7, 7] for tokens in answers] == [True, False, True]

    _suspendable(work)
