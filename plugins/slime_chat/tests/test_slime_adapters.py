"""slime.agent.adapters: sessions by id before a /generate, as slime's agent functions use them."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from slime_chat.adapters import AnthropicAdapter, OpenAIAdapter, flatten_content, run_app_in_thread
from slime_compat.server import GenerateServer
from slime_core.compat.sample import Sample
from slime_core.errors import EngineError

pytestmark = pytest.mark.unit

HI = {"role": "user", "content": "hi"}


@pytest.fixture
def serve(letters, context):
    """Run ``agent(adapter, ask)`` before an engine with a script; ``ask(sid, path, body)`` posts a request."""

    @asynccontextmanager
    async def served(kind, script, **options):
        engine = GenerateServer({})
        ctx = context(*script)
        adapter = kind(tokenizer=letters, sglang_url=f"http://127.0.0.1:{engine.port(ctx)}/", **options)
        handle = run_app_in_thread(adapter.app, host="0.0.0.0", port=1, runner_kwargs={"handler_cancellation": True})
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{handle.port}", trust_env=False) as client:

            async def ask(sid, path, **body):
                headers = {"authorization": f"Bearer {sid}"}
                return await client.post(path, json={"model": "policy", **body}, headers=headers, timeout=30)

            try:
                yield adapter, ask, ctx.engine
            finally:
                await asyncio.to_thread(handle.stop)
                await asyncio.to_thread(engine.close)

    def serve(agent, *script, kind=OpenAIAdapter, **options):
        async def run():
            async with served(kind, script, **options) as parts:
                return await agent(*parts)

        return asyncio.run(run())

    return serve


def test_two_turns_are_a_sample_with_the_engines_ids_and_the_reward(serve, letters):
    async def agent(adapter, ask, engine):
        adapter.open_session("run-7", sampling_defaults={"max_new_tokens": 9, "temperature": 1.0, "top_k": -1})
        first = (await ask("run-7", "/v1/chat/completions", messages=[HI])).json()["choices"][0]["message"]
        messages = [HI, first, {"role": "user", "content": "more"}]
        await ask("run-7", "/v1/chat/completions", messages=messages, max_tokens=4)
        base = Sample(id="main/5-0", label="4", metadata={"row": 1}, index=3)
        samples = await adapter.finish_session("run-7", base_sample=base, reward=0.5, extra_metadata={"solved": True})
        assert await adapter.finish_session("run-7", base_sample=base) == []
        assert (await ask("run-7", "/v1/chat/completions", messages=[HI])).status_code == 410
        return samples, engine.requests

    (sample,), requests = serve(agent, "one|", "two!")
    assert letters.decode(sample.tokens, skip_special_tokens=False) == "Uhi|Aone|Umore|Atwo!"
    assert sample.response == "one|Umore|Atwo!"
    assert sample.loss_mask == [1] * 4 + [0] * 7 + [1] * 4
    trained = [value for value, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if mask]
    assert trained == pytest.approx([-0.001, -0.002, -0.003, -0.004, -1.001, -1.002, -1.003, -1.004])
    assert set(sample.weight_versions) == {3, -1}
    assert (sample.reward, sample.label, sample.index, sample.status) == (0.5, "4", 3, Sample.Status.TRUNCATED)
    assert {name: sample.metadata[name] for name in ("row", "solved", "truncated")} == {
        "row": 1,
        "solved": True,
        "truncated": True,
    }
    assert [request.params.max_new_tokens for request in requests] == [9, 4]


def test_forks_are_samples_of_their_own_and_turns_are_limited(serve, letters):
    async def agent(adapter, ask, engine):
        adapter.open_session("a")
        with pytest.raises(ValueError, match="'a' is open"):
            adapter.open_session("a")
        for text in ("hi", "ho"):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
            answer = await ask("a", "/v1/messages", **body)
            assert answer.json()["content"][0]["text"] == "yes"
        counted = await ask("a", "/v1/messages/count_tokens", messages=[HI])
        assert counted.status_code == 429
        return await adapter.finish_session("a", base_sample=Sample(id="s"), reward=1.0)

    samples = serve(agent, "yes|", kind=AnthropicAdapter, max_turns_per_sid=2)
    texts = [letters.decode(sample.tokens, skip_special_tokens=False) for sample in samples]
    assert texts == ["Uhi|Ayes|", "Uho|Ayes|"]
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    assert [type(sample) for sample in samples] == [Sample, Sample]


def test_a_full_context_and_a_broken_engine_are_errors(serve):
    async def agent(adapter, ask, engine):
        adapter.open_session("short", max_context_tokens=6)
        adapter.open_session("broken")
        cut = await ask("short", "/v1/chat/completions", messages=[HI])  # the prompt has 5 tokens of 6
        full = await ask("short", "/v1/chat/completions", messages=[HI, {"role": "user", "content": "more"}])
        failed = await ask("broken", "/v1/chat/completions", messages=[HI])
        await adapter.drop_session("short")
        await adapter.drop_session("short")
        with pytest.raises(EngineError, match="no GPU"):
            await adapter.finish_session("broken", base_sample=Sample(id="s"))
        return engine.requests[0].params.max_new_tokens, cut, full, failed

    room, cut, full, failed = serve(agent, "x", EngineError("no GPU"))
    assert (room, cut.status_code, full.status_code, failed.status_code) == (1, 200, 400, 500)
    assert full.json()["error"]["code"] == "context_length_exceeded"


def test_a_closed_session_ends_the_requests_under_way(serve):
    async def agent(adapter, ask, engine):
        engine.gates[0] = asyncio.Event()
        adapter.open_session("slow")
        asking = asyncio.create_task(ask("slow", "/v1/chat/completions", messages=[HI]))
        while not engine.requests:
            await asyncio.sleep(0)
        assert await adapter.finish_session("slow", base_sample=Sample(id="s"), wait_timeout=0) == []
        return (await asking).status_code

    assert serve(agent, "late|") == 410


def test_sglangs_names_of_tool_parsers_are_known(letters):
    adapter = OpenAIAdapter(tokenizer=letters, sglang_url="http://127.0.0.1:1", tool_parser="qwen25")
    assert adapter._parser is OpenAIAdapter(tokenizer=letters, sglang_url="x", tool_parser="hermes")._parser
    with pytest.raises(ValueError, match="tool_parser is 'pythonic'"):
        OpenAIAdapter(tokenizer=letters, sglang_url="x", tool_parser="pythonic")


def test_contents_of_either_api_are_flattened_to_lines():
    result = {"type": "tool_result", "content": [{"type": "text", "text": "1"}, "2"]}
    parts = ["a", {"type": "input_text", "text": "b"}, result, {"type": "image"}, {"type": "text", "text": ""}, 3]
    assert flatten_content(parts) == "a\nb\n1\n2\n[image omitted]\n3"
    assert [flatten_content(content) for content in (None, "x", 5)] == ["", "x", "5"]
