"""What a request may ask for: ends, stops, limits, and everything that is refused."""

import asyncio
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_core.engines.local.row_counts import RowCounts
from slime_core.engines.local.scheduler import Scheduler
from slime_core.errors import EngineError
from slime_core.testing.models import char_tokenizer
from slime_core.types import SamplingParams

pytestmark = pytest.mark.unit


@pytest.fixture
def served(bench):
    """`served(request, ...)` gives the completions of an engine with 128 tokens of context."""
    b = bench("qwen3", initializer_range=1.0)

    async def go(b, asked, **options):
        async with b.engine(context_len=128, **options) as engine:
            return await asyncio.gather(*(engine.generate(r) for r in asked))

    return lambda *asked, **options: b.run(lambda b: go(b, asked, **options))


def sampled(done):
    return char_tokenizer().decode(done.tokens)


def test_a_response_runs_to_its_limit(served, ask):
    (done,) = served(ask("a", new=30))
    assert (len(done.tokens), done.finish) == (30, "length")
    assert len(done.log_probs) == len(done.plain_log_probs) == len(done.versions) == 30
    assert done.text == char_tokenizer().decode(done.tokens, skip_special_tokens=True)


def test_no_tokens_are_drawn_where_none_are_asked_for(served, ask):
    (done,) = served(ask("a", new=0))
    assert (done.tokens, done.finish, done.text) == ([], "length", "")


def test_the_context_ends_a_response(served, ask):
    (done,) = served(ask("a", [5] * 100, new=1000))
    assert (len(done.tokens), done.finish) == (28, "length")


def test_a_stop_id_ends_a_response_and_is_kept(bench, ask):
    async def go(b):
        async with b.engine() as engine:
            free = await engine.generate(ask("a", new=30))
            token = free.tokens[12]
            first = free.tokens.index(token)
            many = tuple(t for t in range(3, 84) if t not in free.tokens)
            return free, first, await engine.generate(ask("a", new=30, stop_token_ids=(*many, token)))

    free, first, done = bench().run(go)
    assert done.tokens == free.tokens[: first + 1]
    assert done.log_probs == free.log_probs[: first + 1]
    assert done.finish == "stop"


def test_the_end_token_ends_a_response_unless_it_is_ignored(bench, ask):
    async def go(b):
        async with b.engine(slots=16) as engine:
            asked = [ask(str(i), new=150, seed=i, ignore_eos=i % 2 == 0) for i in range(16)]
            return await asyncio.gather(*(engine.generate(r) for r in asked))

    done = bench().run(go)
    assert all(len(one.tokens) == 150 for one in done[::2])
    assert any(1 in one.tokens[:-1] for one in done[::2])
    ended = [one for one in done[1::2] if one.finish == "stop"]
    assert ended
    assert all(one.tokens.index(1) == len(one.tokens) - 1 for one in ended)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_a_response_and_is_cut_from_its_text(bench, ask, length):
    async def go(b):
        async with b.engine() as engine:
            free = await engine.generate(ask("a", new=40))
            stop = sampled(free)[20 : 20 + length]
            other = ask("b", new=40)  # without stop strings, beside it
            done, beside = await asyncio.gather(
                engine.generate(ask("a", new=40, stop=("never seen", stop))), engine.generate(other)
            )
            assert beside.finish == "length"
            return free, stop, done

    free, stop, done = bench().run(go)
    end = sampled(free).index(stop) + length
    assert done.tokens == free.tokens[:end], "the tokens that make the stop string are kept"
    assert done.finish == "stop"
    assert done.text == sampled(free)[: end - length]
    assert len(done.log_probs) == end


def test_a_stop_string_is_found_across_an_abort(bench, ask):
    """The first half of it was drawn before; the request says how many tokens it kept."""

    async def go(b):
        async with b.engine() as engine:
            free = await engine.generate(ask("a", new=40))
            stop = sampled(free)[20:26]
            kept = free.tokens[:23]
            rest = await engine.generate(ask("a", [5, 6, 7, *kept], new=17, kept=23, stop=(stop,)))
            blind = await engine.generate(ask("a", [5, 6, 7, *kept], new=17, stop=(stop,)))
            return free, rest, blind

    free, rest, blind = bench().run(go)
    assert (rest.tokens, rest.finish) == (free.tokens[23:26], "stop")
    assert blind.tokens == free.tokens[23:], "a prompt that ends with half of a stop string is no response"


def test_a_stop_string_does_not_begin_in_the_prompt(bench, ask):
    async def go(b):
        async with b.engine() as engine:
            free = await engine.generate(ask("a", new=6))
            stop = char_tokenizer().decode([7]) + sampled(free)[0]
            return free, await engine.generate(ask("a", new=6, stop=(stop,)))

    free, done = bench().run(go)
    assert done.tokens == free.tokens


BAD = {
    "no tokens": ({"tokens": []}, "ENG01"),
    "an id that is too large": ({"tokens": [5, 84]}, "ENG02"),
    "a negative id": ({"tokens": [5, -1]}, "ENG02"),
    "an id beyond 64 bits": ({"tokens": [5, 2**70]}, "ENG02"),
    "a prompt that fills the context": ({"tokens": [5] * 256}, "ENG72"),
    "a negative temperature": ({"temperature": -0.5}, "ENG03"),
    "a temperature that is not a number": ({"temperature": float("nan")}, "ENG03"),
    "a nucleus of nothing": ({"top_p": 0.0}, "ENG03"),
    "a nucleus above one": ({"top_p": 1.5}, "ENG03"),
    "a negative top_k": ({"top_k": -1}, "ENG03"),
    "a negative length": ({"new": -1}, "ENG03"),
    "an empty stop string": ({"stop": ("",)}, "ENG03"),
    "more kept tokens than there are": ({"kept": 4}, "ENG03"),
}


@pytest.mark.parametrize(("changes", "code"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused_and_others_go_on(bench, ask, changes, code):
    async def go(b):
        async with b.engine() as engine:
            good = asyncio.create_task(engine.generate(ask("good")))
            with pytest.raises(EngineError) as caught:
                await engine.generate(ask("bad", **changes))
            assert caught.value.code == code
            assert "request bad" in caught.value.where
            assert caught.value.fix
            assert len((await good).tokens) == 12

    bench().run(go)


@pytest.mark.parametrize(
    ("tokens", "start", "code"),
    [([5, 6], 0, "ENG03"), ([5, 6], 3, "ENG03"), ([5, 99], 1, "ENG02"), ([5] * 257, 1, "ENG72")],
)
def test_bad_scores_are_refused(bench, tokens, start, code):
    async def go(b):
        async with b.engine() as engine:
            with pytest.raises(EngineError) as caught:
                await engine.score(tokens, start)
            assert caught.value.code == code

    bench().run(go)


def test_seeds_of_64_bits_and_beyond_are_taken(bench, ask):
    async def go(b):
        async with b.engine() as engine:
            same = await asyncio.gather(*(engine.generate(ask("a", seed=s)) for s in (-1, 2**64 - 1)))
            assert same[0].tokens == same[1].tokens

    bench().run(go)


def test_only_tokens_that_may_end_a_stop_string_are_looked_at_closely():
    """Byte-level tokens: a character may come in pieces, and every token that completes a stop string is one of them."""
    texts = ["Zürich </tool> 東京 = 7.\n", "a b  c", "naïve “stop”\t🙂!"]
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytewise.train_from_iterator(texts * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    scheduler = Scheduler(SimpleNamespace(counts=RowCounts()), lambda: tokenizer, 1)
    skipped = 0
    for stop in ("</tool>", "京", "ü", "7.", "\n", " ", "b  ", "”", "🙂", "ï"):
        job = SimpleNamespace(request=SimpleNamespace(params=SamplingParams(max_new_tokens=1, stop=(stop,))))
        for text in texts:
            ids = tokenizer.encode(text)
            for end in range(1, len(ids) + 1):
                before, after = (tokenizer.decode(ids[:count]) for count in (end - 1, end))
                close = scheduler._may_end(ids[end - 1], job)
                assert close or not (stop in after and stop not in before), (stop, text, end)
                skipped += not close
    assert skipped > 100
