"""A sandbox that opens when it is first needed: each stage of the judge has one, and who needs none forks none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from slime_kernelbench.judge.options import JudgeOptions
from slime_sandbox import Policy, Sandbox


class OpenedBox:
    """The sandbox of one stage, with the isolation that the judge's options ask for. Belongs to one event loop.

    Example:
        opened = OpenedBox(options, ("slime_kernelbench.judge.ahead",))
        box = await opened.box()        # from now on the same one
        await opened.aclose()
    """

    def __init__(
        self,
        options: JudgeOptions,
        preload: Sequence[str],
        *,
        gpu: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``preload`` are modules that its processes have; the rest is as in `Policy`."""
        self._rules = Policy(
            level=options.level,
            i_trust_this_code=options.i_trust_this_code,
            gpu=gpu,
            environment=dict(environment or {}),
        )
        self._preload, self._opening = tuple(preload), asyncio.Lock()
        self._box: Sandbox | None = None

    async def box(self) -> Sandbox:
        """The open sandbox; however many ask, one is opened.

        Raises:
            SandboxError: there is none of that level here, or it cannot be started.
        """
        async with self._opening:
            if self._box is None:
                self._box = await Sandbox.open(self._rules, preload=self._preload)
            return self._box

    async def aclose(self) -> None:
        """End its processes; the next who asks opens another."""
        box, self._box = self._box, None
        if box is not None:
            await box.aclose()
