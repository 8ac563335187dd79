"""Ids of a server that are not the model's are refused before a request is sent."""

import asyncio
from dataclasses import replace

import pytest
from engine_case import PATIENCE, request, serving, update
from fake_sglang import VOCAB, draw

from slime_core.errors import EngineError
from slime_core.notices import notices_to
from slime_core.types import SamplingParams
from slime_sglang.bodies import seed
from slime_sglang.health import Watch
from slime_sglang.server_health import WatchLimits

pytestmark = pytest.mark.unit


class Letters:
    """A tokenizer: a token a letter."""

    name_or_path = "/models/ours"
    all_special_tokens = ("<end>",)

    def __len__(self):
        return 256

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def run(work):
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def opened(tmp_path, change, tokenizer, seen=None):
    async def work():
        async with serving(tmp_path, 1, tokenizer=tokenizer, change=change) as (engine, fakes):
            if seen is not None:
                await seen(engine, fakes)

    run(work())


def test_a_server_of_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    with pytest.raises(EngineError, match="TOK40") as caught:
        opened(tmp_path, lambda fake: setattr(fake, "ids", VOCAB + 24), Letters())
    assert f"has {VOCAB + 24} token ids, and the trainer's model {VOCAB}" in caught.value.what
    assert "it serves 'm'; the trainer's is '/models/ours'" in caught.value.why


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("spaces", lambda text: [ord(letter) for letter in text.lstrip()]),
        ("a special token", lambda text: [7] if text == "<end>" else [ord(letter) for letter in text]),
        ("one id", lambda text: [300 if letter == "A" else ord(letter) for letter in text]),
    ],
)
def test_a_server_of_another_tokenizer_is_refused_with_a_text_that_differs(tmp_path, name, encode):
    """The same number of ids, other texts."""
    with pytest.raises(EngineError, match="TOK40") as caught:
        opened(tmp_path, lambda fake: setattr(fake, "encode", encode), Letters())
    assert "has another tokenizer than the trainer" in caught.value.what
    assert "there and [" in caught.value.why
    assert "'/models/ours'" in caught.value.why


def test_the_same_tokenizer_passes_and_no_token_is_generated_for_it(tmp_path):
    async def seen(engine, fakes):
        assert len(engine.router.lanes) == 1
        assert not fakes[0].bodies
        assert fakes[0].paths().count("/server_info") == 1  # a start asks it once

    opened(tmp_path, None, Letters(), seen)


def test_a_server_that_comes_back_with_another_model_is_not_let_in(tmp_path):
    """An external server that somebody restarted."""

    async def work():
        limits = WatchLimits(interval=0.01, timeout=30.0, start_timeout=PATIENCE, max_restarts=1)
        async with (
            serving(tmp_path, 1, tokenizer=Letters()) as (engine, (fake,)),
            Watch(engine.servers, engine.fleet, limits) as engine.fleet.watch,
        ):
            await engine.load(update(tmp_path, 1))
            fake.ids = 7
            engine.fleet.watch.report(0, EngineError("it hangs", code="ENG85"))
            await engine.fleet.watch.settled()
            assert engine.fleet.watch.states == {0: "retired"}
            with pytest.raises(EngineError, match="ENG89"):
                await engine.generate(request("a-0"))

    run(work())


def test_a_vocabulary_that_a_server_does_not_tell_is_noted_and_does_not_end_the_run(tmp_path):
    notes = []

    def silent(fake):
        fake.ids = None
        fake.encode = lambda text: None

    with notices_to(notes.append):
        opened(tmp_path, silent, Letters())
    assert [note.partition(" of the SGLang")[0] for note in notes] == [
        "the size of its vocabulary",
        "the tokenizer",
    ]


def test_a_server_without_a_tokenizer_has_its_ids_and_stop_strings_looked_after_here(tmp_path):
    """--skip-tokenizer-init: it knows no strings, so none is sent, and slime finds where they begin."""

    async def seen(engine, fakes):
        await engine.load(update(tmp_path, 1))
        params = SamplingParams(max_new_tokens=6, ignore_eos=True, stop=(chr(draw(seed(11), 5)),))
        done = await engine.generate(replace(request("a-0"), params=params))
        assert "stop" not in fakes[0].bodies[-1]["sampling_params"]
        assert (done.finish, len(done.tokens)) == ("stop", 3)

    opened(tmp_path, lambda fake: setattr(fake, "encode", None), Letters(), seen)
