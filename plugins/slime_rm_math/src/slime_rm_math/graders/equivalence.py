"""Whether an answer is a label's equal: the same text, then plain numbers, then math-verify in a worker process."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import OrderedDict

from slime_rm_math.graders import forms, hostile, plain
from slime_rm_math.graders.answers import canonical
from slime_rm_math.graders.notation import latex
from slime_rm_math.graders.pool import GraderPool
from slime_rm_math.graders.verdict import RIGHT, WRONG, GradingVerdict, unjudged, unparsable

EMPTY = ("\\varnothing", "\\emptyset")  # the first of which math-verify does not read
FORMS = 4096  # answers whose form is kept


class Equivalence:
    """Asks the cheapest that can tell; workers start with the first answer that needs one.

    Example:
        await Equivalence(workers=2, seconds=1.5, memory_mb=512).verdict(r"\\frac{1}{2}", "0.5")    # RIGHT
    """

    def __init__(self, *, workers: int, seconds: float, memory_mb: int) -> None:
        self._workers = workers or min(os.cpu_count() or 1, 8)
        self._seconds, self._memory = seconds, memory_mb
        self._pool: tuple[int, GraderPool] | None = None
        self._lock = threading.Lock()
        self._forms: OrderedDict[str, str] = OrderedDict()

    async def verdict(self, answer: str, label: str, *, within: float = math.inf) -> GradingVerdict:
        """Right, wrong, unparsable, or infra_error where no worker could tell.

        Args:
            answer: of a model.
            label: of a row.
            within: seconds that it may wait, for a worker and for the verdict.
        """
        answer, label = _readable(answer), _readable(label)
        verdict = self.at_once(answer, label)
        if verdict is not None:
            return verdict
        try:
            async with asyncio.timeout(None if math.isinf(within) else within):
                return await asyncio.wrap_future(self.pool().ask(label, answer))
        except TimeoutError:
            return unjudged(f"no worker was free in {within:g} s; raise plugin.rm_math.grader_workers")

    def verdict_now(self, answer: str, label: str) -> GradingVerdict:
        """As :meth:`verdict`, for code that is not async: it waits for as long as it takes."""
        answer, label = _readable(answer), _readable(label)
        return self.at_once(answer, label) or self.pool().ask(label, answer).result()

    async def form(self, text: str, *, within: float = math.inf) -> str:
        r"""One text for all answers that are equal to this one: what answers are counted by.

        The text itself, without what LaTeX does not print, where no worker reads it in time.

        Example:
            await equal.form(r"\frac{1}{2}"), await equal.form("x^2+2x+1")    # "0.5", "x**2 + 2*x + 1"
        """
        text = _readable(text.strip()).replace(*EMPTY)
        if len(text) > hostile.LONGEST:
            return text
        number = forms.at_once(text)
        if number is not None or text in self._forms:
            return number if number is not None else self._forms[text]
        form = "" if hostile.refusal(text) else await self._query(text, within)
        if not form:
            return canonical(text)
        self._forms[text] = form
        if len(self._forms) > FORMS:
            self._forms.popitem(last=False)
        return form

    async def _query(self, text: str, within: float) -> str:
        try:
            async with asyncio.timeout(None if math.isinf(within) else within):
                return await asyncio.wrap_future(self.pool().form(text))
        except TimeoutError:
            return ""

    @staticmethod
    def at_once(answer: str, label: str) -> GradingVerdict | None:
        """The verdict where no worker is needed, else None."""
        if (equal := plain.compare(answer, label)) is not None:
            return RIGHT if equal else WRONG
        if not answer.strip():
            return unparsable("an empty answer")
        if len(answer) <= hostile.LONGEST and canonical(answer) == canonical(label):
            return RIGHT
        if reason := hostile.refusal(label):
            return unjudged(f"the label is refused: {reason}")
        return unparsable(reason) if (reason := hostile.refusal(answer)) else None

    def pool(self) -> GraderPool:
        """The workers of this process; a fork gets its own."""
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():
                pool = GraderPool(workers=self._workers, seconds=self._seconds, memory_mb=self._memory)
                self._pool = (os.getpid(), pool)
            return self._pool[1]

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            if self._pool is not None and self._pool[0] == os.getpid():
                self._pool[1].close()
            self._pool = None


def _readable(text: str) -> str:
    """As LaTeX, unless it is refused for its length anyway."""
    return latex(text) if len(text) <= hostile.LONGEST else text
