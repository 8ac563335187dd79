"""Pictures in the messages of agents: over each API they reach the engine and the sample, once and in order."""

import asyncio
import base64
import io

import numpy as np
import pytest
from agent_session import Client, LineEngine
from PIL import Image

from slime_chat import open_session
from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.media.processor import MediaProcessor
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
        told = [{"type": "tool_result", "tool_use_id": "c1", "content": result}]
        rest = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": told}]
        return {"max_tokens": 9, "messages": [opening]}, {"max_tokens": 9, "messages": [opening, *rest]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
    rest = [said, {"type": "function_call_output", "call_id": "c1", "output": result}]
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


def context(folder, media=True):
    tokenizer = folder.tokenizer()
    engine = PictureEngine(tokenizer, ["ok\n"])
    media = MediaProcessor.of(tokenizer) if media else None
    sampling = SamplingParams(max_new_tokens=64)
    return Context(config=Config(), engine=engine, tokenizer=tokenizer, media=media, sampling=sampling)


def talk(ctx, agent):
    sample = Sample(id="main/5-0", prompt="hi", tokens=ctx.tokenizer.ids("user: hi"), index=0, rollout_id=0)

    async def run():
        async with open_session(sample, ctx) as session, Client(session) as client:
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
    said = {
        "messages": [{"role": "assistant", "content": [FORMS["responses"](FIRST)]}, {"role": "user", "content": ""}]
    }
    answers = []

    async def agent(client):
        for body in (*bodies, broken, said):
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
