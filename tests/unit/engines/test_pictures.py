"""Requests with pictures, against transformers' own `generate` of the whole model."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from slime_core.engines.local import LocalEngine, paged
from slime_core.engines.local.pages import PAGE
from slime_core.engines.local.row_counts import RowCounts
from slime_core.errors import DataError, EngineError
from slime_core.media.features import embed, features, text_model
from slime_core.media.positions import MediaLayout
from slime_core.testing.vision import tiny_vision_model
from slime_core.threads import TorchThread
from slime_core.types import Media, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "smolvlm"]
NEW = 10


class Eye:
    """A tiny vision model and engines that serve it."""

    def __init__(self, path, family):
        self.folder = ModelFolder.open(tiny_vision_model(path, family))
        self.thread = TorchThread(1)
        self.model = self.thread.call(lambda: self.folder.build_model(seed=0).eval())
        self.layout = MediaLayout.of(self.folder.config)
        self.picture_id = self.layout.placeholders["images"]

    def inputs(self, *grids, seed=0):
        """Tensors of a prompt with pictures of noise between its words.

        Args:
            grids: height and width in merged patches; of a model that cuts pictures, of its crops
        """
        draws = np.random.default_rng(seed)
        vision, merge = self.folder.config.vision_config, self.layout.merge
        arrays = {}
        if merge and grids:
            arrays["image_grid_thw"] = np.array([[1, merge * h, merge * w] for h, w in grids])
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            arrays["pixel_values"] = draws.standard_normal((int(arrays["image_grid_thw"].prod(1).sum()), width))
        elif grids:
            crops, side = sum(h * w for h, w in grids), vision.image_size
            arrays["pixel_values"] = draws.standard_normal((1, crops, 3, side, side))
            arrays["pixel_attention_mask"] = np.ones((1, crops, side, side), dtype=np.int64)
            arrays["pixel_attention_mask"][0, -1, :, side // 2 :] = 0
        tokens = [5, 6, 7]
        for number, item in enumerate(self.layout.items(arrays)):
            tokens += [8, *[self.picture_id] * item.tokens, 9, 10 + number]
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if grids:
            tensors["pixel_values"] = tensors["pixel_values"].float()
        ids = torch.tensor([[*tokens, 11, 12]])
        if merge:
            tensors["mm_token_type_ids"] = (ids == self.picture_id).long()
        return {"input_ids": ids} | tensors

    def generated(self, inputs):
        """Greedy tokens of transformers and their log-probs."""
        with torch.no_grad():
            out = self.model.generate(
                **inputs,
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :]
        log_probs = torch.log_softmax(torch.cat(out.logits), -1).gather(1, tokens[:, None])[:, 0]
        return tokens.tolist(), log_probs.numpy()

    @asynccontextmanager
    async def engine(self, **options):
        options = {"slots": 4, "context_len": 256, "dtype": "float32", "device": "cpu"} | options
        engine = LocalEngine(self.folder, thread=self.thread, **options)
        try:
            await engine.load(
                WeightUpdate(version=0, epoch=0, transport="tensors", tensors=dict(self.model.state_dict()))
            )
            yield engine
        finally:
            await engine.close()


def media_of(inputs):
    return Media(arrays={name: t.numpy().copy() for name, t in inputs.items() if "pixel" in name or "grid" in name})


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    """`eyes(family)` makes each family's model once."""
    eyes = {}

    def make(family):
        if family not in eyes:
            eyes[family] = Eye(tmp_path_factory.mktemp(family), family)
        return eyes[family]

    yield make
    for eye in eyes.values():
        eye.thread.close()


@pytest.fixture
def look(ask):
    """`look(name, inputs, **sampling)` makes a request of an eye's inputs."""

    def make(name, inputs, **options):
        request = ask(name, inputs["input_ids"][0].tolist(), **({"new": NEW} | options))
        object.__setattr__(request, "media", media_of(inputs))
        return request

    return make


@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_log_probs_are_those_of_transformers(eyes, look, family, pages, monkeypatch):
    """Pictures that are not square, several a request, text alone, all beside each other; passes end inside of pictures."""
    eye = eyes(family)
    monkeypatch.setattr(paged, "PASS_ROWS", 13)
    contents = [eye.inputs((2, 1), (1, 3)), eye.inputs((3, 2), seed=1), eye.inputs(), eye.inputs((1, 1), seed=2)]

    async def go():
        async with eye.engine(paged=pages or None) as engine:
            assert "multimodal" in engine.abilities
            assert engine._scheduler.served.plan.name == "packed"
            served = engine._scheduler.served
            served.counts = (
                RowCounts(served.counts.allowed[:1], served.counts.allowed[0]) if not pages else RowCounts()
            )
            greedy = [look(str(n), inputs, temperature=0) for n, inputs in enumerate(contents)]
            drawn = [look(f"drawn {n}", inputs) for n, inputs in enumerate(contents)]
            done = await asyncio.gather(*(engine.generate(request) for request in (*greedy, *drawn)))
            scores = [
                await engine.score([*request.tokens, *one.tokens], len(request.tokens), request.media)
                for request, one in zip((*greedy, *drawn), done, strict=True)
            ]
            return done, scores

    done, scores = asyncio.run(go())
    for inputs, one in zip(contents, done, strict=False):
        tokens, log_probs = eye.generated(inputs)
        assert one.tokens == tokens
        np.testing.assert_allclose(one.plain_log_probs, log_probs, atol=2e-5)
    for one, score in zip(done, scores, strict=True):
        np.testing.assert_allclose(score, one.plain_log_probs, atol=2e-5 if pages else 0)


@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
def test_a_prefix_is_shared_where_the_pictures_agree_and_nowhere_else(eyes, look, pages):
    """The second and third request have the tokens of the first; the third has another second picture."""
    eye = eyes("qwen2_5_vl")
    first, other = eye.inputs((5, 5), (4, 5)), eye.inputs((5, 5), (4, 5), seed=1)
    half = first["image_grid_thw"][0].prod()
    other["pixel_values"][:half] = first["pixel_values"][:half]
    assert torch.equal(first["input_ids"], other["input_ids"])
    passes = []

    async def answer(engine, inputs):
        rows = engine._scheduler.served.plan.forward

        def forward(packed, *args, **options):
            passes.append(0 if packed.media is None or packed.media.at is None else len(packed.media.at))
            return rows(packed, *args, **options)

        engine._scheduler.served.plan.forward, before = forward, len(passes)
        done = await engine.generate(look("a", inputs))
        engine._scheduler.served.plan.forward = rows
        return done, sum(passes[before:])

    async def go():
        answers = []
        async with eye.engine(paged=pages or None) as engine:
            for inputs in (first, first, other):
                answers.append(await answer(engine, inputs))
        async with eye.engine(paged=pages or None) as engine:
            answers.append(await answer(engine, other))
        return answers

    (one, whole), (again, repeated), (third, new), (alone, all_of_it) = asyncio.run(go())
    items = eye.layout.items(media_of(first).arrays)
    assert whole == all_of_it == sum(item.tokens for item in items)
    assert repeated < (PAGE if pages else 1), "whole pages are shared"
    assert new == items[1].tokens, "the first picture's keys are those of the first request"
    assert again.tokens == one.tokens
    np.testing.assert_allclose(again.plain_log_probs, one.plain_log_probs, atol=2e-5 if pages else 0)
    assert third.tokens == alone.tokens
    np.testing.assert_allclose(third.plain_log_probs, alone.plain_log_probs, atol=2e-5 if pages else 0)
    assert np.abs(np.subtract(third.plain_log_probs, one.plain_log_probs)).max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_and_an_abort_change_no_bit(eyes, look, family):
    """A request alone, among others, and continued from its first tokens with its pictures."""
    eye = eyes(family)
    inputs = eye.inputs((2, 1), (1, 3))

    async def go():
        async with eye.engine() as engine:
            alone = await engine.generate(look("a", inputs))
        async with eye.engine() as engine:
            others = [look(str(n), eye.inputs((1 + n % 2, 2), seed=n)) for n in range(5)]
            among = (await asyncio.gather(*(engine.generate(r) for r in (*others, look("a", inputs)))))[-1]
            assert "batch_invariant" in engine.abilities
        async with eye.engine() as engine:
            prefix = alone.tokens[:4]
            request = look("a", inputs, new=NEW - 4, kept=4)
            request.tokens.extend(prefix)
            rest = await engine.generate(request)
        return alone, among, rest

    alone, among, rest = asyncio.run(go())
    assert among == alone
    assert rest.tokens == alone.tokens[4:]
    assert rest.plain_log_probs == alone.plain_log_probs[4:]


def test_a_placeholder_that_was_drawn_is_text(eyes, look):
    """Its own embedding, one position on every axis; the reference is the text model on embeddings."""
    eye = eyes("qwen2_5_vl")
    inputs = eye.inputs((2, 1))
    request = look("a", inputs, temperature=0, kept=2)
    request.tokens.extend([eye.picture_id, 9])

    async def go():
        async with eye.engine() as engine:
            return await engine.generate(request)

    done = asyncio.run(go())
    tokens = np.array([*request.tokens, *done.tokens])
    items = eye.layout.items(request.media.arrays)
    (start,) = eye.layout.starts(tokens, items)
    with torch.no_grad():
        at = torch.arange(start, start + items[0].tokens)
        embeddings, _ = embed(eye.model, torch.from_numpy(tokens), at, features(eye.model, "images", inputs))
        positions = torch.from_numpy(eye.layout.positions(tokens, items))[:, None]
        hidden = text_model(eye.model)(inputs_embeds=embeddings, position_ids=positions).last_hidden_state
        log_probs = torch.log_softmax(eye.model.lm_head(hidden)[0], -1)[len(request.tokens) - 1 : -1]
    assert done.tokens == log_probs.argmax(-1).tolist()
    np.testing.assert_allclose(done.plain_log_probs, log_probs.max(-1).values, atol=2e-5)


def test_pictures_that_cannot_be_taken_are_errors_of_the_request(eyes, look, bench, ask):
    eye = eyes("qwen2_5_vl")
    inputs = eye.inputs((2, 1), (1, 3))
    files = ask("files")
    object.__setattr__(files, "media", Media(images=(b"png",)))
    few = look("few", {name: t[:1] if name == "image_grid_thw" else t for name, t in inputs.items()})
    few.tokens[few.tokens.index(eye.picture_id)] = 5
    end = look("end", eye.inputs((1, 1)))
    del end.tokens[end.tokens.index(eye.picture_id) + 1 :]
    cases = [
        (files, "ENG07", "pictures came without the arrays of a processor"),
        (few, "DAT38", "1 images do not match the placeholders among the tokens"),
        (end, "ENG07", "the tokens end with a placeholder"),
    ]

    async def go():
        async with eye.engine() as engine:
            for request, code, what in cases:
                with pytest.raises((EngineError, DataError)) as error:
                    await engine.generate(request)
                assert (error.value.code, error.value.what) == (code, what)
                assert error.value.where == f"request {request.id}"
            return await engine.generate(look("a", inputs, new=1))

    assert len(asyncio.run(go()).tokens) == 1

    async def text(b):
        async with b.engine() as engine:
            with pytest.raises(EngineError, match="ENG07 qwen3 takes no pictures"):
                await engine.generate(files)

    bench("qwen3").run(text)
