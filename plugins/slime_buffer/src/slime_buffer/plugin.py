"""The plugin `buffer`: a run's side of a rollout buffer, its rules, and `slime buffer`.

`rollout.rollout_buffer_url` loads it without `--plugin`; the core then requests every training group from it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from slime_buffer import rules
from slime_core import hookimpl

if TYPE_CHECKING:
    import click

    from slime_buffer.rollout import BufferRollout
    from slime_core.config.problems import Problem
    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.types import Group


class Buffer:
    """One a run."""

    slime_api = 1

    @cached_property
    def _rollout(self) -> BufferRollout:
        from slime_buffer.rollout import BufferRollout

        return BufferRollout()

    @hookimpl
    def slime_config_rules(self, config: Config) -> list[Problem]:
        """What cannot hold together with `rollout_buffer_url`, and the token that it needs."""
        return [*rules.conflicts(config), *rules.incomplete(config)]

    @hookimpl
    async def slime_generate(self, group: Group, ctx: Context) -> Group:
        """Ask the buffer for a group and wait for it."""
        return await self._rollout.generate(group, ctx)

    @hookimpl
    async def slime_run_done(self, ctx: Context) -> None:
        """Acknowledge the groups that the run's ledger has."""
        await self._rollout.close()

    @hookimpl
    def slime_command(self) -> click.Group:
        """`slime buffer serve|stats|generate`."""
        from slime_buffer.command import buffer

        return buffer
