"""The experts that the embedded engine says it chose: those of the model's own routers, of the weights that chose."""

import asyncio

import numpy as np
import pytest
import torch

from slime_core.protocols import RequestTurn
from slime_core.types import Completion, GenerateRequest, Sample, SamplingParams

pytestmark = pytest.mark.unit

FAMILIES = ("qwen3-moe", "glm4-moe", "gpt-oss", "deepseek-v2")
MORE = {"num_hidden_layers": 3, "num_experts_per_tok": 2}


def own_choice(model, tokens):
    """[T, layers, k], ascending in a row: what transformers' routers choose for one sequence."""
    chosen, handles = [], []
    for module in model.modules():
        if type(module).__name__.lower().endswith("router"):
            handles.append(module.register_forward_hook(lambda m, i, out: chosen.append(out[2])))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, 1).sort(-1).values.numpy()


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_those_of_the_models_own_routers(bench, ask, family, paged):
    """More requests than slots, some of which begin alike, so that caches are copied, shared and taken again."""
    b = bench(family, **MORE)
    prompt = [(7 * i) % 80 + 3 for i in range(40)]
    prompts = [prompt, [*prompt, 9], [*prompt, 9, 4], prompt[:3], [5], [*prompt[:20], 8], prompt]

    async def go(b):
        async with b.engine(slots=3, routing=True, paged=paged) as engine:
            requests = [ask(str(i), tokens, new=5 + 4 * i) for i, tokens in enumerate(prompts)]
            done = await asyncio.gather(*(engine.generate(request) for request in requests))
            return done, engine.abilities

    done, abilities = b.run(go)
    assert "routed_experts" in abilities
    for tokens, one in zip(prompts, done, strict=True):
        assert one.routed_experts.dtype == np.uint8
        expected = own_choice(b.model, [*tokens, *one.tokens[:-1]])
        np.testing.assert_array_equal(np.sort(one.routed_experts, -1), expected)


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_experts_that_older_weights_chose_stay_when_newer_ones_compute_the_sequence_again(bench, ask, paged):
    b = bench("qwen3-moe", num_hidden_layers=2, num_experts=8)
    newer = bench("qwen3-moe", num_hidden_layers=2, num_experts=8, seed=1).model.state_dict()
    tokens = list(range(5, 25))

    async def go(b):
        async with b.engine(routing=True, paged=paged) as engine:
            running = asyncio.create_task(engine.generate(ask("a", tokens, new=100)))
            while not (jobs := engine._scheduler.jobs()) or jobs[0].token_time == 0:
                await asyncio.sleep(0)
            await engine.pause("retract")
            await engine.load(b.update(version=1, tensors=newer))
            await engine.resume()
            return await running

    done = b.run(go)
    older = done.versions.count(0)
    assert 0 < older < 100 == len(done.versions)
    sequence = [*tokens, *done.tokens[:-1]]
    rows, kept = np.sort(done.routed_experts, -1), len(tokens) + older - 1
    np.testing.assert_array_equal(rows[:kept], own_choice(b.model, sequence[:kept]))
    b.model.load_state_dict(newer)
    assert len(rows) == len(sequence)
    assert not np.array_equal(rows[:kept], own_choice(b.model, sequence)[:kept]), "both weights choose alike"


def test_an_engine_that_records_nothing_and_an_evaluation_have_no_experts(bench, ask):
    b = bench("qwen3-moe")

    async def go(b):
        async with b.engine() as plain, b.engine(routing=True) as engine:
            return await plain.generate(ask("a")), await engine.generate(ask("eval/x/0"))

    assert [one.routed_experts for one in b.run(go)] == [None, None]


def test_pieces_of_a_request_keep_the_rows_of_those_that_came_first():
    """A prompt of 2, pieces of 2 and 1 tokens; the second piece routes all tokens before its own anew."""

    def piece(tokens, rows):
        experts = np.array(rows, dtype=np.uint8).reshape(-1, 1, 1)
        return Completion(
            id="a", tokens=tokens, log_probs=[0.0] * len(tokens), plain_log_probs=[], finish="abort",
            versions=[0] * len(tokens), routed_experts=experts,
        )  # fmt: skip

    pieces = [piece([5, 6], [0, 1, 2]), piece([7], [9, 9, 9, 3])]
    request = GenerateRequest(id="a", tokens=[3, 4], params=SamplingParams(max_new_tokens=3), seed=1)
    done = RequestTurn(request=request, pieces=pieces, finish="stop").completion(None)
    assert done.routed_experts.ravel().tolist() == [0, 1, 2, 3]
    pieces[0].routed_experts = None  # lost by an engine: what later weights chose for its tokens is not theirs
    assert RequestTurn(request=request, pieces=pieces, finish="stop").completion(None).routed_experts is None


def rows(*experts):
    """The experts of tokens, one layer, one expert."""
    return np.array(experts, dtype=np.uint8).reshape(-1, 1, 1)


def test_a_sample_keeps_the_experts_of_its_tokens_when_turns_are_added_and_cut():
    """A prompt of 2; the second turn, which routed all tokens anew, is cut back to its observation."""
    sample = Sample(tokens=[3, 4])
    sample.append_response([5, 6], [-0.1] * 2, version=0, routed_experts=rows(0, 1, 2))
    sample.append_response([7], mask=0)
    sample.append_response([8], [-0.1], version=1, routed_experts=rows(9, 9, 9, 3, 4))
    assert sample.rollout_routed_experts.ravel().tolist() == [0, 1, 2, 3, 4]
    sample.truncate_response(1, "")
    assert sample.rollout_routed_experts.ravel().tolist() == [0, 1, 2]


def test_experts_that_an_earlier_turn_lost_are_not_replaced_by_those_of_a_later_one():
    sample = Sample(tokens=[3, 4])
    sample.append_response([5, 6], [-0.1] * 2, version=0)
    sample.append_response([8], [-0.1], version=1, routed_experts=rows(0, 1, 2, 3))
    assert sample.rollout_routed_experts is None
