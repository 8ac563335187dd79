"""Observations with pictures, read by a model that sees them."""

import asyncio
from dataclasses import replace

import pytest
from openenv_play import group_of, play, serving
from openenv_protocol import Faulty
from PIL import Image

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.errors import EngineError
from slime_core.media.processor import MediaProcessor
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import SamplingParams, Status
from slime_core.weights.folder import ModelFolder
from slime_openenv.options import Options

pytestmark = pytest.mark.integration

MINE = """
import base64, io
from PIL import Image

def show(observation):
    size = 28 * (1 + "abcdefgh".index(observation["hint"][-1]))
    file = io.BytesIO()
    Image.new("RGB", (size, 28), "red").save(file, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [{"type": "image", "image": uri}, {"type": "text", "text": observation["hint"]}]

def words(observation):
    return observation["hint"]

def steal(observation):
    return [{"type": "image", "image": "/etc/hostname"}]
"""


@pytest.fixture
def episode(tmp_path, monkeypatch):
    """The sample of an episode that begins at the letter a; ``room``: answers before the context is full."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    model = tiny_vision_model(tmp_path / "model", weights=False)
    tokenizer = ModelFolder.open(model, init_weights="random").tokenizer()

    def run(name, room=9, group=None):
        def say(request):
            if len(engine.requests) >= room:
                raise EngineError("a placeholder that the model drew", code="ENG08")
            text = tokenizer.decode(request.tokens)
            return [*encode(tokenizer, text.rpartition("say: ")[2][0]), tokenizer.eos_token_id], "stop"

        engine = ScriptedEngine(say, vocab_size=len(tokenizer), version=3)

        async def inside():
            async with serving(Faulty()) as urls:
                ctx = Context(
                    config=Config.model_validate({"data": {"apply_chat_template": True}}),
                    options=Options(url=urls, observation_path=f"mine.py:{name}"),
                    engine=engine,
                    tokenizer=tokenizer,
                    media=MediaProcessor.of(tokenizer),
                    sampling=SamplingParams(max_new_tokens=256),
                )
                ((sample, reward),) = await play(ctx, group or group_of(reset={"seed": 0}))
                return sample, reward, ctx

        return (*asyncio.run(inside()), tokenizer)

    return run


def test_pictures_of_observations_come_in_order_and_are_decoded_in_threads(episode, monkeypatch):
    loops, opened = [], Image.open

    def see(*args, **kwargs):
        loops.append(asyncio._get_running_loop())  # of this thread
        return opened(*args, **kwargs)

    monkeypatch.setattr(Image, "open", see)
    sample, reward, ctx, tokenizer = episode("show")
    assert [loop for loop in loops if loop] == []
    assert len(loops) > 3
    assert (sample.status, reward.value) == (Status.COMPLETED, 3.0)
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 6]]
    assert [len(request.media.images) for request in ctx.engine.requests] == [1, 2, 3]
    ctx.media.check(sample)
    text = tokenizer.decode(sample.tokens)
    mark = "<|vision_start|>{}<|vision_end|>"
    for number, letter in enumerate("abc", 1):
        assert mark.format("<|image_pad|>" * number) in text
        assert f"say: {letter}" in text
    assert "base64" not in str(sample.prompt)


def test_pictures_that_nobody_reads_go_with_their_words_and_no_file_is_read(episode):
    sample, _, ctx, _ = episode("show", room=2)
    assert sample.status is Status.TRUNCATED
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    ctx.media.check(sample)
    sample, reward, _, _ = episode("steal")
    assert reward.kind == "infra_error"
    assert "cannot be used" in reward.reason


@pytest.mark.parametrize("form", ["text", "messages"])
@pytest.mark.parametrize("name", ["show", "words"])
def test_pictures_of_a_row_come_before_those_of_observations(episode, tmp_path, form, name):
    path, mark = str(tmp_path / "row.png"), "<|vision_start|>{}<|vision_end|>"
    Image.new("RGB", (28, 84), "blue").save(path)
    question = mark.format("<|image_pad|>") + "find it"
    if form == "messages":
        question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "find it"}]}]
    group = group_of(prompt=question, reset={"seed": 0})
    group.prompt = replace(group.prompt, multimodal_inputs={"images": [path]})
    sample, reward, ctx, tokenizer = episode(name, group=group)
    assert (sample.status, reward.value) == (Status.COMPLETED, 3.0)
    grids = [[1, 2, 2], [1, 2, 4], [1, 2, 6]] if name == "show" else []
    assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 6, 2], *grids]
    assert sample.multimodal_inputs["images"][0] == path
    ctx.media.check(sample)
    first, _, following = tokenizer.decode(sample.tokens).partition(mark.format("<|image_pad|>" * 3) + "find it")
    assert "<|image_pad|>" not in first
    assert following.count("<|image_pad|>") == (6 if grids else 0)
    assert following.index("say: a") < following.index("say: b")
