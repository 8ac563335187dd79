"""Pictures of rows: references, placeholders and arrays of three families, against transformers' own parts."""

import asyncio
import base64
import http.server
import io
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import matplotlib.cbook
import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE, get_image_prompt_string

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.data.turns import Speech
from slime_core.errors import DataError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.media.processor import MediaProcessor
from slime_core.media.references import MediaLimits
from slime_core.rollout.groups import check_group, issued_ids, pending_group, training_params
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.vision import tiny_vision_model
from slime_core.trainers.batch import make_batch
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

HOPPER = Path(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
KEYS = {
    "input_key": "problem",
    "label_key": "answer",
    "multimodal_keys": {"image": "images"},
    "apply_chat_template": True,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """By family, the tokenizer of a tiny folder."""
    root = tmp_path_factory.mktemp("families")
    folders = {name: tiny_vision_model(root / name, name, weights=False) for name in FAMILIES}
    return {name: ModelFolder.open(path, init_weights="random").tokenizer() for name, path in folders.items()}


@pytest.fixture
def pictures(tmp_path):
    """A photograph, a flat picture and a small one of noise, beside the rows."""
    shutil.copy(HOPPER, tmp_path / "hopper.jpg")
    Image.new("RGB", (100, 30), (9, 80, 7)).save(tmp_path / "flat.png")
    noise = np.random.default_rng(0).integers(0, 255, (40, 61, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.webp", lossless=True)
    return [tmp_path / name for name in ("hopper.jpg", "flat.png", "noise.webp")]


def expected(family, tokenizer, paths):
    """Texts in place of placeholders, and arrays, by transformers' parts alone."""
    images = [Image.open(path).convert("RGB") for path in paths]
    if family == "smolvlm":
        processor = SmolVLMImageProcessorPil.from_pretrained(tokenizer.name_or_path)
        out = processor(images=[images], return_tensors="np", return_row_col_info=True)
        names = ("<fake_token_around_image>", "<image>", "<global-img>")
        grids = zip(out["rows"][0], out["cols"][0])
        texts = [get_image_prompt_string(rows, cols, 4, *names) for rows, cols in grids]
        return texts, {name: out[name][0] for name in ("pixel_values", "pixel_attention_mask")}
    processor = Qwen2VLImageProcessorPil.from_pretrained(tokenizer.name_or_path)
    out = processor(images=images, return_tensors="np")
    kind = Qwen3VLProcessor if family == "qwen3_vl" else Qwen2_5_VLProcessor
    stand_in = SimpleNamespace(image_processor=processor, image_token="<|image_pad|>")
    return [kind.replace_image_token(stand_in, out, n) for n in range(len(images))], dict(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_geometrys_form_become_the_tokens_and_arrays_of_transformers(
    family, tokenizers, pictures, write, source, tmp_path
):
    tokenizer = tokenizers[family]
    names = [path.name for path in pictures]
    rows = (
        {"images": names[:1], "problem": "<image>12+30=", "answer": "42"},
        {"images": names, "problem": "1<image><image>+2<image>?", "answer": "3"},
        {"images": [], "problem": "7+1=", "answer": "8"},
    )
    encoded = base64.b64encode(pictures[1].read_bytes()).decode()
    uri = {"images": [f"data:image/png;base64,{encoded}"], "problem": "<image>?", "answer": "1"}
    parts = [
        {"type": "image", "image": names[0]},
        {"type": "text", "text": "1?"},
        {"type": "image_url", "image_url": {"url": names[2]}},
    ]
    messages = {"images": None, "problem": [{"role": "user", "content": parts}], "answer": "x"}
    words = ({"problem": "2+2=", "answer": "4"}, {"images": None, "problem": "3+3=", "answer": "6"})
    path = write(*rows, uri, messages, *words)
    stream = source(path, tok=tokenizer, **KEYS)
    asyncio.run(stream.prepare(7))
    prompts = stream.next(7)
    taken = (pictures[:1], pictures, [], pictures[1:2], [pictures[0], pictures[2]], [], [])
    texts = ("\0{}12+30=", "1\0{}\0{}+2\0{}?", "7+1=", "\0{}?", "\0{}1?\0{}", "2+2=", "3+3=")
    around = ("", "") if family == "smolvlm" else ("<|vision_start|>", "<|vision_end|>")
    media = MediaProcessor.of(tokenizer)
    for prompt, paths, text in zip(prompts, taken, texts, strict=True):
        runs, arrays = expected(family, tokenizer, paths) if paths else ([], {})
        words = text.replace("\0{}", f"{around[0]}{{}}{around[1]}").format(*runs)
        assert prompt.tokens == encode(tokenizer, f"user: {words}\nassistant: ")
        inputs = prompt.multimodal_inputs or {}
        assert len(inputs.get("images", [])) == len(paths)
        remade = media.arrays(inputs)
        assert remade.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(remade[name], array)
        items = media.layout.items(remade)
        assert len(media.layout.starts(np.array(prompt.tokens), items)) == len(items)
    assert json.loads(json.dumps(prompts[1].multimodal_inputs)) == {"images": [str(path) for path in pictures]}


def test_parquet_brings_the_bytes_of_files(tokenizers, pictures, source, refused, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [[{"bytes": pictures[0].read_bytes(), "path": "hopper.jpg"}], [{"bytes": None, "path": "flat.png"}]]
    problems = ["<image>1+1=", "<image>2+2=", "3+3="]
    table = pa.table({"images": [*files, None], "problem": problems, "answer": ["2", "4", "6"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    tokenizer = tokenizers["qwen2_5_vl"]
    one, two, words = source(tmp_path / "rows.parquet", tok=tokenizer, **KEYS).next(3)
    media = MediaProcessor.of(tokenizer)
    for prompt, path in ((one, pictures[0]), (two, pictures[1])):
        arrays = expected("qwen2_5_vl", tokenizer, [path])[1]
        np.testing.assert_array_equal(media.arrays(prompt.multimodal_inputs)["pixel_values"], arrays["pixel_values"])
    (reference,) = one.multimodal_inputs["images"]
    assert reference.startswith("data:image/jpeg;base64,")
    assert words.multimodal_inputs is None
    keys = {**KEYS, "multimodal_keys": {"image": "picture"}}
    error = refused("DAT18", lambda: source(tmp_path / "rows.parquet", tok=tokenizer, **keys))
    assert error.what == "there is no column 'picture'"


def test_a_set_of_the_hub_brings_the_bytes_of_files(tokenizers, pictures, source, tmp_path):
    import datasets

    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = {"images": [[str(pictures[0])], []], "problem": ["<image>1+1=", "2+2="], "answer": ["2", "4"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    tokenizer = tokenizers["qwen2_5_vl"]
    keys = {**KEYS, "media_folder": str(tmp_path)}
    one, two = source(tmp_path / "set", tok=tokenizer, **keys).next(2)
    arrays = expected("qwen2_5_vl", tokenizer, pictures[:1])[1]
    made = MediaProcessor.of(tokenizer).arrays(one.multimodal_inputs)
    np.testing.assert_array_equal(made["pixel_values"], arrays["pixel_values"])
    assert two.multimodal_inputs is None


def test_texts_become_parts_for_a_template_that_reads_nothing_else(tokenizers, pictures, write, source, tmp_path):
    folder = Path(shutil.copytree(tokenizers["smolvlm"].name_or_path, tmp_path / "published"))
    (folder / "chat_template.jinja").unlink()
    template = DEFAULT_CHAT_TEMPLATE.replace("<|im_start|>", "").replace("<end_of_utterance>", "")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))  # as older folders have it
    tokenizer = ModelFolder.open(folder, init_weights="random").tokenizer()
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "<image>1+1="}]
    (prompt,) = source(write({"images": ["flat.png"], "problem": talk, "answer": "2"}), tok=tokenizer, **KEYS).next(1)
    assert prompt.prompt == "System: be briefUser:<image>1+1=Assistant:"


def test_one_set_of_arrays_goes_from_a_group_to_engine_ledger_and_batch(tokenizers, pictures, write, source, tmp_path):
    tokenizer = tokenizers["qwen3_vl"]
    row = {"images": [path.name for path in pictures], "problem": "<image><image>1<image>", "answer": "1"}
    (prompt,) = source(write(row), tok=tokenizer, **KEYS).next(1)
    config = Config(rollout={"rollout_max_response_len": 4, "n_samples_per_prompt": 2})
    engine = ScriptedEngine(lambda request: (encode(tokenizer, "42"), "stop"), vocab_size=len(tokenizer))
    ctx = Context(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        media=MediaProcessor.of(tokenizer),
        sampling=training_params(config),
    )
    group = pending_group(prompt, config)
    ids = issued_ids(group)

    async def go():
        await ctx.prepare_media(group.samples)
        for sample in group.samples:
            await ctx.generate(sample)
            sample.reward = 1.0
        check_group(group, ids, len(tokenizer), ctx.media)
        first, second = (sample.multimodal_train_inputs for sample in group.samples)
        assert all(first[name] is second[name] for name in first)
        ledger = SqliteLedger(tmp_path / "run")
        try:
            await ledger.issue([group])
            await ledger.finish(group)
            (stored,) = await ledger.samples([group.samples[1].id])
            batch = make_batch(1, "main", [group])
            assert batch.multimodal == [stored.multimodal_train_inputs] * 2
            return first, {n: ledger.segments.read_array(ref) for n, ref in stored.multimodal_train_inputs.items()}
        finally:
            await ledger.close()

    made, stored = asyncio.run(go())
    arrays = expected("qwen3_vl", tokenizer, pictures)[1]
    for request in engine.requests:
        assert request.tokens == prompt.tokens
        assert request.media.images == tuple(path.read_bytes() for path in pictures)
        assert request.media.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(made[name], array)
        np.testing.assert_array_equal(stored[name], array)
    group.samples[0].tokens[group.samples[0].tokens.index(prompt.tokens[7])] = 5
    group.samples[0].multimodal_train_inputs = made
    group.samples[0].tokens = [t for t in group.samples[0].tokens if t not in ctx.media.layout.ids]
    with pytest.raises(DataError, match=f"DAT38.*sample {group.samples[0].id}"):
        ctx.media.check(group.samples[0])


def png_header(width, height):
    """A PNG whose header claims a size, with nothing behind it."""
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, format="PNG")
    data = bytearray(buffer.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BAD = {
    "too few pictures": ({"images": ["flat.png"], "problem": "<image><image>"}, "DAT38", "1 images for 2 placeholders"),
    "too many pictures": ({"images": ["flat.png"] * 2, "problem": "<image>?"}, "DAT38", "2 images for 1 placeholders"),
    "no placeholder": ({"images": ["flat.png"], "problem": "1?"}, "DAT38", "1 images for 0 placeholders"),
    "no column": ({"problem": "<image>?"}, "DAT38", "0 images for 1 placeholders"),
    "a forged placeholder": ({"images": [], "problem": "<|image_pad|>"}, "DAT38", "0 images for 1 placeholders"),
    "no file": ({"images": ["none.png"], "problem": "<image>"}, "DAT39", "none.png cannot be decoded"),
    "a text": ({"images": ["rows.jsonl"], "problem": "<image>"}, "DAT39", "rows.jsonl cannot be decoded"),
    "half a file": ({"images": ["half.jpg"], "problem": "<image>"}, "DAT39", "half.jpg cannot be decoded"),
    "not base64": ({"images": ["data:image/png;base64,@@"], "problem": "<image>"}, "DAT39", "cannot be decoded"),
    "a bomb": ({"images": ["bomb.png"], "problem": "<image>"}, "DAT40", "too large"),
    "a strip": ({"images": ["strip.png"], "problem": "<image>"}, "DAT39", "image processor refuses"),
    "many pixels": ({"images": ["large.png"], "problem": "<image>"}, "DAT40", "700 x 600 pixels"),
    "many bytes": ({"images": ["long.bmp"], "problem": "<image>"}, "DAT40", "more than 1000000 bytes"),
    "a number": ({"images": [3], "problem": "<image>"}, "DAT24", "a reference to media is a int"),
    "an address": ({"images": ["http://127.0.0.1:1/a.png"], "problem": "<image>"}, "DAT33", "127.0.0.1"),
    "another folder": ({"images": ["../a.png"], "problem": "<image>"}, "DAT33", "../a.png"),
    "a sound": ({"images": [], "problem": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]}, "DAT41", "takes no audios"),
    "a film": ({"images": [], "problem": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "DAT41", "a video is a file"),
}  # fmt: skip


@pytest.mark.parametrize("prepared", [True, False], ids=["decoded before", "decoded at once"])
@pytest.mark.parametrize(("row", "code", "words"), BAD.values(), ids=BAD)
def test_a_row_whose_pictures_cannot_be_used_is_a_bad_row(
    row, code, words, prepared, tokenizers, pictures, write, source, refused, tmp_path
):
    (tmp_path / "half.jpg").write_bytes(HOPPER.read_bytes()[:20_000])
    (tmp_path / "bomb.png").write_bytes(png_header(60_000, 60_000))
    Image.new("L", (700, 600)).save(tmp_path / "large.png")
    Image.new("RGB", (600, 600)).save(tmp_path / "long.bmp")
    Image.new("L", (3000, 10)).save(tmp_path / "strip.png")
    good = {"images": ["flat.png"], "problem": "<image>1+1=", "answer": "2"}
    path = write({**row, "answer": "1"}, good)
    options = {"tok": tokenizers["qwen2_5_vl"], "max_image_pixels": 400_000, "max_media_bytes": 1_000_000, **KEYS}
    error = refused(code, lambda: source(path, **options).next(1))
    assert words in f"{error.what} {error.why}"
    assert f"{path}:1" in error.where
    stream = source(path, max_bad_rows=1, **options)
    if prepared:
        asyncio.run(stream.prepare(2))
    (prompt,) = stream.next(1)
    assert prompt.label == "2"
    (rejected,) = (json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines())
    assert rejected["code"] == code
    (tmp_path / "rejected.jsonl").unlink()


def test_addresses_are_fetched_once_where_their_beginning_is_allowed(tokenizers, pictures, write, source, refused):
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            target = {"/images/moved": "/images/a.png", "/images/away": "/secret"}.get(self.path)
            self.send_response(302 if target else 200)
            if target:
                self.send_header("Location", target)
            self.end_headers()
            self.wfile.write(pictures[1].read_bytes())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}/"
        options = {"tok": tokenizers["qwen2_5_vl"], "media_addresses": (f"{base}images/",), **KEYS}
        row = {"problem": "<image>?", "answer": "1"}
        path = write({**row, "images": [f"{base}images/a.png"]}, {**row, "images": [f"{base}images/moved"]})
        stream = source(path, **options)
        asyncio.run(stream.prepare(2))
        one, two = stream.next(2)
        assert one.multimodal_inputs == two.multimodal_inputs
        assert one.multimodal_inputs["images"][0].startswith("data:image/png;base64,")
        assert seen == ["/images/a.png", "/images/moved", "/images/a.png"]
        for name, code in (("secret", "DAT33"), ("images/away", "DAT39")):
            refused(code, lambda name=name: source(write({**row, "images": [base + name]}), **options).next(1))
        assert "/secret" not in seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tools_picture_joins_those_of_the_prompt(family, tokenizers, pictures, write, source):
    tokenizer = tokenizers[family]
    row = {"images": [pictures[1].name], "problem": "<image>?", "answer": "1"}
    (prompt,) = source(write(row), tok=tokenizer, **KEYS).next(1)
    group = pending_group(prompt, Config(), count=2)
    ctx = Context(config=Config(), tokenizer=tokenizer, media=MediaProcessor.of(tokenizer))
    speech = Speech(tokenizer, template=True, media=ctx.media)
    photograph = Image.open(pictures[2]).convert("RGB")
    words = [{"role": "tool", "content": [{"type": "image", "image": photograph}, {"type": "text", "text": "look"}]}]
    one, other = group.samples
    answer = encode(tokenizer, "1")

    async def go():
        await ctx.prepare_media(group.samples)
        for _ in range(2):
            one.append_response(answer, [-0.1])
            one.append_response(speech.between(words, answer), mask=0)
            await ctx.append_media(one, words)

    asyncio.run(go())
    arrays = expected(family, tokenizer, [pictures[1], pictures[2], pictures[2]])[1]
    assert one.multimodal_train_inputs.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(one.multimodal_train_inputs[name], array)
    ctx.media.check(one)
    ctx.media.check(other)
    assert len(other.multimodal_inputs["images"]) == 1
    assert [type(reference) for reference in one.multimodal_inputs["images"]] == [str] * 3
    again = ctx.media.arrays(one.multimodal_inputs)  # what the ledger keeps is the same pictures
    np.testing.assert_array_equal(again["pixel_values"], arrays["pixel_values"])


def test_a_conversation_with_pictures_trains_its_answers_alone(tokenizers, pictures, write, source):
    tokenizer = tokenizers["qwen2_5_vl"]
    talk = [
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "<image>!"},
        {"role": "assistant", "content": "34"},
    ]
    row = {"images": [path.name for path in pictures[:2]], "problem": talk}
    keys = {**KEYS, "label_key": ""}
    sections = {"train": {"loss_type": "sft_loss"}}
    (prompt,) = source(write(row), tok=tokenizer, sections=sections, **keys).next(1)
    (reply,) = prompt.metadata["replies"]
    runs = expected("qwen2_5_vl", tokenizer, pictures[:2])[0]
    first, second = (f"<|vision_start|>{run}<|vision_end|>" for run in runs)
    whole = f"user: {first}?\nassistant: 12\nuser: {second}!\nassistant: 34\n"
    tokens = [*prompt.tokens, *reply["tokens"]]
    assert tokens == [*encode(tokenizer, whole), tokenizer.eos_token_id]
    trained = [token for token, mask in zip(reply["tokens"], reply["loss_mask"], strict=True) if mask]
    assert tokenizer.decode(trained, skip_special_tokens=True).replace("\n", "") == "1234"
    assert len(prompt.multimodal_inputs["images"]) == 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_video_is_its_frames_two_in_a_row_of_the_grid(family, tokenizers, pictures, write, source):
    tokenizer = tokenizers[family]
    frames = [pictures[2].name] * 3
    content = [{"type": "video", "video": frames}, {"type": "text", "text": "?"}]
    keys = {**KEYS, "multimodal_keys": {"image": "images"}}
    row = {"images": [], "problem": [{"role": "user", "content": content}], "answer": "1"}
    (prompt,) = source(write(row), tok=tokenizer, **keys).next(1)
    media = MediaProcessor.of(tokenizer)
    arrays = media.arrays(prompt.multimodal_inputs)
    picture = media.arrays({"images": [str(pictures[2])]})
    assert arrays["video_grid_thw"].tolist() == [[2, *picture["image_grid_thw"][0, 1:].tolist()]]
    np.testing.assert_array_equal(arrays["pixel_values_videos"], np.concatenate([picture["pixel_values"]] * 2))
    items = media.layout.items(arrays)
    starts = media.layout.starts(np.array(prompt.tokens), items)
    assert len(starts) == len(items) == (2 if family == "qwen3_vl" else 1)
    flat = media.arrays({"videos": [[str(pictures[1]), str(pictures[1])]], "images": [str(pictures[0])]})
    assert {"pixel_values", "pixel_values_videos"} <= flat.keys()
    with pytest.raises(DataError, match="differ in size"):
        media.open({"videos": [[str(pictures[0]), str(pictures[1])]]}, "here")


def test_a_picture_lies_as_its_exif_says_and_limits_hold_before_decoding(tokenizers, pictures, tmp_path):
    turned = Image.open(pictures[0])
    exif = turned.getexif()
    exif[0x0112] = 6  # a quarter turn
    turned.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    media = MediaProcessor.of(tokenizers["qwen2_5_vl"], MediaLimits(pixels=1 << 20))
    upright, lying = (
        media.arrays({"images": [str(path)]})["image_grid_thw"][0] for path in (pictures[0], tmp_path / "turned.jpg")
    )
    assert upright[1:].tolist() == lying[:0:-1].tolist()
    (tmp_path / "bomb.png").write_bytes(png_header(60_000, 60_000))
    with pytest.raises(DataError, match="DAT40"):
        media.arrays({"images": [str(tmp_path / "bomb.png")]})
