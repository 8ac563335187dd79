"""Rules about the keys of algorithms: conflicts, and sentences about what is seldom meant.

A key that nothing would read is an error here and not a surprise in a curve. Stages that do not learn by an estimator
are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.algorithms import algorithms
from slime_core.config.fields import changed
from slime_core.config.presets import settle
from slime_core.config.problems import Problem, conflict
from slime_core.config.schema import TrainSection
from slime_core.config.values import show

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SFT_LOSS, POLICY_LOSS = "sft_loss", "policy_loss"
NARROW = 0.1  # an eps_clip that no sequence's geometric mean ratio reaches

UNIVERSAL = ("disable_grpo_std_normalization",)
"""[train] keys that mean the same to estimators that do not read them: those divide by nothing anyway."""

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
        yield from _own(config)
    if config.train.loss_type == POLICY_LOSS and not config.train.custom_loss_function_path:
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


def largest_group(config: Config) -> int:
    """Samples of a prompt, where the task of most has its own number of them."""
    own = config.rollout.n_samples_per_prompt
    return max((task.n_samples_per_prompt or own for task in config.data.tasks), default=own)


def _groups(config: Config) -> Iterator[Problem]:
    train = config.train
    algorithm = algorithms().get(train.advantage_estimator)
    if config.rollout.rollout_function_path:
        return  # groups are as large as the function makes them
    if algorithm and algorithm.groups and largest_group(config) == 1 and train.loss_type == POLICY_LOSS:
        yield conflict(
            f"advantage_estimator = {algorithm.name} with n_samples_per_prompt = 1",
            ["rollout.n_samples_per_prompt", "train.advantage_estimator"],
            why="a reward is compared with the others of its group; alone, every advantage is 0 and nothing is learnt",
            fix="set n_samples_per_prompt to 2 or more, or advantage_estimator to reinforce_plus_plus",
        )


def selective() -> dict[str, tuple[str, ...]]:
    """[train] keys that some estimators read and others do not, with those that do.

    Setting one says what is believed.
    """
    learners = [algorithm for algorithm in algorithms().values() if algorithm.terms]
    keys = dict.fromkeys(key for one in learners for key in one.options if key in TrainSection.model_fields)
    readers = {key: tuple(one.name for one in learners if key in one.options) for key in keys if key not in UNIVERSAL}
    return {key: names for key, names in readers.items() if len(names) < len(learners)}


def _unread(config: Config) -> Iterator[Problem]:
    """Keys that the estimator does not read."""
    train = config.train
    algorithm = algorithms().get(train.advantage_estimator)
    if algorithm is None or not algorithm.terms:
        return
    name = algorithm.name
    for key, readers in selective().items():
        if not changed(train, [key]) or name in readers:
            continue
        yield conflict(
            f"{key} = {show(getattr(train, key))} with advantage_estimator = {name}",
            [f"train.{key}", "train.advantage_estimator"],
            why=f"{name} does not read {key}; {', '.join(readers)} {'does' if len(readers) == 1 else 'do'}",
            fix=f"leave {key} out, or set advantage_estimator = {readers[0]} (both in the same [[stage]])",
        )
    discounts = algorithm.discounts or train.credit_level != "trajectory"
    if "gae_gamma" in algorithm.options and changed(train, ["gae_gamma"]) and not discounts:
        yield conflict(
            f"gae_gamma = {train.gae_gamma} with advantage_estimator = {name} and credit_level = trajectory",
            ["train.gae_gamma", "train.advantage_estimator"],
            why="a reward that is credited to the whole response is not discounted along it",
            fix="leave gae_gamma out, or set credit_level to turn or token",
        )


def _own(config: Config) -> Iterator[Problem]:
    """What the algorithm's own file refuses."""
    algorithm = algorithms().get(config.train.advantage_estimator)
    if algorithm and algorithm.conflicts:
        yield from algorithm.conflicts(config)


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
    algorithm = algorithms().get(train.advantage_estimator)
    if algorithm and algorithm.distils and not train.custom_advantage_function_path:
        return f"advantage_estimator = {algorithm.name}"
    return f"opd_kl_coef = {train.opd_kl_coef}" if train.opd_kl_coef > 0 else ""


def _may_bring_teacher(config: Config) -> bool:
    named = any(getattr(getattr(config, part), key) for part, keys in BRING_TEACHER.items() for key in keys)
    return named or bool(config.plugins) or any(task.generate or task.reward for task in config.data.tasks)


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
            f"opd_kl_coef = {train.opd_kl_coef} adds to {train.advantage_estimator}'s own term: the teacher counts "
            f"{1 + train.opd_kl_coef:g} times"
        )
    return found


def _estimator_notices(config: Config) -> list[str]:
    algorithm = algorithms().get(config.train.advantage_estimator)
    if config.train.custom_advantage_function_path or not algorithm or not algorithm.notices:
        return []
    return list(algorithm.notices(config))


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
