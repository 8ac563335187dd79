"""The plugin `compat`: used by the core for functions by path that were written for THUDM/slime.

Functions by path find it by name; no `--plugin` is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime_compat.finder import Finder, real_slime
from slime_core import Check, CheckResult, hookimpl

if TYPE_CHECKING:
    import click

    from slime_compat.server import GenerateServer
    from slime_core.compat.session import GenerationCall


class Compat:
    """Implementation of the interface of `slime_core.compat.modules`."""

    slime_api = 1

    def modules(self, *, megatron: bool) -> Finder:
        """Serve slime's modules until the finder is removed; ``megatron`` says whether Megatron trains."""
        return Finder.install(megatron=megatron)

    def server(self, calls: Mapping[int, GenerationCall], token: str = "") -> GenerateServer:
        """A `/generate` server that starts when its port is first needed."""
        from slime_compat.server import GenerateServer

        return GenerateServer(calls, token)

    @hookimpl
    def slime_command(self) -> click.Group:
        """`slime compat check|flags`."""
        from slime_compat.launch.command import compat

        return compat

    @hookimpl
    def slime_checks(self) -> list[Check]:
        """`compat: modules`."""
        return [Check(name="modules", run=check_modules)]


def check_modules() -> CheckResult:
    """Whether slime's modules can be served, or a package named slime is in their place."""
    if place := real_slime():
        fix = "pip uninstall slime   (or take its folder off PYTHONPATH)"
        return CheckResult(status="warn", found=f"functions that import slime are refused: {place}", fix=fix)
    return CheckResult(status="ok", found="functions written for THUDM/slime can import slime.utils and slime.rollout")
