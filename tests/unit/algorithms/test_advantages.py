"""Every estimator of the core, bound to a step: against the float64 reference, what it needs, and what it refuses."""

import sys

import numpy as np
import pytest
import ref_advantages
from hypothesis import given, settings, strategies as st

import slime_core.algorithms
from slime_core.algorithms import algorithms
from slime_core.algorithms.shared.terms import add_terms, needed_roles
from slime_core.builtin import Core
from slime_core.config.presets import settle
from slime_core.config.rules import conflicts
from slime_core.config.schema import Config
from slime_core.config.sections.rollout import RolloutSection
from slime_core.config.sections.train import TrainSection
from slime_core.errors import ConfigError, TrainerError
from slime_core.types import Batch

pytestmark = pytest.mark.unit

BY_NAME = {estimator.name: estimator for estimator in Core().slime_advantage()}
GROUPS = sorted(name for name, one in algorithms().items() if one.groups)
EVERY = sorted(set(algorithms()) - {"sft", "dpo"})  # those have no groups of any size


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


def columns_of(name, batch, train):
    """An estimator's columns with the terms of the [train] section."""
    own = BY_NAME[name].fn(batch, train)
    return own | {"advantages": add_terms(BY_NAME[name], own["advantages"], batch, train)}


def run(name, step, **train):
    return columns_of(name, batch_of(step), TrainSection(**train))


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
    found = columns_of(name, batch, TrainSection(**train))
    want, returns = ref_advantages.advantages(name, step, train)
    trained = batch.loss_mask > 0
    flat = np.array([v for row in want for v in row])
    np.testing.assert_allclose(found["advantages"][trained], flat[trained], rtol=2e-4, atol=2e-5)
    assert found["advantages"].dtype == np.float32
    assert set(found) == ({"advantages", "returns"} if name == "ppo" else {"advantages"})
    if returns is not None:
        np.testing.assert_allclose(found["returns"], [v for row in returns for v in row], rtol=1e-5, atol=1e-5)


def sample(group, rollout, reward, mask=(1, 1), **more):
    return (
        {"group": group, "rollout": rollout, "reward": reward, "mask": list(mask)}
        | {role: [-0.5] * len(mask) for role in ("policy", "reference", "teacher", "values")}
        | more
    )


def test_every_algorithm_has_one_estimator():
    assert list(BY_NAME) == list(algorithms())
    assert next(iter(BY_NAME)) == TrainSection().advantage_estimator


OWN_FILE = """
from slime_core.algorithms import Algorithm
from slime_core.algorithms.rloo import advantages

ALGORITHM = Algorithm(
    name="mine", title="", formula={}, source=(), differs={}, options=("gae_gamma",), advice="",
    advantages=advantages, presets={"eps_clip": 0.4}, groups=True,
)
"""


def test_one_new_file_is_a_new_algorithm(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_FILE)
    monkeypatch.setattr(slime_core.algorithms, "__path__", [*slime_core.algorithms.__path__, str(tmp_path)])
    algorithms.cache_clear()
    try:
        train = TrainSection(advantage_estimator="mine", pass_k=2)
        config = Config(train=train, rollout=RolloutSection(n_samples_per_prompt=1))
        assert settle(train).eps_clip == settle(train).eps_clip_high == 0.4
        assert {one.name: one.fn for one in Core().slime_advantage()}["mine"] is algorithms()["rloo"].advantages
        assert [problem.what for problem in conflicts(config)] == [
            "advantage_estimator = mine with n_samples_per_prompt = 1",
            "pass_k = 2 with advantage_estimator = mine",
        ]
    finally:
        algorithms.cache_clear()
        sys.modules.pop("slime_core.algorithms.mine", None)


@pytest.mark.parametrize(
    ("name", "train", "roles"),
    [
        ("grpo", {}, set()),
        ("rloo", {"kl_coef": 0.1}, {"policy", "reference"}),
        ("reinforce_plus_plus", {"kl_coef": 0.1, "opd_kl_coef": 1.0}, {"policy", "reference"}),
        ("grpo", {"opd_kl_coef": 0.1}, {"policy"}),
        ("grpo", {"opd_kl_coef": 0.1, "teacher_load": "t"}, {"policy", "teacher"}),
        ("grpo", {"teacher_load": "t"}, set()),
        ("on_policy_distillation", {}, {"policy"}),
        ("on_policy_distillation", {"teacher_load": "t"}, {"policy", "teacher"}),
        ("ppo", {}, {"values"}),
        ("ppo", {"kl_coef": 0.1}, {"values", "policy", "reference"}),
        ("sft", {"kl_coef": 0.1, "opd_kl_coef": 1.0, "teacher_load": "t"}, set()),
    ],
)
def test_an_estimator_needs_exactly_what_it_reads(name, train, roles):
    estimator, train = BY_NAME[name], TrainSection(**train)
    more = estimator.needs_when(train) if estimator.needs_when is not None else frozenset()
    assert estimator.needs | more | needed_roles(estimator, train) == roles
    step = batch_of([sample(0, 0, 1.0), sample(0, 1, 0.0, mask=(1, 0, 1))])
    extra = {} if train.teacher_load else {"teacher_log_probs": step.columns["teacher"]}
    step.columns = {role: step.columns[role] for role in roles} | extra
    assert np.isfinite(columns_of(name, step, train)["advantages"]).all()
    for role in roles:
        step.columns = {r: v for r, v in step.columns.items() if r != role}
        with pytest.raises(TrainerError, match=f"no column '{role}'"):
            columns_of(name, step, train)
        step.columns = step.columns | {role: np.zeros(5, np.float32)}


def test_the_plugin_that_the_run_loads_brings_them_all():
    from slime_core.config.schema import Config
    from slime_core.plugins import load_plugins

    train = TrainSection(advantage_estimator="ppo", kl_coef=0.5, kl_reward_type="k1")
    plugins = load_plugins(Config(train=train))
    assert plugins.needs(train) >= {"values", "policy", "reference"}
    step = batch_of([sample(0, 0, 1.0)])
    step.columns = {}
    scores = {
        "policy": {"log_probs": np.array([-1, -1], np.float32), "entropy": np.zeros(2, np.float32)},
        "reference": {"log_probs": np.array([-2, -1], np.float32)},
        "values": {"values": np.array([0.25, 0.5], np.float32)},
    }
    done = plugins.advantage(step, scores, train).columns
    # KL 1 at token 0 costs 1/2: rewards -1/2 and 1; with gamma and lambda 1 the returns are 1/2 and 1
    assert done["returns"].tolist() == [0.5, 1.0]
    assert done["advantages"].tolist() == [0.25, 0.5]


def test_kl_is_taken_from_group_advantages_token_by_token():
    step = [
        sample(0, 0, 1.0, mask=(1, 0, 1), policy=[-1.0] * 3, reference=[-2.0, -9.0, -1.5]),
        sample(0, 1, 0.0, mask=(1,)),
    ]
    got = run("dr_grpo", step, kl_coef=0.5)["advantages"]
    assert got[[0, 2, 3]].tolist() == [0.5 - 0.5, 0.5 - 0.25, -0.5]


def test_distillation_reads_the_teachers_column_by_where_the_teacher_is():
    step = batch_of([sample(0, 0, 7.0, policy=[-1.0, -2.0], teacher=[-3.0, -1.0])])
    train = TrainSection(teacher_load="model")
    fn = BY_NAME["on_policy_distillation"].fn
    assert fn(step, train)["advantages"].tolist() == [-2.0, 1.0]
    step.columns["teacher_log_probs"] = step.columns["policy"]
    assert fn(step, train)["advantages"].tolist() == [-2.0, 1.0]
    assert fn(step, TrainSection())["advantages"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("train", [{"opd_kl_coef": 0.5}, {"advantage_estimator": "on_policy_distillation"}], ids=str)
def test_a_missing_teacher_is_a_clear_error(train):
    train = TrainSection(**train)
    with pytest.raises(TrainerError) as caught:
        columns_of(train.advantage_estimator, batch_of([sample(0, 0, 1.0)]), train)
    assert "no teacher's log-probs" in caught.value.what
    assert "--teacher-load" in caught.value.fix


def test_distillation_is_added_before_whitening():
    step = [sample(0, 0, 1.0, policy=[-1.0, -2.0]), sample(0, 1, 0.0, mask=(1,))]
    batch = batch_of(step)
    batch.columns["teacher_log_probs"] = batch.columns["teacher"]
    got = columns_of("dr_grpo", batch, TrainSection(opd_kl_coef=1.0, normalize_advantages=True))["advantages"]
    # 0.5 + 0.5, 0.5 + 1.5 and -0.5: mean 5/6, deviations 1/6, 7/6, -8/6, variance (1 + 49 + 64) / 36 / 2
    np.testing.assert_allclose(got, np.array([1, 7, -8]) / 6 / np.sqrt(114 / 72), rtol=1e-6)


@pytest.mark.parametrize("whitened", [True, False])
def test_what_stands_at_masked_tokens_never_enters(whitened):
    """A tool's tokens may be anything to the policy: infinite KL there changes nothing."""
    train = {"kl_coef": 0.1, "kl_reward_type": "k3", "opd_kl_coef": 0.2, "normalize_advantages": whitened}
    for name in EVERY:
        found = []
        for odd in (-1.0, -1e30):
            step = [sample(0, r, float(r), mask=(1, 0, 1), policy=[-1, odd, -2], values=[1, odd, 2]) for r in range(3)]
            batch = batch_of(step)
            batch.columns["teacher_log_probs"] = batch.columns["teacher"]
            advantages = columns_of(name, batch, TrainSection(**train, pass_k=2))["advantages"]
            assert abs(advantages).max() < 100, name
            found.append(advantages[batch.loss_mask > 0])
        np.testing.assert_array_equal(*found, err_msg=name)


def test_supervised_tokens_weigh_one_whatever_the_section_says():
    train = {"kl_coef": 0.1, "opd_kl_coef": 0.2, "normalize_advantages": True}
    assert run("sft", [sample(0, 0, 3.0, mask=(1, 0, 1))], **train)["advantages"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", [*GROUPS, "reinforce_plus_plus"])
@pytest.mark.parametrize("level", ["trajectory", "turn", "token"])
def test_equal_rewards_are_exactly_zero(name, level):
    step = [sample(g, 3 * g + r, 0.1, mask=(1, 0, 1, 1)[: 1 + r]) for g in range(2) for r in range(3)]
    level = "trajectory" if name == "pass_at_k" else level
    got = run(name, step, credit_level=level, pass_k=2, normalize_advantages=True)["advantages"]
    assert got.tolist() == [0.0] * len(got)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_one_is_exactly_zero(name):
    step = [sample(0, 0, 5.0), sample(1, 1, 1.0), sample(1, 2, 0.0)]
    got = run(name, step, pass_k=1)["advantages"]
    trained_alone = got[:2] if name != "reinforce_plus_plus_baseline" else got[:2] - got.mean()
    assert trained_alone.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", ["trajectory", "turn"])
def test_agents_are_compared_with_their_own_role_alone(level):
    """Two rollouts of one group: two solvers each, whose means are 1 and 0.5, and a critic each, 0.2 and 0."""
    rewards = [("solver", 0, 1.0), ("solver", 0, 1.0), ("critic", 0, 0.2), ("solver", 1, 1.0), ("solver", 1, 0.0)]
    told = [*rewards, ("critic", 1, 0.0)]
    batch = batch_of([sample(0, rollout, reward, mask=(1,)) for _, rollout, reward in told])
    mixed = columns_of("dr_grpo", batch, TrainSection(credit_level=level))["advantages"]
    batch.roles = [role for role, _, _ in told]
    found = columns_of("dr_grpo", batch, TrainSection(credit_level=level))["advantages"]
    np.testing.assert_allclose(found, [0.25, 0.25, 0.1, 0.25, -0.75, -0.1], atol=1e-6)
    assert abs(found - mixed).max() > 0.1
    batch.roles = ["solver"] * 6
    assert (columns_of("dr_grpo", batch, TrainSection(credit_level=level))["advantages"] == mixed).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("level", ["trajectory", "turn", "token"])
def test_all_masked_and_zero_length_steps_are_finite(name, level):
    level = "trajectory" if name == "pass_at_k" else level
    more = {"credit_level": level, "normalize_advantages": True, "kl_coef": 0.1, "pass_k": 1, "teacher_load": "t"}
    masked = run(name, [sample(0, 0, 1.0, mask=(0, 0)), sample(0, 1, 2.0, mask=())], **more)
    assert masked["advantages"].tolist() == [0.0, 0.0]
    assert run(name, [sample(0, 0, 1.0, mask=()), sample(0, 1, 2.0, mask=())], **more)["advantages"].shape == (0,)


def test_a_group_smaller_than_k_is_named():
    with pytest.raises(TrainerError) as caught:
        run("pass_at_k", [sample(4, 0, 1.0), sample(7, 1, 0.0), sample(4, 2, 0.0)], pass_k=2)
    assert caught.value.code == "TRN99"
    assert "group 7 has 1 rollouts, pass_k is 2" in caught.value.what


def test_pass_at_k_has_no_credit_below_a_trajectory():
    with pytest.raises(ConfigError) as caught:
        run("pass_at_k", [sample(0, 0, 1.0)], credit_level="turn")
    assert "credit_level = turn" in caught.value.what


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ({"by_token": [1.0]}, "TRN102", "sample main/0-1 has 1 entries of token_rewards and 3 response tokens"),
        ({"by_turn": [1.0]}, "TRN102", "sample main/0-1 has 1 entries of turn_rewards and 2 turns"),
        ({"by_turn": [1, 2], "by_token": [1, 2, 3]}, "TRN102", "token_rewards and turn_rewards"),
        ({"by_turn": [1.0, float("nan")]}, "TRN95", "not a list of finite numbers"),
        ({"by_turn": ["good", 1.0]}, "TRN95", "not a list of finite numbers"),
        ({"by_turn": [[1.0, 2.0]]}, "TRN95", "not a list of finite numbers"),
    ],
    ids=["tokens", "turns", "both", "nan", "text", "nested"],
)
def test_rewards_that_do_not_fit_name_their_sample(more, code, words):
    step = [sample(0, 0, 1.0), sample(0, 1, 0.0, mask=(1, 0, 1), **more)]
    with pytest.raises(TrainerError) as caught:
        run("ppo", step)
    assert caught.value.code == code
    assert words in caught.value.what
    assert run("grpo", step)["advantages"].shape == (5,)  # reads the scalar alone


def test_a_removed_sample_may_bring_rewards_of_turns_and_counts_with_their_sum():
    # 1 + 2 = 3 against 1
    step = [sample(0, 0, 9.0, mask=(0, 0, 0), by_turn=[1.0, 2.0]), sample(0, 1, 1.0, mask=(1,))]
    assert run("dr_grpo", step, credit_level="turn")["advantages"].tolist() == [0, 0, 0, -1]


def test_reinforce_whitens_over_the_whole_step_and_ignores_groups():
    step = [sample(0, 0, 1.0), sample(1, 1, 0.0)]
    got = run("reinforce_plus_plus", step)["advantages"]
    # 1 1 0 0: deviation sqrt(1/3)
    np.testing.assert_allclose(got, np.array([1, 1, -1, -1]) / 2 / np.sqrt(1 / 3), rtol=1e-6)
