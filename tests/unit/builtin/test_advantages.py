"""Every estimator of the core, bound to a step: against the float64 reference, what it needs, and what it refuses."""

import numpy as np
import pytest
import ref_advantages
from hypothesis import given, settings, strategies as st

from slime_core.builtin.advantages import estimators
from slime_core.config.algorithms import ALGORITHMS, GROUPED
from slime_core.config.schema import TrainSection
from slime_core.errors import ConfigError, TrainerError
from slime_core.types import Batch

pytestmark = pytest.mark.unit

BY_NAME = {estimator.name: estimator for estimator in estimators()}
EVERY = sorted(set(ALGORITHMS) - {"sft"})


def batch_of(step, **columns):
    """A Batch of one prompt token and the masks of ``step``, a list of dicts as tests/reference has them."""
    lengths = [len(s["mask"]) for s in step]
    roles = {
        role: np.array([v for s in step for v in s[role]], np.float32)
        for role in ("policy", "reference", "teacher", "values")
        if all(role in s for s in step)
    }
    names = {"by_token": "token_rewards", "by_turn": "turn_rewards"}
    return Batch(
        version=3,
        sample_ids=[f"main/{s['group']}-{i}" for i, s in enumerate(step)],
        tasks=["default"] * len(step),
        group=np.array([s["group"] for s in step], np.int64),
        rollout=np.array([s["rollout"] for s in step], np.int64),
        reward=np.array([s["reward"] for s in step], np.float64),
        tokens=np.zeros(sum(lengths) + len(step), np.int32),
        offsets=np.concatenate([[0], np.cumsum([n + 1 for n in lengths])]).astype(np.int64),
        loss_mask=np.array([m for s in step for m in s["mask"]], np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        columns=roles | columns,
        train_metadata=[{names[k]: s[k] for k in names if s.get(k) is not None} for s in step],
    )


def run(name, step, **train):
    return BY_NAME[name].fn(batch_of(step), TrainSection(**train))


NUMBERS = st.floats(-3, 0).map(lambda v: float(np.float32(v)))


@st.composite
def steps(draw, dense=True):
    """Any step: masks, lengths from 0, groups of any size, siblings, ties, rewards by sample, turn or token."""
    step = []
    for place, (group, rollout) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=7))
    ):
        mask = draw(st.lists(st.integers(0, 1), max_size=5))
        sample = {"group": group, "rollout": 3 * group + rollout, "mask": mask, "place": place}
        sample["reward"] = draw(st.sampled_from([0.0, 0.0, 1.0, 0.1]) | st.floats(-2, 2).map(lambda v: round(v, 3)))
        for role in ("policy", "reference", "teacher", "values"):
            sample[role] = draw(st.lists(NUMBERS, min_size=len(mask), max_size=len(mask)))
        kind = draw(st.sampled_from(["", "", "by_token", "by_turn"])) if dense else ""
        count = len(mask) if kind == "by_token" else max(ref_advantages.turns(mask), default=-1) + 1
        rewards = st.floats(-2, 2).map(lambda v: round(v, 3))
        sample[kind or "none"] = draw(st.lists(rewards, min_size=count, max_size=count)) if kind else None
        step.append(sample)
    return step


TRAIN = st.fixed_dictionaries(
    {
        "credit_level": st.sampled_from(["trajectory", "turn", "token"]),
        "gae_gamma": st.sampled_from([1.0, 0.9, 0.0]),
        "gae_lambda": st.sampled_from([1.0, 0.5, 0.0]),
        "kl_coef": st.sampled_from([0.0, 0.1]),
        "kl_reward_type": st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
        "opd_kl_coef": st.sampled_from([0.0, 0.5]),
        "normalize_advantages": st.booleans(),
        "grpo_std_scope": st.sampled_from(["group", "batch"]),
        "disable_grpo_std_normalization": st.booleans(),
    }
)


@pytest.mark.parametrize("name", EVERY)
@settings(deadline=None, derandomize=True, max_examples=60)
@given(step=steps(), train=TRAIN)
def test_any_step_has_the_advantages_of_the_reference(name, step, train):
    train = train | {"pass_k": 1}
    if name == "pass_at_k":
        train["credit_level"] = "trajectory"
    batch = batch_of(step)
    batch.columns["teacher_log_probs"] = batch.columns.pop("teacher")
    found = BY_NAME[name].fn(batch, TrainSection(**train))
    want, returns = ref_advantages.advantages(name, step, train)
    trained = batch.loss_mask > 0
    flat = np.array([v for row in want for v in row])
    np.testing.assert_allclose(found["advantages"][trained], flat[trained], rtol=2e-4, atol=2e-5)
    assert found["advantages"].dtype == np.float32
    assert set(found) == ({"advantages", "returns"} if name == "ppo" else {"advantages"})
    if returns is not None:
        np.testing.assert_allclose(found["returns"], [v for row in returns for v in row], rtol=1e-5, atol=1e-5)
