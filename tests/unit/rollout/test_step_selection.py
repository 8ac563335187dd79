"""Which groups a step takes, how many prompts may start, and what a checkpoint keeps of open groups."""

import asyncio

import pytest

from durability.memory_ledger import MemoryLedger
from slime_core.config.load import load_config
from slime_core.rollout.filters import DropLimit
from slime_core.rollout.groups import OpenGroup, OpenGroups, Source
from slime_core.rollout.over_sampling import OverSampling
from slime_core.rollout.recovery import ResumableSource, can_reuse
from slime_core.rollout.staleness import Staleness
from slime_core.rollout.step_selection import AsFinished, InOrder
from slime_core.rollout.suspendable_engine import SuspendableEngine
from slime_core.testing.fakes import CharTokenizer, FakeEngine
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.unit

BATCH = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--no-colocate")
AHEAD = ("--max-staleness", "2", "--async-schedule", "free")


def open_group(position, version=0):
    sample = Sample(id=f"main/{position}-0", tokens=[1])
    group = Group(prompt=Prompt(id=f"main/{position}", position=position), samples=[sample], rollouts={0: [0]})
    return OpenGroup(group, version=version)


def open_groups(in_flight=(), finished=(), in_training=0, version=lambda position: 0):
    tables = ({p: open_group(p, version(p)) for p in positions} for positions in (in_flight, finished))
    return OpenGroups(*tables, in_training)


@pytest.mark.parametrize(
    ("in_flight", "finished", "taken"),
    [
        pytest.param([4], [3, 1, 2], [1, 2], id="the next in prompt order, whichever finished first"),
        pytest.param([2], [3, 1], None, id="an earlier prompt is in flight"),
        pytest.param([], [1], None, id="too few"),
    ],
)
def test_in_order_takes_the_next_prompts(in_flight, finished, taken):
    assert InOrder(load_config(None, BATCH), open_groups(in_flight, finished), None).first(2, 0) == taken


def test_as_finished_takes_the_stalest_and_waits_for_what_would_be_too_stale():
    config = load_config(None, [*BATCH, *AHEAD])
    groups = open_groups([0, 1], [5, 4, 3], version=lambda position: int(position > 3))
    assert AsFinished(config, groups, None, Staleness(config, groups)).first(2, 1) == [3, 5]
    groups = open_groups([0, 1, 2, 3], [4, 5], version=lambda position: int(position > 3))
    assert AsFinished(config, groups, None, Staleness(config, groups)).first(2, 1) is None


@pytest.mark.parametrize(("steps_left", "places"), [(9, 3), (2, 1), (1, -1)])
def test_prompts_start_for_as_many_steps_as_may_be_open(steps_left, places):
    groups = open_groups([3], [], in_training=2)
    assert InOrder(load_config(None, [*BATCH, *AHEAD]), groups, None).free_places(steps_left, new_step=True) == places


def test_over_sampled_groups_make_up_for_dropped_ones_before_new_prompts_start():
    config = load_config(None, [*BATCH, "--over-sampling-batch-size", "6"])
    engine = SuspendableEngine(FakeEngine(vocab_size=16), CharTokenizer(), lambda: None)
    selection = OverSampling(config, open_groups([0], [1]), engine)
    assert selection.free_places(5, new_step=True) == 4
    assert selection.free_places(5, new_step=False) == 0
    assert OverSampling(config, open_groups([], [1]), engine).free_places(5, new_step=False) == 5


class Prompts(Source):
    def __init__(self):
        self.position = 0

    def next(self, count):
        first, self.position = self.position, self.position + count
        return [Prompt(id=f"main/{p}", position=p, tokens=[1]) for p in range(first, self.position)]

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


def test_a_checkpoint_keeps_the_sources_state_before_the_oldest_open_group():
    config = load_config(None, BATCH)

    async def resumed():
        source = ResumableSource(Prompts(), MemoryLedger(), None, resumed=False)
        for count in (3, 2, 4):
            await source.next(count, config)
            source.started()
        assert source.state([2, 4]) == {"source": {"position": 0}, "issued": 9, "open": [2, 4]}
        assert source.state([8, 4]) == {"source": {"position": 3}, "issued": 9, "open": [4, 8]}
        await source.next(1, config)  # it is not in flight yet: a resumed run must issue it
        saved = source.state([8])
        assert saved == {"source": {"position": 5}, "issued": 9, "open": [8]}
        again = ResumableSource(Prompts(), MemoryLedger(), saved, resumed=True)
        return [group.position for group in await again.next(6, config)]

    assert asyncio.run(resumed()) == [8, 9, 10]


def test_what_a_checkpoint_keeps_of_the_drop_limit_is_named_as_in_earlier_versions():
    limit = DropLimit(3, 1, lambda text: None)
    limit.restore({"next": 4, "row": 2, "waiting": [[6, True], [7, None]]})
    assert limit.state() == {"next": 4, "row": 2, "waiting": [[6, True], [7, None]]}


def test_a_group_without_a_record_is_generated():
    assert not can_reuse(open_group(0).record, 0, ranks_ends=False)
