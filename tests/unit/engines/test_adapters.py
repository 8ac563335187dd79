"""Requests under several adapters and the base, side by side, against peft's own models; updates of adapters alone."""

import asyncio
import copy
import re
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from slime_core.errors import EngineError
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase
from slime_core.types import AdapterUpdate, WeightUpdate

pytestmark = pytest.mark.unit

PREFIX = "base_model.model."
CASES = {  # family, plan, options of LoRA, whether the cache lies in pages
    "lean": ("qwen3", "lean", {}, False),
    "lean, biases, some targets": ("qwen2", "lean", {"target_modules": ["q_proj", "v_proj", "down_proj"]}, False),
    "lean, DoRA": ("qwen2", "lean", {"use_dora": True}, False),
    "lean, over a GiB": ("qwen2", "lean", {"use_dora": True, "target_modules": ["q_proj", "o_proj"]}, False),
    "pages": ("qwen3", "lean", {"use_rslora": True}, True),
    "pages, DoRA": ("qwen2", "lean", {"use_dora": True}, True),
    "packed": ("phi3", "packed", {}, False),
    "packed, pages": ("gemma3", "packed", {"use_dora": True}, True),
    "rescan": ("qwen3-next", "rescan", {"target_modules": ["q_proj", "out_proj"]}, False),
}
LENGTHS = (5, 40, 70)


class Peft:
    """peft's model over a bench's, with adapters of random factors."""

    def __init__(self, model, names, seed=0, **options):
        self.config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = peft.get_peft_model(copy.deepcopy(model), self.config, adapter_name=names[0]).eval()
            for name in names[1:]:
                self.model.add_adapter(name, self.config)
            with torch.no_grad():
                for key, parameter in self.model.named_parameters():
                    if "lora_B" in key:
                        parameter.normal_(std=0.3)
                    if "magnitude" in key:
                        parameter.mul_(1 + torch.rand_like(parameter))
        self.names = names

    def updates(self):
        return {name: AdapterUpdate(config=self.config.to_dict(), tensors=self.tensors(name)) for name in self.names}

    def tensors(self, name):
        state = peft.get_peft_model_state_dict(self.model, adapter_name=name)
        return {key.removeprefix(PREFIX): tensor.clone() for key, tensor in state.items()}

    def log_probs(self, tokens, start, adapter):
        with torch.no_grad():
            if adapter == "base":
                with self.model.disable_adapter():
                    logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
            else:
                self.model.set_adapter(adapter or self.names[0])
                logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        picked = torch.log_softmax(logits[start - 1 : -1].double(), -1)
        return picked[range(len(tokens) - start), tokens[start:]].numpy()


def with_adapters(b, own, version=0):
    return replace(b.update(version), adapters=own.updates())


def alone(adapters, version):
    return WeightUpdate(version=version, epoch=0, transport="shared", adapters=adapters)


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_those_of_peft_whatever_runs_beside(bench, ask, case, monkeypatch):
    family, plan, options, pages = CASES[case]
    if "GiB" in case:
        monkeypatch.setattr("slime_core.engines.local.lean.FUSE_BYTES", 0)
    b = bench(family)
    own = Peft(b.model, ["solver", "critic"], **options)

    async def go(b):
        requests = [
            replace(ask(f"{adapter}-{count}", range(3, 3 + count), new=8), adapter=adapter)
            for count in LENGTHS[: 1 if plan == "rescan" else None]
            for adapter in ("solver", "critic", "base", "")
        ]
        async with b.engine(slots=6, load=False, paged=pages) as engine:
            await engine.load(with_adapters(b, own))
            assert engine._scheduler.served.plan.name == plan
            done = await asyncio.gather(*map(engine.generate, requests))
            scored = [
                await engine.score([*r.tokens, *one.tokens], len(r.tokens), adapter=r.adapter)
                for r, one in zip(requests, done, strict=True)
            ]
            return requests, done, scored

    requests, done, scored = b.run(go)
    for r, one, score in zip(requests, done, scored, strict=True):
        expected = own.log_probs([*r.tokens, *one.tokens], len(r.tokens), r.adapter)
        np.testing.assert_allclose(one.plain_log_probs, expected, atol=3e-4, err_msg=r.id)
        np.testing.assert_allclose(score, expected, atol=3e-4, err_msg=f"score of {r.id}")
        if r.adapter == "critic":
            other = own.log_probs([*r.tokens, *one.tokens], len(r.tokens), "solver")
            assert np.abs(expected - other).max() > 0.1, "the adapters are alike, and nothing is tested"


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("phi3", "float32"), ("qwen3", "bfloat16")])
def test_bits_depend_on_the_rows_own_adapter_alone(bench, ask, family, dtype):
    b = bench(family)
    own = Peft(b.model, ["solver", "critic"])

    async def go(b):
        request = replace(ask("a", range(3, 45), new=12), adapter="critic")
        others = [
            replace(ask(f"{n}", range(3, 45 + n), new=5 + n), adapter=name)
            for n, name in enumerate(["solver", "critic", "base", "solver", ""])
        ]
        async with b.engine(slots=6, load=False, dtype=dtype) as engine:
            await engine.load(with_adapters(b, own))
            assert "batch_invariant" in engine.abilities
            first = await engine.generate(request)
            _, among = (await asyncio.gather(engine.generate(others[0]), engine.generate(request)))[:2]
            crowd = await asyncio.gather(*map(engine.generate, [*others, request]))
            scored = await engine.score([*request.tokens, *first.tokens], 42, adapter="critic")
            return first, among, crowd[-1], scored

    first, *again, scored = b.run(go)
    for one in again:
        assert (one.tokens, one.log_probs) == (first.tokens, first.log_probs)
    assert scored.tolist() == first.plain_log_probs


@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
def test_an_update_of_adapters_alone_is_served_and_after_a_release_the_base_is_needed_again(bench, ask, pages):
    b = bench("qwen2")
    own, later = Peft(b.model, ["default"]), Peft(b.model, ["default"], seed=1)

    async def go(b):
        request = ask("a", range(3, 45))
        async with b.engine(load=False, paged=pages) as engine:
            assert await engine.route("all") is None
            with pytest.raises(EngineError, match="missing"):
                await engine.load(alone(own.updates(), 0))
            await engine.load(with_adapters(b, own))
            route = await engine.route("all")
            assert (route.transport, route.base, route.dtype) == ("tensors", False, "float32")
            done = [await engine.generate(request)]
            await engine.load(alone(later.updates(), 1))
            done.append(await engine.generate(request))
            sums = await engine.fingerprints(["default"])
            await engine.pause("retract")
            await engine.release({"kv", "weights"})
            assert await engine.fingerprints(["default"]) == {}
            await engine.reacquire({"weights"})
            assert await engine.route("all") is None
            with pytest.raises(EngineError, match="missing"):
                await engine.load(alone(later.updates(), 2))
            await engine.load(with_adapters(b, later, 2))
            await engine.reacquire({"kv"})
            await engine.resume()
            done.append(await engine.generate(request))
            assert await engine.fingerprints(["default"]) == sums
            return request, done

    request, done = b.run(go)
    assert [set(one.versions) for one in done] == [{0}, {1}, {2}]
    for one, reference in zip(done, (own, later, later), strict=True):
        expected = reference.log_probs([*request.tokens, *one.tokens], 42, "default")
        np.testing.assert_allclose(one.plain_log_probs, expected, atol=3e-4)


@pytest.mark.parametrize("pages", [False, True], ids=["slots", "pages"])
def test_the_contract_of_engines_is_kept_with_adapters(bench, pages):
    b = bench("qwen3")
    own = Peft(b.model, ["solver", "critic"])

    async def go(b):
        async with b.engine(load=False, paged=pages) as engine:
            await ENGINE_CHECKS[-1](
                EngineCase(engine=engine, update=b.update, prompt=[5, 6, 7], adapters=own.updates, max_new_tokens=20)
            )

    b.run(go)


def _rank(updates):
    return updates | {"critic": replace(updates["critic"], config={**updates["critic"].config, "r": 8})}


def _without_b(updates):
    tensors = {key: one for key, one in updates["critic"].tensors.items() if "layers.1.mlp.up_proj.lora_B" not in key}
    return updates | {"critic": replace(updates["critic"], tensors=tensors)}


def _infinite(updates):
    for tensor in updates["critic"].tensors.values():
        tensor.view(-1)[0] = torch.inf
    return updates


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_rank, "adapters solver and critic differ"),
        (_without_b, "adapter critic that do not fit the model.*1 missing: model.layers.1.mlp.up_proj.lora_B.weight"),
        (_infinite, "not finite"),
        (lambda updates: {"solver": updates["solver"]}, "other adapters than"),
    ],
    ids=["rank", "A without B", "infinite", "another number"],
)
def test_adapters_that_do_not_fit_are_refused(bench, change, text):
    b = bench("qwen3")
    own = Peft(b.model, ["solver", "critic"])

    async def go(b):
        async with b.engine(load=False) as engine:
            await engine.load(with_adapters(b, own))
            with pytest.raises(EngineError) as refusal:
                await engine.load(alone(change(own.updates()), 1))
            error = refusal.value
            assert error.code == "ENG86"
            assert re.search(text, f"{error.what}: {error.why}")

    b.run(go)
