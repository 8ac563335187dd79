"""A judge that is asked on, until it has failed too often in a row: then the run ends, and says why.

One candidate that cannot be judged is masked. A judge that can judge nothing (no sandbox, no service) would mask every
sample, and the run would generate for ever and train nothing.
"""

from __future__ import annotations

from slime_core.errors import SandboxError
from slime_kernelbench.types import Judge, KernelProblem, Verdict


class Patient:
    """``judge`` with a limit; ``most`` verdicts in a row that are none raise, 0 is no limit.

    Example:
        judge = Patient(LocalJudge(options), most=64)
    """

    def __init__(self, judge: Judge, most: int) -> None:
        self._judge, self._most, self._row = judge, most, 0

    async def judge(self, source: str, problem: KernelProblem) -> Verdict:
        """The verdict.

        Raises:
            SandboxError: SBX140 too many candidates in a row could not be judged.
        """
        verdict = await self._judge.judge(source, problem)
        self._row = self._row + 1 if verdict.status == "infra" else 0
        if self._most and self._row >= self._most:
            reason = verdict.diagnostics[0].message if verdict.diagnostics else "the judge gave no reason"
            raise SandboxError(
                f"{self._row} candidates in a row could not be judged",
                code="SBX140",
                where="plugin.kernelbench.max_unjudged",
                why=reason,
                fix="slime doctor   (and, with judge_url, the log of slime kernelbench serve)",
            )
        return verdict

    async def aclose(self) -> None:
        """End the judge."""
        await self._judge.aclose()
