"""Passes beside each other: how rows are cut, that each has one thread, and that no bit depends on them."""

import asyncio
import itertools
import threading

import pytest
import torch

from slime_core.engines.local.attention import RowCounts, Segment
from slime_core.engines.local.lanes import Lanes, passes, shares

pytestmark = pytest.mark.unit

COUNTS = RowCounts((16, 32, 48, 64), 64)


@pytest.mark.parametrize(
    ("rows", "lanes", "bounds"),
    [
        (16, 2, [0, 16]),
        (17, 2, [0, 16, 32]),
        (40, 2, [0, 32, 48]),
        (64, 2, [0, 32, 64]),
        (64, 1, [0, 64]),
        (65, 1, [0, 64, 80]),
        (200, 2, [0, 64, 128, 192, 208]),
        (64, 3, [0, 32, 48, 64]),
    ],
)
def test_rows_are_cut_into_passes_of_allowed_counts(rows, lanes, bounds):
    cut = passes(rows, lanes, COUNTS)
    assert [part.start for part in cut] + [cut[-1].stop] == bounds


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_prompts_are_cut_between_segments_into_about_equal_packs(lanes):
    segments, end = [], 0
    for slot, rows in enumerate([5, 1, 9, 7, 2, 6, 4, 8]):
        segments.append(Segment(slot, 3, end, end + rows))
        end += rows
    parts = shares(segments, lanes)
    assert [segment.slot for part in parts for segment in part] == list(range(8))
    assert len(parts) == lanes
    for part in parts:
        assert part[0].begin == 0
        assert all(one.end == other.begin for one, other in itertools.pairwise(part))
        assert abs(part[-1].end - end / lanes) <= 9
    assert shares(segments[:1], lanes) == [segments[:1]]


def test_a_lane_has_one_thread_and_the_caller_gets_its_own_back():
    before, lanes = torch.get_num_threads(), Lanes(2)
    torch.set_num_threads(2)
    try:
        meeting = threading.Barrier(2, timeout=60)  # breaks if one part waits for the other
        with lanes.alone():
            parts = lanes.map(lambda part: (meeting.wait(), part, torch.get_num_threads())[1:], ["low", "high"])
            assert parts == [("low", 1), ("high", 1)]
        assert torch.get_num_threads() == 2
        assert lanes.map(lambda part: torch.get_num_threads(), ["only"]) == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", ["low", "high"])
def test_a_pass_that_fails_is_raised_after_the_others_have_ended(bad):
    ended = []

    def run(part):
        if part == bad:
            raise ValueError(part)
        ended.append(part)

    with pytest.raises(ValueError, match=bad):
        Lanes(2).map(run, ["low", "high"])
    assert len(ended) == 1


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_bits_are_those_of_one_thread_without_lanes(bench, ask, name):
    """36 sequences that end one by one, with prompts of their own."""
    bits, cut = [], []

    async def go(b):
        asked = [
            ask(
                str(i),
                [(7 * i + j) % 80 + 3 for j in range(1 + 3 * i)],
                new=4 + i // 3,
                temperature=i % 3 / 2,
                top_k=i % 5,
            )
            for i in range(36)
        ]
        async with b.engine(slots=36) as engine:
            served = engine._scheduler.served
            decode = served.decode
            served.decode = lambda slots, at: (cut.append(len(at)), decode(slots, at))[1]
            done = await asyncio.gather(*(engine.generate(r) for r in asked))
            bits.append([(d.tokens, d.log_probs, d.plain_log_probs) for d in done])
            assert torch.equal(
                torch.tensor(await engine.score(asked[5].tokens + done[5].tokens, 16)),
                torch.tensor(done[5].plain_log_probs),
            )

    bench(name).run(go)
    assert set(cut) == {1}
    bench(name, threads=2).run(go)
    assert 2 in cut
    assert bits[0] == bits[1]
