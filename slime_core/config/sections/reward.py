"""Keys of [reward]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from slime_core.config.problems import Problem, conflict
from slime_core.config.sections import LIMIT, ResumeClass, Section, key

REWARDS = ResumeClass("unsafe", "other rewards")


class RewardSection(Section):
    """How samples are judged."""

    rm_type: str = key("", "A reward registered by name.", REWARDS)
    custom_rm_path: str = key("", "Function by path: async reward(args, sample, **kw) -> float.", REWARDS, fills=True)
    group_rm: bool = key(False, "custom_rm_path gets the whole group's samples.", REWARDS)
    reward_key: str = key("", "Key of a dict reward that trains; the others become metrics.", REWARDS)
    reward_weights: dict[str, float] = key({}, "Weight of each of Reward.terms; empty trains on value.", REWARDS)
    reward_terms_normalize: bool = key(
        False, "Normalise each term in its group before they are weighed and added (GDPO).", REWARDS
    )
    overlong_buffer_len: int = key(0, "Last tokens before the limit that are penalised; 0 is off.", REWARDS, ge=0)
    overlong_penalty_factor: float = key(1.0, "Penalty at the limit.", REWARDS, ge=0)
    mask_truncated: bool = key(False, "Truncated samples do not train, but count in their group.", REWARDS)
    reward_timeout: float = key(60.0, "Seconds for one group's reward.", LIMIT, gt=0)
    custom_reward_post_process_path: str = key("", "Function by path over a step's samples.", REWARDS, fills=True)
    sandbox_level: Literal["auto", "strong", "medium", "none"] = key(
        "auto",
        "Isolation of code from a model or data set; auto: strong, else medium; none needs i_trust_this_code.",
        LIMIT,
    )
    i_trust_this_code: bool = key(
        False, "With sandbox_level = none: that code runs with your rights; only time and memory end it.", LIMIT
    )

    def conflicts(self, limit: int, *, offline: bool) -> Iterator[Problem]:
        """What cannot hold together, with responses of at most ``limit`` tokens."""
        if self.group_rm and not self.custom_rm_path:
            yield conflict(
                "group_rm is set and custom_rm_path is not",
                ["reward.group_rm"],
                why="group_rm says how custom_rm_path is called",
                fix="name the function: --custom-rm-path FILE.py:FUNCTION",
            )
        if self.overlong_buffer_len > limit and not offline:
            yield conflict(
                f"overlong_buffer_len = {self.overlong_buffer_len} is more than rollout_max_response_len = {limit}",
                ["reward.overlong_buffer_len", "rollout.rollout_max_response_len"],
                why="the penalty grows over the last overlong_buffer_len tokens of a longest response",
                fix=f"set overlong_buffer_len to at most {limit}; a fifth of it is usual",
            )
        if self.reward_terms_normalize and not self.reward_weights and not offline:
            yield conflict(
                "reward_terms_normalize without reward_weights",
                ["reward.reward_terms_normalize", "reward.reward_weights"],
                why="nothing says which terms are normalised and added",
                fix="name them: reward_weights = { correct = 1.0, format = 0.2 }",
            )
