"""Rewards that look at a whole group: one Reward a sample.

majority    1 for the answer that most samples give, as if it were the label (no label is needed)
brevity     the reward of each right sample, less up to a half for length, from the shortest to the longest right one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from slime_core import Reward, Sample
from slime_rm_math.graders.verdict import failed

LONGEST_LOSES = 0.5


def majority(forms: Sequence[str | None]) -> list[Reward]:
    r"""1 for the most frequent answer, 0 for others; the one said first wins a tie.

    Source: Zuo et al. 2025, "TTRL: Test-Time Reinforcement Learning", arXiv 2504.16084.

    Args:
        forms: of each sample's boxed answer, equal ones as the same text; None where it has none.

    Example:
        majority(["7", "7", "8"])    # 1, 1 and 0
    """
    votes = Counter(form for form in forms if form is not None)
    best = max(votes.values(), default=0)
    winner = next((form for form in forms if form is not None and votes[form] == best), None)
    return [failed("no \\boxed{} in it") if form is None else Reward(value=float(form == winner)) for form in forms]


def brevity(samples: Sequence[Sample], rewards: Sequence[Reward]) -> list[Reward]:
    """Rewards of right samples (above 0), less ``0.5 (length - shortest) / (longest - shortest)`` of themselves.

    Lengths are response tokens of the group's right samples. After the length reward of Kimi k1.5 (Kimi Team 2025,
    arXiv 2501.12599, section 2.3.3), which shares its half between bonus and malus. Wrong ones are left as they are.

    Example: right samples of 10, 20 and 30 tokens get 1, 0.75 and 0.5.
    """
    right = [reward.kind == "score" and reward.value > 0 for reward in rewards]
    lengths = [sample.response_length for sample, good in zip(samples, right, strict=True) if good]
    if not lengths or min(lengths) == max(lengths):
        return list(rewards)
    shortest, span = min(lengths), max(lengths) - min(lengths)
    return [
        replace(reward, value=reward.value * (1 - LONGEST_LOSES * (sample.response_length - shortest) / span))
        if good
        else reward
        for sample, reward, good in zip(samples, rewards, right, strict=True)
    ]
