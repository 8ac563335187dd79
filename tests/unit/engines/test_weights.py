"""Loading: shared storage, copies, casts, what does not fit, and numbers that are not finite."""

import asyncio
import zlib

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from slime_core.engines.local.twin import Twin
from slime_core.errors import EngineError
from slime_core.testing.families import family_config
from slime_core.types import WeightUpdate

pytestmark = pytest.mark.unit


def crc(tensor):
    return f"{zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes()):08x}"


@pytest.mark.parametrize("name", ["qwen3", "neox"])
def test_shared_weights_are_the_trainers_own_storage(bench, ask, name):
    """A step in place is served after the next load, with nothing copied into the module."""

    async def go(b):
        async with b.engine(load=False) as engine, b.engine() as fresh:
            live = {key: tensor.clone() for key, tensor in b.model.state_dict().items()}
            await engine.load(b.update(1, "shared", live))
            before = await engine.generate(ask())
            served = engine._scheduler.served._twin.model.state_dict()
            assert all(served[key].data_ptr() == live[key].data_ptr() for key in live)
            for tensor in live.values():
                tensor.add_(torch.linspace(-0.2, 0.2, tensor.shape[-1]))
            await engine.load(b.update(2, "shared", live))
            after = await engine.generate(ask())
            await fresh.load(b.update(2, "tensors", live))
            want = await fresh.generate(ask())
            assert (after.tokens, after.log_probs) == (want.tokens, want.log_probs)
            assert after.log_probs != before.log_probs
            assert await engine.fingerprints() == {key: crc(tensor) for key, tensor in live.items()}

    bench(name).run(go)


def test_copied_weights_do_not_follow_the_trainer(bench, ask):
    async def go(b):
        async with b.engine(load=False) as engine:
            live = {key: tensor.clone() for key, tensor in b.model.state_dict().items()}
            await engine.load(b.update(1, "tensors", live))
            before = await engine.generate(ask())
            for tensor in live.values():
                tensor.zero_()
            engine._scheduler.forget()
            assert (await engine.generate(ask())).log_probs == before.log_probs

    bench().run(go)


@pytest.mark.parametrize("family", ["glm4-moe", "minimax-m2"])
def test_an_engine_in_half_precision_keeps_a_step_of_a_router_bias(family):
    """Near 8 bfloat16 has steps of 0.06, and a bias moves by 0.001."""
    twin = Twin(family_config(family, 40), torch.bfloat16, "cpu", False)
    weights = {name: torch.zeros_like(tensor) for name, tensor in twin.model.state_dict().items()}
    biases = {
        name: torch.full_like(t, 8.001, dtype=torch.float32)
        for name, t in weights.items()
        if name.endswith("correction_bias")
    }
    twin.load(WeightUpdate(version=1, epoch=0, transport="tensors", tensors=weights | biases))
    assert biases
    assert all(torch.equal(twin.model.state_dict()[name], bias) for name, bias in biases.items())


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next", "glm4-moe", "minimax-m2", "llama"])
def test_weights_may_come_as_the_model_folder_has_them(family):
    twin = Twin(family_config(family, 40), torch.float32, "cpu", False)
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(t.shape, generator=generator) for n, t in twin.model.state_dict().items()}
    stored = revert_weight_conversion(twin.model, weights)
    twin.load(WeightUpdate(version=1, epoch=0, transport="tensors", tensors=stored))
    served = twin.model.state_dict()
    assert (stored.keys() == weights.keys()) == (family == "llama")
    assert all(torch.equal(served[name], weight) for name, weight in weights.items())


def test_a_copy_after_shared_storage_leaves_the_trainers_tensors_alone(bench):
    async def go(b):
        async with b.engine(load=False) as engine:
            live = {key: tensor.clone() for key, tensor in b.model.state_dict().items()}
            await engine.load(b.update(1, "shared", live))
            await engine.load(b.update(2, "tensors", {key: torch.zeros_like(t) for key, t in live.items()}))
            assert all((live[key] == tensor).all() for key, tensor in b.model.state_dict().items())
            assert set((await engine.fingerprints()).values()) >= {crc(torch.zeros(64))}

    bench().run(go)


@pytest.mark.parametrize("transport", ["shared", "tensors"])
def test_bfloat16_holds_one_cast_copy_that_is_refreshed(bench, ask, transport):
    async def go(b):
        live = {key: tensor.clone() for key, tensor in b.model.state_dict().items()}
        async with b.engine(load=False, dtype="bfloat16") as engine:
            await engine.load(b.update(1, transport, live))
            first = engine._scheduler.served._twin.model.state_dict()
            assert {t.dtype for t in first.values()} == {torch.bfloat16}
            before = await engine.generate(ask())
            for tensor in live.values():
                tensor.mul_(1.5)
            await engine.load(b.update(2, transport, live))
            second = engine._scheduler.served._twin.model.state_dict()
            assert all(first[key].data_ptr() == second[key].data_ptr() for key in first)
            assert await engine.fingerprints() == {key: crc(t.bfloat16()) for key, t in live.items()}
            assert (await engine.generate(ask())).log_probs != before.log_probs

    bench().run(go)


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_may_come_under_either_name(bench, ask, left_out):
    async def go(b):
        async with b.engine() as whole, b.engine(load=False) as engine:
            tensors = {key: t for key, t in b.model.state_dict().items() if key != left_out}
            await engine.load(b.update(0, "shared", tensors))
            assert (await engine.generate(ask())).log_probs == (await whole.generate(ask())).log_probs
            model = engine._scheduler.served._twin.model
            assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    bench("qwen2").run(go)


def spoil(tensors, how):
    tensors = dict(tensors)
    if how == "missing":
        del tensors["model.norm.weight"]
    elif how == "unknown":
        tensors["model.extra"] = torch.zeros(1)
    else:
        tensors["model.norm.weight"] = torch.zeros(3)
    return tensors


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("missing", "1 missing: model.norm.weight"),
        ("unknown", "not in the model: model.extra"),
        ("shape", "is [3], not [64]"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_the_old_ones_stay(bench, ask, how, text):
    async def go(b):
        async with b.engine() as engine:
            before = await engine.generate(ask())
            with pytest.raises(EngineError, match="ENG86") as caught:
                await engine.load(b.update(7, tensors=spoil(b.model.state_dict(), how)))
            assert text in caught.value.why
            assert engine.version == 0
            assert (await engine.generate(ask())).log_probs == before.log_probs

    bench().run(go)


def test_an_unknown_transport_is_refused(bench):
    async def go(b):
        async with b.engine() as engine:
            with pytest.raises(EngineError, match="ENG86"):
                await engine.load(WeightUpdate(version=1, epoch=0, transport="carrier pigeon"))

    bench().run(go)


@pytest.mark.parametrize("name", ["qwen3", "neox", "mamba"])
def test_logits_that_are_not_finite_fail_the_request_and_leave_nothing_behind(bench, ask, name):
    """One poisoned token embedding: only the request that uses it fails, and its slot serves others as before."""

    async def go(b):
        async with b.engine(slots=2) as engine:
            want = await engine.generate(ask("fine"))
            tensors = {key: tensor.clone() for key, tensor in b.model.state_dict().items()}
            embedding = next(key for key in tensors if "embed" in key)
            tensors[embedding][40] = torch.nan
            await engine.load(b.update(1, tensors=tensors))
            asked = [ask("bad", [5, 40, 6]), ask("fine"), ask("worse", [40])]
            bad, fine, worse = await asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True)
            for error, who in ((bad, "bad"), (worse, "worse")):
                assert isinstance(error, EngineError)
                assert error.code == "ENG80"
                assert f"request {who}" in error.where
                assert "version 1" in error.where
            assert fine.log_probs == want.log_probs
            again = await asyncio.gather(*(engine.generate(ask("fine")) for _ in range(2)))
            assert [one.log_probs for one in again] == [want.log_probs] * 2

    bench(name, tie_word_embeddings=False).run(go)


def test_an_aborted_prompt_that_was_not_finite_spoils_no_later_request(bench, ask):
    """Nothing was drawn from it, so nothing showed; the slot's next sequence is shorter and must not see it."""

    async def go(b):
        async with b.engine(slots=1) as engine:
            want = await engine.generate(ask("fine"))
            tensors = {key: tensor.clone() for key, tensor in b.model.state_dict().items()}
            tensors["model.embed_tokens.weight"][40] = torch.nan
            await engine.load(b.update(1, tensors=tensors))
            engine._scheduler.served.decode, decode = (
                None,
                engine._scheduler.served.decode,
            )  # the step after the prefill fails
            with pytest.raises(EngineError, match="ENG84"):
                await engine.generate(ask("bad", [5, 6, 7, 8, 40, 9]))
            engine._scheduler.served.decode = decode
            assert (await engine.generate(ask("fine"))).log_probs == want.log_probs

    bench().run(go)


def test_scores_that_are_not_finite_are_errors(bench):
    async def go(b):
        async with b.engine() as engine:
            want = await engine.score([5, 6, 7], 1)
            tensors = {key: tensor.clone() for key, tensor in b.model.state_dict().items()}
            tensors["model.embed_tokens.weight"][40] = torch.nan
            await engine.load(b.update(1, tensors=tensors))
            with pytest.raises(EngineError, match="ENG80"):
                await engine.score([5, 6, 7, 8, 40, 9], 1)
            assert (await engine.score([5, 6, 7], 1) == want).all()

    bench(tie_word_embeddings=False).run(go)


def test_weights_that_are_all_broken_can_be_replaced(bench, ask):
    async def go(b):
        async with b.engine() as engine:
            want = await engine.generate(ask())
            broken = {key: torch.full_like(t, torch.nan) for key, t in b.model.state_dict().items()}
            await engine.load(b.update(1, tensors=broken))
            asked = [ask(str(i)) for i in range(4)]
            done = await asyncio.gather(*(engine.generate(r) for r in asked), return_exceptions=True)
            assert all(isinstance(error, EngineError) for error in done)
            await engine.load(b.update(2))
            again = await asyncio.gather(*(engine.generate(ask()) for _ in range(4)))
            assert [one.log_probs for one in again] == [want.log_probs] * 4

    bench().run(go)


def test_versions_are_stamped_on_each_token_of_a_request_that_sees_two(bench, ask):
    async def go(b):
        async with b.engine(epoch=5) as engine:
            running = asyncio.create_task(engine.generate(ask("a", new=200)))
            while not engine._scheduler or engine._scheduler._slots.position[0] < 5:
                await asyncio.sleep(0.001)
            await engine.pause("keep")
            await engine.load(b.update(3))
            await engine.resume()
            done = await running
            assert done.epoch == 5
            assert done.versions == sorted(done.versions)
            assert set(done.versions) == {0, 3}
            assert len(done.versions) == 200

    bench().run(go)
