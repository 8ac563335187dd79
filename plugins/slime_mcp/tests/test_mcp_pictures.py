"""Pictures that tools return, read by a model that sees them."""

import asyncio
import base64
import io
import json

import pytest
from mcp_tasks import ASK, STDIO
from PIL import Image

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.errors import EngineError
from slime_core.media.processor import MediaProcessor
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import Group, Prompt, Sample, SamplingParams, Status
from slime_core.weights.folder import ModelFolder
from slime_mcp import plugin
from slime_mcp.options import Options

ASCII = "".join(map(chr, range(32, 127))) + "\n"
ANSWER = "assistant: "


def calls(*names):
    """An answer that calls tools."""
    return "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in names) + "\n"


def look(width, height):
    return "look", {"width": width, "height": height}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tiny_vision_model(tmp_path_factory.mktemp("mcp") / "model", vocab=ASCII, weights=False)
    return ModelFolder.open(path, init_weights="random").tokenizer()


@pytest.fixture
def play(tokenizer, tmp_path):
    """The sample of a dialogue whose answers are the given ones; ``full``: the context ends before that answer.

    ``video``: the prompt begins with one.
    """

    def play(*turns, full=-1, video=None):
        def say(request):
            ends = tokenizer.decode(request.tokens).count(ANSWER) - 1
            if ends == full:
                raise EngineError("a placeholder that the model drew", code="ENG08")
            return encode(tokenizer, turns[min(ends, len(turns) - 1)]), "stop"

        ctx = Context(
            config=Config(data={"apply_chat_template": True}, plugins=["mcp"]),
            engine=ScriptedEngine(say, vocab_size=len(tokenizer), version=3),
            tokenizer=tokenizer,
            media=MediaProcessor.of(tokenizer),
            sampling=SamplingParams(max_new_tokens=500),
            run_dir=tmp_path,
            options=Options(servers=(STDIO,), describe="system", tool_parser="hermes"),
        )
        messages, _ = plugin.slime_messages(list(ASK), None, {}, ctx)
        inputs = {"videos": [video]} if video else {}
        if video:
            messages = [{"role": "user", "content": [{"type": "video"}]}, *messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = ctx.media.expand(encode(tokenizer, text), inputs)
        sample = Sample(id="main/0-0", prompt=text, tokens=tokens, multimodal_inputs=inputs or None)
        group = Group(prompt=Prompt(id="main/0", tokens=tokens), samples=[sample], rollouts={0: [0]})
        asyncio.run(plugin.slime_generate(group, ctx))
        return sample, ctx

    yield play
    plugin.slime_run_done(None)


def test_pictures_of_tools_are_read_in_order_and_broken_ones_are_said(play, tokenizer):
    sample, ctx = play(calls(look(28, 56), look(84, 28)), calls(("picture", {}), look(28, 28)), "done\n")
    images = sample.multimodal_inputs["images"]
    grids = sample.multimodal_train_inputs["image_grid_thw"].tolist()
    assert grids == [[1, 4, 2], [1, 2, 6], [1, 2, 2]]
    assert [len(request.media.images) if request.media else 0 for request in ctx.engine.requests] == [0, 2, 3]
    assert all(image.startswith("data:image/png;base64,") for image in images)
    ctx.media.check(sample)
    text = tokenizer.decode(sample.response_tokens)
    mark = "<|vision_start|>{}<|vision_end|>"
    first, second, third = (mark.format("<|image_pad|>" * count) for count in (2, 3, 1))
    assert f"<tool_response>\nseen{first}\n</tool_response>\n<tool_response>\nseen{second}\n</tool_response>" in text
    assert "Error: data:image/png" in text
    assert "cannot be decoded" in text
    assert f"seen{third}" in text
    placeholder = ctx.media.layout.placeholders["images"]
    trained = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
    assert placeholder not in trained
    assert sample.metadata["metrics"]["mcp/errors/failed"] == 1


def test_results_that_nobody_reads_take_their_pictures_with_them(play):
    sample, ctx = play(calls(look(28, 56)), calls(look(84, 28)), full=2)
    assert sample.status is Status.TRUNCATED
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 4, 2]]
    ctx.media.check(sample)
    sample, _ = play(calls(look(28, 56)), full=1)
    assert sample.multimodal_inputs is None
    assert sample.multimodal_train_inputs is None


def test_a_prompts_video_stays_when_pictures_go_and_results_are_decoded_in_threads(play, monkeypatch):
    loops, opened = [], Image.open
    frame = io.BytesIO()
    Image.new("RGB", (28, 28)).save(frame, "PNG")
    video = ["data:image/png;base64," + base64.b64encode(frame.getvalue()).decode()] * 2

    def see(*args, **kwargs):
        loops.append(asyncio._get_running_loop())  # of this thread
        return opened(*args, **kwargs)

    monkeypatch.setattr(Image, "open", see)
    sample, ctx = play(calls(look(28, 56)), full=1, video=video)
    assert [loop for loop in loops if loop] == []
    assert len(loops) > 3
    assert sample.status is Status.TRUNCATED
    assert sample.multimodal_inputs == {"videos": [video]}
    assert sample.multimodal_train_inputs["video_grid_thw"].tolist() == [[1, 2, 2]]
    assert "image_grid_thw" not in sample.multimodal_train_inputs
    ctx.media.check(sample)
