"""The ledger through the life of a run: issue, complete, fail, suspend, train, checkpoint, crash, resume."""

import random

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from ledger_model import Life

SEEDS = st.integers(0, 2**16)


class Lives(RuleBasedStateMachine):
    """Hypothesis chooses the acts, and shrinks those that break something."""

    def __init__(self):
        super().__init__()
        self.life = Life()

    def teardown(self):
        self.life.close()


for _name in sorted(set(Life.ACTS)):

    def _rule(self, seed, _name=_name):
        self.life.act(_name, seed)

    _rule.__name__ = _name
    setattr(Lives, _name, rule(seed=SEEDS)(_rule))


def lives(count, steps):
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=count, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def one_long_life(seed, steps):
    rng, life = random.Random(seed), Life()
    try:
        for _ in range(steps):
            life.act(rng.choice(Life.ACTS), rng.getrandbits(32))
        return life.crashes, life.model.version
    finally:
        life.close()


@pytest.mark.integration
def test_short_lives():
    lives(10, 30)


@pytest.mark.integration
def test_a_life_of_three_hundred_acts():
    crashes, version = one_long_life(5, 300)
    assert crashes >= 5
    assert version >= 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_lives_of_five_thousand_acts():
    for seed in range(2):
        crashes, version = one_long_life(seed, 5000)
        assert crashes >= 100
        assert version >= 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_short_lives():
    lives(200, 50)
