"""The stage that compiles for the target ahead of time: the compiler's process asked, what it says judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_kernelbench.judge.candidate import Trial
from slime_kernelbench.judge.opened import OpenedBox
from slime_kernelbench.judge.options import JudgeOptions
from slime_kernelbench.judge.wire import pack, unpack
from slime_kernelbench.types import Diagnostic
from slime_sandbox import Limits

ENTRY = "slime_kernelbench.judge.ahead:main"
PRELOAD = ("slime_kernelbench.judge.folders", "slime_kernelbench.judge.ahead")


class Compiler:
    """Compiles candidates' kernels for a GPU that this machine need not have."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._opened = OpenedBox(options, PRELOAD)

    async def aclose(self) -> None:
        """End its processes."""
        await self._opened.aclose()

    async def check(self, source: str, trial: Trial) -> None:
        """Add to ``trial`` what compiling the kernels that it launched brings up; a failure is a ``compile_error``."""
        trial.reached = "compile"
        box = await self._opened.box()
        request = {"source": source, "target": self._options.target, "signatures": trial.signatures}
        seconds = self._options.seconds
        limits = Limits(wall_seconds=seconds, cpu_seconds=int(seconds) + 1, memory_bytes=self._options.memory_bytes)
        outcome = await box.run(ENTRY, pack(request), limits)
        if outcome.status == "infra":
            trial.status = "infra"
            trial.diagnostics.append(Diagnostic(stage="compile", kind="infra", message=outcome.reason[:300]))
            return
        if outcome.status != "ok":
            trial.status = "timeout" if outcome.status == "timeout" else "compile_error"
            trial.diagnostics.append(Diagnostic(stage="compile", kind=outcome.status, message=outcome.reason[:300]))
            return
        try:
            answer = unpack(outcome.result)
            diagnostics = [_diagnostic(one) for one in answer.get("kernels", [answer])]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            diagnostics = [Diagnostic(stage="compile", kind="protocol", message=str(error)[:200])]
        failures = [one for one in diagnostics if one is not None]
        if failures:
            trial.status = "compile_error"
            trial.diagnostics.extend(failures[:4])
        else:
            trial.reached = "correctness"


def _diagnostic(kernel: Mapping[str, Any]) -> Diagnostic | None:
    """What is wrong with one kernel, or None."""
    error = kernel.get("error")
    if isinstance(error, dict):
        line = error.get("line")
        return Diagnostic(
            stage="compile",
            kind=str(error.get("kind"))[:60],
            message=str(error.get("message"))[:600],
            line=line if isinstance(line, int) else None,
            excerpt=str(error.get("excerpt", ""))[:200],
        )
    shared, most = kernel.get("shared", 0), kernel.get("most_shared", 0)
    if isinstance(shared, int) and isinstance(most, int) and shared > most:
        message = f"kernel {kernel['kernel']} asks for {shared} bytes of shared memory a block; the target has {most}"
        return Diagnostic(stage="compile", kind="OutOfResources", message=message)
    return None
