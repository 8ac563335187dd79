"""Packs and optimizer steps worked by hand; nothing lost, nothing doubled, whatever the ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformers import LlamaConfig

from slime_core.planning.fsdp import micro_batch_tokens
from slime_core.planning.sizes import ModelConfig, ModelSizes
from slime_core.trainers import data_parallel
from slime_core.trainers.data_parallel import BatchSplit, DataParallelRank, rows_of
from slime_core.trainers.packing import split_rollouts
from slime_core.types import Batch
from slime_core.weights.flops import Flops

pytestmark = pytest.mark.unit


def batch_of(prompt_lengths, responses, rollout=None, mask=None, prompts=None):
    """Tokens 0, 1, 2, ...; samples with the same name in ``prompts`` have the prompt of the first of them."""
    lengths = np.add(prompt_lengths, responses)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.int32)
    for i, name in enumerate(prompts or []):
        first, count = prompts.index(name), prompt_lengths[i]
        tokens[offsets[i] : offsets[i] + count] = tokens[offsets[first] : offsets[first] + count]
    count = int(np.sum(responses))
    return Batch(
        version=0,
        sample_ids=[f"s{i}" for i in range(len(lengths))],
        tasks=["default"] * len(lengths),
        group=np.zeros(len(lengths), np.int64),
        rollout=np.arange(len(lengths)) if rollout is None else np.array(rollout),
        reward=np.zeros(len(lengths)),
        tokens=tokens,
        offsets=offsets,
        loss_mask=np.ones(count, np.float32) if mask is None else np.array(mask, np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(responses)]).astype(np.int64),
        columns={"advantages": np.arange(count, dtype=np.float32)},
        temperature=np.arange(1, len(lengths) + 1, dtype=np.float32),
    )


def pack(batch, *, max_tokens, rank=0, world=1, alone=False, **settings):
    """A rank's micro-batches, ``response`` and ``samples`` as places in the whole batch."""
    split = BatchSplit(flops=Flops(token=1.0, pair=0.01), ranks=world, max_tokens=max_tokens, **settings)
    rank_batch = split.partition(batch)[rank]
    steps = data_parallel.pack(rank_batch, max_tokens=max_tokens, alone=alone)
    rows = rows_of(batch.response_offsets, rank_batch.places)
    for micro in (micro for step in steps for micro in step):
        micro.samples, micro.response = rank_batch.places[micro.samples], rows[micro.response]
    return steps


def test_one_sample_is_the_example_of_the_type():
    ((micro,),) = pack(batch_of([2], [3]), max_tokens=10)
    assert micro.tokens.tolist() == [0, 1, 2, 3, 4]
    assert micro.cu_seqlens.tolist() == [0, 5]
    assert micro.predict.tolist() == [1, 2, 3]
    assert micro.target.tolist() == [2, 3, 4]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(micro.weight, [1 / 3] * 3)


def test_two_samples_lie_end_to_end_longest_first():
    # sample 0 has tokens 0 1 (response 1), sample 1 has tokens 2 3 4 5 (response 4 5)
    ((micro,),) = pack(batch_of([1, 2], [1, 2]), max_tokens=10)
    assert micro.samples.tolist() == [1, 0]
    assert micro.tokens.tolist() == [2, 3, 4, 5, 0, 1]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert micro.predict.tolist() == [1, 2, 4]
    assert micro.target.tolist() == [4, 5, 1]
    assert micro.response.tolist() == [1, 2, 0]
    assert micro.columns["advantages"].tolist() == [1, 2, 0]
    assert micro.temperature.tolist() == [2, 2, 1]
    np.testing.assert_allclose(micro.weight, [1 / 4, 1 / 4, 1 / 2])


def packs_of(lengths, max_tokens, world=1, prompts=None):
    batch = batch_of([1] * len(lengths), np.subtract(lengths, 1), prompts=prompts)
    steps = [pack(batch, max_tokens=max_tokens, rank=r, world=world)[0] for r in range(world)]
    return [[m.samples.tolist() for m in rank] for rank in steps]


def test_packs_hold_at_most_the_limit_and_an_oversize_sample_is_alone():
    # 9 | 5 | 4 | 3 2: four packs, and a limit of 5 is enough for them
    assert packs_of([3, 9, 4, 2, 5], 7) == [[[1], [4], [2], [0, 3]]]


def test_packs_are_as_even_as_cutting_the_sorted_row_allows():
    # 10 samples of 10 tokens, 70 a pack would be 7 + 3; two packs of 5 are as few and even
    assert [len(p) for p in packs_of([10] * 10, 70)[0]] == [5, 5]


def test_every_rank_has_as_many_packs_where_samples_allow():
    assert [[len(p) for p in rank] for rank in packs_of([10] * 6, 30, world=3)] == [[2], [2], [2]]


def test_rollouts_are_split_in_batch_order_and_siblings_stay_together():
    batch = batch_of([1] * 5, [1] * 5, rollout=[7, 3, 3, 9, 1])
    assert [s.tolist() for s in split_rollouts(batch, 2, 0)] == [[7, 3], [9, 1]]
    assert [s.tolist() for s in split_rollouts(batch, 1, 3)] == [[7, 3, 9], [1]]
    assert [s.tolist() for s in split_rollouts(batch, 9, 0)] == [[7], [3], [9], [1]]


def test_weights_are_of_the_optimizer_step_that_a_rollout_is_in():
    first, second = pack(batch_of([1] * 3, [1] * 3), max_tokens=100, num_steps=2)
    assert [m.weight.tolist() for m in first] == [[0.5, 0.5]]
    assert [m.weight.tolist() for m in second] == [[1.0]]


def test_alone_gives_one_sequence_a_micro_batch():
    ((*micros,),) = pack(batch_of([1, 1, 1], [1, 2, 3]), max_tokens=100, alone=True)
    assert [m.samples.tolist() for m in micros] == [[2], [1], [0]]


def test_a_rank_without_a_pack_repeats_one_that_no_row_is_trained_on():
    real, filler = (pack(batch_of([2], [3]), max_tokens=10, rank=r, world=2)[0] for r in (0, 1))
    assert len(real) == len(filler) == 1
    assert filler[0].tokens.tolist() == real[0].tokens.tolist()
    assert filler[0].weight.shape == filler[0].target.shape == filler[0].predict.shape == (0,)


def test_an_empty_response_has_no_row():
    ((micro,),) = pack(batch_of([3, 1], [0, 1]), max_tokens=10)
    assert micro.tokens.shape == (5,)
    assert micro.target.shape == (1,)


def test_samples_of_a_prompt_share_its_tokens_in_front_of_all_responses():
    # samples 0 and 2 have the prompt 0 1; sample 1 has its own 4; responses 2 3 | 5 6 | 9
    ((micro,),) = pack(batch_of([2, 1, 2], [2, 2, 1], prompts=["a", "b", "a"]), max_tokens=100)
    assert micro.samples.tolist() == [0, 0, 1, 2]  # the prompt, then each member, longest first
    assert micro.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 9]
    assert micro.cu_seqlens.tolist() == [0, 2, 4, 7, 8]
    assert micro.prefix.tolist() == [-1, 0, -1, 0]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 2]
    assert micro.predict.tolist() == [1, 2, 4, 5, 1]
    assert micro.target.tolist() == [2, 3, 5, 6, 9]
    assert micro.response.tolist() == [0, 1, 2, 3, 4]


def test_a_cut_through_a_group_gives_each_pack_the_prompt():
    # 2 + 3 + 3 = 8 tokens fit in 8, a third response does not
    first, second = pack(batch_of([2, 2, 2], [3, 3, 3], prompts=["a", "a", "a"]), max_tokens=8)[0]
    assert sorted(len(m.tokens) for m in (first, second)) == [5, 8]


def test_whole_sequences_of_a_shared_prompt_take_at_most_twice_the_limit():
    # a prompt of 100 and eight responses of 10 are 180 tokens, but attention reads 880: three of 110 stay under 360
    packs = pack(batch_of([100] * 8, [10] * 8, prompts=["a"] * 8), max_tokens=180)[0]
    assert sorted(len(micro.tokens) for micro in packs) == [120, 130, 130]


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_response_token_is_trained_once_whatever_the_packs(rows, max_tokens, world, steps, alone):
    names, responses, rollouts = zip(*rows)
    batch = batch_of([1 + ord(name) - ord("a") for name in names], responses, rollouts, prompts=list(names))
    kwargs = {"num_steps": steps, "alone": alone}
    ranks = [pack(batch, max_tokens=max_tokens, rank=r, world=world, **kwargs) for r in range(world)]
    whole = pack(batch, max_tokens=10_000, **kwargs)
    assert len({tuple(len(step) for step in rank) for rank in ranks}) == 1, "ranks differ in micro-batches"
    for number, step in enumerate(whole):
        want = {t: w for m in step for t, w in zip(m.response.tolist(), m.weight.tolist())}
        got = [(t, w) for rank in ranks for m in rank[number] for t, w in zip(m.response.tolist(), m.weight.tolist())]
        assert len(got) == len(want)
        assert dict(got) == want
    for micro in (m for rank in ranks for step in rank for m in step):
        check(micro, batch, max_tokens)


def check(micro, batch, max_tokens):
    """Each segment, behind its prefix, is a sample's tokens; predictions stand one place before their targets."""
    spans = list(zip(micro.cu_seqlens.tolist(), micro.cu_seqlens[1:].tolist()))
    sequences = {}
    for (start, stop), prefix, sample in zip(spans, micro.prefix.tolist(), micro.samples.tolist()):
        rows = [*range(*(spans[prefix] if prefix >= 0 else (0, 0))), *range(start, stop)]
        assert micro.position_ids[rows].tolist() == list(range(len(rows)))
        tokens = batch.tokens[batch.offsets[sample] : batch.offsets[sample + 1]].tolist()
        assert micro.tokens[rows].tolist() == tokens[: len(rows)]
        if len(rows) == len(tokens):
            sequences[sample] = rows
    assert len(micro.tokens) <= max_tokens or len(sequences) == 1
    for token, row, target in zip(micro.response.tolist(), micro.predict.tolist(), micro.target.tolist()):
        sample = int(np.searchsorted(batch.response_offsets, token, side="right")) - 1
        place = batch.lengths[sample] - batch.response_lengths[sample] + token - batch.response_offsets[sample]
        assert row == sequences[sample][place - 1]
        assert target == batch.tokens[batch.offsets[sample] + place]


@pytest.mark.parametrize(
    ("shape", "memory", "fused", "wanted"),
    [
        ((576, 1536, 30), 40, True, 16384),
        ((2560, 9728, 36), 140, True, 8192),
        ((2560, 9728, 36), 79, True, 4096),
        ((576, 1536, 30), 140, False, 29696),
        ((64, 128, 2), 79, True, 32768),
    ],
)
def test_a_gpus_micro_batches_are_as_large_as_a_sixth_of_its_memory(shape, memory, fused, wanted):
    hidden, inner, layers = shape
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    tokens = micro_batch_tokens(ModelSizes(ModelConfig.of(config), ()), memory << 30, fused=fused)
    assert tokens == wanted
    dp_rank = DataParallelRank(number=0, size=1, flops=Flops(1, 1), tokens=tokens, context_parallel=2)
    assert dp_rank.most_tokens(SimpleNamespace(max_tokens_per_gpu=0)) == 2 * tokens
    assert dp_rank.most_tokens(SimpleNamespace(max_tokens_per_gpu=100)) == 200
