"""Pictures through functions written for THUDM/slime: processor, `/generate`, and what comes back."""

import asyncio
import base64
from pathlib import Path

import matplotlib.cbook
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from slime_compat.http import HttpStatusError, post
from slime_compat.served.processing import (
    PictureProcessor,
    build_processor_kwargs,
    load_processor,
    prepare_model_inputs,
    process_vision_info,
)
from slime_core.compat.session import CompatSession
from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.chat import encode, render
from slime_core.media.processor import MediaProcessor
from slime_core.plugins.assemble import load_plugins
from slime_core.rollout.groups import check_group, issued_ids, pending_group
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.models import tiny_model
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import Prompt, SamplingParams
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

HOPPER = str(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model", "qwen2_5_vl", weights=False)
    return ModelFolder.open(folder, init_weights="random").tokenizer()


@pytest.fixture
def ctx(tokenizer):
    """A context around an engine that answers 42, of one geometry prompt."""
    engine = ScriptedEngine(lambda request: (encode(tokenizer, "42"), "stop"), vocab_size=len(tokenizer))
    media, params = MediaProcessor.of(tokenizer), SamplingParams(max_new_tokens=8)
    return Context(config=Config(), engine=engine, tokenizer=tokenizer, media=media, sampling=params)


def group_of(ctx):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find x."}]}]
    text = render(messages, ctx.tokenizer, template=True, where="")
    inputs = {"images": [HOPPER]}
    tokens = ctx.media.expand(encode(ctx.tokenizer, text), inputs)
    prompt = Prompt(id="main/0", prompt=text, tokens=tokens, multimodal_inputs=inputs, label="42")
    return pending_group(prompt, ctx.config, count=2)


def generated(ctx, path):
    """The group by a function of slime's, and its engine's requests."""
    config = Config(rollout={"custom_generate_function_path": path})
    plugins = load_plugins(config)
    context = Context(
        config=config, engine=ctx.engine, tokenizer=ctx.tokenizer, media=ctx.media, sampling=ctx.sampling
    )
    group = group_of(ctx)
    ids = issued_ids(group)

    async def run():
        await context.prepare_media(group.samples)
        done = await plugins.generate(group, context)
        check_group(done, ids, len(ctx.tokenizer), ctx.media)
        return done

    try:
        return asyncio.run(run())
    finally:
        plugins.close()


def test_slimes_own_generation_sends_the_pictures_of_a_sample(ctx):
    done = generated(ctx, "slime.rollout.sglang_rollout.generate")
    arrays = ctx.media.arrays({"images": [HOPPER]})
    for request, sample in zip(ctx.engine.requests, done.samples, strict=True):
        assert request.tokens == done.prompt.tokens
        np.testing.assert_array_equal(request.media.arrays["pixel_values"], arrays["pixel_values"])
        assert sample.multimodal_inputs == {"images": [HOPPER]}  # the file itself, not a copy of its pixels
        assert sample.response_tokens == encode(ctx.tokenizer, "42")


def test_turns_with_an_environment_that_shows_pictures_run_unmodified(ctx, functions):
    done = generated(ctx, f"{functions}/geometry_shape.py:generate")
    turned = Image.open(HOPPER).convert("RGB").transpose(Image.Transpose.ROTATE_90)
    arrays = ctx.media.arrays({"images": [HOPPER, turned]})
    last = [request for request in ctx.engine.requests if len(request.media.images) == 2]
    assert len(last) == 2
    for request, sample in zip(last, done.samples, strict=True):
        for name, array in arrays.items():
            np.testing.assert_array_equal(request.media.arrays[name], array)
            np.testing.assert_array_equal(sample.multimodal_train_inputs[name], array)
        first, second = sample.multimodal_inputs["images"]
        assert first == HOPPER
        assert second.startswith("data:image/png;base64,")
        np.testing.assert_array_equal(
            ctx.media.arrays({"images": [first, second]})["pixel_values"], arrays["pixel_values"]
        )
        assert sample.tokens[: len(request.tokens)] == request.tokens
        assert sum(sample.loss_mask) == 2 * len(encode(ctx.tokenizer, "42"))


def test_a_text_with_placeholders_is_expanded_by_the_server_and_other_pictures_are_refused(ctx):
    data = base64.b64encode(Path(HOPPER).read_bytes()).decode()
    text = "<|vision_start|><|image_pad|><|vision_end|>Find x."
    session = CompatSession()

    async def run(*payloads):
        args = session.args(ctx.config, ctx)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        return [await post(url, payload, max_retries=0) for payload in payloads]

    try:
        params = {"sampling_params": {"max_new_tokens": 8}}
        one, many = asyncio.run(
            run(
                {"text": text, "image_data": data, **params},
                {"text": [text, "1+1=", text * 2], "image_data": [[data], None, [data] * 2], **params},
            )
        )
    finally:
        session.close()
    expanded = ctx.media.expand(encode(ctx.tokenizer, text), {"images": [HOPPER]})
    assert ctx.engine.requests[0].tokens == expanded
    assert [answer["meta_info"]["prompt_tokens"] for answer in many] == [len(expanded), 4, 2 * len(expanded)]
    assert one["output_ids"] == encode(ctx.tokenizer, "42")
    for images, problem in ((["@@"], "DAT39"), ([data, data], "DAT38"), (["a", "b", 3], "image_data is a list")):
        session = CompatSession()
        try:
            with pytest.raises(HttpStatusError, match=problem):
                asyncio.run(run({"text": text, "image_data": images, **params}))
        finally:
            session.close()


def turn_of(orientation):
    """EXIF that says so."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def test_the_processor_of_a_folder_is_ours_and_a_text_model_has_none(tokenizer, tmp_path):
    processor = load_processor(tokenizer.name_or_path)
    assert isinstance(processor, PictureProcessor)
    assert processor.image_processor.patch_size == 14
    image = Image.open(HOPPER).convert("RGB")
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "x?"}]}]
    ids, extra = prepare_model_inputs(messages, tokenizer, processor)
    arrays = processor.media.arrays({"images": [HOPPER]})
    assert extra["processor_input_ids"] == ids
    assert extra["prompt_text"].count("<|image_pad|>") == 1
    assert isinstance(extra["multimodal_inputs"]["pixel_values"], torch.Tensor)
    np.testing.assert_array_equal(extra["multimodal_inputs"]["pixel_values"].numpy(), arrays["pixel_values"])
    assert processor(text="1", return_tensors="pt")["input_ids"].tolist() == [encode(tokenizer, "1")]
    alone = processor(images=image, text="<|image_pad|>", **build_processor_kwargs())
    np.testing.assert_array_equal(alone["pixel_values"].numpy(), arrays["pixel_values"])
    assert isinstance(alone["input_ids"], list)
    for options in ({"padding": True}, {"images_kwargs": {"max_pixels": 784}}, {"return_mm_token_type_ids": True}):
        name = next(iter(options.get("images_kwargs", options)))
        with pytest.raises(ValueError, match=f"{name} = .* cannot be an option"):
            processor(text="1", **options)
    for texts in (["1", "2"], None):
        with pytest.raises(ValueError, match="one text at a time"):
            processor(images=image, text=texts)
    upright, turned = Image.new("RGB", (60, 40), "red"), Image.new("RGB", (40, 60), "red")
    upright.save(tmp_path / "turned.png", exif=turn_of(6))
    message = [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "turned.png")}]}]
    (read,) = process_vision_info(message, processor)["images"]
    assert (read.size, read.tobytes()) == (turned.size, turned.tobytes())
    assert load_processor(str(tiny_model(tmp_path / "text", weights=False))) is None
    plain, extra = prepare_model_inputs("1+1=", tokenizer, None, apply_chat_template=False)
    assert (plain, extra["multimodal_inputs"]) == (encode(tokenizer, "1+1="), None)
