"""Pictures of a request on their way to SGLang: one id for each, and a file whose pixels are those that train."""

import asyncio
import gc
import io
import threading
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest
from client_case import ask, both, error_of, request
from fake_sglang import FakeServer
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from slime_core.errors import EngineError
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import Media
from slime_core.weights.folder import ModelFolder
from slime_sglang.pictures import PictureCodec, PictureFiles

pytestmark = pytest.mark.unit

SIZES = ((45, 61), (97, 30), (28, 28))  # height and width


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def folder(request, tmp_path):
    """Of a small model, without weights."""
    return ModelFolder.open(tiny_vision_model(tmp_path / "model", request.param, weights=False), init_weights="random")


def pictures(seed=0):
    """Noise of odd sizes: every pixel of a resized picture depends on how it was resized."""
    draw = np.random.default_rng(seed)
    return [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]


def expanded(folder, ids, images):
    """Token ids with as many placeholders as transformers counts for each picture, and the processor's arrays."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(str(folder.path))
    arrays = {name: np.asarray(value) for name, value in processor(images=images, return_tensors="np").items()}
    counts = iter((arrays["image_grid_thw"].prod(1) // processor.merge_size**2).tolist())
    pad = folder.config.image_token_id
    return [id for one in ids for id in ([one] * next(counts) if one == pad else [one])], arrays


def dialogue(folder, count=3):
    """Ids of a text with ``count`` placeholders of one id each."""
    config = folder.config
    picture = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
    return [n for k in range(count) for n in (5 + k, *picture)] + [9, 10]


def opened(file):
    """The picture of a data URI."""
    return Image.open(io.BytesIO(b64decode(file.removeprefix("data:image/png;base64,"))))


def asked(folder, tokens, arrays, **more):
    """A request with pictures."""
    return replace(request(tokens=tokens, **more), media=Media(arrays=arrays))


def fields(codec, tokens, arrays):
    """The fields of one request."""
    return asyncio.run(codec.fields(tokens, Media(arrays=arrays), "x"))


def test_files_have_the_pixels_that_train_and_ids_go_out_once_a_picture(folder):
    codec, short = PictureCodec.of(folder), dialogue(folder)
    tokens, arrays = expanded(folder, short, pictures())
    assert len(tokens) > len(short)
    sent = fields(codec, tokens, arrays)
    assert sent["input_ids"] == short
    files = [opened(file) for file in sent["image_data"]]
    again, made = expanded(folder, sent["input_ids"], files)
    assert again == tokens
    assert all(np.array_equal(made[name], arrays[name]) for name in arrays)  # bit for bit
    longer = fields(codec, [*tokens, 20, 21], arrays)  # what was made before goes with them
    assert longer["input_ids"] == [*short, 20, 21]
    for pad in (folder.config.image_token_id, folder.config.video_token_id):
        with pytest.raises(EngineError, match="drew") as caught:
            fields(codec, [*tokens, pad], arrays)
        assert caught.value.ends_dialogue
    with pytest.raises(EngineError, match="videos"):
        fields(codec, tokens, {**arrays, "pixel_values_videos": arrays["pixel_values"]})


def test_a_picture_is_made_in_a_thread_once_for_all_samples_and_turns(folder, monkeypatch):
    """A later turn has arrays of its own, which begin with the same pictures."""
    codec, short, threads = PictureCodec.of(folder), dialogue(folder), []
    tokens, arrays = expanded(folder, short, pictures())
    before, first = expanded(folder, dialogue(folder, 2), pictures()[:2])

    def picture(self, pixels, grid, whole=PictureCodec.picture):
        threads.append(threading.get_ident())
        return whole(self, pixels, grid)

    monkeypatch.setattr(PictureCodec, "picture", picture)

    async def run():
        group = [codec.fields(before, Media(arrays=dict(first)), "x") for _ in range(4)]
        sent = [one["image_data"] for one in await asyncio.gather(*group)]
        assert len(threads) == 2
        later = (await codec.fields(tokens, Media(arrays=arrays), "x"))["image_data"]
        assert len(threads) == 3
        return sent, later

    sent, later = asyncio.run(run())
    assert threading.get_ident() not in threads
    assert all(files == later[:2] for files in sent)
    arrays.clear(), first.clear()
    gc.collect()
    assert not codec._files


def test_files_that_were_not_used_for_long_are_dropped():
    files = PictureFiles(10)
    files.add(b"a", "1234")
    files.add(b"b", "5678")
    assert files.get(b"a") == "1234"
    files.add(b"c", "9012")
    assert [files.get(key) for key in (b"a", b"b", b"c")] == ["1234", None, "9012"]


def test_an_aborted_request_goes_on_with_its_pictures_and_ends_at_a_placeholder(folder):
    codec, short = PictureCodec.of(folder), dialogue(folder, 2)
    tokens, arrays = expanded(folder, short, pictures(1)[:2])
    server = FakeServer()
    server.prompt = lambda body: expanded(folder, body["input_ids"], [opened(f) for f in body["image_data"]])[0]

    async def run():
        async with both(server, pictures=codec) as (client, _, server_):
            done = await ask(client, asked(folder, tokens, arrays, stop_token_ids=(4,)))
            more = replace(asked(folder, [*tokens, *done.tokens[:2]], arrays), kept=2)
            again = await ask(client, more)
            streamed = [piece async for piece in client.stream(more, low=7, high=lambda: 7)]
            server_.prompt = lambda body: body["input_ids"]
            drifted = await error_of(ask(client, more))
            return done, again, streamed[-1], drifted, server_.bodies

    done, again, streamed, drifted, bodies = asyncio.run(run())
    first, second, third = bodies[:3]
    assert (first["input_ids"], second["input_ids"]) == (short, [*short, *done.tokens[:2]])
    assert first["image_data"] == second["image_data"] == third["image_data"]
    stops = first["sampling_params"]["stop_token_ids"]
    assert stops == [4, folder.config.image_token_id, folder.config.video_token_id]
    assert len(done.tokens) == 8
    assert again.tokens == streamed.tokens
    assert drifted.code == "ENG82"  # a server that counts other tokens than the sample has


def test_a_model_whose_pictures_sglang_does_not_take_by_ids_is_refused(tmp_path):
    path = tiny_vision_model(tmp_path / "model", "smolvlm", weights=False)
    assert PictureCodec.of(ModelFolder.open(path, init_weights="random")) is None

    async def run():
        async with both() as (client, _, _):
            return await error_of(ask(client, replace(request(), media=Media(images=(b"x",)))))

    error = asyncio.run(run())
    assert error.code == "ENG03"
    assert "qwen2_5_vl" in str(error)
