"""`slime.rollout.rm_hub.deepscaler`, over slime-rm-math's grader of DeepScaleR."""

from __future__ import annotations

from slime_compat.served.grading_mathematics import extract_answer, grade_answer_sympy
from slime_rm_math.graders import deepscaler
from slime_rm_math.graders.answers import label_text


def get_deepscaler_rule_based_reward(response: str, label: str | float) -> int:
    """1 where the box after a chain of thought is the label's answer, else 0; raises as `is_equal` of math_utils."""
    solution, reference = deepscaler.solution(response), label_text(label)
    answer = None if solution is None else extract_answer(solution)
    return int(answer is not None and reference is not None and grade_answer_sympy(answer, reference))


__all__ = ["get_deepscaler_rule_based_reward"]
