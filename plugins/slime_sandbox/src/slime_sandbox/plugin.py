"""The plugin `sandbox`: rows of `slime doctor`. Everything else is a library that other plugins import."""

from __future__ import annotations

from slime_core import Check, hookimpl

slime_api = 1


@hookimpl
def slime_checks() -> list[Check]:
    """The level that this machine reaches, layer by layer, and whether a GPU computes in it."""
    from slime_sandbox import checks

    return [Check(name="level", run=checks.level), Check(name="gpu", run=checks.gpu)]
