"""No picture is lost, changed or trained unseen on its way: parts, pixels, addresses, counts, folders without processor."""

import asyncio
import http.server
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.data.turns import Speech
from slime_core.errors import DataError
from slime_core.media import processor
from slime_core.media.processor import MediaProcessor
from slime_core.media.references import MediaLimits, is_allowed, picture, read, reference
from slime_core.rollout.groups import check_group, issued_ids, pending_group
from slime_core.testing.models import char_tokenizer
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import Prompt
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

KEYS = {"input_key": "problem", "label_key": "answer", "apply_chat_template": True}
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if 'image' in p or 'image_url' in p %}<pad>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""A chat template that sees a picture wherever a part has its key, as Qwen's does."""

PICTURES = {"multimodal_keys": {"image": "images"}}


def folder_of(root, family="qwen2_5_vl"):
    return ModelFolder.open(tiny_vision_model(root / family, family, weights=False), init_weights="random")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """By family, the tokenizer of a tiny folder."""
    root = tmp_path_factory.mktemp("families")
    return {family: folder_of(root, family).tokenizer() for family in ("qwen2_5_vl", "smolvlm")}


@pytest.fixture
def files(tmp_path):
    """Two pictures of different sizes beside the rows."""
    for number, size in enumerate(((60, 31), (64, 120))):
        pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return [str(tmp_path / f"{number}.png") for number in range(2)]


def test_a_part_of_text_is_a_text_whatever_other_columns_it_has(tokenizers, files, write, source):
    """Parquet files write the keys of all parts into each."""
    content = [
        {"type": "image", "text": None, "image": "0.png"},
        {"type": "text", "text": "1+1=", "image": None, "video": None},
        {"type": "text", "text": "?", "image": ""},
        {"text": "!", "image_url": None},
    ]
    path = write({"problem": [{"role": "user", "content": content}], "answer": "2"})
    tokenizer = tokenizers["qwen2_5_vl"]
    (prompt,) = source(path, tok=tokenizer, **KEYS).next(1)
    assert prompt.prompt == "user: <|vision_start|><|image_pad|><|vision_end|>1+1=?!\nassistant: "
    assert prompt.multimodal_inputs == {"images": files[:1]}
    talk = [{"role": "user", "content": content[1:]}]
    (words,) = source(write({"problem": talk, "answer": "2"}), tok=char_tokenizer(chat_template=PARTS), **KEYS).next(1)
    assert words.prompt == "1+1=?!"


def test_transparent_pixels_are_white_and_sixteen_bits_of_grey_become_eight(tokenizers, tmp_path):
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    clear.putpixel((1, 0), (0, 0, 0, 127))
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    palette.putpixel((0, 0), 0)
    palette.info["transparency"] = 0
    for image, wanted in (
        (Image.fromarray(ramp), np.repeat(np.round(ramp / 257)[:, :, None], 3, axis=2)),
        (Image.fromarray(ramp.astype(np.int32)), np.repeat(np.round(ramp / 257)[:, :, None], 3, axis=2)),
        (palette, [[[255, 255, 255], [9, 8, 7]], [[9, 8, 7], [9, 8, 7]]]),
        (clear, [[[10, 20, 30], [128] * 3, [255] * 3, [255] * 3], *[[[255] * 3] * 4] * 3]),
    ):
        file = tmp_path / ("a.tiff" if image.mode == "I" else "a.png")
        image.save(file)
        kept = reference(image)  # as a function gives it, and as the ledger keeps it
        for data in (file.read_bytes(), read(kept)):
            np.testing.assert_array_equal(np.asarray(picture(data, "a")), wanted)
        media = MediaProcessor.of(tokenizers["qwen2_5_vl"])
        made, stored = (media.arrays({"images": [one]})["pixel_values"] for one in (image, kept))
        np.testing.assert_array_equal(made, stored)


ALLOWED = ("https://images.example.org", "http://10.0.0.1:8080/sets/a/")


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("https://images.example.org/a.png", True),
        ("https://IMAGES.example.org:443/b/c.png?size=3", True),
        ("http://10.0.0.1:8080/sets/a/1.png", True),
        ("http://10.0.0.1:8080/sets/b/%2e%2e/a/1.png", True),
        ("http://images.example.org/a.png", False),
        ("https://images.example.org.evil.example/a.png", False),
        ("https://images.example.org:444/a.png", False),
        ("https://images.example.org@evil.example/a.png", False),
        ("https://user@images.example.org/a.png", False),
        ("https://images.example.org:x/a.png", False),
        ("http://10.0.0.1:8080/sets/ab/1.png", False),
        ("http://10.0.0.1:8080/sets/a/../b/1.png", False),
        ("http://10.0.0.1:8080/sets/a/%2e%2e/b/1.png", False),
        ("http://10.0.0.1:8080/sets/a/..%5cb/1.png", False),
        ("ftp://10.0.0.1:8080/sets/a/1.png", False),
    ],
)
def test_an_address_is_allowed_by_scheme_host_port_and_path(address, allowed):
    assert is_allowed(address, ALLOWED) is allowed


@pytest.fixture
def served(files):
    """A server of the first picture at any path, ``/away`` of which leads out: its address and the paths seen."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            away = self.path == "/images/away"
            self.send_response(302 if away else 200)
            if away:
                self.send_header("Location", "/images/../secret")
            self.end_headers()
            self.wfile.write(Path(files[0]).read_bytes())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/images", seen
    server.shutdown()
    server.server_close()


def test_fetched_pictures_become_data_and_few_are_kept(tokenizers, served, monkeypatch, files):
    base, seen = served
    tokenizer = tokenizers["qwen2_5_vl"]
    media = MediaProcessor.of(tokenizer, MediaLimits(addresses=(base,)))
    ctx = Context(config=Config(), tokenizer=tokenizer, media=media)
    group = pending_group(Prompt(id="main/0", tokens=[5]), Config(), count=2)
    words = [{"role": "tool", "content": [{"type": "image", "image": f"{base}/tool.png"}]}]

    async def go():
        one, other = group.samples
        one.append_response(Speech(tokenizer, template=True, media=media).between(words, []), mask=0)
        await ctx.append_media(one, words)
        other.multimodal_inputs = {"images": [f"{base}/own.png"]}
        await ctx.prepare_media([other])

    asyncio.run(go())
    for sample in group.samples:
        assert sample.multimodal_inputs == {"images": [reference(Path(files[0]).read_bytes())]}
    assert seen == ["/images/tool.png", "/images/own.png"]
    with pytest.raises(DataError, match="DAT39"):
        media.arrays({"images": [f"{base}/away"]})
    assert "/secret" not in seen
    length = len(reference(Path(files[0]).read_bytes()))
    monkeypatch.setattr(processor, "FETCHED", 2 * length)
    for number in range(4):  # rows that become no prompt
        media.open({"images": [f"{base}/{number}.png"]})
    assert len(media._fetched) == 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_no_sample_trains_on_placeholders_without_their_pictures(family, tokenizers, files):
    tokenizer = tokenizers[family]
    media = MediaProcessor.of(tokenizer)
    mark, (placeholder, *_) = media.marks["images"], media.layout.ids
    ctx = Context(config=Config(), tokenizer=tokenizer, media=media)

    def issued(text, count):
        inputs = {"images": files[:count]}
        tokens = media.expand(encode(tokenizer, text), inputs)
        return pending_group(Prompt(id="main/0", tokens=tokens, multimodal_inputs=inputs), Config(), count=2)

    def checked(group):
        check_group(group, issued_ids(group), len(tokenizer), media)

    def refused(group, words):
        with pytest.raises(DataError, match=rf"DAT38.*{words}.*sample main/0-0"):
            checked(group)

    blind = issued(f"{mark}?", 1)
    refused(blind, "arrays of 0")
    asyncio.run(ctx.prepare_media(blind.samples))
    checked(blind)

    nothing = issued(f"{mark}?", 1)
    for sample in nothing.samples:
        sample.multimodal_inputs = None
    refused(nothing, "placeholders without a picture")

    added = issued(f"{mark}?", 1)
    asyncio.run(ctx.prepare_media(added.samples))
    arrays = added.samples[1].multimodal_train_inputs
    both = issued(f"{mark}{mark}?", 2).samples[0]
    added.samples[0].tokens = both.tokens
    refused(added, "placeholders without a picture")
    added.samples[0].multimodal_inputs["images"].append(files[1])
    assert len(added.samples[1].multimodal_inputs["images"]) == 1  # no sample changes another's
    refused(added, "arrays of")
    asyncio.run(ctx.prepare_media(added.samples))
    checked(added)
    assert added.samples[1].multimodal_train_inputs is not None
    assert all(added.samples[1].multimodal_train_inputs[name] is array for name, array in arrays.items())
    expected = media.arrays({"images": files})
    for name, array in added.samples[0].multimodal_train_inputs.items():
        np.testing.assert_array_equal(array, expected[name])

    drawn = issued(f"{mark}?", 1)
    asyncio.run(ctx.prepare_media(drawn.samples))
    first = drawn.samples[0]
    first.append_response([placeholder], [-0.5])
    first.append_response([5, placeholder], [-0.5, -0.5], mask=0, version=3)  # masked later, drawn all the same
    checked(drawn)
    first.append_response([placeholder], mask=0)
    refused(drawn, "1 placeholders without a picture")


def test_pictures_that_nothing_would_see_are_refused_with_the_reason(write, source, refused, files, tmp_path):
    folder = folder_of(tmp_path)
    (Path(folder.tokenizer().name_or_path) / "preprocessor_config.json").unlink()
    part = {"problem": [{"role": "user", "content": [{"type": "image", "image": "0.png"}]}], "answer": "1"}
    path = write(part, {"problem": "1+1=", "answer": "2"})
    text = char_tokenizer(chat_template=PARTS)
    talk = write({"problem": [*part["problem"], {"role": "assistant", "content": "12"}]}, name="talk.jsonl")
    offline = {**KEYS, "label_key": "", "sections": {"train": {"loss_type": "sft_loss"}}}
    for tokenizer, reason in ((folder.tokenizer(), "has no preprocessor_config.json"), (text, "a model of text")):
        error = refused("DAT41", lambda tok=tokenizer: source(path, tok=tok, **KEYS).next(1))
        assert reason in error.why
        assert error.where == f"{path}:1"
        (prompt,) = source(path, tok=tokenizer, max_bad_rows=1, **KEYS).next(1)
        assert prompt.label == "2"
        error = refused("DAT41", lambda tok=tokenizer: source(path, tok=tok, **KEYS, **PICTURES))
        assert reason in error.why
        refused("DAT41", lambda tok=tokenizer: source(talk, tok=tok, **offline).next(1))
    function = {"rollout": {"rollout_function_path": "mine.rollout"}}
    source(path, tok=text, sections=function, **KEYS).next(1)  # which reads the messages itself


def test_limits_of_videos_are_read_from_the_processors_own_file(files, tmp_path):
    folder = Path(folder_of(tmp_path).tokenizer().name_or_path)
    grids = []
    for pixels in (28 * 28, 4 * 28 * 28):
        copy = Path(shutil.copytree(folder, tmp_path / str(pixels)))
        size = {"shortest_edge": 28 * 28, "longest_edge": pixels}
        (copy / "video_preprocessor_config.json").unlink(missing_ok=True)
        (copy / "processor_config.json").write_text(json.dumps({"video_processor": {"size": size}}))
        media = MediaProcessor.of(ModelFolder.open(copy, init_weights="random").tokenizer())
        grids.append(media.arrays({"videos": [[files[1]] * 2]})["video_grid_thw"][0].tolist())
    assert [height * width // 4 for _, height, width in grids] == [1, 2]
