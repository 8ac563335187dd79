"""Rules about the keys of algorithms: a resolved stage in; conflicts, and sentences about what is seldom meant, out.

A key that nothing would read is an error here and not a surprise in a curve. Stages that do not learn by an estimator
are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.config.algorithms import ALGORITHMS, GROUPED, settle
from slime_core.config.fields import changed
from slime_core.config.problems import Problem, conflict
from slime_core.config.values import show

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SFT_LOSS, POLICY_LOSS = "sft_loss", "policy_loss"
NARROW = 0.1  # an eps_clip that no sequence's geometric mean ratio reaches

STANDARDISED = ("grpo", "gspo", "cispo")
CREDITED = ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
SELECTIVE: dict[str, tuple[str, ...]] = {
    "grpo_std_scope": STANDARDISED,
    "credit_level": CREDITED,
    "gae_gamma": CREDITED,
    "pass_k": ("pass_at_k",),
    **dict.fromkeys(("gae_lambda", "critic_load", "critic_lr", "critic_lr_warmup_iters"), ("ppo",)),
    **dict.fromkeys(("value_clip", "num_critic_only_steps"), ("ppo",)),
}
"""[train] keys that some estimators read and others do not, with those that do: setting one says what is believed."""

SWITCHES = {
    "use_tis": ("tis_level", "tis_mode", "tis_clip", "tis_clip_low", "tis_batch_normalize"),
    "use_rs": ("rs_level", "rs_lower_bound", "rs_upper_bound"),
    "use_opsm": ("opsm_delta",),
}
"""A switch, and the keys that do nothing without it."""

BRING_TEACHER = {
    "rollout": (
        "rollout_function_path",
        "custom_generate_function_path",
        "rollout_sample_hook_path",
        "data_source_path",
    ),
    "reward": ("custom_rm_path", "custom_reward_post_process_path"),
    "train": ("rollout_data_postprocess_path", "custom_convert_samples_to_train_data_path"),
}
"""Keys by section that name a function which may set ``sample.teacher_log_probs``."""


def conflicts(config: Config) -> Iterator[Problem]:
    """Settings of an algorithm that cannot hold together, or that nothing would read."""
    if config.train.loss_type == SFT_LOSS:
        return
    yield from _kl(config)
    yield from _teacher(config)
    if not config.train.custom_advantage_function_path:
        yield from _groups(config)
        yield from _unread(config)
        yield from _critic(config)
    if config.train.loss_type == POLICY_LOSS and not config.train.custom_loss_function_path:
        yield from _supervised(config)
        yield from _clip(config)
        yield from _corrections(config)
        yield from _aggregation(config)


def notices(config: Config) -> list[str]:
    """Sentences about settings that are legal and seldom meant."""
    train = settle(config.train)
    if train.loss_type == SFT_LOSS:
        return []
    found = [*_distillation_notices(config), *_estimator_notices(config)]
    if train.loss_type == POLICY_LOSS and not train.custom_loss_function_path:
        found += _loss_notices(config)
    return found


def _kl(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.kl_coef > 0 and train.kl_loss_coef > 0:
        yield conflict(
            f"kl_coef = {train.kl_coef} and kl_loss_coef = {train.kl_loss_coef}",
            ["train.kl_coef", "train.kl_loss_coef"],
            why="each takes KL to the reference model into account, one in the reward and one in the loss: it would "
            "count twice",
            fix="set one of them to 0",
        )


def _groups(config: Config) -> Iterator[Problem]:
    rollout, train = config.rollout, config.train
    name, own = train.advantage_estimator, rollout.n_samples_per_prompt
    n = max((task.n_samples_per_prompt or own for task in config.data.tasks), default=own)
    if rollout.rollout_function_path:
        return  # groups are as large as the function makes them
    if name in GROUPED and n == 1 and train.loss_type == POLICY_LOSS:
        yield conflict(
            f"advantage_estimator = {name} with n_samples_per_prompt = 1",
            ["rollout.n_samples_per_prompt", "train.advantage_estimator"],
            why="a reward is compared with the others of its group; alone, every advantage is 0 and nothing is learnt",
            fix="set n_samples_per_prompt to 2 or more, or advantage_estimator to reinforce_plus_plus",
        )
    elif name == "pass_at_k" and train.pass_k >= n > 1:
        few = "holds no set of that size" if train.pass_k > n else "is one set, so every advantage is 0"
        yield conflict(
            f"pass_k = {train.pass_k} with n_samples_per_prompt = {n}",
            ["train.pass_k", "rollout.n_samples_per_prompt"],
            why=f"the best of pass_k samples is compared over sets of the group, and a group of {n} {few}",
            fix=f"set pass_k to at most {n - 1}, or n_samples_per_prompt to {train.pass_k + 1} or more",
        )


def _unread(config: Config) -> Iterator[Problem]:
    """Keys that the estimator does not read."""
    train = config.train
    name = train.advantage_estimator
    if name not in ALGORITHMS or name == "sft":
        return
    for key, readers in SELECTIVE.items():
        if not changed(train, [key]) or name in readers:
            continue
        yield conflict(
            f"{key} = {show(getattr(train, key))} with advantage_estimator = {name}",
            [f"train.{key}", "train.advantage_estimator"],
            why=f"{name} does not read {key}; {', '.join(readers)} {'does' if len(readers) == 1 else 'do'}",
            fix=f"leave {key} out, or set advantage_estimator = {readers[0]} (both in the same [[stage]])",
        )
    discounts = name == "ppo" or name == "reinforce_plus_plus" or train.credit_level != "trajectory"
    if name in SELECTIVE["gae_gamma"] and changed(train, ["gae_gamma"]) and not discounts:
        yield conflict(
            f"gae_gamma = {train.gae_gamma} with advantage_estimator = {name} and credit_level = trajectory",
            ["train.gae_gamma", "train.advantage_estimator"],
            why="a reward that is credited to the whole response is not discounted along it",
            fix="leave gae_gamma out, or set credit_level to turn or token",
        )


def _critic(config: Config) -> Iterator[Problem]:
    train, steps = config.train, config.rollout.num_rollout
    if train.advantage_estimator == "ppo" and 0 < steps <= train.num_critic_only_steps:
        yield conflict(
            f"num_critic_only_steps = {train.num_critic_only_steps} with num_rollout = {steps}",
            ["train.num_critic_only_steps", "rollout.num_rollout"],
            why="only the critic would learn, in every step of the stage",
            fix=f"set num_critic_only_steps below {steps}, or raise num_rollout",
        )


def _teacher(config: Config) -> Iterator[Problem]:
    train = config.train
    if _distils(train) and not train.teacher_load and not _may_bring_teacher(config):
        reader = _distils(train)
        yield conflict(
            f"{reader} has no teacher",
            [f"train.{reader.partition(' ')[0]}", "train.teacher_load"],
            why="teacher_load is empty, and no plugin or function is named that could set sample.teacher_log_probs",
            fix="--teacher-load DIR",
        )
    temperature = config.rollout.rollout_temperature
    if train.teacher_load and train.teacher_place == "engine" and temperature != 1:
        yield conflict(
            f"teacher_place = engine with rollout_temperature = {temperature:g}",
            ["train.teacher_place", "rollout.rollout_temperature"],
            why="an engine scores at temperature 1; the student's log-probs are at the temperature of the draw",
            fix="set teacher_place = trainer, which scores at the draw's temperature, or rollout_temperature = 1",
        )


def _distils(train: Any) -> str:
    """What asks for a teacher; empty where nothing does."""
    if train.advantage_estimator == "on_policy_distillation" and not train.custom_advantage_function_path:
        return "advantage_estimator = on_policy_distillation"
    return f"opd_kl_coef = {train.opd_kl_coef}" if train.opd_kl_coef > 0 else ""


def _may_bring_teacher(config: Config) -> bool:
    named = any(getattr(getattr(config, part), key) for part, keys in BRING_TEACHER.items() for key in keys)
    return named or bool(config.plugins) or any(task.generate or task.reward for task in config.data.tasks)


def _supervised(config: Config) -> Iterator[Problem]:
    rollout, train = config.rollout, config.train
    if train.advantage_estimator == "sft" and not rollout.rollout_function_path:
        yield conflict(
            "advantage_estimator = sft with loss_type = policy_loss",
            ["train.advantage_estimator", "train.loss_type"],
            why="every sampled token has the advantage 1: the policy is pushed towards whatever it says",
            fix="set loss_type = sft_loss to train on labels, or name an estimator that reads rewards",
        )


def _clip(config: Config) -> Iterator[Problem]:
    train = settle(config.train)
    if 0 < train.eps_clip_c <= 1:
        yield conflict(
            f"eps_clip_c = {train.eps_clip_c}",
            ["train.eps_clip_c"],
            why="dual clip bounds a ratio above 1; at 1 or below it stops tokens that have not moved",
            fix="set eps_clip_c to 3, or to 0 to switch it off",
        )
    elif train.eps_clip_c and train.policy_objective != "clip":
        yield conflict(
            f"eps_clip_c = {train.eps_clip_c} with policy_objective = {train.policy_objective}",
            ["train.eps_clip_c", "train.policy_objective", "train.advantage_estimator"],
            why="dual clip belongs to the clipped ratio; cispo bounds its weights by eps_clip_high",
            fix="leave eps_clip_c out, or set policy_objective = clip",
        )


def _corrections(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.use_tis and train.use_rollout_logprobs:
        yield conflict(
            "use_tis with use_rollout_logprobs",
            ["train.use_tis", "train.use_rollout_logprobs"],
            why="with use_rollout_logprobs the policy's ratio is taken against the engine already; use_tis would "
            "count the gap between engine and trainer twice",
            fix="--no-use-tis   or   --no-use-rollout-logprobs",
        )
    low, high = train.tis_clip_low, train.tis_clip
    if train.use_tis and low > high:
        yield _bounds("tis_clip_low", low, "tis_clip", high, "no weight lies between them")
    low, high = train.rs_lower_bound or 1 / train.rs_upper_bound, train.rs_upper_bound
    if train.use_rs and low > high:
        yield _bounds("rs_lower_bound", low, "rs_upper_bound", high, "every sample would be rejected (0 is 1 / upper)")


def _bounds(low_key: str, low: float, high_key: str, high: float, why: str) -> Problem:
    return conflict(
        f"{low_key} = {low:g} is above {high_key} = {high:g}",
        [f"train.{low_key}", f"train.{high_key}"],
        why=why,
        fix=f"set {low_key} below 1 and {high_key} above it",
    )


def _aggregation(config: Config) -> Iterator[Problem]:
    train = settle(config.train)
    if train.loss_divisor and train.loss_aggregation != "constant":
        yield conflict(
            f"loss_divisor = {train.loss_divisor} with loss_aggregation = {train.loss_aggregation}",
            ["train.loss_divisor", "train.loss_aggregation", "train.advantage_estimator"],
            why="only the constant aggregation divides by it",
            fix="leave loss_divisor out, or set loss_aggregation = constant",
        )


def _distillation_notices(config: Config) -> list[str]:
    train, found = config.train, []
    reader = _distils(train)
    if reader and not train.teacher_load and _may_bring_teacher(config):
        found.append(f"{reader}: teacher_load is empty, so every sample has to bring teacher_log_probs")
    if train.teacher_load and not reader:
        found.append("teacher_load is set and nothing reads it; set opd_kl_coef, or on_policy_distillation")
    if reader.startswith("advantage_estimator") and train.opd_kl_coef > 0:
        found.append(
            f"opd_kl_coef = {train.opd_kl_coef} adds to on_policy_distillation's own term: the teacher counts "
            f"{1 + train.opd_kl_coef:g} times"
        )
    return found


def _estimator_notices(config: Config) -> list[str]:
    train, found = config.train, []
    if train.custom_advantage_function_path:
        return []
    if train.advantage_estimator == "ppo":
        if not train.num_critic_only_steps:
            found.append(
                "ppo with num_critic_only_steps = 0: the policy learns from the first step on from a critic that has "
                "seen nothing; a few steps of the critic alone cost little"
            )
        if train.critic_lr < train.lr:
            found.append(
                f"ppo with critic_lr = {train.critic_lr:g} below lr = {train.lr:g}: the critic will lag behind the "
                "policy that it judges"
            )
    return found


def _loss_notices(config: Config) -> list[str]:
    train, found = settle(config.train), []
    if train.kl_loss_coef > 0 and train.kl_loss_type == "k1" and not train.use_unbiased_kl:
        found.append("kl_loss_type = k1 has no gradient towards the reference in expectation; k3 is the usual choice")
    if train.importance_level != "token" and train.policy_objective == "clip" and train.eps_clip >= NARROW:
        found.append(
            f"importance_level = {train.importance_level} with eps_clip = {train.eps_clip:g}: a sequence's ratio is a "
            "geometric mean and hardly leaves 1, so the clip never acts; GSPO has 3e-4 and 4e-4"
        )
    if train.policy_objective == "cispo" and train.eps_clip < 1:
        found.append(
            f"policy_objective = cispo with eps_clip = {train.eps_clip:g}: weights are raised to at least "
            f"{1 - train.eps_clip:g}; the published form has no lower bound (eps_clip = 1)"
        )
    if train.use_tis and train.tis_clip < 1:
        found.append(f"tis_clip = {train.tis_clip:g} is below 1: tokens on which both sides agree are cut too")
    cut = config.rollout.rollout_top_p < 1 or config.rollout.rollout_top_k > 0
    if cut and (train.use_tis or train.use_rs or train.use_rollout_logprobs):
        found.append(
            "rollout_top_p or rollout_top_k cuts the distribution that the engine's log-probs are of, and the "
            "trainer's are of the whole one: the ratio between them holds that difference too"
        )
    one_step = train.num_steps_per_rollout == 1 and train.global_batch_size == 0
    if train.use_opsm and one_step and not train.use_rollout_logprobs:
        found.append(
            "use_opsm with one optimizer step a rollout masks nothing, since old and new log-probs are the same; "
            "compare with the engine's: --use-rollout-logprobs"
        )
    if not train.custom_tis_function_path:
        for switch, keys in SWITCHES.items():
            idle = changed(train, keys) if not getattr(train, switch) else []
            if idle:
                found.append(f"{', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing without {switch}")
    return found
