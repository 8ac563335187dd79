"""Code in, what it printed out: one sandbox for the whole run, opened by the first piece of code."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from slime_core import Context
from slime_core.errors import SandboxError
from slime_sandbox import Limits, Policy, Sandbox

TRIES = 2
LIMITS = ("timeout", "memory", "too_much_output")


class Broken(Exception):
    """The sandbox failed, and not the code in it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of `custom_config_path`. Seconds, bytes, characters."""

    max_turns: int = 8  # the model's; code of the last one is not run
    wall_seconds: float = 10.0  # of one piece of code
    memory_bytes: int = 512 << 20
    output_chars: int = 2000  # that the model reads; the rest is cut
    at_once: int = 16  # pieces of code
    preload: tuple[str, ...] = ()  # modules that code finds imported already, such as numpy and sympy


class Interpreter:
    """Python for a model, behind `slime_sandbox`. Belongs to one event loop until :meth:`aclose`."""

    def __init__(self) -> None:
        self._opening: asyncio.Task[Sandbox] | None = None
        self._seats = asyncio.Semaphore(1)

    async def run(self, source: str, settings: Settings, ctx: Context) -> str:
        """What ``source`` prints, its traceback included, and in words which limit ended it.

        Raises:
            Broken: the sandbox could not run it.
        """
        if self._opening is None:
            self._seats = asyncio.Semaphore(settings.at_once)
            rules = ctx.config.reward
            policy = Policy(level=rules.sandbox_level, i_trust_this_code=rules.i_trust_this_code)
            self._opening = asyncio.ensure_future(Sandbox.open(policy, preload=("tool_inside", *settings.preload)))
        box = await asyncio.shield(self._opening)
        limits = Limits(wall_seconds=settings.wall_seconds, memory_bytes=settings.memory_bytes)
        why = ""
        for _ in range(TRIES):
            async with self._seats:
                outcome = await box.run("tool_inside:main", source.encode(errors="replace"), limits)
            if outcome.status != "infra":
                ended = f"\nThe code {outcome.reason}." if outcome.status in LIMITS or outcome.signal else ""
                return shortened(outcome.stdout.strip("\n"), settings.output_chars) + ended
            why = outcome.reason
        raise Broken(why)

    async def aclose(self) -> None:
        """End the sandbox."""
        opening, self._opening = self._opening, None
        with suppress(SandboxError):  # it did not open, which who asked for it was told
            if opening is not None:
                await (await opening).aclose()


def shortened(text: str, length: int) -> str:
    """A text whose middle is left out where it has more than ``length`` characters."""
    if len(text) <= length:
        return text
    head, tail = text[: length // 2], text[len(text) - length // 2 :]
    return f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"
