"""What a verdict is worth: hand-worked rewards, an order that holds for every setting, a range that is known."""

import itertools
import math

import pytest
from dialogue_actors import timed
from pydantic import ValidationError

from slime_kernelbench.options import Options
from slime_kernelbench.reward import reward_range, speed_term, worth
from slime_kernelbench.types import Case, Diagnostic, Flag, Verdict

pytestmark = pytest.mark.unit


RIGHT = Verdict(status="correct", reached="correctness")
WRONG = Verdict(
    status="wrong",
    reached="correctness",
    cases=tuple(Case(shapes="8", regime=str(i), agrees=i == 0) for i in range(4)),
)
FAILED = {
    "rejected": ("static", 0.0),
    "compile_error": ("import", 0.0),
    "runtime_error": ("correctness", 0.1),
    "timeout": ("correctness", 0.1),
    "hack": ("correctness", 0.0),
}


def test_rewards_by_hand():
    assert worth(WRONG, Options()).value == pytest.approx(0.1)
    assert worth(RIGHT, Options()).value == pytest.approx(1.0)
    assert worth(timed(1.0), Options()).value == pytest.approx(1.5)  # log2(2) = 1
    assert worth(timed(3.0), Options()).value == pytest.approx(2.0)  # log2(4) = 2
    assert worth(timed(3.0), Options(speed_shape="saturating")).value == pytest.approx(1.375)
    assert worth(timed(0.5), Options(speed_shape="gain")).value == pytest.approx(1.0)  # no faster, no gain
    assert worth(timed(3.0), Options(speed_shape="gain", speed_cap=1.5)).value == pytest.approx(1.75)  # 1 + 1.5 / 2
    assert worth(WRONG, Options(cases_weight=0.4)).value == pytest.approx(0.2)  # one case of four agrees
    assert worth(RIGHT, Options(cases_weight=0.4)).value == pytest.approx(1.4)


@pytest.mark.parametrize("status", FAILED)
def test_failures_by_hand(status):
    reached, value = FAILED[status]
    assert worth(Verdict(status=status, reached=reached), Options()).value == pytest.approx(value)


def test_a_time_out_before_it_was_compiled_is_worth_nothing():
    assert worth(Verdict(status="timeout", reached="import"), Options()).value == 0


def test_a_flag_on_any_verdict_takes_the_reward():
    flagged = Verdict(status="correct", reached="speed", flags=(Flag(rule="below_floor", layer="timing"),))
    assert worth(flagged, Options()).value == 0
    assert worth(flagged, Options(hack_reward=-0.5)).value == -0.5
    assert worth(flagged, Options()).terms["correct"] == 0


@pytest.mark.parametrize("shape", ["log", "saturating", "linear", "clipped", "gain", "off"])
def test_a_faster_kernel_is_never_worth_less_and_a_right_one_always_more_than_a_wrong_one(shape):
    options = Options(speed_shape=shape)
    speedups = [0.0, 1e-6, 0.3, 0.999, 1.0, 1.3, 1.999, 2.0, 2.001, 3.0, 10.0, 1e4]
    values = [worth(timed(s), options).value for s in speedups]
    assert all(a <= b for a, b in itertools.pairwise(values))
    assert min(values) > worth(WRONG, options).value
    if shape not in ("clipped", "gain", "off"):
        assert all(a < b for a, b in itertools.pairwise(values))


def test_there_is_no_step_at_the_speed_up_that_ends_a_dialogue():
    options = Options(stop_speedup=2.0)
    gap = worth(timed(2.0 + 1e-9), options).value - worth(timed(2.0 - 1e-9), options).value
    assert 0 <= gap < 1e-8


def test_an_infra_verdict_has_no_value_and_says_why():
    infra = Verdict(
        status="infra", reached="static", diagnostics=(Diagnostic(stage="static", kind="x", message="disk is full"),)
    )
    assert (worth(infra, Options()).value, worth(infra, Options()).reason) == (None, "disk is full")
    assert worth(RIGHT, Options(reward_tier="speed")).value is None
    assert worth(WRONG, Options(reward_tier="speed")).value == pytest.approx(0.1)


def test_the_correctness_tier_pays_the_same_with_and_without_a_device():
    options = Options(reward_tier="correctness")
    assert worth(timed(9.0), options).value == worth(RIGHT, options).value == pytest.approx(1.0)


def test_the_range_is_known_before_and_rewards_stay_inside():
    assert reward_range(Options()) == (0.0, math.inf)
    for shape, tier in itertools.product(("saturating", "clipped", "gain", "off"), ("auto", "correctness", "speed")):
        options = Options(speed_shape=shape, reward_tier=tier, hack_reward=-0.25, cases_weight=0.2)
        low, high = reward_range(options)
        verdicts = [RIGHT, WRONG, *(Verdict(status=s, reached=r) for s, (r, _) in FAILED.items())]
        verdicts += [timed(s) for s in (0.0, 0.5, 2.9, 3.0, 1e9)]
        values = [v for v in (worth(verdict, options).value for verdict in verdicts) if v is not None]
        assert low == min(values) == -0.25
        assert high - 1e-6 <= max(values) <= high
    assert speed_term(math.inf, Options(speed_shape="saturating")) == 1.0


def test_weights_that_leave_the_declared_range_are_refused():
    assert Options(reward_range=(0.0, 1.5), speed_shape="saturating").reward_range == (0.0, 1.5)
    for given in (
        {"reward_range": (0.0, 2.0)},  # log has no bound
        {"reward_range": (0.0, 1.4), "speed_shape": "saturating"},
        {"reward_range": (0.0, 9.0), "hack_reward": -1.0, "speed_shape": "off"},
        {"hack_reward": 0.1},
        {"correct_weight": 0.0},
        {"compiled_weight": -1.0},
    ):
        with pytest.raises(ValidationError):
            Options(**given)
