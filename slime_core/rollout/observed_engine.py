"""The run's engine with a span around each request, where a plugin observes spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.plugins import Plugins
    from slime_core.protocols import Engine
    from slime_core.types import Completion, GenerateRequest


def observed(engine: Engine, plugins: Plugins) -> Engine:
    """The engine, or one around it that shows its requests to the observers of the run."""
    around: Any = ObservedEngine(engine, plugins) if plugins.observed else engine
    return around  # type: ignore[no-any-return]


class ObservedEngine:
    """A `protocols.Engine` whose requests are spans ``request``; all else is the engine's own."""

    def __init__(self, engine: Engine, plugins: Plugins) -> None:
        self._engine, self._plugins = engine, plugins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        with self._plugins.span("request", sample=request.id, prompt=len(request.tokens)) as span:
            done = await self._engine.generate(request)
            span.facts |= {"tokens": len(done.tokens), "finish": done.finish, **done.seconds}
        return done
