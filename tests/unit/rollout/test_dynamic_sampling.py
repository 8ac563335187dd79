"""Groups whose rewards say nothing are dropped, others take their place, and the run says so where it goes on and on."""

from zlib import crc32

import pytest

from slime_core.errors import TrainerError
from slime_core.rollout.filters import DropLimit
from slime_core.testing.fakes import FakeEngine
from slime_core.types import Sample

pytestmark = pytest.mark.unit

DYNAMIC = ("--dynamic-sampling", "equal_rewards")
JUDGE = """
import slime_core
from slime_core import Drop

kind = lambda position: {0: "flat", 1: "mixed", 2: "filtered"}[position % 3]


@slime_core.hookimpl
def slime_reward(group, ctx):
    flat = kind(group.prompt.position) == "flat"
    return [1.0 if flat or i else 0.0 for i in range(len(group.samples))]


@slime_core.hookimpl
def slime_filter(group, ctx):
    assert len({s.reward for s in group.samples}) > 1, "a filter sees groups that are left"
    return Drop(reason="mine") if kind(group.prompt.position) == "filtered" else None
"""


class Shuffled(FakeEngine):
    """Serves requests late, each by its own number of turns."""

    async def generate(self, request):
        import asyncio

        for _ in range(crc32(request.id.encode()) % 70):
            await asyncio.sleep(0)
        return await super().generate(request)


def test_equal_groups_are_dropped_and_the_next_prompts_take_their_place(collect):
    ran = collect(*DYNAMIC, plugin=JUDGE, steps=3)
    assert ran.ids() == [["main/1", "main/4"], ["main/7", "main/10"], ["main/13", "main/16"]]
    counts = ran.balance()
    assert counts["trained"] == 12
    assert counts["dropped/equal_rewards"] == 6 * 2
    assert counts["dropped/mine"] == 5 * 2
    assert counts["pending"] == 0
    assert sum(sum(c.drops.values()) for c in ran.counts) == 22
    assert sum(c.issued for c in ran.counts) == 17


def test_without_it_equal_groups_train(collect):
    ran = collect(
        plugin=JUDGE.replace("    assert len({s.reward for s in group.samples}) > 1", "    assert True"), steps=1
    )
    assert ran.ids() == [["main/0", "main/1"]]


@pytest.mark.parametrize("over", [(), ("--over-sampling-batch-size", "5", "--partial-rollout")], ids=["plain", "over"])
def test_the_engines_speed_changes_nothing(collect, over):
    one = collect(*DYNAMIC, *over, plugin=JUDGE, steps=4)
    two = collect(*DYNAMIC, *over, steps=4, engine=Shuffled(vocab_size=16))
    assert one.payload() == two.payload()
    assert one.balance() == two.balance()
    assert [dict(c.drops) for c in one.counts] == [dict(c.drops) for c in two.counts]


def test_slimes_own_filter_function_combines_with_it(collect, tmp_path):
    (tmp_path / "keep.py").write_text(
        "def keep(args, samples, **kwargs):\n    return samples[0].group_index % 2 == 0\n"
    )
    ran = collect(*DYNAMIC, "--dynamic-sampling-filter-path", f"{tmp_path / 'keep.py'}:keep", plugin=JUDGE, steps=2)
    assert ran.ids() == [["main/4", "main/10"], ["main/16", "main/22"]]
    counts = ran.balance()
    assert counts["dropped/dynamic_filter"] > 0
    assert counts["dropped/equal_rewards"] > 0


def test_a_group_that_differs_in_its_overlong_punishment_alone_is_dropped(collect):
    flat = """
import slime_core

@slime_core.hookimpl
def slime_reward(group, ctx):
    return [float(group.prompt.position % 2 and i) for i in range(len(group.samples))]
"""
    flags = ("--overlong-buffer-len", "32", "--rollout-max-response-len", "32")
    ran = collect(*DYNAMIC, *flags, plugin=flat, steps=1)
    assert ran.ids() == [["main/1", "main/3"]]
    assert any(s.metadata["reward_terms"]["overlong"] < 0 for g in ran.steps[0] for s in g.samples)


def test_a_group_of_which_one_sample_is_left_has_nothing_to_compare(collect):
    lone = """
import slime_core
from slime_core import Reward

@slime_core.hookimpl
def slime_reward(group, ctx):
    kind = "infra_error" if group.prompt.position == 0 else "score"
    return [Reward(value=0.0), Reward(value=1.0, kind=kind)]
"""
    ran = collect(*DYNAMIC, plugin=lone, steps=1)
    assert ran.ids() == [["main/1", "main/2"]]
    counts = ran.balance()
    assert (counts["dropped/infra_error"], counts["dropped/equal_rewards"]) == (1, 1)


HOPELESS = """
import slime_core

@slime_core.hookimpl
def slime_reward(group, ctx):
    return [0.25 if group.prompt.position >= 3 else float(i) for i in range(len(group.samples))]
"""


@pytest.mark.parametrize("over", [(), ("--over-sampling-batch-size", "5")], ids=["plain", "over"])
def test_too_many_in_a_row_are_an_error_that_says_what_was_seen(collect, over):
    with pytest.raises(TrainerError) as caught:
        collect(*DYNAMIC, *over, "--max-dropped-groups", "7", plugin=HOPELESS, steps=3)
    error = caught.value
    assert error.code == "TRN100"
    assert "7 groups in a row were dropped" in error.what
    assert "equal_rewards" in error.why
    assert "0.25" in error.why
    assert "max_dropped_groups" in error.fix


def test_a_sentence_comes_once_after_three_batches_of_drops(collect):
    later = HOPELESS.replace(">= 3", "< 9")
    ran = collect(*DYNAMIC, plugin=later, steps=2)
    (note,) = ran.notes
    assert "6 groups were dropped in this step and 0 kept" in note
    assert "equal_rewards 6" in note
    assert "0.25 (12 times)" in note
    assert ran.ids()[0] == ["main/9", "main/10"]


def test_another_step_with_as_many_drops_has_its_own_sentence(collect):
    twice = HOPELESS.replace("group.prompt.position >= 3", "group.prompt.position % 11 < 9")
    ran = collect(*DYNAMIC, plugin=twice, steps=2)
    assert ran.ids() == [["main/9", "main/10"], ["main/20", "main/21"]]
    assert len(ran.notes) == 2


def _dropped(limit, position, reward=0.0):
    limit.dropped(position, "r", [Sample(id="a", reward=reward)])


def test_a_row_is_counted_in_prompt_order_whichever_verdict_came_first():
    limit = DropLimit(3, 1, lambda text: None)
    for position in range(10):
        limit.issued(position + 4)
    _dropped(limit, 5)
    _dropped(limit, 6)
    _dropped(limit, 8)
    _dropped(limit, 9)
    limit.ended(4, dropped=None)
    limit.ended(7, dropped=False)
    with pytest.raises(TrainerError, match="3 groups in a row"):
        _dropped(limit, 10)


def test_groups_that_were_not_needed_neither_count_nor_break_a_row():
    limit = DropLimit(2, 9, lambda text: None)
    limit.issued(0)
    _dropped(limit, 0)
    limit.ended(1, dropped=None)
    with pytest.raises(TrainerError):
        _dropped(limit, 2)


def test_drops_without_a_limit_end_no_run():
    limit = DropLimit(0, 1, lambda text: None)
    limit.issued(0)
    for position in range(50):
        _dropped(limit, position)


def test_only_a_few_rewards_are_shown():
    told = []
    limit = DropLimit(0, 3, told.append)
    limit.issued(0)
    for position in range(9):
        _dropped(limit, position, reward=float(position))
    assert "and 4 others" in told[0]


def test_what_could_not_be_judged_is_told_with_its_reason_and_again_when_it_goes_on():
    told = []
    limit = DropLimit(0, 1, told.append)
    limit.issued(0)
    broken = {"reward_kind": "infra_error", "reward_reason": "remote_rm: connection refused"}
    for position in range(13):
        limit.dropped(position, "infra_error", [Sample(id="a", reward=0.0, metadata=broken) for _ in range(2)])
    assert [text.partition(" ")[0] for text in told] == ["3", "6", "12"]
    assert "rewards seen: none" in told[0], "0 is not a reward here"
    assert told[0].endswith("not judged at last: remote_rm: connection refused (2 times)")
    limit.step()
    _dropped(limit, 13)
    _dropped(limit, 14)
    _dropped(limit, 15)
    assert "not judged" not in told[3]


def test_each_step_is_spoken_of_by_itself():
    told = []
    limit = DropLimit(0, 1, told.append)
    limit.issued(0)
    for position in range(8):
        if position == 4:
            limit.ended(3, dropped=False)
            limit.step()
        else:
            _dropped(limit, position)
    assert [note.split(";")[0] for note in told] == ["3 groups were dropped in this step and 0 kept"] * 2
