"""Ids and log-probs of a request, bit for bit: alone, among others, refilled, permuted, padded, packed, continued."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from slime_core.engines.local import scheduler, slots

pytestmark = pytest.mark.unit

EVERY = ["qwen3", "qwen3-wide", "qwen2", "llama", "mistral", "neox", "gemma2", "gpt2", "qwen3-moe", "gpt-oss"]
LEAN = {"qwen3", "qwen3-wide", "qwen2", "llama", "mistral"}
CASES = [(name, "float32", 1) for name in EVERY]
CASES += [(name, "bfloat16", 1) for name in ("qwen3", "mistral", "neox", "gpt-oss")]
CASES += [("qwen3", "float32", 2), ("neox", "float32", 2)]
CASES += [  # one of each plan is enough for threads, every time
    pytest.param("qwen3-wide", "bfloat16", 1, marks=pytest.mark.nightly),
    pytest.param("qwen3-wide", "bfloat16", 2, marks=pytest.mark.nightly),
    pytest.param("gemma2", "float32", 3, marks=pytest.mark.nightly),
]


def same(one, other):
    return (one.tokens, one.log_probs, one.plain_log_probs, one.finish) == (
        other.tokens,
        other.log_probs,
        other.plain_log_probs,
        other.finish,
    )


def requests(ask, vocab, count, *, longest=40, seed=0):
    """Prompts of 1 to 150 tokens, some with common beginnings; responses from 3 tokens; all kinds of sampling."""
    draws = random.Random(seed)
    heads = [[draws.randrange(3, vocab) for _ in range(n)] for n in (40, 1, 7)]
    drawn = []
    for index in range(count):
        tail = [draws.randrange(3, vocab) for _ in range(draws.choice([0, 0, 3, 60, 110]))]
        drawn.append(
            ask(
                str(index),
                heads[index % 3] + tail,
                new=draws.choice([3, 12, longest]),
                seed=index * 7919 + 2**63,
                temperature=draws.choice([1, 1, 0.7, 0]),
                top_p=draws.choice([1, 1, 0.8]),
                top_k=draws.choice([0, 0, 5]),
            )
        )
    return drawn


@pytest.mark.parametrize(("name", "dtype", "threads"), CASES, ids=lambda value: str(value))
def test_a_request_gives_the_same_bits_however_it_is_served(bench, ask, name, dtype, threads):
    async def go(b):
        small = threads > 1  # passes are slow where threads share cores with others
        asked = requests(ask, b.folder.vocab_size, 5 if small else 8, longest=16 if small else 24)
        async with b.engine(slots=12, dtype=dtype) as wide, b.engine(slots=3, dtype=dtype, context_len=300) as narrow:
            for engine in (wide, narrow):
                assert engine._scheduler.served.plan.name == ("lean" if name in LEAN else "packed")
                assert "batch_invariant" in engine.abilities
            full = await asyncio.gather(*(wide.generate(r) for r in asked))
            refilled = await asyncio.gather(*(narrow.generate(r) for r in reversed(asked)))
            for r, one, other in zip(asked, full, reversed(refilled), strict=True):
                assert same(one, other), f"request {r.id}: refilled in another order"
                scored = await narrow.score([*r.tokens, *one.tokens], len(r.tokens))
                assert scored.tolist() == one.plain_log_probs, f"request {r.id}: scored"
            for r, one in list(zip(asked, full, strict=True))[: 2 if small else 3]:
                assert same(await wide.generate(r), one), f"request {r.id}: alone"
                kept = len(one.tokens) // 2
                params = replace(r.params, max_new_tokens=r.params.max_new_tokens - kept)
                rest = await narrow.generate(replace(r, tokens=r.tokens + one.tokens[:kept], params=params, kept=kept))
                assert one.tokens[:kept] + rest.tokens == one.tokens, f"request {r.id}: continued"
                assert one.log_probs[:kept] + rest.log_probs == one.log_probs, f"request {r.id}: continued"

    bench(name, threads=threads).run(go)


def test_a_long_neighbour_changes_nothing(bench, ask):
    """It stretches attention to 512 columns, in one pass for all and apart from the others."""

    async def go(b):
        asked = requests(ask, b.folder.vocab_size, 6, seed=3)
        long = ask("long", [9] * 440, new=50)
        async with b.engine(slots=8, context_len=500) as engine:
            alone = [await engine.generate(r) for r in asked]
            together = await asyncio.gather(engine.generate(long), *(engine.generate(r) for r in asked))
            longs = await asyncio.gather(*(engine.generate(replace(long, id=str(i))) for i in range(7)))
            assert all(same(one, other) for one, other in zip(alone, together[1:], strict=True))
            assert all(same(together[0], one) for one in longs)

    bench("qwen3").run(go)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_a_cache_that_grows_or_loses_slots_changes_nothing(bench, ask, monkeypatch, caplog, name):
    """Memory for ten sequences of 300 tokens: slots grow with the long sequence at 256, then the others lose theirs."""

    async def go(b):
        asked = [*requests(ask, b.folder.vocab_size, 16, seed=5), ask("long", [9] * 220, new=80)]
        async with b.engine(slots=20, context_len=512) as roomy, b.engine(slots=20, context_len=512) as tight:
            wanted = await asyncio.gather(*(roomy.generate(r) for r in asked))
            memory = 10 * 300 * tight._scheduler.served.position_bytes / slots.SHARE
            monkeypatch.setattr(scheduler, "free_memory", lambda device, held: int(memory))
            lengths = []
            grow = slots.KVCache.grow

            def grown(cache, tokens, used):
                lengths.append(tokens)
                grow(cache, tokens, used)

            monkeypatch.setattr(slots.KVCache, "grow", grown)
            completions = await asyncio.gather(*(tight.generate(r) for r in asked))
            assert all(same(one, other) for one, other in zip(wanted, completions, strict=True))
            assert lengths
            assert (roomy._scheduler.sequences, roomy._scheduler.tokens) == (20, 384)
            assert tight._scheduler.sequences < 10
            assert "of 20 sequences" in caplog.text
            await tight.load(b.update(1))
            await tight.generate(asked[0])
            assert tight._scheduler.sequences == 20, "shorter requests get all slots again"

    bench(name).run(go)


def test_a_context_that_no_request_needs_costs_nothing(bench, ask):
    """131,072 positions in 4,096 slots would be 256 GiB."""

    async def go(b):
        async with b.engine(slots=4096, context_len=131072) as engine, b.engine() as small:
            assert same(await engine.generate(ask()), await small.generate(ask()))
            assert engine._scheduler.tokens == 128

    bench("qwen3", max_position_embeddings=131072).run(go)


@pytest.mark.parametrize("group", [2, 4])
def test_prompts_longer_than_a_pass_are_cut_without_a_trace(bench, ask, group):
    """400 tokens in passes of 1024, 64 and 16 rows; sums over 160 keys of 4 heads and more have a way of their own."""
    bits = []

    async def go(b):
        asked = [ask(str(i), [(7 * i + j) % 80 + 3 for j in range(400 - 30 * i)], new=8) for i in range(3)]
        async with b.engine(slots=4, context_len=450) as engine:
            for most in (1024, 64, 16):
                engine._scheduler.served.counts = replace(
                    engine._scheduler.served.counts, allowed=(16, most), most=most
                )
                engine._scheduler.forget()
                bits.append(await asyncio.gather(*(engine.generate(r) for r in asked)))

    bench("qwen3", num_attention_heads=2 * group, num_key_value_heads=2).run(go)
    assert all(same(one, other) for row in bits[1:] for one, other in zip(bits[0], row, strict=True))


def test_a_group_computes_its_prompt_once(bench, ask):
    """Eight samples of one prompt give what each gives alone, and one row of prompt a token is run."""

    async def go(b):
        prompt = list(range(3, 60))
        asked = [ask(str(i), prompt, new=20, seed=i) for i in range(8)]
        async with b.engine(slots=8) as engine:
            filled = []
            prefill = engine._scheduler.served.prefill
            engine._scheduler.served.prefill = lambda segments, content: (
                filled.extend(s.end - s.begin for s in segments),
                prefill(segments, content),
            )
            group = await asyncio.gather(*(engine.generate(r) for r in asked))
            assert filled == [56], "the last token is fed by the first decode step"
            engine._scheduler.forget()
            alone = []
            for r in asked:
                engine._scheduler.forget()
                alone.append(await engine.generate(r))
            assert filled == [56] * 9
            assert all(same(one, other) for one, other in zip(group, alone, strict=True))
            assert len({tuple(one.tokens) for one in group}) == 8

    bench("qwen3").run(go)


def test_a_conversation_reuses_what_its_last_turn_left(bench, ask):
    async def go(b):
        async with b.engine(slots=2) as engine, b.engine(slots=2) as fresh:
            first = await engine.generate(ask("a", range(3, 40), new=16))
            second = ask("a", [*range(3, 40), *first.tokens, 50, 51], new=16)
            filled = []
            prefill = engine._scheduler.served.prefill
            engine._scheduler.served.prefill = lambda segments, content: (
                filled.extend(s.end - s.begin for s in segments),
                prefill(segments, content),
            )
            assert same(await engine.generate(second), await fresh.generate(second))
            assert filled == [2], "the last drawn token and 50; 51 is fed by the first decode step"

    bench("qwen3").run(go)


@pytest.mark.parametrize("name", ["qwen3", "neox"])
def test_the_tail_of_a_batch_runs_in_smaller_passes(bench, ask, name):
    """40 sequences of which the ones in the highest slots live longest: they move down, and keep their bits."""

    async def go(b):
        asked = [ask(str(i), [5 + i], new=40 if i in (3, 38, 39) else 4) for i in range(40)]
        async with b.engine(slots=40) as engine:
            counts = []
            decode = engine._scheduler.served.decode
            engine._scheduler.served.decode = lambda slots, count: (counts.append(count), decode(slots, count))[1]
            together = await asyncio.gather(*(engine.generate(r) for r in asked))
            assert counts[:4] == [48] * 4
            assert set(counts[4:]) == {16}
            for i in (3, 38, 39):
                assert same(await engine.generate(asked[i]), together[i])

    bench(name).run(go)


def test_models_without_a_replaceable_attention_recompute_and_stay_invariant(bench, ask, caplog):
    async def go(b):
        asked = [ask(str(i), range(3, 6 + 5 * i), new=6) for i in range(4)]
        async with b.engine(slots=3) as engine:
            assert engine._scheduler.served.plan.name == "rescan"
            together = await asyncio.gather(*(engine.generate(r) for r in asked))
            for r, one in zip(asked, together, strict=True):
                assert same(await engine.generate(r), one)
                request = replace(r, tokens=r.tokens + one.tokens[:2], params=replace(r.params, max_new_tokens=4))
                assert (await engine.generate(request)).tokens == one.tokens[2:]

    bench("mamba").run(go)
    assert "every token recomputes its whole sequence" in caplog.text


def test_rows_that_depend_on_their_neighbours_are_noticed(bench, caplog):
    """A model whose norm looks across rows: right alone, so it is served, without the promise."""

    async def go(b):
        def leak(module, args, out):
            return out + 1e-6 * out.mean(dim=-2, keepdim=True)

        async with b.engine(load=False) as engine:
            from slime_core.engines.local.twin import Twin

            twin = Twin(b.folder.config, torch.float32, "cpu", False)
            twin.model.gpt_neox.final_layer_norm.register_forward_hook(leak)
            await b.thread.run(engine._load, b.update())
            assert engine._scheduler.served.batch_invariant
            from slime_core.engines.local import verify

            twin.load(b.update())
            choice = await b.thread.run(torch.no_grad()(verify.choose), twin.model, 64, "cpu")
            assert (choice.plan.name, choice.batch_invariant) == ("packed", False)
            assert "depend on their neighbours" in caplog.text

    bench("neox").run(go)
