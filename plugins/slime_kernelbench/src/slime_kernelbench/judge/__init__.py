"""The judge of candidates: a `Verdict` on a source that answers a problem.

    static policy -> sandboxed import -> (compile for the target) -> correctness -> speed, where there is a GPU

Three kinds of processes: the reference's makes inputs and expected values, the candidate's runs the candidate on
inputs, and this one, which neither ever entered, compares bytes.
"""

from __future__ import annotations

from slime_kernelbench.judge.local import LocalJudge as LocalJudge
from slime_kernelbench.judge.options import JudgeOptions as JudgeOptions

__all__ = ["JudgeOptions", "LocalJudge"]
