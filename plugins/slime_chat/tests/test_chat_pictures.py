"""Pictures in the messages of agents: over each API they reach the engine and the sample, once and in order."""

import asyncio
import base64
import io

import numpy as np
import pytest
from agent_session import Client, LineEngine
from aiohttp import web
from PIL import Image

from slime_chat import open_session
from slime_compat.handlers import HttpError
from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.media.processor import MediaProcessor
from slime_core.media.references import MediaLimits
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import Sample, SamplingParams
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

FORMS = {  # of a picture in each API's user message, and of one in a tool's result
    "chat/completions": lambda uri: {"type": "image_url", "image_url": {"url": uri}},
    "responses": lambda uri: {"type": "input_image", "image_url": uri},
    "messages": lambda uri: {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": uri.partition(",")[2]},
    },
}


def picture(width, height):
    """A data URI of noise."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


FIRST, SECOND, OTHER = picture(61, 30), picture(28, 28), picture(30, 90)


def dialogue(api, first, second):
    """Bodies of two requests: a picture with words around it, then a tool's picture."""
    form, text = FORMS[api], "input_text" if api == "responses" else "text"
    ask = [{"type": text, "text": "see"}, form(first), {"type": text, "text": "what?"}]
    result = [form(second), {"type": text, "text": "a look"}]
    opening = {"role": "user", "content": ask}
    if api == "chat/completions":
        rest = [{"role": "assistant", "content": "ok"}, {"role": "tool", "tool_call_id": "c1", "content": result}]
        return {"messages": [opening]}, {"messages": [opening, *rest]}
    if api == "messages":
        results = [{"type": "tool_result", "tool_use_id": "c1", "content": result}]
        rest = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": results}]
        return {"max_tokens": 9, "messages": [opening]}, {"max_tokens": 9, "messages": [opening, *rest]}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
    rest = [answer, {"type": "function_call_output", "call_id": "c1", "output": result}]
    return {"input": [opening]}, {"input": [opening, *rest]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ModelFolder.open(
        tiny_vision_model(tmp_path_factory.mktemp("chat") / "model", weights=False), init_weights="random"
    )


class PictureEngine(LineEngine):
    """Lines in a tokenizer of Hugging Face."""

    def __init__(self, tokenizer, script):
        super().__init__(tokenizer, script)
        tokenizer.ids = lambda text: tokenizer.encode(text, add_special_tokens=False)


def context(folder, media=True, addresses=()):
    tokenizer = folder.tokenizer()
    engine = PictureEngine(tokenizer, ["ok\n"])
    media = MediaProcessor.of(tokenizer, MediaLimits(addresses=addresses)) if media else None
    sampling = SamplingParams(max_new_tokens=64)
    return Context(config=Config(), engine=engine, tokenizer=tokenizer, media=media, sampling=sampling)


def issued(ctx):
    return Sample(id="main/5-0", prompt="hi", tokens=ctx.tokenizer.ids("user: hi"), index=0, rollout_id=0)


def talk(ctx, agent):
    async def run():
        async with open_session(issued(ctx), ctx) as session, Client(session) as client:
            await agent(client)
        return session.samples()

    return asyncio.run(run())


@pytest.mark.parametrize("api", FORMS)
def test_pictures_of_messages_and_tools_come_to_engine_and_sample(folder, api):
    ctx = context(folder)
    opening, following = dialogue(api, FIRST, SECOND)
    _, other = dialogue(api, FIRST, OTHER)

    async def agent(client):
        for body in (opening, following, other):  # the last goes on from the first answer with another picture
            answer = await client.http.post(f"/{api}", json={"model": "policy", **body})
            assert answer.status_code == 200, answer.text

    samples = talk(ctx, agent)
    first, second, third = ctx.engine.requests
    assert [len(sample.multimodal_inputs["images"]) for sample in samples] == [2, 2]
    assert samples[0].multimodal_inputs == {"images": [FIRST, SECOND]}
    assert samples[1].multimodal_inputs == {"images": [FIRST, OTHER]}
    expected = ctx.media.arrays({"images": [FIRST, SECOND]})
    assert all(np.array_equal(samples[0].multimodal_train_inputs[name], value) for name, value in expected.items())
    assert all(np.array_equal(second.media.arrays[name], value) for name, value in expected.items())
    assert len(first.media.images) == 1
    assert second.tokens[: len(first.tokens)] == third.tokens[: len(first.tokens)] == first.tokens
    for sample in samples:
        ctx.media.check(sample)  # as many placeholders as features
    text = ctx.tokenizer.decode(second.tokens)
    mark = "<|vision_start|>" + "<|image_pad|>" * 2 + "<|vision_end|>"
    assert f"user: see{mark}what?" in text
    assert "tool: <|vision_start|><|image_pad|><|vision_end|>a look" in text
    assert samples[1].loss_mask.count(1) + samples[0].loss_mask.count(1) == 3 * len(ctx.tokenizer.ids("ok\n"))


def test_an_agent_names_no_file_of_this_machine_and_no_picture_to_a_model_of_text(folder, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (28, 28)).save(secret)
    bodies = [dialogue("chat/completions", uri, SECOND)[0] for uri in (str(secret), "http://127.0.0.1:9/a.png")]
    broken = dialogue("chat/completions", "data:image/png;base64,AAAA", SECOND)[0]
    answer = {
        "messages": [{"role": "assistant", "content": [FORMS["responses"](FIRST)]}, {"role": "user", "content": ""}]
    }
    answers = []

    async def agent(client):
        for body in (*bodies, broken, answer):
            answers.append(await client.http.post("/chat/completions", json={"model": "policy", **body}))

    ctx = context(folder)
    talk(ctx, agent)
    assert [answer.status_code for answer in answers] == [400] * 4
    assert [answer.json()["error"]["code"] for answer in answers] == ["DAT33", "DAT33", "DAT39", None]
    assert not ctx.engine.requests

    async def see(client):
        answer = await client.http.post(
            "/messages", json={"model": "policy", **dialogue("messages", FIRST, SECOND)[0]}
        )
        assert answer.status_code == 400
        assert "takes no pictures" in answer.text

    talk(context(folder, media=False), see)


def test_an_answer_keeps_the_pictures_of_its_own_prompt_alone(folder):
    ctx, pictures = context(folder), [picture(28 * width, 28) for width in range(1, 6)]

    async def run():
        async with open_session(issued(ctx), ctx) as session:
            messages = []
            for uri in (*pictures, None):
                content = [FORMS["chat/completions"](uri)] if uri else "and?"
                messages.append({"role": "user", "content": content})
                messages.append((await session.complete({"messages": messages}))["choices"][0]["message"])
            await session.complete({"messages": [*messages[:-2], {"role": "user", "content": "or?"}]})
        return session

    session = asyncio.run(run())
    nodes = session._tree.nodes
    assert [(node.pictures.multimodal_inputs or {}).get("images") for node in nodes] == [
        *([p] for p in pictures),
        None,
        None,
    ]
    rows = [len((node.pictures.multimodal_train_inputs or {}).get("pixel_values", ())) for node in nodes]
    assert rows == [4, 8, 12, 16, 20, 0, 0]
    first, second = session.samples()
    assert first.multimodal_inputs == second.multimodal_inputs == {"images": pictures}
    expected = ctx.media.arrays({"images": pictures})
    for name, value in expected.items():
        assert np.array_equal(first.multimodal_train_inputs[name], value)
        assert first.multimodal_train_inputs[name] is second.multimodal_train_inputs[name]  # stored once
    assert [len(request.media.images) for request in ctx.engine.requests] == [1, 2, 3, 4, 5, 5, 5]
    assert all(np.array_equal(ctx.engine.requests[-1].media.arrays[name], value) for name, value in expected.items())


@pytest.mark.parametrize("ends", [False, True])
def test_a_picture_is_fetched_beside_the_loop_and_not_for_a_session_that_ends_meanwhile(folder, ends):
    """The address is served by this very loop: whoever waits for it there waits for himself."""
    data = base64.b64decode(FIRST.partition(",")[2])

    async def run():
        asked, gate = asyncio.Event(), asyncio.Event()

        async def give(request):
            asked.set()
            await gate.wait()
            return web.Response(body=data)

        app = web.Application()
        app.router.add_get("/a.png", give)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        ctx = context(folder, addresses=(address,))
        async with open_session(issued(ctx), ctx) as session:
            opening, _ = dialogue("chat/completions", f"{address}a.png", SECOND)
            answer = asyncio.ensure_future(session.complete(opening))
            await asyncio.wait({answer, waiting := asyncio.ensure_future(asked.wait())}, return_when="FIRST_COMPLETED")
            waiting.cancel()
            if ends:
                await session.close()
            gate.set()
            if ends:
                with pytest.raises(HttpError, match="this session is over"):
                    await answer
            else:
                await answer
        await runner.cleanup()
        return ctx, session.samples()

    ctx, (sample,) = asyncio.run(run())
    assert len(ctx.engine.requests) == (not ends)
    assert bool(sample.response_length) == (not ends)
    if not ends:
        assert np.array_equal(sample.multimodal_train_inputs["image_grid_thw"], [[1, 2, 4]])
