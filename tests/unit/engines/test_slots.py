"""Seats, what they share, and the cache's memory."""

import asyncio
import math

import numpy as np
import pytest
import torch

from slime_core.engines.local.attention import reach
from slime_core.engines.local.slots import KVCache, LayerShape, Slots, check_size, fitting, make_job, position_bytes
from slime_core.errors import EngineError
from slime_core.memory import resident_memory

pytestmark = pytest.mark.unit


@pytest.fixture
def take(ask):
    def take(slots, slot, tokens):
        loop = asyncio.new_event_loop()
        job = make_job(ask(tokens=tokens), loop.create_future(), vocab_size=100, context_len=50, eos=())
        loop.close()
        slots.take(slot, job, np.asarray(tokens))
        return job

    return take


def test_common_beginnings_are_counted_up_to_what_the_cache_holds(take):
    slots = Slots(3, 64)
    take(slots, 0, [1, 2, 3, 4, 5])  # caches 1 2 3 4: the last token is fed by the first step
    take(slots, 1, [1, 2, 9])
    assert slots.shared(np.array([1, 2, 3, 4, 5, 6])).tolist() == [4, 2, 0]
    assert slots.shared(np.array([1, 2])).tolist() == [2, 2, 0]
    assert slots.shared(np.array([], dtype=np.int64)).tolist() == [0, 0, 0]


def test_new_weights_end_sharing_also_for_sequences_that_go_on(take):
    slots = Slots(2, 64)
    take(slots, 0, [1, 2, 3])
    slots.forget()
    slots.advance(np.array([0]), np.array([7]), 2)
    assert slots.shared(np.array([1, 2, 3])).tolist() == [0, 0]
    slots.give_up(0)
    take(slots, 0, [1, 2, 3])
    assert slots.shared(np.array([1, 2, 3])).tolist() == [2, 0]


def test_a_job_that_gives_up_its_slot_keeps_what_was_drawn_and_goes_on_from_it(take):
    slots = Slots(1, 64)
    job = take(slots, 0, [1, 2])
    for token in (5, 6):
        slots.advance(np.array([0]), np.array([token]), 3)
    assert slots.give_up(0) is job
    assert (job.completion.tokens, job.completion.versions) == ([5, 6], [3, 3])
    slots.take(0, job, job.history())
    slots.advance(np.array([0]), np.array([7]), 4)
    assert slots.budget[0] == 12 - 3
    slots.give_up(0)
    assert (job.completion.tokens, job.completion.versions) == ([5, 6, 7], [3, 3, 4])


def test_a_moved_sequence_takes_its_state_along(take):
    slots = Slots(3, 64)
    job = take(slots, 2, [1, 2])
    slots.advance(np.array([2]), np.array([5]), 3)
    slots.move(2, 0)
    assert (slots.rows, slots.active.tolist()) == (1, [True, False, False])
    assert slots.give_up(0) is job
    assert job.completion.tokens == [5]


def test_far_rows_attend_apart_where_few_are_long():
    """63 rows of 40 columns and one of 500: 64 * 64 + 3 * 512 + 1500 is less than 64 * 512."""
    positions = np.full(64, 39)
    positions[17] = 499
    short, longest, far = reach(positions, 64)
    assert (short, longest, far.tolist()) == (64, 512, [17])
    assert reach(np.full(64, 499), 64) == (512, 512, None)
    assert reach(np.array([], dtype=np.int64), 16) == (32, 32, None)


def test_a_sequence_that_does_not_fit_says_how_large_its_cache_is():
    with pytest.raises(EngineError, match="ENG05") as caught:
        check_size(40960, position_bytes([LayerShape(8, 128, 128)] * 28, torch.float32), 16 << 30)
    assert "rollout_max_context_len" in caught.value.fix
    assert "17.5 GiB" in caught.value.what


@pytest.mark.parametrize(
    ("positions", "sequences", "tokens"),
    [
        pytest.param(65 * 1025, 64, 1024, id="all that responses may need"),
        pytest.param(65 * 1024, 64, 384, id="longer slots as sequences grow"),
        pytest.param(65 * 384, 64, 300, id="just what is needed"),
        pytest.param(40 * 385, 39, 384, id="fewer slots"),
        pytest.param(2 * 321, 1, 300, id="one slot"),
        pytest.param(300, 1, 300, id="one slot, whatever is free"),
        pytest.param(math.inf, 64, 1024, id="no cache at all"),
    ],
)
def test_slots_are_as_many_and_as_long_as_requests_need_and_memory_holds(positions, sequences, tokens):
    """300 tokens are needed, a request may come to 1000, slots have 128; slots are whole blocks and one of scratch."""
    size = fitting(300, 1000, sequences=64, tokens=128, context_len=8192, positions=positions)
    assert size == (sequences, tokens)
    assert fitting(300, 1000, sequences=64, tokens=128, context_len=1000, positions=math.inf) == (64, 1000)


def test_a_longer_cache_holds_what_it_held_and_zeros():
    cache = KVCache([LayerShape(2, 16, 16), LayerShape(2, 16, 8)], 2, 32)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1.0)
    cache.grow(100, [32, 5, 0])
    assert (cache.length, cache.scratch) == (129, 128)
    for tensor in (*cache.keys, *cache.values):
        assert tensor.shape[2] == 129
        assert tensor[:, 0, :, 0].sum(1).tolist() == [32, 5, 0]
    assert cache.by_position[0][0, 0, 1].data_ptr() == cache.values[0].data_ptr()


def test_memory_is_taken_by_positions_that_are_written_not_by_whole_slots():
    """Rows of 2 MiB, which a huge page would take whole: 256 of them, a position written in each."""

    cache = KVCache([LayerShape(8, 64, 64)], 15, 8191)
    before = resident_memory()
    cache.by_position[0][:, 5] = 1.0
    assert resident_memory() - before < 16 << 20


def test_the_cache_is_aligned_zero_and_copied_by_positions():
    cache = KVCache([LayerShape(2, 16, 8)], 3, 40)
    assert cache.keys[0].shape == (4, 2, 65, 16)
    assert cache.keys[0].dtype == torch.float32
    assert cache.keys[0].data_ptr() % 64 == 0
    assert not cache.keys[0].any()
    cache.keys[0][0] = 1.0
    cache.copy(0, 2, 3, 5)
    assert cache.keys[0][2].sum() == 2 * 2 * 16
    cache.clear(2)
    assert not cache.keys[0][2].any()
