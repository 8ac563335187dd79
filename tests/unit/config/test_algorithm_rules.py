"""Keys of algorithms: what contradicts, what nothing would read, and what is legal and seldom meant."""

import pytest

from slime_cli.cards import cards
from slime_core.algorithms import algorithms
from slime_core.config.load import load_config, read
from slime_core.config.sections.train import selective
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit

SELECTIVE = selective()
PPO = "--advantage-estimator=ppo"
OTHER = {  # a value off the default of each key that only some estimators read
    "grpo_std_scope": "batch",
    "credit_level": "turn",
    "gae_gamma": "0.99",
    "gae_lambda": "0.95",
    "pass_k": "2",
    "critic_load": "hub/critic",
    "critic_lr": "0.5",
    "critic_lr_warmup_iters": "3",
    "value_clip": "0.5",
    "num_critic_only_steps": "2",
}


@pytest.mark.parametrize(
    ("flags", "what", "why", "fix"),
    [
        pytest.param(["--kl-coef=0.1", "--kl-loss-coef=0.2"], "kl_coef = 0.1 and", "count twice", "to 0", id="kl twice"),
        pytest.param(
            ["--advantage-estimator=pass_at_k", "--pass-k=9", "--n-samples-per-prompt=8"],
            "pass_k = 9",
            "holds no set",
            "pass_k to at most 7",
            id="k above n",
        ),
        pytest.param(
            ["--advantage-estimator=pass_at_k", "--pass-k=8", "--n-samples-per-prompt=8"],
            "pass_k = 8",
            "every advantage is 0",
            "9 or more",
            id="k is n",
        ),
        pytest.param(["--eps-clip-c=0.5"], "eps_clip_c = 0.5", "above 1", "to 3", id="dual clip below 1"),
        pytest.param(["--eps-clip-c=1"], "eps_clip_c = 1", "above 1", "to 3", id="dual clip at 1"),
        pytest.param(
            ["--eps-clip-c=3", "--policy-objective=cispo"], "policy_objective = cispo", "bounds its weights", "", id="dual clip and cispo"
        ),
        pytest.param(
            ["--true-on-policy-mode", "--rollout-top-p=0.9"], "true_on_policy_mode with rollout_top_p", "a part of the", "leave", id="exact and top-p"
        ),
        pytest.param(
            ["--use-tis", "--use-rollout-logprobs"], "use_tis with", "twice", "--no-use-tis", id="gap counted twice"
        ),
        pytest.param(
            ["--use-tis", "--tis-clip-low=3"], "tis_clip_low = 3 is above tis_clip = 2", "", "below 1", id="weights"
        ),
        pytest.param(
            ["--use-rs", "--rs-lower-bound=3", "--rs-upper-bound=2"], "rs_lower_bound = 3", "", "below 1", id="rejection"
        ),
        pytest.param(["--use-rs", "--rs-upper-bound=0.5"], "rs_lower_bound = 2 is above", "1 / upper", "", id="implied"),
        pytest.param(["--advantage-estimator=on_policy_distillation"], "no teacher", "", "--teacher-load", id="teacher"),
        pytest.param(["--opd-kl-coef=1"], "opd_kl_coef = 1.0 has no teacher", "", "--teacher-load", id="teacher term"),
        pytest.param(
            [PPO, "--num-critic-only-steps=10", "--num-rollout=10"], "num_critic_only_steps = 10", "only the critic", "below 10", id="critic alone"
        ),
        pytest.param(["--loss-divisor=512"], "loss_aggregation = rollout_mean", "constant", "leave", id="divisor"),
        pytest.param(
            ["--gae-gamma=0.9"], "credit_level = trajectory", "not discounted", "turn or token", id="gamma of a trajectory"
        ),
        pytest.param(
            ["--advantage-estimator=pass_at_k", "--credit-level=turn"], 'credit_level = "turn"', "pass_at_k does not read", "", id="credit of pass@k"
        ),
        pytest.param(
            ["--advantage-estimator=on_policy_distillation", "--credit-level=token", "--teacher-load=hub/t"],
            'credit_level = "token"', "does not read", "", id="credit of distillation",
        ),
        pytest.param(["--advantage-estimator=sft"], "loss_type = policy_loss", "whatever it says", "sft_loss", id="sft"),
    ],
)  # fmt: skip
def test_each_conflict_names_its_flags_why_and_the_fix(recipe, refused, flags, what, why, fix):
    recipe()
    error = refused(None, *flags)
    assert error.code == "CFG04"
    assert what in error.what
    assert why in error.why
    assert fix in error.fix
    named = [flag.split("=")[0] for flag in flags if "=" in flag and not flag.endswith("/t")]
    allowed = {"--use-rs", "--use-tis", "--advantage-estimator"}
    assert [flag for flag in named if flag not in error.where and flag not in allowed] == []


@pytest.mark.parametrize(
    "name",
    ["grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline", "pass_at_k"],
)
def test_an_estimator_that_compares_in_groups_refuses_groups_of_one(recipe, refused, name):
    error = refused(recipe(), "--n-samples-per-prompt=1", f"--advantage-estimator={name}")
    assert error.what.startswith(f"advantage_estimator = {name} with n_samples_per_prompt = 1")
    assert "nothing is learnt" in error.why


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo", "mine"])
def test_others_may_have_groups_of_one(recipe, name):
    load_config(recipe(), ["--n-samples-per-prompt=1", f"--advantage-estimator={name}"])


def test_tasks_without_a_size_of_their_own_have_the_groups_of_the_section(recipe):
    with pytest.raises(ConfigError, match="n_samples_per_prompt = 1"):
        load_config(recipe("[data]\ntasks = [{name = 'a'}, {name = 'b'}]\n"), ["--n-samples-per-prompt=1"])


def test_groups_of_tasks_and_of_functions_are_as_large_as_those_make_them(recipe):
    load_config(recipe("[data]\ntasks = [{name = 'a', n_samples_per_prompt = 4}]\n"), ["--n-samples-per-prompt=1"])
    load_config(recipe(), ["--n-samples-per-prompt=1", "--rollout-function-path=mod:fn"])


def test_the_selective_keys_are_keys_that_some_cards_name_and_others_do_not():
    learners = [cards()[name] for name in algorithms() if name != "sft"]
    for key in SELECTIVE:
        readers = [one.name for one in learners if key in one.options]
        assert 0 < len(readers) < len(learners), key
        assert SELECTIVE[key] == tuple(readers), "the rule and the cards agree"
    assert set(SELECTIVE) == set(OTHER)
    assert SELECTIVE["grpo_std_scope"] == ("grpo", "cispo", "gspo")
    assert (SELECTIVE["pass_k"], SELECTIVE["gae_lambda"]) == (("pass_at_k",), ("ppo",))


@pytest.mark.parametrize("key", SELECTIVE)
def test_a_key_that_the_estimator_does_not_read_is_refused_and_another_is_not(recipe, refused, key):
    learners = [name for name, one in algorithms().items() if one.terms]
    reader, other = SELECTIVE[key][0], next(name for name in learners if name not in SELECTIVE[key])
    flags = [f"--{key.replace('_', '-')}={OTHER[key]}", "--teacher-load=hub/t"]
    turns = ["--credit-level=turn"] if key == "gae_gamma" else []
    load_config(recipe(), [*flags, *turns, f"--advantage-estimator={reader}"])
    error = refused(recipe(), *flags, f"--advantage-estimator={other}")
    assert f"{other} does not read {key}" in error.why
    assert f"{key} = " in error.what
    assert "--advantage-estimator" in error.where


def test_lines_of_the_recipe_are_named(recipe, refused):
    error = refused(recipe("[train]\nkl_coef = 0.1\nkl_loss_coef = 0.1\nloss_divisor = 3\n"))
    for line in (2, 3, 4):
        assert f"recipe.toml:{line}" in error.where


def test_a_supervised_stage_and_an_advantage_function_are_left_alone(recipe):
    text = "[train]\nadvantage_estimator = 'ppo'\nnum_critic_only_steps = 2\n[[stage]]\nname = 'a'\nloss_type = 'sft_loss'\nadvantage_estimator = 'grpo'\nnum_rollout = 1\n[[stage]]\nname = 'b'\n"
    load_config(recipe(text), [])
    load_config(recipe(), ["--gae-lambda=0.9", "--custom-advantage-function-path=mod:fn"])
    load_config(recipe(), ["--gae-lambda=0.9", "--advantage-estimator=mine"])
    load_config(recipe(), ["--loss-divisor=3", "--custom-loss-function-path=mod:fn"])


def test_unused_bounds_are_no_conflict(recipe):
    load_config(recipe(), ["--tis-clip-low=3", "--rs-upper-bound=0.5"])


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        pytest.param(["--kl-loss-coef=0.1", "--kl-loss-type=k1"], "k1 has no gradient", id="k1"),
        pytest.param(["--importance-level=sequence"], "the clip never acts", id="wide clip of a sequence"),
        pytest.param(["--advantage-estimator=gspo", "--eps-clip=0.2"], "eps_clip = 0.2", id="wide clip of gspo"),
        pytest.param(["--policy-objective=cispo"], "raised to at least 0.8", id="cispo's lower bound"),
        pytest.param(["--use-tis", "--tis-clip=0.5"], "agree are cut too", id="tis below 1"),
        pytest.param(["--use-tis", "--rollout-top-p=0.9"], "cuts the distribution", id="tis under a cut distribution"),
        pytest.param(["--use-opsm"], "masks nothing", id="opsm on policy"),
        pytest.param(["--tis-level=sequence"], "tis_level does nothing without use_tis", id="tis off"),
        pytest.param(["--rs-level=token", "--rs-upper-bound=3"], "do nothing without use_rs", id="rs off"),
        pytest.param([PPO], "num_critic_only_steps = 0", id="raw critic"),
        pytest.param([PPO, "--critic-lr=1e-7"], "lag behind", id="slow critic"),
        pytest.param(["--teacher-load=hub/t"], "nothing reads it", id="idle teacher"),
        pytest.param(
            ["--advantage-estimator=on_policy_distillation", "--teacher-load=hub/t", "--opd-kl-coef=0.5"],
            "counts 1.5 times",
            id="teacher counted again",
        ),
        pytest.param(
            ["--advantage-estimator=on_policy_distillation", "--custom-generate-function-path=mod:fn"],
            "bring teacher_log_probs",
            id="samples bring the teacher",
        ),
    ],
)
def test_settings_that_are_seldom_meant_are_noticed(recipe, flags, part):
    assert any(part in notice for notice in read(recipe(), flags).notices)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--kl-loss-coef=0.1", "--kl-loss-type=k1", "--use-unbiased-kl"], id="unbiased k1"),
        pytest.param(["--advantage-estimator=gspo"], id="gspo"),
        pytest.param(["--advantage-estimator=cispo"], id="cispo"),
        pytest.param(["--use-opsm", "--use-rollout-logprobs"], id="opsm against the engine"),
        pytest.param(["--use-opsm", "--num-steps-per-rollout=2"], id="opsm over steps"),
        pytest.param(["--tis-clip=5", "--custom-tis-function-path=mod:fn"], id="bounds of an own correction"),
        pytest.param([PPO, "--num-critic-only-steps=2"], id="ppo"),
        pytest.param(["--opd-kl-coef=0.5", "--teacher-load=hub/t"], id="distillation term"),
        pytest.param(["--loss-type=sft_loss", "--kl-loss-coef=0.1", "--kl-loss-type=k1"], id="supervised"),
    ],
)
def test_what_is_meant_is_not_noticed(recipe, flags):
    assert read(recipe(), flags).notices == ()
