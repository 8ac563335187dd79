"""The cache in pages and its scheduler, through the references of the kernels on a CPU."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slime_core.engines.local import paged, replay
from slime_core.engines.local.pages import PAGE, PagedCache, PagePool
from slime_core.engines.local.replay import Runner
from slime_core.engines.local.slots import LayerShape
from slime_core.errors import EngineError
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase
from slime_core.testing.families import FAMILIES, RECURRENT

pytestmark = pytest.mark.unit

BLOCKS = [np.full(PAGE, i) for i in range(9)]


def tokens_of(*blocks):
    return np.concatenate([BLOCKS[i] for i in blocks])


def watched(engine):
    """A list that gets the rows of every pass."""
    plan, rows = engine._scheduler.served.plan, []
    forward = plan.forward

    def counting(packed, *args, **options):
        rows.append(len(packed))
        return forward(packed, *args, **options)

    plan.forward = counting
    return rows


def test_pages_that_begin_alike_are_held_together():
    pool = PagePool(8)
    assert pool.available == 7
    own = [pool.take() for _ in range(3)]
    pool.publish(tokens_of(1, 2, 3)[:-1], own)  # the third is not full
    assert pool.match(tokens_of(1, 2, 3)) == own[:2]
    assert pool.match(tokens_of(2, 1)) == []
    assert pool.match(tokens_of(1, 1)) == own[:1]
    pool.give(own)
    assert pool.available == 5  # two are still held by the matches
    pool.give(own[:2])
    pool.give(own[:1])
    assert pool.available == 7
    assert pool.match(tokens_of(1, 2)) == own[:2], "content outlives its holders"


def test_the_page_that_lay_idle_longest_is_the_first_to_be_lost():
    pool = PagePool(4)
    for block in (1, 2, 3):
        page = pool.take()
        pool.publish(tokens_of(block), [page])
        pool.give([page])
    pool.give(pool.match(tokens_of(1)))
    pool.take()
    assert pool.match(tokens_of(2)) == []
    assert len(pool.match(tokens_of(1)) + pool.match(tokens_of(3))) == 2
    with pytest.raises(IndexError):
        pool.take()


def test_a_page_behind_a_lost_one_is_never_taken_for_another():
    """The same tokens come again in other pages; what was known behind the lost page must not be found through them."""
    pool = PagePool(6)
    first = [pool.take(), pool.take()]
    pool.publish(tokens_of(1, 2), first)
    pool.give(first[:1])
    others = [pool.take() for _ in range(4)]  # the last of them was block 1
    assert others[-1] == first[0]
    pool.publish(tokens_of(1, 2), [others[0], first[1]])
    pool.give([first[1]])
    pool.take()
    assert pool.match(tokens_of(1, 2)) == others[:1]


def test_new_weights_make_every_page_unknown():
    pool = PagePool(4)
    page = pool.take()
    pool.publish(tokens_of(1), [page])
    pool.give([page])
    pool.forget()
    assert pool.match(tokens_of(1)) == []
    assert pool.available == 3


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_engines_is_kept_over_pages(bench, check):
    async def go(b):
        async with b.engine(load=False, paged=True) as engine:
            await check(EngineCase(engine=engine, update=b.update, prompt=[5, 6, 7]))

    bench().run(go)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RECURRENT])
def test_logits_are_the_models_own_in_chunks_beside_decode_steps_and_from_shared_pages(bench, ask, name, monkeypatch):
    monkeypatch.setattr(paged, "PASS_ROWS", 40)
    b = bench(name)
    if name == "gemma2":
        b.model.set_attn_implementation("eager")  # sdpa leaves the soft cap out

    async def go(b):
        asked = [ask(str(i), range(3, 8 + 23 * (i % 4)), new=16, temperature=0.7) for i in range(8)]
        async with b.engine(slots=3, paged=True) as engine:
            rows = watched(engine)
            done = await asyncio.gather(*(engine.generate(r) for r in asked))
            assert max(rows) <= 40
            scored = await engine.score([*asked[-1].tokens, *done[-1].tokens], len(asked[-1].tokens))
            np.testing.assert_allclose(scored, done[-1].plain_log_probs, atol=1e-4)
            return asked, done

    asked, done = b.run(go)
    for r, one in zip(asked, done, strict=True):
        tokens = torch.tensor([[*r.tokens, *one.tokens]])
        with torch.no_grad():
            own = b.model(tokens, use_cache=False).logits[0, len(r.tokens) - 1 : -1]
        at = (torch.arange(16), torch.tensor(one.tokens))
        np.testing.assert_allclose(one.plain_log_probs, torch.log_softmax(own, -1)[at], atol=2e-4)
        np.testing.assert_allclose(one.log_probs, torch.log_softmax(own / 0.7, -1)[at], atol=3e-4)


def test_draws_are_those_of_the_slots(bench, ask):
    """The same hash, temperature, top-k and top-p; stop ids and strings; end tokens that end nothing."""

    async def go(b):
        asked = [
            ask("plain", new=40),
            ask("cool", new=40, temperature=0.6),
            ask("greedy", new=40, temperature=0.0),
            ask("few", new=40, top_k=3),
            ask("near", new=40, top_p=0.7),
            ask("both", new=40, top_k=9, top_p=0.8),
            ask("ends", new=40, ignore_eos=False, stop_token_ids=(7, 8, 9, 10, 11, 12, 13)),
            ask("text", new=60, stop=("a", "7", "+")),
        ]
        async with b.engine(paged=False) as slots, b.engine(slots=3, paged=True) as pages:
            for engine in (slots, pages):
                yield [await asyncio.gather(*(engine.generate(r) for r in asked))]

    async def both(b):
        return [done[0] async for done in go(b)]

    old, new = bench("qwen3", initializer_range=0.5).run(both)
    for one, other in zip(old, new, strict=True):
        assert (one.tokens, one.finish, one.text) == (other.tokens, other.finish, other.text)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-3)
    assert {"stop", "length"} == {one.finish for one in new}


def test_samples_of_a_prompt_share_its_pages_and_turns_share_all_before_them(bench, ask):
    prompt = [(11 * i) % 80 + 3 for i in range(5 * PAGE + 6)]

    async def go(b):
        async with b.engine(slots=8, paged=True) as engine:
            rows = watched(engine)
            asked = [ask(str(i), prompt, new=2 * PAGE) for i in range(8)]
            alone = await engine.generate(asked[0])
            assert rows[0] == len(prompt)
            await engine.load(b.update(1))
            rows.clear()
            done = await asyncio.gather(*(engine.generate(r) for r in asked))
            assert rows[0] == len(prompt) + 7 * 6, "whole pages are computed once, in the pass that they are shared in"
            assert done[0].tokens == alone.tokens
            rows.clear()
            turn = [*prompt, *done[0].tokens, 5, 6]
            await engine.generate(ask("turn", turn, new=1))
            assert rows[0] == len(turn) - (len(turn) - 3) // PAGE * PAGE
            pool = engine._scheduler._pool
            assert pool.available == pool.count - 1, "nobody holds a page"
            await engine.load(b.update(2))
            rows.clear()
            await engine.generate(ask("turn", turn, new=1))
            assert rows[0] == len(turn), "new weights: nothing is shared"

    bench().run(go)


def test_a_stop_is_noticed_one_pass_late_and_its_surplus_dropped(bench, ask):
    async def go(b):
        async with b.engine(slots=1, paged=True) as engine:
            completion = await engine.generate(ask("a", new=12))
            stop = next(i for i, t in enumerate(completion.tokens) if i > 2 and t not in completion.tokens[:i])
            rows = watched(engine)
            first = ask("a", new=12, stop_token_ids=(completion.tokens[stop],))
            ended, after = await asyncio.gather(engine.generate(first), engine.generate(ask("b", new=3)))
            assert (ended.tokens, ended.finish) == (completion.tokens[: stop + 1], "stop")
            assert len(ended.log_probs) == len(ended.versions) == stop + 1
            assert len(after.tokens) == 3
            prefill, steps, surplus = 1, stop, 1
            assert len(rows) == prefill + steps + surplus + 3
            rows.clear()
            await engine.generate(ask("c", new=5))
            assert len(rows) == 5, "a length is known ahead: no surplus"

    bench().run(go)


def test_the_youngest_give_up_their_pages_where_none_is_left(bench, ask, monkeypatch):
    """Memory for about two sequences of five; all of them end as they would have, and the pool is whole again."""

    async def go(b):
        asked = [ask(str(i), range(3, 20 + i), new=100) for i in range(5)]
        async with b.engine(slots=5, paged=True) as roomy, b.engine(slots=5, context_len=800, paged=True) as tight:
            wanted = await asyncio.gather(*(roomy.generate(r) for r in asked))
            size = tight._scheduler.served.position_bytes * PAGE
            monkeypatch.setattr(paged, "free_memory", lambda device, own: 40 * size)
            retracted = []
            youngest = tight._scheduler._retract_youngest
            monkeypatch.setattr(tight._scheduler, "_retract_youngest", lambda: retracted.append(youngest()))
            done = await asyncio.gather(*(tight.generate(r) for r in asked))
            assert [one.tokens for one in done] == [one.tokens for one in wanted]
            assert retracted
            assert tight._scheduler._pool.count == 20
            assert tight._scheduler._pool.available == 19
            with pytest.raises(EngineError, match="ENG05"):
                await tight.generate(ask("large", [5] * 700, new=1))
            assert (await tight.generate(asked[0])).tokens == wanted[0].tokens

    bench().run(go)


@pytest.mark.parametrize("mode", ["keep", "retract", "abort"])
def test_a_pause_in_the_middle_changes_no_token(bench, ask, mode):
    async def go(b):
        async with b.engine(slots=2, paged=True) as engine:
            asked = [ask(str(i), new=80) for i in range(4)]
            wanted = await asyncio.gather(*(engine.generate(r) for r in asked))
            tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
            while not (engine._scheduler._slots.active & (engine._scheduler._slots.position > 8)).any():
                await asyncio.sleep(0.001)
            await engine.pause(mode)
            await engine.load(b.update(1))
            await engine.resume()
            done = await asyncio.gather(*tasks)
            for one, whole, r in zip(done, wanted, asked, strict=True):
                assert one.tokens == whole.tokens[: len(one.tokens)]
                assert one.versions == sorted(one.versions)
                if mode == "abort":
                    rest = replace(r, tokens=[*r.tokens, *one.tokens], kept=len(one.tokens))
                    rest = replace(rest, params=replace(r.params, max_new_tokens=80 - len(one.tokens)))
                    assert one.tokens + (await engine.generate(rest)).tokens == whole.tokens
                else:
                    assert len(one.tokens) == 80
            assert set(done[0].versions) == ({0} if mode == "abort" else {0, 1})

    bench().run(go)


def test_only_the_request_whose_logits_are_not_finite_fails(bench, ask):
    b = bench("llama")
    with torch.no_grad():
        b.model.model.embed_tokens.weight[83] = float("inf")

    async def go(b):
        async with b.engine(slots=2, paged=True) as engine:
            bad, good = await asyncio.gather(
                engine.generate(ask("bad", [5, 83, 6])),
                engine.generate(ask("good", [5, 9, 6])),
                return_exceptions=True,
            )
            assert isinstance(bad, EngineError)
            assert bad.code == "ENG80"
            alone = await engine.generate(ask("good", [5, 9, 6]))
            assert alone.tokens == good.tokens

    b.run(go)


def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(bench, ask):
    async def go(b):
        async with b.engine(slots=1, paged=True) as engine:
            want = await engine.generate(ask("short", new=3))
            decode, calls = engine._scheduler._runner.decode, []

            def failing(slots):
                calls.append(slots)
                if len(calls) == 6:
                    raise RuntimeError("no more")
                return decode(slots)

            engine._scheduler._runner.decode = failing
            asked = [ask("short", new=3), ask("long", new=50), ask("waiting")]
            short, *lost = await asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True)
            assert short.tokens == want.tokens
            assert [error.code for error in lost] == ["ENG84", "ENG84"]
            assert (await engine.generate(ask("short", new=3))).tokens == want.tokens

    bench().run(go)


def test_weights_multiplied_as_one_lie_behind_one_another_and_loads_write_into_them(bench, ask):
    """Nothing is held twice; a `shared` update that lies so itself is served where it is."""

    async def go(b):
        async with b.engine(paged=True) as engine:
            before = await engine.generate(ask())
            plan, twin = engine._scheduler.served.plan, engine._scheduler.served._twin
            layer = plan._layers[0]
            assert layer.qkv.weight.data_ptr() == twin.model.model.layers[0].self_attn.q_proj.weight.data_ptr()
            assert not engine._scheduler.served.moved()
            changed = {name: tensor * 1.5 for name, tensor in b.model.state_dict().items()}
            await engine.load(b.update(1, tensors=changed))
            assert not engine._scheduler.served.moved()
            assert (await engine.generate(ask())).tokens != before.tokens
            await engine.load(b.update(2))
            assert (await engine.generate(ask())).tokens == before.tokens
            joined = torch.cat([changed[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"])
            parts = dict(zip("qkv", joined.split([64, 32, 32]), strict=True))
            changed |= {f"model.layers.0.self_attn.{n}_proj.weight": part for n, part in parts.items()}
            await engine.load(b.update(3, "shared", changed))
            assert layer.qkv.weight.data_ptr() == joined.data_ptr()
            norm = "model.norm.weight"
            assert twin.model.state_dict()[norm].data_ptr() == changed[norm].data_ptr()

    bench().run(go)


def test_a_released_cache_comes_back_for_shorter_requests(bench, ask):
    async def go(b):
        async with b.engine(context_len=700, paged=True) as engine:
            short = await engine.generate(ask())
            await engine.generate(ask("long", [5] * 600))
            await engine.release({"kv"})
            await engine.reacquire({"kv"})
            assert (await engine.generate(ask())).tokens == short.tokens
            assert engine._scheduler.tokens < 300

    bench().run(go)


def test_no_memory_of_weights_outlives_their_release(bench, ask):
    async def go(b):
        async with b.engine(paged=True) as engine:
            before = await engine.generate(ask())
            twin = engine._scheduler.served._twin
            storages = [StorageWeakRef(p.untyped_storage()) for p in twin.model.parameters()]
            await engine.pause("retract")
            await engine.release({"weights"})
            assert all(storage.expired() for storage in storages)
            await engine.reacquire({"weights"})
            await engine.load(b.update(1))
            await engine.resume()
            assert (await engine.generate(ask())).tokens == before.tokens

    bench().run(go)


def test_a_step_whose_copy_fails_leaves_nothing_to_the_next(bench, ask):
    """The slots that take part are sent again; of what a sequence left unsent, the next one in its slot wins."""

    async def go(b):
        async with b.engine(slots=1, paged=True) as engine:
            want = await engine.generate(ask())
            await engine.release({"kv"})
            await engine.reacquire({"kv"})
            await engine.generate(ask(new=1))  # a prefill and no step
            runner = engine._scheduler._runner
            send, decode = runner._send, runner.decode

            def failing(*arrays):
                runner._send = send
                raise RuntimeError("no more")

            def first(slots):
                runner._send, runner.decode = failing, decode
                return decode(slots)

            runner.decode = first
            with pytest.raises(EngineError, match="no more"):
                await engine.generate(ask())
            runner._send = failing  # now with a sequence and its pages unsent
            with pytest.raises(EngineError, match="no more"):
                await engine.generate(ask())
            assert list(runner._fresh) == [0]
            assert (await engine.generate(ask())).tokens == want.tokens
            assert not runner._fresh
            runner.mark(0, 3, 5)
            runner.widen(runner._columns.shape[1] + 8)
            runner.mark(0, 3, 2)
            assert len(runner._marks) == 1
            runner._send()
            assert runner._tables[0, 3] == 2

    bench().run(go)


def test_growth_that_ran_out_of_memory_halfway_goes_on_with_less(bench, ask, monkeypatch):
    widen, calls = Runner.widen, []

    def short(self, width):
        calls.append(self)
        if len(calls) == 1:
            raise MemoryError
        widen(self, width)

    monkeypatch.setattr(Runner, "widen", short)

    async def go(b):
        async with b.engine(slots=8, paged=True) as engine:
            await engine.generate(ask())
            pool = engine._scheduler._pool
            assert len(calls) == 2
            assert pool.available == pool.count - 1 == len({pool.take() for _ in range(pool.available)})

    bench().run(go)
    cache = PagedCache([LayerShape(1, 4, 4)] * 2, 2, torch.float32, "cpu")
    cache.keys[0] = cache.keys[0].new_ones(6, PAGE, 1, 4)  # by a try that came no further
    long = cache.keys[0]
    cache.grow(4)
    assert cache.keys[0] is long
    assert [len(tensor) for tensor in (*cache.keys, *cache.values)] == [6, 4, 4, 4]


def test_scores_that_fail_give_their_pages_back(bench, ask):
    async def go(b):
        async with b.engine(paged=True) as engine:
            want = await engine.score([5, 6, 7], 1)
            scheduler = engine._scheduler
            score = scheduler._runner.score

            def failing(*args):
                raise RuntimeError("no more")

            scheduler._runner.score = failing
            with pytest.raises(RuntimeError, match="no more"):
                await engine.score([5, 6, 7], 1)
            assert scheduler._pool.available == scheduler._pool.count - 1
            scheduler._runner.score = score
            np.testing.assert_array_equal(await engine.score([5, 6, 7], 1), want)

    bench().run(go)


def test_a_capture_that_runs_out_of_memory_is_tried_again_and_another_failure_ends_them(
    bench, ask, monkeypatch, caplog
):
    """With torch's side of a capture replaced: it enters a stream of its own, fails, and does not leave it."""
    streams, errors, tried = ["main"], [MemoryError("short"), RuntimeError("not allowed")], []

    @contextlib.contextmanager
    def graph(_, pool, capture_error_mode):
        streams.append("side")
        tried.append(pool)
        raise errors[len(tried) - 1]
        yield

    monkeypatch.setattr(replay, "RETRY", 5)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)

    async def go(b):
        async with b.engine(slots=1, paged=True) as engine:
            want = await engine.generate(ask(new=30))
            runner = engine._scheduler._runner
            runner._captures = True
            assert (await engine.generate(ask(new=30))).tokens == want.tokens
            assert streams == ["main", "side", "main", "side", "main"]
            assert len(set(tried)) == 2, "a pool ends with its graphs"
            assert not runner._captures

    bench().run(go)
    assert [record.levelname for record in caplog.records if "not captured" in record.message] == ["WARNING"] * 2
