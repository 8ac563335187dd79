"""The bound on age: against brute force, and in simulated runs with any order of finishing, drops and tools."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from slime_core.rollout.staleness import Bound, mask_stale, version_span
from slime_core.types import Group, Prompt, Sample

pytestmark = pytest.mark.unit


def _schedulable(left, version, most, batch):
    """Brute force: whether every group that is left can be given a step in time, ``batch`` groups a step."""
    if not left:
        return True
    used: dict[int, int] = {}

    def place(index):
        if index == len(left):
            return True
        for step in range(version + 1, left[index] + most + 1):
            if used.get(step, 0) < batch:
                used[step] = used.get(step, 0) + 1
                if place(index + 1):
                    return True
                used[step] -= 1
        return False

    return place(0)


@st.composite
def _moments(draw):
    """Groups that may be open at a version, as a run can come to hold them: they fitted before the take."""
    most, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    version = draw(st.integers(0, 4))
    count = draw(st.integers(0, (most + 1) * batch))
    ages = draw(st.lists(st.integers(max(0, version - most), version), min_size=count, max_size=count))
    finished = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return most, batch, version, dict(enumerate(ages)), finished


@settings(max_examples=300, deadline=None)
@given(_moments())
def test_a_step_is_taken_exactly_where_brute_force_finds_a_take_that_leaves_the_rest_in_time(moment):
    most, batch, version, ages, finished = moment
    if not _schedulable(list(ages.values()), version - 1, most, batch):
        return  # no run gets here: see the simulation
    kept = {p: u for p, u in ages.items() if finished[p]}
    flying = {p: u for p, u in ages.items() if not finished[p]}
    possible = any(
        _schedulable([u for p, u in ages.items() if p not in take], version, most, batch)
        for take in combinations(kept, batch)
    )
    ready = Bound(most, batch).ready(kept, flying, version)
    assert (ready is not None) == possible
    if ready is not None:
        assert len(set(ready)) == batch
        assert set(ready) <= set(kept)
        assert _schedulable([u for p, u in ages.items() if p not in ready], version, most, batch)


class _Run:
    """A run as the collector makes it, in numbers: groups start, finish, are dropped by a filter, train."""

    def __init__(self, chance, most, batch, policy, steps):
        self.chance, self.bound = chance, Bound(most, batch, policy)
        self.most, self.batch, self.steps = most, batch, steps
        self.version = self.next = self.training = 0
        self.open: dict[int, int] = {}  # position -> version that began it
        self.kept: dict[int, int] = {}  # position -> version in which it finished, in that order
        self.trained: list[tuple[int, int, int]] = []  # step, first version, last version
        self.stale = 0

    def flying(self):
        return {p: u for p, u in self.open.items() if p not in self.kept}

    def fill(self):
        while len(self.open) + self.training < min(self.most + 1, self.steps - self.version) * self.batch:
            self.open[self.next] = self.version
            self.next += 1

    def something_happens(self):
        """One group in flight finishes, or is dropped and replaced. False where nothing is in flight."""
        flying = sorted(self.flying())
        if not flying:
            return False
        position = self.chance.choice(flying)
        if self.chance.random() < 0.2:
            del self.open[position]
            self.fill()
        else:
            self.kept[position] = self.version
        return True

    def begin_again(self, groups, version):
        for position in self.bound.overdue(groups, version):
            self.stale += 1
            self.kept.pop(position, None)
            if self.bound.policy == "restart":
                self.open[position] = self.version
            else:
                del self.open[position]
        self.fill()

    def tend(self, version):
        if self.bound.policy == "mask":
            self.begin_again(dict(self.kept), version)
        else:
            self.begin_again(dict(self.open), version)

    def step(self):
        self.fill()
        self.tend(self.version)
        for _ in range(self.chance.randint(0, 3)):
            self.something_happens()
        while True:
            kept = {p: self.open[p] for p in self.kept}
            ready = self.bound.ready(kept, self.flying(), self.version)
            if ready is not None:
                break
            assert self.something_happens(), "waits for ever"
        for position in ready:
            self.trained.append((self.version, self.open.pop(position), self.kept.pop(position)))
        self.training = self.batch
        if self.version + 1 < self.steps:
            self.tend(self.version + 1)
        for _ in range(self.chance.randint(0, 3)):
            self.something_happens()  # while it trains
        self.version, self.training = self.version + 1, 0


@pytest.mark.parametrize("policy", ["wait", "restart", "mask", "drop"])
@settings(max_examples=250, deadline=None)
@given(most=st.integers(0, 3), batch=st.integers(1, 3), steps=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_in_any_run_nothing_that_trains_is_older_than_the_bound_and_nothing_waits_for_ever(
    policy, most, batch, steps, seed
):
    run = _Run(random.Random(seed), most, batch, policy, steps)
    for _ in range(steps):
        run.step()
    assert len(run.trained) == steps * batch
    for step, first, last in run.trained:
        oldest = max(first, run.bound.oldest(step)) if policy == "mask" else first
        assert step - oldest <= most
        assert last >= oldest, "no token of it trains"
    if policy == "wait":
        assert run.stale == 0
        assert not run.open


def test_the_four_old_groups_of_two_steps_are_not_overtaken():
    """Two steps ahead, batches of two: six groups of version 0; what came later may not push four of them past it."""
    bound = Bound(2, 2)
    old = {0: 0, 1: 0, 2: 0, 3: 0}
    assert bound.ready({4: 0, 5: 0}, old, 0) == [4, 5]
    assert bound.ready({6: 1, 7: 1}, old, 1) is None
    assert bound.ready({6: 1, 7: 1, 2: 0}, {0: 0, 1: 0, 3: 0}, 1) is None
    assert bound.ready({6: 1, 2: 0, 7: 1, 1: 0}, {0: 0, 3: 0}, 1) == [2, 1]
    assert Bound(2, 2, "drop").ready({6: 1, 7: 1}, old, 1) == [6, 7]


def test_waiting_ends_where_no_choice_is_in_time():
    """A run that goes on with a smaller bound holds groups that cannot all train in it."""
    bound = Bound(1, 1)
    assert bound.ready({0: 4}, {1: 4, 2: 5}, 5) == [0]
    assert bound.ready({2: 5}, {1: 4}, 5) is None
    assert bound.overdue({0: 3, 1: 4, 2: 5}, 5) == [0]


def _sample(versions, mask=None, **fields):
    sample = Sample(id="a", tokens=[9], **fields)
    for index, version in enumerate(versions):
        on = mask[index] if mask else 1
        sample.append_response([5], log_probs=[-1.0], mask=on, version=version)
    return sample


def test_the_age_of_a_group_counts_trainable_tokens_alone():
    prompt = Prompt(id="main/0")
    one, two = _sample([2, -1, 3], mask=[0, 0, 1]), _sample([4, 5])
    group = Group(prompt=prompt, samples=[one, two], rollouts={0: [0], 1: [1]})
    assert version_span(group, 7) == (3, 5)
    one.remove_sample = True
    assert version_span(group, 7) == (4, 5)
    supervised = Sample(id="b", tokens=[9, 5], response_length=1, loss_mask=[1])
    assert version_span(Group(prompt=prompt, samples=[supervised], rollouts={0: [0]}), 7) == (7, 7)


def test_tokens_older_than_the_bound_leave_the_loss_and_the_same_ones_each_time():
    samples = [_sample([1, 2, -1, 3], mask=[1, 1, 0, 1]), _sample([3, 4]), _sample([1])]
    assert mask_stale(samples, 2) == [samples[0], samples[2]]
    assert [s.loss_mask for s in samples] == [[0, 1, 0, 1], [1, 1], [0]]
    assert mask_stale(samples, 2) == []
    bare = Sample(id="c", tokens=[9, 5, 6], response_length=2, weight_versions=[0, 2])
    assert mask_stale([bare], 1) == [bare]
    assert bare.loss_mask == [0, 1]
