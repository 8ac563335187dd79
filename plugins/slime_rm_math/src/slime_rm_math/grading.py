"""Exact match of a response with its label.

The rule, in full: blanks and newlines around the response are ignored; what is left must equal the label character for
character, so ``042``, ``+42`` and ``42.`` are wrong for ``42``; and the response must have ended by itself, an answer
that ran into the length limit is wrong.
"""

from __future__ import annotations

from slime_core import Reward, Sample, Status


def exact_match(sample: Sample) -> Reward:
    """1 where the response is the label, else 0.

    Example:
        exact_match(Sample(response="42", label="42", status=Status.COMPLETED)).value    # 1.0
    """
    right = sample.status is Status.COMPLETED and sample.response.strip() == str(sample.label)
    return Reward(value=float(right))
