"""Weighed terms: the rewards of several graders as one Reward with each as a term."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slime_core import Reward


def mixed(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """The weighed sum, and each grader's value as a term of its name.

    An infrastructure error of one grader is one of the whole: a sum without a term would be another reward. Failed is
    what every grader with a weight calls failed.

    Example:
        mixed({"math": Reward(value=1.0), "format": Reward(value=0.0)}, {"math": 1.0, "format": 0.2}).value    # 1.0
    """
    broken = [f"{name}: {reward.reason}" for name, reward in rewards.items() if reward.kind == "infra_error"]
    if broken:
        return Reward(value=0.0, kind="infra_error", reason="; ".join(broken))
    value = math.fsum(weights[name] * reward.value for name, reward in rewards.items())
    failed = [reward for name, reward in rewards.items() if weights[name] and reward.kind == "failed"]
    reason = "; ".join(dict.fromkeys(reward.reason for reward in failed if reward.reason))
    whole = len(failed) == sum(1 for name in rewards if weights[name])
    terms = {name: reward.value for name, reward in rewards.items()}
    return Reward(value=value, kind="failed" if failed and whole else "score", terms=terms, reason=reason)
